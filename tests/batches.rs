//! Entries that are handled several at a time.

mod support;

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use streamvisor::prelude::*;
use streamvisor::{Event, SubscriptionStatus};
use support::pending::AGES;
use support::record::{GROUP, Gate, Heard, SOON, fill, ms, stream_of, topology};
use support::*;

type Answer = Result<Vec<Outcome>, BoxError>;
type Answering = dyn Fn(Call) -> Pin<Box<dyn Future<Output = Answer> + Send>> + Send + Sync;

/// One call of the batch handler.
#[derive(Debug, Clone)]
struct Call {
    worker: usize,
    /// The how many-th worker it is that was started.
    state: usize,
    /// The how many-th call with this state it is, from 0.
    nth: usize,
    entries: Vec<Got>,
}

#[derive(Debug, Clone)]
struct Got {
    id: EntryId,
    number: u64,
    attempt: u64,
    delivery_count: u64,
    key: Option<String>,
}

impl Call {
    fn numbers(&self) -> Vec<u64> {
        self.entries.iter().map(|got| got.number).collect()
    }

    fn has(&self, number: u64) -> bool {
        self.entries.iter().any(|got| got.number == number)
    }

    fn is_first(&self) -> bool {
        self.entries.iter().all(|got| got.attempt == 1)
    }

    fn acks(&self) -> Answer {
        Ok(vec![Outcome::Ack; self.entries.len()])
    }
}

/// A batch handler of numbers that remembers every call. Clones share what they remember.
#[derive(Clone)]
struct Batches {
    log: Arc<Mutex<Log>>,
    may_start: Gate,
    answer: Arc<Answering>,
}

#[derive(Default)]
struct Log {
    calls: Vec<Call>,
    running: usize,
    started: usize,
    stopped: Vec<usize>,
}

struct State {
    worker: usize,
    number: usize,
    calls: usize,
}

impl Batches {
    fn acking() -> Self {
        Batches::answering(Call::acks)
    }

    /// Answers at once.
    fn answering(answer: impl Fn(&Call) -> Answer + Send + Sync + 'static) -> Self {
        Batches::running(move |call| std::future::ready(answer(&call)))
    }

    /// Waits for the gate in every call, then acknowledges.
    fn behind(gate: &Gate) -> Self {
        let gate = gate.clone();
        Batches::running(move |call| {
            let gate = gate.clone();
            async move {
                gate.passed().await;
                call.acks()
            }
        })
    }

    fn running<F>(answer: impl Fn(Call) -> F + Send + Sync + 'static) -> Self
    where
        F: Future<Output = Answer> + Send + 'static,
    {
        let may_start = Gate::closed();
        may_start.open();
        Batches {
            log: Arc::default(),
            may_start,
            answer: Arc::new(move |call| Box::pin(answer(call))),
        }
    }

    fn log(&self) -> MutexGuard<'_, Log> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn calls(&self) -> Vec<Call> {
        self.log().calls.clone()
    }

    /// How many entries the calls had.
    fn entries(&self) -> usize {
        self.log().calls.iter().map(|call| call.entries.len()).sum()
    }

    /// The numbers in the order in which they came.
    fn numbers(&self) -> Vec<u64> {
        self.calls().iter().flat_map(Call::numbers).collect()
    }

    /// The attempts at each number, in their order.
    fn attempts(&self) -> HashMap<u64, Vec<u64>> {
        let mut attempts: HashMap<u64, Vec<u64>> = HashMap::new();
        for got in self.calls().iter().flat_map(|call| &call.entries) {
            attempts.entry(got.number).or_default().push(got.attempt);
        }
        attempts
    }

    #[track_caller]
    fn reaches(&self, entries: usize) -> impl Future<Output = ()> {
        let (batches, caller) = (self.clone(), std::panic::Location::caller());
        async move {
            let what = format!("{entries} entries in batches (at {caller})");
            eventually(SOON, &what, || batches.entries() >= entries).await;
        }
    }
}

/// Counts a call for as long as it runs, however it ends.
struct Running<'a>(&'a Batches);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.log().running -= 1;
    }
}

impl BatchHandler for Batches {
    type Message = u64;
    type State = State;

