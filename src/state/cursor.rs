//! Where the reading of a subscription stands: positions only.

use std::time::{Duration, Instant};

use crate::message::EntryId;

/// Where a subscription's reader stands.
///
/// Two positions matter to a reader of fresh entries. Everything up to `registered` was read from `>`
/// and is known to this process. And where a read's outcome is unknown, the server may have delivered
/// entries to nobody: all of them lie above the *floor*, which is `registered` at the moment when the
/// first such read was noticed. While a recovery is open
///
/// * nothing is read from `>` until every page above the floor has been looked through once, and
/// * the floor stays until that was done again a block later, because a read that is lost to us may
///   still be waiting on the server.
///
/// Replies are registered in the order in which their reads were sent, and none that comes after a
/// read of unknown outcome. So no entry below the floor was ever lost sight of.
#[derive(Debug)]
pub(crate) struct Cursor {
    registered: EntryId,
    /// Reads that were sent and whose reply has not been registered.
    outstanding: usize,
    recovery: Option<Recovery>,
    /// Where the reclaim scan goes on.
    pub reclaim_next: EntryId,
    /// The reclaim pass that is under way has found something.
    pub reclaim_found: bool,
}

#[derive(Debug)]
struct Recovery {
    floor: EntryId,
    /// The last id that the run under way has looked at.
    after: EntryId,
    stage: Stage,
}

#[derive(Debug, PartialEq)]
enum Stage {
    /// The only run: what a former process of this consumer's name left pending.
    AtStart,
    /// The first run after a read of unknown outcome.
    First,
    /// The first one is done and the second waits for its time.
    Waiting(Instant),
    Second,
}

impl Cursor {
    /// A subscription that starts: everything its consumer has pending is recovered first.
    pub(crate) fn new(last_delivered: EntryId) -> Self {
        Cursor {
            registered: last_delivered,
            outstanding: 0,
            recovery: Some(Recovery {
                floor: EntryId::MIN,
                after: EntryId::MIN,
                stage: Stage::AtStart,
            }),
            reclaim_next: EntryId::MIN,
            reclaim_found: false,
        }
    }

    /// The highest id known to have been delivered by the group; where it would be made again.
    pub(crate) fn mark(&self) -> EntryId {
        self.registered
    }

    /// The group's position on the server, read again: it is the truth. With reads on their way it may lie
    /// beyond what they bring, and their outcome may yet turn out unknown: then it is only followed back.
    pub(crate) fn follow(&mut self, last_delivered: EntryId) {
        self.registered = if self.outstanding > 0 {
            self.registered.min(last_delivered)
        } else {
            last_delivered
        };
    }

    /// A fresh read is about to be sent.
    pub(crate) fn sent(&mut self) {
        self.outstanding += 1;
    }

    /// The reply of the oldest outstanding read has been registered; `highest` is its last id.
    pub(crate) fn registered(&mut self, highest: Option<EntryId>) {
        self.outstanding = self.outstanding.saturating_sub(1);
        if let Some(highest) = highest {
            self.registered = self.registered.max(highest);
        }
    }

    /// A new reader takes over: what its predecessor sent and did not register is of unknown outcome.
    pub(crate) fn resume(&mut self) {
        if self.outstanding > 0 {
            self.lose_track();
        }
    }

    /// The outcome of the oldest outstanding read is unknown, and with it that of all behind it.
    pub(crate) fn lose_track(&mut self) {
        self.outstanding = 0;
        match &mut self.recovery {
            Some(Recovery {
                stage: Stage::AtStart,
                ..
            }) => {}
            Some(recovery) => {
                recovery.after = recovery.floor;
                recovery.stage = Stage::First;
            }
            None => {
                let floor = self.registered;
                self.recovery = Some(Recovery {
                    floor,
                    after: floor,
                    stage: Stage::First,
                });
            }
        }
    }

    /// Where the next page of own pending entries begins (exclusive), if one is to be looked at now.
    pub(crate) fn recovery_due(&mut self, now: Instant) -> Option<EntryId> {
        let recovery = self.recovery.as_mut()?;
        if let Stage::Waiting(at) = recovery.stage {
            if now < at {
                return None;
            }
            recovery.after = recovery.floor;
            recovery.stage = Stage::Second;
        }
        Some(recovery.after)
    }

    /// When the second run of a recovery is to begin.
    pub(crate) fn recovery_waits_until(&self) -> Option<Instant> {
        match self.recovery.as_ref()?.stage {
            Stage::Waiting(at) => Some(at),
            _ => None,
        }
    }

