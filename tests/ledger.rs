//! The promises put together: a ledger whose accounts are kept by actors of the application's own, and that
//! has to be right to the cent whatever dies meanwhile.
//!
//! A payment's number and the balance that it makes are stored in one transaction of an SQLite database, so
//! a payment that comes a second time changes nothing. A frozen account takes no payments: they are held back
//! with `retry_after` until it is thawed, so freezing changes when they are booked and never whether, and the
//! balances in the end are those of a run in which everything happens in order and nothing goes wrong.

mod support;

use std::collections::{BTreeMap, HashMap};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ractor::{Actor, ActorProcessingErr, ActorRef, RpcReplyPort};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use rusqlite::{Connection, OptionalExtension, TransactionBehavior, params};
use serde::{Deserialize, Serialize};
use streamvisor::prelude::*;
use streamvisor::{CallError, ractor};
use support::record::{ms, stream_of, topology};
use support::*;
use tempfile::TempDir;
use tokio::task::block_in_place;

const ACCOUNTS: u64 = 100;
/// For what takes a while on a machine that has other things to do.
const LATER: Duration = Duration::from_secs(60);
/// How long a payment to a frozen account is held back, each time.
const HELD_FOR: Duration = Duration::from_millis(50);
/// One attempt in so many ends in a panic.
const PANICS: u64 = 150;

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct Payment {
    id: u64,
    account: u64,
    /// The how many-th of its account it is.
    nth: u64,
    cents: i64,
}

/// The same payments for every run with this seed, those of an account spread over all of them.
fn payments(seed: u64, count: u64) -> Vec<Payment> {
    let mut random = StdRng::seed_from_u64(seed);
    let mut per_account = HashMap::new();
    let payment = |id| {
        let account = random.gen_range(0..ACCOUNTS);
        let nth = per_account.entry(account).or_insert(0);
        *nth += 1;
        Payment {
            id,
            account,
            nth: *nth,
            cents: random.gen_range(-10_000..=10_000),
        }
    };
    (0..count).map(payment).collect()
}

fn publish(server: &Server, stream: &str, payments: &[Payment]) {
    let entries = payments.iter().map(|payment| {
        let body = serde_json::to_string(payment).unwrap();
        vec![("_payload", body), ("h:account", key(payment.account))]
    });
    server.xadd_many(stream, entries);
}

fn key(account: u64) -> String {
    format!("acct-{account}")
}

// ---- the accounts -----------------------------------------------------------------------------------

struct Accounts(Connection);

#[derive(Debug, PartialEq)]
enum Posted {
    Booked,
    Before,
    IsFrozen,
}

impl Accounts {
    fn open(file: &Path) -> Accounts {
        let database = Connection::open(file).unwrap();
        database.busy_timeout(LATER).unwrap();
        // What survives the process is enough here: the machine does not lose its power.
        let tables = "PRAGMA journal_mode = WAL;
             PRAGMA synchronous = OFF;
             CREATE TABLE IF NOT EXISTS payments (
                 id INTEGER PRIMARY KEY, account INTEGER, nth INTEGER
             );
             CREATE TABLE IF NOT EXISTS accounts (
                 id INTEGER PRIMARY KEY,
                 cents INTEGER NOT NULL DEFAULT 0,
                 frozen INTEGER NOT NULL DEFAULT FALSE
             );";
        database.execute_batch(tables).unwrap();
        Accounts(database)
    }

    fn post(&mut self, payment: &Payment, mut in_between: impl FnMut()) -> Posted {
        let begun = self
            .0
            .transaction_with_behavior(TransactionBehavior::Immediate);
        let transaction = begun.unwrap();
        if is_frozen(&transaction, payment.account) {
            return Posted::IsFrozen;
        }
        let number = "INSERT INTO payments (id, account, nth) VALUES (?1, ?2, ?3)
             ON CONFLICT (id) DO NOTHING";
        let number = transaction.prepare_cached(number).unwrap().execute(params![
            payment.id,
            payment.account,
            payment.nth
        ]);
        if number.unwrap() == 0 {
            return Posted::Before;
        }
        in_between();
        let balance = "INSERT INTO accounts (id, cents) VALUES (?1, ?2)
             ON CONFLICT (id) DO UPDATE SET cents = cents + excluded.cents";
        let mut balance = transaction.prepare_cached(balance).unwrap();
        balance
            .execute(params![payment.account, payment.cents])
            .unwrap();
        drop(balance);
        transaction.commit().unwrap();
        Posted::Booked
    }

    fn set_frozen(&self, account: u64, frozen: bool) {
        let set = "INSERT INTO accounts (id, frozen) VALUES (?1, ?2)
             ON CONFLICT (id) DO UPDATE SET frozen = excluded.frozen";
        self.0.execute(set, params![account, frozen]).unwrap();
    }

