//! What is read, by whom, in which order, how often, and how much of it at once.

mod support;

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use streamvisor::prelude::*;
use streamvisor::{DELIVERY_COUNT_HEADER, Entry, Event, Mode};
use support::pending::AGES;
use support::record::*;
use support::watch::{LookedFrom, Most};
use support::*;

/// How idle something must be to have been left behind; keep-alives, a third of it, stay out of the way.
const LONG: Duration = Duration::from_secs(600);

/// The pause of a reclaim subscription that found nothing, for tests that wait for its next pass.
const SHORT: Duration = Duration::from_millis(50);

fn numbers(calls: &[Call]) -> Vec<usize> {
    let number = |call: &Call| call.text().parse().expect("the body should be a number");
    calls.iter().map(number).collect()
}

fn id_of(text: &str) -> EntryId {
    text.parse().expect("the server should send entry ids")
}

fn sorted(ids: &[String]) -> Vec<EntryId> {
    let mut ids: Vec<EntryId> = ids.iter().map(|id| id_of(id)).collect();
    ids.sort_unstable();
    ids
}

/// Waits until nothing of the group is pending.
#[track_caller]
fn nothing_pending<'a>(server: &'a Server, stream: &'a str) -> impl Future<Output = ()> + 'a {
    eventually(SOON, "nothing is pending", move || {
        server.xpending_count(stream, GROUP) == 0
    })
}

// ---- fresh entries -----------------------------------------------------------------------------------

