//! The root of a tree: owns what survives, starts the actors, starts them again, gives up on one that
//! keeps failing, and ends the tree.

mod budget;
mod deadlines;
mod end;
mod members;
mod workers;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use ractor::{Actor, ActorCell, ActorId, ActorProcessingErr, ActorRef, SupervisionEvent};
use tokio::sync::{oneshot, watch};

use super::drain::{Drain, DrainArguments, Scope, rest};
use super::handler::{HandlerActor, ReferenceEnded};
use super::keep_alive;
use super::reader::Reader;
use super::settler::Settler;
use super::sweeper::Sweeper;
use super::tree::{SubscriptionState, Tree};
use crate::message::EntryId;
use crate::observe::{Child, Event};
use crate::state::Reason;

use budget::Budget;
use deadlines::Watched;
pub(crate) use end::Ended;
pub use end::{Failure, Remaining, ShutdownReport};
pub use members::ControlError;
pub(crate) use members::{Addition, Removal, there_are};

/// How long an actor that was told to end may take for it.
pub(crate) const LAST_WORD: Duration = Duration::from_secs(1);
/// What ractor says of an actor that was killed.
pub(crate) const KILLED: &str = "killed";

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
    /// All children have ended, and been heard of.
    EveryoneEnded(ShutdownReport, Instant),
    /// Take a subscription in.
    Add(Box<Addition>),
    /// Take a subscription out.
    Remove(Removal),
    /// The subscription of this number has stopped, and can be taken out.
    Stopped(usize, ShutdownReport),
    /// Time to start this child again.
    Restart(Key),
    /// Another process has the name of this subscription's consumer.
    NameLost(usize),
    /// The number of this subscription's workers was changed.
    Staff(usize),
    /// Time to look after running handlers.
    Tick,
    /// The tree has ended: the front's message.
    Ended(Option<Failure>),
}

