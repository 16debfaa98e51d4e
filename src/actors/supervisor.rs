//! The root of a tree: owns what survives, starts the actors, starts them again, gives up on one that
//! keeps failing, and ends the tree.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use ractor::{Actor, ActorCell, ActorId, ActorProcessingErr, ActorRef, SupervisionEvent};
use serde::Serialize;
use tokio::sync::watch;
use tokio::time::timeout_at;

use super::delays::Delays;
use super::drain::{Drain, DrainArguments, LAST_MOMENT, rest};
use super::handler::{HandlerActor, TargetGone};
use super::keep_alive;
use super::reader::Reader;
use super::settler::Settler;
use super::sweeper::Sweeper;
use super::tree::{Blame, SubscriptionState, Tree};
use crate::message::{EntryId, StreamKey, Verdict};
use crate::observe::{Child, Event};
use crate::state::Reason;
use crate::topology::RestartPolicy;

/// Crashes in a row of one worker, each over an entry, before it is started again with delays and at the
/// expense of its budget.
const CRASHES_IN_A_ROW: u32 = 5;
/// How long an actor that was told to end may take for it.
const LAST_WORD: Duration = Duration::from_secs(1);
/// What ractor says of an actor that was killed.
pub(super) const KILLED: &str = "killed";
/// How often running handlers are looked at, at most and at least.
const SHORTEST_TICK: Duration = Duration::from_millis(20);
const LONGEST_TICK: Duration = Duration::from_millis(250);

/// What is left of an entry when the tree has ended: it stays pending on the server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Remaining {
    /// The stream's key.
    pub stream: StreamKey,
    /// The group's name.
    pub group: Arc<str>,
    /// The entry's id.
    pub id: EntryId,
}

/// What a shutdown did.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct ShutdownReport {
    /// Verdicts that were stored on the server meanwhile.
    pub settled: u64,
    /// Entries that were read and not started, and were given back for others to take at once.
    pub given_back: u64,
    /// Entries whose handler was still running at the deadline.
    pub left_running: Vec<Remaining>,
    /// Entries whose verdict could not be stored before the deadline.
    pub unsettled: Vec<Remaining>,
}

/// Why a tree ended by itself: one of its actors kept failing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Failure {
    /// The actor.
    pub child: Child,
    /// How many restarts it had; 0 for one that cannot be started again.
    pub restarts: u32,
    /// The window in which they were counted.
    pub within: Duration,
    /// Its last failure.
    pub error: String,
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Failure {
            child,
            restarts,
            within,
            error,
        } = self;
        match restarts {
            0 => write!(f, "{child} failed: {error}"),
            _ => write!(
                f,
                "{child} failed more than {restarts} times within {within:?}, at last with: {error}"
            ),
        }
    }
}

impl std::error::Error for Failure {}

/// How a tree ended.
#[derive(Debug, Clone)]
pub(crate) struct Ended {
    pub report: ShutdownReport,
    pub failure: Option<Failure>,
}

/// What the supervisor actor is told. Opaque: [`SupervisorHandle`](crate::SupervisorHandle) has the
/// methods.
#[derive(Debug)]
pub struct SupervisorMessage(pub(crate) Message);

#[cfg(feature = "cluster")]
impl ractor::Message for SupervisorMessage {}

#[derive(Debug)]
pub(crate) enum Message {
    /// Drain, then end.
    Shutdown,
    /// The drain is over; all the rest should be by this time.
    Drained(ShutdownReport, Instant),
    /// Time to start this child again.
    Restart(Key),
    /// The number of this subscription's workers was changed.
    Staff(Arc<str>),
    /// Time to look after running handlers.
    Tick,
    /// The tree has ended: the front's message.
    Ended(Option<Failure>),
}

/// One of the supervisor's children, by its place in the tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Key {
    Reader(usize),
    Handler(usize, usize),
    Settler(usize),
    Sweeper(usize),
    KeepAlive,
    Drain,
}

pub(crate) struct SupervisorActor;

pub(crate) struct Outline {
    pub tree: Arc<Tree>,
    pub ended: watch::Sender<Option<Ended>>,
}

pub(crate) struct SupervisorState {
    tree: Arc<Tree>,
    ended: watch::Sender<Option<Ended>>,
    children: HashMap<ActorId, Key>,
    cells: HashMap<Key, ActorCell>,
    budgets: HashMap<Key, Budget>,
    /// What each handler was running when it was looked at last, and since when.
    watched: HashMap<Key, Watched>,
    /// Handlers that were given up on, with the entries they hang over.
    hung: HashMap<ActorId, (Arc<SubscriptionState>, Vec<EntryId>)>,
    draining: bool,
    failure: Option<Failure>,
}

