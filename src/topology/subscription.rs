//! One thing to consume: what is read, how, and who handles it.

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use ractor::{Actor, ActorRef};

use super::handling::{
    BatchHandler, Batches, ByName, ByReference, Function, Handler, Handling, Own, Stateful, Worker,
};
use super::retry::{DelayedRetry, OnCrash, RetryPolicy};
use super::topology::FAR;
use crate::message::{BoxError, Codec, Context, Delivery, EntryId, Json, Outcome, StreamKey};

/// Where a group starts when this subscription creates it. A group that exists goes on where it
/// stands.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Start {
    /// With what is added from now on.
    #[default]
    New,
    /// With the oldest entry of the stream.
    Beginning,
    /// With the first entry after this one.
    After(EntryId),
}

/// What happens to an entry of the stream once it is acknowledged.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum AfterAck {
    /// It stays in the stream.
    #[default]
    Keep,
    /// It is deleted, unless another group of the stream still needs it.
    Delete,
}

/// Which entries a subscription reads. The modes return disjoint sets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReadMode {
    Tail,
    Reclaim { min_idle: Duration },
    Claiming { min_idle: Duration },
}

impl ReadMode {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            ReadMode::Tail => "tail",
            ReadMode::Reclaim { .. } => "reclaim",
            ReadMode::Claiming { .. } => "claiming",
        }
    }

    /// Whether it reads entries that no consumer has had.
    pub(crate) fn reads_fresh(self) -> bool {
        matches!(self, ReadMode::Tail | ReadMode::Claiming { .. })
    }

    /// The idle time from which it takes entries away from other consumers.
    pub(crate) fn min_idle(self) -> Option<Duration> {
        match self {
            ReadMode::Tail => None,
            ReadMode::Reclaim { min_idle } | ReadMode::Claiming { min_idle } => Some(min_idle),
        }
    }
}

/// Everything that can be set on a subscription.
#[derive(Debug, Clone)]
pub(crate) struct Settings {
    pub stream: StreamKey,
    pub mode: ReadMode,
    pub name: Option<String>,
    pub group: Option<String>,
    pub consumer: Option<String>,
    pub consumer_ttl: Duration,
    pub create_group: bool,
    /// `None`: not said, which is `Start::New`; told apart so that only what was said can conflict.
    pub start: Option<Start>,
    pub batch: usize,
    pub block: Duration,
    pub max_in_flight: usize,
    pub max_bytes_in_flight: usize,
    pub max_parked: usize,
    pub workers: usize,
    pub ordered_by: Option<Bytes>,
    pub handler_timeout: Duration,
    pub keep_alive: Option<Duration>,
    pub retry: RetryPolicy,
    pub on_crash: OnCrash,
    pub delayed_retry: DelayedRetry,
    pub dead_letter: Option<StreamKey>,
    pub after_ack: AfterAck,
}

/// A subscription that nothing handles yet; one of the handling methods makes it a [`Subscription`].
///
/// ```
/// use std::time::Duration;
/// use streamvisor::prelude::*;
///
/// #[derive(serde::Deserialize)]
/// struct Order { id: u64 }
///
/// let subscription = Subscription::tail("orders")
///     .group("workers")
///     .workers(8)
///     .retry(RetryPolicy::exponential(Duration::from_secs(1)).max_attempts(8).then_dead_letter())
///     .dead_letter("orders.dead")
///     .handle_fn(|order: Order, _delivery| async move {
///         println!("order {}", order.id);
///         Ok(Outcome::Ack)
///     });
/// ```
#[must_use = "a draft becomes a subscription with one of the handling methods, such as `handle_fn`"]
#[derive(Debug, Clone)]
pub struct Draft<C = Json> {
    settings: Settings,
    codec: C,
}

/// One thing to consume, complete: what is read and who handles it.
#[must_use = "a subscription runs once it is part of a topology: `Topology::subscribe`"]
#[derive(Clone)]
pub struct Subscription {
    pub(crate) settings: Settings,
    pub(crate) handling: Arc<dyn Handling>,
}

impl fmt::Debug for Subscription {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Subscription")
            .field("settings", &self.settings)
            .finish_non_exhaustive()
    }
}

