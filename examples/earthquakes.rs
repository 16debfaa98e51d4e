//! A week of earthquakes through one topology, with everything going wrong that usually does.
//!
//! ```sh
//! make demo                                                # starts a server of its own
//! REDIS_URL=redis://localhost:6379 cargo run --example earthquakes
//! ```
//!
//! 1,707 real seismic events are in a stream. Two groups consume it, each for its own purpose:
//!
//! - `catalogue` keeps every event, by its id, in a store;
//! - `alerts` calls a pager for every earthquake of magnitude 4.5 or more.
//!
//! Before they start, a consumer of `catalogue` takes the first 50 entries and vanishes. While they
//! run, one event makes its worker panic, the pager is busy for every third alert, and three entries
//! arrive that nobody can read. In the end everything is accounted for, and the last line says how
//! much was lost.
//!
//! Read `topology` first. The rest makes the input, does the damage and counts.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt::Display;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child as Process, Command, ExitCode, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde::Deserialize;
use streamvisor::fred::prelude::*;
use streamvisor::fred::types::{ClusterHash, CustomCommand};
use streamvisor::prelude::*;
use streamvisor::{Child, Draft, Event, Events, ShutdownReport};
use tokio::signal::unix::{Signal, SignalKind, signal};

/// What the US Geological Survey published in the first week of February 2018, oldest first.
const FEED: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/examples/data/earthquakes.ndjson"
);
/// An earthquake from this magnitude on is somebody's business at night.
const ALERT_FROM: f64 = 4.5;
/// As many of the events are.
const ALERTS: usize = 85;
/// The subscription that takes over what a vanished consumer has left behind.
const RECLAIM: &str = "left-behind";
/// How many entries the consumer that vanishes takes with it.
const LEFT_BEHIND: usize = 50;
/// What some other producer writes into the same stream by mistake.
const NO_JSON: [&str; 3] = ["", "{\"id\": ", "magnitude: strong"];
/// What the worker says that panics: the panic hook knows it by that.
const ON_PURPOSE: &str = "the first explosion, on purpose";
/// From the start of the program; it takes less than two seconds.
const DEADLINE: Duration = Duration::from_secs(60);

/// One event of the feed. The fields that nobody here asks for are left out.
#[derive(Debug, Deserialize)]
struct Tremor {
    id: String,
    /// Who reported it.
    net: String,
    /// Not everything that shakes the ground is an earthquake.
    #[serde(rename = "type")]
    kind: String,
    mag: f64,
}

impl Tremor {
    fn is_alert(&self) -> bool {
        self.kind == "earthquake" && self.mag >= ALERT_FROM
    }
}

// ---- what runs ---------------------------------------------------------------------------------------

fn topology(redis: Redis, keys: &Keys, catalogue: Arc<Catalogue>, pager: Arc<Pager>) -> Topology {
    // Fresh entries and recovered ones are the same work, so both subscriptions get the same settings.
    let catalogued = |draft: Draft| {
        draft
            .group("catalogue")
            .workers(4)
            // Each network's events one after the other, those of different networks side by side.
            .ordered_by("net")
            // A panic counts as a failed attempt: the entry is tried again after this delay.
            .retry(RetryPolicy::exponential(Duration::from_millis(200)))
            .dead_letter(&keys.catalogue_dead)
            .handle(Cataloguer(Arc::clone(&catalogue)))
    };

    Topology::new(redis)
        .shutdown_timeout(Duration::from_secs(5))
        .subscribe(catalogued(
            Subscription::tail(&keys.events).named("catalogue"),
        ))
        .subscribe(catalogued(
            // A second suffices whatever the handlers take: what they work on is kept fresh.
            Subscription::reclaim(&keys.events, Duration::from_secs(1))
                .named(RECLAIM)
                // How soon it looks again after it has found nothing.
                .block(Duration::from_millis(100)),
        ))
        .subscribe(
            Subscription::tail(&keys.events)
                .named("alerts")
                .group("alerts")
                // The group is created here, and the stream is full already.
                .start(Start::Beginning)
                // An alert that has to wait does so on the server, whatever happens to this process.
                .delayed_retry(DelayedRetry::durable(&keys.alerts_delayed))
                .dead_letter(&keys.alerts_dead)
                .handle_fn(move |tremor: Tremor, delivery: Context| {
                    alert(Arc::clone(&pager), tremor, delivery)
                }),
        )
}

