//! Changing a tree while it runs: what is asked for happens, lasts, and touches nothing else.

mod support;

use std::sync::Arc;
use std::time::{Duration, Instant};

use rand::{Rng, SeedableRng, rngs::StdRng};
use streamvisor::fail_point::{Fail, arm};
use streamvisor::prelude::*;
use streamvisor::ractor::{Actor, ActorProcessingErr, ActorRef};
use streamvisor::{
    ControlError, EntryId, InvalidTopology, ShutdownReport, StartError, State, SubscriptionStatus,
};
use support::record::{GROUP, Gate, Heard, Recorder, SOON, fill, ms, stream_of, topology};
use support::*;
use tokio::sync::OnceCell;

const HOUR: Duration = Duration::from_secs(3600);

async fn in_hand(server: &Server, stream: &str, entries: i64) {
    let what = format!("{entries} entries of {stream} are pending");
    eventually(SOON, &what, || {
        server.xpending_count(stream, GROUP) == entries
    })
    .await;
}

/// How many can be had at once: those that were given back.
fn claimable_at_once(server: &Server, stream: &str) -> usize {
    let pending = server.xpending(stream, GROUP);
    let given_back = pending.iter().filter(|(_, _, idle, _)| *idle > 24 * HOUR);
    given_back.count()
}

async fn given_back(server: &Server, stream: &str, entries: usize) {
    let what = format!("{entries} entries of {stream} are given back");
    eventually(SOON, &what, || claimable_at_once(server, stream) == entries).await;
}

async fn start(server: &Server, subscriptions: Vec<Subscription>) -> SupervisorHandle {
    let topology = subscriptions
        .into_iter()
        .fold(topology(&server.url()), Topology::subscribe);
    Supervisor::start(topology).await.unwrap()
}

async fn status_of(supervisor: &SupervisorHandle, name: &str) -> SubscriptionStatus {
    let mut all = supervisor.status().await.subscriptions;
    all.retain(|it| &*it.name == name);
    all.pop().expect("there should be such a subscription")
}

/// A subscription beside the one that is looked at: once it has handled something, that one would have
/// done so too, if it did anything.
struct Beside {
    stream: String,
    recorder: Recorder,
}

impl Beside {
    fn new(server: &Server) -> (Beside, Subscription) {
        let (stream, recorder) = (stream_of(server, "beside"), Recorder::acking());
        let subscription = recorder.on(Subscription::tail(&*stream));
        (Beside { stream, recorder }, subscription)
    }

    /// Waits until a few rounds of reading and handling have passed.
    async fn rounds(&self, server: &Server) {
        for _ in 0..5 {
            let handled = self.recorder.count();
            fill(server, &self.stream, 20);
            self.recorder.reaches(handled + 20).await;
        }
    }
}

fn consumers(server: &Server, stream: &str) -> usize {
    let reply = server.command(&["XINFO", "CONSUMERS", stream, GROUP]);
    reply.as_array().len()
}

async fn names(supervisor: &SupervisorHandle) -> Vec<String> {
    let all = supervisor.status().await.subscriptions.into_iter();
    all.map(|it| it.name.to_string()).collect()
}

fn alive_tasks() -> usize {
    tokio::runtime::Handle::current()
        .metrics()
        .num_alive_tasks()
}

/// The number that the server gave to the connection of this subscription's reader.
fn connection_of(server: &Server, name: &str) -> Option<String> {
    let all = server.client_list().into_iter();
    let mut its = all.filter(|line| line.contains(&format!("-reader-{name} ")));
    let id = its.next()?.split_whitespace().next()?.to_owned();
    Some(id)
}

fn distinct_and_all(recorder: &Recorder) -> (usize, usize) {
    (recorder.distinct(), recorder.count())
}

// ---- pause and resume ---------------------------------------------------------------------------------

