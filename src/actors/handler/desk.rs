//! Where the deliveries of a worker report to.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use crate::actors::tree::SubscriptionState;
use crate::message::{Context, Desk, EntryId, Outcome, Verdict};
use crate::state::Seat;

pub(super) struct WorkersDesk {
    pub subscription: Arc<SubscriptionState>,
    pub seat: Seat,
}

impl Desk for WorkersDesk {
    fn seen(&self, run: u64) {
        self.subscription.lanes.see(&self.seat, run);
    }

    fn settle(&self, run: u64, context: &Context, verdict: Verdict) {
        let subscription = &self.subscription;
        let mut verdict = Some(verdict);
        subscription.lanes.finish(&self.seat, run, |received| {
            if let Some(verdict) = verdict.take() {
                subscription.settle(received, verdict);
            }
        });
        if let Some(verdict) = verdict {
            self.late(context.id(), &verdict);
        }
    }

    fn dropped(&self, run: u64, context: &Context, seen: bool) {
        if !self.subscription.lanes.dropped(&self.seat, run, seen) {
            self.late(context.id(), &Verdict::Spent);
        }
    }

    fn stored(&self, id: EntryId) -> Pin<Box<dyn Future<Output = bool> + Send>> {
        let stored = self.subscription.group.in_flight.let_go_of(id);
        Box::pin(async move { stored.await.is_ok() })
    }
}

impl WorkersDesk {
    /// The entry was given up on because this took too long. Work that is done all the same need not be done
    /// again; anything else is for whoever takes the entry over.
    fn late(&self, id: EntryId, verdict: &Verdict) {
        let group = &self.subscription.group;
        if !group.in_flight.is_abandoned(id) {
            return;
        }
        match verdict {
            Verdict::Said(Outcome::Ack | Outcome::Reject) => group.queue.acknowledge([id]),
            _ => group.in_flight.leave([id]),
        }
    }
}
