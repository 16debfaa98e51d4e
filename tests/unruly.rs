//! What actors of the application's own may do that they had better not.

mod support;

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use ractor::{Actor, ActorCell, ActorProcessingErr, ActorRef};
use streamvisor::{
    Context, Delivery, Draft, Event, NotStored, Outcome, RestartPolicy, RetryPolicy, Subscription,
    Supervisor, ractor,
};
use support::pending::AGES;
use support::record::{GROUP, Gate, Heard, Recorder, SOON, fill, ms, stream_of, topology};
use support::*;

type Numbered = Delivery<u64>;
type Handled = Result<(), ActorProcessingErr>;
type BoxFuture<T> = std::pin::Pin<Box<dyn Future<Output = T> + Send>>;
type Handling = dyn Fn(Arc<Mutex<Vec<Numbered>>>, Numbered) -> BoxFuture<Handled> + Send + Sync;

struct Loose;
struct LooseState {
    handling: Arc<Handling>,
    kept: Arc<Mutex<Vec<Numbered>>>,
    stop: Arc<dyn Fn() -> BoxFuture<()> + Send + Sync>,
}
struct Message(Numbered);
#[cfg(feature = "cluster")]
impl ractor::Message for Message {}
impl From<Numbered> for Message {
    fn from(it: Numbered) -> Self {
        Message(it)
    }
}
impl Actor for Loose {
    type Msg = Message;
    type State = LooseState;
    type Arguments = LooseState;
    async fn pre_start(
        &self,
        _: ActorRef<Message>,
        s: LooseState,
    ) -> Result<LooseState, ActorProcessingErr> {
        Ok(s)
    }
    async fn handle(
        &self,
        _: ActorRef<Message>,
        Message(it): Message,
        s: &mut LooseState,
    ) -> Handled {
        (Arc::clone(&s.handling))(Arc::clone(&s.kept), it).await
    }
    async fn post_stop(&self, _: ActorRef<Message>, s: &mut LooseState) -> Handled {
        (s.stop)().await;
        Ok(())
    }
}

fn loose(
    handling: impl Fn(Arc<Mutex<Vec<Numbered>>>, Numbered) -> BoxFuture<Handled> + Send + Sync + 'static,
) -> LooseState {
    LooseState {
        handling: Arc::new(handling),
        kept: Arc::default(),
        stop: Arc::new(|| Box::pin(async {})),
    }
}

fn at_once(r: Handled) -> BoxFuture<Handled> {
    Box::pin(std::future::ready(r))
}

fn draft(stream: &str) -> Draft {
    Subscription::tail(stream)
        .named("told")
        .workers(1)
        .block(ms(200))
        .retry(RetryPolicy::exponential(ms(1)).max_delay(ms(1)))
}

/// A delivery that a task holds for ever costs its actor once, and is given up.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_delivery_that_outlives_a_kill_is_given_up_and_costs_nobody_else() {
    let server = Server::start(Server::default_version());
    let stream = stream_of(&server, "outlives");
    let done = Arc::new(AtomicUsize::new(0));
    let elsewhere: Arc<Mutex<Vec<Numbered>>> = Arc::default();
    let sub = draft(&stream).handler_timeout(ms(300)).actors({
        let (done, elsewhere) = (done.clone(), elsewhere.clone());
        move |_| {
            let (done, elsewhere) = (done.clone(), elsewhere.clone());
            (
                Loose,
                loose(move |_, it| {
                    if *it.message() == 0 {
                        elsewhere.lock().unwrap().push(it);
                    } else {
                        it.ack();
                        done.fetch_add(1, Ordering::Relaxed);
                    }
                    at_once(Ok(()))
                }),
            )
        }
    });
    let supervisor = Supervisor::start(topology(&server.url()).subscribe(sub))
        .await
        .unwrap();
    let heard = Heard::of(&supervisor);
    for n in 0..30 {
        server.xadd(&stream, &[("_payload", n.to_string())]);
        tokio::time::sleep(ms(100)).await;
    }
    eventually(SOON, "done", || done.load(Ordering::Relaxed) >= 29).await;
    let crashes = heard.count(|it| matches!(it, Event::Crashed { .. }));
    let abandoned = heard.count(|it| matches!(it, Event::Abandoned { .. }));
    assert_eq!((crashes, abandoned), (1, 1));
    // Late work counts.
    elsewhere.lock().unwrap().pop().unwrap().ack();
    eventually(SOON, "nothing pending", || {
        server.xpending_count(&stream, GROUP) == 0
    })
    .await;
    supervisor.shutdown().await.unwrap();
}

