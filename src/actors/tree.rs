//! What the actors of a tree share: the state they are lent, the connections, and the word to stop.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use tokio::sync::{Notify, watch};

use super::condition::Condition;
use super::lease::Lease;
use super::make_way::make_way;
use super::roster::Roster;
use super::verdict::{self, Step};
use crate::fail_point::fail_point;
use crate::message::{
    Destination, EntryId, Mode, Outcome, Publisher, Received, Source, StreamKey, Verdict,
};
use crate::observe::{Announcer, Child, Event, Verdicts};
use crate::server::capabilities::Capabilities;
use crate::server::{Connection, Group, Role, ServerError};
use crate::state::{
    Confirmed, CopyJob, Cursor, GivenBack, Hold, InFlight, Lanes, Reason, SettleQueue,
};
use crate::topology::{AfterAck, PlannedSubscription, ReadMode, Redis, RestartPolicy};

/// How long a subscription that the server refuses waits before it looks again.
pub(crate) const BLOCKED_FOR: Duration = Duration::from_secs(30);

/// How often an entry may come back from an actor that has not looked at it.
const MOST_RETURNS: u32 = 2;

/// What deliveries were dropped for that nobody had looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Blame {
    /// Their actor died of the oldest that it dropped.
    Oldest,
    /// It died of one that has had its verdict.
    Another,
    /// It lives on, or ended in good order.
    Nothing,
}

/// A running topology, but for its actors.
pub(crate) struct Tree {
    pub redis: Redis,
    /// Host, process and a random part: what its connections are called on the server.
    pub instance: String,
    pub restart: RestartPolicy,
    pub connect_timeout: Duration,
    pub shutdown_timeout: Duration,
    /// The group of subscriptions that name none.
    pub default_group: Option<String>,
    pub capabilities: Capabilities,
    pub announcer: Announcer,
    /// Settles, sweeps, counts starts, gives back: everything that may be sent twice.
    pub settling: Arc<Connection>,
    pub publishing: Arc<Connection>,
    pub publisher: Publisher,
    /// What there is at the moment. Only the supervisor changes it.
    pub parts: Mutex<Parts>,
    /// The number of the next part.
    pub numbers: AtomicUsize,
    /// The readers' connections and the keep-alive's, so that none outlives the tree.
    pub others: Mutex<Vec<Weak<Connection>>>,
    pub order: watch::Sender<Order>,
    /// Held while something that was asked for is done and told, so that what is told is in order.
    pub asked: Mutex<()>,
    /// How often each actor was started again.
    pub restarts: Mutex<HashMap<Child, u64>>,
}

/// What an actor is to do.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Order {
    /// Read nothing more.
    pub stop_reading: bool,
    /// End, once there is nothing left to do.
    pub stop: bool,
    /// Counts changes of what there is, so that everybody looks whether they are meant.
    pub changes: u64,
}

/// The parts of a tree, each in the order in which they came. Each has a number of its own, which no
/// other part has had or will have.
#[derive(Default)]
pub(crate) struct Parts {
    pub subscriptions: Vec<Arc<SubscriptionState>>,
    pub groups: Vec<Arc<GroupState>>,
    pub delay_sets: Vec<Arc<DelaySet>>,
}

/// What came to a tree, or left it.
pub(crate) struct Change {
    pub subscription: Arc<SubscriptionState>,
    /// The group, if nobody else is in it.
    pub group: Option<Arc<GroupState>>,
    /// The delay set, if nobody else uses it.
    pub delay_set: Option<Arc<DelaySet>>,
}

/// A (stream, group) pair of this process.
pub(crate) struct GroupState {
    pub number: usize,
    pub group: Arc<Group>,
    pub stream: StreamKey,
    pub in_flight: InFlight,
    pub queue: SettleQueue,
    /// How often what is in hand is kept fresh.
    pub keep_alive: Mutex<Duration>,
    /// That what is in hand is ours, as far as it was asked.
    pub kept: Confirmed,
    /// Those of this process that read from it.
    pub subscriptions: Mutex<Vec<Weak<SubscriptionState>>>,
    pub acknowledged: AtomicU64,
    /// Its settler was given up: no verdict is stored any more, so nothing is kept from others.
    pub given_up: AtomicBool,
    /// Nobody is in it any more: its settler ends.
    pub retired: AtomicBool,
    /// The server has said that the group does not exist, and what is in hand is not registered yet in the
    /// one that is made in its place: until then an entry that is pending for nobody was not settled by
    /// somebody else.
    pub missing: AtomicBool,
    /// Held by every batch on its way, and by whoever makes the group again, alone: what is settled in
    /// between would be registered, and stay pending for ever.
    pub whole: Arc<tokio::sync::RwLock<()>>,
}