#[tokio::test(flavor = "multi_thread")]
async fn a_tail_hands_over_fresh_entries_once_and_in_order_and_nothing_that_others_hold() {
    let server = Server::start(Version::Redis70);
    server.xgroup_create("s", GROUP, "0");
    server.add_numbers("s", 1000..1003);
    let others = server.read_as("s", GROUP, "other", 3);
    let recorder = Recorder::acking();
    let tail = recorder.on(Subscription::tail("s").workers(1));
    let supervisor = Supervisor::start(topology(&server.url()).subscribe(tail))
        .await
        .unwrap();
    let ids = server.add_numbers("s", 0..2000);
    recorder.reaches(2000).await;
    eventually(SOON, "all acknowledged", || {
        server.xpending_count("s", GROUP) == 3
    })
    .await;
    supervisor.shutdown().await.unwrap();

    assert_eq!(recorder.ids(), ids);
    for call in recorder.calls() {
        assert_eq!((call.attempt, call.delivery_count), (1, 1));
        assert_eq!((call.idle, call.mode), (Duration::ZERO, Mode::Tail));
        assert!(call.headers.is_empty(), "{:?}", call.headers);
    }
    for (id, owner, _, count) in server.xpending("s", GROUP) {
        assert!(others.contains(&id));
        assert_eq!((owner.as_str(), count), ("other", 1));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_subscription_has_all_its_workers() {
    let server = Server::start(Version::Redis70);
    let gate = Gate::closed();
    let recorder = Recorder::behind(&gate);
    let tail = recorder.on(Subscription::tail("s").workers(5));
    let supervisor = Supervisor::start(topology(&server.url()).subscribe(tail))
        .await
        .unwrap();
    server.add_numbers("s", 0..20);
    recorder.reaches(5).await;
    let workers: HashSet<usize> = recorder.calls().iter().map(|call| call.worker).collect();
    assert_eq!(workers, HashSet::from([0, 1, 2, 3, 4]));
    gate.open();
    recorder.reaches(20).await;
    supervisor.shutdown().await.unwrap();
    assert_eq!(recorder.most_running(), 5);
}

// ---- where a group starts ------------------------------------------------------------------------------

#[tokio::test(flavor = "multi_thread")]
async fn a_group_starts_where_the_subscription_says() {
    for (start, expected) in [
        (None, 10..15),
        (Some(Start::New), 10..15),
        (Some(Start::Beginning), 0..15),
        (Some(Start::After(EntryId::MIN)), 4..15),
    ] {
        let server = Server::start(Version::Redis70);
        let ids = server.add_numbers("s", 0..10);
        let recorder = Recorder::acking();
        let mut draft = Subscription::tail("s").workers(1);
        draft = match start {
            None => draft,
            Some(Start::After(_)) => draft.start(Start::After(id_of(&ids[3]))),
            Some(start) => draft.start(start),
        };
        let topology = topology(&server.url()).subscribe(recorder.on(draft));
        let supervisor = Supervisor::start(topology).await.unwrap();
        server.add_numbers("s", 10..15);
        recorder.reaches(expected.len()).await;
        nothing_pending(&server, "s").await;
        supervisor.shutdown().await.unwrap();
        let expected: Vec<usize> = expected.collect();
        assert_eq!(numbers(&recorder.calls()), expected, "{start:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_group_that_exists_goes_on_where_it_stands() {
    let server = Server::start(Version::Redis70);
    server.add_numbers("s", 0..10);
    server.xgroup_create("s", GROUP, "0");
    server.read_as("s", GROUP, "other", 6);
    for start in [Start::Beginning, Start::New] {
        let recorder = Recorder::acking();
        let tail = recorder.on(Subscription::tail("s").workers(1).start(start));
        let supervisor = Supervisor::start(topology(&server.url()).subscribe(tail))
            .await
            .unwrap();
        let (first, more) = match start {
            Start::Beginning => (6, 4),
            _ => (10, 2),
        };
        if start == Start::New {
            server.add_numbers("s", 10..12);
        }
        recorder.reaches(more).await;
        eventually(SOON, "acknowledged", || {
            server.xpending_count("s", GROUP) == 6
        })
        .await;
        supervisor.shutdown().await.unwrap();
        assert_eq!(
            numbers(&recorder.calls()),
            (first..first + more).collect::<Vec<_>>()
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_stream_is_made_with_its_group_and_several_start_at_once() {
    let server = Server::start(Version::Redis70);
    let recorder = Recorder::acking();
    let tail = recorder.on(Subscription::tail("s"));
    let topology = topology(&server.url()).subscribe(tail);
    let starts = (0..4).map(|_| Supervisor::start(topology.clone()));
    let supervisors = futures_util::future::join_all(starts).await;
    let supervisors: Vec<_> = supervisors.into_iter().map(Result::unwrap).collect();
    server.add_numbers("s", 0..100);
    recorder.reaches(100).await;
    nothing_pending(&server, "s").await;
    for supervisor in supervisors {
        supervisor.shutdown().await.unwrap();
    }
    assert_eq!((recorder.count(), recorder.distinct()), (100, 100));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_group_that_is_not_to_be_made_is_used_where_it_exists() {
    let server = Server::start(Version::Redis70);
    server.xgroup_create("s", GROUP, "0");
    let recorder = Recorder::acking();
    let tail = recorder.on(Subscription::tail("s").create_group(false));
    let supervisor = Supervisor::start(topology(&server.url()).subscribe(tail))
        .await
        .unwrap();
    server.add_numbers("s", 0..3);
    recorder.reaches(3).await;
    supervisor.shutdown().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn b10_from_the_beginning_all_is_handled_once_and_then_what_is_new() {
    let server = Server::start(Version::Redis70);
    server.add_numbers("s", 0..50);
    let recorder = Recorder::acking();
    let tail = Subscription::tail("s").start(Start::Beginning).workers(1);
    let topology = topology(&server.url()).subscribe(recorder.on(tail));
    let supervisor = Supervisor::start(topology).await.unwrap();
    recorder.reaches(50).await;
    nothing_pending(&server, "s").await;
    server.add_numbers("s", 50..60);
    recorder.reaches(60).await;
    nothing_pending(&server, "s").await;
    supervisor.shutdown().await.unwrap();
    assert_eq!(numbers(&recorder.calls()), (0..60).collect::<Vec<_>>());
}

/// Waits for this many more calls of a command, and returns how long they took.
async fn time_of(server: &Server, command: &str, calls: u64) -> Duration {
    let before = server.commandstat(command);
    // The clock starts with a call, so that it times whole periods.
    eventually(SOON, "a call", || server.commandstat(command) > before).await;
    let (first, began) = (server.commandstat(command), Instant::now());
    eventually(SOON, "more calls", || {
        server.commandstat(command) >= first + calls
    })
    .await;
    began.elapsed()
}

#[tokio::test(flavor = "multi_thread")]
async fn b10_b43_an_idle_tail_reads_once_a_block_period_and_asks_for_nothing_else() {
    let block = Duration::from_millis(400);
    let server = Server::start(Version::Redis70);
    let recorder = Recorder::acking();
    let tail = recorder.on(Subscription::tail("s").block(block));
    let supervisor = Supervisor::start(topology(&server.url()).subscribe(tail))
        .await
        .unwrap();
    server.add_numbers("s", 0..10);
    recorder.reaches(10).await;
    nothing_pending(&server, "s").await;
    // The reads that found the end of the stream are over with the first that waits.
    time_of(&server, "xreadgroup", 1).await;

    let others = |server: &Server| -> u64 {
        let own = [
            "ping",
            "info",
            "xreadgroup",
            "client|unblock",
            "xpending",
            "xadd",
            "xinfo|groups",
        ];
        let stats = server.info("commandstats");
        let calls = |line: &String| -> u64 {
            let calls = line.split(['=', ',']).nth(1).unwrap();
            calls.parse().unwrap()
        };
        let counted = stats.iter().filter(|(name, _)| {
            let name = name.strip_prefix("cmdstat_").unwrap_or(name);
            !own.contains(&name)
        });
        counted.map(|(_, line)| calls(line)).sum()
    };
    let looks = |server: &Server| server.commandstat("xinfo|groups");
    let before = (others(&server), looks(&server));
    let took = time_of(&server, "xreadgroup", 3).await;
    // The server looks at blocked clients every 100 ms, and never ends a block early.
    assert!(
        took >= 3 * block - Duration::from_millis(100),
        "3 reads within {took:?}"
    );
    let stats = server.info("commandstats");
    assert_eq!(others(&server), before.0, "{stats:?}");
    // Where the group stands, which nothing else would tell: once a second at most.
    assert!(looks(&server) <= before.1 + 1 + took.as_secs(), "{stats:?}");
    supervisor.shutdown().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn b43_an_idle_reclaim_scans_once_a_block_period_even_over_young_entries() {
    let block = Duration::from_millis(400);
    let server = Server::start(Version::Redis70);
    server.xgroup_create("s", GROUP, "0");
    server.add_numbers("s", 0..500);
    server.read_as("s", GROUP, "other", 500);
    let recorder = Recorder::acking();
    let reclaim = recorder.on(Subscription::reclaim("s", LONG).block(block));
    let supervisor = Supervisor::start(topology(&server.url()).subscribe(reclaim))
        .await
        .unwrap();
    time_of(&server, "evalsha", 1).await;
    let reads = server.commandstat("xreadgroup");
    let took = time_of(&server, "evalsha", 3).await;
    assert!(
        took >= 3 * block - Duration::from_millis(50),
        "3 scans within {took:?}"
    );
    assert_eq!(recorder.count(), 0);
    assert_eq!(
        server.commandstat("xreadgroup"),
        reads,
        "it reads nothing fresh"
    );
    supervisor.shutdown().await.unwrap();
    for (_, owner, _, count) in server.xpending("s", GROUP) {
        assert_eq!((owner.as_str(), count), ("other", 1));
    }
}

/// B14: what a handler asked waited for the end of a read that blocked.
#[tokio::test(flavor = "multi_thread")]
async fn b14_neither_handlers_nor_verdicts_nor_others_wait_for_a_read_that_blocks() {
    let block = Duration::from_secs(60);
    let server = Server::start(Version::Redis70);
    let recorder = Recorder::running(|call| async move {
        call.context.publisher().publish("results", &1).await?;
        Ok(Outcome::Ack)
    });
    let streams: Vec<String> = (0..10).map(|n| format!("s{n}")).collect();
    let topology = streams
        .iter()
        .fold(topology(&server.url()), |tree, stream| {
            tree.subscribe(recorder.on(Subscription::tail(&**stream).block(block)))
        });
    let supervisor = Supervisor::start(topology).await.unwrap();
    let blocked = || {
        let clients = server.client_list();
        let blocked = clients.iter().filter(|line| line.contains("flags=b"));
        blocked.count()
    };
    for (round, stream) in streams.iter().enumerate() {
        eventually(SOON, "all reads block", || blocked() == 10).await;
        server.xadd(stream, &[("_payload", "1")]);
        // Far sooner than any of the other nine reads comes back.
        eventually(SOON, "it is handled and acknowledged", || {
            server.xlen("results") == round as i64 + 1
                && server.xpending_count(stream, GROUP) == 0
                && recorder.count() == round + 1
        })
        .await;
        assert!(blocked() >= 9);
    }
    supervisor.shutdown().await.unwrap();
}

// ---- own pending entries -----------------------------------------------------------------------------

#[tokio::test(flavor = "multi_thread")]
async fn b56_what_a_consumer_left_pending_is_recovered_page_by_page_before_anything_fresh() {
    let server = Server::start(Version::Redis70);
    server.xgroup_create("s", GROUP, "0");
    server.add_numbers("s", 0..250);
    server.read_as("s", GROUP, "worker-7", 250);
    server.add_numbers("s", 250..260);
    server.read_as("s", GROUP, "other", 10);
    server.add_numbers("s", 260..290);

    let recorder = Recorder::acking();
    let tail = Subscription::tail("s").consumer("worker-7").workers(1);
    let topology = topology(&server.url()).subscribe(recorder.on(tail));
    let supervisor = Supervisor::start(topology).await.unwrap();
    let heard = Heard::of(&supervisor);
    recorder.reaches(280).await;
    eventually(SOON, "all acknowledged", || {
        server.xpending_count("s", GROUP) == 10
    })
    .await;
    supervisor.shutdown().await.unwrap();

    let calls = recorder.calls();
    assert_eq!(
        numbers(&calls),
        (0..250).chain(260..290).collect::<Vec<_>>()
    );
    for call in &calls[..250] {
        assert_eq!((call.attempt, call.delivery_count), (2, 2));
        assert_eq!(call.header(DELIVERY_COUNT_HEADER).as_deref(), Some("2"));
        assert!(call.header("redis-idle-ms").is_some());
    }
    for call in &calls[250..] {
        assert_eq!((call.attempt, call.delivery_count), (1, 1));
        assert_eq!(call.header(DELIVERY_COUNT_HEADER), None);
    }
    let recovered: usize = heard
        .pick(|event| match event {
            Event::Recovered { entries, .. } => Some(*entries),
            _ => None,
        })
        .iter()
        .sum();
    assert_eq!(recovered, 250);
}

#[tokio::test(flavor = "multi_thread")]
async fn own_pending_entries_beyond_max_in_flight_are_all_recovered() {
    let server = Server::start(Version::Redis70);
    server.xgroup_create("s", GROUP, "0");
    server.add_numbers("s", 0..250);
    server.read_as("s", GROUP, "worker-7", 250);
    server.add_numbers("s", 250..260);
    let recorder = Recorder::acking();
    let tail = Subscription::tail("s")
        .consumer("worker-7")
        .workers(1)
        .max_in_flight(7);
    let topology = topology(&server.url()).subscribe(recorder.on(tail));
    let supervisor = Supervisor::start(topology).await.unwrap();
    recorder.reaches(260).await;
    nothing_pending(&server, "s").await;
    supervisor.shutdown().await.unwrap();
    assert_eq!(numbers(&recorder.calls()), (0..260).collect::<Vec<_>>());
}

#[tokio::test(flavor = "multi_thread")]
async fn b36_own_pending_entries_that_are_gone_are_taken_off_and_reading_goes_on() {
    for version in Version::ALL {
        let server = Server::start(version);
        server.xgroup_create("s", GROUP, "0");
        let ids = server.add_numbers("s", 0..5);
        server.read_as("s", GROUP, "worker-7", 5);
        let deleted = [ids[0].clone(), ids[3].clone()];
        server.xdel("s", &deleted);

        let recorder = Recorder::acking();
        let tail = Subscription::tail("s").consumer("worker-7").workers(1);
        let topology = topology(&server.url()).subscribe(recorder.on(tail));
        let supervisor = Supervisor::start(topology).await.unwrap();
        let heard = Heard::of(&supervisor);
        recorder.reaches(3).await;
        server.add_numbers("s", 5..7);
        recorder.reaches(5).await;
        nothing_pending(&server, "s").await;
        eventually(SOON, "the gone ids", || !heard.gone().is_empty()).await;
        supervisor.shutdown().await.unwrap();
        assert_eq!(numbers(&recorder.calls()), [1, 2, 4, 5, 6], "{version}");
        assert_eq!(heard.gone(), sorted(&deleted), "{version}");
        heard.assert_nobody_crashed();
    }
}

// ---- what others left behind ----------------------------------------------------------------------------

#[tokio::test(flavor = "multi_thread")]
async fn b40_reclaim_follows_its_cursor_past_entries_that_are_too_young() {
    let server = Server::start(Version::Redis70);
    server.xgroup_create("s", GROUP, "0");
    let ids = server.add_numbers("s", 0..150);
    server.read_as("s", GROUP, "dead", 150);
    for id in &ids[100..] {
        server.give_to("s", GROUP, "dead", id, (AGES, 1));
    }
    let recorder = Recorder::acking();
    // Only a pass that finds nothing is followed by this pause: all must come in the first ones.
    let reclaim = Subscription::reclaim("s", LONG)
        .batch(10)
        .block(AGES)
        .workers(1);
    let topology = topology(&server.url()).subscribe(recorder.on(reclaim));
    let supervisor = Supervisor::start(topology).await.unwrap();
    recorder.reaches(50).await;
    eventually(SOON, "all acknowledged", || {
        server.xpending_count("s", GROUP) == 100
    })
    .await;
    supervisor.shutdown().await.unwrap();
    assert_eq!(recorder.ids(), ids[100..]);
    for (id, owner, _, count) in server.xpending("s", GROUP) {
        assert!(ids[..100].contains(&id));
        assert_eq!((owner.as_str(), count), ("dead", 1));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn reclaim_looks_through_a_pending_list_longer_than_one_step_sees() {
    let server = Server::start(Version::Redis70);
    server.xgroup_create("s", GROUP, "0");
    let ids = server.add_numbers("s", 0..2350);
    server.read_as("s", GROUP, "dead", 2350);
    for id in &ids[2300..] {
        server.give_to("s", GROUP, "dead", id, (AGES, 1));
    }
    let recorder = Recorder::acking();
    let reclaim = Subscription::reclaim("s", LONG)
        .batch(10)
        .block(AGES)
        .workers(1);
    let topology = topology(&server.url()).subscribe(recorder.on(reclaim));
    let supervisor = Supervisor::start(topology).await.unwrap();
    recorder.reaches(50).await;
    supervisor.shutdown().await.unwrap();
    assert_eq!(recorder.ids(), ids[2300..]);
}

#[tokio::test(flavor = "multi_thread")]
async fn b41_entries_in_hand_at_the_head_do_not_hide_orphans_behind_them() {
    let server = Server::start(Version::Redis70);
    let gate = Gate::closed();
    let slow = Recorder::behind(&gate);
    let looked = LookedFrom::watch(&server, "s");
    let (passes, passed) = (looked.clone(), Arc::new(AtomicUsize::new(0)));
    let most_passes = Arc::clone(&passed);
    let orphans = Recorder::answering(move |_| {
        most_passes.fetch_max(passes.passes(), Ordering::SeqCst);
        Ok(Outcome::Ack)
    });
    // Kept fresh all the while: they get older than min_idle while they run.
    let min_idle = Duration::from_secs(1);
    let topology = topology(&server.url())
        .subscribe(slow.on(Subscription::tail("s").workers(200).max_in_flight(200)))
        .subscribe(orphans.on(Subscription::reclaim("s", min_idle).batch(50).block(SHORT)));
    let supervisor = Supervisor::start(topology).await.unwrap();
    server.add_numbers("s", 0..200);
    slow.reaches(200).await;
    let behind = server.add_numbers("s", 200..220);
    assert_eq!(server.read_as("s", GROUP, "dead", 100), behind);
    for id in &behind {
        server.give_to("s", GROUP, "dead", id, (AGES, 1));
    }
    let before = looked.passes();
    orphans.reaches(20).await;
    let passes = passed.load(Ordering::SeqCst) - before;
    assert!(passes <= 2, "they were found in pass {passes} only");
    // Long enough for a keep-alive that does not work to show.
    let read_long_ago = Instant::now() + 2 * min_idle;
    eventually(SOON, "they ran for long", || Instant::now() > read_long_ago).await;
    let head = server.xpending("s", GROUP);
    assert_eq!(head.len(), 200);
    assert!(
        head.iter().all(|(_, owner, ..)| *owner == head[0].1),
        "none changed hands"
    );
    assert!(
        head.iter().all(|(.., count)| *count == 1),
        "none was counted"
    );
    gate.open();
    nothing_pending(&server, "s").await;
    supervisor.shutdown().await.unwrap();
    assert_eq!((slow.count(), slow.distinct()), (200, 200));
    assert_eq!(sorted(&orphans.ids()), sorted(&behind));
}

#[tokio::test(flavor = "multi_thread")]
async fn b44_what_is_reclaimed_is_handled_and_acknowledged_even_if_the_first_rescuer_dies_too() {
    let server = Server::start(Version::Redis70);
    server.add_numbers("s", 0..5);
    let ids = server.leave_behind("s", GROUP, "a");
    // B claimed them and died right after.
    for id in &ids {
        server.give_to("s", GROUP, "b", id, (AGES, 1));
    }
    let recorder = Recorder::acking();
    let reclaim = recorder.on(Subscription::reclaim("s", LONG).workers(1));
    let supervisor = Supervisor::start(topology(&server.url()).subscribe(reclaim))
        .await
        .unwrap();
    recorder.reaches(5).await;
    nothing_pending(&server, "s").await;
    supervisor.shutdown().await.unwrap();
    assert_eq!(recorder.ids(), ids);
    for call in recorder.calls() {
        assert_eq!(
            (call.mode, call.attempt, call.delivery_count),
            (Mode::Reclaim, 2, 2)
        );
        assert!(call.idle >= AGES);
        assert_eq!(call.header(DELIVERY_COUNT_HEADER).as_deref(), Some("2"));
        let idle_ms: u128 = call.header("redis-idle-ms").unwrap().parse().unwrap();
        assert_eq!(idle_ms, call.idle.as_millis());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reclaim_never_reads_fresh_entries() {
    let server = Server::start(Version::Redis70);
    server.add_numbers("s", 0..3);
    server.leave_behind("s", GROUP, "dead");
    server.add_numbers("s", 3..10);
    let recorder = Recorder::acking();
    let reclaim = recorder.on(Subscription::reclaim("s", LONG).block(SHORT));
    let supervisor = Supervisor::start(topology(&server.url()).subscribe(reclaim))
        .await
        .unwrap();
    nothing_pending(&server, "s").await;
    time_of(&server, "evalsha", 3).await;
    supervisor.shutdown().await.unwrap();
    assert_eq!(recorder.count(), 3);
    assert_eq!(server.read_as("s", GROUP, "next", 100).len(), 7);
}

#[tokio::test(flavor = "multi_thread")]
async fn b68_counts_are_right_however_much_the_consumer_has_pending_already() {
    let server = Server::start(Version::Redis70);
    server.add_numbers("s", 0..510);
    let ids = server.leave_behind("s", GROUP, "dead");
    let (older, counted) = ids.split_at(500);
    for id in counted {
        server.give_to("s", GROUP, "dead", id, (Duration::ZERO, 1));
    }
    let gate = Gate::closed();
    let recorder = Recorder::behind(&gate);
    let reclaim = Subscription::reclaim("s", LONG)
        .consumer("r")
        .block(SHORT)
        // Then as much is in hand as may be, however slow its handlers.
        .ordered_by("key")
        .workers(4);
    let topology = topology(&server.url()).subscribe(recorder.on(reclaim));
    let supervisor = Supervisor::start(topology).await.unwrap();
    let owned = || {
        let pending = server.xpending("s", GROUP);
        pending.iter().filter(|(_, owner, ..)| owner == "r").count()
    };
    eventually(SOON, "500 are in its hands", || owned() == 500).await;
    for (id, count) in counted.iter().zip(1..) {
        server.give_to("s", GROUP, "dead", id, (AGES, count));
    }
    eventually(SOON, "all are in its hands", || owned() == 510).await;
    gate.open();
    recorder.reaches(510).await;
    nothing_pending(&server, "s").await;
    supervisor.shutdown().await.unwrap();
    for (id, count) in counted.iter().zip(2..) {
        let [call] = &recorder.calls_of(id)[..] else {
            panic!("{id} should have been handled once");
        };
        assert_eq!((call.delivery_count, call.attempt), (count, count));
        assert_eq!(call.header(DELIVERY_COUNT_HEADER), Some(count.to_string()));
    }
    for id in older {
        assert_eq!(recorder.calls_of(id)[0].delivery_count, 2);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_start_is_counted_on_the_server_before_the_handler_is_called_and_a_fetch_is_not() {
    for version in Version::ALL {
        let server = Server::start(version);
        server.add_numbers("s", 0..4);
        let ids = server.leave_behind("s", GROUP, "dead");
        // 0 is what an entry has that was given back before its first start.
        for (id, count) in ids.iter().zip([0, 1, 7, 3]) {
            server.give_to("s", GROUP, "dead", id, (AGES, count));
        }
        let gate = Gate::closed();
        let recorder = Recorder::behind(&gate);
        let reclaim = Subscription::reclaim("s", LONG).consumer("r").workers(3);
        let topology = topology(&server.url()).subscribe(recorder.on(reclaim));
        let supervisor = Supervisor::start(topology).await.unwrap();
        recorder.reaches(3).await;
        eventually(SOON, "all are in its hands", || {
            let pending = server.xpending("s", GROUP);
            pending.iter().all(|(_, owner, ..)| owner == "r")
        })
        .await;
        let on_server = || -> Vec<i64> {
            let pending = server.xpending("s", GROUP);
            pending.iter().map(|(.., count)| *count).collect()
        };
        assert_eq!(on_server(), [1, 2, 8, 3], "{version}: three run, one waits");
        gate.open();
        recorder.reaches(4).await;
        let mut counts: Vec<(String, u64)> = recorder
            .calls()
            .iter()
            .map(|call| (call.id.to_string(), call.delivery_count))
            .collect();
        counts.sort_by_key(|(id, _)| id_of(id));
        let counts: Vec<u64> = counts.into_iter().map(|(_, count)| count).collect();
        assert_eq!(counts, [1, 2, 8, 4], "{version}");
        supervisor.shutdown().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn b47_a_process_does_not_take_what_it_runs_itself() {
    let server = Server::start(Version::Redis70);
    let min_idle = Duration::from_millis(200);
    let recorder = Recorder::running(move |_| async move {
        tokio::time::sleep(10 * min_idle).await;
        Ok(Outcome::Ack)
    });
    let topology = topology(&server.url())
        .subscribe(recorder.on(Subscription::tail("s").workers(5)))
        .subscribe(recorder.on(Subscription::reclaim("s", min_idle).block(SHORT)));
    let supervisor = Supervisor::start(topology).await.unwrap();
    // Five run, and five wait for their turn.
    server.add_numbers("s", 0..10);
    recorder.reaches(10).await;
    nothing_pending(&server, "s").await;
    supervisor.shutdown().await.unwrap();
    assert_eq!((recorder.count(), recorder.distinct()), (10, 10));
    assert!(
        recorder
            .calls()
            .iter()
            .all(|call| call.delivery_count == 1 && call.mode == Mode::Tail)
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn b45_a_sibling_does_not_take_what_runs_longer_than_min_idle() {
    let server = Server::start(Version::Redis70);
    let min_idle = Duration::from_secs(1);
    let recorder = Recorder::running(move |_| async move {
        tokio::time::sleep(3 * min_idle).await;
        Ok(Outcome::Ack)
    });
    let topology = topology(&server.url())
        .subscribe(recorder.on(Subscription::tail("s").workers(20)))
        .subscribe(
            recorder.on(Subscription::reclaim("s", min_idle)
                .block(SHORT)
                .workers(10)),
        );
    let one = Supervisor::start(topology.clone()).await.unwrap();
    let other = Supervisor::start(topology).await.unwrap();
    server.add_numbers("s", 0..20);
    recorder.reaches(20).await;
    nothing_pending(&server, "s").await;
    one.shutdown().await.unwrap();
    other.shutdown().await.unwrap();
    assert_eq!((recorder.count(), recorder.distinct()), (20, 20));
    assert!(
        recorder
            .calls()
            .iter()
            .all(|call| call.delivery_count == 1 && call.mode == Mode::Tail)
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn b49_what_hangs_in_this_process_is_left_to_others_by_its_own_reclaim() {
    let server = Server::start(Version::Redis70);
    let min_idle = Duration::from_millis(300);
    // A call that nothing can end, until the test does.
    let hung = Arc::new(AtomicBool::new(true));
    let hangs = Arc::clone(&hung);
    let recorder = Recorder::answering(move |_| {
        while hangs.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(Outcome::Ack)
    });
    let tail = Subscription::tail("s")
        .consumer("t")
        .workers(1)
        .handler_timeout(Duration::from_millis(100));
    let reclaim = Subscription::reclaim("s", min_idle)
        .consumer("r")
        .block(SHORT);
    let of_server = topology(&server.url());
    let topology = of_server
        .clone()
        .subscribe(recorder.on(tail))
        .subscribe(recorder.on(reclaim));
    let supervisor = Supervisor::start(topology).await.unwrap();
    let heard = Heard::of(&supervisor);
    server.add_numbers("s", 0..1);
    heard
        .wait("the entry is abandoned", |event| {
            matches!(event, Event::Abandoned { .. }).then_some(())
        })
        .await;
    // The reclaim comes across it every 300 ms from now on.
    time_of(&server, "evalsha", 40).await;
    let (_, owner, _, count) = server.xpending("s", GROUP).remove(0);
    assert_eq!((owner.as_str(), count), ("t", 1));
    assert_eq!(recorder.count(), 1, "it was not handed over here");
    let rescuing = Recorder::acking();
    let reclaim = rescuing.on(Subscription::reclaim("s", min_idle).block(SHORT));
    let other = Supervisor::start(of_server.subscribe(reclaim))
        .await
        .unwrap();
    rescuing.reaches(1).await;
    nothing_pending(&server, "s").await;
    hung.store(false, Ordering::Relaxed);
    supervisor.shutdown().await.unwrap();
    other.shutdown().await.unwrap();
    assert_eq!(rescuing.calls()[0].attempt, 2);
    assert_eq!((recorder.count(), rescuing.count()), (1, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn b33_b34_what_was_deleted_while_pending_is_taken_off_and_reported() {
    for version in Version::ALL {
        let server = Server::start(version);
        server.add_numbers("s", 0..50);
        let ids = server.leave_behind("s", GROUP, "dead");
        let deleted: Vec<String> = ids.iter().step_by(5).chain(&ids[41..45]).cloned().collect();
        let deleted = [&deleted[..], &ids[46..50], &ids[1..3]].concat();
        assert_eq!(deleted.len(), 20);
        server.xdel("s", &deleted);
        let recorder = Recorder::acking();
        let reclaim = Subscription::reclaim("s", LONG).block(SHORT).batch(7);
        let topology = topology(&server.url()).subscribe(recorder.on(reclaim));
        let supervisor = Supervisor::start(topology).await.unwrap();
        let heard = Heard::of(&supervisor);
        recorder.reaches(30).await;
        nothing_pending(&server, "s").await;
        // Further passes report nothing twice.
        time_of(&server, "evalsha", 3).await;
        supervisor.shutdown().await.unwrap();
        let all_told = || heard.gone().len() >= deleted.len();
        eventually(SOON, "the gone ids", all_told).await;
        assert_eq!(heard.gone(), sorted(&deleted), "{version}");
        assert_eq!(
            (recorder.count(), recorder.distinct()),
            (30, 30),
            "{version}"
        );
        heard.assert_nobody_crashed();
    }
}

// ---- how much at once ---------------------------------------------------------------------------------

#[tokio::test(flavor = "multi_thread")]
async fn no_more_than_max_in_flight_is_ever_pending() {
    let server = Server::start(Version::Redis70);
    server.xgroup_create("s", GROUP, "0");
    server.add_numbers("s", 0..3000);
    let gate = Gate::closed();
    let recorder = Recorder::behind(&gate);
    let tail = Subscription::tail("s")
        .max_in_flight(50)
        .batch(200)
        .workers(8);
    let most = Most::pending(&server, "s", None);
    let topology = topology(&server.url()).subscribe(recorder.on(tail));
    let supervisor = Supervisor::start(topology).await.unwrap();
    recorder.reaches(8).await;
    gate.open();
    recorder.reaches(3000).await;
    nothing_pending(&server, "s").await;
    supervisor.shutdown().await.unwrap();
    let most = most.seen();
    assert!((25..=50).contains(&most), "{most}");
    assert_eq!(recorder.distinct(), 3000);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reclaim_holds_no_more_than_its_max_in_flight() {
    let server = Server::start(Version::Redis70);
    server.add_numbers("s", 0..500);
    server.leave_behind("s", GROUP, "dead");
    let gate = Gate::closed();
    let recorder = Recorder::behind(&gate);
    let reclaim = Subscription::reclaim("s", LONG)
        .consumer("r")
        .max_in_flight(20)
        .workers(4);
    let most = Most::pending(&server, "s", Some("r"));
    let topology = topology(&server.url()).subscribe(recorder.on(reclaim));
    let supervisor = Supervisor::start(topology).await.unwrap();
    recorder.reaches(4).await;
    gate.open();
    recorder.reaches(500).await;
    nothing_pending(&server, "s").await;
    supervisor.shutdown().await.unwrap();
    let most = most.seen();
    assert!((10..=20).contains(&most), "{most}");
    assert_eq!(recorder.distinct(), 500);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_tail_does_not_starve_its_reclaim() {
    let server = Server::start(Version::Redis70);
    server.add_numbers("s", 0..100);
    let left = server.leave_behind("s", GROUP, "dead");
    server.add_numbers("s", 100..200);
    let gate = Gate::closed();
    let (full, rescuing) = (Recorder::behind(&gate), Recorder::acking());
    let topology = topology(&server.url())
        .subscribe(full.on(Subscription::tail("s").max_in_flight(10)))
        .subscribe(rescuing.on(Subscription::reclaim("s", LONG).max_in_flight(10)));
    let supervisor = Supervisor::start(topology).await.unwrap();
    full.reaches(8).await;
    rescuing.reaches(100).await;
    eventually(SOON, "the rescued are acknowledged", || {
        server.xpending_count("s", GROUP) == 10
    })
    .await;
    gate.open();
    full.reaches(100).await;
    supervisor.shutdown().await.unwrap();
    assert_eq!(sorted(&rescuing.ids()), sorted(&left));
}

#[tokio::test(flavor = "multi_thread")]
async fn b89_large_entries_are_bounded_by_their_bytes() {
    let server = Server::start(Version::Redis70);
    let body = "x".repeat(100_000);
    let gate = Gate::closed();
    let recorder = Recorder::behind(&gate);
    let tail = Subscription::tail("s")
        .max_bytes_in_flight(1_050_000)
        .workers(8);
    let topology = topology(&server.url()).subscribe(recorder.on(tail));
    let supervisor = Supervisor::start(topology).await.unwrap();
    // From the first one it is known how large they are.
    server.xadd("s", &[("_payload", &body)]);
    recorder.reaches(1).await;
    let most = Most::pending(&server, "s", None);
    server.xadd_many("s", (0..100).map(|_| vec![("_payload", &body)]));
    eventually(SOON, "all the room is used", || {
        server.xpending_count("s", GROUP) == 10
    })
    .await;
    gate.open();
    recorder.reaches(101).await;
    nothing_pending(&server, "s").await;
    supervisor.shutdown().await.unwrap();
    assert_eq!(most.seen(), 10);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_entry_larger_than_the_bound_is_read_alone() {
    let server = Server::start(Version::Redis70);
    let body = "x".repeat(300_000);
    let gate = Gate::closed();
    let recorder = Recorder::behind(&gate);
    let tail = Subscription::tail("s")
        .max_bytes_in_flight(100_000)
        .workers(8);
    let topology = topology(&server.url()).subscribe(recorder.on(tail));
    let supervisor = Supervisor::start(topology).await.unwrap();
    server.xadd("s", &[("_payload", &body)]);
    recorder.reaches(1).await;
    let most = Most::pending(&server, "s", None);
    server.xadd_many("s", (0..20).map(|_| vec![("_payload", &body)]));
    gate.open();
    recorder.reaches(21).await;
    nothing_pending(&server, "s").await;
    supervisor.shutdown().await.unwrap();
    assert_eq!((most.seen(), recorder.most_running()), (1, 1));
}

async fn kept_ten_times(server: &Server) {
    let kept = server.commandstat("evalsha");
    eventually(SOON, "what is in hand is kept fresh ten times", || {
        server.commandstat("evalsha") >= kept + 10
    })
    .await;
}

/// What would wait here for long is left to others: of a slow handler's backlog there is as much in hand as
/// keeps its workers busy, and as soon as it is quick, as much as may be.
#[tokio::test(flavor = "multi_thread")]
async fn a_slow_handler_holds_few_entries_and_a_quick_one_many() {
    const WORKERS: i64 = 4;
    let server = Server::start(Version::Redis8);
    let gate = Gate::closed();
    server.add_numbers("s", 0..1_000);
    let passes = gate.clone();
    let recorder = Recorder::running(move |call| {
        let gate = passes.clone();
        async move {
            match call.text().parse::<usize>().unwrap() {
                0..500 => tokio::time::sleep(Duration::from_millis(30)).await,
                500..2_000 => {}
                _ => gate.passed().await,
            }
            Ok(Outcome::Ack)
        }
    });
    let draft = Subscription::tail("s")
        .start(Start::Beginning)
        .workers(WORKERS as usize);
    let topology = topology(&server.url()).subscribe(recorder.on(draft));
    let supervisor = Supervisor::start(topology).await.unwrap();
    // Until the first calls have ended nothing is known of how long they take.
    let in_hand = || server.xpending_count("s", GROUP);
    eventually(SOON, "few are in hand", || {
        recorder.count() < 500 && (1..=3 * WORKERS).contains(&in_hand())
    })
    .await;
    recorder.reaches(1_000).await;
    server.add_numbers("s", 1_000..6_000);
    eventually(SOON, "many are in hand", || in_hand() >= 50 * WORKERS).await;
    gate.open();
    recorder.reaches(6_000).await;
    supervisor.shutdown().await.unwrap();
}

/// B106: a fast reader filled the memory with what nobody had time for.
#[tokio::test(flavor = "multi_thread")]
async fn b106_of_a_long_backlog_only_what_there_is_room_for_is_ever_in_hand() {
    const BACKLOG: usize = 4_000;
    const ROOM: usize = 64;
    for mode in [Mode::Tail, Mode::Reclaim, Mode::Claiming] {
        let server = Server::start(Version::Redis8);
        let left = match mode {
            Mode::Tail => 0,
            Mode::Claiming => BACKLOG / 2,
            _ => BACKLOG,
        };
        server.add_numbers("s", 0..left);
        server.leave_behind("s", GROUP, "dead");
        server.add_numbers("s", left..BACKLOG);
        let gate = Gate::closed();
        let passes = gate.clone();
        let recorder = Recorder::running(move |_| {
            let gate = passes.clone();
            async move {
                gate.passed().await;
                tokio::time::sleep(Duration::from_millis(10)).await;
                Ok(Outcome::Ack)
            }
        });
        let draft = match mode {
            Mode::Tail => Subscription::tail("s"),
            Mode::Reclaim => Subscription::reclaim("s", LONG),
            _ => Subscription::claiming("s", LONG),
        };
        let draft = draft
            .consumer("me")
            .workers(8)
            .max_in_flight(ROOM)
            .keep_alive(SHORT);
        let most = Most::pending(&server, "s", Some("me"));
        let topology = topology(&server.url()).subscribe(recorder.on(draft));
        let supervisor = Supervisor::start(topology).await.unwrap();
        recorder.reaches(8).await;
        let in_hand = || {
            let pending = server.xpending("s", GROUP);
            pending.iter().filter(|entry| entry.1 == "me").count()
        };
        eventually(SOON, "the room is used", || in_hand() > ROOM * 3 / 4).await;
        // As long as nothing is settled nothing further is asked for, and nothing is kept beside what
        // counts as in flight.
        kept_ten_times(&server).await;
        let reads = server.commandstat("xreadgroup");
        kept_ten_times(&server).await;
        assert_eq!(server.commandstat("xreadgroup"), reads, "{mode:?}");
        let status = supervisor.status().await.subscriptions.swap_remove(0);
        assert_eq!(status.in_flight, in_hand(), "{mode:?}");
        assert_eq!(
            (status.running, status.waiting),
            (8, status.in_flight - 8),
            "{mode:?}"
        );
        assert_eq!(status.read as usize, status.in_flight, "{mode:?}");

        gate.open();
        recorder.reaches(1_000).await;
        supervisor.shutdown().await.unwrap();
        let most = most.seen();
        assert!(
            (ROOM as i64 / 2..=ROOM as i64).contains(&most),
            "{mode:?}: {most} were in hand"
        );
        assert_eq!(recorder.most_running(), 8, "{mode:?}");
        assert_eq!(recorder.count(), recorder.distinct(), "{mode:?}");
    }
}

// ---- entries of any kind --------------------------------------------------------------------------------

type Fields = Vec<(Vec<u8>, Vec<u8>)>;

/// Entries that break clients, with ids that do; in the order of their ids, none of them the largest.
fn strange_entries(body: usize) -> Vec<(String, Fields)> {
    let all_bytes: Vec<u8> = (0..=255).collect();
    let fields = |pairs: &[(&[u8], &[u8])]| -> Fields {
        pairs
            .iter()
            .map(|(name, value)| (name.to_vec(), value.to_vec()))
            .collect()
    };
    vec![
        ("0-1".into(), fields(&[(b"_payload", b"the smallest id")])),
        (
            "1-70000".into(),
            fields(&[(b"_payload", &all_bytes), (b"\xff\xfe", &all_bytes)]),
        ),
        (
            "1-18446744073709551615".into(),
            fields(&[(b"a", b"1"), (b"b", b"2"), (b"a", b"3")]),
        ),
        ("2-0".into(), fields(&[(b"_payload", b"")])),
        ("2-1".into(), fields(&[(b"", b"")])),
        ("2-2".into(), fields(&[(b"no", b"body")])),
        (
            "2-3".into(),
            fields(&[
                (b"_payload", b"1"),
                (b"_payload", b"2"),
                (b"h:x", b"a"),
                (b"h:x", b"b"),
            ]),
        ),
        // What clients take for something else.
        ("2-4".into(), fields(&[(b"pmessage", b"a"), (b"b", b"c")])),
        ("2-5".into(), fields(&[(b"message", b"a"), (b"b", b"c")])),
        ("2-6".into(), fields(&[(b"-ERR no", b"$-1\r\n*0\r\n")])),
        ("2-7".into(), fields(&[(b"_payload", &vec![b'x'; body])])),
        (
            "2-8".into(),
            (0..4000)
                .map(|n| (b"f".to_vec(), format!("{n}").into_bytes()))
                .collect(),
        ),
        (
            "18446744073709551615-1".into(),
            fields(&[(b"h:", b"no name"), (b"_payload", b"\r\n\0")]),
        ),
    ]
}

#[track_caller]
fn add_with_id(server: &Server, stream: &str, id: &str, fields: &Fields) {
    let mut args = vec![b"XADD".to_vec(), stream.into(), id.into()];
    for (name, value) in fields {
        args.extend([name.clone(), value.clone()]);
    }
    assert_eq!(server.command(&args).as_str(), id);
}

fn as_added(entry: &Entry) -> (String, Fields) {
    let fields = entry
        .fields()
        .map(|(name, value)| (name.to_vec(), value.to_vec()));
    (entry.id().to_string(), fields.collect())
}

#[tokio::test(flavor = "multi_thread")]
async fn b98_b99_b100_b102_entries_of_any_kind_arrive_as_they_are_in_every_mode() {
    for version in Version::ALL {
        let body = if version == Version::Redis70 {
            10 << 20
        } else {
            1 << 10
        };
        let mut entries = strange_entries(body);
        let largest = "18446744073709551615-18446744073709551615";
        entries.push((
            largest.into(),
            vec![(b"_payload".to_vec(), b"the largest id".to_vec())],
        ));
        let server = Server::start(version);
        for stream in ["fresh", "own", "left"] {
            for (id, fields) in &entries {
                add_with_id(&server, stream, id, fields);
            }
        }
        server.xgroup_create("own", GROUP, "0");
        server.read_as("own", GROUP, "worker-7", 100);
        server.leave_behind("left", GROUP, "dead");

        let recorders = [Recorder::acking(), Recorder::acking(), Recorder::acking()];
        let [fresh, own, left] = &recorders;
        let topology = topology(&server.url())
            .subscribe(
                fresh.on(Subscription::tail("fresh")
                    .start(Start::Beginning)
                    .workers(1)),
            )
            .subscribe(own.on(Subscription::tail("own").consumer("worker-7").workers(1)))
            .subscribe(left.on(Subscription::reclaim("left", LONG).workers(1)));
        let supervisor = Supervisor::start(topology).await.unwrap();
        let heard = Heard::of(&supervisor);
        for (recorder, stream) in recorders.iter().zip(["fresh", "own", "left"]) {
            recorder.reaches(entries.len()).await;
            nothing_pending(&server, stream).await;
            let arrived: Vec<_> = recorder
                .calls()
                .iter()
                .map(|call| as_added(&call.entry))
                .collect();
            for (arrived, added) in arrived.iter().zip(&entries) {
                assert!(arrived == added, "{version} {stream}: {} differs", added.0);
            }
            assert_eq!(arrived.len(), entries.len());
        }
        supervisor.shutdown().await.unwrap();
        heard.assert_nobody_crashed();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn b102_a_page_that_ends_with_the_largest_id_is_the_last() {
    let largest = "18446744073709551615-18446744073709551615";
    let server = Server::start(Version::Redis70);
    for stream in ["own", "left"] {
        server.add_numbers(stream, 0..99);
        add_with_id(
            &server,
            stream,
            largest,
            &vec![(b"_payload".to_vec(), b"99".to_vec())],
        );
    }
    server.xgroup_create("own", GROUP, "0");
    server.read_as("own", GROUP, "worker-7", 100);
    server.xgroup_create("left", GROUP, "0");
    server.read_as("left", GROUP, "dead", 100);
    server.give_to("left", GROUP, "dead", largest, (AGES, 1));
    let (own, left) = (Recorder::acking(), Recorder::acking());
    let topology = topology(&server.url())
        .subscribe(own.on(Subscription::tail("own").consumer("worker-7").workers(1)))
        .subscribe(left.on(Subscription::reclaim("left", LONG).block(SHORT).workers(1)));
    let supervisor = Supervisor::start(topology).await.unwrap();
    let heard = Heard::of(&supervisor);
    own.reaches(100).await;
    left.reaches(1).await;
    nothing_pending(&server, "own").await;
    // The reclaim goes on after that page too.
    for id in left_young(&server) {
        server.give_to("left", GROUP, "dead", &id, (AGES, 1));
    }
    left.reaches(100).await;
    nothing_pending(&server, "left").await;
    supervisor.shutdown().await.unwrap();
    heard.assert_nobody_crashed();
    let trouble =
        heard.count(|event| matches!(event, Event::Blocked { .. } | Event::ServerAway { .. }));
    assert_eq!(trouble, 0);
}

fn left_young(server: &Server) -> Vec<String> {
    let pending = server.xpending("left", GROUP);
    pending.into_iter().map(|(id, ..)| id).collect()
}

/// A stream of this key is read, retried and reclaimed like any other.
async fn consumes(key: &[u8], group: &str) {
    let server = Server::start(Version::Redis70);
    let recorder = Recorder::answering(|call| match call.attempt {
        1 => Ok(Outcome::Retry),
        _ => Ok(Outcome::Ack),
    });
    let topology = topology(&server.url())
        .default_group(group)
        .subscribe(recorder.on(Subscription::tail(key).named("odd")))
        .subscribe(recorder.on(Subscription::reclaim(key, LONG).named("reclaim")));
    let supervisor = Supervisor::start(topology).await.unwrap();
    for _ in 0..10 {
        server.command(&[&b"XADD"[..], key, b"*", b"_payload", b"1"]);
    }
    recorder.reaches(20).await;
    eventually(SOON, "nothing is pending", || {
        let pending = server.command(&[&b"XPENDING"[..], key, group.as_bytes()]);
        pending.as_array()[0].as_int() == 0
    })
    .await;
    supervisor.shutdown().await.unwrap();
    assert_eq!(recorder.distinct(), 20);
    // The server lists those that have said goodbye for a moment longer.
    let closed = || server.client_list().is_empty();
    eventually(SOON, "no connection stays open", closed).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn b98_the_key_of_a_stream_may_be_any_bytes() {
    consumes(b"\xff stream \x00\r\n", GROUP).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_name_of_a_group_may_be_any_text() {
    consumes(b"s", "gr\u{fc}ppe \n{x}").await;
}

// ---- copies of other groups --------------------------------------------------------------------------

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_that_another_group_asked_for_is_acknowledged_and_not_handed_over() {
    let server = Server::start(Version::Redis70);
    let copy = |group: &'static str| {
        vec![
            ("_payload", group),
            ("h:retry-count", "1"),
            ("h:retry-group", group),
        ]
    };
    for stream in ["fresh", "own", "left"] {
        server.xadd_many(
            stream,
            [
                copy("other"),
                copy(GROUP),
                copy("other"),
                copy("G"),
                copy(""),
            ],
        );
    }
    server.xgroup_create("own", GROUP, "0");
    server.read_as("own", GROUP, "worker-7", 100);
    server.leave_behind("left", GROUP, "dead");
    let recorders = [Recorder::acking(), Recorder::acking(), Recorder::acking()];
    let [fresh, own, left] = &recorders;
    let topology = topology(&server.url())
        .subscribe(fresh.on(Subscription::tail("fresh").start(Start::Beginning)))
        .subscribe(own.on(Subscription::tail("own").consumer("worker-7")))
        .subscribe(left.on(Subscription::reclaim("left", LONG)));
    let supervisor = Supervisor::start(topology).await.unwrap();
    for (recorder, stream) in recorders.iter().zip(["fresh", "own", "left"]) {
        recorder.reaches(1).await;
        nothing_pending(&server, stream).await;
        assert_eq!(server.xlen(stream), 5);
    }
    supervisor.shutdown().await.unwrap();
    for recorder in &recorders {
        let [call] = &recorder.calls()[..] else {
            panic!("{:?}", recorder.calls());
        };
        assert_eq!(call.text(), GROUP);
    }
    assert_eq!(fresh.calls()[0].attempt, 2);
    assert_eq!(
        left.calls()[0].attempt,
        3,
        "one copy, a fetch, and this start"
    );
}

// ---- replies that are lost ------------------------------------------------------------------------------

#[tokio::test(flavor = "multi_thread")]
async fn b21_entries_of_a_lost_reply_are_handled_once_and_at_once() {
    let server = Server::start(Version::Redis70);
    let proxy = server.proxy();
    let recorder = Recorder::acking();
    // Nothing reclaims: what is lost can only come back through this consumer itself.
    let tail = recorder.on(Subscription::tail("s").block(Duration::from_millis(200)));
    let supervisor = Supervisor::start(topology(&proxy.url()).subscribe(tail))
        .await
        .unwrap();
    for round in 0..20 {
        let fault = match round % 4 {
            0 => proxy.tear_next_reply("XREADGROUP"),
            1 => proxy.drop_next_request("XREADGROUP"),
            _ => proxy.drop_next_reply("XREADGROUP"),
        };
        server.add_numbers("s", 10 * round..10 * round + 10);
        recorder.reaches(10 * round + 10).await;
        eventually(SOON, "the reply was lost", || fault.happened()).await;
    }
    nothing_pending(&server, "s").await;
    supervisor.shutdown().await.unwrap();
    assert_eq!((recorder.count(), recorder.distinct()), (200, 200));
    assert!(
        recorder.calls().iter().any(|call| call.delivery_count == 2),
        "no reply was lost"
    );
    assert!(recorder.calls().iter().all(|call| call.delivery_count <= 2));
}

#[tokio::test(flavor = "multi_thread")]
async fn b21_replies_lost_in_full_flow_cost_no_entry_and_no_second_run() {
    let server = Server::start(Version::Redis70);
    server.xgroup_create("s", GROUP, "0");
    let ids = server.add_numbers("s", 0..6000);
    let proxy = server.proxy();
    let recorder = Recorder::acking();
    let tail = Subscription::tail("s")
        .batch(50)
        .block(Duration::from_millis(200));
    let topology = topology(&proxy.url()).subscribe(recorder.on(tail));
    let supervisor = Supervisor::start(topology).await.unwrap();
    for round in 1..=20 {
        recorder.reaches(250 * round).await;
        let fault = proxy.drop_next_reply("XREADGROUP");
        eventually(SOON, "the reply was lost", || fault.happened()).await;
    }
    recorder.reaches(6000).await;
    nothing_pending(&server, "s").await;
    supervisor.shutdown().await.unwrap();
    assert_eq!(recorder.count(), 6000);
    assert_eq!(sorted(&recorder.ids()), sorted(&ids));
}

#[tokio::test(flavor = "multi_thread")]
async fn entries_of_a_lost_reclaim_are_found_by_the_next_pass() {
    let server = Server::start(Version::Redis70);
    server.add_numbers("s", 0..30);
    server.leave_behind("s", GROUP, "dead");
    let proxy = server.proxy();
    // Before it starts, so that the first call that finds something is lost.
    let fault = proxy.drop_next_reply("* reclaimed");
    let recorder = Recorder::acking();
    let reclaim = Subscription::reclaim("s", Duration::from_millis(500))
        .consumer("reclaimed")
        .block(SHORT);
    let topology = topology(&proxy.url()).subscribe(recorder.on(reclaim));
    let supervisor = Supervisor::start(topology).await.unwrap();
    recorder.reaches(30).await;
    nothing_pending(&server, "s").await;
    assert!(fault.happened());
    supervisor.shutdown().await.unwrap();
    assert_eq!((recorder.count(), recorder.distinct()), (30, 30));
    assert!(
        recorder.calls().iter().all(|call| call.delivery_count == 2),
        "a fetch is no start"
    );
}

// ---- stopping ---------------------------------------------------------------------------------------------

#[tokio::test(flavor = "multi_thread")]
async fn b16_a_stop_does_not_wait_for_the_block_and_strands_nothing() {
    let server = Server::start(Version::Redis70);
    server.xgroup_create("s", GROUP, "0");
    let recorder = Recorder::acking();
    let tail = Subscription::tail("s")
        .block(Duration::from_secs(60))
        .workers(2);
    let topology = topology(&server.url()).subscribe(recorder.on(tail));
    let rounds = 60;
    for round in 0..rounds {
        let supervisor = Supervisor::start(topology.clone()).await.unwrap();
        let blocked = || {
            let clients = server.client_list();
            clients.iter().any(|line| line.contains("flags=b"))
        };
        eventually(SOON, "the read blocks", blocked).await;
        let stopping = Instant::now();
        let mut adding = server.connect();
        let add = std::thread::spawn(move || {
            // Spread over the time that a stop takes.
            std::thread::sleep(Duration::from_micros(100 * (round % 20)));
            let round = round.to_string();
            adding
                .command(&["XADD", "s", "*", "_payload", &round])
                .unwrap();
        });
        supervisor.shutdown().await.unwrap();
        assert!(
            stopping.elapsed() < Duration::from_secs(20),
            "the stop waited for the block"
        );
        add.join().unwrap();
        for (id, .., idle, _) in server.xpending("s", GROUP) {
            assert!(
                idle > AGES,
                "{id} was delivered to nobody and is idle for {idle:?} only"
            );
        }
    }
    // Whatever was not handled is there for the next at once.
    let reclaim = recorder.on(Subscription::reclaim("s", LONG));
    let supervisor = Supervisor::start(topology.subscribe(reclaim))
        .await
        .unwrap();
    eventually(SOON, "all handled", || {
        recorder.distinct() == rounds as usize
    })
    .await;
    nothing_pending(&server, "s").await;
    supervisor.shutdown().await.unwrap();
    assert_eq!(recorder.count(), rounds as usize, "none was handled twice");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tree_whose_runtime_is_gone_keeps_nothing_fresh() {
    let server = Server::start(Version::Redis70);
    let gate = Gate::closed();
    let lost = Recorder::behind(&gate);
    let min_idle = Duration::from_millis(300);
    let topology = topology(&server.url());
    let dying = topology
        .clone()
        .subscribe(lost.on(Subscription::tail("s").workers(3)))
        .subscribe(lost.on(Subscription::reclaim("s", min_idle)));
    let (started, starting) = tokio::sync::oneshot::channel();
    let (end, ended) = tokio::sync::oneshot::channel::<()>();
    let runtime = std::thread::spawn(move || {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let supervisor = runtime.block_on(Supervisor::start(dying)).unwrap();
        started.send(()).unwrap();
        runtime.block_on(ended).unwrap();
        // As where `main` ends, but that the process lives on.
        runtime.shutdown_background();
        drop(supervisor);
    });
    starting.await.unwrap();
    let ids = server.add_numbers("s", 0..3);
    lost.reaches(3).await;
    end.send(()).unwrap();
    tokio::task::spawn_blocking(|| runtime.join().unwrap())
        .await
        .unwrap();

    let recorder = Recorder::acking();
    let reclaim = recorder.on(Subscription::reclaim("s", min_idle).block(SHORT));
    let supervisor = Supervisor::start(topology.subscribe(reclaim))
        .await
        .unwrap();
    recorder.reaches(3).await;
    nothing_pending(&server, "s").await;
    supervisor.shutdown().await.unwrap();
    assert_eq!(sorted(&recorder.ids()), sorted(&ids));
    eventually(SOON, "no connection is left open", || {
        server.client_list().is_empty()
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_taken_settled_or_deleted_while_it_waited_is_not_started() {
    for version in Version::ALL {
        let server = Server::start(version);
        server.add_numbers("s", 0..5);
        let ids = server.leave_behind("s", GROUP, "dead");
        let gate = Gate::closed();
        let recorder = Recorder::behind(&gate);
        let reclaim = Subscription::reclaim("s", LONG).consumer("r").workers(1);
        let topology = topology(&server.url()).subscribe(recorder.on(reclaim));
        let supervisor = Supervisor::start(topology).await.unwrap();
        let heard = Heard::of(&supervisor);
        recorder.reaches(1).await;
        eventually(SOON, "all are in its hands", || {
            let pending = server.xpending("s", GROUP);
            pending.iter().all(|(_, owner, ..)| owner == "r")
        })
        .await;
        server.give_to("s", GROUP, "thief", &ids[1], (Duration::ZERO, 9));
        assert_eq!(server.command(&["XACK", "s", GROUP, &ids[2]]).as_int(), 1);
        server.xdel("s", &ids[3..4]);
        gate.open();
        recorder.reaches(2).await;
        eventually(SOON, "the rest is settled", || {
            server.xpending_count("s", GROUP) == 1
        })
        .await;
        let lost = heard
            .wait("the loss is told", |event| match event {
                Event::OwnershipLost { id, .. } => Some(id.to_string()),
                _ => None,
            })
            .await;
        assert_eq!(lost, ids[1]);
        eventually(SOON, "the gone one is told", || !heard.gone().is_empty()).await;
        supervisor.shutdown().await.unwrap();
        assert_eq!(
            recorder.ids(),
            [ids[0].clone(), ids[4].clone()],
            "{version}"
        );
        assert_eq!(heard.gone(), sorted(&ids[3..4]), "{version}");
        let (id, owner, _, count) = server.xpending("s", GROUP).remove(0);
        assert_eq!((id, owner.as_str(), count), (ids[1].clone(), "thief", 9));
    }
}
