//! Fresh entries and those left behind, in one read.

mod support;

use std::collections::HashSet;
use std::time::Duration;

use streamvisor::fred::types::RespVersion;
use streamvisor::fred::types::config::Config;
use streamvisor::{Event, Mode, Outcome, Redis, Subscription, Supervisor, Topology};
use support::record::{GROUP, Gate, Heard, Recorder, SOON, topology};
use support::*;

const STREAM: &str = "orders";
const MIN_IDLE: Duration = Duration::from_millis(300);

/// A server with a group whose consumer `gone` has read this many entries and vanished.
fn left_behind(entries: usize) -> Server {
    let server = Server::start(Version::Redis8);
    server.xgroup_create(STREAM, GROUP, "0");
    if entries > 0 {
        let bodies = (0..entries).map(|n| vec![("_payload".to_owned(), format!("old-{n}"))]);
        server.xadd_many(STREAM, bodies);
        let count = entries.to_string();
        server.command(&[
            "XREADGROUP",
            "GROUP",
            GROUP,
            "gone",
            "COUNT",
            &count,
            "STREAMS",
            STREAM,
            ">",
        ]);
    }
    server
}

async fn settled(server: &Server) {
    eventually(SOON, "nothing is pending", || {
        server.xpending_count(STREAM, GROUP) == 0
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn b38_claimed_and_fresh_entries_come_out_of_one_reply_each_with_its_own_count() {
    let server = left_behind(10);
    for n in 0..10 {
        server.xadd(STREAM, &[("_payload", &format!("new-{n}"))]);
    }
    // The server has ten of them as delivered five times.
    for (id, ..) in server.xpending(STREAM, GROUP) {
        server.command(&[
            "XCLAIM",
            STREAM,
            GROUP,
            "gone",
            "0",
            &id,
            "RETRYCOUNT",
            "5",
            "JUSTID",
        ]);
    }
    eventually(SOON, "they are idle", || {
        server
            .xpending(STREAM, GROUP)
            .iter()
            .all(|(_, _, idle, _)| *idle >= MIN_IDLE)
    })
    .await;
    let recorder = Recorder::acking();
    let draft = Subscription::claiming(STREAM, MIN_IDLE);
    let supervisor = Supervisor::start(topology(&server.url()).subscribe(recorder.on(draft)))
        .await
        .unwrap();
    eventually(SOON, "all are handled", || recorder.count() == 20).await;
    settled(&server).await;
    let distinct: HashSet<_> = recorder
        .calls()
        .iter()
        .map(|call| call.text().to_owned())
        .collect();
    assert_eq!(distinct.len(), 20);
    for call in recorder.calls() {
        assert_eq!(call.mode, Mode::Claiming);
        if call.text().starts_with("old") {
            assert_eq!((call.delivery_count, call.attempt), (6, 6));
            assert!(call.idle >= MIN_IDLE);
            assert_eq!(call.header("redis-delivery-count").as_deref(), Some("6"));
        } else {
            assert_eq!(
                (call.delivery_count, call.attempt, call.idle),
                (1, 1, Duration::ZERO)
            );
        }
    }
    supervisor.shutdown().await.unwrap();
}

/// B38: several claimed entries were folded into one message.
#[tokio::test(flavor = "multi_thread")]
async fn b38_ten_claimed_and_ten_fresh_entries_of_the_same_reply_are_twenty() {
    // Whichever protocol the configuration asks for.
    for protocol in [RespVersion::RESP2, RespVersion::RESP3] {
        let server = left_behind(0);
        let proxy = server.proxy();
        let recorder = Recorder::acking();
        let draft = Subscription::claiming(STREAM, Duration::from_secs(600))
            .consumer("ours")
            .block(Duration::from_secs(60));
        let mut config = Config::from_url(&proxy.url()).unwrap();
        config.version = protocol.clone();
        let topology = Topology::new(Redis::from_config(config)).default_group(GROUP);
        let supervisor = Supervisor::start(topology.subscribe(recorder.on(draft)))
            .await
            .unwrap();
        // From the first one it is known how large they are, and more are asked for at once.
        server.xadd(STREAM, &[("_payload", "first")]);
        eventually(SOON, "the first is handled", || recorder.count() == 1).await;
        settled(&server).await;
        eventually(SOON, "the reader waits", || {
            let clients = server.client_list();
            clients.iter().any(|client| client.contains("flags=b"))
        })
        .await;
        // What arrives for one read cannot be in two replies.
        proxy.hold_replies();
        let id = |n: usize| format!("99999999999990-{n}");
        let add = |n: usize, body: String| {
            vec!["XADD".into(), STREAM.into(), id(n), "_payload".into(), body]
        };
        let words = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
        let mut at_once = vec![words("MULTI")];
        at_once.extend((1..=10).map(|n| add(n, format!("old-{n}"))));
        at_once.push(words(&format!(
            "XREADGROUP GROUP {GROUP} gone COUNT 10 STREAMS {STREAM} >"
        )));
        at_once.extend((1..=10).map(|n| {
            let claim = format!("XCLAIM {STREAM} {GROUP} gone 0 {} IDLE 3600000", id(n));
            words(&format!("{claim} RETRYCOUNT {n} JUSTID"))
        }));
        at_once.extend((11..=20).map(|n| add(n, format!("new-{n}"))));
        at_once.push(words("EXEC"));
        server.pipeline(&at_once);
        eventually(SOON, "all are delivered to the one read", || {
            let pending = server.xpending(STREAM, GROUP);
            pending.len() == 20 && pending.iter().all(|entry| entry.1 == "ours")
        })
        .await;
        proxy.release();
        eventually(SOON, "all are handled", || recorder.count() == 21).await;
        settled(&server).await;
        supervisor.shutdown().await.unwrap();
        assert_eq!((recorder.count(), recorder.distinct()), (21, 21));
        for n in 1..=20_u64 {
            let [call] = &recorder.calls_of(&id(n as usize))[..] else {
                panic!("{n} was not handled once");
            };
            if n <= 10 {
                assert_eq!(call.text(), format!("old-{n}"));
                assert_eq!((call.delivery_count, call.attempt), (n + 1, n + 1));
                assert!(call.idle >= Duration::from_secs(3600));
            } else {
                assert_eq!(call.text(), format!("new-{n}"));
                assert_eq!((call.delivery_count, call.attempt), (1, 1));
                assert_eq!(call.idle, Duration::ZERO);
            }
        }
    }
}

/// B40, for a read that claims: what is too young must not hide what is not.
#[tokio::test(flavor = "multi_thread")]
async fn b40_idle_entries_behind_many_that_are_too_young_are_claimed() {
    let server = left_behind(150);
    let long = Duration::from_secs(600);
    let ids: Vec<String> = server
        .xpending(STREAM, GROUP)
        .into_iter()
        .map(|(id, ..)| id)
        .collect();
    for id in &ids[100..] {
        server.give_to(STREAM, GROUP, "gone", id, (2 * long, 1));
    }
    let recorder = Recorder::acking();
    let draft = Subscription::claiming(STREAM, long).batch(10).workers(1);
    let supervisor = Supervisor::start(topology(&server.url()).subscribe(recorder.on(draft)))
        .await
        .unwrap();
    eventually(SOON, "all fifty are handled", || recorder.count() == 50).await;
    eventually(SOON, "and acknowledged", || {
        server.xpending_count(STREAM, GROUP) == 100
    })
    .await;
    supervisor.shutdown().await.unwrap();
    let mut handled = recorder.ids();
    handled.sort();
    let mut expected = ids[100..].to_vec();
    expected.sort();
    assert_eq!(handled, expected);
    for (id, owner, _, count) in server.xpending(STREAM, GROUP) {
        assert!(ids[..100].contains(&id));
        assert_eq!((owner.as_str(), count), ("gone", 1));
    }
}

/// B41, for a read that claims: what this process runs is at the head of the pending list.
#[tokio::test(flavor = "multi_thread")]
async fn b41_what_runs_at_the_head_does_not_hide_orphans_behind_it() {
    let server = left_behind(0);
    let gate = Gate::closed();
    let passes = gate.clone();
    let recorder = Recorder::running(move |call| {
        let gate = passes.clone();
        async move {
            if call.text() == "long" {
                gate.passed().await;
            }
            Ok(Outcome::Ack)
        }
    });
    let min_idle = Duration::from_secs(1);
    let draft = Subscription::claiming(STREAM, min_idle)
        .workers(210)
        .batch(50)
        .block(Duration::from_millis(100));
    let supervisor = Supervisor::start(topology(&server.url()).subscribe(recorder.on(draft)))
        .await
        .unwrap();
    server.xadd_many(STREAM, (0..200).map(|_| vec![("_payload", "long")]));
    eventually(SOON, "200 run", || recorder.running_now() == 200).await;
    // Orphans come and go behind them for longer than `min_idle`.
    let began = std::time::Instant::now();
    let mut orphans = Vec::new();
    while orphans.len() < 20 || began.elapsed() < 2 * min_idle {
        let before = recorder.count();
        let added = server.pipeline(&[
            vec!["MULTI"],
            vec!["XADD", STREAM, "*", "_payload", "orphan"],
            vec!["XREADGROUP", "GROUP", GROUP, "dead", "STREAMS", STREAM, ">"],
            vec!["EXEC"],
        ]);
        let id = added[3].as_array()[0].as_str().to_owned();
        server.give_to(STREAM, GROUP, "dead", &id, (10 * min_idle, 1));
        eventually(SOON, "the orphan is handled", || recorder.count() > before).await;
        orphans.push(id);
    }
    let head = server.xpending(STREAM, GROUP);
    let running = head.iter().filter(|entry| !orphans.contains(&entry.0));
    assert_eq!(running.clone().count(), 200);
    assert!(
        running
            .clone()
            .all(|(_, owner, idle, count)| *owner == head[0].1 && *idle < min_idle && *count == 1),
        "{head:?}"
    );
    gate.open();
    settled(&server).await;
    supervisor.shutdown().await.unwrap();
    assert!(recorder.overlapped().is_empty());
    assert_eq!(
        (recorder.count(), recorder.distinct()),
        (200 + orphans.len(), 200 + orphans.len())
    );
    for id in orphans {
        assert_eq!(recorder.calls_of(&id)[0].delivery_count, 2);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_waiting_read_wakes_for_an_entry_that_is_left_behind_and_for_a_fresh_one() {
    let server = left_behind(0);
    let recorder = Recorder::acking();
    let draft = Subscription::claiming(STREAM, MIN_IDLE).block(Duration::from_secs(60));
    let supervisor = Supervisor::start(topology(&server.url()).subscribe(recorder.on(draft)))
        .await
        .unwrap();
    let mut heard = supervisor.events();
    while !matches!(heard.next().await, Ok(Some(Event::Started { .. }))) {}
    eventually(SOON, "the reader waits", || {
        server
            .client_list()
            .iter()
            .any(|client| client.contains("flags=b"))
    })
    .await;
    server.xadd(STREAM, &[("_payload", "fresh")]);
    eventually(SOON, "the fresh one is handled", || recorder.count() == 1).await;
    // Another consumer takes the next one before us and vanishes: both reads race for it, so it may
    // take a few tries.
    let mut taken = 0;
    while taken == 0 {
        let reply = server.pipeline(&[
            vec!["MULTI"],
            vec!["XADD", STREAM, "*", "_payload", "left"],
            vec!["XREADGROUP", "GROUP", GROUP, "gone", "STREAMS", STREAM, ">"],
            vec!["EXEC"],
        ]);
        taken = reply.len();
    }
    eventually(SOON, "the one left behind is handled", || {
        recorder
            .calls()
            .iter()
            .any(|call| call.text() == "left" && call.delivery_count == 2)
    })
    .await;
    settled(&server).await;
    supervisor.shutdown().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn b47_what_this_process_runs_for_long_is_never_run_twice() {
    let server = left_behind(20);
    let gate = Gate::closed();
    let recorder = Recorder::behind(&gate);
    let draft = Subscription::claiming(STREAM, MIN_IDLE)
        .workers(40)
        .block(Duration::from_millis(100));
    let supervisor = Supervisor::start(topology(&server.url()).subscribe(recorder.on(draft)))
        .await
        .unwrap();
    for n in 0..20 {
        server.xadd(STREAM, &[("_payload", &format!("new-{n}"))]);
    }
    eventually(SOON, "all run", || recorder.count() == 40).await;
    // Many reads that claim pass meanwhile.
    let before = server.commandstat("xreadgroup");
    eventually(SOON, "many more reads", || {
        server.commandstat("xreadgroup") >= before + 15
    })
    .await;
    assert!(
        server
            .xpending(STREAM, GROUP)
            .iter()
            .all(|(_, _, idle, _)| *idle < MIN_IDLE)
    );
    gate.open();
    settled(&server).await;
    assert_eq!(recorder.count(), 40);
    assert!(recorder.overlapped().is_empty());
    supervisor.shutdown().await.unwrap();
}

/// B43, for a read that claims.
#[tokio::test(flavor = "multi_thread")]
async fn b43_an_idle_read_that_claims_comes_once_a_block_period_even_over_young_entries() {
    let block = Duration::from_millis(400);
    let server = left_behind(500);
    let recorder = Recorder::acking();
    let draft = Subscription::claiming(STREAM, Duration::from_secs(600)).block(block);
    let supervisor = Supervisor::start(topology(&server.url()).subscribe(recorder.on(draft)))
        .await
        .unwrap();
    let calls = || server.commandstat("xreadgroup");
    let before = calls();
    eventually(SOON, "the reads of the start", || calls() >= before + 2).await;
    let (first, began) = (calls(), std::time::Instant::now());
    eventually(SOON, "four reads more", || calls() >= first + 4).await;
    // The first of them may have been under way.
    assert!(
        began.elapsed() >= 3 * block - Duration::from_millis(100),
        "4 reads within {:?}",
        began.elapsed()
    );
    assert_eq!(recorder.count(), 0);
    supervisor.shutdown().await.unwrap();
    for (_, owner, _, count) in server.xpending(STREAM, GROUP) {
        assert_eq!((owner.as_str(), count), ("gone", 1));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_long_backlog_of_what_was_left_behind_does_not_keep_fresh_entries_waiting() {
    let server = left_behind(600);
    eventually(SOON, "they are idle", || {
        server
            .xpending(STREAM, GROUP)
            .iter()
            .all(|(_, _, idle, _)| *idle >= MIN_IDLE)
    })
    .await;
    server.xadd(STREAM, &[("_payload", "fresh")]);
    let recorder = Recorder::acking();
    let draft = Subscription::claiming(STREAM, MIN_IDLE)
        .batch(10)
        .workers(1)
        .max_in_flight(40);
    let supervisor = Supervisor::start(topology(&server.url()).subscribe(recorder.on(draft)))
        .await
        .unwrap();
    eventually(SOON, "all are handled", || recorder.count() == 601).await;
    let calls = recorder.calls();
    let place = calls
        .iter()
        .position(|call| call.text() == "fresh")
        .unwrap();
    assert!(place < 200, "the fresh entry came after {place} others");
    settled(&server).await;
    supervisor.shutdown().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn entries_that_are_gone_are_taken_off_the_pending_list_although_claim_passes_over_them() {
    let server = left_behind(6);
    let ids: Vec<String> = server
        .xpending(STREAM, GROUP)
        .into_iter()
        .map(|(id, ..)| id)
        .collect();
    server.command(&["XDEL", STREAM, &ids[0], &ids[4]]);
    eventually(SOON, "they are idle", || {
        server
            .xpending(STREAM, GROUP)
            .iter()
            .all(|(_, _, idle, _)| *idle >= MIN_IDLE)
    })
    .await;
    let recorder = Recorder::acking();
    let draft = Subscription::claiming(STREAM, MIN_IDLE);
    let supervisor = Supervisor::start(topology(&server.url()).subscribe(recorder.on(draft)))
        .await
        .unwrap();
    let heard = Heard::of(&supervisor);
    settled(&server).await;
    assert_eq!(recorder.count(), 4);
    eventually(SOON, "both are reported as gone", || {
        let gone = heard.gone();
        gone.iter().map(ToString::to_string).collect::<Vec<_>>() == [&*ids[0], &*ids[4]]
    })
    .await;
    supervisor.shutdown().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn retries_and_lost_replies_are_as_in_the_other_modes() {
    let server = left_behind(0);
    let proxy = server.proxy();
    let recorder = Recorder::answering(|call| {
        Ok(if call.attempt == 1 {
            Outcome::Retry
        } else {
            Outcome::Ack
        })
    });
    let draft =
        Subscription::claiming(STREAM, Duration::from_secs(600)).block(Duration::from_millis(200));
    let supervisor = Supervisor::start(topology(&proxy.url()).subscribe(recorder.on(draft)))
        .await
        .unwrap();
    let lost = proxy.drop_next_reply("XREADGROUP orders");
    for n in 0..50 {
        server.xadd(STREAM, &[("_payload", &n.to_string())]);
    }
    eventually(SOON, "a reply is lost", || lost.happened()).await;
    // An entry that was fetched and never seen counts as started once: it may skip its retry.
    eventually(SOON, "each has had a second attempt", || {
        let second = recorder
            .calls()
            .into_iter()
            .filter(|call| call.attempt >= 2);
        second
            .map(|call| call.text().to_owned())
            .collect::<HashSet<_>>()
            .len()
            == 50
    })
    .await;
    settled(&server).await;
    assert!(recorder.overlapped().is_empty());
    supervisor.shutdown().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_cannot_claim_is_refused_with_what_does_the_same_there() {
    for version in [Version::Redis70, Version::Valkey] {
        let server = Server::start(version);
        let draft = Subscription::claiming(STREAM, MIN_IDLE);
        let topology = topology(&server.url()).subscribe(Recorder::acking().on(draft));
        let error = Supervisor::start(topology).await.unwrap_err().to_string();
        for expected in [
            "Redis 8.4 or later",
            "Subscription::tail",
            "Subscription::reclaim",
        ] {
            assert!(error.contains(expected), "{error}");
        }
        let named = if version == Version::Valkey {
            "Valkey"
        } else {
            "Redis 7.0"
        };
        assert!(error.starts_with(named), "{error}");
        eventually(SOON, "no connection is left", || {
            server.client_list().is_empty()
        })
        .await;
    }
}
