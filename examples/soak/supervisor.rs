//! A supervisor process: the topology under test, with handlers that write down what they do.
//!
//! The driver tells it what to do on its standard input, and it answers on its standard output. It ends
//! with its input, however the driver went.

use std::future::Future;
use std::io::{BufRead, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ractor::{Actor, ActorProcessingErr, ActorRef};
use serde::Deserialize;
use streamvisor::prelude::*;
use streamvisor::{DELIVERY_COUNT_HEADER, MissedEvents, SupervisorHandle, message, ractor};
use tokio::sync::mpsc;

use crate::journal::{Journal, Record, Started, Verdict};
use crate::plan::{
    self, Act, GROUPS, Group, HANDLER_TIMEOUT, Handling, MIN_IDLE, MOST_ATTEMPTS, act, group_of,
};

/// What a supervisor process is started with.
pub struct Orders {
    pub url: String,
    pub seed: u64,
    pub slot: usize,
    pub journal: PathBuf,
    /// Whether the server has `XREADGROUP … CLAIM`.
    pub server_claims: bool,
}

/// How long a thread may oversleep before that is worth a record: far less than `MIN_IDLE`.
const STALL: Duration = Duration::from_millis(300);
/// What a panic on purpose says, by which the hook knows it.
const ON_PURPOSE: &str = "a panic on purpose";

pub fn run(orders: Orders) -> Result<(), BoxError> {
    tracing_subscriber::fmt()
        .with_env_filter(
            tracing_subscriber::EnvFilter::try_from_default_env()
                .unwrap_or_else(|_| "streamvisor=info".into()),
        )
        .with_ansi(false)
        .with_writer(std::io::stderr)
        .init();
    keep_quiet_about_panics_on_purpose();
    let journal = Arc::new(Journal::append_to(&orders.journal)?);
    journal.write(&Record::Process {
        pid: std::process::id(),
    });
    notice_stalls(Arc::clone(&journal));
    let (tell, told) = mpsc::unbounded_channel();
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines() {
            let Ok(line) = line else { break };
            if tell.send(line).is_err() {
                break;
            }
        }
        // The driver has gone, or wants no more of this process.
        std::process::exit(3);
    });
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?;
    runtime.block_on(supervise(&orders, journal, told))
}

fn keep_quiet_about_panics_on_purpose() {
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        let text = panic.payload().downcast_ref::<&str>();
        if text.is_none_or(|text| *text != ON_PURPOSE) {
            usual(panic);
        }
    }));
}

/// A process that is not run for a while is as good as frozen, and may lose what it has in hand.
fn notice_stalls(journal: Arc<Journal>) {
    std::thread::spawn(move || {
        let nap = Duration::from_millis(50);
        loop {
            let began = Instant::now();
            std::thread::sleep(nap);
            let late = began.elapsed().saturating_sub(nap);
            if late > STALL {
                let micros = u64::try_from(late.as_micros()).unwrap_or(u64::MAX);
                journal.write(&Record::Stalled { micros });
            }
        }
    });
}

