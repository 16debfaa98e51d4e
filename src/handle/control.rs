//! Changing a tree while it runs.

use std::sync::Arc;

use super::SupervisorHandle;
use crate::actors::{Message, SubscriptionState, SupervisorMessage};
use crate::state::Reason;

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
    /// The subscription has been given up, under `RestartPolicy::isolate`, and does nothing any more.
    #[error("the subscription `{name}` has failed and does nothing any more")]
    Failed {
        /// The subscription.
        name: Arc<str>,
    },
    /// Its entries are forwarded to one actor.
    #[error("the entries of `{name}` are forwarded to one actor, so there is one worker")]
    Forwarded {
        /// The subscription.
        name: Arc<str>,
    },
    /// A value that cannot be.
    #[error("`{setting}` must not be {value}; it must be at least 1")]
    Setting {
        /// The setting.
        setting: &'static str,
        /// The value that was asked for.
        value: usize,
    },
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

fn there_are(known: &[Arc<str>]) -> String {
    if known.is_empty() {
        return "there is none at all".to_owned();
    }
    let known: Vec<_> = known.iter().map(|name| format!("`{name}`")).collect();
    format!("there are {}", known.join(", "))
}

impl SupervisorHandle {
    /// Stops reading from a subscription, without ending anything: handlers that run finish, and their
    /// verdicts are stored. Returns when nothing more will be started; this does not wait for the server.
    ///
    /// What was read and not started is given back in the next moments, for any consumer to take at
    /// once. Entries that wait for a delay go on. The pause lasts, through restarts of the subscription's
    /// actors too, until [`resume`](Self::resume); of several requests the last one holds. A subscription
    /// that is paused already stays so. A handler may pause its own subscription.
    ///
    /// ```no_run
    /// # async fn example(supervisor: streamvisor::SupervisorHandle) -> Result<(), streamvisor::ControlError> {
    /// supervisor.pause("orders/workers/tail").await?;
    /// // … the database behind the handlers is moved …
    /// supervisor.resume("orders/workers/tail").await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`ControlError::NoSuchSubscription`], [`ControlError::Failed`], and [`ControlError::Ended`] once
    /// the tree drains.
    #[allow(clippy::unused_async)] // what it waits for is nobody's business
    pub async fn pause(&self, name: &str) -> Result<(), ControlError> {
        self.running(name)?.pause(&self.held.tree, true);
        Ok(())
    }

    /// Reads again from a subscription that was paused. What it gave back and nobody has taken meanwhile
    /// it takes up first. One that is not paused is left as it is.
    ///
    /// # Errors
    ///
    /// As [`pause`](Self::pause).
    #[allow(clippy::unused_async)]
    pub async fn resume(&self, name: &str) -> Result<(), ControlError> {
        self.running(name)?.pause(&self.held.tree, false);
        Ok(())
    }

    /// Sets how many workers a subscription has. Workers that are too many finish what they run and stop in
    /// good order; what waited for them is for the others. Under [`ordered_by`](crate::Draft::ordered_by) a key
    /// moves to another worker only when its former one has none of its entries any more, so that their order is
    /// kept. Returns when that is arranged; it does not wait for workers to start or stop.
    ///
    /// # Errors
    ///
    /// As [`pause`](Self::pause); [`ControlError::Setting`] for no workers at all, and
    /// [`ControlError::Forwarded`] where there is one actor for all.
    #[allow(clippy::unused_async)]
    pub async fn set_workers(&self, name: &str, workers: usize) -> Result<(), ControlError> {
        let subscription = self.running(name)?;
        if workers == 0 {
            let (setting, value) = ("workers", workers);
            return Err(ControlError::Setting { setting, value });
        }
        if subscription.plan.handling.forwards().is_some() {
            let name = Arc::clone(subscription.name());
            return Err(ControlError::Forwarded { name });
        }
        subscription.lanes.set_workers(workers);
        let message = Message::Staff(Arc::clone(subscription.name()));
        let told = self.held.supervisor.cast(SupervisorMessage(message));
        told.map_err(|_| ControlError::Ended)
    }

    /// Changes how many entries of a subscription may be in hand at once: read and not yet settled, as
    /// `max_in_flight` says for its start. It applies from the next read on; what is in hand above a
    /// lower bound is handled, and nothing is read until there is less.
    ///
    /// ```no_run
    /// # async fn example(supervisor: streamvisor::SupervisorHandle) -> Result<(), streamvisor::ControlError> {
    /// supervisor.set_max_in_flight("orders/workers/tail", 100).await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// As [`pause`](Self::pause), and [`ControlError::Setting`] for 0.
    #[allow(clippy::unused_async)]
    pub async fn set_max_in_flight(&self, name: &str, entries: usize) -> Result<(), ControlError> {
        let subscription = self.running(name)?;
        if entries == 0 {
            return Err(ControlError::Setting {
                setting: "max_in_flight",
                value: entries,
            });
        }
        subscription.set_max_in_flight(entries);
        Ok(())
    }

    /// The subscription of this name, if it can still be told something.
    fn running(&self, name: &str) -> Result<Arc<SubscriptionState>, ControlError> {
        let tree = &self.held.tree;
        if tree.order.borrow().stop_reading {
            return Err(ControlError::Ended);
        }
        let subscription = tree.subscriptions.iter().find(|it| **it.name() == *name);
        let Some(subscription) = subscription else {
            return Err(ControlError::NoSuchSubscription {
                name: name.to_owned(),
                known: tree
                    .subscriptions
                    .iter()
                    .map(|it| Arc::clone(it.name()))
                    .collect(),
            });
        };
        if subscription.is_held_for(Reason::Failed) {
            let name = Arc::clone(subscription.name());
            return Err(ControlError::Failed { name });
        }
        Ok(Arc::clone(subscription))
    }
}
