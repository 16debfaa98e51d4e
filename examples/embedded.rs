//! An application with a supervision tree of its own, and streamvisor as one branch of it.
//!
//! ```sh
//! REDIS_URL=redis://localhost:6379 cargo run --example embedded
//! ```
//!
//! ```text
//! Application ──┬── Books                the application's own branch: what has been booked
//!               └── (streamvisor)        Supervisor::start_linked: reads orders, books them
//! ```
//!
//! A hundred orders are in a stream, and the database that they belong in is missing. So no worker can
//! start, its restart budget is soon spent, and the branch gives up. Its parent learns of that as it
//! learns of any child that fails, in `handle_supervisor_evt`. It makes the database and starts the
//! topology again, and the second branch books all orders. Then everything stops in order.
//!
//! Read `Application` first: it is an ordinary ractor actor.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use serde::Deserialize;
use streamvisor::fred::prelude::*;
use streamvisor::prelude::*;
use streamvisor::ractor::{Actor, ActorProcessingErr, ActorRef, SupervisionEvent};
use streamvisor::{Failure, ShutdownReport};
use tokio::fs::{File, OpenOptions};
use tokio::io::AsyncWriteExt;
use tokio::sync::oneshot;

/// How many orders there are, each of as many cents as its number.
const ORDERS: u64 = 100;
/// The program takes about half a second.
const DEADLINE: Duration = Duration::from_secs(60);

// ---- the root of the application's tree -----------------------------------------------------------------

/// The root. Its children are the books and the branch that reads the orders.
struct Application;

struct Plan {
    topology: Topology,
    books: ActorRef<BooksMessage>,
    database: PathBuf,
    /// Where the report of the end goes.
    done: Option<oneshot::Sender<ShutdownReport>>,
}

struct Running {
    plan: Plan,
    /// The branch. Dropping it would drain it too.
    orders: SupervisorHandle,
    /// A parent that starts a child again for ever only hides what is wrong with it.
    has_mended: bool,
}

enum ApplicationMessage {
    AllBooked,
}

impl Actor for Application {
    type Msg = ApplicationMessage;
    type State = Running;
    type Arguments = Plan;

    async fn pre_start(
        &self,
        myself: ActorRef<ApplicationMessage>,
        plan: Plan,
    ) -> Result<Running, ActorProcessingErr> {
        plan.books.link(myself.get_cell());
        let orders = Supervisor::start_linked(plan.topology.clone(), myself.get_cell()).await?;
        println!("the application runs, with two branches: its books, and the orders");
        Ok(Running {
            plan,
            orders,
            has_mended: false,
        })
    }

    async fn handle_supervisor_evt(
        &self,
        myself: ActorRef<ApplicationMessage>,
        event: SupervisionEvent,
        running: &mut Running,
    ) -> Result<(), ActorProcessingErr> {
        match event {
            SupervisionEvent::ActorFailed(who, error)
                if who.get_id() == running.orders.actor().get_id() =>
            {
                let failure = error.downcast_ref::<Failure>();
                match failure {
                    // What this parent can do something about, once.
                    Some(failure) if is_a_worker(failure) && !running.has_mended => {
                        println!("the branch has failed: {failure}");
                    }
                    // Anything else is a matter for whoever is above: this actor fails too.
                    _ => return Err(error),
                }
                running.has_mended = true;
                File::create(&running.plan.database).await?;
                println!("the parent has made the database, and starts the branch again");
                let again = running.plan.topology.clone();
                running.orders = Supervisor::start_linked(again, myself.get_cell()).await?;
            }
            // The books.
            SupervisionEvent::ActorFailed(_, error) => return Err(error),
            _ => {}
        }
        Ok(())
    }

    async fn handle(
        &self,
        myself: ActorRef<ApplicationMessage>,
        ApplicationMessage::AllBooked: ApplicationMessage,
        running: &mut Running,
    ) -> Result<(), ActorProcessingErr> {
        println!("all orders are booked: the parent shuts the branch down, then stops");
        // When a parent ends, the branch drains by itself. This is for the report, and for a process
        // that ends right after its root.
        let report = running.orders.shutdown().await?;
        if let Some(done) = running.plan.done.take() {
            // Nobody waits for it any more: then `main` has given up.
            let _ = done.send(report);
        }
        myself.stop(None);
        Ok(())
    }
}

fn is_a_worker(failure: &Failure) -> bool {
    matches!(failure.child, Child::Handler { .. })
}

// ---- the application's own branch -----------------------------------------------------------------------

/// Knows what was booked, and says when that is all. It knows nothing of streams.
struct Books;

enum BooksMessage {
    /// Tells this actor when everything is booked.
    Report(ActorRef<ApplicationMessage>),
    Booked(Order),
}

#[derive(Default)]
struct Booked {
    /// By their number, so that an order that comes a second time is the same one.
    cents: BTreeMap<u64, u64>,
    report_to: Option<ActorRef<ApplicationMessage>>,
}

impl Actor for Books {
    type Msg = BooksMessage;
    type State = Booked;
    type Arguments = ();

    async fn pre_start(
        &self,
        _: ActorRef<BooksMessage>,
        (): (),
    ) -> Result<Booked, ActorProcessingErr> {
        Ok(Booked::default())
    }

    async fn handle(
        &self,
        _: ActorRef<BooksMessage>,
        message: BooksMessage,
        booked: &mut Booked,
    ) -> Result<(), ActorProcessingErr> {
        match message {
            BooksMessage::Report(to) => booked.report_to = Some(to),
            BooksMessage::Booked(order) => {
                booked.cents.insert(order.id, order.cents);
            }
        }
        if booked.cents.len() as u64 == ORDERS
            && let Some(application) = booked.report_to.take()
        {
            application.cast(ApplicationMessage::AllBooked)?;
        }
        Ok(())
    }
}