impl Subscription {
    /// Reads fresh entries: those that no consumer of the group has had (`XREADGROUP … >`). Before
    /// that, what this very consumer left pending when it ended.
    pub fn tail(stream: impl Into<StreamKey>) -> Draft {
        Draft::new(stream.into(), ReadMode::Tail)
    }

    /// Takes over entries that a consumer of the group read, did not acknowledge, and has not kept
    /// fresh for `min_idle`, as `XAUTOCLAIM` does: what a crashed process left behind.
    ///
    /// Entries that a process works on are kept fresh, so `min_idle` says how soon a crash is
    /// noticed and need not exceed the time that a handler takes.
    pub fn reclaim(stream: impl Into<StreamKey>, min_idle: Duration) -> Draft {
        let min_idle = min_idle.min(FAR);
        Draft::new(stream.into(), ReadMode::Reclaim { min_idle })
    }

    /// Both in one read (`XREADGROUP … CLAIM`), which wakes for a fresh entry and for one that was left
    /// behind for `min_idle`: one subscription in place of a tail and a reclaim. Needs Redis 8.4 or
    /// later; elsewhere `start` fails and says so.
    pub fn claiming(stream: impl Into<StreamKey>, min_idle: Duration) -> Draft {
        let min_idle = min_idle.min(FAR);
        Draft::new(stream.into(), ReadMode::Claiming { min_idle })
    }
}

impl Draft {
    fn new(stream: StreamKey, mode: ReadMode) -> Self {
        Draft {
            settings: Settings {
                stream,
                mode,
                name: None,
                group: None,
                consumer: None,
                consumer_ttl: Duration::from_secs(3600),
                create_group: true,
                start: None,
                batch: 200,
                block: Duration::from_secs(5),
                max_in_flight: 2_000,
                max_bytes_in_flight: 64 << 20,
                max_parked: 10_000,
                workers: 8,
                ordered_by: None,
                handler_timeout: Duration::from_secs(30 * 60),
                keep_alive: None,
                retry: RetryPolicy::default(),
                on_crash: OnCrash::default(),
                delayed_retry: DelayedRetry::default(),
                dead_letter: None,
                after_ack: AfterAck::default(),
            },
            codec: Json,
        }
    }
}

impl<C> Draft<C> {
    /// What status, events and logs call it. Default: `<stream>/<group>/<mode>`.
    pub fn named(mut self, name: impl Into<String>) -> Self {
        self.settings.name = Some(name.into());
        self
    }

    /// The consumer group. Needed here or as the topology's default.
    pub fn group(mut self, group: impl Into<String>) -> Self {
        self.settings.group = Some(group.into());
        self
    }

    /// The consumer's name in the group. Default: made of host, process, a random part and the
    /// subscription. A process that is given the same name again takes up at once what it left
    /// pending. One process at a time may use a name: `start` waits for one that has crashed, for up to 1.5 s, and
    /// refuses a name that a living process uses.
    pub fn consumer(mut self, consumer: impl Into<String>) -> Self {
        self.settings.consumer = Some(consumer.into());
        self
    }

    /// How long a consumer of the group has to be gone, with nothing pending, until a reclaim or claiming
    /// subscription removes it: what crashed processes leave does not pile up. Default: an hour.
    pub fn consumer_ttl(mut self, gone_for: Duration) -> Self {
        self.settings.consumer_ttl = gone_for.min(FAR);
        self
    }

    /// Whether a missing group, and its stream, are created. With `false` a missing group is an
    /// error. Default: true.
    pub fn create_group(mut self, create: bool) -> Self {
        self.settings.create_group = create;
        self
    }

    /// Where the group starts when this creates it. Default: [`Start::New`].
    pub fn start(mut self, start: Start) -> Self {
        self.settings.start = Some(start);
        self
    }

    /// The most entries that one read asks for (`COUNT`). Default: 200.
    pub fn batch(mut self, entries: usize) -> Self {
        self.settings.batch = entries;
        self
    }

    /// How long a read waits on the server for entries, and a reclaim subscription between two
    /// passes that found nothing. Default: 5 s.
    pub fn block(mut self, wait: Duration) -> Self {
        self.settings.block = wait;
        self
    }