    async fn start(&self, worker: Worker) -> Result<State, BoxError> {
        self.may_start.passed().await;
        let mut log = self.log();
        log.started += 1;
        Ok(State {
            worker: worker.index(),
            number: log.started,
            calls: 0,
        })
    }

    async fn handle_batch(&self, batch: Vec<(u64, Context)>, state: &mut State) -> Answer {
        let entries = batch.iter().map(|(number, context)| Got {
            id: context.id(),
            number: *number,
            attempt: context.attempt(),
            delivery_count: context.delivery_count(),
            key: context.headers().get_str("key").map(str::to_owned),
        });
        let call = Call {
            worker: state.worker,
            state: state.number,
            nth: state.calls,
            entries: entries.collect(),
        };
        state.calls += 1;
        {
            let mut log = self.log();
            log.calls.push(call.clone());
            log.running += 1;
        }
        let _running = Running(self);
        (self.answer)(call).await
    }

    async fn stop(&self, state: State) {
        self.log().stopped.push(state.worker);
    }
}

/// A subscription whose retries come at once.
fn draft(stream: &str) -> Draft {
    Subscription::tail(stream)
        .workers(1)
        .block(ms(200))
        .retry(RetryPolicy::exponential(ms(1)).max_delay(ms(1)))
}

async fn start(server: &Server, subscription: Subscription) -> SupervisorHandle {
    let topology = topology(&server.url()).subscribe(subscription);
    Supervisor::start(topology).await.expect("it should start")
}

async fn status(supervisor: &SupervisorHandle) -> SubscriptionStatus {
    supervisor.status().await.subscriptions[0].clone()
}

async fn all_settled(server: &Server, stream: &str) {
    let what = "nothing should be pending";
    eventually(SOON, what, || server.xpending_count(stream, GROUP) == 0).await;
}

// ---- what comes in a batch --------------------------------------------------------------------------

#[tokio::test]
async fn a_call_has_what_is_there_and_never_more_than_a_batch() {
    let server = Server::start(Server::default_version());
    let stream = stream_of(&server, "full");
    fill(&server, &stream, 1_000);
    let gate = Gate::closed();
    let batches = Batches::behind(&gate);
    let supervisor = start(
        &server,
        draft(&stream).batch(7).handle_batch(batches.clone()),
    )
    .await;
    // Behind the first call there is enough for many full ones.
    loop {
        let status = status(&supervisor).await;
        if status.waiting >= 70 {
            break;
        }
    }
    gate.open();
    batches.reaches(1_000).await;
    all_settled(&server, &stream).await;
    let sizes: Vec<usize> = batches.calls().iter().map(|it| it.entries.len()).collect();
    assert!(sizes.iter().all(|size| (1..=7).contains(size)), "{sizes:?}");
    assert!(sizes[1..=10].iter().all(|size| *size == 7), "{sizes:?}");
    assert_eq!(batches.numbers(), (0..1_000).collect::<Vec<_>>());

    // Nobody waits for a batch to fill up.
    let before = batches.calls().len();
    server.xadd(&stream, &[("_payload", "1000")]);
    batches.reaches(1_001).await;
    assert_eq!(batches.calls()[before..].len(), 1);
    all_settled(&server, &stream).await;
    supervisor.shutdown().await.unwrap();
}

#[tokio::test]
async fn an_entry_that_cannot_be_decoded_is_left_out_and_dead_and_the_others_are_one_batch() {
    let server = Server::start(Server::default_version());
    let stream = stream_of(&server, "undecodable");
    let bodies = ["0", "1", "no number", "3", "", "5"];
    let ids = server.xadd_many(&stream, bodies.map(|body| vec![("_payload", body)]));
    let batches = Batches::acking();
    let subscription = draft(&stream)
        .batch(6)
        .dead_letter("dead")
        .handle_batch(batches.clone());
    let supervisor = start(&server, subscription).await;
    // Before they are read nothing is pending either.
    batches.reaches(4).await;
    all_settled(&server, &stream).await;
    let calls = batches.calls();
    assert_eq!(calls.len(), 1, "{calls:?}");
    assert_eq!(calls[0].numbers(), [0, 1, 3, 5]);
    let dead = server.xrange("dead");
    let of = |name: &[u8]| -> Vec<String> {
        let fields = dead.iter().flat_map(|entry| &entry.1);
        let found = fields.filter(|(field, _)| field == name);
        found
            .map(|(_, value)| String::from_utf8(value.clone()).unwrap())
            .collect()
    };
    assert_eq!(of(b"h:dead-entry-id"), [&*ids[2], &*ids[4]]);
    assert_eq!(of(b"h:dead-reason"), ["cannot be decoded"; 2]);

    // A batch of nothing but these is none.
    server.xadd(&stream, &[("_payload", "nor this")]);
    eventually(SOON, "it should be dead", || server.xlen("dead") == 3).await;
    server.xadd(&stream, &[("_payload", "7")]);
    batches.reaches(5).await;
    assert_eq!(batches.numbers(), [0, 1, 3, 5, 7]);
    supervisor.shutdown().await.unwrap();
}