/// Keeps what arrives. Its workers have no state of their own: a panic ends a worker and its state
/// with it, so whatever has to last is in the store that all of them share.
struct Cataloguer(Arc<Catalogue>);

impl Handler for Cataloguer {
    type Message = Tremor;
    type State = ();

    async fn start(&self, _: Worker) -> Result<(), BoxError> {
        Ok(())
    }

    async fn handle(&self, tremor: Tremor, _: &Context, (): &mut ()) -> Result<Outcome, BoxError> {
        if tremor.kind == "explosion" && !self.0.has_exploded.swap(true, Ordering::Relaxed) {
            std::panic::panic_any(ON_PURPOSE);
        }
        self.0.keep(tremor);
        Ok(Outcome::Ack)
    }
}

async fn alert(pager: Arc<Pager>, tremor: Tremor, delivery: Context) -> Result<Outcome, BoxError> {
    if !tremor.is_alert() {
        return Ok(Outcome::Ack);
    }
    match pager.call(&tremor.id, delivery.attempt()) {
        Ok(()) => Ok(Outcome::Ack),
        // `Err` would do as well; the retry policy would choose the delay then.
        Err(Busy) => Ok(Outcome::RetryAfter(Duration::from_secs(1))),
    }
}

/// The catalogue: what is known of each event, by its id. An entry can arrive more than once, so what
/// is done with it has to come to the same the second time; here that is how often it was kept.
#[derive(Default)]
struct Catalogue {
    kept: Mutex<BTreeMap<String, (Tremor, u32)>>,
    has_exploded: AtomicBool,
}

impl Catalogue {
    fn keep(&self, tremor: Tremor) {
        self.all().entry(tremor.id.clone()).or_insert((tremor, 0)).1 += 1;
    }

    fn all(&self) -> MutexGuard<'_, BTreeMap<String, (Tremor, u32)>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many events there are.
    fn len(&self) -> usize {
        self.all().len()
    }

    /// How many of them were kept more than once.
    fn kept_again(&self) -> usize {
        self.all().values().filter(|(_, times)| *times > 1).count()
    }

    /// How many events there are of each network, or of each type.
    fn by(&self, what: impl Fn(&Tremor) -> &str) -> BTreeMap<String, usize> {
        let mut counts = BTreeMap::new();
        for (tremor, _) in self.all().values() {
            *counts.entry(what(tremor).to_owned()).or_default() += 1;
        }
        counts
    }

    fn largest(&self) -> f64 {
        let magnitude = |(tremor, _): &(Tremor, u32)| tremor.mag;
        self.all().values().map(magnitude).fold(f64::MIN, f64::max)
    }
}

/// The pager of whoever is on duty: busy when it is called for some alerts for the first time.
struct Pager {
    busy_for: Mutex<BTreeSet<String>>,
    /// The alerts that got through, each with the attempt that did.
    sent: Mutex<HashMap<String, u64>>,
    sent_again: Counter,
}

struct Busy;

impl Pager {
    fn new(busy_for: BTreeSet<String>) -> Self {
        Pager {
            busy_for: Mutex::new(busy_for),
            sent: Mutex::default(),
            sent_again: Counter::default(),
        }
    }

    fn call(&self, id: &str, attempt: u64) -> Result<(), Busy> {
        let mut busy_for = self.busy_for.lock().unwrap_or_else(PoisonError::into_inner);
        if busy_for.remove(id) {
            return Err(Busy);
        }
        let mut sent = self.sent.lock().unwrap_or_else(PoisonError::into_inner);
        if sent.insert(id.to_owned(), attempt).is_some() {
            self.sent_again.add(1);
        }
        Ok(())
    }