    /// The most entries in hand at once: read and not yet settled. Default: 2,000.
    ///
    /// Functions and handlers that are called are given no more than keeps the workers busy for some 20 ms and
    /// until the server answers, by the time that they take: a slow one holds few. Under
    /// [`ordered_by`](Self::ordered_by), and for actors, it is what this says.
    pub fn max_in_flight(mut self, entries: usize) -> Self {
        self.settings.max_in_flight = entries;
        self
    }

    /// The most bytes of entries in hand at once. A single larger entry is still read when nothing
    /// else is in hand. Default: 64 MiB.
    pub fn max_bytes_in_flight(mut self, bytes: usize) -> Self {
        self.settings.max_bytes_in_flight = bytes;
        self
    }

    /// The most entries that wait for an in-process delay with nothing but their id in memory. What
    /// comes on top counts as in flight. Default: 10,000.
    pub fn max_parked(mut self, entries: usize) -> Self {
        self.settings.max_parked = entries;
        self
    }

    /// How many handler actors run side by side, 65,536 at most; each handles one entry at a time. Default: 8.
    pub fn workers(mut self, workers: usize) -> Self {
        self.settings.workers = workers;
        self
    }

    /// Entries with the same value of this header (`h:<name>` in the stream) are handled one after
    /// the other, in the stream's order; a missing header is a value like any other. Retried, delayed
    /// and recovered entries come later and may be overtaken.
    pub fn ordered_by(mut self, header: impl AsRef<[u8]>) -> Self {
        let name = [crate::message::wire::HEADER, header.as_ref()].concat();
        self.settings.ordered_by = Some(name.into());
        self
    }

    /// How entries become messages. Default: [`Json`]. A codec that cannot make the handler's message
    /// is a compile error.
    pub fn codec<D>(self, codec: D) -> Draft<D> {
        Draft {
            settings: self.settings,
            codec,
        }
    }

    /// How long a handler may take for one entry. Past that it counts as hung: its worker is ended
    /// and the entry gets what [`on_crash`](Self::on_crash) says. Default: 30 min.
    pub fn handler_timeout(mut self, deadline: Duration) -> Self {
        self.settings.handler_timeout = deadline.min(FAR);
        self
    }

    /// How often entries in hand are kept fresh on the server. Default: a third of the smallest
    /// `min_idle` of the group in this topology, at most 5 s.
    pub fn keep_alive(mut self, interval: Duration) -> Self {
        self.settings.keep_alive = Some(interval.min(FAR));
        self
    }

    /// When a failed entry is tried again, and how often.
    pub fn retry(mut self, policy: RetryPolicy) -> Self {
        self.settings.retry = policy;
        self
    }

    /// What a panic, a hang or a dead worker means for its entry. Default: [`OnCrash::Retry`].
    pub fn on_crash(mut self, verdict: OnCrash) -> Self {
        self.settings.on_crash = verdict;
        self
    }

    /// Where a retry waits for its delay. Default: [`DelayedRetry::in_process`].
    pub fn delayed_retry(mut self, place: DelayedRetry) -> Self {
        self.settings.delayed_retry = place;
        self
    }

    /// Where entries go whose attempts are spent, that cannot be decoded, or for which a handler says
    /// [`Outcome::DeadLetter`].
    pub fn dead_letter(mut self, stream: impl Into<StreamKey>) -> Self {
        self.settings.dead_letter = Some(stream.into());
        self
    }

    /// What happens to an acknowledged entry. Default: [`AfterAck::Keep`].
    pub fn after_ack(mut self, what: AfterAck) -> Self {
        self.settings.after_ack = what;
        self
    }

    /// Handles each entry with an async function or closure.
    pub fn handle_fn<T, F, Fut>(self, function: F) -> Subscription
    where
        T: Send + 'static,
        C: Codec<T>,
        F: Fn(T, Context) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<Outcome, BoxError>> + Send + 'static,
    {
        Subscription {
            settings: self.settings,
            handling: Arc::new(Function::new(self.codec, function)),
        }
    }

    /// Handles each entry with a [`Handler`], which has a state per worker.
    pub fn handle<H>(self, handler: H) -> Subscription
    where
        H: Handler,
        C: Codec<H::Message>,
    {
        Subscription {
            settings: self.settings,
            handling: Arc::new(Stateful::new(self.codec, handler)),
        }
    }

