//! The consumers of a group: who is removed, and who never is.

mod support;

use std::time::Duration;

use streamvisor::{Event, Outcome, StartError, State, Subscription, Supervisor};
use support::record::{GROUP, Gate, Heard, Recorder, SOON, fill, ms, topology};
use support::*;

const STREAM: &str = "orders";

fn consumers(server: &Server) -> Vec<String> {
    let reply = server.command(&["XINFO", "CONSUMERS", STREAM, GROUP]);
    let name = |consumer: &Reply| consumer.as_array()[1].as_str().to_owned();
    reply.as_array().iter().map(name).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn b52_b53_consumers_that_are_gone_are_removed_once_nothing_of_theirs_is_pending() {
    let server = Server::start(Version::Redis70);
    server.xgroup_create(STREAM, GROUP, "0");
    for n in 0..20 {
        server.command(&[
            "XGROUP",
            "CREATECONSUMER",
            STREAM,
            GROUP,
            &format!("gone-{n}"),
        ]);
    }
    server.xadd(STREAM, &[("_payload", "1")]);
    server.command(&["XREADGROUP", "GROUP", GROUP, "busy", "STREAMS", STREAM, ">"]);
    let recorder = Recorder::acking();
    let draft = Subscription::reclaim(STREAM, Duration::from_secs(3600))
        .consumer("ours")
        .consumer_ttl(Duration::from_millis(50))
        .block(Duration::from_millis(20));
    let supervisor = Supervisor::start(topology(&server.url()).subscribe(recorder.on(draft)))
        .await
        .unwrap();
    eventually(SOON, "only who has something pending is left", || {
        consumers(&server)
            .iter()
            .all(|name| name == "busy" || name == "ours")
    })
    .await;
    // Passes go on, and the one with a pending entry stays.
    let before = server.commandstat("evalsha");
    eventually(SOON, "more passes", || {
        server.commandstat("evalsha") > before + 20
    })
    .await;
    assert!(consumers(&server).contains(&"busy".to_owned()));
    assert_eq!(
        (server.xpending_count(STREAM, GROUP), recorder.count()),
        (1, 0)
    );
    supervisor.shutdown().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tree_that_ends_because_its_last_handle_is_dropped_takes_its_consumer_along() {
    let server = Server::start(Version::Redis70);
    server.xgroup_create(STREAM, GROUP, "0");
    for _ in 0..10 {
        server.xadd(STREAM, &[("_payload", "1")]);
        let recorder = Recorder::acking();
        let topology = topology(&server.url()).subscribe(recorder.on(Subscription::tail(STREAM)));
        let supervisor = Supervisor::start(topology).await.unwrap();
        eventually(SOON, "it is handled", || recorder.count() == 1).await;
        drop(supervisor);
        // Before that it may still take an entry, and would give it back.
        eventually(SOON, "no connection is left", || {
            server.client_list().is_empty()
        })
        .await;
    }
    assert_eq!(consumers(&server), Vec::<String>::new());
}

const LEASE: &str = "{orders}:streamvisor:lease:g:worker-7";

fn named(recorder: &Recorder) -> Subscription {
    let draft = Subscription::tail(STREAM).named("named").block(ms(100));
    recorder.on(draft.consumer("worker-7").workers(1))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_name_that_a_living_process_uses_is_refused_and_free_after_a_clean_stop() {
    let server = Server::start(Server::default_version());
    server.xgroup_create(STREAM, GROUP, "0");
    let recorder = Recorder::acking();
    let topology = topology(&server.url()).subscribe(named(&recorder));
    let first = Supervisor::start(topology.clone()).await.unwrap();
    let refused = Supervisor::start(topology.clone()).await.unwrap_err();
    assert!(
        matches!(refused, StartError::ConsumerInUse { .. }),
        "{refused}"
    );
    let text = refused.to_string();
    assert!(
        text.contains("`worker-7`") && text.contains("another name"),
        "{text}"
    );
    // The first one has not noticed.
    fill(&server, STREAM, 3);
    recorder.reaches(3).await;
    first.shutdown().await.unwrap();
    assert!(server.command(&["GET", LEASE]).is_nil());
    let again = Supervisor::start(topology).await.unwrap();
    fill(&server, STREAM, 1);
    recorder.reaches(4).await;
    again.shutdown().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_name_whose_process_is_gone_is_waited_for() {
    let server = Server::start(Server::default_version());
    server.xgroup_create(STREAM, GROUP, "0");
    server.command(&["SET", LEASE, "somebody", "PX", "700"]);
    let recorder = Recorder::acking();
    let topology = topology(&server.url()).subscribe(named(&recorder));
    let supervisor = Supervisor::start(topology).await.unwrap();
    assert_ne!(server.command(&["GET", LEASE]).as_str(), "somebody");
    supervisor.shutdown().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lease_that_vanished_is_taken_again() {
    let server = Server::start(Server::default_version());
    server.xgroup_create(STREAM, GROUP, "0");
    let recorder = Recorder::acking();
    let topology = topology(&server.url()).subscribe(named(&recorder));
    let supervisor = Supervisor::start(topology).await.unwrap();
    let heard = Heard::of(&supervisor);
    server.command(&["DEL", LEASE]);
    eventually(SOON, "the lease is there", || {
        !server.command(&["GET", LEASE]).is_nil()
    })
    .await;
    fill(&server, STREAM, 1);
    recorder.reaches(1).await;
    assert_eq!(
        heard.count(|event| matches!(event, Event::ConsumerTaken { .. })),
        0
    );
    supervisor.shutdown().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_name_that_another_process_has_taken_ends_the_subscription_and_nothing_of_its_is_touched()
{
    let server = Server::start(Server::default_version());
    server.xgroup_create(STREAM, GROUP, "0");
    fill(&server, STREAM, 10);
    let gate = Gate::closed();
    let recorder = Recorder::running({
        let gate = gate.clone();
        move |call| {
            let gate = gate.clone();
            async move {
                call.context.ownership_lost().await;
                gate.passed().await;
                Ok(Outcome::Retry)
            }
        }
    });
    let beside = Recorder::acking();
    let other = Subscription::tail("beside").named("beside").block(ms(100));
    let topology = topology(&server.url())
        .subscribe(named(&recorder))
        .subscribe(beside.on(other));
    let supervisor = Supervisor::start(topology).await.unwrap();
    let heard = Heard::of(&supervisor);
    recorder.reaches(1).await;
    while supervisor.status().await.subscriptions[0].in_flight < 10 {}
    let pending = server.xpending(STREAM, GROUP);
    server.command(&["SET", LEASE, "somebody"]);
    heard
        .wait("the name is missed", |event| {
            matches!(event, Event::ConsumerTaken { .. }).then_some(())
        })
        .await;
    assert_eq!(
        supervisor.status().await.subscriptions[0].state,
        State::Failed
    );
    gate.open();
    // The others go on.
    fill(&server, "beside", 3);
    beside.reaches(3).await;
    let report = supervisor.shutdown().await.unwrap();
    assert_eq!((recorder.count(), report.given_back), (1, 0));
    // No copy was made, and nothing was given back, settled, or counted.
    assert_eq!(server.xlen(STREAM), 10);
    let left: Vec<_> = server.xpending(STREAM, GROUP);
    let key = |entry: &(String, String, Duration, i64)| (entry.0.clone(), entry.1.clone(), entry.3);
    assert_eq!(
        left.iter().map(key).collect::<Vec<_>>(),
        pending.iter().map(key).collect::<Vec<_>>()
    );
    assert_eq!(server.command(&["GET", LEASE]).as_str(), "somebody");
}

/// The process cannot reach the server for longer than `min_idle`, and another consumer takes what it
/// has.
#[tokio::test(flavor = "multi_thread")]
async fn what_another_consumer_took_meanwhile_is_not_started_here() {
    let server = Server::start(Server::default_version());
    server.xgroup_create(STREAM, GROUP, "0");
    fill(&server, STREAM, 10);
    let proxy = server.proxy();
    let gate = Gate::closed();
    let recorder = Recorder::behind(&gate);
    let draft = Subscription::tail(STREAM)
        .named("cut-off")
        .workers(1)
        .keep_alive(ms(100))
        .block(ms(100));
    let supervisor = Supervisor::start(topology(&proxy.url()).subscribe(recorder.on(draft)))
        .await
        .unwrap();
    let heard = Heard::of(&supervisor);
    recorder.reaches(1).await;
    while supervisor.status().await.subscriptions[0].in_flight < 10 {}
    proxy.hold_replies();
    // Whoever holds requests back, this process cannot know that its entries are still its own.
    proxy.black_hole();
    eventually(SOON, "all of it is idle", || {
        let taken = server.command(&[
            "XAUTOCLAIM",
            STREAM,
            GROUP,
            "thief",
            "300",
            "0",
            "COUNT",
            "100",
        ]);
        let _ = taken;
        let pending = server.xpending(STREAM, GROUP);
        pending.iter().all(|entry| entry.1 == "thief")
    })
    .await;
    gate.open();
    proxy.cut_all();
    proxy.release();
    heard
        .wait("it learns of it", |event| {
            matches!(event, Event::OwnershipLost { .. }).then_some(())
        })
        .await;
    // It goes on with what is its own.
    fill(&server, STREAM, 3);
    recorder.reaches(4).await;
    supervisor.shutdown().await.unwrap();
    assert_eq!(recorder.count(), 4);
}