/// For how long a round of the keep-alive makes it certain that nobody else takes what is in hand: no entry
/// is older than half an interval then, and others take what is older than three.
pub(crate) fn kept_for(keep_alive: Duration) -> Duration {
    keep_alive * 2
}

/// What attaching to a group came to.
#[derive(Debug)]
pub(crate) struct Attached {
    /// Where the group stands.
    pub last_delivered: EntryId,
    pub lease: Option<Lease>,
}

/// A subscription of this process.
pub(crate) struct SubscriptionState {
    pub number: usize,
    pub plan: PlannedSubscription,
    pub source: Arc<Source>,
    pub group: Arc<GroupState>,
    pub cursor: Mutex<Cursor>,
    pub lanes: Lanes,
    /// The application's own actors among its workers.
    pub roster: Roster,
    /// On its consumer's name, if that was given by the user.
    pub lease: Option<Lease>,
    /// The connection of the reader of the moment.
    pub connection: Mutex<Option<Arc<Connection>>>,
    pub condition: Condition,
    pub announcer: Announcer,
    pub delay_set: Option<Arc<DelaySet>>,
    /// Why it stands still, if it does: its own word to stop, beside the tree's. Only changed by
    /// [`hold`](Self::hold), [`release`](Self::release) and [`reopen`](Self::reopen).
    pub hold: watch::Sender<Hold>,
    pub given_back: GivenBack,
    /// How many entries it may have in hand at once; changed by
    /// [`set_max_in_flight`](Self::set_max_in_flight).
    pub max_in_flight: AtomicUsize,
    pub parked_full: AtomicBool,
    /// An event has told of a key that fills most of what may be in flight.
    pub hot_key_told: AtomicBool,
    /// Its reader has read.
    pub started: AtomicBool,
    pub counters: Counters,
}

/// What happened since the start, for the status.
#[derive(Default)]
pub(crate) struct Counters {
    pub read: AtomicU64,
    pub recovered: AtomicU64,
    pub gone: AtomicU64,
    pub foreign_copies: AtomicU64,
    pub acknowledged: AtomicU64,
    pub rejected: AtomicU64,
    pub retried: AtomicU64,
    pub delayed: AtomicU64,
    pub dead_lettered: AtomicU64,
    pub left_pending: AtomicU64,
}

impl Counters {
    /// Counts a verdict by what it asks for.
    fn verdict(&self, done: bool, step: &Step) {
        let counter = match step {
            Step::Acknowledge if done => &self.acknowledged,
            Step::Acknowledge => &self.rejected,
            Step::Copy(CopyJob {
                to: Destination::Stream,
                ..
            }) => &self.retried,
            Step::Copy(CopyJob {
                to: Destination::Delay { .. },
                ..
            })
            | Step::Park(..) => &self.delayed,
            Step::Copy(CopyJob {
                to: Destination::DeadLetter { .. },
                ..
            }) => &self.dead_lettered,
            Step::Leave(_) => &self.left_pending,
        };
        counter.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn verdicts(&self) -> Verdicts {
        let now = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Verdicts {
            acknowledged: now(&self.acknowledged),
            rejected: now(&self.rejected),
            retried: now(&self.retried),
            delayed: now(&self.delayed),
            dead_lettered: now(&self.dead_lettered),
            left_pending: now(&self.left_pending),
        }
    }
}

/// A delay set and who waits on it.
pub(crate) struct DelaySet {
    pub number: usize,
    pub set: StreamKey,
    pub stream: StreamKey,
    pub ttl: Option<Duration>,
    /// Told when this process has put an entry in.
    pub added: Notify,
    /// Nobody uses it any more: its sweeper ends.
    pub retired: AtomicBool,
}

impl DelaySet {
    fn new(number: usize, set: StreamKey, stream: StreamKey, ttl: Option<Duration>) -> Self {
        DelaySet {
            number,
            set,
            stream,
            ttl,
            added: Notify::new(),
            retired: AtomicBool::new(false),
        }
    }
}

impl Tree {
    fn parts(&self) -> MutexGuard<'_, Parts> {
        self.parts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn subscriptions(&self) -> Vec<Arc<SubscriptionState>> {
        self.parts().subscriptions.clone()
    }

