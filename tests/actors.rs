//! Entries that are handled by actors of the application's own.

mod support;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use ractor::{Actor, ActorCell, ActorProcessingErr, ActorRef, RpcReplyPort};
use streamvisor::{
    CallError, Child, DelayedRetry, Delivery, Draft, EntryId, Event, Failure, HandlerRef,
    HandlersError, NotStored, OnCrash, Outcome, RestartPolicy, RetryPolicy, ShutdownError, State,
    Subscription, Supervisor, SupervisorHandle, Undelivered, Worker, ractor,
};
use support::pending::AGES;
use support::record::{GROUP, Gate, Heard, SOON, fill, ms, stream_of, topology};
use support::*;

type Numbered = Delivery<u64>;
type Handled = Result<(), ActorProcessingErr>;
type Handling = dyn Fn(&mut Teller, Numbered) -> BoxFuture<Handled> + Send + Sync;
type BoxFuture<T> = std::pin::Pin<Box<dyn Future<Output = T> + Send>>;

/// An actor that does with each delivery what the test says, and answers questions.
struct Teller {
    worker: usize,
    log: Log,
    handling: Arc<Handling>,
    kept: Vec<Numbered>,
}

/// What the actors of a test did.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Entries>>);

#[derive(Default)]
struct Entries {
    /// (worker, number, attempt) of each delivery that an actor began with.
    got: Vec<(usize, u64, u64)>,
    started: Vec<usize>,
    cells: Vec<ActorCell>,
    stopped: Vec<usize>,
    /// (worker, what) of other messages.
    heard: Vec<(usize, u64)>,
}

impl Log {
    fn with<R>(&self, f: impl FnOnce(&mut Entries) -> R) -> R {
        f(&mut self
            .0
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner))
    }

    fn numbers(&self) -> Vec<u64> {
        self.with(|log| log.got.iter().map(|(_, number, _)| *number).collect())
    }

    fn attempts_of(&self, number: u64) -> Vec<u64> {
        let of_it = |got: &&(usize, u64, u64)| got.1 == number;
        self.with(|log| log.got.iter().filter(of_it).map(|got| got.2).collect())
    }

    fn count(&self) -> usize {
        self.with(|log| log.got.len())
    }

    #[track_caller]
    fn reaches(&self, count: usize) -> impl Future<Output = ()> {
        let (log, caller) = (self.clone(), std::panic::Location::caller());
        async move {
            let what = format!("{count} deliveries (at {caller})");
            eventually(SOON, &what, || log.count() >= count).await;
        }
    }
}

enum Message {
    Delivered(Numbered),
    Tell(u64),
    Worker(RpcReplyPort<usize>),
    Never(RpcReplyPort<usize>),
    AskYourself(HandlerRef<Message>, RpcReplyPort<Result<usize, CallError>>),
    ShutDown(SupervisorHandle, RpcReplyPort<Option<ShutdownError>>),
    Wait(Gate),
    Panic,
}

impl From<Numbered> for Message {
    fn from(delivery: Numbered) -> Self {
        Message::Delivered(delivery)
    }
}

#[cfg(feature = "cluster")]
impl ractor::Message for Message {}

struct TellerActor;

impl Actor for TellerActor {
    type Msg = Message;
    type State = Teller;
    type Arguments = Teller;

    async fn pre_start(
        &self,
        myself: ActorRef<Message>,
        teller: Teller,
    ) -> Result<Teller, ActorProcessingErr> {
        teller.log.with(|log| {
            log.started.push(teller.worker);
            log.cells.push(myself.get_cell());
        });
        Ok(teller)
    }

    async fn handle(&self, _: ActorRef<Message>, message: Message, teller: &mut Teller) -> Handled {
        match message {
            Message::Delivered(delivery) => {
                let handling = Arc::clone(&teller.handling);
                return handling(teller, delivery).await;
            }
            Message::Tell(what) => {
                let worker = teller.worker;
                teller.log.with(|log| log.heard.push((worker, what)));
            }
            Message::Worker(port) => port.send(teller.worker)?,
            // Lets go of the port.
            Message::Never(port) => drop(port),
            Message::AskYourself(tellers, port) => {
                let answer = tellers.call(teller.worker, Message::Worker, SOON).await;
                port.send(answer)?;
            }
            Message::ShutDown(supervisor, port) => port.send(supervisor.shutdown().await.err())?,
            Message::Wait(gate) => gate.passed().await,
            Message::Panic => panic!("this test wants a panic"),
        }
        Ok(())
    }

    async fn post_stop(&self, _: ActorRef<Message>, teller: &mut Teller) -> Handled {
        let worker = teller.worker;
        teller.log.with(|log| log.stopped.push(worker));
        Ok(())
    }
}

impl Log {
    /// An actor that looks at each delivery, notes it, and has this decide.
    fn teller(
        &self,
        worker: usize,
        decide: impl Fn(&mut Teller, Numbered) -> Handled + Send + Sync + 'static,
    ) -> Teller {
        self.waiting_teller(worker, move |teller, delivery| {
            let (number, attempt) = (*delivery.message(), delivery.context().attempt());
            let worker = teller.worker;
            teller
                .log
                .with(|log| log.got.push((worker, number, attempt)));
            Box::pin(std::future::ready(decide(teller, delivery)))
        })
    }

    /// One that does not look at them by itself, and may wait.
    fn waiting_teller(
        &self,
        worker: usize,
        handling: impl Fn(&mut Teller, Numbered) -> BoxFuture<Handled> + Send + Sync + 'static,
    ) -> Teller {
        Teller {
            worker,
            log: self.clone(),
            handling: Arc::new(handling),
            kept: Vec::new(),
        }
    }