struct Watched {
    run: u64,
    since: Instant,
    killed: bool,
}

impl Actor for SupervisorActor {
    type Msg = SupervisorMessage;
    type State = SupervisorState;
    type Arguments = Outline;

    async fn pre_start(
        &self,
        myself: ActorRef<SupervisorMessage>,
        Outline { tree, ended }: Outline,
    ) -> Result<SupervisorState, ActorProcessingErr> {
        let mut state = SupervisorState {
            tree: Arc::clone(&tree),
            ended,
            children: HashMap::new(),
            cells: HashMap::new(),
            budgets: HashMap::new(),
            watched: HashMap::new(),
            hung: HashMap::new(),
            draining: false,
            failure: None,
        };
        state.spawn(&myself, Key::KeepAlive).await?;
        for (at, _) in tree.groups.iter().enumerate() {
            state.spawn(&myself, Key::Settler(at)).await?;
        }
        for (at, _) in tree.delay_sets.iter().enumerate() {
            state.spawn(&myself, Key::Sweeper(at)).await?;
        }
        for (at, subscription) in tree.subscriptions.iter().enumerate() {
            for worker in 0..subscription.lanes.workers() {
                state.spawn(&myself, Key::Handler(at, worker)).await?;
            }
            state.spawn(&myself, Key::Reader(at)).await?;
        }
        myself.send_after(state.tick(), || SupervisorMessage(Message::Tick));
        Ok(state)
    }

    async fn handle(
        &self,
        myself: ActorRef<SupervisorMessage>,
        SupervisorMessage(message): SupervisorMessage,
        state: &mut SupervisorState,
    ) -> Result<(), ActorProcessingErr> {
        match message {
            Message::Shutdown => state.drain(&myself).await,
            Message::Restart(key) => state.restart(&myself, key).await,
            Message::Staff(name) => state.staff(&myself, &name).await,
            // Only ever said to the front.
            Message::Ended(_) => {}
            Message::Tick => {
                state.look_after_handlers(&myself).await;
                myself.send_after(state.tick(), || SupervisorMessage(Message::Tick));
            }
            Message::Drained(report, deadline) => {
                state.end(report, deadline).await;
                if let Some(failure) = state.failure.take() {
                    // The parent, if there is one, learns of it as of any failed actor.
                    return Err(failure.into());
                }
                myself.stop(None);
            }
        }
        Ok(())
    }

    async fn handle_supervisor_evt(
        &self,
        myself: ActorRef<SupervisorMessage>,
        event: SupervisionEvent,
        state: &mut SupervisorState,
    ) -> Result<(), ActorProcessingErr> {
        match event {
            SupervisionEvent::ActorFailed(cell, error) if error.is::<TargetGone>() => {
                state
                    .target_gone(&myself, cell.get_id(), error.to_string())
                    .await;
            }
            SupervisionEvent::ActorFailed(cell, error) => {
                state
                    .exited(&myself, cell.get_id(), Some(error.to_string()))
                    .await;
            }
            SupervisionEvent::ActorTerminated(cell, _, reason) => {
                // Who ends by itself gives no reason; being killed or cancelled is one.
                state.exited(&myself, cell.get_id(), reason).await;
            }
            _ => {}
        }
        Ok(())
    }
}