    pub(crate) fn groups(&self) -> Vec<Arc<GroupState>> {
        self.parts().groups.clone()
    }

    pub(crate) fn delay_sets(&self) -> Vec<Arc<DelaySet>> {
        self.parts().delay_sets.clone()
    }

    /// The subscription of this number, as long as it belongs to the tree.
    pub(crate) fn subscription(&self, number: usize) -> Option<Arc<SubscriptionState>> {
        let parts = self.parts();
        let found = parts.subscriptions.iter().find(|it| it.number == number);
        found.cloned()
    }

    /// The subscription of this name.
    pub(crate) fn named(&self, name: &str) -> Option<Arc<SubscriptionState>> {
        let parts = self.parts();
        let found = parts.subscriptions.iter().find(|it| **it.name() == *name);
        found.cloned()
    }

    pub(crate) fn group(&self, number: usize) -> Option<Arc<GroupState>> {
        let parts = self.parts();
        let found = parts.groups.iter().find(|it| it.number == number);
        found.cloned()
    }

    pub(crate) fn delay_set(&self, number: usize) -> Option<Arc<DelaySet>> {
        let parts = self.parts();
        let found = parts.delay_sets.iter().find(|it| it.number == number);
        found.cloned()
    }

    /// What runs, as it was planned.
    pub(crate) fn plans(&self) -> Vec<PlannedSubscription> {
        let parts = self.parts();
        parts
            .subscriptions
            .iter()
            .map(|it| it.plan.clone())
            .collect()
    }

    /// Takes a subscription in, with the group and the delay set that it needs. `last_delivered` is
    /// where its group stands.
    pub(crate) fn take_in(&self, plan: PlannedSubscription, attached: Attached) -> Change {
        let Attached {
            last_delivered,
            lease,
        } = attached;
        let number = || self.numbers.fetch_add(1, Ordering::Relaxed);
        let settings = &plan.settings;
        let mut parts = self.parts();
        let known = parts.groups.iter().find(|it| it.is_of(&plan)).cloned();
        let is_new = known.is_none();
        let group = known.unwrap_or_else(|| Arc::new(GroupState::new(number(), &plan)));
        if is_new {
            parts.groups.push(Arc::clone(&group));
        }
        let (mut delay_set, mut new_delay_set) = (None, None);
        if let Some((set, ttl)) = plan.delay_set() {
            delay_set = parts.delay_sets.iter().find(|it| it.set == *set).cloned();
            if delay_set.is_none() {
                let stream = settings.stream.clone();
                let new = Arc::new(DelaySet::new(number(), set.clone(), stream, ttl));
                parts.delay_sets.push(Arc::clone(&new));
                (delay_set, new_delay_set) = (Some(Arc::clone(&new)), Some(new));
            }
        }
        let source = Arc::new(Source {
            stream: settings.stream.clone(),
            group: Arc::clone(&plan.group),
            consumer: Arc::clone(&plan.consumer),
            subscription: Arc::clone(&plan.name),
            mode: match settings.mode {
                ReadMode::Tail => Mode::Tail,
                ReadMode::Reclaim { .. } => Mode::Reclaim,
                ReadMode::Claiming { .. } => Mode::Claiming,
            },
            publisher: self.publisher.clone(),
            index: group.in_flight.join(),
            lost: Notify::new(),
        });
        let subscription = Arc::new(SubscriptionState {
            number: number(),
            source,
            group: Arc::clone(&group),
            cursor: Mutex::new(Cursor::new(last_delivered)),
            lanes: Lanes::new(
                settings.workers,
                settings.ordered_by.clone(),
                plan.handling.takes(),
                plan.handling.messages().is_none() && plan.handling.forwards().is_none(),
            ),
            roster: Roster::new(),
            lease,
            connection: Mutex::new(None),
            condition: Condition::new(Arc::clone(&plan.name), self.announcer.clone()),
            announcer: self.announcer.clone(),
            delay_set,
            hold: watch::Sender::new(Hold::default()),
            given_back: GivenBack::default(),
            max_in_flight: AtomicUsize::new(settings.max_in_flight),
            parked_full: AtomicBool::new(false),
            hot_key_told: AtomicBool::new(false),
            started: AtomicBool::new(false),
            counters: Counters::default(),
            plan,
        });
        group.members().push(Arc::downgrade(&subscription));
        parts.subscriptions.push(Arc::clone(&subscription));
        Change {
            subscription,
            group: is_new.then_some(group),
            delay_set: new_delay_set,
        }
    }