    /// How many alerts got through at the first attempt, the second, any.
    fn sent(&self, which: impl Fn(u64) -> bool) -> usize {
        let sent = self.sent.lock().unwrap_or_else(PoisonError::into_inner);
        sent.values().filter(|&&attempt| which(attempt)).count()
    }
}

// ---- the run -----------------------------------------------------------------------------------------

#[tokio::main]
async fn main() -> ExitCode {
    // `RUST_LOG=streamvisor=debug` shows what the library does; by default it is quiet.
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::from_default_env())
        .with_writer(std::io::stderr)
        .init();
    tell_the_panic_that_is_meant();
    match run().await {
        Ok(Verdict::Right) => ExitCode::SUCCESS,
        Ok(Verdict::Wrong) => ExitCode::FAILURE,
        Ok(Verdict::Interrupted) => {
            eprintln!("earthquakes: interrupted");
            ExitCode::from(130)
        }
        Err(error) => {
            eprintln!("earthquakes: {error}");
            ExitCode::FAILURE
        }
    }
}

enum Verdict {
    Right,
    Wrong,
    Interrupted,
}

async fn run() -> Result<Verdict, BoxError> {
    let started = Instant::now();
    // From here on a Ctrl-C is told and kills nobody, so that the server below is always taken down.
    let signals = Signals::listen()?;
    let server = Server::of_this_run().await?;
    let redis = Redis::url(&server.url)?;
    let client = connect(&server.url).await?;
    let keys = Keys::of_this_run();

    let verdict = consume(started, signals, redis, &keys, &client).await;
    // The tree has ended: nothing writes to these keys any more.
    let cleared = client.del::<(), _>(keys.all()).await;
    let verdict = verdict?;
    cleared?;
    Ok(verdict)
}

async fn consume(
    started: Instant,
    signals: Signals,
    redis: Redis,
    keys: &Keys,
    client: &Client,
) -> Result<Verdict, BoxError> {
    let feed = std::fs::read_to_string(FEED).map_err(|error| format!("{FEED}: {error}"))?;
    let tremors: Vec<Tremor> = feed
        .lines()
        .map(serde_json::from_str)
        .collect::<Result<_, _>>()?;

    publish(client, keys, feed.lines().zip(&tremors)).await?;
    println!("{} events published", tremors.len());
    leave_entries_behind(client, keys).await?;
    println!("{LEFT_BEHIND} entries read by a consumer that has vanished since");

    let catalogue = Arc::new(Catalogue::default());
    let alerts = tremors.iter().filter(|tremor| tremor.is_alert());
    let every_third = alerts.skip(2).step_by(3).map(|tremor| tremor.id.clone());
    let pager = Arc::new(Pager::new(every_third.collect()));

    let topology = topology(redis, keys, Arc::clone(&catalogue), Arc::clone(&pager));
    let supervisor = Supervisor::start(topology).await?;
    let told = Arc::new(Told::default());
    // The first to ask for the events hears of everything since the start.
    let listening = tokio::spawn(listen(supervisor.events(), Arc::clone(&told)));
    for body in NO_JSON {
        supervisor
            .publisher()
            .raw(&keys.events, body)
            .send()
            .await?;
    }

    let run = Run {
        started,
        published: tremors.len(),
        keys,
        client,
        catalogue: &catalogue,
        pager: &pager,
        told: &told,
    };
    let (watched, report) = supervisor.run_until(run.watch(signals)).await?;
    // Its last event is that the tree has stopped.
    tokio::time::timeout(Duration::from_secs(5), listening).await??;
    match watched? {
        Watched::Interrupted => Ok(Verdict::Interrupted),
        Watched::TookTooLong => {
            eprintln!("not done after {DEADLINE:?}; how far it came:");
            run.tell(&report).await?;
            Ok(Verdict::Wrong)
        }
        Watched::Done => run.tell(&report).await,
    }
}

/// What the run is watched and judged by.
struct Run<'a> {
    started: Instant,
    published: usize,
    keys: &'a Keys,
    client: &'a Client,
    catalogue: &'a Catalogue,
    pager: &'a Pager,
    told: &'a Told,
}

enum Watched {
    Done,
    TookTooLong,
    Interrupted,
}