impl SupervisorState {
    async fn spawn(
        &mut self,
        myself: &ActorRef<SupervisorMessage>,
        key: Key,
    ) -> Result<(), ActorProcessingErr> {
        let tree = Arc::clone(&self.tree);
        let here = myself.get_cell();
        let subscription = |at: usize| {
            tree.subscriptions
                .get(at)
                .cloned()
                .ok_or("no such subscription")
        };
        let cell = match key {
            Key::Reader(at) => {
                let arguments = (Arc::clone(&tree), subscription(at)?);
                Reader::spawn_linked(None, Reader, arguments, here)
                    .await?
                    .0
                    .get_cell()
            }
            Key::Handler(at, worker) => {
                let arguments = (Arc::clone(&tree), subscription(at)?, worker);
                HandlerActor::spawn_linked(None, HandlerActor, arguments, here)
                    .await?
                    .0
                    .get_cell()
            }
            Key::Settler(at) => {
                let group = tree.groups.get(at).cloned().ok_or("no such group")?;
                Settler::spawn_linked(None, Settler, (tree, group), here)
                    .await?
                    .0
                    .get_cell()
            }
            Key::Sweeper(at) => {
                let delay_set = tree
                    .delay_sets
                    .get(at)
                    .cloned()
                    .ok_or("no such delay set")?;
                Sweeper::spawn_linked(None, Sweeper, (tree, delay_set), here)
                    .await?
                    .0
                    .get_cell()
            }
            Key::KeepAlive => keep_alive::spawn(tree, here).await?.get_cell(),
            Key::Drain => {
                let reader = |(key, cell): (&Key, &ActorCell)| match key {
                    Key::Reader(at) => {
                        Some((tree.subscriptions.get(*at)?.name().clone(), cell.clone()))
                    }
                    _ => None,
                };
                let readers = self.cells.iter().filter_map(reader).collect();
                let arguments = DrainArguments {
                    tree,
                    readers,
                    supervisor: myself.clone(),
                };
                Drain::spawn_linked(None, Drain, arguments, here)
                    .await?
                    .0
                    .get_cell()
            }
        };
        self.children.insert(cell.get_id(), key);
        self.cells.insert(key, cell);
        Ok(())
    }

    fn child(&self, key: Key) -> Child {
        let tree = &self.tree;
        let named = match key {
            Key::Reader(at) => tree.subscriptions.get(at).map(|it| it.reader()),
            Key::Handler(at, worker) => tree.subscriptions.get(at).map(|it| it.handler(worker)),
            Key::Settler(at) => tree.groups.get(at).map(|group| group.settler()),
            Key::Sweeper(at) => tree.delay_sets.get(at).map(|it| Child::Sweeper {
                set: it.set.clone(),
            }),
            Key::KeepAlive => Some(Child::KeepAlive),
            Key::Drain => None,
        };
        named.unwrap_or(Child::Drain)
    }

    /// An actor has ended: with an error, or in good order.
    async fn exited(
        &mut self,
        myself: &ActorRef<SupervisorMessage>,
        id: ActorId,
        error: Option<String>,
    ) {
        if let Some((subscription, entries)) = self.hung.remove(&id) {
            // The call that could not be ended has ended.
            subscription.group.in_flight.leave(entries);
            return;
        }
        let Some(key) = self.children.remove(&id) else {
            return;
        };
        if self.cells.get(&key).is_some_and(|cell| cell.get_id() == id) {
            self.cells.remove(&key);
        }
        let Some(mut error) = error else {
            // A worker that was one too many, and is not any more.
            if let Key::Handler(at, _) = key
                && let Some(subscription) = self.tree.subscriptions.get(at)
            {
                let name = Arc::clone(subscription.name());
                self.staff(myself, &name).await;
            }
            return;
        };
        let watched = self.watched.remove(&key);
        // It may have died of something else in the same moment.
        if watched.is_some_and(|it| it.killed) && error == KILLED {
            error = "its handler ran past its deadline and was ended".to_owned();
        }
        if let Key::Reader(at) | Key::Handler(at, _) = key
            && let Some(subscription) = self.tree.subscriptions.get(at)
        {
            subscription.condition.note(&error);
        }
        self.tree.announcer.announce(Event::Crashed {
            child: self.child(key),
            error: error.clone(),
        });
        match key {
            Key::Reader(at) => {
                self.cut_reader_off(at);
                self.start_again(myself, key, error).await;
            }
            Key::Handler(at, worker) => self.handler_died(myself, at, worker, error).await,
            Key::Drain => {
                // There is no one left to do it in order.
                self.failure.get_or_insert(Failure {
                    child: Child::Drain,
                    restarts: 0,
                    within: Duration::ZERO,
                    error,
                });
                self.end(ShutdownReport::default(), Instant::now() + LAST_WORD)
                    .await;
                myself.stop(None);
            }
            _ => self.start_again(myself, key, error).await,
        }
    }

    /// The actor that a subscription's entries are forwarded to has ended. It is not ours to start again.
    async fn target_gone(
        &mut self,
        myself: &ActorRef<SupervisorMessage>,
        id: ActorId,
        error: String,
    ) {
        let Some(key) = self.children.remove(&id) else {
            return;
        };
        self.cells.remove(&key);
        if let Key::Handler(at, _) = key
            && let Some(subscription) = self.tree.subscriptions.get(at)
        {
            subscription.condition.note(&error);
        }
        if !self.draining {
            self.escalate(myself, key, error, 0).await;
        }
    }

