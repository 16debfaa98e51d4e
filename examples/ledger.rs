//! A ledger: payments from a stream, kept by actors of the application's own.
//!
//! ```sh
//! REDIS_URL=redis://localhost:6379 cargo run --example ledger
//! ```
//!
//! Four actors keep the accounts in an SQLite database. Each account belongs to one of them, which gets
//! its payments from the stream in their order, and everything else that concerns it as messages from
//! outside: an account is frozen and thawed, its balance is asked for. One actor panics when it has booked a
//! payment and not said so yet; the payment comes again and is not booked again. In the end every balance is
//! what it should be.
//!
//! Read `LedgerMessage` and `Ledger` first.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ractor::{Actor, ActorProcessingErr, ActorRef, RpcReplyPort};
use rusqlite::{Connection, OptionalExtension, TransactionBehavior, params};
use serde::{Deserialize, Serialize};
use streamvisor::fred::prelude::*;
use streamvisor::prelude::*;
use streamvisor::{CallError, ractor};
use tokio::task::block_in_place;

const ACCOUNTS: u64 = 20;
/// How many payments are made before the account is frozen, and how many after.
const PAYMENTS: u64 = 300;
/// The account that is frozen for a while.
const FROZEN: AccountId = AccountId(7);
/// The payment over which its actor panics: one of the second half.
const FATAL: u64 = PAYMENTS + 50;
/// What it says then: the panic hook knows it by that.
const ON_PURPOSE: &str = "an actor panics after it has booked a payment, on purpose";
/// How long a payment to a frozen account waits before it is tried again.
const HELD_FOR: Duration = Duration::from_millis(200);
const WITHIN: Duration = Duration::from_secs(10);
const DEADLINE: Duration = Duration::from_secs(60);

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
struct AccountId(u64);

impl AccountId {
    /// The header that payments are ordered by.
    fn key(self) -> String {
        format!("acct-{}", self.0)
    }
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct Payment {
    /// Who pays gives each payment a number. An entry can arrive more than once, and so can a copy of it, which
    /// has an id of its own: this number is what they have in common.
    id: u64,
    account: AccountId,
    cents: i64,
}

// ---- the actors --------------------------------------------------------------------------------------

enum LedgerMessage {
    /// From the stream.
    Posted(Delivery<Payment>),
    /// From the rest of the application.
    Freeze(AccountId),
    Thaw(AccountId),
    Balance(AccountId, RpcReplyPort<i64>),
}

impl From<Delivery<Payment>> for LedgerMessage {
    fn from(payment: Delivery<Payment>) -> Self {
        LedgerMessage::Posted(payment)
    }
}

#[cfg(feature = "cluster")]
impl ractor::Message for LedgerMessage {}

struct Ledger;

#[derive(Clone)]
struct LedgerConfig {
    /// One database for all actors: which of them has which account is decided anew in each process.
    file: PathBuf,
    has_panicked: Arc<AtomicBool>,
}

struct Accounts {
    database: Connection,
    has_panicked: Arc<AtomicBool>,
}

impl Actor for Ledger {
    type Msg = LedgerMessage;
    type State = Accounts;
    type Arguments = LedgerConfig;

    /// Called again for the replacement of an actor that has died. What it has to know is in the database.
    async fn pre_start(
        &self,
        _: ActorRef<LedgerMessage>,
        config: LedgerConfig,
    ) -> Result<Accounts, ActorProcessingErr> {
        Ok(Accounts {
            database: block_in_place(|| open(&config.file))?,
            has_panicked: config.has_panicked,
        })
    }