    fn balance(&self, account: u64) -> i64 {
        let cents = "SELECT cents FROM accounts WHERE id = ?1";
        let cents = self.0.query_row(cents, [account], |row| row.get(0));
        cents.optional().unwrap().unwrap_or(0)
    }

    fn balances(&self) -> BTreeMap<u64, i64> {
        let all = "SELECT id, cents FROM accounts";
        let mut all = self.0.prepare(all).unwrap();
        let rows = all.query_map([], |row| Ok((row.get(0)?, row.get(1)?)));
        rows.unwrap().map(Result::unwrap).collect()
    }

    fn booked(&self) -> u64 {
        let count = "SELECT count(*) FROM payments";
        self.0.query_row(count, [], |row| row.get(0)).unwrap()
    }
}

fn is_frozen(database: &Connection, account: u64) -> bool {
    let frozen = "SELECT frozen FROM accounts WHERE id = ?1";
    let mut frozen = database.prepare_cached(frozen).unwrap();
    let frozen = frozen.query_row([account], |row| row.get(0)).optional();
    frozen.unwrap().unwrap_or(false)
}

/// The balances after all payments, one after the other, with nothing that goes wrong.
fn in_sequence(payments: &[Payment]) -> BTreeMap<u64, i64> {
    let mut accounts = Accounts::open(Path::new(":memory:"));
    for payment in payments {
        assert_eq!(accounts.post(payment, || ()), Posted::Booked);
    }
    accounts.balances()
}

// ---- the actors -------------------------------------------------------------------------------------

enum LedgerMessage {
    Posted(Delivery<Payment>),
    /// Answered with the balance.
    Freeze(u64, RpcReplyPort<i64>),
    Thaw(u64, RpcReplyPort<()>),
    Balance(u64, RpcReplyPort<i64>),
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
struct Config {
    file: PathBuf,
    seed: u64,
    /// Each attempt that an actor began with, in order.
    began: Arc<Mutex<Vec<(Payment, u64)>>>,
    /// How often a payment was held back, by account.
    held: Arc<Mutex<HashMap<u64, u64>>>,
}

impl Config {
    fn new(file: PathBuf, seed: u64) -> Self {
        Config {
            file,
            seed,
            began: Arc::default(),
            held: Arc::default(),
        }
    }

    /// Where this attempt ends in a panic, if it does: the same in every run with this seed.
    fn panics_at(&self, payment: &Payment, attempt: u64) -> Option<Moment> {
        let seed = self.seed ^ (payment.id * 1_000 + attempt).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let mut random = StdRng::seed_from_u64(seed);
        // A frozen account has a payment come many times, and each time could be the one.
        if attempt > 5 || random.gen_range(0..PANICS) > 0 {
            return None;
        }
        let moments = [Moment::Before, Moment::Within, Moment::After];
        Some(moments[random.gen_range(0..moments.len())])
    }

    fn held(&self, account: u64) -> u64 {
        lock(&self.held).get(&account).copied().unwrap_or(0)
    }
}

/// Of the transaction.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Moment {
    Before,
    Within,
    /// And before the verdict.
    After,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Actor for Ledger {
    type Msg = LedgerMessage;
    type State = (Accounts, Config);
    type Arguments = Config;

    async fn pre_start(
        &self,
        _: ActorRef<LedgerMessage>,
        config: Config,
    ) -> Result<Self::State, ActorProcessingErr> {
        Ok((block_in_place(|| Accounts::open(&config.file)), config))
    }

    async fn handle(
        &self,
        _: ActorRef<LedgerMessage>,
        message: LedgerMessage,
        (accounts, config): &mut Self::State,
    ) -> Result<(), ActorProcessingErr> {
        block_in_place(|| match message {
            LedgerMessage::Posted(delivery) => post(delivery, accounts, config),
            // Whoever asked may have given up.
            LedgerMessage::Freeze(account, reply) => {
                accounts.set_frozen(account, true);
                let _ = reply.send(accounts.balance(account));
            }
            LedgerMessage::Thaw(account, reply) => {
                accounts.set_frozen(account, false);
                let _ = reply.send(());
            }
            LedgerMessage::Balance(account, reply) => {
                let _ = reply.send(accounts.balance(account));
            }
        });
        Ok(())
    }
}

fn post(delivery: Delivery<Payment>, accounts: &mut Accounts, config: &Config) {
    let payment = *delivery.message();
    let attempt = delivery.context().attempt();
    lock(&config.began).push((payment, attempt));
    let moment = config.panics_at(&payment, attempt);
    let panic_at = |now| {
        if moment == Some(now) {
            std::panic::panic_any(ON_PURPOSE);
        }
    };
    panic_at(Moment::Before);
    let posted = accounts.post(&payment, || panic_at(Moment::Within));
    panic_at(Moment::After);
    if posted == Posted::IsFrozen {
        *lock(&config.held).entry(payment.account).or_default() += 1;
        delivery.retry_after(HELD_FOR);
    } else {
        delivery.ack();
    }
}

const ON_PURPOSE: &str = "this test wants a panic";

/// The panics that are wanted are many, and say nothing.
fn say_nothing_of_panics_on_purpose() {
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        if panic.payload().downcast_ref() != Some(&ON_PURPOSE) {
            usual(panic);
        }
    }));
}