    /// Makes actors for a subscription.
    fn actors(
        &self,
        decide: impl Fn(&mut Teller, Numbered) -> Handled + Send + Sync + Clone + 'static,
    ) -> impl Fn(Worker) -> (TellerActor, Teller) + Send + Sync + 'static {
        let log = self.clone();
        move |worker| (TellerActor, log.teller(worker.index(), decide.clone()))
    }

    fn waiting_actors(
        &self,
        handling: impl Fn(&mut Teller, Numbered) -> BoxFuture<Handled> + Send + Sync + Clone + 'static,
    ) -> impl Fn(Worker) -> (TellerActor, Teller) + Send + Sync + 'static {
        let log = self.clone();
        move |worker| {
            let teller = log.waiting_teller(worker.index(), handling.clone());
            (TellerActor, teller)
        }
    }
}

fn ack(_: &mut Teller, delivery: Numbered) -> Handled {
    delivery.ack();
    Ok(())
}

/// Waits for the gate over each delivery, then acknowledges it.
fn behind(
    gate: &Gate,
) -> impl Fn(&mut Teller, Numbered) -> BoxFuture<Handled> + Send + Sync + Clone + 'static {
    let gate = gate.clone();
    move |teller, delivery| {
        let (worker, number) = (teller.worker, *delivery.message());
        let attempt = delivery.context().attempt();
        teller
            .log
            .with(|log| log.got.push((worker, number, attempt)));
        let gate = gate.clone();
        Box::pin(async move {
            gate.passed().await;
            delivery.ack();
            Ok(())
        })
    }
}

/// A subscription whose retries come at once.
fn draft(stream: &str) -> Draft {
    Subscription::tail(stream)
        .named("told")
        .workers(1)
        .block(ms(200))
        .retry(RetryPolicy::exponential(ms(1)).max_delay(ms(1)))
}

async fn start(server: &Server, subscription: Subscription) -> SupervisorHandle {
    let topology = topology(&server.url()).subscribe(subscription);
    Supervisor::start(topology).await.expect("it should start")
}

async fn all_settled(server: &Server, stream: &str) {
    let what = "nothing should be pending";
    eventually(SOON, what, || server.xpending_count(stream, GROUP) == 0).await;
}

// ---- verdicts ---------------------------------------------------------------------------------------

#[tokio::test]
async fn every_verdict_of_a_delivery_is_what_a_handler_s_is() {
    let server = Server::start(Server::default_version());
    let stream = stream_of(&server, "verdicts");
    fill(&server, &stream, 8);
    let log = Log::default();
    let subscription = draft(&stream)
        .dead_letter("dead")
        .delayed_retry(DelayedRetry::in_process())
        .actors(log.actors(|_, delivery| {
            if delivery.context().attempt() > 1 {
                delivery.ack();
                return Ok(());
            }
            match *delivery.message() {
                0 => delivery.ack(),
                1 => delivery.retry(),
                2 => delivery.retry_after(ms(5)),
                3 => delivery.reject(),
                4 => delivery.dead_letter("unwanted"),
                5 => delivery.leave_pending(),
                6 => delivery.fail("no database"),
                _ => {
                    let (number, context, settlement) = delivery.into_parts();
                    assert_eq!((number, context.attempt()), (7, 1));
                    settlement.ack();
                }
            }
            Ok(())
        }));
    let supervisor = start(&server, subscription).await;
    let status = || async {
        let status = supervisor.status().await;
        status.subscriptions[0].clone()
    };
    // 8 and the copies of 1, 2 and 6.
    log.reaches(11).await;
    eventually(SOON, "one should be left", || {
        server.xpending_count(&stream, GROUP) == 1
    })
    .await;
    let verdicts = status().await.verdicts;
    assert_eq!(
        (
            verdicts.acknowledged,
            verdicts.retried,
            verdicts.delayed,
            verdicts.rejected,
            verdicts.dead_lettered,
            verdicts.left_pending
        ),
        (5, 1, 2, 1, 1, 1)
    );
    let mut again: Vec<_> = log.with(|log| {
        let again = log.got.iter().filter(|(_, _, attempt)| *attempt == 2);
        again.map(|(_, number, _)| *number).collect()
    });
    again.sort_unstable();
    assert_eq!(again, [1, 2, 6]);
    let copy = server.xrange(&stream).into_iter().find(|entry| {
        let error = entry.1.iter().find(|(name, _)| name == b"h:retry-error");
        error.is_some_and(|(_, value)| value == b"no database")
    });
    assert!(copy.is_some(), "the error travels with the copy");
    assert_eq!(server.xlen("dead"), 1);
    supervisor.shutdown().await.unwrap();
}

#[tokio::test]
async fn settle_returns_when_the_server_has_the_verdict() {
    let server = Server::start(Server::default_version());
    let stream = stream_of(&server, "settle");
    fill(&server, &stream, 3);
    let (sender, mut deliveries) = tokio::sync::mpsc::unbounded_channel();
    let log = Log::default();
    let subscription = draft(&stream).actors(log.actors(move |_, delivery| {
        sender.send(delivery)?;
        Ok(())
    }));
    let supervisor = start(&server, subscription).await;
    for (outcome, pending) in [
        (Outcome::Ack, 2),
        // It waits in this process.
        (Outcome::RetryAfter(AGES), 2),
        (Outcome::LeavePending, 2),
    ] {
        let delivery = deliveries.recv().await.unwrap();
        assert_eq!(delivery.settle(outcome).await, Ok(()));
        assert_eq!(server.xpending_count(&stream, GROUP), pending);
    }
    supervisor.shutdown().await.unwrap();
}

#[tokio::test]
async fn settle_says_so_when_the_tree_ends_before_the_server_has_it() {
    let server = Server::start(Server::default_version());
    let stream = stream_of(&server, "unstored");
    fill(&server, &stream, 2);
    let (sender, mut deliveries) = tokio::sync::mpsc::unbounded_channel();
    let log = Log::default();
    let subscription = draft(&stream).actors(log.actors(move |_, delivery| {
        sender.send(delivery)?;
        Ok(())
    }));
    let topology = topology(&server.url())
        .shutdown_timeout(ms(300))
        .subscribe(subscription);
    let supervisor = Supervisor::start(topology).await.unwrap();
    let first = deliveries.recv().await.unwrap();
    let late = deliveries.recv().await.unwrap();
    server.freeze();
    let settling = tokio::spawn(first.settle(Outcome::Ack));
    let report = supervisor.shutdown().await.unwrap();
    assert_eq!(report.unsettled.len() + report.left_running.len(), 2);
    assert_eq!(settling.await.unwrap(), Err(NotStored));
    assert_eq!(late.settle(Outcome::Ack).await, Err(NotStored));
    server.thaw();
}

