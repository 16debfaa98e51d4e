//! What was delivered and is handled by nobody: by a former self of this consumer, by a read whose
//! outcome is unknown, by consumers that crashed.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::ReaderState;
use super::upkeep::{TIDY_EVERY, tidy};
use crate::actors::tree::SubscriptionState;
use crate::message::{Entry, EntryId};
use crate::server::{Connection, ServerError, read, reclaim, settle};

/// The most entries of one recovery or reclaim step: each holds the server for well under two
/// milliseconds.
const STEP: usize = 100;
/// Between two steps of a reclaim pass that found nothing.
const PACE: Duration = Duration::from_millis(10);
/// How often a subscription that claims looks for pending entries that were deleted.
const PURGE_EVERY: Duration = Duration::from_secs(300);

/// What a step of a reclaim pass came to.
enum Step {
    /// It took something.
    Found,
    /// It found nothing that is due.
    Nothing,
    /// It came to the end of the pending list; whether the whole pass has found something.
    EndOfPass { found: bool },
    /// There was no room, and it waited for some.
    Waited,
}

impl ReaderState {
    /// Takes what this consumer has pending above the floor, and nobody here holds: one page.
    pub(super) async fn recover(
        &mut self,
        connection: &Connection,
        after: EntryId,
    ) -> Result<(), ServerError> {
        let subscription = Arc::clone(&self.subscription);
        let (group, consumer) = (&subscription.group.group, &subscription.source.consumer);
        let room = self.room().min(STEP);
        if room == 0 {
            self.wait_for_room().await;
            return Ok(());
        }
        let page = read::own_pending(connection, group, consumer, after, STEP).await?;
        self.subscription.at("reader.pending_listed");
        let last = (page.len() >= STEP)
            .then(|| page.last().map(|pending| pending.id))
            .flatten();
        let unknown = subscription
            .group
            .in_flight
            .unknown_of(page, |pending| pending.id);
        // What there is no room for is looked at again once there is.
        let (now, later) = unknown.split_at(room.min(unknown.len()));
        if !now.is_empty() {
            let wanted: Vec<(EntryId, u64)> = now
                .iter()
                .map(|pending| (pending.id, pending.count))
                .collect();
            let taken = read::take_own(connection, group, consumer, &wanted).await?;
            self.subscription.at("reader.pending_taken");
            self.take_recovered(taken.entries);
            self.report_gone(taken.gone);
            self.subscription.at("reader.recovered");
        }
        if later.is_empty() {
            let block = subscription.plan.settings.block;
            let mut cursor = subscription.cursor();
            cursor.recovered(last, Instant::now(), block);
            let recovering = cursor.is_recovering();
            drop(cursor);
            subscription
                .group
                .in_flight
                .keep_left(subscription.source.index, recovering);
        }
        self.well();
        Ok(())
    }

    /// Takes up again what this subscription gave back while it stood still and nobody took meanwhile: one
    /// page. Returns whether there was any.
    pub(super) async fn take_up(&mut self, connection: &Connection) -> Result<bool, ServerError> {
        let subscription = Arc::clone(&self.subscription);
        if subscription.given_back.ours(1).is_empty() {
            return Ok(false);
        }
        let room = self.room().min(STEP);
        if room == 0 {
            self.wait_for_room().await;
            return Ok(true);
        }
        let page = subscription.given_back.ours(room);
        let in_flight = &subscription.group.in_flight;
        let (group, consumer) = (&subscription.group.group, &subscription.source.consumer);
        let wanted: Vec<_> = page
            .iter()
            // What another subscription of this process has taken is in its own name.
            .filter(|(id, _)| in_flight.owner(*id).is_none())
            // What came fresh counts one again, as when it was read first.
            .map(|(id, count)| (*id, (*count).max(1)))
            .collect();
        let taken = read::take_own(connection, group, consumer, &wanted).await?;
        self.subscription.at("reader.given_back_taken");
        let was_fresh = |id: EntryId| page.iter().any(|(of, count)| *of == id && *count == 0);
        let (fresh, others): (Vec<_>, Vec<_>) = taken
            .entries
            .into_iter()
            .partition(|(entry, ..)| was_fresh(entry.id()));
        self.take_up_fresh(fresh.into_iter().map(|(entry, ..)| entry));
        self.take_recovered(others);
        subscription.given_back.taken_up(page.len());
        self.report_gone(taken.gone);
        self.well();
        Ok(true)
    }