fn ledger(draft: Draft, config: &Config) -> Subscription {
    let config = config.clone();
    draft
        .workers(4)
        .ordered_by("account")
        .retry(RetryPolicy::exponential(ms(5)).max_delay(ms(50)))
        .actors(move |_| (Ledger, config.clone()))
}

fn folder() -> (TempDir, PathBuf) {
    let folder = tempfile::Builder::new().prefix("ledger-").tempdir();
    let folder = folder.expect("the temporary directory should be writable");
    let file = folder.path().join("ledger.db");
    (folder, file)
}

/// The group has had everything, and nothing of it is pending.
fn is_done(server: &Server, stream: &str) -> bool {
    let groups = server.command(&["XINFO", "GROUPS", stream]);
    let group = groups.as_array()[0].as_array();
    let of = |name: &str| {
        let found = group.chunks(2).find(|pair| pair[0].as_str() == name);
        &found.expect("XINFO GROUPS should have it")[1]
    };
    of("pending").as_int() == 0 && of("lag").as_int() == 0
}

// ---- in one process ---------------------------------------------------------------------------------

/// Calls again until somebody answers: an actor that dies takes the calls in its mailbox with it, and what is
/// asked for here comes to the same the second time.
async fn insist<R: Send + 'static>(
    ledger: &HandlerRef<LedgerMessage>,
    account: u64,
    ask: impl Fn(RpcReplyPort<R>) -> LedgerMessage,
) -> R {
    loop {
        match ledger.call_keyed(key(account), &ask, LATER).await {
            Ok(answer) => return answer,
            Err(CallError::NoReply { .. }) => {}
            Err(error) => panic!("{error}"),
        }
    }
}

/// Freezes accounts one after the other, each until a payment to it was held back.
async fn freeze_some(ledger: HandlerRef<LedgerMessage>, config: Config, accounts: u64) -> u64 {
    let mut random = StdRng::seed_from_u64(config.seed);
    let mut frozen = 0;
    for _ in 0..accounts {
        let account = random.gen_range(0..ACCOUNTS);
        let held = config.held(account);
        let balance = insist(&ledger, account, |it| LedgerMessage::Freeze(account, it)).await;
        // Fails if no more payments come: then it was frozen too late.
        eventually(LATER, "a payment should be held back", || {
            config.held(account) > held
        })
        .await;
        let now = insist(&ledger, account, |it| LedgerMessage::Balance(account, it)).await;
        assert_eq!(now, balance, "account {account} was frozen");
        insist(&ledger, account, |it| LedgerMessage::Thaw(account, it)).await;
        frozen += 1;
    }
    frozen
}