#[tokio::test]
async fn recovered_entries_come_alone_and_counted() {
    let server = Server::start(Server::default_version());
    let stream = unique("recovered");
    server.add_numbers(&stream, 0..5);
    let left = server.leave_behind(&stream, GROUP, "dead");
    server.give_to(&stream, GROUP, "dead", &left[2], (AGES, 4));
    let gate = Gate::closed();
    let batches = Batches::behind(&gate);
    let subscription = Subscription::reclaim(&stream, ms(1000))
        .workers(1)
        .batch(100)
        .handle_batch(batches.clone());
    let supervisor = start(&server, subscription).await;
    batches.reaches(1).await;
    // Its neighbours have not started, and would not be blamed if this one ended the process.
    let counts: Vec<i64> = server
        .xpending(&stream, GROUP)
        .iter()
        .map(|it| it.3)
        .collect();
    assert_eq!(counts, [2, 1, 4, 1, 1]);
    gate.open();
    batches.reaches(5).await;
    all_settled(&server, &stream).await;
    let calls = batches.calls();
    let counts = calls.iter().map(|call| match &call.entries[..] {
        [got] => (got.number, got.delivery_count, got.attempt),
        several => panic!("{several:?}"),
    });
    let expected = [(0, 2, 2), (1, 2, 2), (2, 5, 5), (3, 2, 2), (4, 2, 2)];
    assert_eq!(counts.collect::<Vec<_>>(), expected);
    supervisor.shutdown().await.unwrap();
}

#[tokio::test]
async fn what_a_reader_of_ordered_entries_reads_waits_for_workers_that_are_slow_to_start() {
    let server = Server::start(Server::default_version());
    let stream = stream_of(&server, "slow-start");
    fill(&server, &stream, 10);
    let mut batches = Batches::acking();
    batches.may_start = Gate::closed();
    let subscription = draft(&stream)
        .workers(2)
        .ordered_by("key")
        .handle_batch(batches.clone());
    let supervisor = start(&server, subscription).await;
    eventually(SOON, "the reader should be connected", || {
        let clients = server.client_list();
        let reader = clients.iter().find(|it| it.contains("-reader-"));
        reader.is_some_and(|reader| reader.contains(" cmd=ping "))
    })
    .await;
    // Both ask the server, and the reader was there first.
    status(&supervisor).await;
    batches.may_start.open();
    batches.reaches(10).await;
    all_settled(&server, &stream).await;
    supervisor.shutdown().await.unwrap();
}

// ---- verdicts ---------------------------------------------------------------------------------------