// ---- deliveries that are dropped --------------------------------------------------------------------

#[tokio::test]
async fn a_delivery_dropped_after_a_look_gets_the_crash_verdict() {
    let server = Server::start(Server::default_version());
    let stream = stream_of(&server, "dropped");
    fill(&server, &stream, 3);
    let log = Log::default();
    let subscription = draft(&stream)
        .on_crash(OnCrash::DeadLetter)
        .dead_letter("dead")
        .actors(log.actors(|_, delivery| {
            if *delivery.message() != 1 {
                delivery.ack();
            }
            Ok(())
        }));
    let supervisor = start(&server, subscription).await;
    let heard = Heard::of(&supervisor);
    log.reaches(3).await;
    all_settled(&server, &stream).await;
    assert_eq!(log.numbers(), [0, 1, 2]);
    assert_eq!(server.xlen("dead"), 1);
    // The actor goes on.
    heard.assert_nobody_crashed();
    supervisor.shutdown().await.unwrap();
}

#[tokio::test]
async fn a_delivery_dropped_without_a_look_comes_again_in_its_place_and_not_for_ever() {
    let server = Server::start(Server::default_version());
    let stream = stream_of(&server, "unseen");
    fill(&server, &stream, 6);
    let log = Log::default();
    let drops = Arc::new(AtomicUsize::new(0));
    let first: Arc<Mutex<Option<EntryId>>> = Arc::default();
    let subscription = draft(&stream)
        .on_crash(OnCrash::DeadLetter)
        .dead_letter("dead")
        .ordered_by("key")
        .actors(log.waiting_actors({
            let (drops, first) = (Arc::clone(&drops), Arc::clone(&first));
            move |teller, delivery| {
                // Which one it is can be seen in its debug form without looking at it.
                let shown = format!("{delivery:?}");
                if shown.contains("message: 0,") {
                    drops.fetch_add(1, Ordering::Relaxed);
                    drop(delivery);
                } else {
                    first.lock().unwrap().get_or_insert(delivery.context().id());
                    let (worker, number) = (teller.worker, *delivery.message());
                    teller.log.with(|log| log.got.push((worker, number, 1)));
                    delivery.ack();
                }
                Box::pin(std::future::ready(Ok(())))
            }
        }));
    let supervisor = start(&server, subscription).await;
    log.reaches(5).await;
    all_settled(&server, &stream).await;
    assert_eq!(drops.load(Ordering::Relaxed), 3);
    assert_eq!(server.xlen("dead"), 1);
    assert_eq!(log.numbers(), [1, 2, 3, 4, 5]);
    supervisor.shutdown().await.unwrap();
}

// ---- actors that end --------------------------------------------------------------------------------

/// How an actor ends over the entry with the number 3.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Ends {
    Panic,
    Error,
    Killed,
}

async fn one_entry_is_to_blame(ends: Ends) {
    let server = Server::start(Server::default_version());
    let stream = stream_of(&server, "blame");
    let log = Log::default();
    let fast = Arc::new(AtomicUsize::new(0));
    let subscription = draft(&stream).ordered_by("key").actors(log.waiting_actors({
        let fast = Arc::clone(&fast);
        move |teller, delivery| {
            // Ends over it without a look, the first time.
            let fatal = format!("{delivery:?}").contains("message: 203,");
            if fatal && fast.fetch_add(1, Ordering::Relaxed) == 0 {
                return match ends {
                    Ends::Panic => Box::pin(async move {
                        let _held = delivery;
                        panic!("this test wants a panic")
                    }),
                    Ends::Error => Box::pin(async move {
                        let _held = delivery;
                        Err("the actor gives up".into())
                    }),
                    Ends::Killed => Box::pin(async move {
                        let _held = delivery;
                        std::future::pending().await
                    }),
                };
            }
            let (worker, number) = (teller.worker, *delivery.message());
            let attempt = delivery.context().attempt();
            teller
                .log
                .with(|log| log.got.push((worker, number, attempt)));
            delivery.ack();
            Box::pin(std::future::ready(Ok(())))
        }
    }));
    let supervisor = start(&server, subscription).await;
    let heard = Heard::of(&supervisor);
    // Enough for it to be given many in advance.
    fill(&server, &stream, 300);
    if ends == Ends::Killed {
        eventually(SOON, "it should hang", || fast.load(Ordering::Relaxed) == 1).await;
        log.with(|log| log.cells[0].kill());
    }
    log.reaches(300).await;
    all_settled(&server, &stream).await;
    let mut numbers = log.numbers();
    let place = numbers.iter().position(|number| *number == 203).unwrap();
    assert_eq!((ends, log.attempts_of(203)), (ends, vec![2]));
    numbers.remove(place);
    assert!(numbers.is_sorted(), "{ends:?}: {numbers:?}");
    let more_than_one = log.with(|log| {
        let again = log.got.iter().filter(|got| got.2 > 1);
        again.map(|got| got.1).collect::<Vec<_>>()
    });
    assert!(
        more_than_one.iter().all(|number| *number == 203),
        "{more_than_one:?}"
    );
    assert_eq!(log.count(), 300);
    let crashes = heard.count(|event| matches!(event, Event::Crashed { .. }));
    assert_eq!(crashes, 1);
    supervisor.shutdown().await.unwrap();
}

#[tokio::test]
async fn an_actor_that_panics_leaves_what_it_had_not_begun_to_its_replacement_in_order() {
    one_entry_is_to_blame(Ends::Panic).await;
}

#[tokio::test]
async fn an_actor_that_returns_an_error_is_blamed_on_the_oldest_it_held() {
    one_entry_is_to_blame(Ends::Error).await;
}

