//! Handlers that record what they were called with, and the topologies that the tests run.

use std::collections::{HashMap, HashSet};
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::FutureExt;
use streamvisor::{
    BoxError, Context, Draft, Entry, EntryId, Event, Events, Handler, MissedEvents, Mode, Outcome,
    Raw, Redis, Subscription, SupervisorHandle, Topology, Worker,
};
use tokio::sync::watch;
use tokio::task::unconstrained;

use super::server::Server;
use super::wait::{eventually, unique};

/// Long enough for a busy machine; a test that waits this long has failed.
pub const SOON: Duration = Duration::from_secs(20);

/// The group of every test that does not care.
pub const GROUP: &str = "g";

/// A topology of the server at this URL (its own, or a proxy's), with [`GROUP`] as its group.
#[track_caller]
pub fn topology(url: &str) -> Topology {
    let redis = Redis::url(url).expect("the URL of a test's server should be one");
    Topology::new(redis).default_group(GROUP)
}

pub fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// Adds entries whose bodies are 0, 1, 2, …
pub fn fill(server: &Server, stream: &str, entries: usize) -> Vec<String> {
    server.xadd_many(
        stream,
        (0..entries).map(|n| vec![("_payload", n.to_string())]),
    )
}

/// A stream of this test's own, with the group at its beginning.
pub fn stream_of(server: &Server, name: &str) -> String {
    let stream = unique(name);
    server.xgroup_create(&stream, GROUP, "0");
    stream
}

/// One call of a handler.
#[derive(Debug, Clone)]
pub struct Call {
    pub id: EntryId,
    pub entry: Entry,
    pub attempt: u64,
    pub delivery_count: u64,
    pub idle: Duration,
    pub worker: usize,
    pub subscription: String,
    pub mode: Mode,
    /// What the handler saw as headers, in their order.
    pub headers: Vec<(Vec<u8>, Vec<u8>)>,
    pub context: Context,
}

impl Call {
    /// The body; empty without one.
    pub fn payload(&self) -> &[u8] {
        self.entry.payload().map_or(&[], |body| body)
    }

    /// The body as text.
    #[track_caller]
    pub fn text(&self) -> &str {
        std::str::from_utf8(self.payload()).expect("the body should be text in this test")
    }

    /// The first header of this name, as text.
    pub fn header(&self, name: &str) -> Option<String> {
        let header = self
            .headers
            .iter()
            .find(|(header, _)| header == name.as_bytes())?;
        String::from_utf8(header.1.clone()).ok()
    }
}

pub type Answer = Result<Outcome, BoxError>;
type Answering = dyn Fn(Call) -> Pin<Box<dyn Future<Output = Answer> + Send>> + Send + Sync;

/// A handler of raw entries that remembers every call, in the order in which the calls began.
/// Clones share what they remember.
#[derive(Clone)]
pub struct Recorder {
    log: Arc<Mutex<Log>>,
    answer: Arc<Answering>,
}

#[derive(Default)]
struct Log {
    calls: Vec<Call>,
    running: HashMap<EntryId, usize>,
    most_running: usize,
    /// Ids that ran twice at the same time.
    overlapped: Vec<EntryId>,
    /// (worker, subscription) of each `start`.
    started: Vec<(usize, String)>,
    stopped: Vec<usize>,
}

impl Recorder {
    /// Acknowledges everything.
    pub fn acking() -> Recorder {
        Recorder::answering(|_| Ok(Outcome::Ack))
    }

    /// Answers at once.
    pub fn answering(answer: impl Fn(&Call) -> Answer + Send + Sync + 'static) -> Recorder {
        Recorder::running(move |call| std::future::ready(answer(&call)))
    }