#[tokio::test(flavor = "multi_thread")]
async fn a_paused_tail_starts_nothing_and_takes_up_again_what_it_gave_back() {
    for version in Version::ALL {
        let server = Server::start(version);
        let stream = stream_of(&server, "tail");
        let gate = Gate::closed();
        let recorder = Recorder::behind(&gate);
        let (beside, other) = Beside::new(&server);
        let tail = Subscription::tail(&*stream).named("it").workers(2);
        let supervisor = start(&server, vec![recorder.on(tail), other]).await;
        let heard = Heard::of(&supervisor);
        let first = fill(&server, &stream, 50);
        in_hand(&server, &stream, 50).await;
        recorder.reaches(2).await;

        supervisor.pause("it").await.unwrap();
        supervisor.pause("it").await.unwrap();
        assert_eq!(status_of(&supervisor, "it").await.state, State::Paused);
        given_back(&server, &stream, 48).await;
        // What runs goes on, and its verdict is stored.
        gate.open();
        in_hand(&server, &stream, 48).await;
        let second = fill(&server, &stream, 10);
        beside.rounds(&server).await;
        assert_eq!(recorder.count(), 2, "{version}: nothing was started");
        in_hand(&server, &stream, 48).await;
        let status = status_of(&supervisor, "it").await;
        assert_eq!(
            (status.in_flight, status.waiting, status.running),
            (0, 0, 0)
        );

        supervisor.resume("it").await.unwrap();
        supervisor.resume("it").await.unwrap();
        recorder.reaches(60).await;
        in_hand(&server, &stream, 0).await;
        assert_eq!(status_of(&supervisor, "it").await.state, State::Running);
        supervisor.shutdown().await.unwrap();
        // In order but for those that ran meanwhile, each once, each for the first time.
        let mut handled = recorder.ids();
        handled.sort_by_key(|id| id.parse::<EntryId>().unwrap());
        assert_eq!(handled, [first, second].concat(), "{version}");
        assert!(recorder.calls().iter().all(|call| call.attempt == 1));
        let told = |it: &Event| matches!(it, Event::Paused { .. } | Event::Resumed { .. });
        assert_eq!(heard.count(told), 2, "{version}: each once");
        heard.assert_nobody_crashed();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_paused_reclaim_and_a_paused_claiming_go_on_where_they_stood() {
    let server = Server::start(Version::Redis8);
    for mode in ["reclaim", "claiming"] {
        let stream = stream_of(&server, mode);
        let left = fill(&server, &stream, 30);
        server.read_as(&stream, GROUP, "dead", 30);
        let gate = Gate::closed();
        let recorder = Recorder::behind(&gate);
        let draft = match mode {
            "reclaim" => Subscription::reclaim(&*stream, ms(500)),
            _ => Subscription::claiming(&*stream, ms(500)),
        };
        let (beside, other) = Beside::new(&server);
        let draft = draft.named("it").workers(2).block(ms(50));
        let supervisor = start(&server, vec![recorder.on(draft), other]).await;
        recorder.reaches(2).await;
        eventually(SOON, "all are taken over", || {
            let pending = server.xpending(&stream, GROUP);
            pending.iter().all(|entry| entry.1 != "dead")
        })
        .await;

        supervisor.pause("it").await.unwrap();
        given_back(&server, &stream, 28).await;
        gate.open();
        in_hand(&server, &stream, 28).await;
        for (id, _, _, count) in server.xpending(&stream, GROUP) {
            assert_eq!(count, 1, "{mode}: {id} has its count back");
        }
        beside.rounds(&server).await;
        assert_eq!(recorder.count(), 2, "{mode}: nothing was started");

        supervisor.resume("it").await.unwrap();
        recorder.reaches(30).await;
        in_hand(&server, &stream, 0).await;
        supervisor.shutdown().await.unwrap();
        let mut handled = recorder.ids();
        handled.sort_by_key(|id| id.parse::<EntryId>().unwrap());
        assert_eq!(handled, left, "{mode}");
        // Fetched by the dead consumer, and started here.
        assert!(recorder.calls().iter().all(|call| call.attempt == 2));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_resume_takes_up_neither_what_was_left_on_purpose_nor_what_others_took() {
    let server = Server::start(Server::default_version());
    let stream = stream_of(&server, "others");
    let gate = Gate::closed();
    let recorder = Recorder::running({
        let gate = gate.clone();
        move |call| {
            let gate = gate.clone();
            async move {
                if call.text() == "0" {
                    return Ok(Outcome::LeavePending);
                }
                gate.passed().await;
                Ok(Outcome::Ack)
            }
        }
    });
    let tail = Subscription::tail(&*stream).named("it").workers(1);
    let supervisor = start(&server, vec![recorder.on(tail)]).await;
    let ids = fill(&server, &stream, 40);
    recorder.reaches(2).await;
    in_hand(&server, &stream, 40).await;
    supervisor.pause("it").await.unwrap();
    given_back(&server, &stream, 38).await;
    // One is taken by another consumer, one is settled, one is deleted.
    server.command(&["XCLAIM", &stream, GROUP, "other", "0", &ids[10]]);
    server.command(&["XACK", &stream, GROUP, &ids[11]]);
    server.command(&["XDEL", &stream, &ids[12]]);
    let heard = Heard::of(&supervisor);
    supervisor.resume("it").await.unwrap();
    gate.open();
    recorder.reaches(37).await;
    in_hand(&server, &stream, 2).await;
    eventually(SOON, "the deleted one is told", || !heard.gone().is_empty()).await;
    assert_eq!(heard.gone(), [ids[12].parse().unwrap()]);
    supervisor.shutdown().await.unwrap();
    assert_eq!(distinct_and_all(&recorder), (37, 37));
    for absent in [10, 11, 12] {
        assert!(recorder.calls_of(&ids[absent]).is_empty(), "{absent}");
    }
    let owners = server.xpending(&stream, GROUP).into_iter();
    let owners: Vec<_> = owners.map(|(id, owner, ..)| (id, owner)).collect();
    assert_eq!(owners[0].0, ids[0]);
    assert_eq!(owners[1], (ids[10].clone(), "other".to_owned()));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pause_survives_a_reader_that_dies_at_any_step_of_it() {
    let server = Server::start(Server::default_version());
    for point in [
        "reader.reply",
        "subscription.given_back",
        "reader.rests",
        "reader.given_back_taken",
        "reader.registered",
    ] {
        let stream = stream_of(&server, point);
        let gate = Gate::closed();
        let recorder = Recorder::behind(&gate);
        let (beside, other) = Beside::new(&server);
        let tail = Subscription::tail(&*stream)
            .named(&*stream)
            .workers(2)
            .block(ms(200));
        let supervisor = start(&server, vec![recorder.on(tail), other]).await;
        let heard = Heard::of(&supervisor);
        fill(&server, &stream, 150);
        in_hand(&server, &stream, 150).await;
        recorder.reaches(2).await;
        // The server may have delivered what the reader has not taken yet.
        while status_of(&supervisor, &stream).await.in_flight < 150 {}
        let armed = arm(point, &stream, Fail::Panic, 1..=1);
        let restarted = || heard.count(|it| matches!(it, Event::Restarted { .. }));

        supervisor.pause(&stream).await.unwrap();
        let during = !matches!(point, "reader.given_back_taken" | "reader.registered");
        if during && point != "reader.reply" {
            eventually(SOON, "the reader runs again", || restarted() == 1).await;
        }
        given_back(&server, &stream, 148).await;
        gate.open();
        in_hand(&server, &stream, 148).await;
        fill(&server, &stream, 10);
        beside.rounds(&server).await;
        assert_eq!(recorder.count(), 2, "{point}: it starts nothing");
        assert_eq!(status_of(&supervisor, &stream).await.state, State::Paused);

        supervisor.resume(&stream).await.unwrap();
        recorder.reaches(160).await;
        in_hand(&server, &stream, 0).await;
        eventually(SOON, "the reader has died once", || restarted() == 1).await;
        assert_eq!(armed.failed(), 1, "{point}");
        supervisor.shutdown().await.unwrap();
        assert_eq!(distinct_and_all(&recorder), (160, 160), "{point}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_is_replaced_while_paused_starts_nothing() {
    let server = Server::start(Server::default_version());
    let stream = stream_of(&server, "replaced");
    let gate = Gate::closed();
    let recorder = Recorder::running({
        let gate = gate.clone();
        move |call| {
            let gate = gate.clone();
            async move {
                gate.passed().await;
                assert!(call.text() != "0", "on purpose");
                Ok(Outcome::Ack)
            }
        }
    });
    let (beside, other) = Beside::new(&server);
    let tail = Subscription::tail(&*stream)
        .named("it")
        .workers(1)
        .retry(RetryPolicy::default().max_attempts(1).then_reject());
    let supervisor = start(&server, vec![recorder.on(tail), other]).await;
    fill(&server, &stream, 20);
    recorder.reaches(1).await;
    in_hand(&server, &stream, 20).await;
    supervisor.pause("it").await.unwrap();
    gate.open();
    eventually(SOON, "the worker is replaced", || {
        recorder.started().len() == 2
    })
    .await;
    given_back(&server, &stream, 19).await;
    beside.rounds(&server).await;
    assert_eq!(recorder.count(), 1);
    supervisor.resume("it").await.unwrap();
    recorder.reaches(20).await;
    in_hand(&server, &stream, 0).await;
    assert_eq!(distinct_and_all(&recorder), (20, 20));
    supervisor.shutdown().await.unwrap();
}

/// The worker asks for a start to be counted while the pause comes.
#[tokio::test(flavor = "multi_thread")]
async fn a_start_that_is_being_counted_when_the_pause_comes_is_not_made() {
    let server = Server::start(Server::default_version());
    let stream = stream_of(&server, "counting");
    fill(&server, &stream, 10);
    server.read_as(&stream, GROUP, "me", 10);
    let recorder = Recorder::acking();
    let counting = arm("settler.starts", &stream, Fail::Pause, 1..=1);
    let tail = Subscription::tail(&*stream)
        .named("it")
        .consumer("me")
        .workers(1);
    let supervisor = start(&server, vec![recorder.on(tail)]).await;
    eventually(SOON, "a start is about to be counted", || {
        counting.failed() == 1
    })
    .await;
    supervisor.pause("it").await.unwrap();
    counting.release();
    given_back(&server, &stream, 10).await;
    assert_eq!(recorder.count(), 0);
    for (id, _, _, count) in server.xpending(&stream, GROUP) {
        assert_eq!(count, 1, "{id} was not started");
    }
    supervisor.resume("it").await.unwrap();
    recorder.reaches(10).await;
    assert!(recorder.calls().iter().all(|call| call.attempt == 2));
    in_hand(&server, &stream, 0).await;
    assert_eq!(distinct_and_all(&recorder), (10, 10));
    supervisor.shutdown().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_paused_tree_stops_like_any_other() {
    let server = Server::start(Server::default_version());
    let stream = stream_of(&server, "stops");
    let gate = Gate::closed();
    let recorder = Recorder::behind(&gate);
    let tail = Subscription::tail(&*stream).named("it").workers(2);
    let supervisor = start(&server, vec![recorder.on(tail)]).await;
    fill(&server, &stream, 20);
    recorder.reaches(2).await;
    in_hand(&server, &stream, 20).await;
    supervisor.pause("it").await.unwrap();
    given_back(&server, &stream, 18).await;
    gate.open();
    let report = supervisor.shutdown().await.unwrap();
    assert!(report.unsettled.is_empty() && report.left_running.is_empty());
    in_hand(&server, &stream, 18).await;
    assert_eq!(recorder.stopped().len(), 2);
    for answer in [supervisor.pause("it").await, supervisor.resume("it").await] {
        assert_eq!(answer, Err(ControlError::Ended));
    }
}

/// Alone, and beside a reclaim that takes what is given back at once.
#[tokio::test(flavor = "multi_thread")]
async fn ten_thousand_pauses_and_resumes_under_load_lose_nothing_and_repeat_nothing() {
    const TURNS: usize = 5_000;
    let server = Server::start(Server::default_version());
    for reclaimed in [false, true] {
        let stream = stream_of(&server, "turns");
        let recorder = Recorder::acking();
        let tail = Subscription::tail(&*stream)
            .named(&*stream)
            .max_in_flight(500);
        let mut subscriptions = vec![recorder.on(tail)];
        if reclaimed {
            let reclaim = Subscription::reclaim(&*stream, HOUR).block(ms(1));
            subscriptions.push(recorder.on(reclaim));
        }
        let supervisor = start(&server, subscriptions).await;
        let rests = arm("reader.rests", &stream, Fail::Panic, 0..=0);
        let taken_up = arm("reader.given_back_taken", &stream, Fail::Panic, 0..=0);
        let askers = (0..4).map(|seed| {
            let (supervisor, name) = (supervisor.clone(), stream.clone());
            tokio::spawn(async move {
                let mut random = StdRng::seed_from_u64(seed);
                for _ in 0..TURNS / 4 {
                    match random.gen_bool(0.5) {
                        true => supervisor.pause(&name).await.unwrap(),
                        false => supervisor.resume(&name).await.unwrap(),
                    }
                    match random.gen_range(0..3) {
                        0 => {}
                        1 => tokio::task::yield_now().await,
                        // As long as the server takes to answer.
                        _ => drop(supervisor.status().await),
                    }
                }
            })
        });
        let askers: Vec<_> = askers.collect();
        let mut added = 0;
        while !askers.iter().all(|it| it.is_finished()) {
            fill(&server, &stream, 20);
            added += 20;
            tokio::task::yield_now().await;
        }
        for asker in askers {
            asker.await.unwrap();
        }
        supervisor.resume(&stream).await.unwrap();
        recorder.reaches(added).await;
        in_hand(&server, &stream, 0).await;
        supervisor.shutdown().await.unwrap();
        assert_eq!(distinct_and_all(&recorder), (added, added), "{reclaimed}");
        assert!(recorder.overlapped().is_empty());
        assert!(recorder.calls().iter().all(|call| call.attempt == 1));
        assert!(
            rests.reached() > 20,
            "it stood still {} times",
            rests.reached()
        );
        // How often depends on how busy the machine is; that it happens does not.
        assert!(taken_up.reached() > 0, "it took up nothing");
    }
}

// ---- entries in hand ----------------------------------------------------------------------------------

#[tokio::test(flavor = "multi_thread")]
async fn another_bound_on_what_is_in_hand_holds_from_the_next_read_on() {
    let server = Server::start(Server::default_version());
    let stream = stream_of(&server, "bound");
    let permits = Arc::new(tokio::sync::Semaphore::new(0));
    let recorder = Recorder::running({
        let permits = Arc::clone(&permits);
        move |_| {
            let permits = Arc::clone(&permits);
            async move {
                permits.acquire().await?.forget();
                Ok(Outcome::Ack)
            }
        }
    });
    let (beside, other) = Beside::new(&server);
    let tail = Subscription::tail(&*stream)
        .named("it")
        .workers(4)
        .max_in_flight(10);
    let supervisor = start(&server, vec![recorder.on(tail), other]).await;
    fill(&server, &stream, 200);
    in_hand(&server, &stream, 10).await;
    beside.rounds(&server).await;
    in_hand(&server, &stream, 10).await;
    // Higher: at once.
    supervisor.set_max_in_flight("it", 50).await.unwrap();
    in_hand(&server, &stream, 50).await;
    // Lower: what is in hand is worked off, and nothing is read meanwhile.
    supervisor.set_max_in_flight("it", 5).await.unwrap();
    permits.add_permits(40);
    in_hand(&server, &stream, 10).await;
    beside.rounds(&server).await;
    in_hand(&server, &stream, 10).await;
    permits.add_permits(100);
    recorder.reaches(144).await;
    eventually(SOON, "100 more are acknowledged", || {
        server.xpending_count(&stream, GROUP) <= 5
    })
    .await;
    let refused = supervisor.set_max_in_flight("it", 0).await.unwrap_err();
    assert!(refused.to_string().contains("at least 1"), "{refused}");
    let unknown = supervisor.set_max_in_flight("that", 1).await.unwrap_err();
    let ControlError::NoSuchSubscription { name, known } = &unknown else {
        panic!("{unknown}")
    };
    assert_eq!((&**name, &*known[0], known.len()), ("that", "it", 2));
    permits.add_permits(200);
    recorder.reaches(200).await;
    in_hand(&server, &stream, 0).await;
    supervisor.shutdown().await.unwrap();
}

// ---- removing -----------------------------------------------------------------------------------------

#[tokio::test(flavor = "multi_thread")]
async fn what_is_removed_ends_in_order_and_the_name_can_be_had_again() {
    let server = Server::start(Server::default_version());
    let stream = stream_of(&server, "removed");
    let gate = Gate::closed();
    let recorder = Recorder::running({
        let gate = gate.clone();
        move |call| {
            let gate = gate.clone();
            async move {
                if call.text() == "0" {
                    return Ok(Outcome::RetryAfter(HOUR));
                }
                gate.passed().await;
                Ok(Outcome::Ack)
            }
        }
    });
    let (beside, other) = Beside::new(&server);
    let neighbour = Recorder::acking();
    let draft = || Subscription::tail(&*stream).named("it").workers(2);
    // In the same group, and never in need of anything.
    let reclaim = Subscription::reclaim(&*stream, 24 * 365 * HOUR).block(ms(50));
    let supervisor = start(
        &server,
        vec![neighbour.on(reclaim), recorder.on(draft()), other],
    )
    .await;
    let heard = Heard::of(&supervisor);
    fill(&server, &stream, 30);
    recorder.reaches(3).await;
    in_hand(&server, &stream, 30).await;
    // One is parked, two run, 27 wait.
    let removing = tokio::spawn({
        let supervisor = supervisor.clone();
        async move { supervisor.remove("it").await }
    });
    // The neighbour takes at once what is given back, and the retry is what is read next.
    neighbour.reaches(27).await;
    in_hand(&server, &stream, 2).await;
    assert_eq!(status_of(&supervisor, "it").await.state, State::Draining);
    assert_eq!(
        supervisor.remove("it").await,
        Err(ControlError::BeingRemoved { name: "it".into() })
    );
    beside.rounds(&server).await;
    assert!(!removing.is_finished());
    gate.open();
    let report = removing.await.unwrap().unwrap();
    assert_eq!((report.settled, report.given_back), (3, 27));
    assert!(report.left_running.is_empty() && report.unsettled.is_empty());
    assert_eq!(recorder.stopped().len(), 2, "each worker said goodbye");
    assert_eq!(consumers(&server, &stream), 1, "the neighbour's");
    assert_eq!(server.xlen(&stream), 31, "the parked one is a retry");
    assert_eq!(connection_of(&server, "it"), None);
    assert_eq!(names(&supervisor).await.len(), 2);
    assert!(matches!(
        supervisor.pause("it").await,
        Err(ControlError::NoSuchSubscription { .. })
    ));

    let again = Recorder::acking();
    supervisor.add(again.on(draft())).await.unwrap();
    again.reaches(1).await;
    assert_eq!(
        (again.calls()[0].text(), again.calls()[0].attempt),
        ("0", 2)
    );
    in_hand(&server, &stream, 0).await;
    beside.rounds(&server).await;
    supervisor.shutdown().await.unwrap();
    assert_eq!(recorder.count(), 3);
    heard.assert_nobody_crashed();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handler_that_outlasts_a_removal_is_left_behind_and_its_entry_stays_pending() {
    let server = Server::start(Server::default_version());
    let stream = stream_of(&server, "outlasts");
    let (gate, thread) = (Gate::closed(), Arc::new(std::sync::Barrier::new(2)));
    let recorder = Recorder::running({
        let (gate, thread) = (gate.clone(), Arc::clone(&thread));
        move |call| {
            let (gate, thread) = (gate.clone(), Arc::clone(&thread));
            async move {
                match call.text() {
                    // In a call that can be ended, and in one that cannot.
                    "0" => gate.passed().await,
                    _ => {
                        tokio::task::block_in_place(|| thread.wait());
                    }
                }
                Ok(Outcome::Ack)
            }
        }
    });
    let (beside, other) = Beside::new(&server);
    let neighbour = Recorder::acking();
    let tail = Subscription::tail(&*stream).named("it").workers(2);
    let topology = topology(&server.url())
        .shutdown_timeout(ms(300))
        .subscribe(recorder.on(tail))
        // In the same group, so that verdicts could be stored after the removal.
        .subscribe(neighbour.on(Subscription::reclaim(&*stream, HOUR)))
        .subscribe(other);
    let supervisor = Supervisor::start(topology).await.unwrap();
    let ids = fill(&server, &stream, 2);
    recorder.reaches(2).await;
    let report = supervisor.remove("it").await.unwrap();
    let mut left: Vec<_> = report.left_running.iter().map(|it| it.id).collect();
    left.sort_unstable();
    let ids: Vec<EntryId> = ids.iter().map(|id| id.parse().unwrap()).collect();
    assert_eq!(left, ids);
    assert_eq!(names(&supervisor).await.len(), 2);
    beside.rounds(&server).await;
    // The verdict of the one that returns at last is nobody's.
    gate.open();
    tokio::task::block_in_place(|| thread.wait());
    eventually(SOON, "both have ended", || recorder.running_now() == 0).await;
    beside.rounds(&server).await;
    in_hand(&server, &stream, 2).await;
    supervisor.shutdown().await.unwrap();
}

/// B116: a child that was stopped took its parent along.
#[tokio::test(flavor = "multi_thread")]
async fn b116_of_five_one_is_removed_one_paused_one_fails_and_the_rest_are_untouched() {
    let server = Server::start(Server::default_version());
    let all = ["removed", "paused", "fails", "one", "other"];
    let of = |name: &str| {
        let recorder = Recorder::acking();
        (stream_of(&server, name), recorder)
    };
    let parts: Vec<(String, Recorder)> = all.into_iter().map(of).collect();
    let subscription = |at: usize| {
        let (stream, recorder) = &parts[at];
        let name = format!("{}-{stream}", all[at]);
        recorder.on(Subscription::tail(&**stream).named(name))
    };
    let name = |at: usize| format!("{}-{}", all[at], parts[at].0);
    let policy = RestartPolicy::default().max_restarts(1).isolate();
    let topology = topology(&server.url()).restart(policy);
    let topology = (0..5).map(subscription).fold(topology, Topology::subscribe);
    let supervisor = Supervisor::start(topology).await.unwrap();
    let heard = Heard::of(&supervisor);
    let handled = async |at: usize, more: usize| {
        let (stream, recorder) = &parts[at];
        let so_far = recorder.count();
        fill(&server, stream, more);
        recorder.reaches(so_far + more).await;
    };
    for at in 0..5 {
        handled(at, 10).await;
    }
    let connections: Vec<_> = (3..5).map(|at| connection_of(&server, &name(at))).collect();
    assert!(connections.iter().all(Option::is_some));

    let failing = arm("reader.before_read", &name(2), Fail::Panic, 1..=u64::MAX);
    fill(&server, &parts[2].0, 1);
    let (gone, paused) = (name(0), name(1));
    let (removed, pausing) = tokio::join!(supervisor.remove(&gone), supervisor.pause(&paused));
    removed.unwrap();
    pausing.unwrap();
    heard
        .wait("the third is given up", |event| {
            matches!(event, Event::Escalated { .. }).then_some(())
        })
        .await;
    for at in 3..5 {
        handled(at, 100).await;
        let status = status_of(&supervisor, &name(at)).await;
        assert_eq!((status.state, status.restarts), (State::Running, 0));
    }
    let after: Vec<_> = (3..5).map(|at| connection_of(&server, &name(at))).collect();
    assert_eq!(after, connections, "their readers are the same");
    assert_eq!(names(&supervisor).await.len(), 4);
    assert_eq!(status_of(&supervisor, &name(1)).await.state, State::Paused);
    assert_eq!(status_of(&supervisor, &name(2)).await.state, State::Failed);

    // All of them can be had again.
    for answer in [
        supervisor.pause(&name(2)).await,
        supervisor.resume(&name(2)).await,
        supervisor.set_max_in_flight(&name(2), 1).await,
    ] {
        assert!(matches!(answer, Err(ControlError::Failed { .. })));
    }
    drop(failing);
    supervisor.resume(&name(1)).await.unwrap();
    supervisor.remove(&name(2)).await.unwrap();
    supervisor.add(subscription(2)).await.unwrap();
    supervisor.add(subscription(0)).await.unwrap();
    for (at, (stream, _)) in parts.iter().enumerate() {
        handled(at, 10).await;
        in_hand(&server, stream, 0).await;
    }
    let status = status_of(&supervisor, &name(2)).await;
    assert_eq!((status.state, status.restarts), (State::Running, 0));
    supervisor.shutdown().await.unwrap();
}

/// B120: a request that was meant for a dead actor reached its successor, or nobody.
#[tokio::test(flavor = "multi_thread")]
async fn b120_a_request_in_the_moment_of_a_crash_holds_over_500_rounds() {
    const ROUNDS: usize = 500;
    let server = Server::start(Server::default_version());
    let stream = stream_of(&server, "b120");
    let recorder = Recorder::acking();
    let it = || {
        let tail = Subscription::tail(&*stream).named(&*stream);
        recorder.on(tail.workers(2).keep_alive(ms(100)))
    };
    // Takes up what a consumer that was removed while its reader was dead has left.
    let reclaim = Subscription::reclaim(&*stream, ms(500)).block(ms(20));
    let (beside, other) = Beside::new(&server);
    let policy = RestartPolicy::default().max_restarts(u32::MAX);
    let topology = topology(&server.url())
        .restart(policy.backoff(ms(1), ms(1)))
        .subscribe(it())
        .subscribe(recorder.on(reclaim))
        .subscribe(other);
    let supervisor = Supervisor::start(topology).await.unwrap();
    let mut random = StdRng::seed_from_u64(120);
    let (mut added, mut crashes, mut pauses, mut removals) = (0, 0, 0, 0);
    for round in 0..ROUNDS {
        let point = match random.gen_range(0..5) {
            0 => "reader.reply",
            1 => "reader.registered",
            2 => "reader.rests",
            3 => "handler.between",
            _ => "handler.started",
        };
        let armed = arm(point, &stream, Fail::Panic, 1..=1);
        fill(&server, &stream, 5);
        added += 5;
        // Half of the requests come as soon as the crash is seen, half without a look at it.
        // A reader rests only once it is told to.
        if round % 2 == 0 && point != "reader.rests" {
            let began = Instant::now();
            // Without a pause, so that the request comes in the very moment.
            while armed.failed() == 0 {
                assert!(began.elapsed() < SOON, "round {round}: no crash at {point}");
                tokio::task::yield_now().await;
            }
        }
        match random.gen_range(0..3) {
            0 => {
                supervisor.pause(&stream).await.unwrap();
                let status = status_of(&supervisor, &stream).await;
                assert_eq!(status.state, State::Paused, "round {round}");
                let started = || {
                    let calls = recorder.calls();
                    calls.iter().filter(|it| it.subscription == stream).count()
                };
                // What was started may still be on its way to the handler; no more than that comes.
                let before = started();
                fill(&server, &stream, 5);
                added += 5;
                beside.rounds(&server).await;
                let late = started() - before;
                assert!(late <= 2, "round {round}: {late} were started");
                pauses += 1;
                supervisor.resume(&stream).await.unwrap();
            }
            1 => {
                supervisor.remove(&stream).await.unwrap();
                assert_eq!(names(&supervisor).await.len(), 2, "round {round}");
                // That of a reader that has crashed is closed in its own time.
                let closed = || connection_of(&server, &stream).is_none();
                eventually(SOON, "its reader's connection is closed", closed).await;
                removals += 1;
                // The stop is not for this one.
                supervisor.add(it()).await.unwrap();
            }
            _ => {
                let bound = random.gen_range(1..50);
                supervisor.set_max_in_flight(&stream, bound).await.unwrap();
            }
        }
        crashes += armed.failed();
    }
    eventually(SOON, "all are handled", || {
        recorder.distinct() == added && server.xpending_count(&stream, GROUP) == 0
    })
    .await;
    let rounds = (crashes, pauses, removals);
    assert!(
        crashes > 200 && pauses > 100 && removals > 100,
        "{rounds:?}"
    );
    // What was added last may have its first read before it.
    let began = Instant::now();
    while status_of(&supervisor, &stream).await.state != State::Running {
        assert!(began.elapsed() < SOON, "it does not run");
    }
    supervisor.shutdown().await.unwrap();
    assert!(recorder.overlapped().is_empty());
}

/// A stop of the tree, in the moment in which its reader, its worker or its settler crashes.
#[tokio::test(flavor = "multi_thread")]
async fn b120_a_stop_in_the_moment_of_a_crash_is_never_lost() {
    let server = Server::start(Server::default_version());
    let stream = stream_of(&server, "b120");
    let recorder = Recorder::acking();
    let points = ["reader.before_read", "reader.reply", "handler.between"];
    for round in 0..100 {
        let armed = arm(points[round % 3], &stream, Fail::Panic, 1..=1);
        let tail = Subscription::tail(&*stream).named(&*stream);
        let supervisor = start(&server, vec![recorder.on(tail)]).await;
        fill(&server, &stream, 3);
        if round % 2 == 0 {
            supervisor.pause(&stream).await.unwrap();
        }
        let ended = tokio::time::timeout(SOON, supervisor.shutdown()).await;
        ended
            .unwrap_or_else(|_| panic!("round {round}: the stop was lost"))
            .unwrap();
        drop(armed);
    }
    eventually(SOON, "no connection is left", || {
        server.client_list().is_empty()
    })
    .await;
}

// ---- adding -------------------------------------------------------------------------------------------

#[tokio::test(flavor = "multi_thread")]
async fn a_hundred_that_come_and_go_leave_nothing_behind() {
    let server = Server::start(Server::default_version());
    let (beside, other) = Beside::new(&server);
    let supervisor = start(&server, vec![other]).await;
    beside.rounds(&server).await;
    let (connections, tasks) = (server.client_list().len(), alive_tasks());
    let (stream, recorder) = (stream_of(&server, "come-and-go"), Recorder::acking());
    for turn in 1..=100 {
        let tail = Subscription::tail(&*stream).named("it").workers(3);
        let tail = match turn % 2 {
            0 => tail,
            _ => tail.delayed_retry(DelayedRetry::durable(format!("{stream}.later"))),
        };
        supervisor.add(recorder.on(tail)).await.unwrap();
        fill(&server, &stream, 5);
        recorder.reaches(5 * turn).await;
        let report = supervisor.remove("it").await.unwrap();
        assert!(report.unsettled.is_empty() && report.given_back == 0);
        assert_eq!(consumers(&server, &stream), 0, "turn {turn}");
    }
    assert_eq!(distinct_and_all(&recorder), (500, 500));
    assert_eq!(recorder.stopped().len(), 300);
    eventually(SOON, "no connection is left", || {
        server.client_list().len() <= connections
    })
    .await;
    eventually(SOON, "no task is left", || alive_tasks() <= tasks).await;
    beside.rounds(&server).await;
    supervisor.shutdown().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_added_says_why_and_changes_nothing() {
    let server = Server::start(Server::default_version());
    let (stream, group) = (stream_of(&server, "running"), Recorder::acking());
    let durable = DelayedRetry::durable("later");
    let running = Subscription::tail(&*stream)
        .named("running")
        .consumer("me")
        .start(Start::Beginning)
        .keep_alive(Duration::from_secs(5))
        .delayed_retry(durable.clone());
    let redis = Redis::url(&server.url()).unwrap();
    let topology = Topology::new(redis).connect_timeout(ms(700));
    let supervisor = Supervisor::start(topology.subscribe(group.on(running.group(GROUP))))
        .await
        .unwrap();
    fill(&server, &stream, 5);
    group.reaches(5).await;
    let connections = server.client_list().len();
    server.command(&["SET", "text", "x"]);
    let tail = |stream: &str| Subscription::tail(stream).group(GROUP).named("new");
    let refused: Vec<(Draft, &str)> = vec![
        (tail(&stream).named("running"), "another name"),
        (tail(&stream).consumer("me"), "consumer name `me`"),
        (tail(&stream).start(Start::New), "different places to start"),
        (Subscription::tail("s"), "Topology::default_group"),
        (tail("other").delayed_retry(durable), "its own set"),
        (tail("s").workers(0), "`workers` must not be 0"),
        (
            Subscription::reclaim(&*stream, Duration::from_secs(6)).group(GROUP),
            "three keep-alives",
        ),
        (tail("s").create_group(false), "has no group"),
        (tail("text"), "holds a string"),
        (
            Subscription::claiming("s", HOUR).group(GROUP),
            "Redis 8.4 or later",
        ),
    ];
    for (draft, expected) in refused {
        let error = supervisor.add(group.on(draft)).await.unwrap_err();
        assert!(matches!(error, ControlError::Start(_)), "{error}");
        let text = error.to_string();
        assert!(
            text.contains(expected),
            "`{expected}` is missing in: {text}"
        );
        assert_eq!(names(&supervisor).await, ["running"]);
    }
    // Rights that are taken away after the start.
    server.command(&["ACL", "SETUSER", "default", "-xack"]);
    let error = supervisor.add(group.on(tail("s"))).await.unwrap_err();
    assert!(
        matches!(error, ControlError::Start(StartError::NoRight { .. })),
        "{error}"
    );
    server.command(&["ACL", "SETUSER", "default", "+@all"]);
    assert_eq!(server.client_list().len(), connections);
    // One that does not answer.
    server.freeze();
    let began = Instant::now();
    let error = supervisor.add(group.on(tail("s"))).await.unwrap_err();
    assert!(matches!(error, ControlError::Start(_)), "{error}");
    assert!(began.elapsed() < SOON);
    server.thaw();
    // Two at once, of one name: one of them.
    let (one, other) = tokio::join!(
        supervisor.add(group.on(tail("twice"))),
        supervisor.add(group.on(tail("twice")))
    );
    let errors: Vec<_> = [one, other].into_iter().filter_map(Result::err).collect();
    let [ControlError::Start(StartError::Invalid(InvalidTopology::DuplicateName { name }))] =
        &errors[..]
    else {
        panic!("{errors:?}")
    };
    assert_eq!(name, "new");
    fill(&server, "twice", 5);
    group.reaches(10).await;
    supervisor.shutdown().await.unwrap();
    assert_eq!(distinct_and_all(&group), (10, 10));
}

/// What is in hand is kept fresh as often as the newcomer needs it.
#[tokio::test(flavor = "multi_thread")]
async fn a_reclaim_that_is_added_takes_nothing_that_is_in_hand() {
    let server = Server::start(Server::default_version());
    let stream = stream_of(&server, "in-hand");
    let gate = Gate::closed();
    let recorder = Recorder::behind(&gate);
    let tail = Subscription::tail(&*stream).named("tail").workers(1);
    let supervisor = start(&server, vec![recorder.on(tail)]).await;
    fill(&server, &stream, 3);
    recorder.reaches(1).await;
    in_hand(&server, &stream, 3).await;
    let began = Instant::now();
    let kept = arm("keep_alive.kept", &stream, Fail::Panic, 0..=0);
    let reclaim = Subscription::reclaim(&*stream, ms(900)).named("reclaim");
    let newcomer = Recorder::acking();
    supervisor
        .add(newcomer.on(reclaim.block(ms(50))))
        .await
        .unwrap();
    eventually(SOON, "it was kept fresh again and again", || {
        kept.reached() >= 10
    })
    .await;
    // Every 2.5 s before, which would have taken 25 s.
    assert!(
        began.elapsed() < Duration::from_secs(10),
        "{:?}",
        began.elapsed()
    );
    assert_eq!(newcomer.count(), 0);
    gate.open();
    recorder.reaches(3).await;
    in_hand(&server, &stream, 0).await;
    assert_eq!(names(&supervisor).await, ["tail", "reclaim"]);
    supervisor.shutdown().await.unwrap();
    assert_eq!((recorder.count(), newcomer.count()), (3, 0));
}

// ---- who may ask, and when ----------------------------------------------------------------------------

#[tokio::test(flavor = "multi_thread")]
async fn a_handler_may_ask_for_all_but_its_own_end() {
    let server = Server::start(Server::default_version());
    let stream = stream_of(&server, "asks");
    let handle: Arc<OnceCell<SupervisorHandle>> = Arc::default();
    let answers: Arc<std::sync::Mutex<Vec<Result<ShutdownReport, ControlError>>>> = Arc::default();
    let recorder = Recorder::running({
        let (handle, answers) = (Arc::clone(&handle), Arc::clone(&answers));
        move |_| {
            let (handle, answers) = (Arc::clone(&handle), Arc::clone(&answers));
            async move {
                let supervisor = handle.get().expect("the test has set it");
                let own = supervisor.remove("asks").await;
                supervisor.pause("asks").await?;
                let other = supervisor.remove("other").await;
                answers.lock().unwrap().extend([own, other]);
                Ok(Outcome::Ack)
            }
        }
    });
    let (other, added) = (stream_of(&server, "other"), Recorder::acking());
    let subscriptions = vec![
        recorder.on(Subscription::tail(&*stream).named("asks")),
        added.on(Subscription::tail(&*other).named("other")),
    ];
    let supervisor = start(&server, subscriptions).await;
    handle.set(supervisor.clone()).unwrap();
    fill(&server, &stream, 1);
    in_hand(&server, &stream, 0).await;
    recorder.reaches(1).await;
    eventually(SOON, "it has its answers", || {
        answers.lock().unwrap().len() == 2
    })
    .await;
    assert_eq!(
        *answers.lock().unwrap(),
        [
            Err(ControlError::FromHandler),
            Ok(ShutdownReport::default())
        ]
    );
    assert_eq!(names(&supervisor).await, ["asks"]);
    assert_eq!(status_of(&supervisor, "asks").await.state, State::Paused);
    supervisor.shutdown().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tree_that_drains_or_has_ended_refuses_at_once() {
    let server = Server::start(Server::default_version());
    let stream = stream_of(&server, "ended");
    let gate = Gate::closed();
    let recorder = Recorder::behind(&gate);
    let supervisor = start(
        &server,
        vec![recorder.on(Subscription::tail(&*stream).named("it"))],
    )
    .await;
    fill(&server, &stream, 1);
    recorder.reaches(1).await;
    let stopping = tokio::spawn({
        let supervisor = supervisor.clone();
        async move { supervisor.shutdown().await }
    });
    let reading = || connection_of(&server, "it").is_some();
    eventually(SOON, "it drains", || !reading()).await;
    for ended in [false, true] {
        let new = recorder.on(Subscription::tail("s"));
        let answers = async {
            [
                supervisor.pause("it").await,
                supervisor.resume("it").await,
                supervisor.set_max_in_flight("it", 1).await,
                supervisor.add(new).await,
                supervisor.remove("it").await.map(drop),
            ]
        };
        let answers = tokio::time::timeout(SOON, answers).await.unwrap();
        for answer in answers {
            assert_eq!(answer, Err(ControlError::Ended), "{ended}");
        }
        if !ended {
            assert!(!stopping.is_finished());
            gate.open();
            eventually(SOON, "it has ended", || stopping.is_finished()).await;
        }
    }
}

/// An application's own root, which does nothing.
struct Root;

impl Actor for Root {
    type Msg = ();
    type State = ();
    type Arguments = ();

    async fn pre_start(&self, _: ActorRef<()>, (): ()) -> Result<(), ActorProcessingErr> {
        Ok(())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_branch_of_another_tree_is_changed_in_the_same_way() {
    let server = Server::start(Server::default_version());
    let (stream, recorder) = (stream_of(&server, "branch"), Recorder::acking());
    let (beside, other) = Beside::new(&server);
    let (root, running) = Actor::spawn(None, Root, ()).await.unwrap();
    let topology = topology(&server.url()).subscribe(other);
    let supervisor = Supervisor::start_linked(topology, root.get_cell())
        .await
        .unwrap();
    let tail = Subscription::tail(&*stream).named("it");
    supervisor.add(recorder.on(tail)).await.unwrap();
    supervisor.pause("it").await.unwrap();
    fill(&server, &stream, 5);
    beside.rounds(&server).await;
    assert_eq!(recorder.count(), 0);
    supervisor.resume("it").await.unwrap();
    recorder.reaches(5).await;
    supervisor.remove("it").await.unwrap();
    beside.rounds(&server).await;
    root.stop(None);
    running.await.unwrap();
    supervisor.wait().await.unwrap();
    assert_eq!(supervisor.pause("it").await, Err(ControlError::Ended));
}
