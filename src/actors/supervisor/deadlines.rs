//! Handlers that run past their deadline.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ractor::ActorRef;

use super::{Key, LAST_WORD, SupervisorMessage, SupervisorState};
use crate::actors::tree::SubscriptionState;
use crate::message::EntryId;
use crate::observe::Event;

/// How often running handlers are looked at, at most and at least.
const SHORTEST_TICK: Duration = Duration::from_millis(20);
const LONGEST_TICK: Duration = Duration::from_millis(250);

/// What a handler was running when it was looked at last, and since when.
pub(super) struct Watched {
    run: u64,
    since: Instant,
    pub killed: bool,
}

impl SupervisorState {
    /// How long until running handlers are looked at again.
    pub(super) fn tick(&self) -> Duration {
        let subscriptions = self.tree.subscriptions();
        let shortest = subscriptions
            .iter()
            .map(|it| it.plan.settings.handler_timeout)
            .min();
        (shortest.unwrap_or(LONGEST_TICK) / 4).clamp(SHORTEST_TICK, LONGEST_TICK)
    }

    pub(super) async fn look_after_handlers(&mut self, myself: &ActorRef<SupervisorMessage>) {
        let now = Instant::now();
        for subscription in &self.tree.subscriptions() {
            let number = subscription.number;
            let deadline = subscription.plan.settings.handler_timeout;
            for worker in 0..subscription.lanes.workers() {
                let key = Key::Handler(number, worker);
                let Some(running) = subscription.lanes.running(worker) else {
                    self.watched.remove(&key);
                    continue;
                };
                let watched = self.watched.entry(key).or_insert(Watched {
                    run: running.run,
                    since: now,
                    killed: false,
                });
                if watched.run != running.run {
                    *watched = Watched {
                        run: running.run,
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
                if !watched.killed {
                    watched.killed = true;
                    if let Some(cell) = self.cells.get(&key) {
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
        let Some(id) = self.cut_off(subscription, key, worker) else {
            return;
        };
        let name = subscription.name().clone();
        self.tree.announcer.announce(Event::Abandoned {
            subscription: name,
            id,
        });
        self.restart(myself, key).await;
        subscription.lanes.hand_on();
    }

    /// Nothing of this worker counts any more. What it runs is not kept from others until the call ends,
    /// and not run here meanwhile. Returns its id, if it runs something.
    pub(super) fn cut_off(
        &mut self,
        subscription: &Arc<SubscriptionState>,
        key: Key,
        worker: usize,
    ) -> Option<EntryId> {
        subscription.lanes.enter(worker);
        let mut abandoned = None;
        subscription.lanes.cut_off(worker, |received| {
            subscription.group.in_flight.abandon(received.id());
            abandoned = Some(received.id());
        });
        let id = abandoned?;
        if let Some(cell) = self.cells.remove(&key) {
            self.children.remove(&cell.get_id());
            self.hung
                .insert(cell.get_id(), (Arc::clone(subscription), id));
        }
        Some(id)
    }
}