    /// Runs a future for each call.
    pub fn running<F>(answer: impl Fn(Call) -> F + Send + Sync + 'static) -> Recorder
    where
        F: Future<Output = Answer> + Send + 'static,
    {
        Recorder {
            log: Arc::default(),
            answer: Arc::new(move |call| Box::pin(answer(call))),
        }
    }

    /// Waits for the gate in every call, then acknowledges.
    pub fn behind(gate: &Gate) -> Recorder {
        let gate = gate.clone();
        Recorder::running(move |_| {
            let gate = gate.clone();
            async move {
                gate.passed().await;
                Ok(Outcome::Ack)
            }
        })
    }

    /// Makes a subscription of this draft, handled by this recorder.
    pub fn on(&self, draft: Draft) -> Subscription {
        draft.codec(Raw).handle(self.clone())
    }

    pub fn calls(&self) -> Vec<Call> {
        self.log().calls.clone()
    }

    pub fn count(&self) -> usize {
        self.log().calls.len()
    }

    /// The ids of the calls, in their order, as the server writes them.
    pub fn ids(&self) -> Vec<String> {
        self.log()
            .calls
            .iter()
            .map(|call| call.id.to_string())
            .collect()
    }

    /// How many different entries were handled.
    pub fn distinct(&self) -> usize {
        let log = self.log();
        log.calls
            .iter()
            .map(|call| call.id)
            .collect::<HashSet<_>>()
            .len()
    }

    /// The calls for this id.
    pub fn calls_of(&self, id: &str) -> Vec<Call> {
        let mut calls = self.calls();
        calls.retain(|call| call.id.to_string() == id);
        calls
    }

    /// Calls that run now.
    pub fn running_now(&self) -> usize {
        self.log().running.values().sum()
    }

    /// The most calls that ever ran at the same time.
    pub fn most_running(&self) -> usize {
        self.log().most_running
    }

    /// Ids that were handled twice at the same time.
    pub fn overlapped(&self) -> Vec<EntryId> {
        self.log().overlapped.clone()
    }

    /// The workers whose state was made, in order.
    pub fn started(&self) -> Vec<(usize, String)> {
        self.log().started.clone()
    }

    /// The workers that were stopped in good order.
    pub fn stopped(&self) -> Vec<usize> {
        self.log().stopped.clone()
    }

    /// Waits for this many calls, and panics with the number there was when they do not come.
    #[track_caller]
    pub fn reaches(&self, calls: usize) -> impl Future<Output = ()> {
        let (recorder, caller) = (self.clone(), std::panic::Location::caller());
        async move {
            let what = format!("{calls} calls of the handler (at {caller})");
            let enough = eventually(SOON, &what, || recorder.count() >= calls);
            enough.await;
        }
    }

    fn log(&self) -> MutexGuard<'_, Log> {
        // A handler that panics on purpose does so outside of the lock.
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Handler for Recorder {
    type Message = Entry;
    type State = Worker;

    async fn start(&self, worker: Worker) -> Result<Worker, BoxError> {
        let started = (worker.index(), worker.subscription().to_owned());
        self.log().started.push(started);
        Ok(worker)
    }

    async fn handle(&self, entry: Entry, context: &Context, worker: &mut Worker) -> Answer {
        let headers = context.headers().iter();
        let call = Call {
            id: context.id(),
            attempt: context.attempt(),
            delivery_count: context.delivery_count(),
            idle: context.idle(),
            worker: worker.index(),
            subscription: context.subscription().to_owned(),
            mode: context.mode(),
            headers: headers
                .map(|(name, value)| (name.to_vec(), value.to_vec()))
                .collect(),
            context: context.clone(),
            entry,
        };
        // Dropped with this future, however it ends.
        let _running = Running::begin(self, &call);
        (self.answer)(call).await
    }

    async fn stop(&self, worker: Worker) {
        self.log().stopped.push(worker.index());
    }
}

struct Running<'a> {
    recorder: &'a Recorder,
    id: EntryId,
}

impl<'a> Running<'a> {
    fn begin(recorder: &'a Recorder, call: &Call) -> Self {
        let id = call.id;
        let mut log = recorder.log();
        log.calls.push(call.clone());
        let of_this = log.running.entry(id).or_default();
        *of_this += 1;
        if *of_this > 1 {
            log.overlapped.push(id);
        }
        log.most_running = log.most_running.max(log.running.values().sum());
        drop(log);
        Running { recorder, id }
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        let mut log = self.recorder.log();
        if let Some(of_this) = log.running.get_mut(&self.id) {
            *of_this -= 1;
            if *of_this == 0 {
                log.running.remove(&self.id);
            }
        }
    }
}

/// Something that handlers wait for until the test says so.
#[derive(Clone)]
pub struct Gate(watch::Sender<bool>);

impl Gate {
    pub fn closed() -> Gate {
        Gate(watch::Sender::new(false))
    }