#[tokio::test]
async fn an_actor_that_is_killed_is_blamed_on_the_oldest_it_held() {
    one_entry_is_to_blame(Ends::Killed).await;
}

#[tokio::test]
async fn an_actor_that_stops_by_itself_is_started_again_and_no_entry_is_blamed() {
    let server = Server::start(Server::default_version());
    let stream = stream_of(&server, "stops");
    fill(&server, &stream, 20);
    let log = Log::default();
    let stops = Arc::new(AtomicUsize::new(0));
    let subscription = draft(&stream).actors(log.actors({
        let stops = Arc::clone(&stops);
        move |teller, delivery| {
            if *delivery.message() == 5 && stops.fetch_add(1, Ordering::Relaxed) == 0 {
                teller.log.with(|log| log.cells[0].stop(None));
            }
            delivery.ack();
            Ok(())
        }
    }));
    let supervisor = start(&server, subscription).await;
    let heard = Heard::of(&supervisor);
    log.reaches(20).await;
    all_settled(&server, &stream).await;
    assert_eq!(log.numbers(), (0..20).collect::<Vec<_>>());
    assert_eq!(
        log.with(|log| (log.started.clone(), log.stopped.clone())),
        (vec![0, 0], vec![0])
    );
    assert_eq!(
        heard.count(|event| matches!(event, Event::Restarted { .. })),
        1
    );
    supervisor.shutdown().await.unwrap();
}

#[tokio::test]
async fn a_delivery_that_was_moved_elsewhere_outlives_its_actor() {
    let server = Server::start(Server::default_version());
    let stream = stream_of(&server, "moved");
    fill(&server, &stream, 4);
    let (sender, mut deliveries) = tokio::sync::mpsc::unbounded_channel();
    let log = Log::default();
    let subscription = draft(&stream).actors(log.actors(move |_, delivery| {
        sender.send(delivery)?;
        Ok(())
    }));
    let supervisor = start(&server, subscription).await;
    let mut moved = Vec::new();
    for _ in 0..4 {
        moved.push(deliveries.recv().await.unwrap());
    }
    let tellers = supervisor.handlers::<Message>("told").unwrap();
    tellers.send(0, Message::Panic).unwrap();
    eventually(SOON, "it should be started again", || {
        log.with(|log| log.started.len() == 2)
    })
    .await;
    for delivery in moved {
        assert_eq!(delivery.settle(Outcome::Ack).await, Ok(()));
    }
    assert_eq!(server.xpending_count(&stream, GROUP), 0);
    assert_eq!(log.numbers(), [0, 1, 2, 3]);
    supervisor.shutdown().await.unwrap();
}

#[tokio::test]
async fn an_actor_that_cannot_start_spends_the_budget_and_nothing_else() {
    let server = Server::start(Server::default_version());
    let stream = stream_of(&server, "unstartable");
    fill(&server, &stream, 5);
    struct Unstartable;
    impl Actor for Unstartable {
        type Msg = Message;
        type State = ();
        type Arguments = ();
        async fn pre_start(&self, _: ActorRef<Message>, (): ()) -> Handled {
            Err("no database".into())
        }
    }
    let subscription = draft(&stream).actors(|_| (Unstartable, ()));
    let topology = topology(&server.url())
        .restart(RestartPolicy::default().max_restarts(2))
        .subscribe(subscription);
    let supervisor = Supervisor::start(topology).await.unwrap();
    let failure: Failure = supervisor.wait().await.unwrap_err();
    assert!(matches!(failure.child, Child::Handler { worker: 0, .. }));
    assert!(failure.to_string().contains("no database"), "{failure}");
    let pending = server.xpending(&stream, GROUP);
    assert!(pending.iter().all(|entry| entry.3 == 0), "{pending:?}");
}

// ---- how much an actor is given ---------------------------------------------------------------------

#[tokio::test]
async fn an_actor_whose_pace_is_not_known_has_two_in_advance() {
    let server = Server::start(Server::default_version());
    let stream = stream_of(&server, "window");
    fill(&server, &stream, 40);
    let gate = Gate::closed();
    let log = Log::default();
    let subscription = draft(&stream)
        .workers(2)
        .actors(log.waiting_actors(behind(&gate)));
    let supervisor = start(&server, subscription).await;
    log.reaches(2).await;
    let (mut running, mut waiting) = (0, 0);
    while running + waiting < 40 {
        let status = supervisor.status().await;
        (running, waiting) = (
            status.subscriptions[0].running,
            status.subscriptions[0].waiting,
        );
    }
    // The one that each is at, and two in its mailbox.
    assert!(running <= 6, "{running}");
    gate.open();
    log.reaches(40).await;
    all_settled(&server, &stream).await;
    supervisor.shutdown().await.unwrap();
}

#[tokio::test]
async fn an_actor_that_hands_its_deliveries_on_gets_as_many_as_may_be_in_flight() {
    let server = Server::start(Server::default_version());
    let stream = stream_of(&server, "spawns");
    fill(&server, &stream, 300);
    let gate = Gate::closed();
    let log = Log::default();
    let subscription = draft(&stream).max_in_flight(200).actors(log.actors({
        let gate = gate.clone();
        move |_, delivery| {
            let gate = gate.clone();
            tokio::spawn(async move {
                gate.passed().await;
                delivery.ack();
            });
            Ok(())
        }
    }));
    let supervisor = start(&server, subscription).await;
    log.reaches(200).await;
    assert_eq!(server.xpending_count(&stream, GROUP), 200);
    gate.open();
    log.reaches(300).await;
    all_settled(&server, &stream).await;
    supervisor.shutdown().await.unwrap();
}

