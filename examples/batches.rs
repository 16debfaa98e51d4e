//! Entries in bulk into a database: one transaction for each batch.
//!
//! ```sh
//! REDIS_URL=redis://localhost:6379 cargo run --example batches
//! ```
//!
//! 10,000 readings of thermometers go into a table of an SQLite database. A transaction costs a wait for
//! the disk however many rows it has, so a worker takes up to 200 readings at a time. Some of them are
//! what the table refuses: they become dead letters, and the rest of their batch goes through. One worker
//! panics when it has stored a batch and not said so yet: the entries come again, and nothing is stored
//! twice. In the end everything is accounted for.
//!
//! Read `Archive` first.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use futures_util::future::try_join_all;
use rusqlite::{Connection, ErrorCode, TransactionBehavior, params};
use serde::{Deserialize, Serialize};
use streamvisor::Verdicts;
use streamvisor::fred::prelude::*;
use streamvisor::prelude::*;
use tokio::task::block_in_place;

const READINGS: usize = 10_000;
/// The most entries of one call.
const BATCH: usize = 200;
/// Every thermometer that has broken says this, and the table refuses it.
const BROKEN: f64 = 999.9;
/// How many readings are from one of those.
const REFUSED: usize = READINGS / 1_000;
/// What the worker says that panics: the panic hook knows it by that.
const ON_PURPOSE: &str = "a worker panics after the commit, on purpose";
const DEADLINE: Duration = Duration::from_secs(60);

#[derive(Debug, Serialize, Deserialize)]
struct Reading {
    sensor: usize,
    celsius: f64,
}

// ---- what runs ---------------------------------------------------------------------------------------

fn topology(redis: Redis, keys: &Keys, archive: &Arc<Archive>) -> Topology {
    // Fresh entries and recovered ones are the same work, so both subscriptions get the same settings.
    let archived = |draft: Draft| {
        draft
            .group("archive")
            // SQLite has one writer at a time. While one worker waits for the disk, another one decodes.
            .workers(2)
            .batch(BATCH)
            // A copy has an id of its own, and the table knows entries by their ids. After a panic nobody knows
            // whether the rows are there, so the entry itself has to come again: by the reclaim subscription.
            .on_crash(OnCrash::LeavePending)
            .dead_letter(&keys.dead)
            .handle_batch(Arc::clone(archive))
    };
    Topology::new(redis)
        .subscribe(archived(Subscription::tail(&keys.readings).named("fresh")))
        .subscribe(archived(
            // A second suffices however long a batch takes: what is being worked on is kept fresh.
            Subscription::reclaim(&keys.readings, Duration::from_secs(1))
                .named("left-behind")
                .block(Duration::from_millis(100)),
        ))
}

/// Puts readings into a table.
struct Archive {
    file: PathBuf,
    batches: AtomicUsize,
    largest: AtomicUsize,
    /// Rows that were there already.
    known: AtomicUsize,
    /// How many entries were in the batch after which a worker panicked.
    panicked_over: OnceLock<usize>,
}

impl BatchHandler for Archive {
    type Message = Reading;
    /// Each worker has a connection of its own. One that panicked gets a new one: the old one may be
    /// in the middle of a transaction, and SQLite takes that back when it is closed.
    type State = Connection;

    async fn start(&self, _: Worker) -> Result<Connection, BoxError> {
        block_in_place(|| open(&self.file))
    }

    async fn handle_batch(
        &self,
        batch: Vec<(Reading, Context)>,
        database: &mut Connection,
    ) -> Result<Vec<Outcome>, BoxError> {
        self.batches.fetch_add(1, Ordering::Relaxed);
        self.largest.fetch_max(batch.len(), Ordering::Relaxed);
        // SQLite waits: for the disk, and for whoever else writes. Called just so, it would hold up whatever
        // else this thread of the runtime has to do, the reading and settling of this tree included;
        // `block_in_place` hands that to another thread first.
        //
        // `spawn_blocking` would do that too, and be wrong: it cannot be interrupted either, but the call
        // here could. When `handler_timeout` is over, the entries of a call that was ended come again, while
        // the transaction that nobody waits for any more may still be committed. A call that blocks is given up
        // as what it is, and its entries are left alone until it is over.
        let outcomes = block_in_place(|| self.store(&batch, database))?;
        // The one moment in which the rows are there and the server has not heard of it.
        if batch.len() > 1 && self.panicked_over.set(batch.len()).is_ok() {
            std::panic::panic_any(ON_PURPOSE);
        }
        Ok(outcomes)
    }
}

