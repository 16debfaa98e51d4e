//! What a crash costs: what crashed. Actors die between two lines (`src/fail_point.rs`), handlers panic,
//! and everything is handled all the same, nothing twice that need not be.

mod support;

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use streamvisor::fail_point::{Armed, Fail, arm};
use streamvisor::prelude::*;
use streamvisor::{Child, Entry, EntryId, Event, Failure, Mode, ShutdownError, State};
use support::record::{Answer, Gate, Heard, Recorder, SOON, fill, ms, topology};
use support::watch::{Logged, LookedFrom, Most};
use support::*;

const GROUP: &str = record::GROUP;
/// How many entries flow while an actor dies.
const LOAD: usize = 2_000;
const LONG: Duration = Duration::from_secs(3600);

/// Has another consumer read everything and die.
fn leave_behind(server: &Server, stream: &str, consumer: &str) {
    let count = i32::MAX.to_string();
    server.command(&[
        "XREADGROUP",
        "GROUP",
        GROUP,
        consumer,
        "COUNT",
        &count,
        "STREAMS",
        stream,
        ">",
    ]);
}

/// How often the server thinks that an entry was started.
fn count_on(server: &Server, stream: &str, id: EntryId) -> i64 {
    let id = id.to_string();
    let pending = server.command(&["XPENDING", stream, GROUP, &id, &id, "1"]);
    pending.as_array()[0].as_array()[3].as_int()
}

/// Compares the count that it is told with the server's, in every call.
fn checking_counts(server: &Arc<Server>, stream: &str) -> Recorder {
    let (server, stream) = (Arc::clone(server), stream.to_owned());
    Recorder::answering(move |call| {
        let told = i64::try_from(call.delivery_count).unwrap();
        assert_eq!(count_on(&server, &stream, call.id), told);
        Ok(Outcome::Ack)
    })
}

/// A stream with its group, which begins at the beginning, and the name of its tail.
fn stream_of(server: &Server, name: &str) -> (String, String) {
    let stream = unique(name);
    server.xgroup_create(&stream, GROUP, "0");
    let tail = format!("{stream}/{GROUP}/tail");
    (stream, tail)
}

fn reader(subscription: &str) -> Child {
    Child::Reader {
        subscription: subscription.into(),
    }
}

fn settler(stream: &str) -> Child {
    Child::Settler {
        stream: stream.into(),
        group: GROUP.into(),
    }
}

fn handler(subscription: &str, worker: usize) -> Child {
    Child::Handler {
        subscription: subscription.into(),
        worker,
    }
}

fn crashed(heard: &Heard) -> Vec<Child> {
    heard.pick(|event| match event {
        Event::Crashed { child, .. } => Some(child.clone()),
        _ => None,
    })
}

fn restarted(heard: &Heard) -> Vec<Child> {
    heard.pick(|event| match event {
        Event::Restarted { child, .. } => Some(child.clone()),
        _ => None,
    })
}

fn escalated(heard: &Heard) -> Vec<Child> {
    heard.pick(|event| match event {
        Event::Escalated { child, .. } => Some(child.clone()),
        _ => None,
    })
}

/// Waits until this child, and nobody else, has crashed and run again.
async fn crashed_and_restarted(heard: &Heard, child: &Child, armed: &Armed) {
    let (told, of) = (heard.clone(), child.clone());
    let what = format!("{child} runs again");
    eventually(SOON, &what, move || restarted(&told).contains(&of)).await;
    assert_eq!(armed.failed(), 1);
    assert_eq!(crashed(heard), std::slice::from_ref(child));
    assert_eq!(restarted(heard), std::slice::from_ref(child));
    let (error, restarts) = (
        heard
            .wait("the crash", |event| match event {
                Event::Crashed { error, .. } => Some(error.clone()),
                _ => None,
            })
            .await,
        heard
            .wait("the restart", |event| match event {
                Event::Restarted { restarts, .. } => Some(*restarts),
                _ => None,
            })
            .await,
    );
    assert!(error.contains("fail point"), "{error}");
    assert_eq!(restarts, 1);
}

/// Why the tree has ended.
async fn failure_of(supervisor: &SupervisorHandle) -> Failure {
    let end = tokio::time::timeout(SOON, supervisor.wait()).await;
    end.expect("the tree should end").unwrap_err()
}

async fn all_acknowledged(server: &Server, stream: &str) {
    let what = format!("nothing of {stream} is pending");
    eventually(SOON, &what, || server.xpending_count(stream, GROUP) == 0).await;
}

/// The first subscription's reader has handed over all of them. They are pending before that.
async fn all_handed_over(supervisor: &SupervisorHandle, entries: usize) {
    let handed_over = async {
        while supervisor.status().await.subscriptions[0].in_flight != entries {
            tokio::task::yield_now().await;
        }
    };
    let soon = tokio::time::timeout(SOON, handed_over).await;
    soon.expect("all should be handed over");
}

// ---- readers ------------------------------------------------------------------------------------------

