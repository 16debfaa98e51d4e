//! Stopping: nothing new is read, what runs finishes, what waits is given back, every verdict is stored,
//! and nothing is left.

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use streamvisor::fail_point::{Fail, arm};
use streamvisor::prelude::*;
use streamvisor::{Child, Event, Mode, Remaining, ShutdownError, ShutdownReport};
use support::record::{GROUP, Gate, Heard, Recorder, SOON, fill, ms, stream_of, topology};
use support::*;
use tokio::sync::{OnceCell, oneshot};

const HOUR: Duration = Duration::from_secs(3600);

async fn in_hand(server: &Server, stream: &str, entries: i64) {
    let what = format!("{entries} entries are in hand");
    eventually(SOON, &what, || {
        server.xpending_count(stream, GROUP) == entries
    })
    .await;
}

async fn all_acknowledged(server: &Server, stream: &str) {
    let what = format!("nothing of {stream} is pending");
    eventually(SOON, &what, || server.xpending_count(stream, GROUP) == 0).await;
}

/// Those that were given back: claimable at once, however large the idle time that is asked for.
fn claimable_at_once(server: &Server, stream: &str) -> Vec<PendingEntry> {
    let mut pending = server.xpending(stream, GROUP);
    pending.retain(|(_, _, idle, _)| *idle > 24 * HOUR);
    pending
}

fn consumers(server: &Server, stream: &str) -> usize {
    let reply = server.command(&["XINFO", "CONSUMERS", stream, GROUP]);
    reply.as_array().len()
}

fn ids(remaining: &[Remaining]) -> Vec<String> {
    remaining.iter().map(|it| it.id.to_string()).collect()
}

fn alive_tasks() -> usize {
    tokio::runtime::Handle::current()
        .metrics()
        .num_alive_tasks()
}

/// The server hears of their ends a moment later than we do.
async fn no_connection_is_left(server: &Server) {
    eventually(SOON, "no connection is left", || {
        server.client_list().is_empty()
    })
    .await;
}

/// Neither a connection nor a task.
async fn nothing_is_left(server: &Server, tasks_before: usize) {
    no_connection_is_left(server).await;
    eventually(SOON, "no task is left", || alive_tasks() <= tasks_before).await;
}

/// Takes everything that is claimable at once and nothing else.
async fn heir(server: &Server, stream: &str) -> (Recorder, SupervisorHandle) {
    let recorder = Recorder::acking();
    let reclaim = Subscription::reclaim(stream, HOUR).block(ms(50));
    let supervisor = Supervisor::start(topology(&server.url()).subscribe(recorder.on(reclaim)))
        .await
        .unwrap();
    (recorder, supervisor)
}

// ---- the five steps -----------------------------------------------------------------------------------

