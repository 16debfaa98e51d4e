//! What happens in a tree, as it happens.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use tokio::sync::broadcast;

use crate::message::{EntryId, StreamKey};

/// How many events a listener may be behind before it misses some.
const BACKLOG: usize = 1024;

/// One of the actors of a tree.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Child {
    /// Reads the entries of this subscription.
    Reader {
        /// The subscription's name.
        subscription: Arc<str>,
    },
    /// Handles entries of this subscription.
    Handler {
        /// The subscription's name.
        subscription: Arc<str>,
        /// Which of its workers, from 0.
        worker: usize,
    },
    /// Stores the verdicts of this group.
    Settler {
        /// The stream's key.
        stream: StreamKey,
        /// The group's name.
        group: Arc<str>,
    },
    /// Moves due entries of this delay set back to their stream.
    Sweeper {
        /// The delay set's key.
        set: StreamKey,
    },
    /// Keeps what is in hand fresh on the server.
    KeepAlive,
    /// Stops the tree in order.
    Drain,
}

impl fmt::Display for Child {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Child::Reader { subscription } => write!(f, "the reader of `{subscription}`"),
            Child::Handler {
                subscription,
                worker,
            } => write!(f, "handler {worker} of `{subscription}`"),
            Child::Settler { stream, group } => write!(f, "the settler of `{stream}`/`{group}`"),
            Child::Sweeper { set } => write!(f, "the sweeper of `{set}`"),
            Child::KeepAlive => f.write_str("the keep-alive"),
            Child::Drain => f.write_str("the drain"),
        }
    }
}

/// Something that happened in a tree.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
#[non_exhaustive]
#[allow(missing_docs)] // the fields are named after what they are
pub enum Event {
    /// The subscription reads.
    Started { subscription: Arc<str> },
    /// An actor ended by a panic, an error or a kill.
    Crashed { child: Child, error: String },
    /// A crashed actor runs again; `restarts` counts those of this actor so far.
    Restarted { child: Child, restarts: u64 },
    /// The group was missing and was made again.
    GroupRemade {
        subscription: Arc<str>,
        last_delivered: EntryId,
    },
    /// Entries were recovered: left pending by this consumer, or taken over from others.
    Recovered {
        subscription: Arc<str>,
        entries: usize,
    },
    /// Entries were trimmed or deleted while they were pending, and taken off the pending list.
    Gone {
        subscription: Arc<str>,
        ids: Vec<EntryId>,
    },
    /// An entry is in the dead-letter stream.
    DeadLettered { subscription: Arc<str>, id: EntryId },
    /// An entry stays pending although it was not asked for: there is no dead-letter stream, or the
    /// server refuses its copy for good.
    LeftPending {
        subscription: Arc<str>,
        id: EntryId,
        reason: String,
    },
    /// Another consumer took an entry over that this process was working on.
    OwnershipLost { subscription: Arc<str>, id: EntryId },
    /// A handler hangs in a call that cannot be ended; its worker was replaced and the entry is free
    /// for others.
    Abandoned { subscription: Arc<str>, id: EntryId },
    /// The server refuses what the subscription needs; looked at again every 30 s.
    Blocked {
        subscription: Arc<str>,
        error: String,
    },
    /// The subscription is blocked no more.
    Unblocked { subscription: Arc<str> },
    /// The server is away or cannot work now; it is waited out.
    ServerAway {
        subscription: Arc<str>,
        error: String,
    },
    /// The server answers again.
    ServerBack {
        subscription: Arc<str>,
        after: Duration,
    },
    /// As many entries as allowed wait for an in-process delay; further ones keep their place in flight.
    ParkedFull { subscription: Arc<str> },
    /// An actor's restart budget is spent: the tree ends, or with `RestartPolicy::isolate` its
    /// subscriptions fail.
    Escalated { child: Child, error: String },
    /// The tree has stopped.
    Drained { settled: u64, given_back: u64 },
}

/// Tells everybody who listens.
#[derive(Clone)]
pub(crate) struct Announcer {
    sender: broadcast::Sender<Event>,
}

impl Announcer {
    pub(crate) fn new() -> Self {
        Announcer {
            sender: broadcast::Sender::new(BACKLOG),
        }
    }

    /// Logs the event and passes it on. Never waits: a slow listener misses events, and learns that
    /// it did.
    pub(crate) fn announce(&self, event: Event) {
        match &event {
            Event::Started { .. } | Event::Drained { .. } | Event::ServerBack { .. } => {
                tracing::info!(target: "streamvisor", ?event);
            }
            Event::Recovered { .. } | Event::DeadLettered { .. } | Event::Unblocked { .. } => {
                tracing::debug!(target: "streamvisor", ?event);
            }
            Event::Escalated { .. } => tracing::error!(target: "streamvisor", ?event),
            _ => tracing::warn!(target: "streamvisor", ?event),
        }
        // Nobody listens: nothing to do.
        let _ = self.sender.send(event);
    }

    pub(crate) fn listen(&self) -> Events {
        Events {
            receiver: self.sender.subscribe(),
        }
    }
}

/// This listener was too slow and missed so many events.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{0} events were missed: the listener was too slow")]
pub struct MissedEvents(pub u64);

/// What happens in a tree from now on. Made by [`SupervisorHandle::events`](crate::SupervisorHandle::events).
#[derive(Debug)]
pub struct Events {
    receiver: broadcast::Receiver<Event>,
}

impl Events {
    /// The next event; `None` once the tree has ended.
    ///
    /// # Errors
    ///
    /// [`MissedEvents`] when this listener was more than a thousand events behind. The next call
    /// goes on with the oldest that is still known.
    pub async fn next(&mut self) -> Result<Option<Event>, MissedEvents> {
        match self.receiver.recv().await {
            Ok(event) => Ok(Some(event)),
            Err(broadcast::error::RecvError::Closed) => Ok(None),
            Err(broadcast::error::RecvError::Lagged(missed)) => Err(MissedEvents(missed)),
        }
    }
}
