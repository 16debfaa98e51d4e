//! Stops a tree in order, so that nothing is lost and nothing is left half done:
//!
//! 1. nothing new is read: reads that wait on the server are ended there and their replies taken;
//! 2. what waits is given back for others to take at once, and parked entries become retries;
//! 3. handlers that run finish;
//! 4. every verdict is stored;
//! 5. consumers with nothing pending are removed, and everybody ends.
//!
//! One deadline bounds all of it. The process may be killed at any point: what was not done is then
//! still pending on the server.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use ractor::{Actor, ActorCell, ActorProcessingErr, ActorRef};
use tokio::time::timeout_at;

use super::supervisor::{Message, Remaining, ShutdownReport, SupervisorMessage};
use super::tree::{GroupState, SubscriptionState, Tree};
use crate::message::{EntryId, Mode};
use crate::server::{group, settle};

/// What is kept of the time for storing verdicts and saying goodbye, at most.
const RESERVE: Duration = Duration::from_secs(2);
/// How long a verdict may take that is stored although the time is over.
pub(crate) const LAST_MOMENT: Duration = Duration::from_millis(50);

/// The most entries that are given back in one step.
const STEP: usize = 100;

pub(crate) struct Drain;

pub(crate) struct DrainArguments {
    pub tree: Arc<Tree>,
    /// By the names of their subscriptions.
    pub readers: HashMap<Arc<str>, ActorCell>,
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
        let report = drain(&state.tree, &state.readers, deadline).await;
        state
            .supervisor
            .cast(SupervisorMessage(Message::Drained(report, deadline)))?;
        myself.stop(None);
        Ok(())
    }
}

async fn drain(
    tree: &Tree,
    readers: &HashMap<Arc<str>, ActorCell>,
    deadline: Instant,
) -> ShutdownReport {
    let for_handlers = deadline - RESERVE.min(tree.shutdown_timeout / 5);
    let stored = |tree: &Tree| -> u64 {
        tree.groups
            .iter()
            .map(|group| group.acknowledged.load(Ordering::Relaxed))
            .sum()
    };
    let stored_before = stored(tree);

    tree.order.send_modify(|order| order.stop_reading = true);
    // Nothing is started from here on, however long the last replies take.
    for group in &tree.groups {
        group.queue.close_starts();
    }
    for subscription in &tree.subscriptions {
        subscription.given_back.put(subscription.lanes.close());
    }
    let given_back = AtomicU64::new(0);
    let resting = tree.subscriptions.iter().map(|subscription| {
        let reader = readers.get(&subscription.source.subscription).cloned();
        rest(tree, subscription, reader, &given_back)
    });
    let _ = timeout_at(for_handlers.into(), join_all(resting)).await;
    for group in &tree.groups {
        group.queue.all_due();
    }

    let quiet = join_all(
        tree.subscriptions
            .iter()
            .map(|subscription| subscription.lanes.quiet()),
    );
    let _ = timeout_at(for_handlers.into(), quiet).await;
    // What actors had in advance and dropped without a look.
    let returned = tree.subscriptions.iter();
    let returned = returned.map(|subscription| give_back(tree, subscription, &given_back));
    let _ = timeout_at(for_handlers.into(), join_all(returned)).await;

    let empty = join_all(tree.groups.iter().map(|group| group.queue.empty()));
    let at_least = Instant::now() + LAST_MOMENT;
    let _ = timeout_at(deadline.max(at_least).into(), empty).await;

    let left_running: Vec<Remaining> = tree
        .subscriptions
        .iter()
        .flat_map(|it| {
            it.lanes
                .all_running()
                .into_iter()
                .map(|running| remaining(&it.group, running.id()))
        })
        .collect();
    let unsettled: Vec<Remaining> = tree
        .groups
        .iter()
        .flat_map(|group| {
            group
                .queue
                .unsettled()
                .into_iter()
                .map(|id| remaining(group, id))
        })
        .collect();
    if unsettled.is_empty() {
        let goodbye = join_all(
            tree.subscriptions
                .iter()
                .map(|it| remove_consumer(tree, it)),
        );
        let at_least = Instant::now() + LAST_MOMENT;
        let _ = timeout_at(deadline.max(at_least).into(), goodbye).await;
    }
    tree.order.send_modify(|order| order.stop = true);
    ShutdownReport {
        settled: stored(tree) - stored_before,
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
    tokio::join!(
        give_back(tree, subscription, given_back),
        last_replies,
        subscription.lanes.counted()
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
        let items: Vec<_> = step
            .iter()
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

async fn remove_consumer(tree: &Tree, subscription: &SubscriptionState) {
    let (of, consumer) = (&subscription.group.group, &subscription.source.consumer);
    if let Err(error) = group::remove_consumer(&tree.settling, of, consumer).await {
        tracing::debug!(target: "streamvisor", %consumer, %error, "the consumer was not removed");
    }
}
