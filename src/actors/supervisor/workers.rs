//! The workers of a subscription: those that it lacks, and those that died.

use ractor::{ActorId, ActorRef};

use super::{Key, SupervisorMessage, SupervisorState};
use crate::actors::tree::Blame;
use crate::message::Verdict;

/// Crashes in a row of one worker, each over an entry, before it is started again with delays and at the
/// expense of its budget.
const CRASHES_IN_A_ROW: u32 = 5;

impl SupervisorState {
    /// Starts the workers that a subscription lacks. Those that are too many end by themselves.
    pub(super) async fn staff(&mut self, myself: &ActorRef<SupervisorMessage>, number: usize) {
        let Some(subscription) = self.tree.subscription(number) else {
            return;
        };
        for worker in 0..subscription.lanes.workers() {
            let key = Key::Handler(number, worker);
            if self.cells.contains_key(&key) || subscription.lanes.is_closed() {
                continue;
            }
            if let Err(error) = self.spawn(myself, key).await {
                self.start_again(myself, key, error.to_string()).await;
            }
        }
    }

    pub(super) async fn handler_died(
        &mut self,
        myself: &ActorRef<SupervisorMessage>,
        number: usize,
        worker: usize,
        error: String,
    ) {
        let Some(subscription) = self.tree.subscription(number) else {
            return;
        };
        let key = Key::Handler(number, worker);
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

    /// The actor that a subscription's entries are forwarded to has ended. It is not ours to start again.
    pub(super) async fn reference_ended(
        &mut self,
        myself: &ActorRef<SupervisorMessage>,
        id: ActorId,
        error: String,
    ) {
        let Some(key) = self.children.remove(&id) else {
            return;
        };
        self.cells.remove(&key);
        if let Key::Handler(number, _) = key
            && let Some(subscription) = self.tree.subscription(number)
        {
            subscription.condition.note(&error);
        }
        if !self.draining {
            self.escalate(myself, key, error, 0).await;
        }
    }
}