#[tokio::test]
async fn a_recovered_entry_is_counted_when_it_is_sent_and_its_actor_has_nothing_else() {
    let server = Server::start(Server::default_version());
    let stream = unique("recovered");
    server.add_numbers(&stream, 0..3);
    let left = server.leave_behind(&stream, GROUP, "dead");
    let gate = Gate::closed();
    let log = Log::default();
    let subscription = Subscription::reclaim(&stream, ms(1000))
        .named("told")
        .workers(1);
    let subscription = subscription.actors(log.waiting_actors(behind(&gate)));
    let supervisor = start(&server, subscription).await;
    log.reaches(1).await;
    let counts: Vec<_> = server
        .xpending(&stream, GROUP)
        .iter()
        .map(|entry| (entry.0.clone(), entry.3))
        .collect();
    let expected: Vec<_> = left.iter().cloned().zip([2, 1, 1]).collect();
    assert_eq!(counts, expected);
    gate.open();
    log.reaches(3).await;
    assert_eq!(
        log.with(|log| log.got.clone()),
        [(0, 0, 2), (0, 1, 2), (0, 2, 2)]
    );
    all_settled(&server, &stream).await;
    supervisor.shutdown().await.unwrap();
}

#[tokio::test]
async fn an_entry_that_cannot_be_decoded_never_reaches_an_actor() {
    let server = Server::start(Server::default_version());
    let stream = stream_of(&server, "undecodable");
    server.xadd(&stream, &[("_payload", "0")]);
    server.xadd(&stream, &[("_payload", "no number")]);
    server.xadd(&stream, &[("_payload", "2")]);
    let log = Log::default();
    let subscription = draft(&stream).dead_letter("dead").actors(log.actors(ack));
    let supervisor = start(&server, subscription).await;
    log.reaches(2).await;
    all_settled(&server, &stream).await;
    assert_eq!((log.numbers(), server.xlen("dead")), (vec![0, 2], 1));
    supervisor.shutdown().await.unwrap();
}

// ---- actors past their deadline ---------------------------------------------------------------------

#[tokio::test]
async fn a_hung_actor_is_ended_and_its_entry_gets_the_crash_verdict() {
    let server = Server::start(Server::default_version());
    let stream = stream_of(&server, "hung");
    fill(&server, &stream, 6);
    let log = Log::default();
    let subscription = draft(&stream)
        .handler_timeout(ms(200))
        .actors(log.waiting_actors(move |teller, delivery| {
            let (worker, number) = (teller.worker, *delivery.message());
            let attempt = delivery.context().attempt();
            teller
                .log
                .with(|log| log.got.push((worker, number, attempt)));
            Box::pin(async move {
                if number == 2 && attempt == 1 {
                    std::future::pending::<()>().await;
                }
                delivery.ack();
                Ok(())
            })
        }));
    let supervisor = start(&server, subscription).await;
    let heard = Heard::of(&supervisor);
    log.reaches(7).await;
    all_settled(&server, &stream).await;
    assert_eq!(log.numbers(), [0, 1, 2, 3, 4, 5, 2]);
    assert_eq!(log.attempts_of(2), [1, 2]);
    let told = heard.pick(|event| match event {
        Event::Crashed { error, .. } => Some(error.clone()),
        _ => None,
    });
    assert!(told.len() == 1 && told[0].contains("deadline"), "{told:?}");
    supervisor.shutdown().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 3)]
async fn an_actor_that_blocks_its_thread_is_replaced_and_late_work_is_not_done_again() {
    let server = Server::start(Server::default_version());
    let stream = stream_of(&server, "blocks");
    fill(&server, &stream, 6);
    let (release, released) = std::sync::mpsc::channel::<()>();
    let released = Arc::new(Mutex::new(released));
    let log = Log::default();
    let subscription =
        draft(&stream)
            .handler_timeout(ms(200))
            .actors(log.actors(move |_, delivery| {
                if *delivery.message() == 2 {
                    let _ = released.lock().unwrap().recv();
                }
                delivery.ack();
                Ok(())
            }));
    let supervisor = start(&server, subscription).await;
    let heard = Heard::of(&supervisor);
    heard
        .wait("it should be given up", |event| match event {
            Event::Abandoned { id, .. } => Some(*id),
            _ => None,
        })
        .await;
    log.reaches(6).await;
    assert_eq!(log.numbers(), [0, 1, 2, 3, 4, 5]);
    assert_eq!(log.with(|log| log.started.len()), 2);
    eventually(SOON, "all but one should be settled", || {
        server.xpending_count(&stream, GROUP) == 1
    })
    .await;
    // The call ends after all, and says that the work is done.
    release.send(()).unwrap();
    all_settled(&server, &stream).await;
    assert_eq!(log.count(), 6);
    supervisor.shutdown().await.unwrap();
}

// ---- messages of the application --------------------------------------------------------------------

#[tokio::test]
async fn a_keyed_message_reaches_the_worker_of_that_key_s_entries() {
    let server = Server::start(Server::default_version());
    let stream = stream_of(&server, "keyed");
    let keys: Vec<String> = (0..40).map(|n| format!("acct-{n}")).collect();
    let numbered = keys.iter().enumerate();
    server.xadd_many(
        &stream,
        numbered.map(|(n, key)| vec![("_payload", n.to_string()), ("h:account", key.clone())]),
    );
    let log = Log::default();
    let subscription = draft(&stream)
        .workers(4)
        .ordered_by("account")
        .actors(log.actors(ack));
    let supervisor = start(&server, subscription).await;
    log.reaches(40).await;
    let tellers: HandlerRef<Message> = supervisor.handlers("told").unwrap();
    assert_eq!(tellers.workers(), 4);
    let by_number = log.with(|log| {
        let got = log.got.iter().map(|(worker, number, _)| (*number, *worker));
        got.collect::<std::collections::HashMap<_, _>>()
    });
    let mut used = std::collections::HashSet::new();
    for (n, key) in keys.iter().enumerate() {
        let worker = tellers
            .call_keyed(key, Message::Worker, SOON)
            .await
            .unwrap();
        assert_eq!(worker, by_number[&(n as u64)], "{key}");
        used.insert(worker);
        tellers.send_keyed(key, Message::Tell(n as u64)).unwrap();
    }
    assert_eq!(used.len(), 4);
    eventually(SOON, "all should be heard", || {
        log.with(|log| log.heard.len() == 40)
    })
    .await;
    for (worker, n) in log.with(|log| log.heard.clone()) {
        assert_eq!(worker, by_number[&n]);
    }
    assert_eq!(tellers.broadcast(|| Message::Tell(7)), Vec::<usize>::new());
    eventually(SOON, "all should hear it", || {
        log.with(|log| log.heard.len() == 44)
    })
    .await;
    supervisor.shutdown().await.unwrap();
}