    /// Closes a dead reader's connection, here and on the server, so that no reply goes to it.
    fn cut_reader_off(&self, at: usize) {
        let Some(subscription) = self.tree.subscriptions.get(at) else {
            return;
        };
        let connection = subscription
            .connection
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
            .take();
        let Some(connection) = connection else { return };
        let ids = connection.server_ids();
        connection.abort();
        let settling = Arc::clone(&self.tree.settling);
        tokio::spawn(async move { settling.kill(&ids).await });
    }

    /// Starts the workers that a subscription lacks. Those that are too many end by themselves.
    async fn staff(&mut self, myself: &ActorRef<SupervisorMessage>, name: &Arc<str>) {
        let mut subscriptions = self.tree.subscriptions.iter();
        let Some(at) = subscriptions.position(|it| it.name() == name) else {
            return;
        };
        let Some(subscription) = self.tree.subscriptions.get(at).cloned() else {
            return;
        };
        for worker in 0..subscription.lanes.workers() {
            let key = Key::Handler(at, worker);
            if self.cells.contains_key(&key) || subscription.lanes.is_closed() {
                continue;
            }
            if let Err(error) = self.spawn(myself, key).await {
                self.start_again(myself, key, error.to_string()).await;
            }
        }
    }

    async fn handler_died(
        &mut self,
        myself: &ActorRef<SupervisorMessage>,
        at: usize,
        worker: usize,
        error: String,
    ) {
        let Some(subscription) = self.tree.subscriptions.get(at).cloned() else {
            return;
        };
        let key = Key::Handler(at, worker);
        // From here on nothing of the dead worker counts.
        subscription.lanes.enter(worker);
        let mut over_an_entry = subscription.lanes.cut_off(worker, |received| {
            subscription.settle(received, Verdict::Crashed(error.clone()));
        });
        // Where it had an actor of its own, and could not sort this out itself.
        over_an_entry |= subscription.sort_out_dropped(worker, Blame::Oldest, &error);
        if over_an_entry && subscription.lanes.crashed(worker) < CRASHES_IN_A_ROW {
            // The entry was to blame, not the worker.
            self.restart(myself, key).await;
        } else {
            self.start_again(myself, key, error).await;
        }
        // Its replacement may take its time to start, and a wake-up may have died with it.
        subscription.lanes.share_out(worker);
        subscription.lanes.hand_on();
    }

    /// Starts a child again, at the expense of its budget.
    async fn start_again(&mut self, myself: &ActorRef<SupervisorMessage>, key: Key, error: String) {
        let policy = &self.tree.restart;
        let budget = self
            .budgets
            .entry(key)
            .or_insert_with(|| Budget::new(policy));
        match budget.spend(Instant::now()) {
            Some(delay) if delay.is_zero() => self.restart(myself, key).await,
            Some(delay) => {
                myself.send_after(delay, move || SupervisorMessage(Message::Restart(key)));
            }
            None => {
                let restarts = self.tree.restart.max_restarts;
                self.escalate(myself, key, error, restarts).await;
            }
        }
    }

    async fn restart(&mut self, myself: &ActorRef<SupervisorMessage>, key: Key) {
        let ended = self.tree.order.borrow().stop;
        let failed = match key {
            Key::Reader(at) | Key::Handler(at, _) => self
                .tree
                .subscriptions
                .get(at)
                .is_none_or(|it| it.is_over()),
            _ => false,
        };
        // A tree that drains needs its settlers, its keep-alive and its sweepers to the end; a new
        // reader or handler would have nothing to do.
        let needless = self.draining && matches!(key, Key::Reader(_) | Key::Handler(..));
        if ended || failed || needless || self.cells.contains_key(&key) {
            return;
        }
        match self.spawn(myself, key).await {
            Ok(()) => {
                let child = self.child(key);
                let mut restarts = self
                    .tree
                    .restarts
                    .lock()
                    .unwrap_or_else(std::sync::PoisonError::into_inner);
                let count = restarts.entry(child.clone()).or_default();
                *count += 1;
                let restarts = *count;
                self.tree
                    .announcer
                    .announce(Event::Restarted { child, restarts });
            }
            // Nobody tells of an actor that did not come to be. Boxed, because the two call each other.
            Err(error) => Box::pin(self.start_again(myself, key, error.to_string())).await,
        }
    }