    /// Takes a subscription out, with the group and the delay set that nobody else uses.
    pub(crate) fn take_out(&self, subscription: Arc<SubscriptionState>) -> Change {
        let mut parts = self.parts();
        parts
            .subscriptions
            .retain(|it| it.number != subscription.number);
        let group = Arc::clone(&subscription.group);
        group.in_flight.part(subscription.source.index);
        group.queue.left(subscription.source.index);
        let this = |it: &Weak<SubscriptionState>| std::ptr::eq(it.as_ptr(), &*subscription);
        group.members().retain(|it| !this(it));
        let in_group = |it: &Arc<SubscriptionState>| Arc::ptr_eq(&it.group, &group);
        let group = (!parts.subscriptions.iter().any(in_group)).then_some(group);
        subscription.roster.close();
        if let Some(group) = &group {
            group.in_flight.close();
            group.retired.store(true, Ordering::Release);
            parts.groups.retain(|it| it.number != group.number);
        }
        let delay_set = subscription.delay_set.clone().filter(|set| {
            let uses = |it: &Arc<SubscriptionState>| {
                it.delay_set
                    .as_ref()
                    .is_some_and(|it| it.number == set.number)
            };
            !parts.subscriptions.iter().any(uses)
        });
        if let Some(delay_set) = &delay_set {
            delay_set.retired.store(true, Ordering::Release);
            parts.delay_sets.retain(|it| it.number != delay_set.number);
        }
        Change {
            subscription,
            group,
            delay_set,
        }
    }

    /// Everybody looks at what has changed: how often each group is kept fresh, and who is not needed
    /// any more.
    pub(crate) fn changed(&self, plans: &[PlannedSubscription]) {
        for group in self.groups() {
            if let Some(plan) = plans.iter().find(|it| group.is_of(it)) {
                *group
                    .keep_alive
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner) = plan.keep_alive;
            }
        }
        self.order.send_modify(|order| order.changes += 1);
    }

    /// Opens a connection that is closed with the tree at the latest.
    pub(crate) async fn connect(
        &self,
        role: Role,
        what: &str,
        within: Duration,
    ) -> Result<Arc<Connection>, ServerError> {
        let name = connection_name(&self.instance, what);
        let connection = Arc::new(Connection::open(&self.redis, role, &name, within).await?);
        let mut others = self.others.lock().unwrap_or_else(PoisonError::into_inner);
        others.retain(|other| other.strong_count() > 0);
        others.push(Arc::downgrade(&connection));
        Ok(connection)
    }

    /// Closes every connection where it stands: nobody is left to close them in order.
    pub(crate) fn abort_connections(&self) {
        let others = self.others.lock().unwrap_or_else(PoisonError::into_inner);
        for connection in others.iter().filter_map(Weak::upgrade) {
            connection.abort();
        }
        self.settling.abort();
        self.publishing.abort();
    }

    /// Nobody is here any more: whoever waits for something of this tree learns that it will not come.
    pub(crate) fn close(&self) {
        for group in self.groups() {
            group.in_flight.close();
        }
        for subscription in self.subscriptions() {
            subscription.roster.close();
        }
    }

    /// Closes every connection with a goodbye.
    pub(crate) async fn close_connections(&self) {
        let others: Vec<_> = {
            let others = self.others.lock().unwrap_or_else(PoisonError::into_inner);
            others.iter().filter_map(Weak::upgrade).collect()
        };
        futures_util::future::join_all(others.iter().map(|connection| connection.close())).await;
        tokio::join!(self.settling.close(), self.publishing.close());
    }
}