async fn supervise(
    orders: &Orders,
    journal: Arc<Journal>,
    mut told: mpsc::UnboundedReceiver<String>,
) -> Result<(), BoxError> {
    let work = Arc::new(Work {
        seed: orders.seed,
        journal: Arc::clone(&journal),
        ended: AtomicU64::new(0),
    });
    let supervisor = loop {
        match Supervisor::start(topology(orders, &work)?).await {
            Ok(supervisor) => break supervisor,
            // A server that is away, or full, while the process starts.
            Err(error) => {
                journal.write(&Record::Note(format!("not started: {error}")));
                if told.try_recv().is_ok_and(|order| order == "stop") {
                    say("stopped 0 0 0 0");
                    return Ok(());
                }
                tokio::time::sleep(Duration::from_millis(300)).await;
            }
        }
    };
    say("ready");
    let listening = tokio::spawn(listen(supervisor.events(), journal));
    let mut tick = tokio::time::interval(Duration::from_millis(500));
    #[cfg(feature = "fail_points")]
    let mut traps = Vec::new();
    loop {
        tokio::select! {
            _ = tick.tick() => say(&format!("handled {}", work.ended.load(Ordering::Relaxed))),
            ended = supervisor.wait() => {
                return Err(match ended {
                    Ok(_) => "the tree has ended, and nobody asked for that".into(),
                    Err(failure) => failure.into(),
                });
            }
            order = told.recv() => {
                let order = order.unwrap_or_default();
                let words: Vec<_> = order.split(' ').collect();
                match words.as_slice() {
                    ["stop"] => break,
                    #[cfg(feature = "fail_points")]
                    ["crash", point, of] => {
                        use streamvisor::fail_point::{Fail, POINTS, arm};
                        if let Some(point) = POINTS.iter().find(|known| *known == point) {
                            // Once, the next time that it comes by.
                            traps.push(arm(point, of, Fail::Panic, 1..=1));
                        }
                    }
                    words => change(&supervisor, words).await,
                }
            }
        }
    }
    let report = supervisor.shutdown().await?;
    // Its last event is that the tree has stopped.
    let _ = tokio::time::timeout(Duration::from_secs(5), listening).await;
    say(&format!(
        "stopped {} {} {} {}",
        report.settled,
        report.given_back,
        report.left_running.len(),
        report.unsettled.len()
    ));
    Ok(())
}

/// Changes the running tree as the driver says.
async fn change(supervisor: &SupervisorHandle, words: &[&str]) {
    let number = |text: &str| text.parse().unwrap_or(1);
    let changed = match words {
        ["pause", name] => supervisor.pause(name).await,
        ["resume", name] => supervisor.resume(name).await,
        ["workers", name, workers] => supervisor.set_workers(name, number(workers)).await,
        ["in-flight", name, entries] => supervisor.set_max_in_flight(name, number(entries)).await,
        other => {
            eprintln!("no such order: {other:?}");
            return;
        }
    };
    if let Err(error) = changed {
        eprintln!("{words:?}: {error}");
    }
}

fn say(line: &str) {
    // Without a driver to hear it, the end of the input ends this process.
    let _ = writeln!(std::io::stdout().lock(), "{line}");
}

async fn listen(mut events: streamvisor::Events, journal: Arc<Journal>) {
    loop {
        let record = match events.next().await {
            Ok(None) => return,
            Ok(Some(Event::OwnershipLost { subscription, id })) => Record::OwnershipLost {
                subscription: subscription.to_string(),
                id: id.to_string(),
            },
            // Every dead letter is found in its stream.
            Ok(Some(Event::DeadLettered { .. })) => continue,
            Ok(Some(event)) => Record::Note(format!("{event:?}")),
            Err(MissedEvents(missed)) => Record::Note(format!("{missed} events missed")),
        };
        journal.write(&record);
    }
}

// ---- the topology --------------------------------------------------------------------------------------

fn topology(orders: &Orders, work: &Arc<Work>) -> Result<Topology, BoxError> {
    let restart = RestartPolicy::default()
        // The faults come far more often than in earnest.
        .max_restarts(1_000)
        .within(Duration::from_secs(30))
        .backoff(Duration::from_millis(50), Duration::from_secs(1));
    let mut topology = Topology::new(Redis::url(&orders.url)?)
        .connect_timeout(Duration::from_secs(2))
        .shutdown_timeout(HANDLER_TIMEOUT + Duration::from_secs(5))
        .restart(restart);
    for (index, group) in GROUPS.iter().enumerate() {
        let stream = group.stream();
        for name in group.subscriptions(orders.server_claims) {
            let draft = match name.rsplit_once('-') {
                Some((_, "claiming")) => Subscription::claiming(stream, MIN_IDLE),
                Some((_, "reclaim")) => Subscription::reclaim(stream, MIN_IDLE),
                _ if group.named_consumer => {
                    Subscription::tail(stream).consumer(format!("slot-{}", orders.slot))
                }
                _ => Subscription::tail(stream),
            };
            let draft = settings(draft.named(name), group);
            topology = topology.subscribe(handled(draft, index, work));
        }
    }
    Ok(topology)
}

