//! The number of a subscription's workers, changed while it runs.

mod support;

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use ractor::{Actor, ActorProcessingErr, ActorRef, RpcReplyPort};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use streamvisor::{
    ControlError, Delivery, Outcome, RetryPolicy, Subscription, Supervisor, SupervisorHandle,
    ractor,
};
use support::record::{GROUP, Gate, Recorder, SOON, fill, ms, stream_of, topology};
use support::*;

const NAME: &str = "resized";
const KEYS: u64 = 30;

async fn start(server: &Server, subscription: Subscription) -> SupervisorHandle {
    let topology = topology(&server.url()).subscribe(subscription);
    Supervisor::start(topology).await.expect("it should start")
}

fn fill_keyed(server: &Server, stream: &str, entries: u64) {
    let keyed = (0..entries).map(|n| {
        vec![
            ("_payload", n.to_string()),
            ("h:account", (n % KEYS).to_string()),
        ]
    });
    server.xadd_many(stream, keyed);
}

#[tokio::test]
async fn more_workers_take_up_what_waits_and_fewer_end_in_good_order() {
    let server = Server::start(Server::default_version());
    let stream = stream_of(&server, "resized");
    fill(&server, &stream, 12);
    let gate = Gate::closed();
    let recorder = Recorder::behind(&gate);
    let draft = Subscription::tail(&stream).named(NAME).workers(1);
    let supervisor = start(&server, recorder.on(draft)).await;
    recorder.reaches(1).await;
    supervisor.set_workers(NAME, 4).await.unwrap();
    recorder.reaches(4).await;
    assert_eq!(recorder.running_now(), 4);

    supervisor.set_workers(NAME, 2).await.unwrap();
    gate.open();
    recorder.reaches(12).await;
    eventually(SOON, "two should stop", || recorder.stopped().len() == 2).await;
    let mut stopped = recorder.stopped();
    stopped.sort_unstable();
    assert_eq!(stopped, [2, 3]);

    gate.close();
    fill(&server, &stream, 9);
    recorder.reaches(14).await;
    assert_eq!(recorder.running_now(), 2);
    // Those come again.
    supervisor.set_workers(NAME, 3).await.unwrap();
    recorder.reaches(15).await;
    gate.open();
    recorder.reaches(21).await;
    eventually(SOON, "all should be settled", || {
        server.xpending_count(&stream, GROUP) == 0
    })
    .await;
    assert_eq!((recorder.count(), recorder.distinct()), (21, 21));
    supervisor.shutdown().await.unwrap();
    assert_eq!(recorder.stopped().len(), recorder.started().len());
}