    pub(super) async fn reclaim(
        &mut self,
        connection: &Connection,
        min_idle: Duration,
    ) -> Result<(), ServerError> {
        match self.reclaim_step(connection, min_idle).await? {
            Step::Found | Step::Waited => {}
            Step::Nothing => {
                let _ = self.stop.or(tokio::time::sleep(PACE)).await;
            }
            Step::EndOfPass { found: true } => {}
            Step::EndOfPass { found: false } => {
                let block = self.subscription.plan.settings.block;
                let _ = self.stop.or(tokio::time::sleep(block)).await;
            }
        }
        Ok(())
    }

    /// Takes what is due of the next part of the pending list.
    async fn reclaim_step(
        &mut self,
        connection: &Connection,
        min_idle: Duration,
    ) -> Result<Step, ServerError> {
        let subscription = Arc::clone(&self.subscription);
        let count = self.room().min(STEP);
        if count == 0 {
            self.wait_for_room().await;
            return Ok(Step::Waited);
        }
        let (group, consumer) = (&subscription.group.group, &subscription.source.consumer);
        let from = subscription.cursor().reclaim_next;
        self.subscription.at("reclaim.before");
        let held = subscription.group.in_flight.stale(min_idle, Instant::now());
        let found =
            reclaim::reclaim(connection, group, consumer, min_idle, from, count, &held).await?;
        self.subscription.at("reclaim.reply");
        let nothing = found.entries.is_empty() && found.gone.is_empty();
        let next = found.next;
        self.take_recovered(found.entries);
        self.report_gone(found.gone);
        self.subscription.at("reclaim.handed_over");
        let step = {
            let mut cursor = subscription.cursor();
            cursor.reclaim_next = next;
            cursor.reclaim_found |= !nothing;
            match (next, nothing) {
                (EntryId::MIN, _) => {
                    let found = std::mem::take(&mut cursor.reclaim_found);
                    Step::EndOfPass { found }
                }
                (_, true) => Step::Nothing,
                (_, false) => Step::Found,
            }
        };
        self.subscription.at("reclaim.moved");
        if matches!(step, Step::EndOfPass { .. }) && self.tidy_at <= Instant::now() {
            let ttl = subscription.plan.settings.consumer_ttl;
            self.tidy_at = Instant::now() + ttl.min(TIDY_EVERY);
            tidy(&subscription, connection).await?;
        }
        self.well();
        Ok(step)
    }

    /// CLAIM passes over entries that were deleted while they were pending, and leaves them there for
    /// ever. Now and then a reclaim pass takes them off the list.
    pub(super) async fn purge(
        &mut self,
        connection: &Connection,
        min_idle: Duration,
    ) -> Result<(), ServerError> {
        match self.reclaim_step(connection, min_idle).await? {
            Step::EndOfPass { .. } => self.purge_at = Instant::now() + PURGE_EVERY,
            // Fresh entries have their turn between the steps.
            _ => self.plain = true,
        }
        Ok(())
    }
}

/// A read that claims counts as a delivery, and is no start: puts the counts back. What this process
/// holds in another consumer's name, and could not keep fresh, goes back to that one.
pub(super) async fn put_back(
    subscription: &SubscriptionState,
    connection: &Connection,
    claimed: &[(Entry, u64, Duration)],
) -> Result<(), ServerError> {
    let (group, ours) = (&subscription.group.group, &subscription.source.consumer);
    let (mut counts, mut misplaced) = (Vec::with_capacity(claimed.len()), Vec::new());
    for (entry, count, _) in claimed {
        match subscription.group.in_flight.owner(entry.id()) {
            Some(holder) if holder != *ours => misplaced.push((entry.id(), holder, *count)),
            _ => counts.push((entry.id(), Arc::clone(ours), *count)),
        }
    }
    if !misplaced.is_empty() {
        settle::return_to(connection, group, ours, &misplaced).await?;
    }
    settle::count_starts(connection, group, &counts).await?;
    Ok(())
}
