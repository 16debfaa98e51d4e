//! Stops a tree, or one subscription of it, in order, so that nothing is lost and nothing is left half
//! done:
//!
//! 1. nothing new is read: reads that wait on the server are ended there and their replies taken;
//! 2. what waits is given back for others to take at once, and parked entries become retries;
//! 3. handlers that run finish;
//! 4. every verdict is stored;
//! 5. consumers with nothing pending are removed, and everybody ends.
//!
//! One deadline bounds all of it. The process may be killed at any point: what was not done is then
//! still pending on the server.
//!
//! A subscription that is given up goes as far as 2 ([`rest`]) and keeps its settler, and so does one that
//! is paused, whose reader sees to it.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use ractor::{Actor, ActorCell, ActorProcessingErr, ActorRef};
use tokio::time::timeout_at;

use super::supervisor::{Key, LAST_WORD, Message, Remaining, ShutdownReport, SupervisorMessage};
use super::tree::{GroupState, SubscriptionState, Tree};
use crate::message::{EntryId, Mode};
use crate::server::{group, settle};
use crate::state::Reason;

/// What is kept of the time for storing verdicts and saying goodbye, at most.
const RESERVE: Duration = Duration::from_secs(2);
/// How long a verdict may take that is stored although the time is over.
pub(crate) const LAST_MOMENT: Duration = Duration::from_millis(50);

/// How often starts that wait to be counted are cancelled, until none is being counted.
const CANCEL_AGAIN: Duration = Duration::from_millis(20);
/// The most entries that are given back in one step.
const STEP: usize = 100;

pub(crate) struct Drain;

/// What is stopped.
pub(crate) enum Scope {
    Tree,
    Subscription(Arc<SubscriptionState>),
}

pub(crate) struct DrainArguments {
    pub tree: Arc<Tree>,
    pub scope: Scope,
    /// Everybody who runs.
    pub actors: HashMap<Key, ActorCell>,
    pub supervisor: ActorRef<SupervisorMessage>,
}

impl Actor for Drain {
    type Msg = ();
    type State = DrainArguments;
    type Arguments = DrainArguments;

    async fn pre_start(
        &self,
        myself: ActorRef<()>,
        arguments: DrainArguments,
    ) -> Result<DrainArguments, ActorProcessingErr> {
        myself.cast(())?;
        Ok(arguments)
    }

    async fn handle(
        &self,
        myself: ActorRef<()>,
        (): (),
        state: &mut DrainArguments,
    ) -> Result<(), ActorProcessingErr> {
        let deadline = Instant::now() + state.tree.shutdown_timeout;
        let report = drain(&state.tree, &state.scope, &state.actors, deadline).await;
        let message = match &state.scope {
            Scope::Tree => Message::Drained(report, deadline),
            Scope::Subscription(subscription) => {
                state.have_ended(subscription, deadline).await;
                Message::Stopped(subscription.number, report)
            }
        };
        state.supervisor.cast(SupervisorMessage(message))?;
        myself.stop(None);
        Ok(())
    }
}

impl DrainArguments {
    /// Waits, a moment, until the actors of a subscription that has stopped have ended.
    async fn have_ended(&self, subscription: &SubscriptionState, deadline: Instant) {
        let left = deadline.saturating_duration_since(Instant::now());
        let within = left.clamp(LAST_MOMENT, LAST_WORD);
        let its = self.actors.iter().filter(|(key, _)| match key {
            Key::Reader(of) | Key::Handler(of, _) => *of == subscription.number,
            _ => false,
        });
        let ended = its.map(|(_, cell)| cell.wait(Some(within)));
        join_all(ended).await;
    }
}

impl Scope {
    fn subscriptions(&self, tree: &Tree) -> Vec<Arc<SubscriptionState>> {
        match self {
            Scope::Tree => tree.subscriptions(),
            Scope::Subscription(subscription) => vec![Arc::clone(subscription)],
        }
    }