#[tokio::test]
async fn every_way_to_send_in_vain_says_why_and_gives_the_message_back() {
    let server = Server::start(Server::default_version());
    let stream = stream_of(&server, "in-vain");
    let log = Log::default();
    let subscription = draft(&stream).workers(2).actors(log.actors(ack));
    let plain = Subscription::tail(&stream).named("plain").group("other");
    let topology = topology(&server.url())
        .subscribe(subscription)
        .subscribe(plain.handle_fn(|_: u64, _| async { Ok(Outcome::Ack) }));
    let supervisor = Supervisor::start(topology).await.unwrap();
    let error = supervisor.handlers::<Message>("tolt").unwrap_err();
    assert!(
        error
            .to_string()
            .contains("`tolt`; there are `told`, `plain`"),
        "{error}"
    );
    let error = supervisor.handlers::<Message>("plain").unwrap_err();
    assert!(matches!(error, HandlersError::NoActors { .. }));
    let error = supervisor.handlers::<u64>("told").unwrap_err();
    assert!(
        matches!(error, HandlersError::OtherMessage { asked: "u64", .. }),
        "{error}"
    );

    let tellers: HandlerRef<Message> = supervisor.handlers("told").unwrap();
    let error = tellers.send(2, Message::Tell(9)).unwrap_err();
    assert!(matches!(error.message, Message::Tell(9)));
    assert_eq!(
        error.reason,
        Undelivered::NoSuchWorker {
            worker: 2,
            workers: 2
        }
    );
    let error = tellers.send_keyed("k", Message::Tell(9)).unwrap_err();
    assert_eq!(error.reason, Undelivered::NotOrdered);
    assert_eq!(
        tellers.call(0, Message::Never, SOON).await,
        Err(CallError::NoReply { worker: 0 })
    );
    let itself = tellers.clone();
    let asked = tellers
        .call(1, |port| Message::AskYourself(itself, port), SOON)
        .await;
    assert_eq!(asked, Ok(Err(CallError::Itself { worker: 1 })));
    let gate = Gate::closed();
    tellers.send(0, Message::Wait(gate.clone())).unwrap();
    assert_eq!(
        tellers.call(0, Message::Worker, ms(50)).await,
        Err(CallError::TimedOut {
            worker: 0,
            within: ms(50)
        })
    );
    gate.open();

    supervisor.shutdown().await.unwrap();
    let error = tellers.send(0, Message::Tell(9)).unwrap_err();
    assert_eq!(error.reason, Undelivered::Ended);
    assert_eq!(tellers.broadcast(|| Message::Tell(9)), [0, 1]);
    assert_eq!(
        tellers.call(0, Message::Worker, SOON).await,
        Err(CallError::NotMade(Undelivered::Ended))
    );
}

#[tokio::test]
async fn a_call_waits_for_a_worker_that_is_being_restarted() {
    let server = Server::start(Server::default_version());
    let stream = stream_of(&server, "restarting");
    let log = Log::default();
    let (sender, mut waiting) = tokio::sync::mpsc::unbounded_channel();
    struct Slow;
    impl Actor for Slow {
        type Msg = Message;
        type State = Teller;
        type Arguments = (Teller, Option<tokio::sync::oneshot::Receiver<()>>);
        async fn pre_start(
            &self,
            _: ActorRef<Message>,
            (teller, until): Self::Arguments,
        ) -> Result<Teller, ActorProcessingErr> {
            if let Some(until) = until {
                until.await?;
            }
            Ok(teller)
        }
        async fn handle(
            &self,
            myself: ActorRef<Message>,
            message: Message,
            teller: &mut Teller,
        ) -> Handled {
            TellerActor.handle(myself, message, teller).await
        }
    }
    let subscription = draft(&stream).actors({
        let (log, starts) = (log.clone(), AtomicUsize::new(0));
        move |worker| {
            let until = (starts.fetch_add(1, Ordering::Relaxed) > 0).then(|| {
                let (start, until) = tokio::sync::oneshot::channel();
                sender.send(start).unwrap();
                until
            });
            (Slow, (log.teller(worker.index(), ack), until))
        }
    });
    let supervisor = start(&server, subscription).await;
    let tellers: HandlerRef<Message> = supervisor.handlers("told").unwrap();
    assert_eq!(tellers.call(0, Message::Worker, SOON).await, Ok(0));
    tellers.send(0, Message::Panic).unwrap();
    let start = waiting.recv().await.unwrap();
    let error = tellers.send(0, Message::Tell(1)).unwrap_err();
    assert_eq!(error.reason, Undelivered::Restarting { worker: 0 });
    assert_eq!(
        tellers.call(0, Message::Worker, ms(20)).await,
        Err(CallError::NotMade(Undelivered::Restarting { worker: 0 }))
    );
    let call = tokio::spawn({
        let tellers = tellers.clone();
        async move { tellers.call(0, Message::Worker, SOON).await }
    });
    tokio::task::yield_now().await;
    start.send(()).unwrap();
    assert_eq!(call.await.unwrap(), Ok(0));
    supervisor.shutdown().await.unwrap();
}

// ---- stopping ---------------------------------------------------------------------------------------