/// What the server has that is still to be done, and what nobody could read.
#[derive(PartialEq)]
struct OnServer {
    pending: u64,
    delayed: u64,
    catalogue_dead: u64,
    alerts_dead: u64,
}

impl Run<'_> {
    /// Shows how far it is, until all is done.
    async fn watch(&self, mut signals: Signals) -> Result<Watched, BoxError> {
        let mut tick = tokio::time::interval(Duration::from_millis(100));
        let mut shown = String::new();
        loop {
            tokio::select! {
                () = signals.any() => return Ok(Watched::Interrupted),
                _ = tick.tick() => {}
            }
            let server = self.server().await?;
            let (kept, sent) = (self.catalogue.len(), self.pager.sent(|_| true));
            let line = format!(
                "{kept:4} catalogued, {:2} recovered, {sent:2} alerts sent, {:2} delayed, {} dead letters",
                self.told.recovered.get(),
                server.delayed,
                server.catalogue_dead + server.alerts_dead,
            );
            if line != shown {
                println!("{:5.1} s  {line}", self.started.elapsed().as_secs_f64());
                shown = line;
            }
            let all_handled = kept >= self.published
                && sent >= ALERTS
                && server.catalogue_dead >= NO_JSON.len() as u64
                && server.alerts_dead >= NO_JSON.len() as u64;
            if all_handled && server.pending == 0 && server.delayed == 0 {
                return Ok(Watched::Done);
            }
            if self.started.elapsed() >= DEADLINE {
                return Ok(Watched::TookTooLong);
            }
        }
    }

    /// What is left to do, and what ended as a dead letter, in the server's own words.
    async fn server(&self) -> Result<OnServer, BoxError> {
        let Keys { events, .. } = self.keys;
        let mut pending = 0;
        for group in ["catalogue", "alerts"] {
            let summary: Vec<Value> = ask(self.client, "XPENDING", &[events, group]).await?;
            pending += summary.first().and_then(Value::as_u64).unwrap_or_default();
        }
        Ok(OnServer {
            pending,
            delayed: ask(self.client, "ZCARD", &[&self.keys.alerts_delayed]).await?,
            catalogue_dead: ask(self.client, "XLEN", &[&self.keys.catalogue_dead]).await?,
            alerts_dead: ask(self.client, "XLEN", &[&self.keys.alerts_dead]).await?,
        })
    }

    /// The table at the end. Every figure is known beforehand.
    async fn tell(&self, report: &ShutdownReport) -> Result<Verdict, BoxError> {
        let Run {
            catalogue,
            pager,
            told,
            ..
        } = self;
        let server = self.server().await?;
        let networks = catalogue.by(|tremor| &tremor.net);
        let types = catalogue.by(|tremor| &tremor.kind);
        let earthquakes = types.get("earthquake").copied().unwrap_or(0);
        let largest = format!("{:.1}", catalogue.largest());
        let dead = format!("{} + {}", server.catalogue_dead, server.alerts_dead);
        let not_kept = self.published.saturating_sub(catalogue.len()) as u64;
        let lost = not_kept + server.pending + server.delayed;

        let mut table = Table::default();
        println!();
        table.line("events catalogued", 1707, catalogue.len());
        table.line("  catalogued twice", 0, catalogue.kept_again());
        table.line("earthquakes", 1679, earthquakes);
        table.line("networks", 12, networks.len());
        table.line("largest magnitude", "6.4", largest);
        table.line("alerts sent", ALERTS, pager.sent(|_| true));
        table.line("  delayed once", 28, pager.sent(|attempt| attempt == 2));
        table.line("  sent twice", 0, pager.sent_again.get());
        table.line("entries recovered", LEFT_BEHIND, told.recovered.get());
        table.line("dead letters", "3 + 3", dead);
        table.line("worker restarts", 1, told.restarts.get());
        table.line("verdicts not stored", 0, report.unsettled.len());
        println!();
        println!("networks: {}", largest_first(&networks));
        println!("types:    {}", largest_first(&types));
        for wrong in &table.wrong {
            eprintln!("wrong: {wrong}");
        }
        println!("lost: {lost}");
        Ok(if table.wrong.is_empty() && lost == 0 {
            Verdict::Right
        } else {
            Verdict::Wrong
        })
    }
}

