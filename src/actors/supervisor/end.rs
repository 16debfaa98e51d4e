//! How a tree ends, and what is told of it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ractor::{ActorCell, ActorRef};
use serde::Serialize;
use tokio::time::timeout_at;

use super::{Key, LAST_WORD, Message, SupervisorMessage, SupervisorState};
use crate::actors::drain::LAST_MOMENT;
use crate::message::{EntryId, StreamKey};
use crate::observe::{Child, Event};

/// What is left of an entry when the tree has ended: it stays pending on the server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Remaining {
    /// The stream's key.
    pub stream: StreamKey,
    /// The group's name.
    pub group: Arc<str>,
    /// The entry's id.
    pub id: EntryId,
}

/// What a shutdown did.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct ShutdownReport {
    /// Verdicts that were stored on the server meanwhile.
    pub settled: u64,
    /// Entries that were read and not started, and were given back for others to take at once.
    pub given_back: u64,
    /// Entries whose handler was still running at the deadline.
    pub left_running: Vec<Remaining>,
    /// Entries whose verdict could not be stored before the deadline.
    pub unsettled: Vec<Remaining>,
}

/// Why a tree ended by itself: one of its actors kept failing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Failure {
    /// The actor.
    pub child: Child,
    /// How many restarts it had; 0 for one that cannot be started again.
    pub restarts: u32,
    /// The window in which they were counted.
    pub within: Duration,
    /// Its last failure.
    pub error: String,
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Failure {
            child,
            restarts,
            within,
            error,
        } = self;
        match restarts {
            0 => write!(f, "{child} failed: {error}"),
            _ => write!(
                f,
                "{child} failed more than {restarts} times within {within:?}, at last with: {error}"
            ),
        }
    }
}

impl std::error::Error for Failure {}

/// How a tree ended.
#[derive(Debug, Clone)]
pub(crate) struct Ended {
    pub report: ShutdownReport,
    pub failure: Option<Failure>,
}

impl SupervisorState {
    /// Ends the tree in order: once.
    pub(super) async fn drain(&mut self, myself: &ActorRef<SupervisorMessage>) {
        if std::mem::replace(&mut self.draining, true) {
            return;
        }
        if let Err(error) = self.spawn(myself, Key::Drain).await {
            tracing::error!(target: "streamvisor", %error, "the tree cannot be drained and ends as it is");
            let _ = myself.cast(SupervisorMessage(Message::Drained(
                ShutdownReport::default(),
                Instant::now() + LAST_WORD,
            )));
        }
    }

    /// Tells everybody to end, and waits for it, a moment. How they ended is heard before the message that this
    /// casts.
    pub(super) async fn end(
        &mut self,
        myself: &ActorRef<SupervisorMessage>,
        report: ShutdownReport,
        deadline: Instant,
    ) {
        let deadline = deadline.max(Instant::now() + LAST_MOMENT);
        self.tree.order.send_modify(|order| {
            order.stop_reading = true;
            order.stop = true;
        });
        let cells: Vec<ActorCell> = self.cells.drain().map(|(_, cell)| cell).collect();
        let within = deadline.saturating_duration_since(Instant::now());
        let ended = cells.iter().map(|cell| async move {
            let ended = cell.wait(Some(within.min(LAST_WORD))).await;
            (cell, ended.is_ok())
        });
        for (cell, has_ended) in futures_util::future::join_all(ended).await {
            if !has_ended {
                // That it did not end is in the report.
                self.children.remove(&cell.get_id());
                cell.kill();
            }
        }
        let _ = myself.cast(SupervisorMessage(Message::EveryoneEnded(report, deadline)));
    }

    /// Closes the connections, and says how it ended.
    pub(super) async fn close(&mut self, report: ShutdownReport, deadline: Instant) {
        let deadline = deadline.max(Instant::now() + LAST_MOMENT);
        let closed = self.tree.close_connections();
        if timeout_at(deadline.into(), closed).await.is_err() {
            self.tree.abort_connections();
        }
        let (settled, given_back) = (report.settled, report.given_back);
        self.tree.announcer.announce(Event::Drained {
            settled,
            given_back,
        });
        self.ended.send_replace(Some(Ended {
            report,
            failure: self.failure.clone(),
        }));
    }
}