    async fn handle(
        &self,
        _: ActorRef<LedgerMessage>,
        message: LedgerMessage,
        accounts: &mut Accounts,
    ) -> Result<(), ActorProcessingErr> {
        // SQLite waits for the disk and for the other actors. `block_in_place` has another thread take over
        // what else this thread of the runtime has to do.
        block_in_place(|| -> Result<(), ActorProcessingErr> {
            match message {
                LedgerMessage::Posted(payment) => {
                    match accounts.post(payment.message()) {
                        Ok(Posted::Booked) => {
                            accounts.panic_once_over(payment.message());
                            payment.ack();
                        }
                        Ok(Posted::Before) => {
                            let id = payment.message().id;
                            println!("  payment {id} had been booked already: acknowledged");
                            payment.ack();
                        }
                        Ok(Posted::IsFrozen) => payment.retry_after(HELD_FOR),
                        // With `?` it would end this actor, and the payment would count as what it died of.
                        Err(error) => payment.fail(error),
                    }
                }
                LedgerMessage::Freeze(account) => accounts.set_frozen(account, true)?,
                LedgerMessage::Thaw(account) => accounts.set_frozen(account, false)?,
                LedgerMessage::Balance(account, reply) => reply.send(accounts.balance(account)?)?,
            }
            Ok(())
        })
    }
}

enum Posted {
    Booked,
    /// It was booked when it came the last time.
    Before,
    IsFrozen,
}

impl Accounts {
    /// Books a payment, once: its number and the new balance are there together or not at all.
    fn post(&mut self, payment: &Payment) -> rusqlite::Result<Posted> {
        let account = payment.account.0;
        let transaction = self
            .database
            .transaction_with_behavior(TransactionBehavior::Immediate)?;
        let frozen = "SELECT frozen FROM accounts WHERE id = ?1";
        let frozen = transaction.query_row(frozen, [account], |row| row.get(0));
        if frozen.optional()?.unwrap_or(false) {
            return Ok(Posted::IsFrozen);
        }
        let number = "INSERT INTO payments (id) VALUES (?1) ON CONFLICT (id) DO NOTHING";
        if transaction.execute(number, [payment.id])? == 0 {
            return Ok(Posted::Before);
        }
        transaction.execute(
            "INSERT INTO accounts (id, cents) VALUES (?1, ?2)
             ON CONFLICT (id) DO UPDATE SET cents = cents + excluded.cents",
            params![account, payment.cents],
        )?;
        transaction.commit()?;
        Ok(Posted::Booked)
    }

    fn set_frozen(&self, account: AccountId, frozen: bool) -> rusqlite::Result<()> {
        self.database.execute(
            "INSERT INTO accounts (id, frozen) VALUES (?1, ?2)
             ON CONFLICT (id) DO UPDATE SET frozen = excluded.frozen",
            params![account.0, frozen],
        )?;
        let word = if frozen { "frozen" } else { "thawed" };
        println!("  {} is {word}", account.key());
        Ok(())
    }

    fn balance(&self, account: AccountId) -> rusqlite::Result<i64> {
        let cents = "SELECT cents FROM accounts WHERE id = ?1";
        let cents = self
            .database
            .query_row(cents, [account.0], |row| row.get(0));
        Ok(cents.optional()?.unwrap_or(0))
    }