#[tokio::test]
async fn a_shutdown_lets_actors_finish_what_they_have_and_gives_the_rest_back() {
    let server = Server::start(Server::default_version());
    let stream = stream_of(&server, "stopping");
    fill(&server, &stream, 20);
    let gate = Gate::closed();
    let log = Log::default();
    let subscription = draft(&stream).actors(log.waiting_actors(behind(&gate)));
    let supervisor = start(&server, subscription).await;
    log.reaches(1).await;
    let tellers: HandlerRef<Message> = supervisor.handlers("told").unwrap();
    tellers.send(0, Message::Tell(5)).unwrap();
    let stopping = tokio::spawn({
        let supervisor = supervisor.clone();
        async move { supervisor.shutdown().await }
    });
    eventually(SOON, "what waits should be given back", || {
        let pending = server.xpending(&stream, GROUP);
        pending.iter().filter(|entry| entry.3 == 0).count() >= 16
    })
    .await;
    gate.open();
    let report = stopping.await.unwrap().unwrap();
    let handled = log.count() as u64;
    assert!((1..=4).contains(&handled), "{handled}");
    assert_eq!(
        (report.given_back, report.left_running.len()),
        (20 - handled, 0)
    );
    assert_eq!(server.xpending_count(&stream, GROUP) as u64, 20 - handled);
    // What the application sent before was heard, and the actor stopped in good order.
    assert_eq!(
        log.with(|log| (log.heard.clone(), log.stopped.clone())),
        (vec![(0, 5)], vec![0])
    );
}

#[tokio::test]
async fn an_actor_cannot_wait_for_the_end_of_its_own_tree() {
    let server = Server::start(Server::default_version());
    let stream = stream_of(&server, "own-end");
    let log = Log::default();
    let supervisor = start(&server, draft(&stream).actors(log.actors(ack))).await;
    let tellers: HandlerRef<Message> = supervisor.handlers("told").unwrap();
    let handle = supervisor.clone();
    let asked = tellers
        .call(0, |port| Message::ShutDown(handle, port), SOON)
        .await;
    assert_eq!(asked, Ok(Some(ShutdownError::FromHandler)));
    supervisor.shutdown().await.unwrap();
}

// ---- forwarding -------------------------------------------------------------------------------------

async fn spawn_teller(name: Option<String>, teller: Teller) -> ActorRef<Message> {
    let (actor, _) = Actor::spawn(name, TellerActor, teller).await.unwrap();
    actor
}

#[tokio::test]
async fn deliveries_are_forwarded_in_order_to_an_actor_elsewhere() {
    let server = Server::start(Server::default_version());
    let stream = stream_of(&server, "forwarded");
    fill(&server, &stream, 500);
    let log = Log::default();
    let elsewhere = spawn_teller(None, log.teller(9, ack)).await;
    let supervisor = start(&server, draft(&stream).forward_to(elsewhere.clone())).await;
    log.reaches(500).await;
    all_settled(&server, &stream).await;
    assert_eq!(log.numbers(), (0..500).collect::<Vec<_>>());
    supervisor.shutdown().await.unwrap();
    // It is not ours to end.
    let answer = ractor::call_t!(elsewhere, Message::Worker, 20_000);
    assert_eq!(answer.unwrap(), 9);
    elsewhere.stop(None);
}

/// The actor that entries are forwarded to ends while it holds some that it has not looked at.
async fn the_target_of_a_reference_ends(isolate: bool) {
    let server = Server::start(Server::default_version());
    let stream = stream_of(&server, "gone");
    fill(&server, &stream, 10);
    let log = Log::default();
    let keep = |teller: &mut Teller, delivery: Numbered| -> BoxFuture<Handled> {
        teller.kept.push(delivery);
        let kept = teller.kept.len() as u64;
        teller.log.with(|log| log.got.push((0, kept, 1)));
        Box::pin(std::future::ready(Ok(())))
    };
    let elsewhere = spawn_teller(None, log.waiting_teller(0, keep)).await;
    let policy = RestartPolicy::default();
    let policy = if isolate { policy.isolate() } else { policy };
    let topology = topology(&server.url())
        .restart(policy)
        .subscribe(draft(&stream).forward_to(elsewhere.clone()));
    let supervisor = Supervisor::start(topology).await.unwrap();
    log.reaches(10).await;
    assert_eq!(server.xpending_count(&stream, GROUP), 10);
    elsewhere.stop(None);
    if isolate {
        let heard = Heard::of(&supervisor);
        heard
            .wait("it should fail", |event| {
                matches!(event, Event::Escalated { .. }).then_some(())
            })
            .await;
        let status = supervisor.status().await;
        assert_eq!(status.subscriptions[0].state, State::Failed);
    } else {
        let failure = supervisor.wait().await.unwrap_err();
        let text = failure.to_string();
        assert!(text.contains("forwarded to has ended"), "{text}");
        assert!(matches!(failure.child, Child::Handler { .. }));
    }
    eventually(SOON, "all should be given back", || {
        let pending = server.xpending(&stream, GROUP);
        pending.len() == 10 && pending.iter().all(|entry| entry.3 == 0)
    })
    .await;
    if isolate {
        supervisor.shutdown().await.unwrap();
    }
}

#[tokio::test]
async fn a_subscription_whose_target_has_ended_gives_everything_back_and_fails() {
    the_target_of_a_reference_ends(false).await;
}

#[tokio::test]
async fn a_subscription_whose_target_has_ended_fails_alone_where_failures_are_isolated() {
    the_target_of_a_reference_ends(true).await;
}

#[tokio::test]
async fn a_named_target_that_is_gone_is_waited_for_and_gets_everything_when_it_is_back() {
    let server = Server::start(Server::default_version());
    let stream = stream_of(&server, "named");
    fill(&server, &stream, 10);
    let name = unique("target");
    let log = Log::default();
    // It is not there yet.
    let subscription = draft(&stream).forward_to_named::<u64, Message>(&name);
    let supervisor = start(&server, subscription).await;
    let heard = Heard::of(&supervisor);
    let gone = |event: &Event| matches!(event, Event::TargetGone { .. });
    let back = |event: &Event| matches!(event, Event::TargetBack { .. });
    heard
        .wait("it should be missed", |event| gone(event).then_some(()))
        .await;
    let state = || async { supervisor.status().await.subscriptions[0].state };
    assert_eq!(state().await, State::TargetGone);

    let keep = |teller: &mut Teller, delivery: Numbered| -> BoxFuture<Handled> {
        teller.kept.push(delivery);
        let kept = teller.kept.len() as u64;
        teller.log.with(|log| log.got.push((0, kept, 1)));
        Box::pin(std::future::ready(Ok(())))
    };
    let first = spawn_teller(Some(name.clone()), log.waiting_teller(0, keep)).await;
    log.reaches(10).await;
    assert_eq!(heard.count(back), 1);
    first.kill();
    eventually(SOON, "it should be missed again", || heard.count(gone) == 2).await;
    eventually(SOON, "all should be given back", || {
        let pending = server.xpending(&stream, GROUP);
        pending.len() == 10 && pending.iter().all(|entry| entry.3 == 0)
    })
    .await;
    // Nothing is read meanwhile.
    server.xadd(&stream, &[("_payload", "10")]);

    let log = Log::default();
    let second = spawn_teller(Some(name), log.teller(0, ack)).await;
    log.reaches(11).await;
    all_settled(&server, &stream).await;
    assert_eq!(log.numbers(), (0..=10).collect::<Vec<_>>());
    assert!(log.with(|log| log.got.iter().all(|got| got.2 == 1)));
    heard.assert_nobody_crashed();
    supervisor.shutdown().await.unwrap();
    second.stop(None);
}