#[tokio::test]
async fn every_entry_of_a_batch_gets_the_verdict_in_its_place() {
    let server = Server::start(Server::default_version());
    let stream = stream_of(&server, "verdicts");
    fill(&server, &stream, 7);
    let batches = Batches::answering(|call| {
        if !call.is_first() {
            return call.acks();
        }
        let verdicts = call.entries.iter().map(|got| match got.number {
            1 => Outcome::Retry,
            2 => Outcome::RetryAfter(ms(5)),
            3 => Outcome::Reject,
            4 => Outcome::DeadLetter("unwanted".to_owned()),
            5 => Outcome::LeavePending,
            _ => Outcome::Ack,
        });
        Ok(verdicts.collect())
    });
    let subscription = draft(&stream)
        .batch(7)
        .dead_letter("dead")
        .handle_batch(batches.clone());
    let supervisor = start(&server, subscription).await;
    // 7 and the copies of 1 and 2.
    batches.reaches(9).await;
    eventually(SOON, "one should be left", || {
        server.xpending_count(&stream, GROUP) == 1
    })
    .await;
    assert_eq!(batches.calls()[0].numbers(), (0..7).collect::<Vec<_>>());
    let verdicts = status(&supervisor).await.verdicts;
    assert_eq!(
        (
            verdicts.acknowledged,
            verdicts.retried,
            verdicts.delayed,
            verdicts.rejected,
            verdicts.dead_lettered,
            verdicts.left_pending
        ),
        (4, 1, 1, 1, 1, 1)
    );
    let attempts = batches.attempts();
    let twice = (0..7).filter(|number| attempts[number] == [1, 2]);
    assert_eq!(twice.collect::<Vec<_>>(), [1, 2]);
    let left = &batches.calls()[0].entries[5];
    assert_eq!(server.xpending(&stream, GROUP)[0].0, left.id.to_string());
    let dead = server.xrange("dead");
    assert!(dead[0].1.contains(&(b"_payload".to_vec(), b"4".to_vec())));
    supervisor.shutdown().await.unwrap();
}

/// Whatever this answers to the first call is a failed attempt of all its entries, with this text.
async fn the_whole_batch_has_failed(text: &str, answer: fn(&Call) -> Answer) {
    let server = Server::start(Server::default_version());
    let stream = stream_of(&server, "failed");
    fill(&server, &stream, 5);
    let batches = Batches::answering(move |call| match call.is_first() {
        true => answer(call),
        false => call.acks(),
    });
    let subscription = draft(&stream).batch(5).handle_batch(batches.clone());
    let supervisor = start(&server, subscription).await;
    let heard = Heard::of(&supervisor);
    batches.reaches(10).await;
    all_settled(&server, &stream).await;
    assert_eq!(batches.calls()[0].numbers(), [0, 1, 2, 3, 4]);
    let attempts = batches.attempts();
    assert!((0..5).all(|it| attempts[&it] == [1, 2]), "{attempts:?}");
    let copies = server.xrange(&stream).split_off(5);
    let error = (b"h:retry-error".to_vec(), text.as_bytes().to_vec());
    assert_eq!(copies.len(), 5);
    for (id, fields) in copies {
        assert!(fields.contains(&error), "{id}: {fields:?}");
    }
    let verdicts = status(&supervisor).await.verdicts;
    assert_eq!((verdicts.acknowledged, verdicts.delayed), (5, 5));
    // The worker goes on with the state it has.
    heard.assert_nobody_crashed();
    assert_eq!(batches.log().started, 1);
    supervisor.shutdown().await.unwrap();
}

#[tokio::test]
async fn an_error_is_a_failed_attempt_of_every_entry_of_the_batch() {
    the_whole_batch_has_failed("no database", |_| Err("no database".into())).await;
}

#[tokio::test]
async fn too_few_too_many_and_no_verdicts_are_a_failed_attempt_of_every_entry_of_the_batch() {
    let text = |given| format!("the batch handler gave {given} verdicts for 5 entries");
    the_whole_batch_has_failed(&text(4), |_| Ok(vec![Outcome::Ack; 4])).await;
    the_whole_batch_has_failed(&text(6), |_| Ok(vec![Outcome::Ack; 6])).await;
    the_whole_batch_has_failed(&text(0), |_| Ok(Vec::new())).await;
}

// ---- crashes ----------------------------------------------------------------------------------------

