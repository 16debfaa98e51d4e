//! The smallest program: reads orders, acknowledges them, and stops cleanly on Ctrl-C.
//!
//! ```sh
//! cargo run --example quickstart
//! redis-cli XADD orders '*' _payload '{"id": 7}'
//! ```
//!
//! `REDIS_URL` names another server than `redis://localhost:6379`.

use std::time::Duration;

use serde::Deserialize;
use streamvisor::prelude::*;

#[derive(Debug, Deserialize)]
struct Order {
    id: u64,
}

async fn fulfil(order: Order, delivery: Context) -> Result<Outcome, BoxError> {
    tracing::info!(order.id, attempt = delivery.attempt(), "fulfilled");
    Ok(Outcome::Ack)
}

#[tokio::main]
async fn main() -> Result<(), BoxError> {
    tracing_subscriber::fmt().init();
    let url = std::env::var("REDIS_URL").unwrap_or_else(|_| "redis://localhost:6379".into());

    let topology = Topology::new(Redis::url(&url)?)
        .default_group("workers")
        // fresh entries
        .subscribe(Subscription::tail("orders").workers(8).handle_fn(fulfil))
        // what a crashed consumer of the group left behind
        .subscribe(Subscription::reclaim("orders", Duration::from_secs(60)).handle_fn(fulfil));

    let supervisor = Supervisor::start(topology).await?;
    let (signal, _report) = supervisor.run_until(tokio::signal::ctrl_c()).await?; // then drains
    signal?;
    Ok(())
}