impl DelaySet {
    /// A place where this crate's tests have its sweeper fail.
    pub(crate) fn at(&self, point: &'static str) {
        fail_point(point, self.set.as_bytes());
    }
}

/// `CLIENT SETNAME` takes no blanks and no line breaks.
pub(crate) fn connection_name(instance: &str, what: &str) -> String {
    let name = format!("streamvisor-{instance}-{what}");
    name.chars()
        .map(|c| if c.is_ascii_graphic() { c } else { '_' })
        .collect()
}

impl SubscriptionState {
    pub(crate) fn name(&self) -> &Arc<str> {
        &self.plan.name
    }

    pub(crate) fn cursor(&self) -> std::sync::MutexGuard<'_, Cursor> {
        self.cursor.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts nothing from here on, for this reason; the reader sees to the rest when it looks. Returns
    /// whether this is news.
    pub(crate) fn hold(&self, reason: Reason) -> bool {
        // The workers are told under the same lock, so that they and the reader hear the same last word.
        self.hold.send_if_modified(|hold| {
            let news = hold.add(reason);
            if news {
                self.lanes.hold();
            }
            if news && hold.is_final() {
                self.given_back.put(self.lanes.close());
            }
            news
        })
    }

    /// There is this reason no more. Returns whether this is news.
    pub(crate) fn release(&self, reason: Reason) -> bool {
        self.hold.send_if_modified(|hold| hold.take_away(reason))
    }

    /// Lets the workers go on if no reason is left; returns whether they do.
    pub(crate) fn reopen(&self) -> bool {
        self.hold.send_if_modified(|hold| {
            let open = hold.unbar();
            if open {
                self.lanes.release();
            }
            open
        })
    }

    /// Pauses or resumes it, as the application asks, and tells of it where that is news.
    pub(crate) fn pause(&self, tree: &Tree, pause: bool) {
        let _in_order = tree.asked.lock().unwrap_or_else(PoisonError::into_inner);
        let subscription = Arc::clone(self.name());
        if pause && self.hold(Reason::Paused) {
            self.announcer.announce(Event::Paused { subscription });
        } else if !pause && self.release(Reason::Paused) {
            self.announcer.announce(Event::Resumed { subscription });
        }
    }

    /// From the next read on.
    pub(crate) fn set_max_in_flight(&self, entries: usize) {
        self.max_in_flight.store(entries, Ordering::Relaxed);
        // Whoever waits for room looks again.
        self.group.in_flight.nudge(self.source.index);
    }

    pub(crate) fn is_held_for(&self, reason: Reason) -> bool {
        self.hold.borrow().is_for(reason)
    }

    /// Whether it has been given up or taken out, and will not go on.
    pub(crate) fn is_over(&self) -> bool {
        self.hold.borrow().is_final()
    }

    /// These are done with, and need no more than an acknowledgement. They are in flight until the server has
    /// stored it. To be followed by [`make_way_for_settler`](Self::make_way_for_settler).
    pub(crate) fn acknowledge(
        &self,
        ids: impl IntoIterator<Item = EntryId, IntoIter: ExactSizeIterator>,
    ) {
        let ids = ids.into_iter();
        let acknowledged = &self.counters.acknowledged;
        acknowledged.fetch_add(ids.len() as u64, Ordering::Relaxed);
        self.group.queue.acknowledge(ids);
    }

    /// Whoever gave a verdict may block its thread a moment later.
    pub(crate) fn make_way_for_settler(&self) {
        if self.group.queue.has_woken() {
            make_way();
        }
    }