#[tokio::test]
async fn a_panic_is_the_crash_verdict_on_the_entries_of_its_batch_and_no_others() {
    let server = Server::start(Server::default_version());
    let stream = stream_of(&server, "panics");
    let gate = Gate::closed();
    let batches = Batches::running({
        let gate = gate.clone();
        move |call| {
            let gate = gate.clone();
            async move {
                gate.passed().await;
                assert!(!call.has(13), "this test wants a panic");
                call.acks()
            }
        }
    });
    fill(&server, &stream, 40);
    let subscription = draft(&stream)
        .batch(5)
        .on_crash(OnCrash::DeadLetter)
        .dead_letter("dead")
        .handle_batch(batches.clone());
    let supervisor = start(&server, subscription).await;
    let heard = Heard::of(&supervisor);
    loop {
        if status(&supervisor).await.in_flight >= 40 {
            break;
        }
    }
    gate.open();
    batches.reaches(40).await;
    all_settled(&server, &stream).await;

    let calls = batches.calls();
    let died = calls.iter().find(|call| call.has(13)).unwrap();
    assert_eq!(died.numbers(), [10, 11, 12, 13, 14]);
    let dead: Vec<_> = server.xrange("dead");
    let bodies: Vec<&[u8]> = dead.iter().map(|entry| &*entry.1[0].1).collect();
    assert_eq!(bodies, [b"10", b"11", b"12", b"13", b"14"]);
    // Each once, in order: nothing that lay behind that batch was touched.
    assert_eq!(batches.numbers(), (0..40).collect::<Vec<_>>());
    // The worker was started again, with a state of its own.
    let after = calls
        .iter()
        .skip_while(|call| !call.has(13))
        .nth(1)
        .unwrap();
    assert_eq!((died.state, after.state, after.nth), (1, 2, 0));
    assert!(calls.iter().all(|call| call.worker == 0));
    let crashes = heard.count(|event| matches!(event, Event::Crashed { .. }));
    let restarts = heard.count(|event| matches!(event, Event::Restarted { .. }));
    assert_eq!((crashes, restarts), (1, 1));
    assert_eq!(batches.log().stopped, [0; 0]);
    supervisor.shutdown().await.unwrap();
    assert_eq!(batches.log().stopped, [0]);
}

#[tokio::test]
async fn after_a_panic_the_batch_comes_again_one_attempt_higher() {
    let server = Server::start(Server::default_version());
    let stream = stream_of(&server, "again");
    fill(&server, &stream, 10);
    let batches = Batches::answering(|call| {
        assert!(!call.has(3) || !call.is_first(), "this test wants a panic");
        call.acks()
    });
    let subscription = draft(&stream).batch(5).handle_batch(batches.clone());
    let supervisor = start(&server, subscription).await;
    batches.reaches(15).await;
    all_settled(&server, &stream).await;
    let attempts = batches.attempts();
    for number in 0..10 {
        let expected: &[u64] = if number < 5 { &[1, 2] } else { &[1] };
        assert_eq!(attempts[&number], expected, "{number}");
    }
    supervisor.shutdown().await.unwrap();
}

// ---- order ------------------------------------------------------------------------------------------

#[tokio::test(flavor = "multi_thread")]
async fn the_order_of_every_key_is_kept_within_batches_and_across_them() {
    const ENTRIES: u64 = 3_000;
    const KEYS: u64 = 20;
    let server = Server::start(Server::default_version());
    let stream = stream_of(&server, "ordered");
    let keyed = (0..ENTRIES).map(|n| {
        let key = format!("k{}", n * 7 % KEYS);
        vec![("_payload", n.to_string()), ("h:key", key)]
    });
    server.xadd_many(&stream, keyed);
    // Calls take longer for some workers than for others.
    let batches = Batches::running(|call| async move {
        for _ in 0..call.worker * 20 {
            tokio::task::yield_now().await;
        }
        call.acks()
    });
    let subscription = draft(&stream)
        .workers(4)
        .batch(50)
        .ordered_by("key")
        .handle_batch(batches.clone());
    let supervisor = start(&server, subscription).await;
    batches.reaches(ENTRIES as usize).await;
    all_settled(&server, &stream).await;
    let calls = batches.calls();
    let mut of_key: HashMap<String, (usize, Vec<u64>)> = HashMap::new();
    for call in &calls {
        for got in &call.entries {
            let of_key = of_key.entry(got.key.clone().unwrap());
            let (worker, numbers) = of_key.or_insert((call.worker, Vec::new()));
            assert_eq!(*worker, call.worker, "{:?} was with two workers", got.key);
            numbers.push(got.number);
        }
    }
    assert_eq!(of_key.len() as u64, KEYS);
    for (key, (_, numbers)) in &of_key {
        assert_eq!(numbers.len() as u64, ENTRIES / KEYS);
        assert!(numbers.is_sorted(), "{key}: {numbers:?}");
    }
    assert!(calls.iter().any(|call| call.entries.len() > 1));
    supervisor.shutdown().await.unwrap();
}