/// Changes the number of workers at random for as long as `goes_on`.
async fn resize_at_random(supervisor: &SupervisorHandle, seed: u64, goes_on: impl Fn() -> bool) {
    let mut random = StdRng::seed_from_u64(seed);
    let mut changes = 0;
    while goes_on() {
        let workers = random.gen_range(1..=9);
        supervisor.set_workers(NAME, workers).await.unwrap();
        changes += 1;
        tokio::time::sleep(ms(random.gen_range(0..5))).await;
    }
    assert!(changes > 20, "only {changes} changes");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_order_of_every_key_is_kept_while_workers_come_and_go() {
    let server = Server::start(Server::default_version());
    let stream = stream_of(&server, "ordered");
    const ENTRIES: u64 = 6_000;
    fill_keyed(&server, &stream, ENTRIES);
    let recorder = Recorder::running(|_| async {
        tokio::task::yield_now().await;
        Ok(Outcome::Ack)
    });
    let running: Arc<Mutex<HashMap<u64, u64>>> = Arc::default();
    let (both, overlapped) = (recorder.clone(), Arc::new(AtomicUsize::new(0)));
    let done: Arc<Mutex<Vec<u64>>> = Arc::default();
    let draft = Subscription::tail(&stream)
        .named(NAME)
        .workers(4)
        .ordered_by("account");
    let supervisor = start(
        &server,
        draft.handle_fn({
            let (running, overlapped, done) = (
                Arc::clone(&running),
                Arc::clone(&overlapped),
                Arc::clone(&done),
            );
            move |number: u64, _| {
                let (running, overlapped, done) = (
                    Arc::clone(&running),
                    Arc::clone(&overlapped),
                    Arc::clone(&done),
                );
                async move {
                    if running
                        .lock()
                        .unwrap()
                        .insert(number % KEYS, number)
                        .is_some()
                    {
                        overlapped.fetch_add(1, Ordering::Relaxed);
                    }
                    done.lock().unwrap().push(number);
                    tokio::time::sleep(ms(u64::from(number.is_multiple_of(7)))).await;
                    running.lock().unwrap().remove(&(number % KEYS));
                    Ok(Outcome::Ack)
                }
            }
        }),
    )
    .await;
    drop(both);
    let count = || done.lock().unwrap().len() as u64;
    resize_at_random(&supervisor, 11, || count() < ENTRIES).await;
    eventually(SOON, "all should be settled", || {
        server.xpending_count(&stream, GROUP) == 0
    })
    .await;
    assert_eq!((count(), overlapped.load(Ordering::Relaxed)), (ENTRIES, 0));
    let done = done.lock().unwrap().clone();
    for key in 0..KEYS {
        let of_key: Vec<_> = done.iter().filter(|number| *number % KEYS == key).collect();
        assert!(of_key.is_sorted(), "key {key}: {of_key:?}");
    }
    supervisor.shutdown().await.unwrap();
}

/// An actor that notes its deliveries, and panics over some the first time it sees them.
struct Noting;

enum Note {
    Delivered(Delivery<u64>),
    Worker(RpcReplyPort<usize>),
}

impl From<Delivery<u64>> for Note {
    fn from(delivery: Delivery<u64>) -> Self {
        Note::Delivered(delivery)
    }
}

#[cfg(feature = "cluster")]
impl ractor::Message for Note {}

type Notes = Arc<Mutex<Vec<(usize, u64, u64)>>>;

impl Actor for Noting {
    type Msg = Note;
    type State = (usize, Notes);
    type Arguments = (usize, Notes);

    async fn pre_start(
        &self,
        _: ActorRef<Note>,
        arguments: Self::Arguments,
    ) -> Result<Self::State, ActorProcessingErr> {
        Ok(arguments)
    }

    async fn handle(
        &self,
        _: ActorRef<Note>,
        note: Note,
        (worker, notes): &mut Self::State,
    ) -> Result<(), ActorProcessingErr> {
        match note {
            Note::Delivered(delivery) => {
                let (number, attempt) = (*delivery.message(), delivery.context().attempt());
                notes.lock().unwrap().push((*worker, number, attempt));
                assert!(
                    !number.is_multiple_of(501) || attempt > 1,
                    "this test wants a panic"
                );
                tokio::task::yield_now().await;
                delivery.ack();
            }
            Note::Worker(port) => port.send(*worker)?,
        }
        Ok(())
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn actors_keep_the_order_of_first_deliveries_while_they_come_and_go_and_panic() {
    let server = Server::start(Server::default_version());
    let stream = stream_of(&server, "ordered-actors");
    const ENTRIES: u64 = 6_000;
    fill_keyed(&server, &stream, ENTRIES);
    let notes: Notes = Arc::default();
    let subscription = Subscription::tail(&stream)
        .named(NAME)
        .workers(4)
        .ordered_by("account")
        .retry(RetryPolicy::exponential(ms(1)).max_delay(ms(1)))
        .actors({
            let notes = Arc::clone(&notes);
            move |worker| (Noting, (worker.index(), Arc::clone(&notes)))
        });
    let supervisor = start(&server, subscription).await;
    let done = || {
        let notes = notes.lock().unwrap();
        let fatal = |number: u64| number.is_multiple_of(501);
        let done = notes.iter().filter(|note| !fatal(note.1) || note.2 > 1);
        done.count() as u64
    };
    resize_at_random(&supervisor, 12, || done() < ENTRIES).await;
    eventually(SOON, "all should be settled", || {
        server.xpending_count(&stream, GROUP) == 0
    })
    .await;
    let first: Vec<u64> = {
        let notes = notes.lock().unwrap();
        let first = notes.iter().filter(|note| note.2 == 1);
        first.map(|note| note.1).collect()
    };
    let mut distinct = first.clone();
    distinct.sort_unstable();
    assert_eq!(distinct, (0..ENTRIES).collect::<Vec<_>>());
    for key in 0..KEYS {
        let of_key: Vec<_> = first
            .iter()
            .filter(|number| *number % KEYS == key)
            .collect();
        assert!(of_key.is_sorted(), "key {key}: {of_key:?}");
    }
    // Messages find the workers that there are now.
    supervisor.set_workers(NAME, 2).await.unwrap();
    let actors = supervisor.handlers::<Note>(NAME).unwrap();
    for key in 0..KEYS {
        let worker = actors.call_keyed(key.to_string(), Note::Worker, SOON).await;
        assert!(worker.unwrap() < 2);
    }
    supervisor.shutdown().await.unwrap();
}

#[tokio::test]
async fn a_number_of_workers_that_cannot_be_is_refused() {
    let server = Server::start(Server::default_version());
    let stream = stream_of(&server, "refused");
    let supervisor = start(
        &server,
        Recorder::acking().on(Subscription::tail(&stream).named(NAME)),
    )
    .await;
    let error = supervisor.set_workers(NAME, 0).await.unwrap_err();
    assert_eq!(
        error.to_string(),
        "`workers` must not be 0; it must be at least 1"
    );
    let error = supervisor.set_workers(NAME, 65_537).await.unwrap_err();
    assert!(error.to_string().contains("65,536 at most"), "{error}");
    let error = supervisor.set_workers("other", 1).await.unwrap_err();
    assert!(matches!(error, ControlError::NoSuchSubscription { .. }));
    supervisor.shutdown().await.unwrap();
    let error = supervisor.set_workers(NAME, 1).await.unwrap_err();
    assert_eq!(error, ControlError::Ended);
}