#[cfg(feature = "fail_points")]
#[tokio::test]
async fn a_worker_that_dies_while_its_target_is_away_goes_on_with_it() {
    use streamvisor::fail_point::{Fail, arm};
    let server = Server::start(Server::default_version());
    let stream = stream_of(&server, "died-meanwhile");
    fill(&server, &stream, 10);
    let name = unique("target");
    let subscription = draft(&stream)
        .named(&*stream)
        .forward_to_named::<u64, Message>(&name);
    let supervisor = start(&server, subscription).await;
    let heard = Heard::of(&supervisor);
    let gone = |event: &Event| matches!(event, Event::TargetGone { .. }).then_some(());
    heard.wait("it should be missed", gone).await;
    let armed = arm("handler.start", &stream, Fail::Panic, 1..=1);
    let log = Log::default();
    let target = spawn_teller(Some(name), log.teller(0, ack)).await;
    log.reaches(10).await;
    all_settled(&server, &stream).await;
    assert_eq!(armed.failed(), 1);
    assert_eq!(
        supervisor.status().await.subscriptions[0].state,
        State::Running
    );
    supervisor.shutdown().await.unwrap();
    target.stop(None);
}

#[tokio::test]
async fn a_named_target_that_takes_other_messages_is_refused_at_start() {
    let server = Server::start(Server::default_version());
    let stream = stream_of(&server, "other-type");
    let name = unique("target");
    let log = Log::default();
    let target = spawn_teller(Some(name.clone()), log.teller(0, ack)).await;
    struct Other;
    impl From<Numbered> for Other {
        fn from(_: Numbered) -> Self {
            Other
        }
    }
    #[cfg(feature = "cluster")]
    impl ractor::Message for Other {}
    let subscription = draft(&stream).forward_to_named::<u64, Other>(&name);
    let topology = topology(&server.url()).subscribe(subscription);
    let error = Supervisor::start(topology).await.unwrap_err().to_string();
    assert!(error.contains(&name) && error.contains("Other"), "{error}");
    target.stop(None);
}

#[tokio::test]
async fn a_forwarded_entry_past_its_deadline_is_left_to_others_and_nobody_is_ended() {
    let server = Server::start(Server::default_version());
    let stream = stream_of(&server, "late");
    fill(&server, &stream, 2);
    let (sender, mut deliveries) = tokio::sync::mpsc::unbounded_channel();
    let log = Log::default();
    let elsewhere = spawn_teller(
        None,
        log.teller(0, move |_, delivery| {
            if *delivery.message() == 0 {
                sender.send(delivery)?;
            } else {
                delivery.ack();
            }
            Ok(())
        }),
    )
    .await;
    let subscription = draft(&stream)
        .handler_timeout(ms(200))
        .forward_to(elsewhere.clone());
    let supervisor = start(&server, subscription).await;
    let heard = Heard::of(&supervisor);
    let late = deliveries.recv().await.unwrap();
    heard
        .wait("it should be given up", |event| {
            matches!(event, Event::Abandoned { .. }).then_some(())
        })
        .await;
    eventually(SOON, "the other should be settled", || {
        server.xpending_count(&stream, GROUP) == 1
    })
    .await;
    assert_eq!(late.settle(Outcome::Ack).await, Ok(()));
    assert_eq!(server.xpending_count(&stream, GROUP), 0);
    heard.assert_nobody_crashed();
    supervisor.shutdown().await.unwrap();
    elsewhere.stop(None);
}

// ---- keys -------------------------------------------------------------------------------------------

#[tokio::test]
async fn a_key_that_fills_what_may_be_in_flight_is_told_of_once() {
    let server = Server::start(Server::default_version());
    let stream = stream_of(&server, "hot");
    let hot = (0..200).map(|n| {
        vec![
            ("_payload", n.to_string()),
            ("h:account", "acct-7".to_owned()),
        ]
    });
    server.xadd_many(&stream, hot);
    let gate = Gate::closed();
    let log = Log::default();
    let subscription = draft(&stream)
        .workers(4)
        .ordered_by("account")
        .max_in_flight(50)
        .handle_fn({
            let (gate, log) = (gate.clone(), log.clone());
            move |number: u64, _| {
                let (gate, log) = (gate.clone(), log.clone());
                async move {
                    gate.passed().await;
                    log.with(|log| log.got.push((0, number, 1)));
                    Ok(Outcome::Ack)
                }
            }
        });
    let supervisor = start(&server, subscription).await;
    let heard = Heard::of(&supervisor);
    let key = heard
        .wait("it should be told of", |event| match event {
            Event::HotKey { key, .. } => Some(key.clone()),
            _ => None,
        })
        .await;
    assert_eq!(key.as_deref(), Some("acct-7"));
    gate.open();
    log.reaches(200).await;
    assert_eq!(log.numbers(), (0..200).collect::<Vec<_>>());
    assert_eq!(
        heard.count(|event| matches!(event, Event::HotKey { .. })),
        1
    );
    supervisor.shutdown().await.unwrap();
}