    async fn escalate(
        &mut self,
        myself: &ActorRef<SupervisorMessage>,
        key: Key,
        error: String,
        restarts: u32,
    ) {
        let child = self.child(key);
        self.tree.announcer.announce(Event::Escalated {
            child: child.clone(),
            error: error.clone(),
        });
        if self.tree.restart.isolate && !matches!(key, Key::KeepAlive | Key::Sweeper(_)) {
            return self.fail_subscriptions_of(key);
        }
        self.failure.get_or_insert(Failure {
            child,
            restarts,
            within: self.tree.restart.within,
            error,
        });
        self.drain(myself).await;
    }

    /// Stops the subscriptions that depend on a child, and leaves all others alone.
    fn fail_subscriptions_of(&self, key: Key) {
        let subscriptions: Vec<Arc<SubscriptionState>> = match key {
            Key::Reader(at) | Key::Handler(at, _) => self
                .tree
                .subscriptions
                .get(at)
                .cloned()
                .into_iter()
                .collect(),
            Key::Settler(at) => {
                let group = self.tree.groups.get(at);
                group.map(|it| it.give_up()).unwrap_or_default()
            }
            _ => Vec::new(),
        };
        for subscription in subscriptions {
            subscription.hold(Reason::Failed);
            subscription.group.queue.cancel_starts();
            let place = |it: &Arc<SubscriptionState>| Arc::ptr_eq(it, &subscription);
            let at = self.tree.subscriptions.iter().position(place);
            let reader = at.and_then(|at| self.cells.get(&Key::Reader(at)).cloned());
            let tree = Arc::clone(&self.tree);
            tokio::spawn(async move {
                rest(&tree, &subscription, reader, &AtomicU64::new(0)).await;
            });
        }
    }

    // ---- handlers past their deadline -------------------------------------------------------------------

    fn tick(&self) -> Duration {
        let shortest = self
            .tree
            .subscriptions
            .iter()
            .map(|it| it.plan.settings.handler_timeout)
            .min();
        (shortest.unwrap_or(LONGEST_TICK) / 4).clamp(SHORTEST_TICK, LONGEST_TICK)
    }

    async fn look_after_handlers(&mut self, myself: &ActorRef<SupervisorMessage>) {
        let tree = Arc::clone(&self.tree);
        let now = Instant::now();
        for (at, subscription) in tree.subscriptions.iter().enumerate() {
            let deadline = subscription.plan.settings.handler_timeout;
            for worker in 0..subscription.lanes.all() {
                let key = Key::Handler(at, worker);
                let Some(running) = subscription.lanes.running(worker) else {
                    self.watched.remove(&key);
                    continue;
                };
                let watched = self.watched.entry(key).or_insert(Watched {
                    run: running.number,
                    since: now,
                    killed: false,
                });
                if watched.run != running.number {
                    *watched = Watched {
                        run: running.number,
                        since: now,
                        killed: false,
                    };
                    continue;
                }
                let late = now.saturating_duration_since(watched.since);
                if !late.is_zero() {
                    subscription.lanes.share_out(worker);
                }
                if late < deadline {
                    continue;
                }
                if subscription.plan.handling.forwards().is_some() {
                    // Its actor is not ours to end.
                    subscription.lanes.give_up(worker, false, |received| {
                        abandon(subscription, received.id());
                    });
                } else if !watched.killed {
                    watched.killed = true;
                    // The application's actor, where there is one: this worker ends with it.
                    let actor = subscription.roster.get(worker).map(|it| it.cell);
                    if let Some(cell) = actor.or_else(|| self.cells.get(&key).cloned()) {
                        cell.kill();
                    }
                } else if late >= deadline + LAST_WORD {
                    self.abandon(myself, subscription, key, worker).await;
                }
            }
        }
    }

    /// A killed handler still runs: it is in a call that cannot be interrupted. Its worker is replaced,
    /// and the entry is left to whoever takes it over.
    async fn abandon(
        &mut self,
        myself: &ActorRef<SupervisorMessage>,
        subscription: &Arc<SubscriptionState>,
        key: Key,
        worker: usize,
    ) {
        self.watched.remove(&key);
        subscription.lanes.enter(worker);
        let mut abandoned = Vec::new();
        subscription.lanes.give_up(worker, true, |received| {
            abandon(subscription, received.id());
            abandoned.push(received.id());
        });
        if abandoned.is_empty() {
            return;
        }
        if let Some(cell) = self.cells.remove(&key) {
            self.children.remove(&cell.get_id());
            if subscription.roster.get(worker).is_some() {
                // What an actor holds reports itself when it lets go of it.
                cell.kill();
            } else {
                let hung = (Arc::clone(subscription), abandoned);
                self.hung.insert(cell.get_id(), hung);
            }
        }
        self.restart(myself, key).await;
        subscription.lanes.hand_on();
    }