    pub fn open(&self) {
        self.0.send_replace(true);
    }

    pub fn close(&self) {
        self.0.send_replace(false);
    }

    pub async fn passed(&self) {
        // The sender is ours, so it cannot have gone.
        let _ = self.0.subscribe().wait_for(|open| *open).await;
    }
}

/// All events of a tree since its start. Whoever looks sees those that have been told by then, whether or
/// not a task has had its turn.
#[derive(Clone)]
pub struct Heard(Arc<Mutex<(Events, Vec<Event>)>>);

impl Heard {
    /// Has to be the first to ask for the tree's events, to hear them all.
    pub fn of(supervisor: &SupervisorHandle) -> Heard {
        let heard = Heard(Arc::new(Mutex::new((supervisor.events(), Vec::new()))));
        let (mut news, collected) = (supervisor.events(), heard.clone());
        // A listener may not be far behind.
        tokio::spawn(async move {
            loop {
                drop(collected.look());
                if let Ok(None) = news.next().await {
                    return;
                }
            }
        });
        heard
    }

    fn look(&self) -> MutexGuard<'_, (Events, Vec<Event>)> {
        let mut heard = lock(&self.0);
        let (events, all) = &mut *heard;
        // All of them, however many this task has had of late.
        while let Some(next) = unconstrained(events.next()).now_or_never() {
            match next {
                Ok(Some(event)) => all.push(event),
                Ok(None) => break,
                Err(MissedEvents(missed)) => panic!("the test missed {missed} events"),
            }
        }
        heard
    }

    pub fn all(&self) -> Vec<Event> {
        self.look().1.clone()
    }

    /// What this makes of the events, where it makes something of them.
    pub fn pick<T>(&self, pick: impl FnMut(&Event) -> Option<T>) -> Vec<T> {
        self.look().1.iter().filter_map(pick).collect()
    }

    pub fn count(&self, of: impl Fn(&Event) -> bool) -> usize {
        self.look().1.iter().filter(|event| of(event)).count()
    }

    /// Waits for an event of which this makes something.
    #[track_caller]
    pub fn wait<T>(
        &self,
        what: &str,
        mut pick: impl FnMut(&Event) -> Option<T>,
    ) -> impl Future<Output = T> {
        let heard = self.clone();
        super::wait::eventually_some(SOON, what, move || heard.pick(&mut pick).into_iter().next())
    }

    /// The ids of all entries that were reported as gone, sorted.
    pub fn gone(&self) -> Vec<EntryId> {
        let mut gone: Vec<EntryId> = self
            .pick(|event| match event {
                Event::Gone { ids, .. } => Some(ids.clone()),
                _ => None,
            })
            .concat();
        gone.sort_unstable();
        gone
    }

    /// No actor crashed, was restarted or gave up.
    #[track_caller]
    pub fn assert_nobody_crashed(&self) {
        let crashes = self.pick(|event| match event {
            Event::Crashed { .. } | Event::Restarted { .. } | Event::Escalated { .. } => {
                Some(event.clone())
            }
            _ => None,
        });
        assert!(crashes.is_empty(), "{crashes:?}");
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