#[derive(Default)]
struct Table {
    wrong: Vec<String>,
}

impl Table {
    fn line(&mut self, what: &str, expected: impl Display, found: impl Display) {
        let (expected, found) = (expected.to_string(), found.to_string());
        println!("{what:24}{found:>8}");
        if found != expected {
            let what = what.trim_start();
            self.wrong
                .push(format!("{what}: {found}, and it should be {expected}"));
        }
    }
}

fn largest_first(counts: &BTreeMap<String, usize>) -> String {
    let mut counts: Vec<_> = counts.iter().collect();
    counts.sort_by_key(|(_, count)| std::cmp::Reverse(**count));
    let shown: Vec<_> = counts
        .iter()
        .map(|(name, count)| format!("{name} {count}"))
        .collect();
    shown.join(", ")
}

// ---- what the tree tells of itself ----------------------------------------------------------------------

/// What the supervisor's events add up to.
#[derive(Default)]
struct Told {
    recovered: Counter,
    restarts: Counter,
}

#[derive(Default)]
struct Counter(AtomicUsize);

impl Counter {
    fn add(&self, more: usize) {
        self.0.fetch_add(more, Ordering::Relaxed);
    }

    fn get(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

async fn listen(mut events: Events, told: Arc<Told>) {
    loop {
        match events.next().await {
            Ok(Some(Event::Recovered {
                subscription,
                entries,
            })) if *subscription == *RECLAIM => {
                told.recovered.add(entries);
            }
            Ok(Some(Event::Restarted {
                child: Child::Handler { .. },
                ..
            })) => {
                told.restarts.add(1);
            }
            Ok(Some(Event::Drained { .. }) | None) => return,
            Ok(Some(_)) => {}
            Err(missed) => eprintln!("earthquakes: {missed}; the figures will be short of them"),
        }
    }
}

/// One line instead of a back trace for the panic that is part of the show.
fn tell_the_panic_that_is_meant() {
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        if panic.payload().downcast_ref() == Some(&ON_PURPOSE) {
            println!("         a worker panics ({ON_PURPOSE}) and is replaced");
        } else {
            usual(panic);
        }
    }));
}

// ---- what happens before ------------------------------------------------------------------------------

/// The keys of this run. No other run has them, so a server that is used for something else, or for
/// this twice, is no problem.
struct Keys {
    events: String,
    catalogue_dead: String,
    alerts_dead: String,
    alerts_delayed: String,
}

impl Keys {
    fn of_this_run() -> Self {
        let since_epoch = std::time::UNIX_EPOCH.elapsed().unwrap_or_default();
        let run = format!(
            "earthquakes:{:x}-{}",
            since_epoch.as_micros(),
            std::process::id()
        );
        Keys {
            events: format!("{run}:events"),
            catalogue_dead: format!("{run}:catalogue:dead"),
            alerts_dead: format!("{run}:alerts:dead"),
            alerts_delayed: format!("{run}:alerts:delayed"),
        }
    }

    fn all(&self) -> Vec<&str> {
        vec![
            &self.events,
            &self.catalogue_dead,
            &self.alerts_dead,
            &self.alerts_delayed,
        ]
    }
}

/// A plain client, as any producer or operator has one.
async fn connect(url: &str) -> Result<Client, BoxError> {
    let client = Builder::from_config(Config::from_url(url)?)
        .with_performance_config(|config| {
            config.default_command_timeout = Duration::from_secs(5);
        })
        .build()?;
    client
        .init()
        .await
        .map_err(|error| format!("cannot connect to the server: {error}"))?;
    Ok(client)
}

/// A command as one would type it.
async fn ask<R: FromValue>(
    client: &Client,
    command: &'static str,
    args: &[&str],
) -> Result<R, BoxError> {
    let sent = CustomCommand::new_static(command, ClusterHash::FirstKey, false);
    let reply = client.custom(sent, args.to_vec()).await;
    Ok(reply.map_err(|error| format!("{command}: {error}"))?)
}