#[tokio::test(flavor = "multi_thread")]
async fn a_ledger_is_right_to_the_cent_though_its_actors_panic_and_accounts_are_frozen() {
    const SEED: u64 = 2018;
    say_nothing_of_panics_on_purpose();
    let payments = payments(SEED, 20_000);
    let server = Server::start(Server::default_version());
    let stream = stream_of(&server, "ledger");
    let (_folder, file) = folder();
    let config = Config::new(file, SEED);
    let tail = ledger(Subscription::tail(&stream).named("ledger"), &config);
    let supervisor = Supervisor::start(topology(&server.url()).subscribe(tail))
        .await
        .unwrap();
    let handlers = supervisor.handlers("ledger").unwrap();
    let freezing = tokio::spawn(freeze_some(handlers, config.clone(), 20));
    // Freezing goes on in between, however fast they are booked.
    let mut published = 0;
    for part in payments.chunks(1_000) {
        publish(&server, &stream, part);
        published += part.len();
        eventually(LATER, "most of them have begun", || {
            lock(&config.began).len() >= published - 500
        })
        .await;
    }
    // Should it still freeze accounts: what these get comes last.
    let mut extra = Vec::new();
    while !freezing.is_finished() {
        let next = (payments.len() + extra.len()) as u64;
        let more: Vec<Payment> = (0..ACCOUNTS)
            .map(|account| Payment {
                id: next + account,
                account,
                nth: next,
                cents: 1,
            })
            .collect();
        publish(&server, &stream, &more);
        extra.extend(more);
        eventually(LATER, "they have begun", || {
            lock(&config.began).len() >= payments.len() + extra.len() || freezing.is_finished()
        })
        .await;
    }
    assert_eq!(freezing.await.unwrap(), 20);
    let payments = [payments, extra].concat();
    let accounts = Accounts::open(&config.file);
    eventually(LATER, "everything is booked", || {
        accounts.booked() == payments.len() as u64 && is_done(&server, &stream)
    })
    .await;
    let crashes = supervisor.status().await.subscriptions[0].restarts;
    assert!(crashes > 50, "only {crashes} panics");
    let report = supervisor.shutdown().await.unwrap();
    assert_eq!((report.left_running.len(), report.unsettled.len()), (0, 0));
    // Nothing is left, in hand or parked, that the end would have had to see to.
    assert_eq!((report.settled, report.given_back), (0, 0));
    assert!(is_done(&server, &stream));

    assert_eq!(accounts.balances(), in_sequence(&payments));
    let began = lock(&config.began).clone();
    assert_first_deliveries_are_in_order(&began, payments.len());
    // Every attempt came once: the first, then one more after each that failed.
    let mut attempts: HashMap<u64, Vec<u64>> = HashMap::new();
    for (payment, attempt) in &began {
        attempts.entry(payment.id).or_default().push(*attempt);
    }
    for (id, attempts) in attempts {
        let expected: Vec<u64> = (1..=attempts.len() as u64).collect();
        assert_eq!(attempts, expected, "payment {id}");
    }
}

#[track_caller]
fn assert_first_deliveries_are_in_order(began: &[(Payment, u64)], payments: usize) {
    let mut last: HashMap<u64, u64> = HashMap::new();
    let mut count = 0;
    for (payment, _) in began.iter().filter(|(_, attempt)| *attempt == 1) {
        let last = last.entry(payment.account).or_insert(0);
        assert!(
            payment.nth > *last,
            "account {}: payment {} came after payment {last}",
            payment.account,
            payment.nth
        );
        *last = payment.nth;
        count += 1;
    }
    assert_eq!(count, payments);
}

// ---- processes that are killed ----------------------------------------------------------------------

/// A process of its own that keeps the ledger: this executable, run again for `ledger_process` alone.
/// Dropping it kills it.
struct Process(Child);

impl Process {
    fn start(server: &Server, stream: &str, file: &Path) -> Process {
        let this = std::env::current_exe().expect("the path of this test");
        let child = Command::new(this)
            .args(["--exact", "ledger_process", "--nocapture"])
            .env("STREAMVISOR_LEDGER", file)
            .env("STREAMVISOR_URL", server.url())
            .env("STREAMVISOR_STREAM", stream)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        Process(child.expect("this test should be able to run itself"))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The process behind [`Process`]. As a test of its own it does nothing.
#[test]
fn ledger_process() {
    let Some(file) = std::env::var_os("STREAMVISOR_LEDGER") else {
        return;
    };
    let of = |name: &str| std::env::var(name).expect("the test that starts it says it");
    let (url, stream) = (of("STREAMVISOR_URL"), of("STREAMVISOR_STREAM"));
    // It ends with the test that started it.
    std::thread::spawn(|| {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        std::process::exit(0);
    });
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .unwrap();
    let config = Config::new(PathBuf::from(file), 7);
    let reclaim = Subscription::reclaim(&stream, Duration::from_secs(1)).block(ms(50));
    let topology = topology(&url)
        .subscribe(ledger(Subscription::tail(&stream), &config))
        .subscribe(ledger(reclaim, &config));
    runtime.block_on(async {
        let supervisor = Supervisor::start(topology).await.unwrap();
        supervisor.wait().await.unwrap();
    });
}

#[tokio::test(flavor = "multi_thread")]
async fn a_ledger_is_right_to_the_cent_though_its_processes_are_killed() {
    let payments = payments(3, 6_000);
    let server = Server::start(Server::default_version());
    let stream = stream_of(&server, "killed");
    let (_folder, file) = folder();
    publish(&server, &stream, &payments);
    let accounts = Accounts::open(&file);
    for kill in 1..=2 {
        let process = Process::start(&server, &stream, &file);
        eventually(LATER, "many are booked", || {
            accounts.booked() >= kill * 1_500
        })
        .await;
        drop(process);
        assert!(!is_done(&server, &stream), "it was killed too late");
    }
    let _process = Process::start(&server, &stream, &file);
    eventually(LATER, "all is done", || is_done(&server, &stream)).await;
    assert_eq!(accounts.booked(), payments.len() as u64);
    assert_eq!(accounts.balances(), in_sequence(&payments));
}
