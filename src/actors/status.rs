//! Puts the status of a tree together: what this process knows, and what the server says in time.

use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures_util::future::join_all;
use tokio::time::timeout;

use super::tree::{SubscriptionState, Tree};
use crate::message::Mode;
use crate::observe::{Child, Restarts, State, Status, SubscriptionStatus};
use crate::server::group;
use crate::state::Reason;

/// How long the server may take to answer before the status does without.
const PATIENCE: Duration = Duration::from_secs(1);

pub(crate) async fn status(tree: &Tree) -> Status {
    let restarts = tree
        .restarts
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .clone();
    let of = |subscription: &SubscriptionState| {
        let name = subscription.name();
        let own = restarts.iter().filter(|(child, _)| match child {
            Child::Reader { subscription } | Child::Handler { subscription, .. } => {
                subscription == name
            }
            _ => false,
        });
        own.map(|(_, restarts)| restarts).sum()
    };
    let subscriptions = tree.subscriptions();
    let each = subscriptions
        .iter()
        .map(|it| subscription_status(tree, it, of(it)));
    let subscriptions = join_all(each).await;
    let mut restarts: Vec<_> = restarts
        .into_iter()
        .map(|(child, restarts)| Restarts { child, restarts })
        .collect();
    restarts.sort_by_key(|it| it.child.to_string());
    Status {
        subscriptions,
        restarts,
    }
}

async fn subscription_status(
    tree: &Tree,
    subscription: &SubscriptionState,
    restarts: u64,
) -> SubscriptionStatus {
    let group = &subscription.group.group;
    let asked = timeout(PATIENCE, async {
        let groups = group::groups(&tree.settling, &subscription.source.stream)
            .await
            .ok()?;
        let ours = groups
            .into_iter()
            .find(|it| it.name == subscription.plan.group.as_bytes())?;
        let oldest = group::oldest_idle(&tree.settling, group).await.ok()?;
        Some((ours, oldest))
    });
    let known = asked.await.ok().flatten();
    let usage = subscription
        .group
        .in_flight
        .usage(subscription.source.index);
    let counters = &subscription.counters;
    SubscriptionStatus {
        name: subscription.name().clone(),
        workers: subscription.lanes.workers(),
        max_in_flight: subscription.max_in_flight.load(Ordering::Relaxed),
        stream: subscription.source.stream.clone(),
        group: subscription.source.group.clone(),
        consumer: subscription.source.consumer.clone(),
        mode: subscription.source.mode,
        state: state(tree, subscription),
        read: counters.read.load(Ordering::Relaxed),
        recovered: counters.recovered.load(Ordering::Relaxed),
        gone: counters.gone.load(Ordering::Relaxed),
        foreign_copies: counters.foreign_copies.load(Ordering::Relaxed),
        verdicts: counters.verdicts(),
        in_flight: usage.entries,
        bytes_in_flight: usage.bytes,
        waiting: subscription.lanes.waiting(),
        running: subscription.lanes.all_running().len(),
        parked: usage.parked,
        lag: known.as_ref().and_then(|(group, _)| group.lag),
        pending: known.as_ref().map(|(group, _)| group.pending),
        oldest_idle: known.and_then(|(_, oldest)| oldest),
        restarts,
        last_error: subscription.condition.last_error(),
    }
}

fn state(tree: &Tree, subscription: &SubscriptionState) -> State {
    if subscription.is_held_for(Reason::Failed) {
        State::Failed
    } else if tree.order.borrow().stop {
        State::Stopped
    } else if tree.order.borrow().stop_reading || subscription.is_held_for(Reason::Removed) {
        State::Draining
    } else if subscription.is_held_for(Reason::Paused) {
        State::Paused
    } else if subscription.is_held_for(Reason::TargetGone) {
        State::TargetGone
    } else if let Some(trouble) = subscription.condition.state() {
        trouble
    } else if !subscription.started.load(Ordering::Relaxed) {
        State::Starting
    } else if subscription.source.mode != Mode::Reclaim && subscription.cursor().is_catching_up() {
        State::Recovering
    } else {
        State::Running
    }
}
