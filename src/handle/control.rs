//! Changing a tree while it runs.

use tokio::sync::oneshot;

use super::SupervisorHandle;
use crate::actors::{
    Addition, ControlError, Message, Removal, ShutdownReport, SupervisorMessage,
    is_in_handler_of_subscription, prepare,
};
use crate::topology::{MOST_WORKERS, Subscription, bounds};

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
        self.held.tree.at_work(name)?.pause(&self.held.tree, true);
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
        self.held.tree.at_work(name)?.pause(&self.held.tree, false);
        Ok(())
    }

    /// Sets how many workers a subscription has. Workers that are too many finish what they run and stop in
    /// good order; what waited for them is for the others. Under [`ordered_by`](crate::Draft::ordered_by) a key
    /// moves to another worker only when its former one has none of its entries any more, so that their order is
    /// kept; what a worker or an actor remembers of a key does not move along. Returns when that is arranged; it does not wait for workers to start or stop.
    ///
    /// # Errors
    ///
    /// As [`pause`](Self::pause); [`ControlError::Setting`] for no workers at all or more than 65,536, and
    /// [`ControlError::Forwarded`] where there is one actor for all.
    #[allow(clippy::unused_async)]
    pub async fn set_workers(&self, name: &str, workers: usize) -> Result<(), ControlError> {
        let subscription = self.held.tree.at_work(name)?;
        in_bounds("workers", workers, MOST_WORKERS)?;
        if subscription.plan.handling.forwards().is_some() {
            let name = std::sync::Arc::clone(subscription.name());
            return Err(ControlError::Forwarded { name });
        }
        subscription.lanes.set_workers(workers);
        let message = Message::Staff(subscription.number);
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
        let subscription = self.held.tree.at_work(name)?;
        in_bounds("max_in_flight", entries, usize::MAX)?;
        subscription.set_max_in_flight(entries);
        Ok(())
    }

    /// Adds a subscription to the tree, checked as if it had been there from the start, and returns once
    /// its actors run. The topology's default group is its group if it names none.
    ///
    /// ```no_run
    /// # async fn example(supervisor: streamvisor::SupervisorHandle) -> Result<(), streamvisor::ControlError> {
    /// use streamvisor::prelude::*;
    ///
    /// # async fn bill(_: u64, _: Context) -> Result<Outcome, BoxError> { Ok(Outcome::Ack) }
    /// let invoices = Subscription::tail("invoices").named("invoices").handle_fn(bill);
    /// supervisor.add(invoices).await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`ControlError::Start`] names what is wrong with the subscription, beside those that run, or with the
    /// server; [`ControlError::GroupFailed`], and [`ControlError::Ended`] once the tree drains. Nothing of it
    /// runs then, and nothing has changed.
    pub async fn add(&self, subscription: Subscription) -> Result<(), ControlError> {
        let tree = &self.held.tree;
        let has_ended = || tree.order.borrow().stop_reading;
        if has_ended() {
            return Err(ControlError::Ended);
        }
        let mut order = tree.order.subscribe();
        let prepared = tokio::select! {
            prepared = prepare(tree, &subscription) => prepared,
            _ = order.wait_for(|order| order.stop_reading) => return Err(ControlError::Ended),
        };
        let attached = prepared?;
        self.ask(|done| {
            Message::Add(Box::new(Addition {
                subscription,
                attached,
                done,
            }))
        })
        .await
    }

    /// Ends a subscription in the order of a shutdown, within `Topology::shutdown_timeout`, and takes it out
    /// of the tree: nothing new of it is read, what was not started is given back, running handlers finish,
    /// its verdicts are stored, and its consumer is removed if nothing is pending. A handler that still runs
    /// at the deadline is ended; its entry stays pending. Nothing else in the tree takes part. Afterwards the
    /// name is free.
    ///
    /// A subscription that is paused or has failed can be removed too.
    ///
    /// ```no_run
    /// # async fn example(supervisor: streamvisor::SupervisorHandle) -> Result<(), streamvisor::ControlError> {
    /// let report = supervisor.remove("invoices").await?;
    /// println!("{} entries were given back", report.given_back);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`ControlError::NoSuchSubscription`], [`ControlError::BeingRemoved`], [`ControlError::FromHandler`] when
    /// called by one of its own handlers, and [`ControlError::Ended`] once the tree drains.
    pub async fn remove(&self, name: &str) -> Result<ShutdownReport, ControlError> {
        let tree = &self.held.tree;
        let subscription = tree.to_be_removed(name)?;
        if is_in_handler_of_subscription(tree, subscription.number) {
            return Err(ControlError::FromHandler);
        }
        let name = name.to_owned();
        self.ask(|done| Message::Remove(Removal { name, done }))
            .await
    }

    /// Has the supervisor do something, and waits for its answer.
    async fn ask<T>(
        &self,
        message: impl FnOnce(oneshot::Sender<Result<T, ControlError>>) -> Message,
    ) -> Result<T, ControlError> {
        let (done, answer) = oneshot::channel();
        let message = SupervisorMessage(message(done));
        // One that is gone, and one that goes before it has answered, has ended.
        let _ = self.held.supervisor.cast(message);
        answer.await.unwrap_or(Err(ControlError::Ended))
    }
}

fn in_bounds(setting: &'static str, value: usize, most: usize) -> Result<(), ControlError> {
    bounds(value, most).map_err(|instead| ControlError::Setting {
        setting,
        value,
        instead,
    })
}
