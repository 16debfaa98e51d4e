//! How a tree is doing at one moment, as plain data.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use serde::Serialize;

use super::Child;
use crate::message::{Mode, StreamKey};

/// How a tree is doing. Made by [`SupervisorHandle::status`](crate::SupervisorHandle::status).
///
/// ```no_run
/// # async fn example(supervisor: streamvisor::SupervisorHandle) -> Result<(), serde_json::Error> {
/// let status = supervisor.status().await;
/// println!("{}", serde_json::to_string_pretty(&status)?);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Status {
    /// Each subscription: those of the topology in its order, then those that were added.
    pub subscriptions: Vec<SubscriptionStatus>,
    /// The actors that were started again, with how often.
    pub restarts: Vec<Restarts>,
}

/// How often an actor was started again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Restarts {
    /// The actor.
    pub child: Child,
    /// Restarts since the tree started.
    pub restarts: u64,
}

/// How a subscription is doing.
///
/// What only the server knows is `None` where it does not say, or did not answer in time: an unknown
/// lag is not a lag of zero.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct SubscriptionStatus {
    /// Its name.
    pub name: Arc<str>,
    /// How many workers it has, or is to have.
    pub workers: usize,
    /// How many entries it may have in hand.
    pub max_in_flight: usize,
    /// The stream's key.
    pub stream: StreamKey,
    /// The group's name.
    pub group: Arc<str>,
    /// The consumer's name.
    pub consumer: Arc<str>,
    /// How it reads.
    pub mode: Mode,
    /// What it is doing.
    pub state: State,
    /// Entries read since the start, recovered ones included.
    pub read: u64,
    /// Of these, the recovered ones.
    pub recovered: u64,
    /// Pending entries that were found trimmed or deleted.
    pub gone: u64,
    /// Copies that belong to other groups, acknowledged without being handed over.
    pub foreign_copies: u64,
    /// Verdicts given since the start, by what they ask for.
    pub verdicts: Verdicts,
    /// Entries in hand now: read, and their verdict not stored.
    pub in_flight: usize,
    /// Their bytes.
    pub bytes_in_flight: usize,
    /// Of the entries in hand, those that no handler has started.
    pub waiting: usize,
    /// Of the entries in hand, those that a handler is running.
    pub running: usize,
    /// Entries that wait here for a delay.
    pub parked: usize,
    /// Entries that the group has not had yet.
    pub lag: Option<u64>,
    /// Entries that are pending in the whole group, for any consumer.
    pub pending: Option<u64>,
    /// How long the oldest pending entry of the group has been idle.
    pub oldest_idle: Option<Duration>,
    /// How often its reader and its handlers were started again.
    pub restarts: u64,
    /// What went wrong last.
    pub last_error: Option<LastError>,
}

/// What a subscription is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum State {
    /// It has not read anything yet.
    Starting,
    /// It takes up what its consumer left pending.
    Recovering,
    /// It reads.
    Running,
    /// The server is away or cannot work now.
    WaitingForServer,
    /// The server refuses something; looked at again every 30 s.
    Blocked,
    /// It was told to pause: it reads and starts nothing until it is told to resume.
    Paused,
    /// The actor that its entries are forwarded to is not there: it reads nothing until it is.
    TargetGone,
    /// Its restart budget is spent and it has been given up.
    Failed,
    /// The tree is stopping, or the subscription is being removed from it.
    Draining,
    /// The tree has ended.
    Stopped,
}

/// Verdicts given, by what they ask for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Verdicts {
    /// Done.
    pub acknowledged: u64,
    /// Acknowledged without being done, by the handler or because all attempts were spent.
    pub rejected: u64,
    /// Copied to the end of the stream at once.
    pub retried: u64,
    /// To be retried after a delay.
    pub delayed: u64,
    /// To the dead-letter stream.
    pub dead_lettered: u64,
    /// Left pending.
    pub left_pending: u64,
}

/// Something that went wrong.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct LastError {
    /// When, by this machine's clock.
    pub at: SystemTime,
    /// What.
    pub error: String,
}