#[tokio::test(flavor = "multi_thread")]
async fn a_reader_that_dies_at_any_step_under_load_costs_no_entry_and_no_second_handling() {
    let server = Server::start(Server::default_version());
    for point in [
        "reader.before_read",
        "reader.reply",
        "reader.handed_over",
        "reader.registered",
    ] {
        let (stream, name) = stream_of(&server, point);
        let recorder = Recorder::acking();
        let armed = arm(point, &name, Fail::Panic, 3..=3);
        let tail = Subscription::tail(&*stream).block(ms(200));
        let supervisor = Supervisor::start(topology(&server.url()).subscribe(recorder.on(tail)))
            .await
            .unwrap();
        let heard = Heard::of(&supervisor);
        fill(&server, &stream, LOAD);
        recorder.reaches(LOAD).await;
        crashed_and_restarted(&heard, &reader(&name), &armed).await;
        all_acknowledged(&server, &stream).await;
        supervisor.shutdown().await.unwrap();
        assert_eq!(
            (recorder.count(), recorder.distinct()),
            (LOAD, LOAD),
            "{point}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reader_that_dies_while_it_takes_up_its_own_pending_entries_goes_on_where_it_stood() {
    let server = Server::start(Server::default_version());
    for point in [
        "reader.pending_listed",
        "reader.pending_taken",
        "reader.recovered",
    ] {
        let (stream, name) = stream_of(&server, point);
        let ids = fill(&server, &stream, 500);
        leave_behind(&server, &stream, "me");
        let looked = LookedFrom::watch(&server, &stream);
        let recorder = Recorder::acking();
        let armed = arm(point, &name, Fail::Panic, 2..=2);
        let tail = Subscription::tail(&*stream).consumer("me").block(ms(200));
        let supervisor = Supervisor::start(topology(&server.url()).subscribe(recorder.on(tail)))
            .await
            .unwrap();
        let heard = Heard::of(&supervisor);
        fill(&server, &stream, 500);
        recorder.reaches(1000).await;
        crashed_and_restarted(&heard, &reader(&name), &armed).await;
        all_acknowledged(&server, &stream).await;
        let looked = looked.until_beyond(ids[399].parse().unwrap()).await;
        assert!(looked.is_sorted(), "{point}: it started over: {looked:?}");
        supervisor.shutdown().await.unwrap();
        assert_eq!(
            (recorder.count(), recorder.distinct()),
            (1000, 1000),
            "{point}"
        );
        // A fetch is no start, however often it is repeated.
        let recovered = recorder.calls().iter().filter(|it| it.attempt == 2).count();
        let fresh = recorder.calls().iter().filter(|it| it.attempt == 1).count();
        assert_eq!((recovered, fresh), (500, 500), "{point}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reader_that_dies_while_it_claims_costs_no_entry_and_no_second_handling() {
    let server = Server::start(Version::Redis8);
    for point in ["reader.reply", "reader.handed_over", "reader.registered"] {
        let (stream, _) = stream_of(&server, point);
        let name = format!("{stream}/{GROUP}/claiming");
        let left = fill(&server, &stream, 500);
        leave_behind(&server, &stream, "dead");
        let min_idle = ms(500);
        eventually(SOON, "all are idle for long enough", || {
            let pending = server.xpending(&stream, GROUP);
            pending.iter().all(|entry| entry.2 >= min_idle)
        })
        .await;
        let fresh = fill(&server, &stream, 500);
        let recorder = Recorder::acking();
        let armed = arm(point, &name, Fail::Panic, 2..=2);
        let claiming = Subscription::claiming(&*stream, min_idle).block(ms(200));
        let supervisor =
            Supervisor::start(topology(&server.url()).subscribe(recorder.on(claiming)))
                .await
                .unwrap();
        let heard = Heard::of(&supervisor);
        recorder.reaches(1000).await;
        crashed_and_restarted(&heard, &reader(&name), &armed).await;
        all_acknowledged(&server, &stream).await;
        supervisor.shutdown().await.unwrap();
        assert_eq!(
            (recorder.count(), recorder.distinct()),
            (1000, 1000),
            "{point}"
        );
        // The start itself, the one by the dead consumer, and at most one for a lost fetch.
        for (ids, least) in [(left, 2), (fresh, 1)] {
            for id in ids {
                let attempt = recorder.calls_of(&id)[0].attempt;
                assert!((least..=least + 1).contains(&attempt), "{id}: {attempt}");
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_runs_is_not_taken_up_again_by_the_readers_that_come_after() {
    let server = Server::start(Server::default_version());
    let (stream, name) = stream_of(&server, "in-hand");
    let gate = Gate::closed();
    let recorder = Recorder::behind(&gate);
    let tail = Subscription::tail(&*stream).workers(4).block(ms(50));
    let supervisor = Supervisor::start(topology(&server.url()).subscribe(recorder.on(tail)))
        .await
        .unwrap();
    let heard = Heard::of(&supervisor);
    fill(&server, &stream, 50);
    recorder.reaches(4).await;
    all_handed_over(&supervisor, 50).await;
    // It dies with a read on its way each time, so each of the readers looks for what it delivered,
    // and once more a block later.
    let looked = arm("reader.pending_listed", &name, Fail::Panic, 0..=0);
    for _ in 0..3 {
        let before = looked.reached();
        let armed = arm("reader.reply", &name, Fail::Panic, 1..=1);
        eventually(SOON, "it died and looked twice", || {
            armed.failed() == 1 && looked.reached() >= before + 2
        })
        .await;
    }
    gate.open();
    all_acknowledged(&server, &stream).await;
    assert_eq!(crashed(&heard), vec![reader(&name); 3]);
    supervisor.shutdown().await.unwrap();
    assert_eq!((recorder.count(), recorder.distinct()), (50, 50));
    assert!(recorder.calls().iter().all(|call| call.attempt == 1));
}

/// B107: a reader that died in the middle of a reclaim pass came back with nothing.
#[tokio::test(flavor = "multi_thread")]
async fn b107_a_reader_that_dies_in_a_reclaim_pass_goes_on_from_its_cursor() {
    let server = Server::start(Server::default_version());
    for point in [
        "reclaim.before",
        "reclaim.reply",
        "reclaim.handed_over",
        "reclaim.moved",
    ] {
        let (stream, _) = stream_of(&server, point);
        let name = format!("{stream}/{GROUP}/reclaim");
        let ids = fill(&server, &stream, 300);
        leave_behind(&server, &stream, "dead");
        let gate = Gate::closed();
        let recorder = Recorder::behind(&gate);
        let min_idle = ms(500);
        let reclaim = Subscription::reclaim(&*stream, min_idle)
            .max_in_flight(50)
            .workers(4)
            .block(ms(100));
        eventually(SOON, "all are idle for long enough", || {
            let pending = server.xpending(&stream, GROUP);
            pending.iter().all(|entry| entry.2 >= min_idle)
        })
        .await;
        let looked = LookedFrom::watch(&server, &stream);
        let supervisor = Supervisor::start(topology(&server.url()).subscribe(recorder.on(reclaim)))
            .await
            .unwrap();
        let heard = Heard::of(&supervisor);
        eventually(SOON, "some are in flight", || {
            let pending = server.xpending(&stream, GROUP);
            pending.iter().filter(|entry| entry.1 != "dead").count() >= 30
        })
        .await;
        let armed = arm(point, &name, Fail::Panic, 1..=1);
        gate.open();
        recorder.reaches(300).await;
        crashed_and_restarted(&heard, &reader(&name), &armed).await;
        all_acknowledged(&server, &stream).await;
        // The next pass begins at once, because this one has found something.
        let looked = looked.until_the_second_pass().await;
        supervisor.shutdown().await.unwrap();
        assert_eq!(
            (recorder.count(), recorder.distinct()),
            (300, 300),
            "{point}"
        );
        assert!(recorder.overlapped().is_empty());
        assert!(
            recorder.calls().iter().all(|call| call.attempt == 2),
            "a fetch was counted as a start"
        );
        // Only the step that it died over is looked for twice.
        let pass: Vec<EntryId> = looked
            .iter()
            .enumerate()
            .take_while(|(at, from)| *at == 0 || **from != EntryId::new(0, 1))
            .map(|(_, from)| *from)
            .collect();
        assert!(pass.is_sorted(), "{point}: {pass:?}");
        let last = *pass.last().expect("at least one step");
        assert!(
            last >= ids[249].parse().unwrap(),
            "{point}: the pass started over after {last}"
        );
    }
}

/// B118: what knew of free workers and of room came back with none of either.
#[tokio::test(flavor = "multi_thread")]
async fn b118_room_and_free_workers_are_known_after_a_crash_while_all_are_idle_or_busy() {
    const ROOM: usize = 20;
    let server = Server::start(Version::Redis8);
    for mode in [Mode::Tail, Mode::Claiming, Mode::Reclaim] {
        let (stream, _) = stream_of(&server, "b118");
        let gate = Gate::closed();
        gate.open();
        let recorder = Recorder::behind(&gate);
        let draft = match mode {
            Mode::Tail => Subscription::tail(&*stream),
            Mode::Claiming => Subscription::claiming(&*stream, LONG),
            _ => Subscription::reclaim(&*stream, LONG),
        };
        let draft = draft
            .named(&*stream)
            .consumer("me")
            .workers(4)
            .max_in_flight(ROOM)
            .block(ms(50));
        let add = |entries: usize| {
            fill(&server, &stream, entries);
            if mode != Mode::Tail {
                for id in server.read_as(&stream, GROUP, "dead", entries) {
                    server.give_to(&stream, GROUP, "dead", &id, (2 * LONG, 1));
                }
            }
        };
        let (waits, holds) = match mode {
            // What it has just claimed when it dies comes again after `min_idle`, not before.
            Mode::Reclaim => ("reclaim.before", "reclaim.before"),
            _ => ("reader.before_read", "reader.reply"),
        };
        let supervisor = Supervisor::start(topology(&server.url()).subscribe(recorder.on(draft)))
            .await
            .unwrap();
        let heard = Heard::of(&supervisor);
        let most = Most::pending(&server, &stream, Some("me"));

        // All are idle.
        let idle = arm(waits, &stream, Fail::Panic, 1..=1);
        eventually(SOON, "it runs again", || restarted(&heard).len() == 1).await;
        add(200);
        recorder.reaches(200).await;
        all_acknowledged(&server, &stream).await;
        assert_eq!(idle.failed(), 1);

        // All are busy, and there is room for a few more.
        gate.close();
        add(12);
        recorder.reaches(204).await;
        let in_hand = || {
            let pending = server.xpending(&stream, GROUP);
            pending.iter().filter(|entry| entry.1 == "me").count()
        };
        eventually(SOON, "twelve are in hand", || in_hand() == 12).await;
        // A reply that it holds then is not known to anybody.
        let busy = arm(holds, &stream, Fail::Panic, 1..=1);
        add(1);
        eventually(SOON, "it runs again", || restarted(&heard).len() == 2).await;
        assert_eq!(busy.failed(), 1);
        add(100);
        // No room is lost, no worker either, and nothing is taken that there is no room for.
        // (It does not go for less than a quarter of it while the workers have enough to do.)
        let used = ROOM - ROOM / 4 + 1..=ROOM;
        eventually(SOON, "the room is used", || used.contains(&in_hand())).await;
        assert_eq!(recorder.running_now(), 4, "{mode:?}");
        let status = supervisor.status().await.subscriptions.swap_remove(0);
        assert!(used.contains(&status.in_flight), "{mode:?}: {status:?}");
        assert_eq!(
            (status.running, status.waiting),
            (4, status.in_flight - 4),
            "{mode:?}"
        );
        gate.open();
        recorder.reaches(313).await;
        all_acknowledged(&server, &stream).await;
        supervisor.shutdown().await.unwrap();
        assert_eq!((recorder.count(), recorder.distinct()), (313, 313));
        assert_eq!(recorder.most_running(), 4, "{mode:?}");
        assert!(used.contains(&(most.seen() as usize)), "{mode:?}");
        assert_eq!(crashed(&heard), vec![reader(&stream); 2], "{mode:?}");
    }
}

// ---- settler, sweeper, keep-alive ------------------------------------------------------------------------

/// Every tenth entry is retried, every tenth retried later, every tenth dead-lettered, all others are
/// acknowledged.
fn mixed() -> Recorder {
    Recorder::answering(|call| {
        let number: usize = call.text().parse().unwrap();
        Ok(match number % 10 {
            0 if call.attempt == 1 => Outcome::Retry,
            1 if call.attempt == 1 => Outcome::RetryAfter(ms(30)),
            2 => Outcome::DeadLetter("unwanted".to_owned()),
            _ => Outcome::Ack,
        })
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn a_settler_that_dies_at_any_step_under_load_makes_no_second_copy_and_no_second_handling() {
    let server = Server::start(Server::default_version());
    for (point, on) in [
        ("settler.acks", 5),
        ("settler.copies", 2),
        ("settler.due", 1),
        ("settler.sent", 5),
        ("settler.answered", 5),
        ("settler.confirmed", 5),
    ] {
        let (stream, _) = stream_of(&server, point);
        let dead = format!("{stream}.dead");
        let recorder = mixed();
        let armed = arm(point, &stream, Fail::Panic, on..=on);
        let tail = Subscription::tail(&*stream).dead_letter(&*dead);
        let supervisor = Supervisor::start(topology(&server.url()).subscribe(recorder.on(tail)))
            .await
            .unwrap();
        let heard = Heard::of(&supervisor);
        fill(&server, &stream, LOAD);
        let copies = 2 * LOAD / 10;
        recorder.reaches(LOAD + copies).await;
        crashed_and_restarted(&heard, &settler(&stream), &armed).await;
        all_acknowledged(&server, &stream).await;
        supervisor.shutdown().await.unwrap();
        assert_eq!(recorder.count(), LOAD + copies, "{point}");
        assert_eq!(server.xlen(&stream), (LOAD + copies) as i64, "{point}");
        assert_eq!(server.xlen(&dead), (LOAD / 10) as i64, "{point}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_settler_that_dies_over_starts_that_it_counts_loses_none_and_counts_none_twice() {
    let server = Arc::new(Server::start(Server::default_version()));
    for point in ["settler.starts", "settler.answered", "settler.confirmed"] {
        let (stream, _) = stream_of(&server, point);
        fill(&server, &stream, 300);
        leave_behind(&server, &stream, "me");
        let recorder = checking_counts(&server, &stream);
        let armed = arm(point, &stream, Fail::Panic, 9..=9);
        let tail = Subscription::tail(&*stream).consumer("me");
        let supervisor = Supervisor::start(topology(&server.url()).subscribe(recorder.on(tail)))
            .await
            .unwrap();
        let heard = Heard::of(&supervisor);
        recorder.reaches(300).await;
        crashed_and_restarted(&heard, &settler(&stream), &armed).await;
        all_acknowledged(&server, &stream).await;
        supervisor.shutdown().await.unwrap();
        assert_eq!(
            (recorder.count(), recorder.distinct()),
            (300, 300),
            "{point}"
        );
        assert!(
            recorder.calls().iter().all(|call| call.delivery_count == 2),
            "{point}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sweeper_that_dies_before_or_after_a_sweep_loses_nothing_and_moves_nothing_twice() {
    let server = Server::start(Server::default_version());
    for point in ["sweeper.before", "sweeper.swept"] {
        let (stream, _) = stream_of(&server, point);
        let set = format!("{stream}.delayed");
        let recorder = Recorder::answering(|call| {
            Ok(match call.attempt {
                1 => Outcome::RetryAfter(ms(50)),
                _ => Outcome::Ack,
            })
        });
        let armed = arm(point, &set, Fail::Panic, 3..=3);
        let tail = Subscription::tail(&*stream).delayed_retry(DelayedRetry::durable(&*set));
        let supervisor = Supervisor::start(topology(&server.url()).subscribe(recorder.on(tail)))
            .await
            .unwrap();
        let heard = Heard::of(&supervisor);
        fill(&server, &stream, LOAD);
        recorder.reaches(2 * LOAD).await;
        let sweeper = Child::Sweeper {
            set: (&*set).into(),
        };
        crashed_and_restarted(&heard, &sweeper, &armed).await;
        all_acknowledged(&server, &stream).await;
        supervisor.shutdown().await.unwrap();
        assert_eq!(recorder.count(), 2 * LOAD, "{point}");
        assert_eq!(server.xlen(&stream), 2 * LOAD as i64, "{point}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_keep_alive_that_dies_lets_nobody_take_what_is_being_worked_on() {
    let server = Server::start(Server::default_version());
    for point in ["keep_alive.before", "keep_alive.kept"] {
        let (stream, _) = stream_of(&server, point);
        let gate = Gate::closed();
        let recorder = Recorder::behind(&gate);
        let (min_idle, interval) = (Duration::from_secs(3), ms(300));
        let tail = Subscription::tail(&*stream).workers(4).keep_alive(interval);
        let supervisor = Supervisor::start(topology(&server.url()).subscribe(recorder.on(tail)))
            .await
            .unwrap();
        let heard = Heard::of(&supervisor);
        let thief = Recorder::acking();
        let reclaim = Subscription::reclaim(&*stream, min_idle).block(ms(100));
        let other = Supervisor::start(topology(&server.url()).subscribe(thief.on(reclaim)))
            .await
            .unwrap();
        let kept = arm("keep_alive.kept", &stream, Fail::Panic, 0..=0);
        let armed = arm(point, &stream, Fail::Panic, 2..=2);
        fill(&server, &stream, 100);
        recorder.reaches(4).await;
        crashed_and_restarted(&heard, &Child::KeepAlive, &armed).await;
        // As many turns as `min_idle` has, and some more.
        let turns = kept.reached() + 25;
        eventually(2 * SOON, "the new one keeps them fresh", || {
            kept.reached() >= turns
        })
        .await;
        gate.open();
        recorder.reaches(100).await;
        all_acknowledged(&server, &stream).await;
        supervisor.shutdown().await.unwrap();
        other.shutdown().await.unwrap();
        assert_eq!((recorder.count(), thief.count()), (100, 0), "{point}");
    }
}

/// B108: a panic that nobody heard of, and a part that was silently missing from then on.
#[tokio::test(flavor = "multi_thread")]
async fn b108_whichever_actor_panics_runs_again_and_the_status_counts_it() {
    let server = Server::start(Server::default_version());
    for point in [
        "reader.before_read",
        "handler.start",
        "handler.between",
        "settler.sent",
        "sweeper.before",
        "keep_alive.before",
    ] {
        let (stream, name) = stream_of(&server, point);
        let set = format!("{stream}.delayed");
        let gate = Gate::closed();
        let recorder = Recorder::running({
            let gate = gate.clone();
            move |call| {
                let gate = gate.clone();
                async move {
                    Ok(match call.text() {
                        "long" => {
                            gate.passed().await;
                            Outcome::Ack
                        }
                        "later" if call.attempt == 1 => Outcome::RetryAfter(ms(20)),
                        _ => Outcome::Ack,
                    })
                }
            }
        });
        let of = match point.split('.').next() {
            Some("settler" | "keep_alive") => &stream,
            Some("sweeper") => &set,
            _ => &name,
        };
        let armed = arm(point, of, Fail::Panic, 1..=1);
        let tail = Subscription::tail(&*stream)
            .block(ms(50))
            .workers(2)
            .keep_alive(ms(50))
            .delayed_retry(DelayedRetry::durable(&*set));
        let supervisor = Supervisor::start(topology(&server.url()).subscribe(recorder.on(tail)))
            .await
            .unwrap();
        let heard = Heard::of(&supervisor);
        // Each part has something to do.
        let bodies = ["later", "long"];
        server.xadd_many(&stream, bodies.map(|body| vec![("_payload", body)]));
        recorder.reaches(3).await;
        eventually(SOON, point, || !restarted(&heard).is_empty()).await;
        let child = crashed(&heard).remove(0);
        crashed_and_restarted(&heard, &child, &armed).await;

        let status = supervisor.status().await;
        let [restarts] = &status.restarts[..] else {
            panic!("{point}: {:?}", status.restarts);
        };
        assert_eq!((&restarts.child, restarts.restarts), (&child, 1), "{point}");
        let told = &status.subscriptions[0];
        let (of_it, expected) = match &child {
            Child::Reader { .. } | Child::Handler { .. } => (true, point.split('.').next()),
            Child::Settler { .. } => (false, Some("settler")),
            Child::Sweeper { .. } => (false, Some("sweeper")),
            _ => (false, Some("keep_alive")),
        };
        assert!(point.starts_with(expected.unwrap()), "{point}: {child}");
        assert_eq!(told.restarts, u64::from(of_it), "{point}");
        if of_it {
            let error = &told.last_error.as_ref().expect("it is kept").error;
            assert!(error.contains(point), "{error}");
        }
        // It works as before, all of it.
        gate.open();
        server.xadd_many(&stream, ["later"; 20].map(|body| vec![("_payload", body)]));
        recorder.reaches(3 + 40).await;
        all_acknowledged(&server, &stream).await;
        assert_eq!(
            supervisor.status().await.subscriptions[0].state,
            State::Running
        );
        supervisor.shutdown().await.unwrap();
        assert_eq!(recorder.count(), recorder.distinct(), "{point}");
    }
}

/// B108, for a part that keeps panicking.
#[tokio::test(flavor = "multi_thread")]
async fn b108_what_cannot_be_started_again_is_shown_as_failed() {
    let server = Server::start(Server::default_version());
    for point in ["reader.before_read", "handler.start", "settler.sent"] {
        let (stream, name) = stream_of(&server, point);
        let of = if point == "settler.sent" {
            &stream
        } else {
            &name
        };
        let armed = arm(point, of, Fail::Panic, 1..=u64::MAX);
        let isolated = RestartPolicy::default()
            .max_restarts(1)
            .backoff(ms(10), ms(10))
            .isolate();
        let tail = Subscription::tail(&*stream).block(ms(50)).workers(1);
        let supervisor = Supervisor::start(
            topology(&server.url())
                .shutdown_timeout(ms(500))
                .restart(isolated)
                .subscribe(Recorder::acking().on(tail)),
        )
        .await
        .unwrap();
        let heard = Heard::of(&supervisor);
        fill(&server, &stream, 1);
        eventually(SOON, point, || !escalated(&heard).is_empty()).await;
        let status = supervisor.status().await;
        assert_eq!(status.subscriptions[0].state, State::Failed, "{point}");
        assert_eq!(status.restarts.len(), 1, "{point}");
        assert_eq!(
            (&status.restarts[0].child, status.restarts[0].restarts),
            (&escalated(&heard)[0], 1),
            "{point}"
        );
        assert_eq!(armed.failed(), 2, "{point}");
        supervisor.shutdown().await.unwrap();
    }
}

/// A handler that panics when its worker ends in good order.
struct PanicsAtTheEnd(Recorder);

impl Handler for PanicsAtTheEnd {
    type Message = Entry;
    type State = Worker;

    async fn start(&self, worker: Worker) -> Result<Worker, BoxError> {
        self.0.start(worker).await
    }

    async fn handle(&self, entry: Entry, context: &Context, worker: &mut Worker) -> Answer {
        self.0.handle(entry, context, worker).await
    }

    async fn stop(&self, worker: Worker) {
        let index = worker.index();
        self.0.stop(worker).await;
        assert!(index != 1, "the end, as this test wants it");
    }
}

/// Runs a tree of three workers of which one panics when it stops, to its end.
async fn panics_at_the_end() -> (Recorder, Heard, Child) {
    let server = Server::start(Server::default_version());
    let (stream, name) = stream_of(&server, "end");
    let recorder = Recorder::acking();
    let tasks = alive_tasks();
    let tail = Subscription::tail(&*stream)
        .workers(3)
        .codec(Raw)
        .handle(PanicsAtTheEnd(recorder.clone()));
    let supervisor = Supervisor::start(topology(&server.url()).subscribe(tail))
        .await
        .unwrap();
    let heard = Heard::of(&supervisor);
    fill(&server, &stream, 100);
    recorder.reaches(100).await;
    all_acknowledged(&server, &stream).await;
    let report = supervisor.shutdown().await.unwrap();
    assert!(report.left_running.is_empty() && report.unsettled.is_empty());
    drop(supervisor);
    nothing_is_left(&server, tasks).await;
    (recorder, heard, handler(&name, 1))
}

/// B108, for a panic inside of a stop.
#[tokio::test(flavor = "multi_thread")]
async fn b108_a_worker_that_panics_while_it_stops_does_not_hold_up_the_stop() {
    let (recorder, heard, _) = panics_at_the_end().await;
    assert_eq!(recorder.stopped().len(), 3);
    assert!(restarted(&heard).is_empty() && escalated(&heard).is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn b108_a_worker_that_panics_while_it_stops_is_told_of() {
    for _ in 0..10 {
        let (_, heard, child) = panics_at_the_end().await;
        assert_eq!(crashed(&heard), [child]);
    }
}

// ---- handlers -----------------------------------------------------------------------------------------

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_dies_at_any_step_costs_at_most_the_entry_that_it_ran() {
    let server = Server::start(Server::default_version());
    // How many handlings there are in all: a crash after the application's code has run makes it run
    // again.
    for (point, calls) in [
        ("handler.start", LOAD),
        ("handler.between", LOAD),
        ("handler.started", LOAD),
        ("handler.returned", LOAD + 1),
        ("handler.settled", LOAD),
    ] {
        let (stream, name) = stream_of(&server, point);
        let recorder = Recorder::acking();
        let on = match point {
            "handler.start" => 1,
            // Once for a share of work.
            "handler.between" => 20,
            _ => 500,
        };
        let armed = arm(point, &name, Fail::Panic, on..=on);
        let tail = Subscription::tail(&*stream).retry(RetryPolicy::exponential(ms(10)));
        let supervisor = Supervisor::start(topology(&server.url()).subscribe(recorder.on(tail)))
            .await
            .unwrap();
        let heard = Heard::of(&supervisor);
        fill(&server, &stream, LOAD);
        eventually(SOON, point, || {
            recorder.count() >= calls && armed.failed() == 1
        })
        .await;
        all_acknowledged(&server, &stream).await;
        eventually(SOON, "the worker runs again", || {
            restarted(&heard).len() == 1
        })
        .await;
        assert!(
            matches!(&*crashed(&heard), [Child::Handler { subscription, .. }] if **subscription == *name)
        );
        supervisor.shutdown().await.unwrap();
        assert_eq!(recorder.count(), calls, "{point}");
        let retries = server.xlen(&stream) - LOAD as i64;
        let retried = matches!(point, "handler.started" | "handler.returned");
        assert_eq!(retries, i64::from(retried), "{point}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_dies_after_a_start_was_counted_has_it_counted_once() {
    let server = Arc::new(Server::start(Server::default_version()));
    let (stream, name) = stream_of(&server, "counted");
    fill(&server, &stream, 100);
    leave_behind(&server, &stream, "me");
    let recorder = checking_counts(&server, &stream);
    let armed = arm("handler.counted", &name, Fail::Panic, 10..=10);
    let tail = Subscription::tail(&*stream).consumer("me");
    let supervisor = Supervisor::start(topology(&server.url()).subscribe(recorder.on(tail)))
        .await
        .unwrap();
    recorder.reaches(100).await;
    all_acknowledged(&server, &stream).await;
    assert_eq!(armed.failed(), 1);
    supervisor.shutdown().await.unwrap();
    assert_eq!((recorder.count(), recorder.distinct()), (100, 100));
    assert!(recorder.calls().iter().all(|call| call.delivery_count == 2));
}

/// B112: after a crash, queued work waited for the next new message.
#[tokio::test(flavor = "multi_thread")]
async fn b112_what_waits_behind_a_panic_goes_to_the_replacement_in_order_and_unasked() {
    let server = Server::start(Server::default_version());
    let (stream, name) = stream_of(&server, "b112");
    let recorder = Recorder::running(|call| async move {
        // Not in the first poll, for once.
        tokio::task::yield_now().await;
        if call.text() == "0" && call.attempt == 1 {
            panic!("on purpose");
        }
        Ok(Outcome::Ack)
    });
    let entries = (0..20).map(|n| vec![("_payload", n.to_string()), ("h:key", "k".to_owned())]);
    let ids = server.xadd_many(&stream, entries);
    let tail = Subscription::tail(&*stream)
        .workers(4)
        .ordered_by("key")
        .retry(RetryPolicy::exponential(ms(200)));
    let supervisor = Supervisor::start(topology(&server.url()).subscribe(recorder.on(tail)))
        .await
        .unwrap();
    let heard = Heard::of(&supervisor);
    recorder.reaches(21).await;
    all_acknowledged(&server, &stream).await;
    supervisor.shutdown().await.unwrap();
    assert_eq!(recorder.ids()[..20], ids);
    let calls = recorder.calls();
    let (first, again) = (&calls[0], &calls[20]);
    assert_eq!((calls.len(), again.text(), again.attempt), (21, "0", 2));
    assert_eq!(again.header("retry-count"), None);
    // One key, one worker; its replacement is the same worker with a new state.
    assert!(calls[..20].iter().all(|call| call.worker == first.worker));
    let starts = recorder.started();
    let of_this = starts
        .iter()
        .filter(|start| start.0 == first.worker)
        .count();
    assert_eq!(of_this, 2);
    assert_eq!(crashed(&heard), [handler(&name, first.worker)]);
    assert_eq!(restarted(&heard), [handler(&name, first.worker)]);
}

/// B112, with nothing that could wake anybody: no copy is made, nothing is added, no read comes back.
#[tokio::test(flavor = "multi_thread")]
async fn b112_what_waits_behind_a_panic_needs_no_stimulus_from_outside() {
    let server = Server::start(Server::default_version());
    for (mode, ordered) in [
        (Mode::Tail, false),
        (Mode::Tail, true),
        (Mode::Reclaim, false),
        (Mode::Reclaim, true),
    ] {
        let (stream, _) = stream_of(&server, "unasked");
        let recorder = Recorder::running(|call| async move {
            tokio::task::yield_now().await;
            assert!(call.text() != "0", "on purpose");
            Ok(Outcome::Ack)
        });
        let ids = fill(&server, &stream, 10);
        let draft = match mode {
            Mode::Tail => Subscription::tail(&*stream),
            _ => {
                for id in server.read_as(&stream, GROUP, "dead", 10) {
                    server.give_to(&stream, GROUP, "dead", &id, (2 * LONG, 1));
                }
                Subscription::reclaim(&*stream, LONG)
            }
        };
        let draft = draft.workers(1).block(LONG).on_crash(OnCrash::LeavePending);
        let draft = if ordered {
            draft.ordered_by("key")
        } else {
            draft
        };
        let supervisor = Supervisor::start(topology(&server.url()).subscribe(recorder.on(draft)))
            .await
            .unwrap();
        let heard = Heard::of(&supervisor);
        recorder.reaches(10).await;
        eventually(SOON, "nine are acknowledged", || {
            server.xpending_count(&stream, GROUP) == 1
        })
        .await;
        assert_eq!(recorder.ids(), ids, "{mode:?}, ordered: {ordered}");
        assert_eq!(server.xpending(&stream, GROUP)[0].0, ids[0]);
        assert_eq!((crashed(&heard).len(), restarted(&heard).len()), (1, 1));
        assert_eq!(server.xlen(&stream), 10);
        supervisor.shutdown().await.unwrap();
    }
}

/// B115: the factory forgot the job that its worker died over. B17: one panic ended the subscription.
#[tokio::test(flavor = "multi_thread")]
async fn b115_entries_that_panic_are_settled_at_once_by_the_policy_and_all_others_run_once() {
    let server = Server::start(Server::default_version());
    let (stream, _) = stream_of(&server, "b115");
    let dead = format!("{stream}.dead");
    let recorder = Recorder::answering(|call| {
        let number: usize = call.text().parse().unwrap();
        if number % 10 == 5 && (call.attempt == 1 || number == 55) {
            panic!("number {number} does not agree with me");
        }
        Ok(Outcome::Ack)
    });
    // Nothing recovers here: what comes back, comes back by the policy.
    let tail = Subscription::tail(&*stream).dead_letter(&*dead).retry(
        RetryPolicy::exponential(ms(10))
            .max_attempts(3)
            .then_dead_letter(),
    );
    let supervisor = Supervisor::start(topology(&server.url()).subscribe(recorder.on(tail)))
        .await
        .unwrap();
    let heard = Heard::of(&supervisor);
    let ids = fill(&server, &stream, 100);
    eventually(SOON, "the one that panics for ever is dead", || {
        server.xlen(&dead) == 1
    })
    .await;
    all_acknowledged(&server, &stream).await;
    // 100 first calls, 9 entries that do well the second time, one with three.
    assert_eq!(recorder.count(), 100 + 9 + 2);
    for call in recorder.calls().iter().filter(|call| call.attempt > 1) {
        assert_eq!(call.text().parse::<usize>().unwrap() % 10, 5);
    }
    let (_, letter) = server.xrange(&dead).remove(0);
    let field = |name: &str| {
        let found = letter.iter().find(|(field, _)| field == name.as_bytes());
        String::from_utf8(found.unwrap_or_else(|| panic!("no {name}")).1.clone()).unwrap()
    };
    assert_eq!(field("_payload"), "55");
    assert_eq!(field("h:dead-attempts"), "3");
    assert!(field("h:dead-error").contains("number 55 does not agree"));
    assert_ne!(
        field("h:dead-entry-id"),
        ids[55],
        "the copy died, not the first"
    );
    assert_eq!(crashed(&heard).len(), 12);
    assert!(escalated(&heard).is_empty());
    supervisor.shutdown().await.unwrap();
}

/// A handler whose first starts fail, by an error and by a panic in turn.
struct StartsLate {
    recorder: Recorder,
    fails: usize,
    starts: Arc<AtomicUsize>,
}

impl Handler for StartsLate {
    type Message = Entry;
    type State = Worker;

    async fn start(&self, worker: Worker) -> Result<Worker, BoxError> {
        let start = self.starts.fetch_add(1, Ordering::SeqCst);
        match start % 2 {
            _ if start >= self.fails => self.recorder.start(worker).await,
            0 => Err("the store is not there".into()),
            _ => panic!("the store is not there"),
        }
    }

    async fn handle(&self, entry: Entry, context: &Context, worker: &mut Worker) -> Answer {
        self.recorder.handle(entry, context, worker).await
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn b115_a_handler_that_cannot_start_three_times_in_a_row_is_within_its_budget() {
    let server = Server::start(Server::default_version());
    let (stream, name) = stream_of(&server, "late");
    let recorder = Recorder::acking();
    let starts = Arc::new(AtomicUsize::new(0));
    let late = StartsLate {
        recorder: recorder.clone(),
        fails: 3,
        starts: Arc::clone(&starts),
    };
    let tail = Subscription::tail(&*stream)
        .workers(1)
        .codec(Raw)
        .handle(late);
    let restart = RestartPolicy::default()
        .max_restarts(3)
        .backoff(ms(10), ms(50));
    let supervisor = Supervisor::start(topology(&server.url()).restart(restart).subscribe(tail))
        .await
        .unwrap();
    let heard = Heard::of(&supervisor);
    let ids = fill(&server, &stream, 100);
    recorder.reaches(100).await;
    all_acknowledged(&server, &stream).await;
    supervisor.shutdown().await.unwrap();
    assert_eq!(recorder.ids(), ids);
    assert_eq!(starts.load(Ordering::SeqCst), 4);
    assert_eq!(crashed(&heard), vec![handler(&name, 0); 3]);
    assert_eq!(restarted(&heard), vec![handler(&name, 0); 3]);
}

#[tokio::test(flavor = "multi_thread")]
async fn b115_a_handler_that_can_never_start_ends_the_tree_and_says_why() {
    let server = Server::start(Server::default_version());
    let (stream, name) = stream_of(&server, "never");
    let never = StartsLate {
        recorder: Recorder::acking(),
        fails: usize::MAX,
        starts: Arc::default(),
    };
    let tail = Subscription::tail(&*stream)
        .workers(1)
        .codec(Raw)
        .handle(never);
    let restart = RestartPolicy::default()
        .max_restarts(3)
        .backoff(ms(10), ms(50));
    fill(&server, &stream, 10);
    let supervisor = Supervisor::start(topology(&server.url()).restart(restart).subscribe(tail))
        .await
        .unwrap();
    let heard = Heard::of(&supervisor);
    let failure = failure_of(&supervisor).await;
    assert_eq!(failure.child, handler(&name, 0));
    assert!(
        failure.to_string().contains("the store is not there"),
        "{failure}"
    );
    assert_eq!(restarted(&heard).len(), 3);
    // What was read meanwhile is given back.
    for (id, _, idle, count) in server.xpending(&stream, GROUP) {
        assert_eq!(count, 0, "{id} was never started");
        assert!(idle > 24 * LONG, "{id} is idle for {idle:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn b115_a_handler_that_cannot_start_takes_no_other_subscription_along() {
    let server = Server::start(Server::default_version());
    let ((stream, name), (other, _)) = (stream_of(&server, "cannot"), stream_of(&server, "other"));
    let starts = Arc::new(AtomicUsize::new(0));
    let never = StartsLate {
        recorder: Recorder::acking(),
        fails: usize::MAX,
        starts: Arc::clone(&starts),
    };
    let recorder = Recorder::acking();
    let isolated = RestartPolicy::default()
        .max_restarts(3)
        .backoff(ms(10), ms(50))
        .isolate();
    let (failing, working) = (Subscription::tail(&*stream), Subscription::tail(&*other));
    let supervisor = Supervisor::start(
        topology(&server.url())
            .restart(isolated)
            .subscribe(failing.workers(1).codec(Raw).handle(never))
            .subscribe(recorder.on(working)),
    )
    .await
    .unwrap();
    let heard = Heard::of(&supervisor);
    fill(&server, &stream, 10);
    fill(&server, &other, 100);
    eventually(SOON, "it is given up", || !escalated(&heard).is_empty()).await;
    fill(&server, &other, 100);
    recorder.reaches(200).await;
    all_acknowledged(&server, &other).await;
    let status = supervisor.status().await;
    assert_eq!(
        [status.subscriptions[0].state, status.subscriptions[1].state],
        [State::Failed, State::Running]
    );
    let error = &status.subscriptions[0].last_error.as_ref().unwrap().error;
    assert!(error.contains("the store is not there"), "{error}");
    assert_eq!(
        starts.load(Ordering::SeqCst),
        4,
        "one start, three restarts"
    );
    assert_eq!(crashed(&heard), vec![handler(&name, 0); 4]);
    eventually(SOON, "what it had read is free for others", || {
        let pending = server.xpending(&stream, GROUP);
        pending.iter().all(|entry| entry.2 > 24 * LONG)
    })
    .await;
    supervisor.shutdown().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_crashes_over_every_entry_is_slowed_down_and_given_up_in_the_end() {
    let server = Server::start(Server::default_version());
    let (stream, name) = stream_of(&server, "row");
    let recorder = Recorder::answering(|_| panic!("nothing agrees with me"));
    let tail = Subscription::tail(&*stream)
        .workers(1)
        .on_crash(OnCrash::LeavePending);
    let restart = RestartPolicy::default()
        .max_restarts(2)
        .backoff(ms(10), ms(50));
    let supervisor = Supervisor::start(
        topology(&server.url())
            .restart(restart)
            .subscribe(recorder.on(tail)),
    )
    .await
    .unwrap();
    let heard = Heard::of(&supervisor);
    fill(&server, &stream, 100);
    let failure = failure_of(&supervisor).await;
    assert_eq!(failure.child, handler(&name, 0));
    assert!(failure.error.contains("nothing agrees with me"));
    // Four crashes in a row are the entries' own, the fifth and all after it are the worker's.
    assert_eq!(recorder.count(), 4 + 2 + 1);
    assert_eq!(restarted(&heard).len(), 4 + 2);
    assert_eq!(escalated(&heard), [handler(&name, 0)]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_success_now_and_then_keeps_a_crashing_worker_within_its_budget() {
    let server = Server::start(Server::default_version());
    let (stream, name) = stream_of(&server, "now-and-then");
    let recorder = Recorder::answering(|call| {
        let number: usize = call.text().parse().unwrap();
        assert!(number % 5 == 4, "on purpose");
        Ok(Outcome::Ack)
    });
    let dead = format!("{stream}.dead");
    let tail = Subscription::tail(&*stream)
        .workers(1)
        .dead_letter(&*dead)
        .on_crash(OnCrash::DeadLetter);
    let none = RestartPolicy::default().max_restarts(0);
    let supervisor = Supervisor::start(
        topology(&server.url())
            .restart(none)
            .subscribe(recorder.on(tail)),
    )
    .await
    .unwrap();
    let heard = Heard::of(&supervisor);
    fill(&server, &stream, 50);
    recorder.reaches(50).await;
    all_acknowledged(&server, &stream).await;
    supervisor.shutdown().await.unwrap();
    assert_eq!((recorder.count(), server.xlen(&dead)), (50, 40));
    assert_eq!(crashed(&heard), vec![handler(&name, 0); 40]);
}

// ---- budgets --------------------------------------------------------------------------------------------

/// A tree of two subscriptions. The one has an actor that will keep dying; the other has one entry
/// that runs and nineteen that wait.
struct Doomed {
    stream: String,
    name: String,
    delayed: String,
    gate: Gate,
    other: String,
    other_gate: Gate,
    other_recorder: Recorder,
}

impl Doomed {
    fn new(server: &Server, what: &str) -> (Doomed, Topology) {
        let (stream, name) = stream_of(server, what);
        let (other, _) = stream_of(server, "other");
        let delayed = format!("{stream}.delayed");
        let other_gate = Gate::closed();
        let doomed = Doomed {
            other_recorder: Recorder::behind(&other_gate),
            stream,
            name,
            delayed,
            gate: Gate::closed(),
            other,
            other_gate,
        };
        let tail = Subscription::tail(&*doomed.stream)
            .block(ms(50))
            .keep_alive(ms(50))
            .delayed_retry(DelayedRetry::durable(&*doomed.delayed));
        let other = Subscription::tail(&*doomed.other).workers(1);
        let topology = topology(&server.url())
            .shutdown_timeout(Duration::from_secs(3))
            .subscribe(Recorder::behind(&doomed.gate).on(tail))
            .subscribe(doomed.other_recorder.on(other));
        (doomed, topology)
    }

    async fn other_is_at_work(&self, server: &Server) {
        fill(server, &self.other, 20);
        self.other_recorder.reaches(1).await;
        eventually(SOON, "the other has 20 in hand", || {
            server.xpending_count(&self.other, GROUP) == 20
        })
        .await;
    }

    /// Lets the other's handler end once what waits there was given back.
    async fn other_may_end(&self, server: &Server) {
        eventually(SOON, "what waits is given back", || {
            let pending = server.xpending(&self.other, GROUP);
            pending.iter().filter(|entry| entry.3 == 0).count() == 19
        })
        .await;
        self.other_gate.open();
    }

    /// What waited there is claimable at once and counts as never started; what ran is settled.
    fn other_was_drained(&self, server: &Server) {
        let pending = server.xpending(&self.other, GROUP);
        assert_eq!(pending.len(), 19);
        for (id, _, idle, count) in pending {
            assert_eq!(count, 0, "{id} was never started");
            assert!(idle > 24 * LONG, "{id} is idle for {idle:?}");
        }
        assert_eq!(self.other_recorder.count(), 1);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_spent_budget_drains_the_tree_and_ends_it_with_an_error_that_names_the_child() {
    let server = Server::start(Server::default_version());
    for point in [
        "reader.before_read",
        "settler.sent",
        "sweeper.before",
        "keep_alive.before",
        "handler.between",
    ] {
        let (doomed, topology) = Doomed::new(&server, point);
        let (of, child) = match point {
            "reader.before_read" => (&doomed.name, reader(&doomed.name)),
            "settler.sent" => (&doomed.stream, settler(&doomed.stream)),
            "sweeper.before" => (
                &doomed.delayed,
                Child::Sweeper {
                    set: (&*doomed.delayed).into(),
                },
            ),
            "keep_alive.before" => (&doomed.stream, Child::KeepAlive),
            _ => (&doomed.name, handler(&doomed.name, 0)),
        };
        let restart = RestartPolicy::default()
            .max_restarts(2)
            .backoff(ms(10), ms(50));
        let tasks = alive_tasks();
        let supervisor = Supervisor::start(topology.restart(restart)).await.unwrap();
        let heard = Heard::of(&supervisor);
        doomed.other_is_at_work(&server).await;
        let armed = arm(point, of, Fail::Panic, 1..=u64::MAX);
        // Only what runs for a while is kept alive.
        if child != Child::KeepAlive {
            doomed.gate.open();
        }
        fill(&server, &doomed.stream, 8);
        eventually(SOON, point, || !escalated(&heard).is_empty()).await;
        doomed.gate.open();
        doomed.other_may_end(&server).await;
        let failure = failure_of(&supervisor).await;
        if let (
            Child::Handler { subscription, .. },
            Child::Handler {
                subscription: of, ..
            },
        ) = (&failure.child, &child)
        {
            // Whichever of the workers it was.
            assert_eq!(subscription, of);
        } else {
            assert_eq!(failure.child, child);
            // Two restarts, and the third crash is one too many.
            assert_eq!(restarted(&heard), vec![child; 2], "{point}");
            assert_eq!(armed.failed(), 3, "{point}");
        }
        let text = failure.to_string();
        assert!(text.contains(&failure.child.to_string()), "{text}");
        assert!(text.contains("fail point"), "{text}");
        let again = supervisor.shutdown().await.unwrap_err();
        assert_eq!(again, ShutdownError::Failed(failure), "{point}");
        doomed.other_was_drained(&server);
        drop(supervisor);
        nothing_is_left(&server, tasks).await;
    }
}

fn alive_tasks() -> usize {
    tokio::runtime::Handle::current()
        .metrics()
        .num_alive_tasks()
}

/// Neither a connection nor a task.
async fn nothing_is_left(server: &Server, tasks_before: usize) {
    eventually(SOON, "no connection is left", || {
        server.client_list().is_empty()
    })
    .await;
    eventually(SOON, "no task is left", || alive_tasks() <= tasks_before).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_isolated_child_that_keeps_dying_fails_only_its_subscription() {
    let server = Server::start(Server::default_version());
    for point in ["reader.before_read", "settler.sent", "handler.between"] {
        let (doomed, topology) = Doomed::new(&server, point);
        let of = if point == "settler.sent" {
            &doomed.stream
        } else {
            &doomed.name
        };
        let isolated = RestartPolicy::default()
            .max_restarts(2)
            .backoff(ms(10), ms(50))
            .isolate();
        let supervisor = Supervisor::start(topology.restart(isolated)).await.unwrap();
        let heard = Heard::of(&supervisor);
        doomed.other_is_at_work(&server).await;
        doomed.gate.open();
        let armed = arm(point, of, Fail::Panic, 1..=u64::MAX);
        fill(&server, &doomed.stream, 8);
        eventually(SOON, point, || !escalated(&heard).is_empty()).await;
        drop(armed);
        // The others go on.
        doomed.other_gate.open();
        fill(&server, &doomed.other, 100);
        doomed.other_recorder.reaches(120).await;
        all_acknowledged(&server, &doomed.other).await;
        assert!(
            restarted(&heard).iter().all(|child| match child {
                Child::Reader { subscription } | Child::Handler { subscription, .. } =>
                    **subscription == *doomed.name,
                Child::Settler { stream, .. } => *stream == *doomed.stream,
                _ => false,
            }),
            "{point}: {:?}",
            restarted(&heard)
        );
        // The failed one reads no more, for good.
        eventually(SOON, "its reader has gone", || {
            let connections = server.client_list();
            !connections
                .iter()
                .any(|line| line.contains(&format!("reader-{}", doomed.name)))
        })
        .await;
        let delivered = server.xpending_count(&doomed.stream, GROUP);
        fill(&server, &doomed.stream, 10);
        fill(&server, &doomed.other, 10);
        doomed.other_recorder.reaches(130).await;
        assert_eq!(
            server.xpending_count(&doomed.stream, GROUP),
            delivered,
            "{point}"
        );
        supervisor.shutdown().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_subscription_gives_back_what_waits_and_what_was_on_its_way_to_it() {
    let server = Server::start(Server::default_version());
    let (doomed, topology) = Doomed::new(&server, "given-back");
    let isolated = RestartPolicy::default().max_restarts(0).isolate();
    let supervisor = Supervisor::start(topology.restart(isolated)).await.unwrap();
    let heard = Heard::of(&supervisor);
    // Entries wait, and the reader holds further ones that nobody knows of yet.
    fill(&server, &doomed.stream, 20);
    eventually(SOON, "all are in hand", || {
        server.xpending_count(&doomed.stream, GROUP) == 20
    })
    .await;
    let idle = arm("reader.before_read", &doomed.name, Fail::Pause, 1..=1);
    eventually(SOON, "the reader stands still", || idle.failed() == 1).await;
    fill(&server, &doomed.stream, 5);
    let mut held = arm("reader.reply", &doomed.name, Fail::Pause, 1..=1);
    idle.release();
    loop {
        eventually(SOON, "the reader holds a reply", || held.failed() == 1).await;
        if server.xpending_count(&doomed.stream, GROUP) == 25 {
            break;
        }
        // An empty one, to a read that had left before there were any.
        let next = arm("reader.reply", &doomed.name, Fail::Pause, 1..=1);
        held.release();
        held = next;
    }
    let dies = arm("handler.settled", &doomed.name, Fail::Panic, 1..=1);
    doomed.gate.open();
    eventually(SOON, "it has failed", || !escalated(&heard).is_empty()).await;
    drop(dies);
    held.release();
    eventually(SOON, "nothing is held back from others", || {
        let pending = server.xpending(&doomed.stream, GROUP);
        pending.len() >= 5 && pending.iter().all(|entry| entry.2 > 24 * LONG)
    })
    .await;
    let heir = Recorder::acking();
    let reclaim = Subscription::reclaim(&*doomed.stream, LONG).block(ms(100));
    let other = Supervisor::start(record::topology(&server.url()).subscribe(heir.on(reclaim)))
        .await
        .unwrap();
    all_acknowledged(&server, &doomed.stream).await;
    other.shutdown().await.unwrap();
    doomed.other_gate.open();
    supervisor.shutdown().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_group_without_a_settler_cannot_store_is_left_to_others() {
    let server = Server::start(Server::default_version());
    let (doomed, topology) = Doomed::new(&server, "unsettled");
    let isolated = RestartPolicy::default().max_restarts(0).isolate();
    let supervisor = Supervisor::start(topology.restart(isolated)).await.unwrap();
    let heard = Heard::of(&supervisor);
    let dies = arm("settler.sent", &doomed.stream, Fail::Panic, 1..=u64::MAX);
    fill(&server, &doomed.stream, 8);
    eventually(SOON, "all are in hand", || {
        server.xpending_count(&doomed.stream, GROUP) == 8
    })
    .await;
    doomed.gate.open();
    eventually(SOON, "it has failed", || !escalated(&heard).is_empty()).await;
    // The other process has a settler of the same stream.
    drop(dies);
    // This process keeps fresh what it has in hand, and nobody in it can store these verdicts.
    let heir = Recorder::acking();
    let reclaim = Subscription::reclaim(&*doomed.stream, ms(500)).block(ms(100));
    let other = Supervisor::start(record::topology(&server.url()).subscribe(heir.on(reclaim)))
        .await
        .unwrap();
    heir.reaches(8).await;
    all_acknowledged(&server, &doomed.stream).await;
    other.shutdown().await.unwrap();
    supervisor.shutdown().await.unwrap();
}

/// B3: a lost group turned restarts into a loop without a pause.
#[tokio::test(flavor = "multi_thread")]
async fn b3_a_lost_group_that_is_not_to_be_made_again_costs_a_budget_and_nothing_else() {
    let server = Server::start(Server::default_version());
    let ((stream, name), (other, _)) = (stream_of(&server, "b3"), stream_of(&server, "other"));
    let recorder = Recorder::acking();
    let policy = RestartPolicy::default()
        .max_restarts(3)
        .backoff(ms(100), ms(400))
        .isolate();
    let block = Duration::from_secs(10);
    let lost = Subscription::tail(&*stream)
        .create_group(false)
        .block(block);
    let supervisor = Supervisor::start(
        topology(&server.url())
            .restart(policy)
            .subscribe(recorder.on(lost))
            .subscribe(recorder.on(Subscription::tail(&*other).block(block))),
    )
    .await
    .unwrap();
    let heard = Heard::of(&supervisor);
    fill(&server, &stream, 1);
    fill(&server, &other, 1);
    recorder.reaches(2).await;
    all_acknowledged(&server, &stream).await;
    let (reads, began) = (server.commandstat("xreadgroup"), std::time::Instant::now());
    server.command(&["XGROUP", "DESTROY", &stream, GROUP]);
    eventually(SOON, "it is given up", || !escalated(&heard).is_empty()).await;
    // At once, then after some 100 and 200 ms.
    assert!(began.elapsed() > ms(150), "{:?}", began.elapsed());
    assert_eq!(restarted(&heard), vec![reader(&name); 3]);
    assert_eq!(escalated(&heard), [reader(&name)]);
    let status = supervisor.status().await.subscriptions;
    assert_eq!(
        [status[0].state, status[1].state],
        [State::Failed, State::Running]
    );
    let error = &status[0].last_error.as_ref().unwrap().error;
    assert!(error.contains("NOGROUP"), "{error}");
    fill(&server, &other, 100);
    recorder.reaches(102).await;
    all_acknowledged(&server, &other).await;
    let reads = server.commandstat("xreadgroup") - reads;
    assert!(reads <= 30, "{reads} reads for four tries and 100 entries");
    supervisor.shutdown().await.unwrap();
}

/// B121: five children that failed once each used up one budget.
#[tokio::test(flavor = "multi_thread")]
async fn b121_children_that_crash_once_each_do_not_share_a_budget() {
    let server = Server::start(Server::default_version());
    let recorder = Recorder::acking();
    let (mut topology, mut all, mut armed) = (topology(&server.url()), Vec::new(), Vec::new());
    for number in 0..5 {
        let (stream, name) = stream_of(&server, "b121");
        topology = topology.subscribe(recorder.on(Subscription::tail(&*stream).block(ms(50))));
        let point = ["reader.reply", "settler.answered"][number % 2];
        let of = [&name, &stream][number % 2];
        armed.push(arm(point, of, Fail::Panic, 2..=2));
        all.push(stream);
    }
    let one = RestartPolicy::default().max_restarts(1).within(LONG);
    let supervisor = Supervisor::start(topology.restart(one)).await.unwrap();
    let heard = Heard::of(&supervisor);
    for stream in &all {
        fill(&server, stream, LOAD / 5);
    }
    recorder.reaches(LOAD).await;
    eventually(SOON, "all five crashed and run again", || {
        armed.iter().all(|armed| armed.failed() == 1) && restarted(&heard).len() == 5
    })
    .await;
    for stream in &all {
        fill(&server, stream, LOAD / 5);
    }
    recorder.reaches(2 * LOAD).await;
    assert!(escalated(&heard).is_empty());
    let different: HashSet<_> = restarted(&heard).iter().map(ToString::to_string).collect();
    assert_eq!(different.len(), 5);
    supervisor.shutdown().await.unwrap();
    assert_eq!(recorder.count(), 2 * LOAD);
}

/// B121: a crash loop left no line in the log.
#[tokio::test]
async fn b121_one_that_crashes_in_a_loop_fails_alone_and_every_restart_is_logged_and_counted() {
    let (logged, _collecting) = Logged::collect();
    let server = Server::start(Server::default_version());
    let recorder = Recorder::acking();
    let (mut topology, mut all, mut once) = (topology(&server.url()), Vec::new(), Vec::new());
    for _ in 0..5 {
        let (stream, name) = stream_of(&server, "loop");
        topology = topology.subscribe(recorder.on(Subscription::tail(&*stream).block(ms(50))));
        once.push(arm("reader.reply", &name, Fail::Panic, 1..=1));
        all.push((stream, name));
    }
    let three = RestartPolicy::default()
        .max_restarts(3)
        .within(LONG)
        .backoff(ms(10), ms(20))
        .isolate();
    let supervisor = Supervisor::start(topology.restart(three)).await.unwrap();
    let heard = Heard::of(&supervisor);
    let states = || async {
        let status = supervisor.status().await;
        let states = status.subscriptions.iter().map(|it| it.state);
        states.collect::<Vec<_>>()
    };
    for (stream, _) in &all {
        fill(&server, stream, 10);
    }
    eventually(SOON, "each has crashed once", || {
        restarted(&heard).len() == 5
    })
    .await;
    recorder.reaches(50).await;
    assert_eq!(states().await, [State::Running; 5]);

    // The second of them does nothing else from now on.
    let (_, doomed) = &all[1];
    let looping = arm("reader.before_read", doomed, Fail::Panic, 1..=u64::MAX);
    eventually(SOON, "it is given up", || !escalated(&heard).is_empty()).await;
    for (stream, name) in &all {
        if name != doomed {
            fill(&server, stream, 10);
        }
    }
    recorder.reaches(90).await;
    assert_eq!(escalated(&heard), [reader(doomed)]);
    assert_eq!(
        looping.failed(),
        3,
        "two restarts were left of its own budget"
    );
    let mut expected = [State::Running; 5];
    expected[1] = State::Failed;
    assert_eq!(states().await, expected);

    let counted = supervisor.status().await.restarts;
    assert_eq!(counted.len(), 5);
    for (_, name) in &all {
        let restarts = if name == doomed { 3 } else { 1 };
        let of_it = counted.iter().find(|it| it.child == reader(name)).unwrap();
        assert_eq!(of_it.restarts, restarts);
        let told = restarted(&heard);
        let told = told.iter().filter(|child| **child == reader(name)).count();
        assert_eq!(told as u64, restarts);
        let lines = logged.lines(&[name, "WARN", "started again"]);
        assert_eq!(lines.len() as u64, restarts, "{lines:#?}");
        let crashes = logged.lines(&[name, "WARN", "crashed", "fail point"]);
        assert_eq!(crashes.len() as u64, restarts + u64::from(name == doomed));
    }
    let given_up = logged.lines(&["ERROR", "given up"]);
    assert!(
        matches!(&given_up[..], [line] if line.contains(doomed)),
        "{given_up:#?}"
    );
    supervisor.shutdown().await.unwrap();
}

// ---- the end of the supervisor -----------------------------------------------------------------------------

#[tokio::test(flavor = "multi_thread")]
async fn b108_a_killed_supervisor_leaves_no_task_and_no_connection_and_others_recover_its_entries()
{
    let server = Server::start(Server::default_version());
    let (stream, _) = stream_of(&server, "killed");
    let gate = Gate::closed();
    let recorder = Recorder::behind(&gate);
    let tasks = alive_tasks();
    let tail =
        Subscription::tail(&*stream).delayed_retry(DelayedRetry::durable("{killed}.delayed"));
    let supervisor = Supervisor::start(topology(&server.url()).subscribe(recorder.on(tail)))
        .await
        .unwrap();
    fill(&server, &stream, 100);
    recorder.reaches(8).await;
    eventually(SOON, "all are in hand", || {
        server.xpending_count(&stream, GROUP) == 100
    })
    .await;
    supervisor.actor().kill();
    // Whoever waits learns of it, and that it was no shutdown.
    let failure = failure_of(&supervisor).await;
    assert_eq!(failure.child, Child::Supervisor);
    assert!(failure.to_string().contains("the supervisor"), "{failure}");
    drop(supervisor);
    nothing_is_left(&server, tasks).await;
    assert_eq!(recorder.running_now(), 0);
    assert_eq!(server.xpending_count(&stream, GROUP), 100);

    let heir = Recorder::acking();
    let reclaim = Subscription::reclaim(&*stream, ms(300)).block(ms(100));
    let supervisor = Supervisor::start(topology(&server.url()).subscribe(heir.on(reclaim)))
        .await
        .unwrap();
    heir.reaches(100).await;
    all_acknowledged(&server, &stream).await;
    supervisor.shutdown().await.unwrap();
    assert_eq!(
        (heir.count(), heir.distinct(), recorder.count()),
        (100, 100, 8)
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn dropping_the_last_handle_drains_the_tree() {
    let server = Server::start(Server::default_version());
    let (stream, _) = stream_of(&server, "dropped");
    let gate = Gate::closed();
    let recorder = Recorder::behind(&gate);
    let tasks = alive_tasks();
    let tail = Subscription::tail(&*stream).workers(2);
    let supervisor = Supervisor::start(topology(&server.url()).subscribe(recorder.on(tail)))
        .await
        .unwrap();
    fill(&server, &stream, 20);
    recorder.reaches(2).await;
    eventually(SOON, "all are in hand", || {
        server.xpending_count(&stream, GROUP) == 20
    })
    .await;
    let second = supervisor.clone();
    drop(supervisor);
    // One is left: it goes on.
    gate.open();
    all_acknowledged(&server, &stream).await;
    gate.close();
    fill(&server, &stream, 20);
    recorder.reaches(22).await;
    eventually(SOON, "all are in hand", || {
        server.xpending_count(&stream, GROUP) == 20
    })
    .await;
    drop(second);
    eventually(SOON, "what waited is given back", || {
        let pending = server.xpending(&stream, GROUP);
        pending.iter().filter(|entry| entry.3 == 0).count() == 18
    })
    .await;
    gate.open();
    nothing_is_left(&server, tasks).await;
    assert_eq!(recorder.count(), 22);
    assert_eq!(server.xpending_count(&stream, GROUP), 18);
    assert_eq!(recorder.stopped().len(), 2);
}
