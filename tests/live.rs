//! Changing a tree while it runs: what is asked for happens, lasts, and touches nothing else.

mod support;

use std::time::Duration;

use rand::{Rng, SeedableRng, rngs::StdRng};
use streamvisor::fail_point::{Fail, arm};
use streamvisor::prelude::*;
use streamvisor::{ControlError, EntryId, State, SubscriptionStatus};
use support::record::{GROUP, Gate, Heard, Recorder, SOON, fill, ms, stream_of, topology};
use support::*;

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
        let mut random = StdRng::seed_from_u64(7);
        let mut added = 0;
        for turn in 0..TURNS {
            if turn % 10 == 0 {
                fill(&server, &stream, 20);
                added += 20;
            }
            match random.gen_bool(0.5) {
                true => supervisor.pause(&stream).await.unwrap(),
                false => supervisor.resume(&stream).await.unwrap(),
            }
            match random.gen_range(0..3) {
                0 => {}
                1 => tokio::task::yield_now().await,
                // As long as the server takes to answer.
                _ => drop(supervisor.status().await),
            }
        }
        supervisor.resume(&stream).await.unwrap();
        recorder.reaches(added).await;
        in_hand(&server, &stream, 0).await;
        supervisor.shutdown().await.unwrap();
        assert_eq!(distinct_and_all(&recorder), (added, added), "{reclaimed}");
        assert!(recorder.overlapped().is_empty());
        assert!(recorder.calls().iter().all(|call| call.attempt == 1));
        assert!(
            rests.reached() > 100,
            "it stood still {} times",
            rests.reached()
        );
        assert!(taken_up.reached() > 10, "{} times", taken_up.reached());
    }
}

// ---- entries in hand ----------------------------------------------------------------------------------

#[tokio::test(flavor = "multi_thread")]
async fn another_bound_on_what_is_in_hand_holds_from_the_next_read_on() {
    let server = Server::start(Server::default_version());
    let stream = stream_of(&server, "bound");
    let permits = std::sync::Arc::new(tokio::sync::Semaphore::new(0));
    let recorder = Recorder::running({
        let permits = std::sync::Arc::clone(&permits);
        move |_| {
            let permits = std::sync::Arc::clone(&permits);
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