/// Adds the events to the stream. A producer needs nothing of streamvisor: the body is a field called
/// `_payload`, a header one whose name begins with `h:`. (Inside a running tree, `Publisher` does it.)
async fn publish(
    client: &Client,
    keys: &Keys,
    events: impl Iterator<Item = (&str, &Tremor)>,
) -> Result<(), Error> {
    let pipeline = client.pipeline();
    for (line, tremor) in events {
        let fields = vec![("_payload", line), ("h:net", tremor.net.as_str())];
        pipeline
            .xadd::<(), _, _, _, _>(&keys.events, false, None, "*", fields)
            .await?;
    }
    pipeline.all::<Vec<String>>().await?;
    Ok(())
}

/// What a process does that is killed in the middle of its work: it reads, and never acknowledges.
async fn leave_entries_behind(client: &Client, keys: &Keys) -> Result<(), BoxError> {
    let events = &keys.events;
    ask::<()>(client, "XGROUP", &["CREATE", events, "catalogue", "0"]).await?;
    let count = LEFT_BEHIND.to_string();
    #[rustfmt::skip]
    let read = [
        "GROUP", "catalogue", "vanished", "COUNT", &count, "STREAMS", events, ">",
    ];
    ask::<Value>(client, "XREADGROUP", &read).await?;
    Ok(())
}

// ---- the server, and the wish to stop -----------------------------------------------------------------

/// The server that `REDIS_URL` names, or one of this run's own, which goes with it.
struct Server {
    url: String,
    own: Option<OwnServer>,
}

/// A server without persistence in a folder of its own. It listens on a socket in there, so that no
/// port has to be found.
struct OwnServer {
    process: Process,
    /// Removed when it is dropped.
    folder: tempfile::TempDir,
}

impl Server {
    async fn of_this_run() -> Result<Self, BoxError> {
        let url = std::env::var("REDIS_URL").unwrap_or_default();
        if !url.is_empty() {
            return Ok(Server { url, own: None });
        }
        let binary = std::env::var_os("REDIS_SERVER").unwrap_or("redis-server".into());
        let own = OwnServer::start(PathBuf::from(binary))?;
        let socket = own.folder.path().join("redis.sock");
        let mut server = Server {
            url: format!("redis+unix://{}", socket.display()),
            own: Some(own),
        };
        server.is_ready().await?;
        Ok(server)
    }

    async fn is_ready(&mut self) -> Result<(), BoxError> {
        let Some(own) = &mut self.own else {
            return Ok(());
        };
        for _ in 0..500 {
            if let Some(status) = own.process.try_wait()? {
                return Err(format!("the server ended ({status}):\n{}", own.log()).into());
            }
            if connect(&self.url).await.is_ok() {
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Err(format!("the server does not answer:\n{}", own.log()).into())
    }
}

impl OwnServer {
    fn start(binary: PathBuf) -> Result<Self, BoxError> {
        let folder = tempfile::Builder::new().prefix("earthquakes-").tempdir()?;
        let log = std::fs::File::create(folder.path().join("log"))?;
        let process = Command::new(&binary)
            .args(["--port", "0", "--unixsocket", "redis.sock"])
            .args(["--save", "", "--appendonly", "no"])
            .current_dir(folder.path())
            // A Ctrl-C in the terminal is for this program; the server is ended last.
            .process_group(0)
            .stdin(Stdio::null())
            .stderr(log.try_clone()?)
            .stdout(log)
            .spawn()
            .map_err(|error| {
                format!(
                    "cannot start `{}` ({error}): set REDIS_SERVER to a redis-server, or REDIS_URL to a server that runs",
                    binary.display()
                )
            })?;
        Ok(OwnServer { process, folder })
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }
}

impl Drop for OwnServer {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Ctrl-C, and what a service manager sends.
struct Signals {
    interrupt: Signal,
    terminate: Signal,
}

impl Signals {
    fn listen() -> Result<Self, BoxError> {
        Ok(Signals {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
        })
    }

    async fn any(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
        }
    }
}