/// What an actor still has when its subscription is taken out is for others.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_an_actor_keeps_beyond_a_removal_is_for_others() {
    let server = Server::start(Server::default_version());
    let stream = stream_of(&server, "kept");
    fill(&server, &stream, 6);
    let got = Arc::new(AtomicUsize::new(0));
    let sub = draft(&stream).actors({
        let got = got.clone();
        move |_| {
            let got = got.clone();
            (
                Loose,
                loose(move |kept, it| {
                    it.message();
                    kept.lock().unwrap().push(it);
                    got.fetch_add(1, Ordering::Relaxed);
                    at_once(Ok(()))
                }),
            )
        }
    });
    let neighbour = Recorder::acking();
    let supervisor = Supervisor::start(
        topology(&server.url())
            .shutdown_timeout(ms(500))
            .subscribe(sub)
            .subscribe(neighbour.on(Subscription::reclaim(&*stream, ms(1000)).block(ms(200)))),
    )
    .await
    .unwrap();
    eventually(SOON, "got", || got.load(Ordering::Relaxed) == 6).await;
    let began = Instant::now();
    let report = supervisor.remove("told").await.unwrap();
    assert_eq!(report.left_running.len(), 6);
    assert!(began.elapsed() < ms(1200), "{:?}", began.elapsed());
    eventually(ms(8000), "taken over", || neighbour.count() == 6).await;
    supervisor.shutdown().await.unwrap();
}