fn settings(draft: Draft, group: &Group) -> Draft {
    let draft = draft
        .group(group.name)
        .start(Start::Beginning)
        .block(Duration::from_millis(500))
        .batch(50)
        .max_in_flight(200)
        .workers(4)
        .handler_timeout(HANDLER_TIMEOUT)
        .consumer_ttl(plan::CONSUMER_TTL)
        .retry(
            RetryPolicy::exponential(Duration::from_millis(50))
                .max_delay(Duration::from_secs(1))
                .max_attempts(MOST_ATTEMPTS)
                .then_dead_letter(),
        )
        .dead_letter(group.dead_letters());
    let draft = match group.ordered {
        true => draft.ordered_by("key"),
        false => draft,
    };
    let draft = match group.crash_leaves_pending {
        true => draft.on_crash(OnCrash::LeavePending),
        false => draft,
    };
    match group.delayed {
        Some(set) => draft.delayed_retry(DelayedRetry::durable(set)),
        None => draft,
    }
}

fn handled(draft: Draft, group: usize, work: &Arc<Work>) -> Subscription {
    let work = Arc::clone(work);
    match plan::GROUPS[group].handling {
        Handling::Function => draft.handle_fn(move |body: Numbered, context: Context| {
            let work = Arc::clone(&work);
            async move { work.function(&body, &context).await }
        }),
        Handling::Batch => draft.batch(16).handle_batch(Bulk(work)),
        Handling::Actors => draft.actors(move |_| (Clerk, Arc::clone(&work))),
    }
}

// ---- the handlers --------------------------------------------------------------------------------------

#[derive(Debug, Deserialize)]
struct Numbered {
    number: u64,
}

/// What all handlers share.
struct Work {
    seed: u64,
    journal: Arc<Journal>,
    /// Runs that came to their end.
    ended: AtomicU64,
}

impl Work {
    /// Writes down that the entry is started, and returns what is to be done.
    fn begin(&self, body: &Numbered, context: &Context) -> (Duration, Act) {
        let headers = context.headers();
        let group = group_of(context.subscription()).unwrap_or_default();
        self.journal.write(&Record::Started(Started {
            subscription: context.subscription().to_owned(),
            id: id_of(context),
            number: body.number,
            attempt: context.attempt(),
            delivery_count: context.delivery_count(),
            fresh: headers.get(DELIVERY_COUNT_HEADER).is_none(),
            key: headers
                .get_str("key")
                .and_then(|key| key.parse().ok())
                .unwrap_or_default(),
        }));
        act(self.seed, group, body.number, context.attempt())
    }

    /// Writes the verdict down, before it is given.
    fn end(&self, body: &Numbered, context: &Context, verdict: Verdict) {
        self.ended.fetch_add(1, Ordering::Relaxed);
        self.journal.write(&Record::Ended {
            subscription: context.subscription().to_owned(),
            id: id_of(context),
            number: body.number,
            verdict,
        });
    }

    async fn function(&self, body: &Numbered, context: &Context) -> Result<Outcome, BoxError> {
        let (takes, act) = self.begin(body, context);
        tokio::time::sleep(takes).await;
        self.end(body, context, verdict_of(act));
        answer(act).await
    }
}

fn id_of(context: &Context) -> crate::journal::Id {
    let id = context.id();
    (id.ms, id.seq)
}

fn verdict_of(act: Act) -> Verdict {
    match act {
        Act::Ack => Verdict::Ack,
        Act::Reject => Verdict::Reject,
        Act::Retry => Verdict::Retry,
        Act::RetryAfter(_) => Verdict::RetryAfter,
        Act::DeadLetter => Verdict::DeadLetter,
        Act::LeavePending => Verdict::LeavePending,
        Act::Error => Verdict::Error,
        Act::Panic => Verdict::Panic,
        Act::Hang => Verdict::Hang,
        Act::Abort => Verdict::Abort,
    }
}