impl Archive {
    fn new(file: PathBuf) -> Self {
        Archive {
            file,
            batches: AtomicUsize::new(0),
            largest: AtomicUsize::new(0),
            known: AtomicUsize::new(0),
            panicked_over: OnceLock::new(),
        }
    }

    /// Stores a batch, all of it or nothing, but for rows that the table refuses. An error here (the disk
    /// is full, another process has locked the database for long) is no entry's fault: the transaction is
    /// taken back, and all of them are tried again.
    fn store(
        &self,
        batch: &[(Reading, Context)],
        database: &mut Connection,
    ) -> Result<Vec<Outcome>, BoxError> {
        // Takes the writer's lock at once. One that reads first and wants to write later can be refused in
        // the middle.
        let transaction = database.transaction_with_behavior(TransactionBehavior::Immediate)?;
        let mut outcomes = Vec::with_capacity(batch.len());
        let mut known = 0;
        {
            // An entry can arrive more than once, and its id is always the same. `INSERT OR IGNORE` would
            // ignore that too, but with it every constraint: refused readings would vanish unseen.
            let mut insert = transaction.prepare_cached(
                "INSERT INTO readings (entry, sensor, celsius) VALUES (?1, ?2, ?3)
                 ON CONFLICT (entry) DO NOTHING",
            )?;
            for (reading, context) in batch {
                let row = params![context.id().to_string(), reading.sensor, reading.celsius];
                outcomes.push(match insert.execute(row) {
                    Ok(rows) => {
                        known += 1 - rows;
                        Outcome::Ack
                    }
                    // SQLite takes back this statement alone; the transaction goes on.
                    Err(error)
                        if error.sqlite_error_code() == Some(ErrorCode::ConstraintViolation) =>
                    {
                        Outcome::DeadLetter(error.to_string())
                    }
                    Err(error) => return Err(error.into()),
                });
            }
        }
        transaction.commit()?;
        self.known.fetch_add(known, Ordering::Relaxed);
        Ok(outcomes)
    }
}