    // ---- the end ----------------------------------------------------------------------------------------

    async fn drain(&mut self, myself: &ActorRef<SupervisorMessage>) {
        if std::mem::replace(&mut self.draining, true) {
            return;
        }
        if let Err(error) = self.spawn(myself, Key::Drain).await {
            tracing::error!(target: "streamvisor", %error, "the tree cannot be drained and ends as it is");
            let _ = myself.cast(SupervisorMessage(Message::Drained(
                ShutdownReport::default(),
                Instant::now() + LAST_WORD,
            )));
        }
    }

    /// Everybody has been told to end: waits for it, a moment, and closes the connections last.
    async fn end(&mut self, report: ShutdownReport, deadline: Instant) {
        let deadline = deadline.max(Instant::now() + LAST_MOMENT);
        self.tree.order.send_modify(|order| {
            order.stop_reading = true;
            order.stop = true;
        });
        let cells: Vec<ActorCell> = self.cells.drain().map(|(_, cell)| cell).collect();
        let within = deadline.saturating_duration_since(Instant::now());
        let ended = cells.iter().map(|cell| async move {
            if cell.wait(Some(within.min(LAST_WORD))).await.is_err() {
                cell.kill();
            }
        });
        futures_util::future::join_all(ended).await;
        let deadline = deadline.max(Instant::now() + LAST_MOMENT);
        let closed = self.tree.close_connections();
        if timeout_at(deadline.into(), closed).await.is_err() {
            self.tree.abort_connections();
        }
        let (settled, given_back) = (report.settled, report.given_back);
        self.tree.announcer.announce(Event::Drained {
            settled,
            given_back,
        });
        self.ended.send_replace(Some(Ended {
            report,
            failure: self.failure.clone(),
        }));
    }
}

/// Nobody here handles this entry any more, and nobody can end what does.
fn abandon(subscription: &SubscriptionState, id: EntryId) {
    subscription.group.in_flight.abandon(id);
    subscription.announcer.announce(Event::Abandoned {
        subscription: Arc::clone(subscription.name()),
        id,
    });
}

/// How often one child was started again of late.
struct Budget {
    max_restarts: u32,
    within: Duration,
    spent: VecDeque<Instant>,
    delays: Delays,
}

impl Budget {
    fn new(policy: &RestartPolicy) -> Self {
        Budget {
            max_restarts: policy.max_restarts,
            within: policy.within,
            spent: VecDeque::new(),
            delays: Delays::new(policy.first_delay, policy.max_delay),
        }
    }

    /// How long to wait before the next restart; `None` when there were too many.
    fn spend(&mut self, now: Instant) -> Option<Duration> {
        while self
            .spent
            .front()
            .is_some_and(|at| now.saturating_duration_since(*at) >= self.within)
        {
            self.spent.pop_front();
        }
        if self.spent.is_empty() {
            self.delays.reset();
        }
        self.spent.push_back(now);
        match self.spent.len() {
            spent if spent > self.max_restarts as usize => None,
            1 => Some(Duration::ZERO),
            _ => Some(self.delays.next()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_restart_is_immediate_the_next_wait_and_one_too_many_is_refused() {
        let mut budget = Budget::new(&RestartPolicy::default().max_restarts(3));
        let start = Instant::now();
        assert_eq!(budget.spend(start), Some(Duration::ZERO));
        let second = budget.spend(start).unwrap();
        assert!(second > Duration::ZERO);
        assert!(budget.spend(start).unwrap() > second / 2);
        assert_eq!(budget.spend(start), None);
    }

    #[test]
    fn restarts_outside_the_window_are_forgotten() {
        let policy = RestartPolicy::default()
            .max_restarts(1)
            .within(Duration::from_secs(10));
        let mut budget = Budget::new(&policy);
        let start = Instant::now();
        assert_eq!(budget.spend(start), Some(Duration::ZERO));
        assert_eq!(
            budget.spend(start + Duration::from_secs(10)),
            Some(Duration::ZERO)
        );
        assert_eq!(budget.spend(start + Duration::from_secs(11)), None);
    }
}