    /// Handles up to [`batch`](Self::batch) entries in one call of a [`BatchHandler`].
    pub fn handle_batch<H>(self, handler: H) -> Subscription
    where
        H: BatchHandler,
        C: Codec<H::Message>,
    {
        let most = self.settings.batch;
        Subscription {
            settings: self.settings,
            handling: Arc::new(Batches::new(self.codec, handler, most)),
        }
    }

    /// Sends each entry to an actor of the application's own, which is spawned and supervised here, one for
    /// each worker: any `ractor` actor whose message can be made from a [`Delivery`]. The closure makes the actor and
    /// its arguments, when the worker starts and again after a crash.
    ///
    /// An actor gets about a millisecond of work in advance, two deliveries at least; what it has looked at
    /// (with any method of the delivery) no longer counts, so one that hands deliveries to tasks of its own
    /// gets more at once; it should look at them before, because what an actor has not looked at when it
    /// ends is sent again. An entry that was recovered is the only one that its actor has. Other messages
    /// reach the actors through [`SupervisorHandle::handlers`](crate::SupervisorHandle::handlers).
    ///
    /// ```
    /// use ractor::{Actor, ActorProcessingErr, ActorRef};
    /// use streamvisor::prelude::*;
    ///
    /// #[derive(serde::Deserialize)]
    /// struct Payment { amount: i64 }
    ///
    /// struct Ledger;
    ///
    /// enum LedgerMessage { Posted(Delivery<Payment>) }
    ///
    /// impl From<Delivery<Payment>> for LedgerMessage {
    ///     fn from(payment: Delivery<Payment>) -> Self { LedgerMessage::Posted(payment) }
    /// }
    /// # #[cfg(feature = "cluster")]
    /// # impl ractor::Message for LedgerMessage {}
    ///
    /// impl Actor for Ledger {
    ///     type Msg = LedgerMessage;
    ///     type State = i64;
    ///     type Arguments = i64;
    ///
    ///     async fn pre_start(&self, _: ActorRef<Self::Msg>, opening: i64) -> Result<i64, ActorProcessingErr> {
    ///         Ok(opening)
    ///     }
    ///
    ///     async fn handle(
    ///         &self,
    ///         _: ActorRef<Self::Msg>,
    ///         LedgerMessage::Posted(payment): Self::Msg,
    ///         balance: &mut i64,
    ///     ) -> Result<(), ActorProcessingErr> {
    ///         *balance += payment.message().amount;
    ///         payment.ack();
    ///         Ok(())
    ///     }
    /// }
    ///
    /// let subscription = Subscription::tail("payments")
    ///     .group("ledger")
    ///     .workers(4)
    ///     .ordered_by("account")
    ///     .actors(|_worker| (Ledger, 0));
    /// ```
    pub fn actors<T, A, F>(self, make: F) -> Subscription
    where
        T: Send + 'static,
        C: Codec<T>,
        A: Actor,
        A::Msg: From<Delivery<T>>,
        F: Fn(Worker) -> (A, A::Arguments) + Send + Sync + 'static,
    {
        Subscription {
            settings: self.settings,
            handling: Arc::new(Own::new(self.codec, make)),
        }
    }

    /// Sends each entry to an actor that lives elsewhere in the application. It is never restarted or killed
    /// here: when it ends, what it held comes back and is given back to the group, and the subscription fails.
    /// It gets up to [`max_in_flight`](Self::max_in_flight) deliveries at once, in the order in which they were
    /// read; there is one worker.
    pub fn forward_to<T, M>(mut self, actor: ActorRef<M>) -> Subscription
    where
        T: Send + 'static,
        C: Codec<T>,
        M: ractor::Message + From<Delivery<T>>,
    {
        self.settings.workers = 1;
        Subscription {
            settings: self.settings,
            handling: Arc::new(ByReference::new(self.codec, actor)),
        }
    }

    /// The same for an actor that is known by its name in ractor's registry. When it ends, what it held is given
    /// back to the group and reading pauses, until there is an actor of that name again.
    pub fn forward_to_named<T, M>(mut self, name: impl Into<String>) -> Subscription
    where
        T: Send + 'static,
        C: Codec<T>,
        M: ractor::Message + From<Delivery<T>>,
    {
        self.settings.workers = 1;
        Subscription {
            settings: self.settings,
            handling: Arc::new(ByName::<T, C, M>::new(self.codec, name.into())),
        }
    }
}
