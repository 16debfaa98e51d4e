//! Applications and settings at the edge of what makes sense.

mod support;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use streamvisor::prelude::*;
use support::record::{GROUP, Heard, Recorder, SOON, topology};
use support::*;

const STREAM: &str = "orders";

/// Its third worker never comes out of `start`.
struct OneNeverStarts {
    handled: Arc<AtomicUsize>,
    starting: Arc<AtomicUsize>,
}

impl Handler for OneNeverStarts {
    type Message = u64;
    type State = ();

    async fn start(&self, worker: Worker) -> Result<(), BoxError> {
        self.starting.fetch_add(1, Ordering::SeqCst);
        if worker.index() == 2 {
            std::future::pending::<()>().await;
        }
        Ok(())
    }

    async fn handle(&self, _: u64, _: &Context, (): &mut ()) -> Result<Outcome, BoxError> {
        self.handled.fetch_add(1, Ordering::SeqCst);
        Ok(Outcome::Ack)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_does_not_come_out_of_its_start_keeps_no_entry_waiting() {
    let server = Server::start(Version::Redis70);
    let (handled, starting) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let handler = OneNeverStarts {
        handled: Arc::clone(&handled),
        starting: Arc::clone(&starting),
    };
    let topology = topology(&server.url())
        .shutdown_timeout(Duration::from_millis(500))
        .subscribe(Subscription::tail(STREAM).workers(3).handle(handler));
    let supervisor = Supervisor::start(topology).await.unwrap();
    eventually(SOON, "all three are starting", || {
        starting.load(Ordering::SeqCst) == 3
    })
    .await;
    for number in 1..=20 {
        // One at a time: each needs a wake-up of its own.
        server.xadd(STREAM, &[("_payload", "1")]);
        eventually(SOON, "it is handled", || {
            handled.load(Ordering::SeqCst) == number
        })
        .await;
    }
    supervisor.shutdown().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_starts_while_memory_is_full_where_its_group_exists() {
    for version in [Version::Redis70, Version::Redis8] {
        let server = Server::start(version);
        server.xgroup_create(STREAM, GROUP, "0");
        server.xadd(STREAM, &[("_payload", "1")]);
        server.command(&["CONFIG", "SET", "maxmemory", "1"]);
        let recorder = Recorder::acking();
        let topology = topology(&server.url()).subscribe(recorder.on(Subscription::tail(STREAM)));
        let supervisor = Supervisor::start(topology).await.unwrap();
        eventually(SOON, "it is acknowledged", || {
            recorder.count() == 1 && server.xpending_count(STREAM, GROUP) == 0
        })
        .await;
        supervisor.shutdown().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn full_memory_is_told_once_however_often_a_retry_is_refused() {
    let server = Server::start(Version::Redis70);
    let recorder = Recorder::answering(|call| {
        Ok(match call.attempt {
            1 => Outcome::RetryAfter(Duration::from_millis(100)),
            _ => Outcome::Ack,
        })
    });
    let topology = topology(&server.url()).subscribe(recorder.on(Subscription::tail(STREAM)));
    let supervisor = Supervisor::start(topology).await.unwrap();
    let heard = Heard::of(&supervisor);
    server.xadd(STREAM, &[("_payload", "1")]);
    recorder.reaches(1).await;
    server.command(&["CONFIG", "SET", "maxmemory", "1"]);
    let before = server.commandstat("evalsha");
    eventually(SOON, "the copy is refused again and again", || {
        server.commandstat("evalsha") >= before + 6
    })
    .await;
    let away = |event: &Event| matches!(event, Event::ServerAway { .. });
    assert_eq!(
        heard.all().iter().filter(|event| away(event)).count(),
        1,
        "{:?}",
        heard.all()
    );
    server.command(&["CONFIG", "SET", "maxmemory", "0"]);
    recorder.reaches(2).await;
    eventually(SOON, "nothing is pending", || {
        server.xpending_count(STREAM, GROUP) == 0
    })
    .await;
    supervisor.shutdown().await.unwrap();
}

/// An error that is its own cause.
#[derive(Debug)]
struct Circle;

impl fmt::Display for Circle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("round and round")
    }
}

impl std::error::Error for Circle {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&Circle)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn times_without_end_and_errors_without_end_do_no_harm() {
    let server = Server::start(Version::Redis70);
    let recorder = Recorder::answering(|_| Err(Circle.into()));
    let draft = Subscription::reclaim(STREAM, Duration::MAX)
        .named("never")
        .handler_timeout(Duration::MAX)
        .consumer_ttl(Duration::MAX);
    let failing = Subscription::tail(STREAM)
        .handler_timeout(Duration::MAX)
        .retry(
            RetryPolicy::exponential(Duration::from_millis(10))
                .max_attempts(2)
                .then_dead_letter(),
        )
        .dead_letter("dead");
    let topology = topology(&server.url())
        .connect_timeout(Duration::MAX)
        .shutdown_timeout(Duration::MAX)
        .subscribe(Recorder::acking().on(draft))
        .subscribe(recorder.on(failing));
    let supervisor = Supervisor::start(topology).await.unwrap();
    server.xadd(STREAM, &[("_payload", "1")]);
    eventually(SOON, "it is a dead letter", || server.xlen("dead") == 1).await;
    assert_eq!(recorder.count(), 2);
    let report = supervisor.shutdown().await.unwrap();
    assert!(report.left_running.is_empty() && report.unsettled.is_empty());
}