    fn panic_once_over(&self, payment: &Payment) {
        if payment.id == FATAL && !self.has_panicked.swap(true, Ordering::Relaxed) {
            std::panic::panic_any(ON_PURPOSE);
        }
    }
}

fn open(file: &Path) -> rusqlite::Result<Connection> {
    let database = Connection::open(file)?;
    database.busy_timeout(Duration::from_secs(10))?;
    database.execute_batch(
        // With FULL a commit is on the disk when it returns: what is acknowledged after that is not lost.
        "PRAGMA journal_mode = WAL;
         PRAGMA synchronous = FULL;
         CREATE TABLE IF NOT EXISTS payments (id INTEGER PRIMARY KEY);
         CREATE TABLE IF NOT EXISTS accounts (
             id INTEGER PRIMARY KEY,
             cents INTEGER NOT NULL DEFAULT 0,
             frozen INTEGER NOT NULL DEFAULT FALSE
         );",
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
            eprintln!("ledger: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn run() -> Result<(), BoxError> {
    let url = std::env::var("REDIS_URL").unwrap_or_else(|_| "redis://localhost:6379".into());
    // No other run has it, so a server that is used for something else is no problem.
    let since_epoch = std::time::UNIX_EPOCH.elapsed().unwrap_or_default();
    let stream = format!(
        "ledger:{:x}-{}",
        since_epoch.as_micros(),
        std::process::id()
    );
    // Removed in the end, with the database in it.
    let folder = tempfile::Builder::new().prefix("ledger-").tempdir()?;
    let config = LedgerConfig {
        file: folder.path().join("ledger.db"),
        has_panicked: Arc::default(),
    };

    // A service would run the other half too, `Subscription::reclaim`: for what a crashed process left behind.
    let topology = Topology::new(Redis::url(&url)?)
        .default_group("bookkeeping")
        .subscribe(
            Subscription::tail(&stream)
                .named("ledger")
                .workers(4)
                .ordered_by("account")
                // A panic counts as a failed attempt: the payment is tried again after this delay.
                .retry(RetryPolicy::exponential(Duration::from_millis(100)))
                .actors(move |_worker| (Ledger, config.clone())),
        );
    let supervisor = Supervisor::start(topology).await?;
    let story = tokio::time::timeout(DEADLINE, story(&supervisor, &stream));
    let (told, report) = supervisor.run_until(story).await?;
    delete(&url, &stream).await?;
    told.map_err(|_| format!("not done after {DEADLINE:?}"))??;
    println!(
        "stopped: {} given back, {} left running, {} verdicts not stored",
        report.given_back,
        report.left_running.len(),
        report.unsettled.len()
    );
    println!("every balance is right");
    Ok(())
}

/// What happens to the ledger. Whatever is wrong is an error.
async fn story(supervisor: &SupervisorHandle, stream: &str) -> Result<(), BoxError> {
    let ledger: HandlerRef<LedgerMessage> = supervisor.handlers("ledger")?;
    let mut expected = BTreeMap::new();

    publish(supervisor, stream, 0..PAYMENTS, &mut expected).await?;
    booked(supervisor, PAYMENTS).await;
    let before = balance(&ledger, FROZEN).await?;
    println!("balance of {}: {}", FROZEN.key(), euros(before));
    is_right(FROZEN, expected.get(&FROZEN), before)?;

    // A message to the actor that gets the payments of this account: those that follow are behind it.
    ledger.send_keyed(FROZEN.key(), LedgerMessage::Freeze(FROZEN))?;
    publish(supervisor, stream, PAYMENTS..2 * PAYMENTS, &mut expected).await?;
    // All but those of the frozen account are booked, in spite of the panic.
    booked(supervisor, 2 * PAYMENTS - PAYMENTS / ACCOUNTS).await;
    let meanwhile = balance(&ledger, FROZEN).await?;
    println!(
        "balance of {} while it is frozen: {}",
        FROZEN.key(),
        euros(meanwhile)
    );
    is_right(FROZEN, Some(&before), meanwhile)?;

    ledger.send_keyed(FROZEN.key(), LedgerMessage::Thaw(FROZEN))?;
    booked(supervisor, 2 * PAYMENTS).await;
    println!("all payments are booked; the balances:");
    for (&account, cents) in &expected {
        let found = balance(&ledger, account).await?;
        println!("  {:8}{:>10}", account.key(), euros(found));
        is_right(account, Some(cents), found)?;
    }
    Ok(())
}

/// Publishes payments, and adds them up.
async fn publish(
    supervisor: &SupervisorHandle,
    stream: &str,
    numbers: std::ops::Range<u64>,
    expected: &mut BTreeMap<AccountId, i64>,
) -> Result<(), BoxError> {
    let publisher = supervisor.publisher();
    println!("payments {} to {} are made", numbers.start, numbers.end - 1);
    for id in numbers {
        let payment = Payment {
            id,
            account: AccountId(id % ACCOUNTS),
            // Some pay, and some are paid.
            cents: (id * 7_919 % 20_011) as i64 - 5_000,
        };
        *expected.entry(payment.account).or_default() += payment.cents;
        publisher
            .entry(stream, &payment)
            .header("account", payment.account.key())
            .send()
            .await?;
    }
    Ok(())
}

/// Returns when so many payments have been acknowledged.
async fn booked(supervisor: &SupervisorHandle, payments: u64) {
    let mut tick = tokio::time::interval(Duration::from_millis(20));
    loop {
        tick.tick().await;
        let status = supervisor.status().await;
        let verdicts = status.subscriptions.iter().map(|it| &it.verdicts);
        if verdicts.map(|it| it.acknowledged).sum::<u64>() >= payments {
            return;
        }
    }
}

async fn balance(ledger: &HandlerRef<LedgerMessage>, account: AccountId) -> Result<i64, CallError> {
    let ask = |reply| LedgerMessage::Balance(account, reply);
    ledger.call_keyed(account.key(), ask, WITHIN).await
}

fn is_right(account: AccountId, expected: Option<&i64>, found: i64) -> Result<(), String> {
    match expected {
        Some(&cents) if cents == found => Ok(()),
        _ => Err(format!(
            "{} has {}, and it should have {}",
            account.key(),
            euros(found),
            expected.map_or_else(|| "nothing".to_owned(), |&cents| euros(cents))
        )),
    }
}

fn euros(cents: i64) -> String {
    let sign = if cents < 0 { "-" } else { "" };
    format!("{sign}{}.{:02}", cents.abs() / 100, cents.abs() % 100)
}

/// One line instead of a back trace for the panic that is part of the show.
fn tell_the_panic_that_is_meant() {
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        if panic.payload().downcast_ref() == Some(&ON_PURPOSE) {
            println!("  {ON_PURPOSE}");
        } else {
            usual(panic);
        }
    }));
}

async fn delete(url: &str, stream: &str) -> Result<(), BoxError> {
    let client = Builder::from_config(Config::from_url(url)?).build()?;
    client.init().await?;
    client.del::<(), _>(stream).await?;
    client.quit().await?;
    Ok(())
}