// ---- batches that hang ------------------------------------------------------------------------------

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_that_waits_past_its_deadline_is_ended_and_all_of_it_comes_again() {
    let server = Server::start(Server::default_version());
    let stream = stream_of(&server, "hangs");
    fill(&server, &stream, 10);
    let batches = Batches::running(|call| async move {
        if call.has(2) && call.is_first() {
            std::future::pending::<()>().await;
        }
        call.acks()
    });
    let subscription = draft(&stream)
        .batch(5)
        .handler_timeout(ms(300))
        .handle_batch(batches.clone());
    let supervisor = start(&server, subscription).await;
    let heard = Heard::of(&supervisor);
    batches.reaches(15).await;
    all_settled(&server, &stream).await;
    assert_eq!(batches.calls()[0].numbers(), [0, 1, 2, 3, 4]);
    let attempts = batches.attempts();
    for number in 0..10 {
        let expected: &[u64] = if number < 5 { &[1, 2] } else { &[1] };
        assert_eq!(attempts[&number], expected, "{number}");
    }
    let crashes = heard.pick(|event| match event {
        Event::Crashed { error, .. } => Some(error.clone()),
        _ => None,
    });
    assert_eq!(crashes.len(), 1);
    assert!(crashes[0].contains("deadline"), "{crashes:?}");
    assert_eq!(batches.log().running, 0);
    assert_eq!(batches.log().started, 2);
    supervisor.shutdown().await.unwrap();
}

/// What a call blocks its thread with, until the test has ended at the latest.
#[derive(Clone, Default)]
struct Blockade(Arc<AtomicBool>);

impl Blockade {
    fn stand(&self) {
        while !self.0.load(Ordering::SeqCst) {
            std::thread::sleep(ms(5));
        }
    }