/// The same for what lies unseen in the mailbox of an actor that dies after its subscription stands still.
async fn what_comes_back_late(fail: bool) {
    let server = Server::start(Server::default_version());
    let stream = stream_of(&server, "late");
    let gate = Gate::closed();
    let got = Arc::new(AtomicUsize::new(0));
    let cells: Arc<Mutex<Vec<(usize, ActorCell)>>> = Arc::default();
    let busy = Arc::new(AtomicUsize::new(usize::MAX));
    struct Failing;
    impl Actor for Failing {
        type Msg = Message;
        type State = LooseState;
        type Arguments = (usize, Arc<Mutex<Vec<(usize, ActorCell)>>>, LooseState);
        async fn pre_start(
            &self,
            me: ActorRef<Message>,
            (worker, cells, s): Self::Arguments,
        ) -> Result<LooseState, ActorProcessingErr> {
            cells.lock().unwrap().push((worker, me.get_cell()));
            Ok(s)
        }
        async fn handle(
            &self,
            _: ActorRef<Message>,
            Message(it): Message,
            s: &mut LooseState,
        ) -> Handled {
            (Arc::clone(&s.handling))(Arc::clone(&s.kept), it).await
        }
    }
    let sub = draft(&stream).ordered_by("k").workers(2).actors({
        let (got, gate, cells, busy) = (got.clone(), gate.clone(), cells.clone(), busy.clone());
        move |worker| {
            let (got, gate, busy, index) =
                (got.clone(), gate.clone(), busy.clone(), worker.index());
            let s = loose(move |_, it| {
                it.message();
                got.fetch_add(1, Ordering::Relaxed);
                let (gate, busy) = (gate.clone(), busy.clone());
                Box::pin(async move {
                    if busy.swap(index, Ordering::Relaxed) == usize::MAX {
                        gate.passed().await;
                        panic!("this test wants a panic");
                    }
                    it.ack();
                    Ok(())
                })
            });
            (Failing, (index, cells.clone(), s))
        }
    });
    let neighbour = Recorder::acking();
    let supervisor = Supervisor::start(
        topology(&server.url())
            .restart(RestartPolicy::default().max_restarts(1).isolate())
            .subscribe(sub)
            .subscribe(neighbour.on(Subscription::reclaim(&*stream, AGES).block(ms(200)))),
    )
    .await
    .unwrap();
    let heard = Heard::of(&supervisor);
    let keyed = |key: usize| {
        server.xadd(
            &stream,
            &[("_payload", "7".to_owned()), ("h:k", key.to_string())],
        );
        server.xadd(
            &stream,
            &[("_payload", "8".to_owned()), ("h:k", key.to_string())],
        );
    };
    keyed(1);
    eventually(SOON, "got", || got.load(Ordering::Relaxed) == 1).await;
    tokio::time::sleep(ms(200)).await;
    if fail {
        let busy = busy.load(Ordering::Relaxed);
        let mut killed = 0;
        while heard.count(|it| matches!(it, Event::Escalated { .. })) == 0 {
            let other = cells
                .lock()
                .unwrap()
                .iter()
                .rfind(|it| it.0 != busy)
                .cloned();
            other.unwrap().1.stop(None);
            killed += 1;
            assert!(killed < 200);
            tokio::time::sleep(ms(50)).await;
        }
    } else {
        supervisor.pause("told").await.unwrap();
    }
    tokio::time::sleep(ms(300)).await;
    gate.open();
    tokio::time::sleep(ms(300)).await;
    let what = "the second should be taken over";
    eventually(SOON, what, || neighbour.count() == 1).await;
    assert_eq!(got.load(Ordering::Relaxed), 1);
    supervisor.shutdown().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_comes_back_to_a_subscription_that_has_failed_is_given_back() {
    what_comes_back_late(true).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_comes_back_to_a_subscription_that_is_paused_is_given_back() {
    what_comes_back_late(false).await;
}

/// An actor whose message cannot be made of a delivery.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_that_panics_when_it_is_made_costs_only_its_own_entry() {
    struct Picky(Numbered);
    #[cfg(feature = "cluster")]
    impl ractor::Message for Picky {}
    impl From<Numbered> for Picky {
        fn from(it: Numbered) -> Self {
            assert!(*it.message() != 1, "this test wants a panic");
            Picky(it)
        }
    }
    struct PickyActor;
    impl Actor for PickyActor {
        type Msg = Picky;
        type State = Arc<Mutex<Vec<(u64, u64)>>>;
        type Arguments = Self::State;
        async fn pre_start(
            &self,
            _: ActorRef<Picky>,
            s: Self::State,
        ) -> Result<Self::State, ActorProcessingErr> {
            Ok(s)
        }
        async fn handle(
            &self,
            _: ActorRef<Picky>,
            Picky(it): Picky,
            s: &mut Self::State,
        ) -> Handled {
            s.lock()
                .unwrap()
                .push((*it.message(), it.context().attempt()));
            tokio::time::sleep(ms(300)).await;
            it.ack();
            Ok(())
        }
    }
    let server = Server::start(Server::default_version());
    let stream = stream_of(&server, "picky");
    fill(&server, &stream, 4);
    let log: Arc<Mutex<Vec<(u64, u64)>>> = Arc::default();
    let sub = draft(&stream)
        .retry(
            RetryPolicy::exponential(ms(1))
                .max_attempts(3)
                .then_dead_letter(),
        )
        .dead_letter(format!("{stream}.dead"))
        .actors({
            let log = log.clone();
            move |_| (PickyActor, log.clone())
        });
    let supervisor = Supervisor::start(topology(&server.url()).subscribe(sub))
        .await
        .unwrap();
    let heard = Heard::of(&supervisor);
    eventually(SOON, "settled", || {
        server.xpending_count(&stream, GROUP) == 0 && server.xlen(&format!("{stream}.dead")) == 1
    })
    .await;
    supervisor.shutdown().await.unwrap();
    let crashes = heard.count(|it| matches!(it, Event::Crashed { .. }));
    assert_eq!(
        (log.lock().unwrap().clone(), crashes),
        (vec![(0, 1), (2, 1), (3, 1)], 0)
    );
}

/// A removal that ends in the middle of a shutdown takes a group, and what it counted, along.
#[tokio::test]
async fn a_removal_may_end_while_the_tree_drains() {
    let server = Server::start(Server::default_version());
    let (gates, recorders): (Vec<Gate>, Vec<Recorder>) = (0..2)
        .map(|_| {
            let gate = Gate::closed();
            (gate.clone(), Recorder::behind(&gate))
        })
        .unzip();
    let streams = ["leaves", "stays"].map(|name| stream_of(&server, name));
    let mut topology = topology(&server.url());
    for (stream, recorder) in streams.iter().zip(&recorders) {
        let draft = Subscription::tail(&**stream)
            .named(stream.clone())
            .block(ms(200));
        topology = topology.subscribe(recorder.on(draft));
    }
    let supervisor = Supervisor::start(topology).await.unwrap();
    // Something was stored before.
    gates[0].open();
    fill(&server, &streams[0], 5);
    eventually(SOON, "stored", || {
        server.xpending_count(&streams[0], GROUP) == 0 && recorders[0].count() == 5
    })
    .await;
    gates[0].close();
    for (stream, recorder) in streams.iter().zip(&recorders) {
        let before = recorder.count();
        fill(&server, stream, 1);
        recorder.reaches(before + 1).await;
    }
    let removal = tokio::spawn({
        let (supervisor, name) = (supervisor.clone(), streams[0].clone());
        async move { supervisor.remove(&name).await }
    });
    tokio::time::sleep(ms(50)).await;
    let shutdown = tokio::spawn({
        let supervisor = supervisor.clone();
        async move { supervisor.shutdown().await }
    });
    tokio::time::sleep(ms(50)).await;
    gates[0].open();
    assert_eq!(removal.await.unwrap().unwrap().settled, 1);
    gates[1].open();
    assert_eq!(shutdown.await.unwrap().unwrap().settled, 2);
}

/// The runtime of a tree goes without a shutdown; what others wait for ends.
#[test]
fn a_runtime_that_goes_leaves_nobody_waiting() {
    let server = Server::start(Server::default_version());
    let stream = stream_of(&server, "runtime");
    fill(&server, &stream, 1);
    let there = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap();
    let here = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let elsewhere: Arc<Mutex<Vec<Numbered>>> = Arc::default();
    let supervisor = there.block_on(async {
        let sub = draft(&stream).actors({
            let elsewhere = elsewhere.clone();
            move |_| {
                let elsewhere = elsewhere.clone();
                (
                    Loose,
                    loose(move |_, it| {
                        elsewhere.lock().unwrap().push(it);
                        at_once(Ok(()))
                    }),
                )
            }
        });
        let supervisor = Supervisor::start(topology(&server.url()).subscribe(sub))
            .await
            .unwrap();
        eventually(SOON, "got", || !elsewhere.lock().unwrap().is_empty()).await;
        supervisor
    });
    let mut events = supervisor.events();
    there.shutdown_timeout(std::time::Duration::from_secs(2));
    let it = elsewhere.lock().unwrap().pop().unwrap();
    here.block_on(async {
        let within = ms(3000);
        let waited = tokio::time::timeout(within, supervisor.wait()).await;
        let ended = tokio::time::timeout(within, async {
            while let Ok(Some(_)) = events.next().await {}
        })
        .await;
        let stored = tokio::time::timeout(within, it.settle(Outcome::Ack)).await;
        assert!(waited.is_ok() && ended.is_ok());
        assert_eq!(stored, Ok(Err(NotStored)));
    });
}

/// An actor that does not come to its end when there are fewer workers.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_that_does_not_end_holds_nobody_up() {
    let server = Server::start(Server::default_version());
    let stream = stream_of(&server, "endless");
    let done = Arc::new(AtomicUsize::new(0));
    let sub = draft(&stream)
        .workers(4)
        .ordered_by("k")
        .handler_timeout(ms(500))
        .actors({
            let done = done.clone();
            move |_| {
                let done = done.clone();
                let mut s = loose(move |_, it| {
                    it.ack();
                    done.fetch_add(1, Ordering::Relaxed);
                    at_once(Ok(()))
                });
                s.stop = Arc::new(|| Box::pin(std::future::pending()));
                (Loose, s)
            }
        });
    let supervisor = Supervisor::start(
        topology(&server.url())
            .shutdown_timeout(ms(1000))
            .subscribe(sub),
    )
    .await
    .unwrap();
    supervisor.set_workers("told", 1).await.unwrap();
    tokio::time::sleep(ms(100)).await;
    supervisor.set_workers("told", 4).await.unwrap();
    for n in 0..20 {
        server.xadd(
            &stream,
            &[("_payload", n.to_string()), ("h:k", n.to_string())],
        );
    }
    eventually(ms(8000), "all", || done.load(Ordering::Relaxed) == 20).await;
    let began = Instant::now();
    supervisor.shutdown().await.unwrap();
    assert!(began.elapsed() < ms(3500), "{:?}", began.elapsed());
}

