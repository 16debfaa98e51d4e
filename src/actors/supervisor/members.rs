//! Subscriptions that come to a running tree, and leave it.

use std::sync::Arc;

use ractor::ActorRef;
use tokio::sync::oneshot;

use super::{Key, ShutdownReport, SupervisorMessage, SupervisorState};
use crate::actors::start::StartError;
use crate::actors::tree::{Attached, Change, SubscriptionState, Tree};
use crate::message::StreamKey;
use crate::observe::{Child, Event};
use crate::state::Reason;
use crate::topology::{Subscription, set_keep_alives};

/// Why a running tree was not changed.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ControlError {
    /// The tree has no subscription of this name.
    #[error("there is no subscription `{name}`; {}", there_are(.known))]
    NoSuchSubscription {
        /// The name that was asked for.
        name: String,
        /// Those that there are.
        known: Vec<Arc<str>>,
    },
    /// The subscription has been given up, under `RestartPolicy::isolate`, and does nothing any more. It
    /// can be removed, and added again.
    #[error(
        "the subscription `{name}` has failed and does nothing any more; remove it, and add it again"
    )]
    Failed {
        /// The subscription.
        name: Arc<str>,
    },
    /// Somebody else is removing the subscription.
    #[error("the subscription `{name}` is being removed")]
    BeingRemoved {
        /// The subscription.
        name: Arc<str>,
    },
    /// The subscription to be added cannot be started. Nothing has changed.
    #[error("{0}")]
    Start(#[from] StartError),
    /// The subscription to be added reads from a group whose verdicts are not stored any more: its settler
    /// was given up, under `RestartPolicy::isolate`.
    #[error(
        "nothing of the group `{group}` of `{stream}` is stored any more, since its settler has failed; remove the subscriptions that read from it first"
    )]
    GroupFailed {
        /// The stream's key.
        stream: StreamKey,
        /// The group's name.
        group: Arc<str>,
    },
    /// Its entries are forwarded to one actor.
    #[error("the entries of `{name}` are forwarded to one actor, so there is one worker")]
    Forwarded {
        /// The subscription.
        name: Arc<str>,
    },
    /// A value that cannot be.
    #[error("`{setting}` must not be {value}; {instead}")]
    Setting {
        /// The setting.
        setting: &'static str,
        /// The value that was asked for.
        value: usize,
        /// What it may be.
        instead: &'static str,
    },
    /// It was asked for by a handler of the subscription, which would have waited for its own end. Nothing
    /// has changed.
    #[error(
        "a handler cannot wait for the removal of its own subscription, which waits for the handler; spawn a task that does"
    )]
    FromHandler,
    /// The tree has ended, or drains and is about to.
    #[error("the tree has ended or is about to")]
    Ended,
}

/// The same as `Display`: a `main` that returns the error shows its text.
impl std::fmt::Debug for ControlError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Display::fmt(self, f)
    }
}

/// In words.
pub(crate) fn there_are(known: &[Arc<str>]) -> String {
    if known.is_empty() {
        return "there is none at all".to_owned();
    }
    let known: Vec<_> = known.iter().map(|name| format!("`{name}`")).collect();
    format!("there are {}", known.join(", "))
}

/// A subscription that was checked against the server.
#[derive(Debug)]
pub(crate) struct Addition {
    pub subscription: Subscription,
    pub attached: Attached,
    pub done: oneshot::Sender<Result<(), ControlError>>,
}

/// A subscription that is to leave.
#[derive(Debug)]
pub(crate) struct Removal {
    pub name: String,
    pub done: oneshot::Sender<Result<ShutdownReport, ControlError>>,
}

impl Tree {
    /// The subscription of this name, if it can be told something.
    pub(crate) fn at_work(&self, name: &str) -> Result<Arc<SubscriptionState>, ControlError> {
        let subscription = self.to_be_removed(name)?;
        if subscription.is_held_for(Reason::Failed) {
            let name = Arc::clone(subscription.name());
            return Err(ControlError::Failed { name });
        }
        Ok(subscription)
    }

    /// The subscription of this name, failed or not.
    pub(crate) fn to_be_removed(&self, name: &str) -> Result<Arc<SubscriptionState>, ControlError> {
        if self.order.borrow().stop_reading {
            return Err(ControlError::Ended);
        }
        let Some(subscription) = self.named(name) else {
            let known = self.subscriptions();
            return Err(ControlError::NoSuchSubscription {
                name: name.to_owned(),
                known: known.iter().map(|it| Arc::clone(it.name())).collect(),
            });
        };
        if subscription.is_held_for(Reason::Removed) {
            let name = Arc::clone(subscription.name());
            return Err(ControlError::BeingRemoved { name });
        }
        Ok(subscription)
    }
}

impl SupervisorState {
    pub(super) async fn add(&mut self, myself: &ActorRef<SupervisorMessage>, addition: Addition) {
        let added = self
            .take_in(myself, &addition.subscription, addition.attached)
            .await;
        // Who asked for it may have gone; it runs all the same.
        let _ = addition.done.send(added);
    }

