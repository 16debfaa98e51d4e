//! Reading fresh entries, and handling and settling them.

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use streamvisor::prelude::*;
use support::*;

const SOON: Duration = Duration::from_secs(10);

#[tokio::test(flavor = "multi_thread")]
async fn fresh_entries_are_handled_and_acknowledged() {
    let server = Server::start(Version::Redis70);
    let handled = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&handled);
    let topology = Topology::new(Redis::url(&server.url()).unwrap()).subscribe(
        Subscription::tail("orders")
            .group("g")
            .handle_fn(move |order: u64, delivery: Context| {
                let counted = Arc::clone(&counted);
                async move {
                    assert_eq!(delivery.attempt(), 1);
                    counted.fetch_add(order as usize, Ordering::SeqCst);
                    Ok(Outcome::Ack)
                }
            }),
    );
    let supervisor = Supervisor::start(topology).await.unwrap();
    for _ in 0..1000 {
        server.xadd("orders", &[("_payload", "2")]);
    }
    eventually(SOON, "all handled", || {
        handled.load(Ordering::SeqCst) == 2000
    })
    .await;
    eventually(SOON, "all acknowledged", || {
        server.xpending_count("orders", "g") == 0
    })
    .await;
    let report = supervisor.shutdown().await.unwrap();
    assert_eq!(report.given_back, 0);
    assert!(report.left_running.is_empty() && report.unsettled.is_empty());
    assert_eq!(server.client_list().len(), 0);
}