    /// A page was recovered. `last` is the last id on it when there may be more.
    pub(crate) fn recovered(&mut self, last: Option<EntryId>, now: Instant, block: Duration) {
        let Some(recovery) = self.recovery.as_mut() else {
            return;
        };
        match (last, &recovery.stage) {
            (Some(last), _) => recovery.after = last,
            (None, Stage::First) => recovery.stage = Stage::Waiting(now + block),
            (None, _) => self.recovery = None,
        }
    }

    /// Whether own pending entries are looked through before anything fresh is read.
    pub(crate) fn is_catching_up(&self) -> bool {
        let stage = self.recovery.as_ref().map(|recovery| &recovery.stage);
        matches!(stage, Some(Stage::AtStart | Stage::First))
    }

    /// Whether ids that are let go of have to be remembered, because a recovery would find them.
    pub(crate) fn is_recovering(&self) -> bool {
        self.recovery.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCK: Duration = Duration::from_secs(5);

    fn id(ms: u64) -> EntryId {
        EntryId::new(ms, 0)
    }

    /// A cursor that has finished its recovery at start.
    fn started() -> Cursor {
        let mut cursor = Cursor::new(id(10));
        assert_eq!(cursor.recovery_due(Instant::now()), Some(EntryId::MIN));
        cursor.recovered(Some(id(3)), Instant::now(), BLOCK);
        assert_eq!(cursor.recovery_due(Instant::now()), Some(id(3)));
        cursor.recovered(None, Instant::now(), BLOCK);
        assert!(!cursor.is_recovering());
        cursor
    }

    fn read(cursor: &mut Cursor, highest: u64) {
        cursor.sent();
        cursor.registered(Some(id(highest)));
    }

    #[test]
    fn the_floor_is_what_was_registered_before_the_first_read_of_unknown_outcome() {
        let mut cursor = started();
        read(&mut cursor, 20);
        cursor.sent();
        cursor.sent();
        cursor.lose_track();
        let now = Instant::now();
        assert_eq!(cursor.recovery_due(now), Some(id(20)));
        cursor.recovered(None, now, BLOCK);
        assert_eq!(cursor.recovery_due(now), None);
        // Reading goes on meanwhile, and the floor stays.
        read(&mut cursor, 40);
        assert_eq!(cursor.recovery_due(now + BLOCK), Some(id(20)));
        cursor.recovered(Some(id(30)), now, BLOCK);
        assert_eq!(cursor.recovery_due(now), Some(id(30)));
        cursor.recovered(None, now, BLOCK);
        assert!(!cursor.is_recovering());
    }

    #[test]
    fn the_floor_does_not_follow_the_group_beyond_what_a_read_on_its_way_may_bring() {
        let mut cursor = started();
        read(&mut cursor, 20);
        cursor.sent();
        // Another subscription of the group has looked where it stands.
        cursor.follow(id(30));
        cursor.lose_track();
        assert_eq!(cursor.recovery_due(Instant::now()), Some(id(20)));
        let mut cursor = started();
        cursor.follow(id(30));
        assert_eq!(cursor.mark(), id(30));
        cursor.sent();
        cursor.follow(id(25));
        assert_eq!(cursor.mark(), id(25));
    }

    #[test]
    fn a_second_unknown_outcome_starts_over_from_the_first_floor() {
        let mut cursor = started();
        read(&mut cursor, 20);
        cursor.lose_track();
        let now = Instant::now();
        cursor.recovered(None, now, BLOCK);
        read(&mut cursor, 40);
        cursor.lose_track();
        assert_eq!(cursor.recovery_due(now), Some(id(20)));
        cursor.recovered(None, now, BLOCK);
        assert!(
            cursor
                .recovery_waits_until()
                .is_some_and(|at| at == now + BLOCK)
        );
    }

    #[test]
    fn a_reader_that_died_with_nothing_outstanding_has_lost_nothing() {
        let mut cursor = started();
        read(&mut cursor, 20);
        cursor.resume();
        assert!(!cursor.is_recovering());
        cursor.sent();
        cursor.resume();
        assert_eq!(cursor.recovery_due(Instant::now()), Some(id(20)));
    }

    #[test]
    fn an_unknown_outcome_during_the_recovery_at_start_does_not_shorten_it() {
        let mut cursor = Cursor::new(id(10));
        cursor.recovered(Some(id(3)), Instant::now(), BLOCK);
        cursor.lose_track();
        assert_eq!(cursor.recovery_due(Instant::now()), Some(id(3)));
    }
}