    /// Does what a verdict on one of its entries asks for. The entry is in flight until the server has
    /// stored it.
    pub(crate) fn settle(&self, received: &Received, verdict: Verdict) {
        let group = &self.group;
        let id = received.id();
        let done = matches!(verdict, Verdict::Said(Outcome::Ack));
        if let Verdict::Failed(error) | Verdict::Crashed(error) | Verdict::Undecodable(error) =
            &verdict
        {
            self.condition.note(error);
        }
        let step = verdict::step(received, verdict, &self.plan.settings);
        self.counters.verdict(done, &step);
        match step {
            Step::Acknowledge => group.queue.acknowledge([id]),
            // Its owner gives a verdict of its own.
            Step::Copy(_) | Step::Park(..) if received.is_lost() => {
                group.in_flight.release([id]);
            }
            Step::Copy(job) => group.queue.copy(job),
            Step::Park(delay, job) => {
                if !group.in_flight.park(id, self.plan.settings.max_parked) {
                    if !self.parked_full.swap(true, Ordering::Relaxed) {
                        self.announcer.announce(Event::ParkedFull {
                            subscription: self.name().clone(),
                        });
                    }
                } else {
                    self.parked_full.store(false, Ordering::Relaxed);
                }
                // A delay beyond what the clock can say is as good as for ever.
                let far = Duration::from_secs(u64::from(u32::MAX));
                group.queue.park(Instant::now() + delay.min(far), job);
            }
            Step::Leave(reason) => {
                group.in_flight.leave([id]);
                if let Some(reason) = reason {
                    let subscription = self.name().clone();
                    self.announcer.announce(Event::LeftPending {
                        subscription,
                        id,
                        reason,
                    });
                }
            }
        }
        self.make_way_for_settler();
    }

    /// Entries were deleted while they were pending.
    pub(crate) fn tell_of_gone(&self, ids: Vec<EntryId>) {
        let gone = &self.counters.gone;
        gone.fetch_add(ids.len() as u64, Ordering::Relaxed);
        let subscription = Arc::clone(self.name());
        self.announcer.announce(Event::Gone { subscription, ids });
    }

    /// Whether what is in hand is still ours, as far as it was asked: not after the process was frozen, or
    /// could not reach the server.
    pub(crate) fn is_certain(&self, now: Instant) -> bool {
        self.group.kept.is_certain(now) && self.has_its_name(now)
    }

    /// Whether no other process can have the consumer's name.
    pub(crate) fn has_its_name(&self, now: Instant) -> bool {
        self.lease
            .as_ref()
            .is_none_or(|lease| lease.held.is_certain(now))
    }

    /// Returns once it is certain.
    pub(crate) async fn certain(&self) {
        while !self.is_certain(Instant::now()) {
            self.group.kept.certain().await;
            self.named().await;
        }
    }

    /// Returns once no other process can have the consumer's name.
    pub(crate) async fn named(&self) {
        if let Some(lease) = &self.lease {
            lease.held.certain().await;
        }
    }

    /// Another process has the consumer's name, and takes for its own what is pending in it.
    pub(crate) fn lose_name(&self) {
        let held = self.group.in_flight.of(self.source.index);
        self.group.lose(&held);
    }

    /// What becomes of the deliveries that a worker's actor dropped without a verdict. What was started gets
    /// the crash verdict, and so does the oldest one if the actor died of it; the rest goes back to where it came
    /// from. For ever only if something else is to blame each time. Whether there was a crash verdict.
    pub(crate) fn sort_out_dropped(&self, worker: usize, blame: Blame, error: &str) -> bool {
        let mut oldest_too = blame == Blame::Oldest;
        let mut blamed = blame == Blame::Another;
        self.lanes.sort_out_dropped(worker, |run| {
            let started = std::mem::take(&mut oldest_too) || run.seen;
            blamed |= started;
            if started || (!blamed && run.received.comes_back() > MOST_RETURNS) {
                self.settle(&run.received, Verdict::Crashed(error.to_owned()));
                return true;
            }
            false
        })
    }

    /// Nobody works here any more, and nobody will sort out what comes back: but for verdicts that are on
    /// their way, nothing is kept from others. Late work on what an actor holds counts all the same.
    pub(crate) fn let_go_of_all(&self) {
        let in_flight = &self.group.in_flight;
        self.lanes
            .abandon(|received| in_flight.abandon(received.id()));
        let on_their_way = self.group.queue.unsettled().into_iter().collect();
        in_flight.leave_all_of(self.source.index, &on_their_way);
    }

    /// A place where this crate's tests have one of its actors fail.
    pub(crate) fn at(&self, point: &'static str) {
        fail_point(point, self.name().as_bytes());
    }