/// One of the supervisor's children, by the number of the part of the tree that it works for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Key {
    Reader(usize),
    Handler(usize, usize),
    Settler(usize),
    Sweeper(usize),
    KeepAlive,
    /// Stops the tree.
    Drain,
    /// Stops a subscription that is taken out.
    Removal(usize),
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
    /// Who waits for a subscription to be taken out.
    removals: HashMap<usize, oneshot::Sender<Result<ShutdownReport, ControlError>>>,
    draining: bool,
    failure: Option<Failure>,
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
            removals: HashMap::new(),
            draining: false,
            failure: None,
        };
        state.spawn(&myself, Key::KeepAlive).await?;
        for group in tree.groups() {
            state.spawn(&myself, Key::Settler(group.number)).await?;
        }
        for delay_set in tree.delay_sets() {
            state.spawn(&myself, Key::Sweeper(delay_set.number)).await?;
        }
        for subscription in tree.subscriptions() {
            state.spawn_all_of(&myself, &subscription).await?;
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
            Message::NameLost(number) => state.name_lost(number),
            Message::Staff(number) => state.staff(&myself, number).await,
            // Only ever said to the front.
            Message::Ended(_) => {}
            Message::Tick => {
                state.look_after_handlers(&myself).await;
                myself.send_after(state.tick(), || SupervisorMessage(Message::Tick));
            }
            Message::Add(addition) => state.add(&myself, *addition).await,
            Message::Remove(removal) => state.remove(&myself, removal).await,
            Message::Stopped(number, report) => state.take_out(number, report),
            Message::Drained(report, deadline) => {
                state.end(&myself, report, deadline).await;
            }
            Message::EveryoneEnded(report, deadline) => {
                state.close(report, deadline).await;
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
            SupervisionEvent::ActorFailed(cell, error) if error.is::<ReferenceEnded>() => {
                state
                    .reference_ended(&myself, cell.get_id(), error.to_string())
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
    /// Starts the handlers and the reader of a subscription.
    async fn spawn_all_of(
        &mut self,
        myself: &ActorRef<SupervisorMessage>,
        subscription: &SubscriptionState,
    ) -> Result<(), ActorProcessingErr> {
        let number = subscription.number;
        for worker in 0..subscription.lanes.workers() {
            self.spawn(myself, Key::Handler(number, worker)).await?;
        }
        self.spawn(myself, Key::Reader(number)).await
    }

    async fn spawn(
        &mut self,
        myself: &ActorRef<SupervisorMessage>,
        key: Key,
    ) -> Result<(), ActorProcessingErr> {
        let tree = Arc::clone(&self.tree);
        let here = myself.get_cell();
        let subscription = |number| tree.subscription(number).ok_or("no such subscription");
        let cell = match key {
            Key::Reader(number) => {
                let arguments = (Arc::clone(&tree), subscription(number)?);
                Reader::spawn_linked(None, Reader, arguments, here)
                    .await?
                    .0
                    .get_cell()
            }
            Key::Handler(number, worker) => {
                let arguments = (Arc::clone(&tree), subscription(number)?, worker);
                HandlerActor::spawn_linked(None, HandlerActor, arguments, here)
                    .await?
                    .0
                    .get_cell()
            }
            Key::Settler(number) => {
                let group = tree.group(number).ok_or("no such group")?;
                Settler::spawn_linked(None, Settler, (tree, group), here)
                    .await?
                    .0
                    .get_cell()
            }
            Key::Sweeper(number) => {
                let delay_set = tree.delay_set(number).ok_or("no such delay set")?;
                Sweeper::spawn_linked(None, Sweeper, (tree, delay_set), here)
                    .await?
                    .0
                    .get_cell()
            }
            Key::KeepAlive => keep_alive::spawn(tree, here).await?.get_cell(),
            Key::Drain | Key::Removal(_) => {
                let scope = match key {
                    Key::Removal(number) => Scope::Subscription(subscription(number)?),
                    _ => Scope::Tree,
                };
                let actors = self.cells.iter();
                let arguments = DrainArguments {
                    tree: Arc::clone(&tree),
                    scope,
                    actors: actors.map(|(key, cell)| (*key, cell.clone())).collect(),
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
            Key::Reader(number) => tree.subscription(number).map(|it| it.reader()),
            Key::Handler(number, worker) => tree.subscription(number).map(|it| it.handler(worker)),
            Key::Settler(number) => tree.group(number).map(|group| group.settler()),
            Key::Sweeper(number) => tree.delay_set(number).map(|it| Child::Sweeper {
                set: it.set.clone(),
            }),
            Key::KeepAlive => Some(Child::KeepAlive),
            Key::Drain | Key::Removal(_) => None,
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
            if let Key::Handler(number, _) = key {
                self.staff(myself, number).await;
            }
            return;
        };
        let hung = self.watched.remove(&key).filter(|it| it.killed);
        // It may have died of something else in the same moment.
        if hung.is_some() && error == KILLED {
            error = "its handler ran past its deadline and was ended".to_owned();
        }
        if let Key::Reader(number) | Key::Handler(number, _) = key
            && let Some(subscription) = self.tree.subscription(number)
        {
            subscription.condition.note(&error);
        }
        self.tree.announcer.announce(Event::Crashed {
            child: self.child(key),
            error: error.clone(),
        });
        if self.tree.order.borrow().stop {
            return;
        }
        match key {
            Key::Reader(number) => {
                self.cut_reader_off(number);
                self.start_again(myself, key, error).await;
            }
            Key::Handler(number, worker) => {
                self.handler_died(myself, number, worker, error).await;
                if let Some(hung) = hung {
                    self.give_up_what_outlived(number, worker, &hung);
                }
            }
            // What it was to stop starts nothing any more; what it has not seen to stays pending.
            Key::Removal(number) => self.take_out(number, ShutdownReport::default()),
            Key::Drain => {
                // There is no one left to do it in order.
                self.failure.get_or_insert(Failure {
                    child: Child::Drain,
                    restarts: 0,
                    within: Duration::ZERO,
                    error,
                });
                let deadline = Instant::now() + LAST_WORD;
                self.end(myself, ShutdownReport::default(), deadline).await;
            }
            _ => self.start_again(myself, key, error).await,
        }
    }

    /// Closes a dead reader's connection, here and on the server, so that no reply goes to it.
    fn cut_reader_off(&self, number: usize) {
        let Some(subscription) = self.tree.subscription(number) else {
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
        let needless = match key {
            Key::Reader(number) | Key::Handler(number, _) => {
                let subscription = self.tree.subscription(number);
                subscription.is_none_or(|it| it.is_over())
            }
            Key::Settler(number) => self.tree.group(number).is_none(),
            Key::Sweeper(number) => self.tree.delay_set(number).is_none(),
            _ => false,
        };
        // A tree that drains needs its settlers, its keep-alive and its sweepers to the end; a new
        // reader or handler would have nothing to do.
        let too_late = self.draining && matches!(key, Key::Reader(_) | Key::Handler(..));
        if ended || needless || too_late || self.cells.contains_key(&key) {
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

    /// Another process has the name of a subscription's consumer. It is not for us to get it back.
    fn name_lost(&self, number: usize) {
        let Some(subscription) = self.tree.subscription(number) else {
            return;
        };
        let consumer = Arc::clone(&subscription.source.consumer);
        let text = format!("another process uses the consumer name `{consumer}`");
        subscription.condition.note(&text);
        subscription.announcer.announce(Event::ConsumerTaken {
            subscription: Arc::clone(subscription.name()),
            consumer,
        });
        self.fail_subscriptions_of(Key::Reader(number));
    }

    /// Stops the subscriptions that depend on a child, and leaves all others alone.
    fn fail_subscriptions_of(&self, key: Key) {
        let subscriptions: Vec<Arc<SubscriptionState>> = match key {
            Key::Reader(number) | Key::Handler(number, _) => {
                self.tree.subscription(number).into_iter().collect()
            }
            Key::Settler(number) => {
                let group = self.tree.group(number);
                group.map(|it| it.give_up()).unwrap_or_default()
            }
            _ => Vec::new(),
        };
        for subscription in subscriptions {
            subscription.hold(Reason::Failed);
            let mut reader = self.cells.get(&Key::Reader(subscription.number)).cloned();
            let tree = Arc::clone(&self.tree);
            tokio::spawn(async move {
                let (mut order, mut hold) = (tree.order.subscribe(), subscription.hold.subscribe());
                loop {
                    rest(&tree, &subscription, reader.take(), &AtomicU64::new(0)).await;
                    tokio::select! {
                        biased;
                        // From here on whoever stops it sees to that.
                        _ = order.wait_for(|order| order.stop_reading) => return,
                        _ = hold.wait_for(|hold| hold.is_for(Reason::Removed)) => return,
                        // From an actor that has ended meanwhile.
                        () = subscription.lanes.returned() => {}
                    }
                }
            });
        }
    }
}
