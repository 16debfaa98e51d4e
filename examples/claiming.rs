//! Fresh entries and those that a crashed consumer left behind, through one subscription.
//!
//! ```sh
//! REDIS_URL=redis://localhost:6379 cargo run --example claiming
//! ```
//!
//! Redis 8.4 and later can do both in one read (`XREADGROUP … CLAIM`): it wakes for a fresh entry, and
//! for one that has been pending for too long. Older servers and Valkey cannot. `start` says so, and
//! the pair that the error names does the same there.
//!
//! Before anything runs, a consumer reads five orders and crashes. Another one takes two of them over
//! and crashes too. Five fresh orders follow. Each is printed when it is handled, with what is known
//! of its past.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use serde::Deserialize;
use streamvisor::fred::prelude::*;
use streamvisor::fred::types::{ClusterHash, CustomCommand};
use streamvisor::prelude::*;
use streamvisor::{Draft, StartError};
use tokio::sync::mpsc;

const GROUP: &str = "workers";
/// How long an entry is pending and nobody keeps it fresh before it counts as left behind. Handlers may
/// take longer: what they work on is kept fresh.
const MIN_IDLE: Duration = Duration::from_secs(1);
const LEFT_BEHIND: usize = 5;
/// Of these, how many were left behind twice.
const TWICE: usize = 2;
const FRESH: usize = 5;
/// The program takes between one and two seconds.
const DEADLINE: Duration = Duration::from_secs(60);

#[derive(Debug, Deserialize)]
struct Order {
    id: u64,
}

/// What a handler saw of an entry.
struct Handled {
    order: u64,
    deliveries: u64,
    idle: Duration,
}

impl Handled {
    /// A fresh entry has not lain idle with anybody.
    fn is_fresh(&self) -> bool {
        self.idle.is_zero()
    }
}

// ---- what runs --------------------------------------------------------------------------------------------

/// Both in one read.
fn claiming(redis: Redis, stream: &str, handled: &mpsc::UnboundedSender<Handled>) -> Topology {
    Topology::new(redis)
        .default_group(GROUP)
        .subscribe(handling(Subscription::claiming(stream, MIN_IDLE), handled))
}

/// The same by two subscriptions, for servers of any version.
fn tail_and_reclaim(
    redis: Redis,
    stream: &str,
    handled: &mpsc::UnboundedSender<Handled>,
) -> Topology {
    Topology::new(redis)
        .default_group(GROUP)
        .subscribe(handling(Subscription::tail(stream), handled))
        .subscribe(handling(
            Subscription::reclaim(stream, MIN_IDLE)
                // How soon it looks again after it has found nothing.
                .block(Duration::from_millis(100)),
            handled,
        ))
}

fn handling(draft: Draft, handled: &mpsc::UnboundedSender<Handled>) -> Subscription {
    let handled = handled.clone();
    draft.handle_fn(move |order: Order, delivery: Context| {
        let handled = handled.clone();
        async move {
            handled.send(Handled {
                order: order.id,
                deliveries: delivery.delivery_count(),
                idle: delivery.idle(),
            })?;
            Ok(Outcome::Ack)
        }
    })
}

/// Starts what the server is able to run.
async fn start(
    url: &str,
    stream: &str,
    handled: &mpsc::UnboundedSender<Handled>,
) -> Result<SupervisorHandle, BoxError> {
    match Supervisor::start(claiming(Redis::url(url)?, stream, handled)).await {
        Ok(supervisor) => {
            println!("one claiming subscription reads both");
            Ok(supervisor)
        }
        Err(too_old @ StartError::TooOld { .. }) => {
            println!("claiming is refused: {too_old}");
            let pair = tail_and_reclaim(Redis::url(url)?, stream, handled);
            let supervisor = Supervisor::start(pair).await?;
            println!("a tail and a reclaim subscription run instead");
            Ok(supervisor)
        }
        Err(error) => Err(error.into()),
    }
}

// ---- the run ----------------------------------------------------------------------------------------------