#[tokio::test(flavor = "multi_thread")]
async fn what_runs_finishes_and_what_waits_is_given_back_at_once_as_never_started() {
    for version in Version::ALL {
        let server = Server::start(version);
        let stream = stream_of(&server, "steps");
        let gate = Gate::closed();
        let recorder = Recorder::behind(&gate);
        let tasks = alive_tasks();
        let tail = Subscription::tail(&*stream).workers(2);
        let supervisor = Supervisor::start(topology(&server.url()).subscribe(recorder.on(tail)))
            .await
            .unwrap();
        let entries = fill(&server, &stream, 50);
        in_hand(&server, &stream, 50).await;
        recorder.reaches(2).await;

        let stopping = tokio::spawn({
            let supervisor = supervisor.clone();
            async move { supervisor.shutdown().await }
        });
        // While the two still run.
        eventually(SOON, "48 are given back", || {
            claimable_at_once(&server, &stream).len() == 48
        })
        .await;
        for (id, _, _, count) in claimable_at_once(&server, &stream) {
            assert_eq!(count, 0, "{version}: {id} was never started");
        }
        let (heir, other) = heir(&server, &stream).await;
        heir.reaches(48).await;
        assert!(
            heir.calls().iter().all(|call| call.attempt == 1),
            "{version}"
        );
        assert!(!stopping.is_finished());
        assert_eq!((recorder.count(), recorder.running_now()), (2, 2));
        eventually(SOON, "its reader has gone", || {
            let connections = server.client_list();
            !connections.iter().any(|line| line.contains("/tail"))
        })
        .await;
        fill(&server, &stream, 50);
        in_hand(&server, &stream, 2).await;

        gate.open();
        let report = stopping.await.unwrap().unwrap();
        assert_eq!((report.settled, report.given_back), (2, 48), "{version}");
        assert!(report.left_running.is_empty() && report.unsettled.is_empty());
        assert_eq!(server.xpending_count(&stream, GROUP), 0, "{version}");
        other.shutdown().await.unwrap();
        // Both consumers had nothing pending in the end.
        assert_eq!(consumers(&server, &stream), 0, "{version}");
        let mut handled = [recorder.ids(), heir.ids()].concat();
        handled.sort_by_key(|id| id.parse::<streamvisor::EntryId>().unwrap());
        assert_eq!(handled, entries, "{version}: nothing further was read");
        assert_eq!(
            recorder.stopped().len(),
            2,
            "{version}: each worker said goodbye"
        );
        drop((supervisor, other));
        nothing_is_left(&server, tasks).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_recovered_entry_that_was_not_started_is_given_back_with_the_count_it_came_with() {
    let server = Server::start(Server::default_version());
    let stream = stream_of(&server, "counts");
    let entries = fill(&server, &stream, 10);
    let read = [
        "XREADGROUP",
        "GROUP",
        GROUP,
        "dead",
        "STREAMS",
        &stream,
        ">",
    ];
    server.command(&read);
    for id in &entries {
        let claim = ["XCLAIM", &stream, GROUP, "dead", "0", id, "RETRYCOUNT", "3"];
        server.command(&claim);
    }
    let gate = Gate::closed();
    let recorder = Recorder::behind(&gate);
    let reclaim = Subscription::reclaim(&*stream, ms(100)).workers(1);
    let supervisor = Supervisor::start(topology(&server.url()).subscribe(recorder.on(reclaim)))
        .await
        .unwrap();
    recorder.reaches(1).await;
    eventually(SOON, "all are taken over", || {
        let pending = server.xpending(&stream, GROUP);
        pending.iter().all(|entry| entry.1 != "dead")
    })
    .await;
    let stopping = tokio::spawn(async move { supervisor.shutdown().await });
    eventually(SOON, "nine are given back", || {
        claimable_at_once(&server, &stream).len() == 9
    })
    .await;
    let counts: Vec<i64> = server
        .xpending(&stream, GROUP)
        .iter()
        .map(|entry| entry.3)
        .collect();
    assert_eq!(counts, [[4].as_slice(), &[3; 9]].concat());
    gate.open();
    assert_eq!(stopping.await.unwrap().unwrap().given_back, 9);
    let (heir, other) = heir(&server, &stream).await;
    heir.reaches(9).await;
    assert!(heir.calls().iter().all(|call| call.attempt == 4));
    other.shutdown().await.unwrap();
}

/// The worker asks for a start to be counted while the tree is told to stop.
#[tokio::test(flavor = "multi_thread")]
async fn a_start_that_is_being_counted_when_the_stop_comes_is_not_counted_or_is_made() {
    let server = Server::start(Server::default_version());
    let stream = stream_of(&server, "counting");
    fill(&server, &stream, 10);
    let read = [
        "XREADGROUP",
        "GROUP",
        GROUP,
        "dead",
        "STREAMS",
        &stream,
        ">",
    ];
    server.command(&read);
    let recorder = Recorder::acking();
    let counting = arm("settler.starts", &stream, Fail::Pause, 1..=1);
    let reclaim = Subscription::reclaim(&*stream, ms(100)).workers(1);
    let supervisor = Supervisor::start(topology(&server.url()).subscribe(recorder.on(reclaim)))
        .await
        .unwrap();
    eventually(SOON, "a start is about to be counted", || {
        counting.failed() == 1
    })
    .await;
    let stopping = tokio::spawn(async move { supervisor.shutdown().await });
    eventually(SOON, "what waits is given back", || {
        claimable_at_once(&server, &stream).len() >= 9
    })
    .await;
    counting.release();
    let report = stopping.await.unwrap().unwrap();
    assert_eq!(report.given_back + recorder.count() as u64, 10);
    // One of the two; and what was given back can be had at once.
    for (id, _, idle, count) in server.xpending(&stream, GROUP) {
        assert_eq!(count, 1, "{id} was not started");
        assert!(idle > 24 * HOUR, "{id} is idle for {idle:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_reader_has_just_got_when_the_stop_comes_is_given_back_too() {
    let server = Server::start(Server::default_version());
    let stream = stream_of(&server, "just-got");
    let recorder = Recorder::acking();
    let tail = Subscription::tail(&*stream).named(&*stream);
    let holds = arm("reader.reply", &stream, Fail::Pause, 1..=1);
    let supervisor = Supervisor::start(topology(&server.url()).subscribe(recorder.on(tail)))
        .await
        .unwrap();
    fill(&server, &stream, 1);
    eventually(SOON, "the reader holds a reply", || holds.failed() == 1).await;
    let stopping = tokio::spawn(async move { supervisor.shutdown().await });
    // The word to stop is out; it comes to the reader when that goes on.
    in_hand(&server, &stream, 1).await;
    assert!(!stopping.is_finished());
    holds.release();
    let report = stopping.await.unwrap().unwrap();
    assert!(report.unsettled.is_empty());
    // Handled, if the worker was quicker than the stop; else given back.
    assert_eq!(report.given_back + recorder.count() as u64, 1);
    let given_back = claimable_at_once(&server, &stream);
    assert_eq!(given_back.len() as u64, report.given_back);
    assert_eq!(
        server.xpending_count(&stream, GROUP) as u64,
        report.given_back
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn parked_entries_become_retries() {
    let server = Server::start(Server::default_version());
    let stream = stream_of(&server, "parked");
    let recorder = Recorder::answering(|_| Ok(Outcome::RetryAfter(HOUR)));
    let supervisor = Supervisor::start(
        topology(&server.url()).subscribe(recorder.on(Subscription::tail(&*stream))),
    )
    .await
    .unwrap();
    fill(&server, &stream, 20);
    recorder.reaches(20).await;
    assert_eq!(
        (server.xlen(&stream), server.xpending_count(&stream, GROUP)),
        (20, 20)
    );
    let report = supervisor.shutdown().await.unwrap();
    assert_eq!((report.settled, report.given_back), (20, 0));
    assert_eq!(
        (server.xlen(&stream), server.xpending_count(&stream, GROUP)),
        (40, 0)
    );
    for (_, fields) in &server.xrange(&stream)[20..] {
        assert!(fields.contains(&(b"h:retry-count".to_vec(), b"1".to_vec())));
    }
    assert_eq!(consumers(&server, &stream), 0);
}

/// B61: parts stopped in the wrong order, and delayed retries that were asked for during the drain were
/// waited for, or lost.
#[tokio::test(flavor = "multi_thread")]
async fn b61_a_delayed_retry_that_is_asked_for_during_the_drain_is_made_at_once() {
    let server = Server::start(Server::default_version());
    for how in ["an error", "a delay", "a panic"] {
        let stream = stream_of(&server, "b61");
        let gate = Gate::closed();
        let recorder = Recorder::running({
            let gate = gate.clone();
            move |_| {
                let gate = gate.clone();
                async move {
                    gate.passed().await;
                    match how {
                        "an error" => Err("not now".into()),
                        "a delay" => Ok(Outcome::RetryAfter(HOUR)),
                        _ => panic!("on purpose"),
                    }
                }
            }
        });
        let tail = Subscription::tail(&*stream)
            .workers(4)
            .retry(RetryPolicy::exponential(HOUR).max_delay(HOUR));
        let supervisor = Supervisor::start(topology(&server.url()).subscribe(recorder.on(tail)))
            .await
            .unwrap();
        fill(&server, &stream, 10);
        recorder.reaches(4).await;
        in_hand(&server, &stream, 10).await;
        let stopping = tokio::spawn(async move { supervisor.shutdown().await });
        eventually(SOON, "six are given back", || {
            claimable_at_once(&server, &stream).len() == 6
        })
        .await;
        gate.open();
        let report = stopping.await.unwrap().unwrap();
        assert!(report.unsettled.is_empty(), "{how}: {:?}", report.unsettled);
        assert_eq!((report.settled, report.given_back), (4, 6), "{how}");
        assert_eq!(server.xlen(&stream), 10 + 4, "{how}");
        assert_eq!(server.xpending_count(&stream, GROUP), 6, "{how}");
    }
}

/// B113: a drain was over while work was queued inside of workers. What was not started is not run any
/// more here but given back; what the case asks for holds all the same: nothing that is queued is forgotten.
#[tokio::test(flavor = "multi_thread")]
async fn b113_a_drain_accounts_for_every_entry_that_waits_in_a_lane() {
    const ENTRIES: usize = 999;
    let server = Server::start(Version::Redis8);
    for mode in [Mode::Tail, Mode::Reclaim, Mode::Claiming] {
        let stream = stream_of(&server, "b113");
        // Which worker has which key is another thing in every process: so many keys that each has some.
        let entries = (0..ENTRIES).map(|n| {
            let key = (n % 400).to_string();
            vec![("_payload", n.to_string()), ("h:key", key)]
        });
        let ids = server.xadd_many(&stream, entries);
        let left = match mode {
            Mode::Tail => 0,
            Mode::Claiming => ENTRIES / 2,
            _ => ENTRIES,
        };
        if left > 0 {
            for id in server.read_as(&stream, GROUP, "dead", left) {
                server.give_to(&stream, GROUP, "dead", &id, (2 * HOUR, 1));
            }
        }
        let gate = Gate::closed();
        let recorder = Recorder::behind(&gate);
        let draft = match mode {
            Mode::Tail => Subscription::tail(&*stream),
            Mode::Reclaim => Subscription::reclaim(&*stream, HOUR),
            _ => Subscription::claiming(&*stream, HOUR),
        };
        // Enough for all of them, and for a last read to be worth its while.
        let draft = draft
            .consumer("me")
            .workers(8)
            .ordered_by("key")
            .max_in_flight(2 * ENTRIES);
        let supervisor = Supervisor::start(topology(&server.url()).subscribe(recorder.on(draft)))
            .await
            .unwrap();
        eventually(SOON, "eight run and all others wait", || {
            let pending = server.xpending(&stream, GROUP);
            let ours = pending.iter().filter(|entry| entry.1 == "me").count();
            recorder.running_now() == 8 && ours == ENTRIES
        })
        .await;

        let stopping = tokio::spawn(async move { supervisor.shutdown().await });
        eventually(SOON, "what waits is given back", || {
            claimable_at_once(&server, &stream).len() == ENTRIES - 8
        })
        .await;
        assert!(!stopping.is_finished(), "{mode:?}: eight still run");
        gate.open();
        let report = stopping.await.unwrap().unwrap();
        assert_eq!(
            (report.settled, report.given_back as usize),
            (8, ENTRIES - 8),
            "{mode:?}"
        );
        assert!(report.left_running.is_empty() && report.unsettled.is_empty());
        let free = claimable_at_once(&server, &stream);
        assert_eq!(
            (free.len(), server.xpending_count(&stream, GROUP)),
            (ENTRIES - 8, ENTRIES as i64 - 8),
            "{mode:?}"
        );
        for (id, .., count) in free {
            let before = i64::from(ids[..left].contains(&id));
            assert_eq!(count, before, "{mode:?}: {id} was not started");
        }
        let (heir, other) = heir(&server, &stream).await;
        heir.reaches(ENTRIES - 8).await;
        all_acknowledged(&server, &stream).await;
        other.shutdown().await.unwrap();
        let mut handled = [recorder.ids(), heir.ids()].concat();
        handled.sort_by_key(|id| id.parse::<EntryId>().unwrap());
        assert_eq!(handled, ids, "{mode:?}");
    }
}

/// B58: a stop cancelled running handlers or threw queued acknowledgements away.
#[tokio::test(flavor = "multi_thread")]
async fn b58_verdicts_that_wait_to_be_stored_are_stored_and_the_report_has_the_figures() {
    let server = Server::start(Server::default_version());
    let proxy = server.proxy();
    let stream = stream_of(&server, "b58");
    let gate = Gate::closed();
    let recorder = Recorder::running({
        let gate = gate.clone();
        move |call| {
            let gate = gate.clone();
            async move {
                if call.text().parse::<usize>().unwrap() == 20 {
                    gate.passed().await;
                }
                Ok(Outcome::Ack)
            }
        }
    });
    let tail = Subscription::tail(&*stream).workers(1);
    let supervisor = Supervisor::start(topology(&proxy.url()).subscribe(recorder.on(tail)))
        .await
        .unwrap();
    fill(&server, &stream, 84);
    // 20 are handled and one runs; what the server says to that does not arrive.
    let started = arm("settler.acks", &stream, Fail::Pause, 1..=1);
    recorder.reaches(21).await;
    eventually(SOON, "the settler stands still", || started.failed() == 1).await;
    in_hand(&server, &stream, 84).await;
    proxy.hold_replies();
    started.release();
    let stopping = tokio::spawn({
        let supervisor = supervisor.clone();
        async move { supervisor.shutdown().await }
    });
    eventually(SOON, "the acknowledgements are out", || {
        server.xpending_count(&stream, GROUP) < 84
    })
    .await;
    assert!(!stopping.is_finished());
    proxy.release();
    eventually(SOON, "63 are given back", || {
        claimable_at_once(&server, &stream).len() == 63
    })
    .await;
    in_hand(&server, &stream, 63 + 1).await;
    gate.open();
    let report = stopping.await.unwrap().unwrap();
    assert_eq!((report.settled, report.given_back), (21, 63));
    assert!(report.left_running.is_empty() && report.unsettled.is_empty());
    assert_eq!(server.xpending_count(&stream, GROUP), 63);
    for (id, _, _, count) in server.xpending(&stream, GROUP) {
        assert_eq!(count, 0, "{id} was never started");
    }
}

/// B62: connections were closed while handlers still used them.
#[tokio::test(flavor = "multi_thread")]
async fn b62_a_handler_that_is_waited_for_can_still_publish_and_acknowledge() {
    let server = Server::start(Server::default_version());
    let stream = stream_of(&server, "b62");
    let results = format!("{stream}.results");
    let gate = Gate::closed();
    let recorder = Recorder::running({
        let (gate, results) = (gate.clone(), results.clone());
        move |call| {
            let (gate, results) = (gate.clone(), results.clone());
            async move {
                gate.passed().await;
                call.context.publisher().publish(&*results, &7).await?;
                Ok(Outcome::Ack)
            }
        }
    });
    let supervisor = Supervisor::start(
        topology(&server.url()).subscribe(recorder.on(Subscription::tail(&*stream))),
    )
    .await
    .unwrap();
    fill(&server, &stream, 8);
    recorder.reaches(8).await;
    let order = tokio::spawn({
        let supervisor = supervisor.clone();
        async move { supervisor.shutdown().await }
    });
    eventually(SOON, "its reader has gone", || {
        let connections = server.client_list();
        !connections.iter().any(|line| line.contains("reader-"))
    })
    .await;
    gate.open();
    let report = order.await.unwrap().unwrap();
    assert_eq!(report.settled, 8);
    assert_eq!(server.xlen(&results), 8);
    no_connection_is_left(&server).await;
}

/// What handlers block their threads with, until the test has ended at the latest.
#[derive(Default)]
struct Blockade(Arc<AtomicBool>);

impl Blockade {
    fn recorder(&self) -> Recorder {
        let ended = Arc::clone(&self.0);
        Recorder::running(move |_| {
            while !ended.load(Ordering::SeqCst) {
                std::thread::sleep(ms(5));
            }
            std::future::ready(Ok(Outcome::Ack))
        })
    }

    fn end(&self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

impl Drop for Blockade {
    fn drop(&mut self) {
        self.end();
    }
}

// ---- the deadline ------------------------------------------------------------------------------------------

/// The report comes by the deadline, and a busy machine may take a while more.
const DEADLINE: Duration = Duration::from_secs(3);
const BY_THEN: Duration = Duration::from_millis(4500);

async fn stopped_by_the_deadline(supervisor: &SupervisorHandle) -> ShutdownReport {
    let began = Instant::now();
    let report = supervisor.shutdown().await.unwrap();
    let took = began.elapsed();
    assert!(took < BY_THEN, "it took {took:?} of {DEADLINE:?}");
    report
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handler_that_never_ends_is_reported_at_the_deadline_and_its_entry_stays_pending() {
    let server = Server::start(Server::default_version());
    let stream = stream_of(&server, "never");
    let recorder = Recorder::running(|call| async move {
        if call.text() == "last" {
            std::future::pending::<()>().await;
        }
        Ok(Outcome::Ack)
    });
    let tasks = alive_tasks();
    let supervisor = Supervisor::start(
        topology(&server.url())
            .shutdown_timeout(DEADLINE)
            .subscribe(recorder.on(Subscription::tail(&*stream).workers(2))),
    )
    .await
    .unwrap();
    fill(&server, &stream, 9);
    all_acknowledged(&server, &stream).await;
    let last = server.xadd(&stream, &[("_payload", "last")]);
    recorder.reaches(10).await;
    let report = stopped_by_the_deadline(&supervisor).await;
    assert_eq!(ids(&report.left_running), [last]);
    assert_eq!(report.left_running[0].stream, *stream);
    assert!(report.unsettled.is_empty());
    let pending = server.xpending(&stream, GROUP);
    assert_eq!((pending.len(), pending[0].3), (1, 1));
    assert_eq!(
        consumers(&server, &stream),
        1,
        "its consumer has something pending"
    );
    assert_eq!(recorder.running_now(), 0, "its future was dropped");
    drop(supervisor);
    nothing_is_left(&server, tasks).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_handler_that_blocks_its_thread_does_not_hold_up_the_stop() {
    let server = Server::start(Server::default_version());
    let stream = stream_of(&server, "blocks");
    let blockade = Blockade::default();
    let recorder = blockade.recorder();
    let supervisor = Supervisor::start(
        topology(&server.url())
            .shutdown_timeout(DEADLINE)
            .subscribe(recorder.on(Subscription::tail(&*stream).workers(1))),
    )
    .await
    .unwrap();
    let entries = fill(&server, &stream, 10);
    recorder.reaches(1).await;
    in_hand(&server, &stream, 10).await;
    let report = stopped_by_the_deadline(&supervisor).await;
    assert_eq!(ids(&report.left_running), [&*entries[0]]);
    assert_eq!(report.given_back, 9);
    no_connection_is_left(&server).await;
    // What it says afterwards reaches nobody: its entry is somebody else's by then.
    blockade.end();
    eventually(SOON, "the call ends", || recorder.running_now() == 0).await;
    assert_eq!(server.xpending_count(&stream, GROUP), 10);
    assert_eq!(recorder.count(), 1);
    no_connection_is_left(&server).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_frozen_server_does_not_hold_up_the_stop_and_nothing_is_lost() {
    let server = Server::start(Server::default_version());
    let stream = stream_of(&server, "frozen");
    let gate = Gate::closed();
    let recorder = Recorder::behind(&gate);
    let tasks = alive_tasks();
    let supervisor = Supervisor::start(
        topology(&server.url())
            .shutdown_timeout(DEADLINE)
            .subscribe(recorder.on(Subscription::tail(&*stream).workers(4))),
    )
    .await
    .unwrap();
    let entries = fill(&server, &stream, 100);
    recorder.reaches(4).await;
    in_hand(&server, &stream, 100).await;
    server.freeze();
    gate.open();
    eventually(SOON, "the verdicts are given", || {
        recorder.running_now() == 0
    })
    .await;
    let report = stopped_by_the_deadline(&supervisor).await;
    // They may all have been handled before the word to stop came.
    let handled = recorder.ids();
    let mut unsettled = ids(&report.unsettled);
    unsettled.sort();
    let mut expected = handled.clone();
    expected.sort();
    assert_eq!(unsettled, expected, "what could not be stored is listed");
    assert_eq!((report.settled, report.given_back), (0, 0));
    server.thaw();
    drop(supervisor);
    nothing_is_left(&server, tasks).await;
    let heir = Recorder::acking();
    let reclaim = Subscription::reclaim(&*stream, ms(100)).block(ms(50));
    let other = Supervisor::start(topology(&server.url()).subscribe(heir.on(reclaim)))
        .await
        .unwrap();
    all_acknowledged(&server, &stream).await;
    other.shutdown().await.unwrap();
    let missing = entries
        .iter()
        .filter(|id| !handled.contains(id) && heir.calls_of(id).is_empty());
    assert_eq!(missing.count(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_away_does_not_hold_up_the_stop_and_nothing_is_lost() {
    let server = Server::start_with(Server::default_version(), &[("appendonly", "yes")]);
    let stream = stream_of(&server, "away");
    let gate = Gate::closed();
    let recorder = Recorder::behind(&gate);
    let supervisor = Supervisor::start(
        topology(&server.url())
            .shutdown_timeout(DEADLINE)
            .subscribe(recorder.on(Subscription::tail(&*stream).workers(4))),
    )
    .await
    .unwrap();
    fill(&server, &stream, 4);
    recorder.reaches(4).await;
    server.kill();
    gate.open();
    eventually(SOON, "the verdicts are given", || {
        recorder.running_now() == 0
    })
    .await;
    let report = stopped_by_the_deadline(&supervisor).await;
    assert_eq!(report.unsettled.len(), 4);
    server.restart();
    assert_eq!(server.xpending_count(&stream, GROUP), 4);
}

// ---- asking for it ------------------------------------------------------------------------------------------

#[tokio::test(flavor = "multi_thread")]
async fn a_shutdown_from_inside_a_handler_is_refused_and_the_tree_goes_on() {
    let server = Server::start(Server::default_version());
    let stream = stream_of(&server, "inside");
    let handle: Arc<OnceCell<SupervisorHandle>> = Arc::default();
    let (tell, told) = oneshot::channel();
    let tell = Arc::new(std::sync::Mutex::new(Some(tell)));
    let recorder = Recorder::running({
        let handle = Arc::clone(&handle);
        move |call| {
            let (handle, tell) = (Arc::clone(&handle), Arc::clone(&tell));
            async move {
                if call.text() == "0" {
                    let handle = handle.get_or_init(std::future::pending).await;
                    let refused = handle.shutdown().await;
                    let tell = tell.lock().unwrap().take();
                    tell.expect("asked once").send(refused).unwrap();
                }
                Ok(Outcome::Ack)
            }
        }
    });
    let supervisor = Supervisor::start(
        topology(&server.url()).subscribe(recorder.on(Subscription::tail(&*stream).workers(1))),
    )
    .await
    .unwrap();
    assert!(handle.set(supervisor.clone()).is_ok());
    fill(&server, &stream, 10);
    let refused = tokio::time::timeout(SOON, told).await;
    let refused = refused.expect("it should not wait for itself").unwrap();
    assert_eq!(refused, Err(ShutdownError::FromHandler));
    recorder.reaches(10).await;
    all_acknowledged(&server, &stream).await;
    // A handler of this tree may stop another one, and a task that it spawns may stop this one.
    supervisor.shutdown().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handler_may_stop_another_tree_and_a_task_of_it_its_own() {
    let server = Server::start(Server::default_version());
    let (stream, other_stream) = (stream_of(&server, "one"), stream_of(&server, "another"));
    let others = Recorder::acking();
    let other = Supervisor::start(
        topology(&server.url()).subscribe(others.on(Subscription::tail(&*other_stream))),
    )
    .await
    .unwrap();
    let handle: Arc<OnceCell<SupervisorHandle>> = Arc::default();
    let recorder = Recorder::running({
        let (handle, other) = (Arc::clone(&handle), other.clone());
        move |_| {
            let (handle, other) = (Arc::clone(&handle), other.clone());
            async move {
                other.shutdown().await.map_err(BoxError::from)?;
                tokio::spawn(async move { handle.get().unwrap().shutdown().await });
                Ok(Outcome::Ack)
            }
        }
    });
    let supervisor = Supervisor::start(
        topology(&server.url()).subscribe(recorder.on(Subscription::tail(&*stream))),
    )
    .await
    .unwrap();
    assert!(handle.set(supervisor.clone()).is_ok());
    fill(&server, &stream, 1);
    let report = supervisor.wait().await.unwrap();
    assert_eq!(
        (report.settled, server.xpending_count(&stream, GROUP)),
        (1, 0)
    );
    no_connection_is_left(&server).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn whoever_asks_for_the_stop_again_gets_the_same_report() {
    let server = Server::start(Server::default_version());
    let stream = stream_of(&server, "twice");
    let gate = Gate::closed();
    let recorder = Recorder::behind(&gate);
    let supervisor = Supervisor::start(
        topology(&server.url()).subscribe(recorder.on(Subscription::tail(&*stream).workers(2))),
    )
    .await
    .unwrap();
    let heard = Heard::of(&supervisor);
    fill(&server, &stream, 10);
    recorder.reaches(2).await;
    in_hand(&server, &stream, 10).await;
    let ask = || {
        let supervisor = supervisor.clone();
        tokio::spawn(async move { supervisor.shutdown().await })
    };
    let first = ask();
    eventually(SOON, "eight are given back", || {
        claimable_at_once(&server, &stream).len() == 8
    })
    .await;
    let second = ask();
    gate.open();
    let report = first.await.unwrap().unwrap();
    assert_eq!((report.settled, report.given_back), (2, 8));
    assert_eq!(second.await.unwrap().unwrap(), report);
    assert_eq!(supervisor.shutdown().await.unwrap(), report);
    assert_eq!(supervisor.wait().await.unwrap(), report);
    let drained = heard
        .wait("the end", |event| match event {
            Event::Drained {
                settled,
                given_back,
            } => Some((*settled, *given_back)),
            _ => None,
        })
        .await;
    assert_eq!(drained, (2, 8));
    assert_eq!(
        heard.count(|event| matches!(event, Event::Drained { .. })),
        1
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn run_until_ends_with_the_future_and_gives_its_output_and_the_report() {
    let server = Server::start(Server::default_version());
    let stream = stream_of(&server, "until");
    let recorder = Recorder::acking();
    let supervisor = Supervisor::start(
        topology(&server.url()).subscribe(recorder.on(Subscription::tail(&*stream))),
    )
    .await
    .unwrap();
    fill(&server, &stream, 10);
    let enough = {
        let recorder = recorder.clone();
        async move {
            recorder.reaches(10).await;
            "enough"
        }
    };
    let (output, report) = supervisor.run_until(enough).await.unwrap();
    assert_eq!(output, "enough");
    assert!(report.unsettled.is_empty());
    assert_eq!(server.xpending_count(&stream, GROUP), 0);
    no_connection_is_left(&server).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn run_until_ends_with_the_failure_of_a_tree_that_fails_before() {
    let server = Server::start(Server::default_version());
    let stream = stream_of(&server, "until-failed");
    let recorder = Recorder::acking();
    let _armed = arm("settler.sent", &stream, Fail::Panic, 1..=u64::MAX);
    let supervisor = Supervisor::start(
        topology(&server.url())
            .restart(RestartPolicy::default().max_restarts(0))
            .shutdown_timeout(DEADLINE)
            .subscribe(recorder.on(Subscription::tail(&*stream))),
    )
    .await
    .unwrap();
    fill(&server, &stream, 1);
    let error = supervisor
        .run_until(std::future::pending::<()>())
        .await
        .unwrap_err();
    let ShutdownError::Failed(failure) = error else {
        panic!("{error:?}");
    };
    assert!(matches!(failure.child, Child::Settler { .. }), "{failure}");
}

// ---- trouble meanwhile -----------------------------------------------------------------------------------

/// B60: a replacement that was started during the drain survived it.
#[tokio::test(flavor = "multi_thread")]
async fn b60_what_crashes_during_the_drain_is_not_replaced_and_nothing_is_left() {
    let server = Server::start(Server::default_version());
    let stream = stream_of(&server, "b60");
    let gate = Gate::closed();
    let recorder = Recorder::running({
        let gate = gate.clone();
        move |_| {
            let gate = gate.clone();
            async move {
                gate.passed().await;
                panic!("on purpose")
            }
        }
    });
    let tasks = alive_tasks();
    let tail = Subscription::tail(&*stream)
        .named(&*stream)
        .workers(2)
        .retry(RetryPolicy::exponential(ms(1)));
    let supervisor = Supervisor::start(topology(&server.url()).subscribe(recorder.on(tail)))
        .await
        .unwrap();
    let heard = Heard::of(&supervisor);
    fill(&server, &stream, 10);
    recorder.reaches(2).await;
    in_hand(&server, &stream, 10).await;
    // The reader dies over the reply of the read that the stop ends.
    let dies = arm("reader.reply", &stream, Fail::Panic, 1..=1);
    let stopping = tokio::spawn({
        let supervisor = supervisor.clone();
        async move { supervisor.shutdown().await }
    });
    eventually(SOON, "eight are given back", || {
        dies.failed() == 1 && claimable_at_once(&server, &stream).len() == 8
    })
    .await;
    gate.open();
    let report = stopping.await.unwrap().unwrap();
    assert_eq!(dies.failed(), 1);
    assert_eq!((report.settled, report.given_back), (2, 8));
    assert!(report.left_running.is_empty() && report.unsettled.is_empty());
    let crashes = heard.count(|event| matches!(event, Event::Crashed { .. }));
    let restarts = heard.count(|event| matches!(event, Event::Restarted { .. }));
    assert_eq!((crashes, restarts), (3, 0));
    // The crash verdict of what ran is stored as well.
    assert_eq!(server.xlen(&stream), 12);
    assert_eq!(server.xpending_count(&stream, GROUP), 8);
    drop(supervisor);
    nothing_is_left(&server, tasks).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_settler_and_a_keep_alive_that_die_during_the_drain_come_back_for_it() {
    let server = Server::start(Server::default_version());
    let stream = stream_of(&server, "needed");
    let gate = Gate::closed();
    let recorder = Recorder::behind(&gate);
    let tasks = alive_tasks();
    let tail = Subscription::tail(&*stream).workers(8).keep_alive(ms(100));
    let supervisor = Supervisor::start(topology(&server.url()).subscribe(recorder.on(tail)))
        .await
        .unwrap();
    let heard = Heard::of(&supervisor);
    fill(&server, &stream, 20);
    recorder.reaches(8).await;
    in_hand(&server, &stream, 20).await;
    let stopping = tokio::spawn({
        let supervisor = supervisor.clone();
        async move { supervisor.shutdown().await }
    });
    eventually(SOON, "twelve are given back", || {
        claimable_at_once(&server, &stream).len() == 12
    })
    .await;
    let keeper = arm("keep_alive.before", &stream, Fail::Panic, 1..=1);
    let kept = arm("keep_alive.kept", &stream, Fail::Panic, 0..=0);
    eventually(SOON, "the new one keeps what still runs", || {
        keeper.failed() == 1 && kept.reached() >= 1
    })
    .await;
    let settler = arm("settler.answered", &stream, Fail::Panic, 1..=1);
    gate.open();
    let report = stopping.await.unwrap().unwrap();
    assert_eq!((keeper.failed(), settler.failed()), (1, 1));
    assert_eq!((report.settled, report.given_back), (8, 12));
    assert!(report.unsettled.is_empty());
    assert_eq!(server.xpending_count(&stream, GROUP), 12);
    assert_eq!(
        heard.count(|event| matches!(event, Event::Restarted { .. })),
        2
    );
    drop(supervisor);
    nothing_is_left(&server, tasks).await;
}

/// B16: a stop during a block had no effect, or the read that was given up took an entry with it.
#[tokio::test(flavor = "multi_thread")]
async fn b16_entries_that_race_200_stops_are_handled_or_can_be_had_at_once() {
    const CYCLES: usize = 200;
    let server = Server::start(Server::default_version());
    let stream = stream_of(&server, "b16");
    let recorder = Recorder::acking();
    let tail = Subscription::tail(&*stream)
        .block(Duration::from_secs(30))
        .workers(1);
    let topology = topology(&server.url()).subscribe(recorder.on(tail));
    let mut longest = Duration::ZERO;
    let mut given_back = 0;
    for cycle in 0..CYCLES {
        let supervisor = Supervisor::start(topology.clone()).await.unwrap();
        let adding = std::thread::spawn({
            let mut client = server.connect();
            let stream = stream.clone();
            move || {
                // Before, with and after the stop.
                std::thread::sleep(Duration::from_micros(cycle as u64 * 25));
                let body = cycle.to_string();
                client
                    .command(&["XADD", &stream, "*", "_payload", &body])
                    .unwrap();
            }
        });
        tokio::time::sleep(Duration::from_micros(2_500)).await;
        let began = Instant::now();
        let report = supervisor.shutdown().await.unwrap();
        longest = longest.max(began.elapsed());
        given_back += report.given_back;
        adding.join().unwrap();
    }
    // None had to wait for the end of its block.
    assert!(longest < Duration::from_secs(10), "{longest:?}");
    let left = claimable_at_once(&server, &stream);
    assert_eq!(left.len() as u64, given_back);
    assert_eq!(server.xpending_count(&stream, GROUP) as usize, left.len());
    assert!(left.iter().all(|entry| entry.3 == 0), "{left:?}");

    // The next start has all of them at once.
    let (heir, other) = heir(&server, &stream).await;
    let last = Supervisor::start(topology).await.unwrap();
    eventually(SOON, "all are handled", || {
        recorder.count() + heir.count() == CYCLES
    })
    .await;
    all_acknowledged(&server, &stream).await;
    last.shutdown().await.unwrap();
    other.shutdown().await.unwrap();
    assert_eq!(heir.count() as u64, given_back);
    assert_eq!(recorder.distinct() + heir.distinct(), CYCLES);
    no_connection_is_left(&server).await;
}

/// Two reads are on their way while entries keep coming, and a stop comes between any two steps.
#[tokio::test(flavor = "multi_thread")]
async fn stops_in_full_flow_strand_nothing_and_repeat_nothing() {
    const ENTRIES: usize = 30_000;
    let server = Server::start(Server::default_version());
    let stream = stream_of(&server, "flow");
    let ids = fill(&server, &stream, ENTRIES);
    let recorder = Recorder::acking();
    let topology =
        topology(&server.url()).subscribe(recorder.on(Subscription::tail(&*stream).workers(2)));
    let mut given_back = 0;
    for cycle in 1..=20 {
        let supervisor = Supervisor::start(topology.clone()).await.unwrap();
        recorder.reaches(cycle * 600).await;
        given_back += supervisor.shutdown().await.unwrap().given_back;
        // All that is pending was given back.
        let left = claimable_at_once(&server, &stream);
        assert_eq!(left.len() as u64, given_back, "cycle {cycle}");
        assert_eq!(server.xpending_count(&stream, GROUP) as u64, given_back);
        assert!(left.iter().all(|entry| entry.3 == 0), "cycle {cycle}");
    }
    let last = Supervisor::start(topology).await.unwrap();
    let (heir, other) = heir(&server, &stream).await;
    eventually(SOON, "all are handled", || {
        recorder.distinct() + heir.distinct() == ENTRIES
    })
    .await;
    all_acknowledged(&server, &stream).await;
    last.shutdown().await.unwrap();
    other.shutdown().await.unwrap();
    assert_eq!(recorder.count() + heir.count(), ids.len());
}