// An application that turns on ractor's `cluster` has to say this of its messages.
#[cfg(feature = "cluster")]
impl streamvisor::ractor::Message for ApplicationMessage {}
#[cfg(feature = "cluster")]
impl streamvisor::ractor::Message for BooksMessage {}

// ---- what the branch runs ---------------------------------------------------------------------------------

#[derive(Debug, Deserialize)]
struct Order {
    id: u64,
    cents: u64,
}

/// Writes orders into the database, each worker through a file of its own.
struct Booking {
    database: PathBuf,
    books: ActorRef<BooksMessage>,
}

impl Handler for Booking {
    type Message = Order;
    type State = File;

    /// Fails while there is no database. The worker is started again then, within its restart budget.
    async fn start(&self, worker: Worker) -> Result<File, BoxError> {
        let opened = OpenOptions::new().append(true).open(&self.database).await;
        opened.map_err(|error| {
            println!("  worker {} finds no database", worker.index());
            format!("the database cannot be opened: {error}").into()
        })
    }

    async fn handle(
        &self,
        order: Order,
        _: &Context,
        file: &mut File,
    ) -> Result<Outcome, BoxError> {
        // An error here is the entry's: the retry policy decides, and the worker goes on.
        let line = format!("{} {}\n", order.id, order.cents);
        file.write_all(line.as_bytes()).await?;
        file.flush().await?;
        self.books.cast(BooksMessage::Booked(order))?;
        Ok(Outcome::Ack)
    }
}

fn topology(redis: Redis, stream: &str, booking: Booking) -> Topology {
    Topology::new(redis)
        .default_group("books")
        // A worker may fail twice before the branch gives up.
        .restart(RestartPolicy::default().max_restarts(2))
        .subscribe(
            Subscription::tail(stream)
                .named("orders")
                // The orders are there before the group is.
                .start(Start::Beginning)
                // What the first branch has read and given back is pending in this name, and the
                // second one begins with that. (Under a name of its own, as by default, it would be
                // a reclaim subscription that takes it up.)
                .consumer("clerk")
                .workers(1)
                .handle(booking),
        )
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
        Ok(Ok(0)) => ExitCode::SUCCESS,
        Ok(Ok(_)) => ExitCode::FAILURE,
        Ok(Err(error)) => {
            eprintln!("embedded: {error}");
            ExitCode::FAILURE
        }
        Err(_) => {
            eprintln!("embedded: not done after {DEADLINE:?}");
            ExitCode::FAILURE
        }
    }
}

/// Returns how many orders were lost.
async fn run() -> Result<u64, BoxError> {
    let url = std::env::var("REDIS_URL").unwrap_or_else(|_| "redis://localhost:6379".into());
    let redis = Redis::url(&url)?;
    let client = Builder::from_config(Config::from_url(&url)?).build()?;
    client.init().await?;
    // No other run has this key.
    let since_epoch = std::time::UNIX_EPOCH.elapsed()?.as_micros();
    let stream = format!("embedded:{since_epoch:x}-{}:orders", std::process::id());

    let lost = consume(redis, &client, &stream).await;
    client.del::<(), _>(&stream).await?;
    lost
}

async fn consume(redis: Redis, client: &Client, stream: &str) -> Result<u64, BoxError> {
    for id in 1..=ORDERS {
        let order = format!(r#"{{"id": {id}, "cents": {id}}}"#);
        let fields = vec![("_payload", order)];
        client
            .xadd::<(), _, _, _, _>(stream, false, None, "*", fields)
            .await?;
    }
    println!("{ORDERS} orders published");

    let folder = tempfile::Builder::new().prefix("embedded-").tempdir()?;
    let database = folder.path().join("orders.db");
    let (books, books_end) = Actor::spawn(None, Books, ()).await?;
    let booking = Booking {
        database: database.clone(),
        books: books.clone(),
    };
    let (done, stopped) = oneshot::channel();
    let plan = Plan {
        topology: topology(redis, stream, booking),
        books: books.clone(),
        database: database.clone(),
        done: Some(done),
    };
    let (application, application_end) = Actor::spawn(None, Application, plan).await?;
    books.cast(BooksMessage::Report(application))?;
    // An application that failed has dropped the other end.
    let report = stopped
        .await
        .map_err(|_| "the application has failed; RUST_LOG=streamvisor shows why")?;

    application_end.await?;
    // As all children of an actor that has ended.
    books_end.await?;
    tell(client, stream, &database, &report).await
}

async fn tell(
    client: &Client,
    stream: &str,
    database: &Path,
    report: &ShutdownReport,
) -> Result<u64, BoxError> {
    println!(
        "the branch was drained: {} given back, {} left running, {} verdicts not stored",
        report.given_back,
        report.left_running.len(),
        report.unsettled.len(),
    );
    let text = tokio::fs::read_to_string(database).await?;
    let mut booked: BTreeMap<u64, u64> = BTreeMap::new();
    for line in text.lines() {
        let (id, cents) = line
            .split_once(' ')
            .ok_or("a line of the database is torn")?;
        booked.insert(id.parse()?, cents.parse()?);
    }
    let pending: Vec<Value> = client.xpending(stream, "books", ()).await?;
    let pending = pending.first().and_then(Value::as_u64).unwrap_or_default();
    println!(
        "{} lines in the database, {} orders, {} cents; {pending} pending on the server",
        text.lines().count(),
        booked.len(),
        booked.values().sum::<u64>(),
    );
    let lost = ORDERS.saturating_sub(booked.len() as u64) + pending;
    println!("lost: {lost}");
    Ok(lost)
}