fn open(file: &Path) -> Result<Connection, BoxError> {
    let database = Connection::open(file)?;
    database.busy_timeout(Duration::from_secs(10))?;
    database.execute_batch(
        // With FULL a commit is on the disk when it returns. An entry is acknowledged after that and is
        // gone from the server's books, so anything less could lose it when the power fails.
        "PRAGMA journal_mode = WAL;
         PRAGMA synchronous = FULL;
         CREATE TABLE IF NOT EXISTS readings (
             entry TEXT PRIMARY KEY,
             sensor INTEGER NOT NULL,
             celsius REAL NOT NULL CHECK (celsius BETWEEN -90 AND 60)
         ) WITHOUT ROWID;",
    )?;
    Ok(database)
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
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("batches: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn run() -> Result<(), BoxError> {
    let url = std::env::var("REDIS_URL").unwrap_or_else(|_| "redis://localhost:6379".into());
    let keys = Keys::of_this_run();
    // Removed in the end, with the database in it.
    let folder = tempfile::Builder::new().prefix("batches-").tempdir()?;
    let archive = Arc::new(Archive::new(folder.path().join("readings.db")));

    let supervisor = Supervisor::start(topology(Redis::url(&url)?, &keys, &archive)).await?;
    let work = async {
        publish(&supervisor.publisher(), &keys).await?;
        all_settled(&supervisor).await
    };
    let (worked, report) = supervisor
        .run_until(tokio::time::timeout(DEADLINE, work))
        .await?;
    keys.delete(&url).await?;
    worked.map_err(|_| format!("not done after {DEADLINE:?}"))??;

    let count = "SELECT count(*) FROM readings";
    let rows: usize = open(&archive.file)?.query_row(count, [], |row| row.get(0))?;
    let came_again = archive.panicked_over.get().copied().unwrap_or_default();
    let known = archive.known.load(Ordering::Relaxed);
    println!("rows stored:        {rows:6}");
    println!("dead letters:       {:6}", READINGS - rows);
    println!(
        "batches:            {:6}",
        archive.batches.load(Ordering::Relaxed)
    );
    println!(
        "largest batch:      {:6}",
        archive.largest.load(Ordering::Relaxed)
    );
    println!(
        "in the batch before the panic: {came_again}, of these rows that were there already: {known}"
    );
    println!("verdicts not stored: {}", report.unsettled.len());
    // Those of the batch that were refused once were refused again.
    if rows == READINGS - REFUSED && known <= came_again && known + REFUSED >= came_again {
        println!("lost: 0, stored twice: 0");
        Ok(())
    } else {
        Err(format!("there should be {} rows", READINGS - REFUSED).into())
    }
}

async fn publish(publisher: &Publisher, keys: &Keys) -> Result<(), BoxError> {
    let readings: Vec<_> = (0..READINGS).map(reading).collect();
    // Many at a time, so that no entry has to wait for the answer to the one before.
    for some in readings.chunks(500) {
        try_join_all(some.iter().map(|it| publisher.publish(&keys.readings, it))).await?;
    }
    println!("{READINGS} readings published, {REFUSED} of broken thermometers");
    Ok(())
}

fn reading(number: usize) -> Reading {
    let celsius = match number % 1_000 {
        500 => BROKEN,
        warm => 10.0 + (warm % 150) as f64 / 10.0,
    };
    Reading {
        sensor: number % 50,
        celsius,
    }
}

/// Returns when every reading has had its last verdict, and shows how far it is until then.
async fn all_settled(supervisor: &SupervisorHandle) -> Result<(), BoxError> {
    let mut tick = tokio::time::interval(Duration::from_millis(100));
    let mut shown = None;
    loop {
        tick.tick().await;
        let status = supervisor.status().await;
        let of = |verdicts: &Verdicts| (verdicts.acknowledged, verdicts.dead_lettered);
        let (mut stored, mut dead) = (0, 0);
        for (acknowledged, dead_lettered) in status.subscriptions.iter().map(|it| of(&it.verdicts))
        {
            stored += acknowledged;
            dead += dead_lettered;
        }
        if shown.replace((stored, dead)) != Some((stored, dead)) {
            println!("{stored:6} acknowledged, {dead:2} dead letters");
        }
        if stored + dead == READINGS as u64 {
            return Ok(());
        }
    }
}

/// One line instead of a back trace for the panic that is part of the show.
fn tell_the_panic_that_is_meant() {
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        if panic.payload().downcast_ref() == Some(&ON_PURPOSE) {
            println!("{ON_PURPOSE}");
        } else {
            usual(panic);
        }
    }));
}

/// The keys of this run. No other run has them, so a server that is used for something else is no problem.
struct Keys {
    readings: String,
    dead: String,
}

impl Keys {
    fn of_this_run() -> Self {
        let since_epoch = std::time::UNIX_EPOCH.elapsed().unwrap_or_default();
        let run = format!(
            "batches:{:x}-{}",
            since_epoch.as_micros(),
            std::process::id()
        );
        Keys {
            readings: format!("{run}:readings"),
            dead: format!("{run}:dead"),
        }
    }

    async fn delete(&self, url: &str) -> Result<(), BoxError> {
        let client = Builder::from_config(Config::from_url(url)?).build()?;
        client.init().await?;
        client
            .del::<(), _>(vec![&*self.readings, &*self.dead])
            .await?;
        client.quit().await?;
        Ok(())
    }
}
