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

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use ractor::{Actor, ActorCell, ActorProcessingErr, ActorRef};
use tokio::time::timeout_at;

use super::supervisor::{Message, Remaining, ShutdownReport, SupervisorMessage};
use super::tree::{GroupState, SubscriptionState, Tree};
use crate::message::{EntryId, Received};
use crate::server::{group, settle};

/// What is kept of the time for storing verdicts and saying goodbye, at most.
const RESERVE: Duration = Duration::from_secs(2);
/// How long a verdict may take that is stored although the time is over.
pub(crate) const LAST_MOMENT: Duration = Duration::from_millis(50);

pub(crate) struct Drain;

pub(crate) struct DrainArguments {
    pub tree: Arc<Tree>,
    pub readers: Vec<ActorCell>,
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

async fn drain(tree: &Tree, readers: &[ActorCell], deadline: Instant) -> ShutdownReport {
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
    let waiting: Vec<_> = tree
        .subscriptions
        .iter()
        .map(|it| it.lanes.close())
        .collect();
    let given_back = AtomicU64::new(0);
    let within = for_handlers.saturating_duration_since(Instant::now());
    let first = give_all_back(tree, waiting, &given_back);
    let readers_end = join_all(readers.iter().map(|reader| reader.wait(Some(within))));
    let counted = join_all(tree.subscriptions.iter().map(|it| it.lanes.counted()));
    let _ = timeout_at(for_handlers.into(), async {
        tokio::join!(first, readers_end, counted)
    })
    .await;
    // What the last replies brought, and what was about to be started.
    let waiting = tree.subscriptions.iter().map(|it| it.lanes.withdraw());
    let last = give_all_back(tree, waiting.collect(), &given_back);
    let _ = timeout_at(for_handlers.into(), last).await;
    for group in &tree.groups {
        group.queue.all_due();
    }

    let quiet = join_all(
        tree.subscriptions
            .iter()
            .map(|subscription| subscription.lanes.quiet()),
    );
    let _ = timeout_at(for_handlers.into(), quiet).await;

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

/// What waited in each of the subscriptions.
async fn give_all_back(tree: &Tree, waiting: Vec<Vec<Arc<Received>>>, given_back: &AtomicU64) {
    let each = tree.subscriptions.iter().zip(&waiting);
    join_all(each.map(|(subscription, waiting)| async move {
        let given = give_back(tree, subscription, waiting).await;
        given_back.fetch_add(given, Ordering::Relaxed);
    }))
    .await;
}

fn remaining(group: &GroupState, id: EntryId) -> Remaining {
    Remaining {
        stream: group.stream.clone(),
        group: Arc::clone(&group.group.name),
        id,
    }
}

/// Makes entries that were not started claimable at once, counted as often as before. Where that fails
/// they stay pending in this consumer's name, for whoever recovers them.
pub(crate) async fn give_back(
    tree: &Tree,
    subscription: &SubscriptionState,
    waiting: &[Arc<Received>],
) -> u64 {
    let mut given_back = 0;
    for step in waiting.chunks(100) {
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
            Ok(count) => given_back += count,
            Err(error) => {
                let subscription = subscription.name();
                tracing::warn!(target: "streamvisor", %subscription, %error, entries = items.len(), "entries that were not started stay pending");
            }
        }
        subscription
            .group
            .in_flight
            .leave(step.iter().map(|received| received.id()));
    }
    given_back
}

async fn remove_consumer(tree: &Tree, subscription: &SubscriptionState) {
    let (of, consumer) = (&subscription.group.group, &subscription.source.consumer);
    if let Err(error) = group::remove_consumer(&tree.settling, of, consumer).await {
        tracing::debug!(target: "streamvisor", %consumer, %error, "the consumer was not removed");
    }
}
