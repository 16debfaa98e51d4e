//! The consumers of a group: who is removed, and who never is.

mod support;

use std::time::Duration;

use streamvisor::{Subscription, Supervisor};
use support::record::{GROUP, Recorder, SOON, topology};
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
