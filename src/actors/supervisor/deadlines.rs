//! Handlers that run past their deadline.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ractor::ActorRef;

use super::{Key, LAST_WORD, SupervisorMessage, SupervisorState};
use crate::actors::tree::{Blame, SubscriptionState};
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
            for worker in 0..subscription.lanes.all() {
                let key = Key::Handler(number, worker);
                if subscription.is_over() && !self.cells.contains_key(&key) {
                    // What outlived a worker that has no replacement.
                    subscription.sort_out_dropped(
                        worker,
                        Blame::Nothing,
                        "dropped without a verdict",
                    );
                }
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

    /// The actor that ran past its deadline has ended, and what it was ended for is held elsewhere: by a task,
    /// perhaps, that nobody can end. It is given up, or it would cost the next actor its life.
    pub(super) fn give_up_what_outlived(&self, number: usize, worker: usize, hung: &Watched) {
        let Some(subscription) = self.tree.subscription(number) else {
            return;
        };
        let oldest = subscription.lanes.running(worker);
        if oldest.is_some_and(|it| it.number == hung.run) {
            subscription.lanes.give_up(worker, false, |received| {
                abandon(&subscription, received.id());
            });
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
        let abandoned = self.give_up_worker(subscription, key, worker);
        if abandoned.is_empty() {
            return;
        }
        for id in abandoned {
            announce(subscription, id);
        }
        self.restart(myself, key).await;
        subscription.lanes.hand_on();
    }

    /// Nothing of this worker counts any more. What it runs is not kept from others until the call ends,
    /// and not run here meanwhile. Returns the ids, if it runs something.
    pub(super) fn give_up_worker(
        &mut self,
        subscription: &Arc<SubscriptionState>,
        key: Key,
        worker: usize,
    ) -> Vec<EntryId> {
        subscription.lanes.enter(worker);
        let mut abandoned = Vec::new();
        subscription.lanes.give_up(worker, true, |received| {
            subscription.group.in_flight.abandon(received.id());
            abandoned.push(received.id());
        });
        if abandoned.is_empty() {
            return abandoned;
        }
        if let Some(cell) = self.cells.remove(&key) {
            self.children.remove(&cell.get_id());
            if subscription.roster.get(worker).is_some() {
                // What an actor holds reports itself when it lets go of it.
                cell.kill();
            } else {
                let hung = (Arc::clone(subscription), abandoned.clone());
                self.hung.insert(cell.get_id(), hung);
            }
        }
        abandoned
    }
}

/// Nobody here handles this entry any more, and nobody can end what does.
fn abandon(subscription: &SubscriptionState, id: EntryId) {
    subscription.group.in_flight.abandon(id);
    announce(subscription, id);
}

fn announce(subscription: &SubscriptionState, id: EntryId) {
    subscription.announcer.announce(Event::Abandoned {
        subscription: Arc::clone(subscription.name()),
        id,
    });
}