    /// Nothing is read or started from here on, however long the last replies take.
    fn close(&self, tree: &Tree) {
        match self {
            Scope::Tree => {
                tree.order.send_modify(|order| order.stop_reading = true);
                for group in tree.groups() {
                    group.queue.close_starts();
                }
                for subscription in tree.subscriptions() {
                    subscription.given_back.put(subscription.lanes.close());
                }
            }
            Scope::Subscription(subscription) => {
                subscription.hold(Reason::Removed);
            }
        }
    }

    /// No delay is waited for any more.
    fn all_due(&self, tree: &Tree) {
        match self {
            Scope::Tree => tree.groups().iter().for_each(|it| it.queue.all_due()),
            Scope::Subscription(it) => it.group.queue.all_due_of(it.source.index),
        }
    }

    /// Returns once every verdict is stored.
    async fn all_stored(&self, tree: &Tree) {
        match self {
            Scope::Tree => {
                let groups = tree.groups();
                join_all(groups.iter().map(|group| group.queue.empty())).await;
            }
            Scope::Subscription(it) => it.group.in_flight.emptied(it.source.index).await,
        }
    }

    /// How many verdicts were stored so far in these groups.
    fn stored(&self, groups: &[Arc<GroupState>]) -> u64 {
        match self {
            Scope::Tree => {
                let stored = groups
                    .iter()
                    .map(|it| it.acknowledged.load(Ordering::Relaxed));
                stored.sum()
            }
            Scope::Subscription(it) => it.group.in_flight.settled_of(it.source.index),
        }
    }

    /// What has a verdict that is not stored.
    fn unsettled(&self, tree: &Tree) -> Vec<Remaining> {
        match self {
            Scope::Tree => {
                let groups = tree.groups();
                let each = groups.iter().flat_map(|group| {
                    let ids = group.queue.unsettled().into_iter();
                    ids.map(|id| remaining(group, id))
                });
                each.collect()
            }
            Scope::Subscription(it) => {
                let (group, index) = (&it.group, it.source.index);
                let ids = group.in_flight.only_of(index, group.queue.unsettled());
                ids.into_iter().map(|id| remaining(group, id)).collect()
            }
        }
    }
}

async fn drain(
    tree: &Tree,
    scope: &Scope,
    actors: &HashMap<Key, ActorCell>,
    deadline: Instant,
) -> ShutdownReport {
    let for_handlers = deadline - RESERVE.min(tree.shutdown_timeout / 5);
    // One that is taken out meanwhile, by a removal that was under way, still counts.
    let groups = tree.groups();
    let stored_before = scope.stored(&groups);
    let subscriptions = scope.subscriptions(tree);

    scope.close(tree);
    let given_back = AtomicU64::new(0);
    let resting = subscriptions.iter().map(|subscription| {
        let reader = actors.get(&Key::Reader(subscription.number)).cloned();
        rest(tree, subscription, reader, &given_back)
    });
    let _ = timeout_at(for_handlers.into(), join_all(resting)).await;
    scope.all_due(tree);

    let quiet = join_all(
        subscriptions
            .iter()
            .map(|subscription| subscription.lanes.quiet()),
    );
    let _ = timeout_at(for_handlers.into(), quiet).await;
    // What actors had in advance and dropped without a look.
    let returned = subscriptions.iter();
    let returned = returned.map(|subscription| give_back(tree, subscription, &given_back));
    let _ = timeout_at(for_handlers.into(), join_all(returned)).await;

    let at_least = Instant::now() + LAST_MOMENT;
    let _ = timeout_at(deadline.max(at_least).into(), scope.all_stored(tree)).await;

    let left_running: Vec<Remaining> = subscriptions
        .iter()
        .flat_map(|it| {
            it.lanes
                .all_running()
                .into_iter()
                .map(|running| remaining(&it.group, running.id()))
        })
        .collect();
    let unsettled = scope.unsettled(tree);
    if unsettled.is_empty() {
        let goodbye = join_all(subscriptions.iter().map(|it| remove_consumer(tree, it)));
        let at_least = Instant::now() + LAST_MOMENT;
        let _ = timeout_at(deadline.max(at_least).into(), goodbye).await;
    }
    let released = join_all(subscriptions.iter().map(|it| release_name(tree, it)));
    let at_least = Instant::now() + LAST_MOMENT;
    let _ = timeout_at(deadline.max(at_least).into(), released).await;
    if matches!(scope, Scope::Tree) {
        tree.order.send_modify(|order| order.stop = true);
    }
    ShutdownReport {
        settled: scope.stored(&groups).saturating_sub(stored_before),
        given_back: given_back.into_inner(),
        left_running,
        unsettled,
    }
}

