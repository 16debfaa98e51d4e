//! Moves entries that are due from a delay set back to their stream. Everything it knows is on the
//! server, so any number of processes may do it, and a new incarnation simply goes on.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use ractor::{Actor, ActorProcessingErr, ActorRef};
use tokio::sync::watch;

use super::delays::Delays;
use super::tree::{BLOCKED_FOR, DelaySet, Order, Tree};
use crate::server::{ServerError, delay};

/// How long an entry that another process put into the set may be overdue before it is seen.
const LONGEST_SLEEP: Duration = Duration::from_secs(1);
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(3);

pub(crate) struct Sweeper;

pub(crate) enum SweeperMessage {
    /// Time for the next round.
    Next,
}

#[cfg(feature = "cluster")]
impl ractor::Message for SweeperMessage {}

pub(crate) struct SweeperState {
    tree: Arc<Tree>,
    delay_set: Arc<DelaySet>,
    order: watch::Receiver<Order>,
    delays: Delays,
    /// What was said of it last: the same again is said once.
    failing: bool,
}

impl Actor for Sweeper {
    type Msg = SweeperMessage;
    type State = SweeperState;
    type Arguments = (Arc<Tree>, Arc<DelaySet>);

    async fn pre_start(
        &self,
        myself: ActorRef<SweeperMessage>,
        (tree, delay_set): Self::Arguments,
    ) -> Result<SweeperState, ActorProcessingErr> {
        myself.cast(SweeperMessage::Next)?;
        let order = tree.order.subscribe();
        Ok(SweeperState {
            tree,
            delay_set,
            order,
            delays: Delays::new(FIRST_PAUSE, LONGEST_PAUSE),
            failing: false,
        })
    }

    async fn handle(
        &self,
        myself: ActorRef<SweeperMessage>,
        SweeperMessage::Next: SweeperMessage,
        state: &mut SweeperState,
    ) -> Result<(), ActorProcessingErr> {
        if state.order.borrow().stop || state.delay_set.retired.load(Ordering::Acquire) {
            myself.stop(None);
            return Ok(());
        }
        state.delay_set.at("sweeper.before");
        let pause = state.sweep().await?;
        state.delay_set.at("sweeper.swept");
        let added = state.delay_set.added.notified();
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            () = added => {}
            _ = state.order.changed() => {}
        }
        myself.cast(SweeperMessage::Next)?;
        Ok(())
    }
}

impl SweeperState {
    /// Moves a batch. Returns how long there is nothing to do.
    async fn sweep(&mut self) -> Result<Duration, ServerError> {
        let DelaySet {
            set, stream, ttl, ..
        } = &*self.delay_set;
        let swept = delay::sweep(&self.tree.settling, set, stream, delay::MOST_MOVED, *ttl).await;
        match swept {
            Ok(swept) => {
                if swept.unreadable > 0 {
                    let (kept, unreadable) = (delay::unreadable(set), swept.unreadable);
                    tracing::warn!(target: "streamvisor", %set, unreadable, %kept, "members of the delay set cannot be read; they were moved aside");
                }
                if swept.moved > 0 {
                    let (moved, late) = (swept.moved, swept.oldest_late);
                    tracing::debug!(target: "streamvisor", %set, moved, ?late, "delayed entries are back in their stream");
                }
                match swept.refused {
                    Some(error) => Ok(self.wait(&error)),
                    None => {
                        self.delays.reset();
                        self.failing = false;
                        Ok(swept
                            .next_due
                            .map_or(LONGEST_SLEEP, |due| due.min(LONGEST_SLEEP)))
                    }
                }
            }
            // What cannot be explained is this actor's own failure.
            Err(error @ ServerError::Malformed(_)) => Err(error),
            Err(error) => Ok(self.wait(&error)),
        }
    }

    fn wait(&mut self, error: &ServerError) -> Duration {
        let pause = if error.is_lasting() {
            BLOCKED_FOR
        } else {
            self.delays.next()
        };
        let set = &self.delay_set.set;
        if std::mem::replace(&mut self.failing, true) {
            tracing::debug!(target: "streamvisor", %set, %error, again_in = ?pause, "the delay set still cannot be swept");
        } else {
            tracing::warn!(target: "streamvisor", %set, %error, again_in = ?pause, "the delay set cannot be swept");
        }
        pause
    }
}