    fn end(&self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

struct EndOf(Blockade);

impl Drop for EndOf {
    fn drop(&mut self) {
        self.0.end();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_batch_that_blocks_its_thread_past_its_deadline_loses_all_its_entries_to_others() {
    let server = Server::start(Server::default_version());
    let stream = stream_of(&server, "blocks");
    let ids = fill(&server, &stream, 5);
    let blockade = Blockade::default();
    let _end = EndOf(blockade.clone());
    let batches = Batches::answering({
        let blockade = blockade.clone();
        move |call| {
            if call.has(2) {
                blockade.stand();
            }
            Ok(vec![Outcome::Retry; call.entries.len()])
        }
    });
    let here = Batches::acking();
    let tail = draft(&stream).batch(5).handler_timeout(ms(300));
    // Its own process looks more often than the other, and must not start anything of it meanwhile.
    let own = Subscription::reclaim(&stream, ms(300)).block(ms(50));
    let supervisor = Supervisor::start(
        topology(&server.url())
            .shutdown_timeout(Duration::from_secs(3))
            .subscribe(tail.handle_batch(batches.clone()))
            .subscribe(own.handle_batch(here.clone())),
    )
    .await
    .unwrap();
    let heard = Heard::of(&supervisor);
    let abandoned = || {
        let mut ids = heard.pick(|event| match event {
            Event::Abandoned { id, .. } => Some(id.to_string()),
            _ => None,
        });
        ids.sort_unstable();
        ids
    };
    eventually(SOON, "all of it is given up", || abandoned() == ids).await;
    assert_eq!(batches.calls()[0].numbers(), [0, 1, 2, 3, 4]);
    // Its worker was replaced, and does not get them either.
    eventually(SOON, "there is another worker", || {
        batches.log().started == 2
    })
    .await;

    let there = Batches::acking();
    let reclaim = Subscription::reclaim(&stream, Duration::from_secs(2)).block(ms(50));
    let reclaim = reclaim.workers(1).handle_batch(there.clone());
    let other = start(&server, reclaim).await;
    there.reaches(5).await;
    all_settled(&server, &stream).await;
    let attempts = there.attempts();
    assert!((0..5).all(|it| attempts[&it] == [2]), "{attempts:?}");
    assert_eq!(here.entries(), 0, "they ran twice at a time here");
    assert_eq!((batches.entries(), batches.log().running), (5, 1));

    blockade.end();
    eventually(SOON, "the call ends", || batches.log().running == 0).await;
    supervisor.shutdown().await.unwrap();
    other.shutdown().await.unwrap();
    // What the call said in the end is not heard: no copy is made of what is not ours.
    assert_eq!(server.xlen(&stream), 5);
    assert_eq!(
        (batches.entries(), there.entries(), here.entries()),
        (5, 5, 0)
    );
}

// ---- stopping, and taking long ----------------------------------------------------------------------

#[tokio::test]
async fn a_shutdown_lets_the_running_batch_finish_and_gives_the_rest_back() {
    let server = Server::start(Server::default_version());
    let stream = stream_of(&server, "stopping");
    fill(&server, &stream, 30);
    let gate = Gate::closed();
    let batches = Batches::behind(&gate);
    let subscription = draft(&stream).batch(5).handle_batch(batches.clone());
    let supervisor = start(&server, subscription).await;
    batches.reaches(1).await;
    let running = batches.entries();
    let stopping = tokio::spawn({
        let supervisor = supervisor.clone();
        async move { supervisor.shutdown().await }
    });
    eventually(SOON, "what waits should be given back", || {
        let pending = server.xpending(&stream, GROUP);
        let counts = pending.iter().map(|entry| entry.3);
        counts.filter(|count| *count == 1).count() == running
    })
    .await;
    gate.open();
    let report = stopping.await.unwrap().unwrap();
    assert_eq!((report.left_running.len(), report.unsettled.len()), (0, 0));
    assert_eq!(batches.entries(), running);
    assert_eq!(report.settled as usize, running);
    let pending = server.xpending(&stream, GROUP);
    assert_eq!(pending.len() as u64, report.given_back);
    assert!(pending.iter().all(|entry| entry.3 == 0), "{pending:?}");
    assert_eq!(batches.log().stopped, [0]);
}

#[tokio::test]
async fn a_batch_that_is_still_running_at_the_end_of_a_shutdown_stays_pending_all_of_it() {
    let server = Server::start(Server::default_version());
    let stream = stream_of(&server, "left-running");
    fill(&server, &stream, 5);
    let batches = Batches::behind(&Gate::closed());
    let topology = topology(&server.url())
        .shutdown_timeout(ms(300))
        .subscribe(draft(&stream).batch(5).handle_batch(batches.clone()));
    let supervisor = Supervisor::start(topology).await.unwrap();
    batches.reaches(5).await;
    let report = supervisor.shutdown().await.unwrap();
    assert_eq!((report.left_running.len(), report.settled), (5, 0));
    assert_eq!(server.xpending_count(&stream, GROUP), 5);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_that_takes_three_times_min_idle_is_taken_by_nobody() {
    const MIN_IDLE: Duration = Duration::from_millis(600);
    let server = Server::start(Server::default_version());
    let stream = stream_of(&server, "slow");
    fill(&server, &stream, 5);
    let gate = Gate::closed();
    let batches = Batches::behind(&gate);
    let (own, others) = (Batches::acking(), Batches::acking());
    let reclaim = || Subscription::reclaim(&stream, MIN_IDLE).block(ms(50));
    let supervisor = Supervisor::start(
        topology(&server.url())
            // It reads nothing more meanwhile.
            .subscribe(
                draft(&stream)
                    .batch(5)
                    .max_in_flight(5)
                    .handle_batch(batches.clone()),
            )
            .subscribe(reclaim().handle_batch(own.clone())),
    )
    .await
    .unwrap();
    let other = start(&server, reclaim().handle_batch(others.clone())).await;
    batches.reaches(5).await;
    // What somebody else has left meanwhile is reclaimed, three times over.
    for round in 1..=3 {
        let left = server.xadd(&stream, &[("_payload", "99")]);
        assert_eq!(server.read_as(&stream, GROUP, "dead", 1), [left]);
        eventually(SOON, "it should be reclaimed", || {
            own.entries() + others.entries() == round
        })
        .await;
    }
    assert_eq!(batches.log().running, 1);
    gate.open();
    all_settled(&server, &stream).await;
    assert_eq!(batches.numbers(), [0, 1, 2, 3, 4]);
    let reclaimed: Vec<u64> = [own.numbers(), others.numbers()].concat();
    assert_eq!(reclaimed, [99; 3]);
    supervisor.shutdown().await.unwrap();
    other.shutdown().await.unwrap();
}
