//! Looking after the group: making it again when it is gone, removing consumers that are; and telling of
//! a key that holds up the others.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::actors::tree::{SubscriptionState, Tree};
use crate::message::EntryId;
use crate::observe::Event;
use crate::server::{Connection, ServerError, group};

/// How often consumers that are gone are looked for, at the least.
pub(super) const TIDY_EVERY: Duration = Duration::from_secs(600);

/// How often it is looked where the group stands: with every blocking read, but no more often than this.
pub(super) const LOOK_AT_GROUP_EVERY: Duration = Duration::from_secs(1);

/// How often a key is looked for that fills most of what may be in flight.
pub(super) const LOOK_FOR_HOT_KEY_EVERY: Duration = Duration::from_secs(1);

/// There is no room: tells if that is because of entries of one key, which wait for each other.
pub(super) fn tell_of_hot_key(subscription: &SubscriptionState) {
    let most = subscription.max_in_flight.load(Ordering::Relaxed);
    let Some((key, waiting)) = subscription.lanes.hottest() else {
        return;
    };
    if waiting < most.div_ceil(2) {
        subscription.hot_key_told.store(false, Ordering::Relaxed);
    } else if !subscription.hot_key_told.swap(true, Ordering::Relaxed) {
        subscription.announcer.announce(Event::HotKey {
            subscription: Arc::clone(subscription.name()),
            key: key.map(|key| String::from_utf8_lossy(&key).into_owned()),
            waiting,
        });
    }
}

/// Removes the consumers that crashed processes left in the group, once nothing of theirs is pending.
pub(super) async fn tidy(
    subscription: &SubscriptionState,
    connection: &Connection,
) -> Result<(), ServerError> {
    let group = &subscription.group.group;
    let ours = subscription.group.each_subscription();
    let keep: Vec<Arc<str>> = ours
        .iter()
        .map(|it| Arc::clone(&it.source.consumer))
        .collect();
    match group::tidy_consumers(
        connection,
        group,
        subscription.plan.settings.consumer_ttl,
        &keep,
    )
    .await
    {
        Ok(0) => Ok(()),
        Ok(removed) => {
            tracing::info!(target: "streamvisor", %group, removed, "consumers that were gone with nothing pending were removed");
            Ok(())
        }
        // Nothing depends on it.
        Err(denied) if denied.is_denied() => {
            tracing::warn!(target: "streamvisor", %group, error = %denied, "consumers that are gone cannot be removed");
            Ok(())
        }
        Err(error) => Err(error),
    }
}

/// Whether the group stands before what was read of it. It may have been deleted with its stream and made
/// anew, or been moved back, without an error that would have said so.
pub(super) async fn was_moved_back(
    tree: &Tree,
    subscription: &SubscriptionState,
) -> Result<bool, ServerError> {
    let group = &subscription.group.group;
    let mark = subscription.cursor().mark();
    match group::position(&tree.settling, group).await? {
        // It may be ahead: others read on.
        Some(stands_at) => Ok(stands_at < mark),
        None => Err(ServerError::GroupGone(format!(
            "NOGROUP: there is no {group}"
        ))),
    }
}

/// Makes the group again if it is missing, or follows it where it exists. `saw_missing`: this process was
/// told that it is, or was.
pub(super) async fn remake_group(
    tree: &Tree,
    subscription: &SubscriptionState,
    saw_missing: bool,
) -> Result<(), ServerError> {
    let group = &subscription.group;
    // Nothing is settled from here on until what is in hand is registered.
    let _alone = group.whole.write().await;
    group.missing.store(true, Ordering::Release);
    let in_group = group.each_subscription();
    let mark = in_group
        .iter()
        .map(|other| other.cursor().mark())
        .max()
        .unwrap_or_default();
    let mut owned = group.in_flight.owned();
    for other in &in_group {
        // What it gave back it will take up again.
        let consumer = &other.source.consumer;
        let given_back = other.given_back.ours(usize::MAX).into_iter();
        owned.extend(given_back.map(|(id, count)| (id, Arc::clone(consumer), count)));
    }
    let in_hand: Vec<(EntryId, &str, u64)> = owned
        .iter()
        .map(|(id, consumer, count)| (*id, &**consumer, *count))
        .collect();
    let remade = group::remake(&tree.settling, &group.group, mark, saw_missing, &in_hand).await?;
    group.missing.store(false, Ordering::Release);
    group.queue.look_again();
    for other in in_group {
        other.cursor().follow(remade.last_delivered);
    }
    let last_delivered = remade.last_delivered;
    let subscription = subscription.name().clone();
    tree.announcer.announce(Event::GroupRemade {
        subscription,
        last_delivered,
    });
    Ok(())
}