    async fn take_in(
        &mut self,
        myself: &ActorRef<SupervisorMessage>,
        subscription: &Subscription,
        attached: Attached,
    ) -> Result<(), ControlError> {
        if self.draining {
            return Err(ControlError::Ended);
        }
        // Checked once more: others may have come while the server was asked.
        let tree = Arc::clone(&self.tree);
        let mut plans = tree.plan_with(subscription).map_err(StartError::from)?;
        let Some(plan) = plans.last().cloned() else {
            return Err(ControlError::Ended);
        };
        if let Some(group) = tree.groups().into_iter().find(|it| it.is_of(&plan))
            && group.is_given_up()
        {
            return Err(ControlError::GroupFailed {
                stream: group.stream.clone(),
                group: plan.group,
            });
        }
        let Change {
            subscription,
            group,
            delay_set,
        } = tree.take_in(plan, attached);
        // What is in hand is kept fresh as often as the newcomer needs it before that one reads.
        tree.changed(&plans);
        plans.clear();
        let mut spawned = Ok(());
        if let Some(group) = group {
            spawned = self.spawn(myself, Key::Settler(group.number)).await;
        }
        if let Some(delay_set) = delay_set.filter(|_| spawned.is_ok()) {
            spawned = self.spawn(myself, Key::Sweeper(delay_set.number)).await;
        }
        if spawned.is_ok() {
            spawned = self.spawn_all_of(myself, &subscription).await;
        }
        spawned.map_err(|error| {
            subscription.hold(Reason::Removed);
            self.take_out(subscription.number, ShutdownReport::default());
            ControlError::Start(StartError::Spawn(error.to_string()))
        })
    }

    pub(super) async fn remove(
        &mut self,
        myself: &ActorRef<SupervisorMessage>,
        Removal { name, done }: Removal,
    ) {
        let found = match self.draining {
            true => Err(ControlError::Ended),
            false => self.tree.to_be_removed(&name),
        };
        let subscription = match found {
            Ok(subscription) => subscription,
            Err(error) => {
                let _ = done.send(Err(error));
                return;
            }
        };
        let number = subscription.number;
        // From here on nothing of it is started, restarted, or told anything.
        subscription.hold(Reason::Removed);
        self.removals.insert(number, done);
        if let Err(error) = self.spawn(myself, Key::Removal(number)).await {
            tracing::error!(target: "streamvisor", subscription = name, %error, "the subscription is not stopped in order");
            self.take_out(number, ShutdownReport::default());
        }
    }

    /// A subscription has stopped, as far as it could: ends what is left of it, and with it what nobody
    /// else needs.
    pub(super) fn take_out(&mut self, number: usize, report: ShutdownReport) {
        let done = self.removals.remove(&number);
        let Some(subscription) = self.tree.subscription(number) else {
            return;
        };
        for worker in 0..subscription.lanes.all() {
            let key = Key::Handler(number, worker);
            // It has ended, or runs past the deadline: then its entry stays pending, for others to take.
            let cell = self.cells.get(&key).cloned();
            self.give_up_worker(&subscription, key, worker);
            if let Some(cell) = cell {
                self.children.remove(&cell.get_id());
                cell.kill();
            }
        }
        if let Some(cell) = self.cells.get(&Key::Reader(number)) {
            self.children.remove(&cell.get_id());
            cell.kill();
            self.cut_reader_off(number);
        }
        subscription.let_go_of_all();
        let is_its = |key: &Key| match key {
            Key::Reader(of) | Key::Handler(of, _) | Key::Removal(of) => *of == number,
            _ => false,
        };
        self.cells.retain(|key, _| !is_its(key));
        self.budgets.retain(|key, _| !is_its(key));
        self.watched.retain(|key, _| !is_its(key));
        self.forget_restarts(|child| match child {
            Child::Reader { subscription: of }
            | Child::Handler {
                subscription: of, ..
            } => of == subscription.name(),
            _ => false,
        });

        let Change {
            subscription,
            group,
            delay_set,
        } = self.tree.take_out(subscription);
        if let Some(group) = group {
            self.budgets.remove(&Key::Settler(group.number));
            self.forget_restarts(|child| *child == group.settler());
        }
        if let Some(delay_set) = delay_set {
            self.budgets.remove(&Key::Sweeper(delay_set.number));
            let is_its =
                |child: &Child| matches!(child, Child::Sweeper { set } if *set == delay_set.set);
            self.forget_restarts(is_its);
        }
        let mut plans = self.tree.plans();
        // What the others say may contradict itself without the one that has left: then it is left as it is.
        if set_keep_alives(&mut plans).is_err() {
            plans.clear();
        }
        self.tree.changed(&plans);
        self.tree.announcer.announce(Event::Removed {
            subscription: Arc::clone(subscription.name()),
        });
        if let Some(done) = done {
            // Who asked for it may have gone.
            let _ = done.send(Ok(report));
        }
    }

    fn forget_restarts(&self, of: impl Fn(&Child) -> bool) {
        let mut restarts = self
            .tree
            .restarts
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        restarts.retain(|child, _| !of(child));
    }
}