    pub(crate) fn reader(&self) -> Child {
        Child::Reader {
            subscription: self.name().clone(),
        }
    }

    pub(crate) fn handler(&self, worker: usize) -> Child {
        Child::Handler {
            subscription: self.name().clone(),
            worker,
        }
    }
}

impl GroupState {
    fn new(number: usize, plan: &PlannedSubscription) -> Self {
        let stream = plan.settings.stream.clone();
        GroupState {
            number,
            group: Arc::new(Group::new(stream.clone(), Arc::clone(&plan.group))),
            stream,
            in_flight: InFlight::default(),
            queue: SettleQueue::new(),
            keep_alive: Mutex::new(plan.keep_alive),
            kept: Confirmed::new(kept_for(plan.keep_alive)),
            subscriptions: Mutex::default(),
            acknowledged: AtomicU64::new(0),
            given_up: AtomicBool::new(false),
            retired: AtomicBool::new(false),
            missing: AtomicBool::new(false),
            whole: Arc::default(),
        }
    }

    /// Whether the subscription reads from it.
    pub(crate) fn is_of(&self, plan: &PlannedSubscription) -> bool {
        self.stream == plan.settings.stream && self.group.name == plan.group
    }

    fn members(&self) -> MutexGuard<'_, Vec<Weak<SubscriptionState>>> {
        self.subscriptions
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// The subscription of this index.
    pub(crate) fn subscription(&self, index: usize) -> Option<Arc<SubscriptionState>> {
        let subscriptions = self.members();
        let mut subscriptions = subscriptions.iter().filter_map(Weak::upgrade);
        subscriptions.find(|it| it.source.index == index)
    }

    pub(crate) fn each_subscription(&self) -> Vec<Arc<SubscriptionState>> {
        self.members().iter().filter_map(Weak::upgrade).collect()
    }

    /// Whether what is acknowledged is deleted: it is if one of the subscriptions says so.
    pub(crate) fn deletes(&self) -> bool {
        let members = self.members();
        let mut subscriptions = members.iter().filter_map(Weak::upgrade);
        subscriptions.any(|it| it.plan.settings.after_ack == AfterAck::Delete)
    }

    /// Whether no other process can have the name of one of its consumers.
    pub(crate) fn has_its_names(&self, now: Instant) -> bool {
        let members = self.members();
        let mut subscriptions = members.iter().filter_map(Weak::upgrade);
        subscriptions.all(|it| it.has_its_name(now))
    }

    /// How often what is in hand is kept fresh.
    pub(crate) fn keep_alive(&self) -> Duration {
        *self
            .keep_alive
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// A place where this crate's tests have one of its actors fail.
    pub(crate) fn at(&self, point: &'static str) {
        fail_point(point, self.stream.as_bytes());
    }

    pub(crate) fn is_given_up(&self) -> bool {
        self.given_up.load(Ordering::Acquire)
    }

    /// The server has said that the group does not exist. One of its readers makes it again, if that is
    /// wanted, even if none has room to read.
    pub(crate) fn notice_missing(&self) {
        for subscription in self.each_subscription() {
            if subscription.plan.settings.create_group {
                self.missing.store(true, Ordering::Release);
            }
            self.in_flight.nudge(subscription.source.index);
        }
    }

    /// Nothing more is started and nothing kept from others. Returns who has to stop.
    pub(crate) fn give_up(&self) -> Vec<Arc<SubscriptionState>> {
        self.given_up.store(true, Ordering::Release);
        self.queue.close_starts();
        self.each_subscription()
    }

    pub(crate) fn settler(&self) -> Child {
        Child::Settler {
            stream: self.stream.clone(),
            group: self.group.name.clone(),
        }
    }

    /// An entry that another consumer owns now: its handler is told, and whoever waits for it does
    /// not start it.
    pub(crate) fn lose(&self, ids: &[EntryId]) {
        for &id in ids {
            let Some(index) = self.in_flight.lose(id) else {
                continue;
            };
            if let Some(subscription) = self.subscription(index) {
                let name = subscription.name().clone();
                subscription.announcer.announce(Event::OwnershipLost {
                    subscription: name,
                    id,
                });
            }
        }
    }
}
