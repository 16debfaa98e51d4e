//! Drains a consumer group as fast as it can, or measures how late entries reach the handler: the
//! consumer that `scripts/peers.sh` compares with those of other libraries.
//!
//! Its environment: `REDIS_URL`, `STREAM` and `GROUP` (which exists), `N` (end after so many orders),
//! `WORKLOAD` (`drain` or `latency`), and what is under test:
//!
//! - `FORM`     `function` (default): one call of an async function per entry; `batch`: several entries in
//!   one call; `actors`: the application's own actors; `claiming`: the function, with what was left behind
//!   in the same read (from Redis 8.4); `mixed`: the function, with one in ten retried, one in twenty
//!   retried after a delay and one in a hundred dead-lettered
//! - `WORKERS`  handler actors (default: the library's)
//! - `COUNT`    entries per read (default: the library's)
//! - `MAX_IN_FLIGHT` entries in hand at once (default: the library's)
//! - `RUNTIME`  `current` (default) or `multi`: tokio's runtime
//! - `ROLE`     `consume` (default), or `load`: fill the stream with `N` orders and make the group. `mixed`
//!   needs it: what it leaves in the stream is more than the harness put there, so it loads for itself
//!   (`FORMAT=own` in the harness's lists)
//!
//! It prints one line of JSON once everything is acknowledged, and ends.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::Deserialize;
use streamvisor::fred::prelude::{Client, ClientLike, Config, StreamsInterface, Value};
use streamvisor::prelude::*;
use streamvisor::ractor::{Actor, ActorProcessingErr, ActorRef};
use tokio::sync::Notify;

/// The body of an entry.
#[derive(Deserialize)]
#[allow(dead_code)] // decoded whole, as a real consumer would
struct Order {
    id: u64,
    customer: String,
    total: u64,
    currency: String,
    items: u32,
    express: bool,
    /// When it was sent, in microseconds since 1970; 0 where that is not measured.
    ts: u64,
}

/// What was handled so far.
struct Tally {
    handled: AtomicU64,
    sum: AtomicU64,
    late_us: Mutex<Vec<u64>>,
    all: Notify,
}

static TALLY: Tally = Tally {
    handled: AtomicU64::new(0),
    sum: AtomicU64::new(0),
    late_us: Mutex::new(Vec::new()),
    all: Notify::const_new(),
};

impl Tally {
    fn add(&self, order: &Order, all: u64) {
        if order.ts != 0 {
            let now = SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .unwrap_or_default()
                .as_micros() as u64;
            if let Ok(mut late) = self.late_us.lock() {
                late.push(now.saturating_sub(order.ts));
            }
        }
        self.sum.fetch_add(order.id, Relaxed);
        if self.handled.fetch_add(1, Relaxed) + 1 == all {
            self.all.notify_one();
        }
    }

    /// The line that the harness reads.
    fn report(&self) -> String {
        let mut late = self
            .late_us
            .lock()
            .map(|late| late.clone())
            .unwrap_or_default();
        late.sort_unstable();
        let at = |share: f64| {
            late.get(((late.len() as f64 * share) as usize).min(late.len().saturating_sub(1)))
        };
        serde_json::json!({
            "handled": self.handled.load(Relaxed),
            "sum": self.sum.load(Relaxed),
            "p50_us": at(0.50),
            "p99_us": at(0.99),
            "max_us": late.last(),
        })
        .to_string()
    }
}

struct Batches {
    all: u64,
}

impl BatchHandler for Batches {
    type Message = Order;
    type State = ();

    async fn start(&self, _: Worker) -> Result<(), BoxError> {
        Ok(())
    }

    async fn handle_batch(
        &self,
        batch: Vec<(Order, Context)>,
        (): &mut (),
    ) -> Result<Vec<Outcome>, BoxError> {
        for (order, _) in &batch {
            TALLY.add(order, self.all);
        }
        Ok(vec![Outcome::Ack; batch.len()])
    }
}

struct OrderActor;

struct Placed(Delivery<Order>);

impl From<Delivery<Order>> for Placed {
    fn from(order: Delivery<Order>) -> Self {
        Placed(order)
    }
}

#[cfg(feature = "cluster")]
impl streamvisor::ractor::Message for Placed {}

impl Actor for OrderActor {
    type Msg = Placed;
    type State = u64;
    type Arguments = u64;

    async fn pre_start(&self, _: ActorRef<Placed>, all: u64) -> Result<u64, ActorProcessingErr> {
        Ok(all)
    }

    async fn handle(
        &self,
        _: ActorRef<Placed>,
        Placed(order): Placed,
        all: &mut u64,
    ) -> Result<(), ActorProcessingErr> {
        TALLY.add(order.message(), *all);
        order.ack();
        Ok(())
    }
}