async fn answer(act: Act) -> Result<Outcome, BoxError> {
    Ok(match act {
        Act::Ack => Outcome::Ack,
        Act::Reject => Outcome::Reject,
        Act::Retry => Outcome::Retry,
        Act::RetryAfter(delay) => Outcome::RetryAfter(delay),
        Act::DeadLetter => Outcome::DeadLetter("on purpose".to_owned()),
        Act::LeavePending => Outcome::LeavePending,
        Act::Error => return Err("an error on purpose".into()),
        Act::Panic => std::panic::panic_any(ON_PURPOSE),
        Act::Hang => std::future::pending().await,
        Act::Abort => std::process::abort(),
    })
}

struct Bulk(Arc<Work>);

impl BatchHandler for Bulk {
    type Message = Numbered;
    type State = ();

    async fn start(&self, _: Worker) -> Result<(), BoxError> {
        Ok(())
    }

    async fn handle_batch(
        &self,
        batch: Vec<(Numbered, Context)>,
        (): &mut (),
    ) -> Result<Vec<Outcome>, BoxError> {
        let begun = batch
            .iter()
            .map(|(body, context)| self.0.begin(body, context));
        let begun: Vec<_> = begun.collect();
        let longest = begun.iter().map(|(takes, _)| *takes).max();
        tokio::time::sleep(longest.unwrap_or_default()).await;
        // One that does not return an outcome decides for all.
        let for_all = begun
            .iter()
            .map(|(_, act)| *act)
            .find(|act| matches!(act, Act::Error | Act::Panic | Act::Hang | Act::Abort));
        let mut outcomes = Vec::with_capacity(batch.len());
        for ((body, context), (_, act)) in batch.iter().zip(&begun) {
            let verdict = verdict_of(for_all.unwrap_or(*act));
            self.0.end(body, context, verdict);
        }
        if let Some(act) = for_all {
            answer(act).await?;
        }
        for (_, act) in begun {
            outcomes.push(answer(act).await?);
        }
        Ok(outcomes)
    }
}

/// An actor of the application's own.
struct Clerk;

struct Delivered(Delivery<Numbered>);

impl From<Delivery<Numbered>> for Delivered {
    fn from(delivery: Delivery<Numbered>) -> Self {
        Delivered(delivery)
    }
}

#[cfg(feature = "cluster")]
impl ractor::Message for Delivered {}

impl Actor for Clerk {
    type Msg = Delivered;
    type State = Arc<Work>;
    type Arguments = Arc<Work>;

    fn pre_start(
        &self,
        _: ActorRef<Delivered>,
        work: Arc<Work>,
    ) -> impl Future<Output = Result<Arc<Work>, ActorProcessingErr>> + Send {
        std::future::ready(Ok(work))
    }

    async fn handle(
        &self,
        _: ActorRef<Delivered>,
        Delivered(delivery): Delivered,
        work: &mut Arc<Work>,
    ) -> Result<(), ActorProcessingErr> {
        let (body, context, settlement): (_, _, message::Settlement) = delivery.into_parts();
        let (takes, act) = work.begin(&body, &context);
        tokio::time::sleep(takes).await;
        work.end(&body, &context, verdict_of(act));
        match answer(act).await {
            Ok(Outcome::Ack) => settlement.ack(),
            Ok(Outcome::Reject) => settlement.reject(),
            Ok(Outcome::Retry) => settlement.retry(),
            Ok(Outcome::RetryAfter(delay)) => settlement.retry_after(delay),
            Ok(Outcome::DeadLetter(reason)) => settlement.dead_letter(reason),
            Ok(_) => settlement.leave_pending(),
            Err(error) => settlement.fail(error),
        }
        Ok(())
    }
}