/// Brings a subscription to rest whose workers start nothing any more: what waits is given back, once
/// now and once more when its reader has taken its last replies and no start is being counted.
pub(crate) async fn rest(
    tree: &Tree,
    subscription: &SubscriptionState,
    reader: Option<ActorCell>,
    given_back: &AtomicU64,
) {
    let last_replies = async {
        if let Some(reader) = reader {
            let _ = reader.wait(None).await;
        }
    };
    let counted = async {
        let mut counted = std::pin::pin!(subscription.lanes.counted());
        loop {
            // A start that is not on its way to the server yet is not waited for. A worker may ask for one
            // a moment after it was told not to, so this is said again.
            subscription.group.queue.cancel_starts();
            tokio::select! {
                () = &mut counted => return,
                () = tokio::time::sleep(CANCEL_AGAIN) => {}
            }
        }
    };
    tokio::join!(
        give_back(tree, subscription, given_back),
        last_replies,
        counted
    );
    give_back(tree, subscription, given_back).await;
}

fn remaining(group: &GroupState, id: EntryId) -> Remaining {
    Remaining {
        stream: group.stream.clone(),
        group: Arc::clone(&group.group.name),
        id,
    }
}

/// Makes what waits claimable at once, counted as often as before. Where that fails it stays pending in
/// this consumer's name, for whoever recovers it.
async fn give_back(tree: &Tree, subscription: &SubscriptionState, given_back: &AtomicU64) {
    let on_their_way = &subscription.given_back;
    let _turn = on_their_way.turn.lock().await;
    on_their_way.put(subscription.lanes.withdraw());
    // What others claim comes by itself to those that scan; a tail has to remember it.
    let remember = subscription.source.mode == Mode::Tail;
    loop {
        let step = on_their_way.next(STEP);
        if step.is_empty() {
            return;
        }
        // First: who claims one of them a moment later, in this process perhaps, must not find it held.
        subscription.group.in_flight.hand_back(&step);
        // What another consumer has is not ours to give.
        let items: Vec<_> = step
            .iter()
            .filter(|received| !received.is_lost())
            .map(|received| {
                (
                    received.id(),
                    Arc::clone(&received.source.consumer),
                    received.count_before(),
                )
            })
            .collect();
        match settle::give_back(&tree.settling, &subscription.group.group, &items).await {
            Ok(count) => {
                given_back.fetch_add(count, Ordering::Relaxed);
            }
            Err(error) => {
                let subscription = subscription.name();
                tracing::warn!(target: "streamvisor", %subscription, %error, entries = items.len(), "entries that were not started stay pending");
            }
        }
        subscription.at("subscription.given_back");
        on_their_way.went(step.len(), remember);
    }
}

/// The next process of this consumer's name need not wait.
async fn release_name(tree: &Tree, subscription: &SubscriptionState) {
    if let Some(lease) = &subscription.lease
        && let Err(error) = lease.release(&tree.settling).await
    {
        let consumer = &subscription.source.consumer;
        tracing::debug!(target: "streamvisor", %consumer, %error, "the lease on the name runs out by itself");
    }
}

async fn remove_consumer(tree: &Tree, subscription: &SubscriptionState) {
    let (of, consumer) = (&subscription.group.group, &subscription.source.consumer);
    if let Err(error) = group::remove_consumer(&tree.settling, of, consumer).await {
        tracing::debug!(target: "streamvisor", %consumer, %error, "the consumer was not removed");
    }
}