fn variable(name: &str, default: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| default.to_owned())
}

fn number(name: &str) -> Result<Option<usize>, BoxError> {
    match std::env::var(name) {
        Ok(text) => Ok(Some(
            text.parse()
                .map_err(|error| format!("{name}={text}: {error}"))?,
        )),
        Err(_) => Ok(None),
    }
}

/// Orders as the harness has them.
async fn load() -> Result<(), BoxError> {
    let url = variable("REDIS_URL", "redis://127.0.0.1:6379");
    let (stream, group) = (variable("STREAM", "orders"), variable("GROUP", "workers"));
    let all = number("N")?.unwrap_or(300_000) as u64;
    let client = Client::new(Config::from_url(&url)?, None, None, None);
    client.init().await?;
    let _: Value = client.xgroup_create(&stream, &group, "0", true).await?;
    let mut id = 0;
    while id < all {
        let together = client.pipeline();
        let until = all.min(id + 1_000);
        while id < until {
            id += 1;
            let body = format!(
                r#"{{"id":{id},"customer":"customer-{:06}","total":{},"currency":"EUR","items":{},"express":{},"ts":0}}"#,
                id % 1_000_000,
                id * 37 % 100_000,
                id % 9 + 1,
                id % 2 == 0,
            );
            let fields = vec![
                ("_payload", body),
                ("h:trace-id", format!("{id:032x}")),
                ("h:source", "bench".to_owned()),
            ];
            let _: Value = together
                .xadd(&stream, false, None::<()>, "*", fields)
                .await?;
        }
        let _: Vec<Value> = together.all().await?;
    }
    Ok(())
}

async fn consume() -> Result<(), BoxError> {
    let url = variable("REDIS_URL", "redis://127.0.0.1:6379");
    let (stream, group) = (variable("STREAM", "orders"), variable("GROUP", "workers"));
    let all = number("N")?.unwrap_or(300_000) as u64;

    let form = variable("FORM", "function");
    let mut draft = match form.as_str() {
        "claiming" => Subscription::claiming(&stream, Duration::from_secs(60)),
        _ => Subscription::tail(&stream),
    }
    .group(&group);
    if let Some(workers) = number("WORKERS")? {
        draft = draft.workers(workers);
    }
    if let Some(count) = number("COUNT")? {
        draft = draft.batch(count);
    }
    if let Some(entries) = number("MAX_IN_FLIGHT")? {
        draft = draft.max_in_flight(entries);
    }
    let subscription = match form.as_str() {
        "function" | "claiming" => draft.handle_fn(move |order: Order, _: Context| async move {
            TALLY.add(&order, all);
            Ok(Outcome::Ack)
        }),
        "batch" => draft.handle_batch(Batches { all }),
        "actors" => draft.actors(move |_| (OrderActor, all)),
        "mixed" => draft
            .delayed_retry(DelayedRetry::durable(format!("{stream}.delayed")))
            .dead_letter(format!("{stream}.dead"))
            .handle_fn(move |order: Order, delivery: Context| async move {
                if delivery.attempt() == 1 {
                    match order.id % 100 {
                        0..10 => return Ok(Outcome::Retry),
                        10..15 => return Ok(Outcome::RetryAfter(Duration::from_millis(50))),
                        15 => {
                            TALLY.add(&order, all);
                            return Ok(Outcome::DeadLetter("one in a hundred".to_owned()));
                        }
                        _ => {}
                    }
                }
                TALLY.add(&order, all);
                Ok(Outcome::Ack)
            }),
        other => return Err(format!("FORM={other} is not known").into()),
    };
    let supervisor =
        Supervisor::start(Topology::new(Redis::url(&url)?).subscribe(subscription)).await?;
    TALLY.all.notified().await;

    // Everything is handled; now until everything is acknowledged.
    let client = Client::new(Config::from_url(&url)?, None, None, None);
    client.init().await?;
    loop {
        let summary: Vec<Value> = client.xpending(&stream, &group, ()).await?;
        let pending = summary.first().and_then(Value::as_u64);
        if pending == Some(0) {
            break;
        }
        tokio::time::sleep(Duration::from_micros(500)).await;
    }
    println!("{}", TALLY.report());
    // What a shutdown costs is not part of the measurement.
    drop(supervisor);
    std::process::exit(0)
}

fn main() -> Result<(), BoxError> {
    let mut runtime = match variable("RUNTIME", "current").as_str() {
        "multi" => tokio::runtime::Builder::new_multi_thread(),
        _ => tokio::runtime::Builder::new_current_thread(),
    };
    let runtime = runtime.enable_all().build()?;
    match variable("ROLE", "consume").as_str() {
        "load" => runtime.block_on(load()),
        _ => runtime.block_on(consume()),
    }
}