/// (number, attempt, whether it was recovered, id) of what handlers began with.
type Begun = Arc<Mutex<Vec<(u64, u64, bool, String)>>>;

/// Everything at once.
async fn storm(seed: u64, entries: usize) {
    use rand::{Rng, SeedableRng, rngs::StdRng};
    let server = Server::start(Server::default_version());
    let stream = stream_of(&server, "storm");
    let random = Arc::new(Mutex::new(StdRng::seed_from_u64(seed)));
    let log: Begun = Arc::default();
    // (number) that failed for a reason
    let reason: Arc<Mutex<std::collections::HashMap<u64, u64>>> = Arc::default();
    let running: Arc<Mutex<std::collections::HashMap<u64, u64>>> = Arc::default();
    let overlaps: Arc<Mutex<Vec<(u64, u64)>>> = Arc::default();
    let keys = 7u64;
    let sub = |draft: Draft| draft.retry(RetryPolicy::exponential(ms(1)).max_delay(ms(3)));
    struct InHand(u64, Arc<Mutex<std::collections::HashMap<u64, u64>>>);
    impl Drop for InHand {
        fn drop(&mut self) {
            self.1.lock().unwrap().remove(&self.0);
        }
    }
    struct Wild;
    type Args = (
        Arc<Mutex<StdRng>>,
        Begun,
        Arc<Mutex<std::collections::HashMap<u64, u64>>>,
        Arc<Mutex<std::collections::HashMap<u64, u64>>>,
        Arc<Mutex<Vec<(u64, u64)>>>,
    );
    impl Actor for Wild {
        type Msg = Message;
        type State = Args;
        type Arguments = Args;
        async fn pre_start(
            &self,
            _: ActorRef<Message>,
            a: Args,
        ) -> Result<Args, ActorProcessingErr> {
            Ok(a)
        }
        async fn handle(
            &self,
            me: ActorRef<Message>,
            Message(it): Message,
            (random, log, reason, running, overlaps): &mut Args,
        ) -> Handled {
            let n = *it.message();
            let key = n % 7;
            let attempt = it.context().attempt();
            let recovered = it
                .context()
                .headers()
                .get_str("redis-delivery-count")
                .is_some();
            let first = attempt == 1 && !recovered;
            log.lock()
                .unwrap()
                .push((n, attempt, recovered, it.context().id().to_string()));
            let in_hand = first.then(|| {
                if let Some(other) = running.lock().unwrap().insert(key, n) {
                    overlaps.lock().unwrap().push((other, n));
                }
                InHand(key, Arc::clone(running))
            });
            let what = random.lock().unwrap().gen_range(0..100);
            let pause = ms(random.lock().unwrap().gen_range(0..3));
            let blame = || *reason.lock().unwrap().entry(n).or_default() += 1;
            match what {
                0 => {
                    blame();
                    drop(in_hand);
                    panic!("wild")
                }
                1 => {
                    blame();
                    drop(in_hand);
                    drop(it);
                    return Err("wild".into());
                }
                2 => {
                    blame();
                    me.kill();
                    tokio::time::sleep(ms(2)).await;
                    it.ack();
                }
                3 => {
                    drop(in_hand);
                    it.ack();
                    me.stop(None);
                }
                4 => {
                    std::thread::sleep(ms(10));
                    drop(in_hand);
                    it.ack();
                }
                5 => {
                    blame();
                    drop(in_hand);
                    drop(it);
                }
                6 => {
                    blame();
                    drop(in_hand);
                    it.fail("wild");
                }
                7 => {
                    std::thread::spawn(move || {
                        std::thread::sleep(pause);
                        drop(in_hand);
                        it.ack()
                    })
                    .join()
                    .unwrap();
                }
                8 => {
                    drop(in_hand);
                    let f = it.settle(Outcome::Ack);
                    let _ = tokio::time::timeout(ms(0), f).await;
                }
                9 => {
                    blame();
                    drop(in_hand);
                    drop(it.settle(Outcome::Ack));
                }
                _ => {
                    tokio::time::sleep(pause).await;
                    drop(in_hand);
                    it.ack();
                }
            }
            Ok(())
        }
    }
    let args = (
        random.clone(),
        log.clone(),
        reason.clone(),
        running.clone(),
        overlaps.clone(),
    );
    let wild = sub(Subscription::tail(&*stream)
        .named("told")
        .workers(4)
        .ordered_by("k")
        .block(ms(100)))
    .actors(move |_| (Wild, args.clone()));
    let neighbour = Arc::new(AtomicUsize::new(0));
    let beside = sub(Subscription::reclaim(&*stream, ms(2000)).named("beside")).handle_fn({
        let (n, log) = (neighbour.clone(), log.clone());
        move |it: u64, context: Context| {
            log.lock().unwrap().push((
                it,
                context.attempt(),
                true,
                format!("beside {}", context.id()),
            ));
            let n = n.clone();
            async move {
                n.fetch_add(1, Ordering::Relaxed);
                Ok(Outcome::Ack)
            }
        }
    });
    let supervisor = Supervisor::start(
        topology(&server.url())
            .restart(RestartPolicy::default().max_restarts(100_000))
            .shutdown_timeout(ms(5000))
            .subscribe(wild)
            .subscribe(beside),
    )
    .await
    .unwrap();
    let over = Arc::new(AtomicBool::new(false));
    let mut changers = Vec::new();
    for c in 0..3u64 {
        let (supervisor, over) = (supervisor.clone(), over.clone());
        let mut random = StdRng::seed_from_u64(seed * 31 + c);
        changers.push(tokio::spawn(async move {
            while !over.load(Ordering::Relaxed) {
                match random.gen_range(0..10) {
                    0 => {
                        supervisor.pause("told").await.unwrap();
                        tokio::time::sleep(ms(5)).await;
                        supervisor.resume("told").await.unwrap();
                    }
                    1 => {
                        let _ = supervisor
                            .set_max_in_flight("told", random.gen_range(1..300))
                            .await;
                    }
                    _ => supervisor
                        .set_workers("told", random.gen_range(1..40))
                        .await
                        .unwrap(),
                }
                tokio::time::sleep(ms(random.gen_range(0..20))).await;
            }
            supervisor.resume("told").await.unwrap();
        }));
    }
    server.xadd_many(
        &stream,
        (0..entries as u64)
            .map(|n| vec![("_payload", n.to_string()), ("h:k", (n % keys).to_string())]),
    );
    let began = Instant::now();
    loop {
        tokio::time::sleep(ms(100)).await;
        let lag = supervisor.status().await;
        let s = &lag.subscriptions[0];
        if server.xpending_count(&stream, GROUP) == 0
            && s.lag == Some(0)
            && log.lock().unwrap().len() >= entries
        {
            break;
        }
        if began.elapsed() > ms(60_000) {
            let distinct: std::collections::HashSet<u64> =
                log.lock().unwrap().iter().map(|it| it.0).collect();
            panic!(
                "seed {seed}: stuck: {} of {entries}; pending {:?}; {s:#?}",
                distinct.len(),
                server.xpending(&stream, GROUP).len()
            );
        }
    }
    over.store(true, Ordering::Relaxed);
    for it in changers {
        it.await.unwrap();
    }
    let began = Instant::now();
    let report = supervisor.shutdown().await.unwrap();
    assert!(began.elapsed() < ms(5500), "{report:?}");
    let log = log.lock().unwrap().clone();
    let mut counts: std::collections::HashMap<u64, u64> = Default::default();
    log.iter()
        .for_each(|it| *counts.entry(it.0).or_default() += 1);
    let reason = reason.lock().unwrap();
    let lost: Vec<u64> = (0..entries as u64)
        .filter(|n| !counts.contains_key(n))
        .collect();
    let twice: Vec<_> = counts
        .iter()
        .filter(|(n, c)| **c > 1 + reason.get(n).copied().unwrap_or(0))
        .map(|(n, c)| {
            (
                *n,
                *c,
                reason.get(n).copied(),
                log.iter()
                    .filter(|it| it.0 == *n)
                    .cloned()
                    .collect::<Vec<_>>(),
            )
        })
        .collect();
    let mut last: std::collections::HashMap<u64, u64> = Default::default();
    let mut disorder = Vec::new();
    for (n, attempt, recovered, _) in &log {
        if *attempt == 1
            && !recovered
            && let Some(before) = last.insert(n % keys, *n)
            && before > *n
        {
            disorder.push((before, *n));
        }
    }
    let overlaps = overlaps.lock().unwrap().clone();
    assert!(lost.is_empty(), "seed {seed}: {lost:?}");
    assert!(twice.is_empty(), "seed {seed}: {twice:?}");
    assert!(
        disorder.is_empty() && overlaps.is_empty(),
        "seed {seed}: {disorder:?} {overlaps:?}"
    );
    assert!(
        server
            .command(&["XINFO", "CONSUMERS", &stream, GROUP])
            .as_array()
            .is_empty()
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 3)]
async fn a_storm() {
    let seed: u64 = std::env::var("SEED")
        .ok()
        .and_then(|it| it.parse().ok())
        .unwrap_or(1);
    storm(seed, 3000).await;
}