#[tokio::main]
async fn main() -> ExitCode {
    // `RUST_LOG=streamvisor=debug` shows what the library does; by default it is quiet.
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::from_default_env())
        .with_writer(std::io::stderr)
        .init();
    match tokio::time::timeout(DEADLINE, run()).await {
        Ok(Ok(())) => ExitCode::SUCCESS,
        Ok(Err(error)) => {
            eprintln!("claiming: {error}");
            ExitCode::FAILURE
        }
        Err(_) => {
            eprintln!("claiming: not done after {DEADLINE:?}");
            ExitCode::FAILURE
        }
    }
}

async fn run() -> Result<(), BoxError> {
    let url = std::env::var("REDIS_URL").unwrap_or_else(|_| "redis://localhost:6379".into());
    let client = Builder::from_config(Config::from_url(&url)?).build()?;
    client.init().await?;
    // No other run has this key.
    let since_epoch = std::time::UNIX_EPOCH.elapsed()?.as_micros();
    let stream = format!("claiming:{since_epoch:x}-{}:orders", std::process::id());

    let consumed = consume(&url, &client, &stream).await;
    client.del::<(), _>(&stream).await?;
    consumed
}

async fn consume(url: &str, client: &Client, stream: &str) -> Result<(), BoxError> {
    ask(
        client,
        "XGROUP",
        &["CREATE", stream, GROUP, "0", "MKSTREAM"],
    )
    .await?;
    publish(client, stream, 1..=LEFT_BEHIND).await?;
    crash_over_them(client, stream).await?;
    println!(
        "{LEFT_BEHIND} orders are left behind by consumers that crashed, {TWICE} of them by two"
    );
    publish(client, stream, LEFT_BEHIND + 1..=LEFT_BEHIND + FRESH).await?;
    println!("{FRESH} fresh orders follow");

    let started = Instant::now();
    let (handled, mut handling) = mpsc::unbounded_channel();
    let supervisor = start(url, stream, &handled).await?;
    let all = async {
        let (mut fresh, mut left_behind) = (0, 0);
        while fresh + left_behind < FRESH + LEFT_BEHIND {
            // `handled` is another sender, so the channel stays open.
            let Some(handled) = handling.recv().await else {
                break;
            };
            let kind = if handled.is_fresh() {
                fresh += 1;
                "fresh"
            } else {
                left_behind += 1;
                "left behind"
            };
            println!(
                "{:4.1} s  order {:2}  {kind:11}  delivery {}  idle for {:.1} s",
                started.elapsed().as_secs_f64(),
                handled.order,
                handled.deliveries,
                handled.idle.as_secs_f64(),
            );
        }
        (fresh, left_behind)
    };
    let ((fresh, left_behind), report) = supervisor.run_until(all).await?;

    let pending: Vec<Value> = client.xpending(stream, GROUP, ()).await?;
    let pending = pending.first().and_then(Value::as_u64).unwrap_or_default();
    println!(
        "{fresh} fresh and {left_behind} left behind were handled; {pending} pending, {} verdicts not stored",
        report.unsettled.len(),
    );
    Ok(())
}

// ---- what happens before ----------------------------------------------------------------------------------

async fn publish(
    client: &Client,
    stream: &str,
    ids: std::ops::RangeInclusive<usize>,
) -> Result<(), BoxError> {
    for id in ids {
        let fields = vec![("_payload", format!(r#"{{"id": {id}}}"#))];
        client
            .xadd::<(), _, _, _, _>(stream, false, None, "*", fields)
            .await?;
    }
    Ok(())
}

/// What is left of two processes that were killed in the middle of their work: the first has read all
/// orders there were, the second has taken over some of them, and neither has acknowledged any.
async fn crash_over_them(client: &Client, stream: &str) -> Result<(), BoxError> {
    #[rustfmt::skip]
    let read = ["GROUP", GROUP, "first", "STREAMS", stream, ">"];
    ask(client, "XREADGROUP", &read).await?;
    let count = TWICE.to_string();
    #[rustfmt::skip]
    let take_over = [stream, GROUP, "second", "0", "0", "COUNT", &count];
    ask(client, "XAUTOCLAIM", &take_over).await?;
    Ok(())
}

/// A command as one would type it.
async fn ask(client: &Client, command: &'static str, args: &[&str]) -> Result<Value, BoxError> {
    let sent = CustomCommand::new_static(command, ClusterHash::FirstKey, false);
    let reply = client.custom(sent, args.to_vec()).await;
    Ok(reply.map_err(|error| format!("{command}: {error}"))?)
}
