//! What happens in a tree, as it happens.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::stream::{self, Stream};
use ractor::ActorRef;
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
    /// The root. It is never started again: a [`Failure`](crate::Failure) names it when it was killed or
    /// panicked, and the tree ended with it.
    Supervisor,
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
            Child::Supervisor => f.write_str("the supervisor"),
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
    /// The group was missing and was made again, or somebody moved it back.
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
    /// Another process uses the consumer's name, which the user gave, after this one could not renew its lease on
    /// it. The subscription has failed; what it had in hand is the other process's.
    ConsumerTaken {
        subscription: Arc<str>,
        consumer: Arc<str>,
    },
    /// The actor that the entries are forwarded to is not there: what it had comes back, and nothing is read.
    TargetGone { subscription: Arc<str> },
    /// There is an actor of that name again.
    TargetBack { subscription: Arc<str> },
    /// Entries with one value of the header that the subscription is ordered by fill most of what may be in
    /// flight, so that those with other values hardly get through.
    HotKey {
        subscription: Arc<str>,
        key: Option<String>,
        waiting: usize,
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
    /// The subscription was told to pause, and starts nothing from here on.
    Paused { subscription: Arc<str> },
    /// The subscription was told to go on.
    Resumed { subscription: Arc<str> },
    /// The subscription was removed from the tree.
    Removed { subscription: Arc<str> },
    /// An actor's restart budget is spent: the tree ends, or with `RestartPolicy::isolate` its
    /// subscriptions fail.
    Escalated { child: Child, error: String },
    /// The tree has stopped.
    Drained { settled: u64, given_back: u64 },
}

impl Event {
    /// How loud it is logged.
    fn level(&self) -> tracing::Level {
        match self {
            Event::Started { .. }
            | Event::Paused { .. }
            | Event::Resumed { .. }
            | Event::TargetBack { .. }
            | Event::Removed { .. }
            | Event::Drained { .. }
            | Event::ServerBack { .. } => tracing::Level::INFO,
            Event::Recovered { .. } | Event::DeadLettered { .. } | Event::Unblocked { .. } => {
                tracing::Level::DEBUG
            }
            Event::Escalated { .. } | Event::ConsumerTaken { .. } => tracing::Level::ERROR,
            _ => tracing::Level::WARN,
        }
    }
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Event::Started { subscription } => write!(f, "`{subscription}` reads"),
            Event::Crashed { child, error } => write!(f, "{child} crashed: {error}"),
            Event::Restarted { child, restarts } => {
                write!(f, "{child} was started again (restarts so far: {restarts})")
            }
            Event::GroupRemade {
                subscription,
                last_delivered,
            } => write!(
                f,
                "the group of `{subscription}` was missing or moved back; it goes on after {last_delivered}"
            ),
            Event::Recovered {
                subscription,
                entries,
            } => {
                write!(f, "`{subscription}` recovered {entries} entries")
            }
            Event::Gone { subscription, ids } => write!(
                f,
                "`{subscription}`: {} pending entries were trimmed or deleted and are gone: {ids:?}",
                ids.len()
            ),
            Event::DeadLettered { subscription, id } => {
                write!(f, "`{subscription}`: {id} is in the dead-letter stream")
            }
            Event::LeftPending {
                subscription,
                id,
                reason,
            } => {
                write!(f, "`{subscription}`: {id} stays pending: {reason}")
            }
            Event::OwnershipLost { subscription, id } => {
                write!(f, "`{subscription}`: another consumer took {id} over")
            }
            Event::Abandoned { subscription, id } => write!(
                f,
                "`{subscription}`: the handler of {id} hangs and cannot be ended; it was left behind"
            ),
            Event::Blocked {
                subscription,
                error,
            } => {
                write!(f, "`{subscription}` is blocked: {error}")
            }
            Event::Unblocked { subscription } => write!(f, "`{subscription}` goes on"),
            Event::ServerAway {
                subscription,
                error,
            } => {
                write!(f, "`{subscription}` waits for the server: {error}")
            }
            Event::ServerBack {
                subscription,
                after,
            } => {
                write!(f, "`{subscription}`: the server is back after {after:.1?}")
            }
            Event::ParkedFull { subscription } => write!(
                f,
                "`{subscription}`: as many entries as allowed wait for an in-process delay"
            ),
            Event::ConsumerTaken {
                subscription,
                consumer,
            } => write!(
                f,
                "`{subscription}` is given up: another process uses the consumer name `{consumer}`"
            ),
            Event::TargetGone { subscription } => write!(
                f,
                "`{subscription}` stands still: the actor that its entries are forwarded to is not there"
            ),
            Event::TargetBack { subscription } => write!(
                f,
                "`{subscription}` goes on: the actor that its entries are forwarded to is there"
            ),
            Event::HotKey {
                subscription,
                key,
                waiting,
            } => match key {
                Some(key) => write!(
                    f,
                    "`{subscription}`: {waiting} entries with the key `{key}` wait for each other and leave little room for others"
                ),
                None => write!(
                    f,
                    "`{subscription}`: {waiting} entries without a key wait for each other and leave little room for others"
                ),
            },
            Event::Paused { subscription } => write!(f, "`{subscription}` pauses"),
            Event::Resumed { subscription } => write!(f, "`{subscription}` resumes"),
            Event::Removed { subscription } => write!(f, "`{subscription}` was removed"),
            Event::Escalated { child, error } => {
                write!(f, "{child} is given up: {error}")
            }
            Event::Drained {
                settled,
                given_back,
            } => write!(
                f,
                "the tree has stopped ({settled} verdicts stored meanwhile, {given_back} entries given back)"
            ),
        }
    }
}

/// Tells everybody who listens.
#[derive(Clone)]
pub(crate) struct Announcer {
    /// Gone once the tree has ended, so that listeners come to an end too.
    sender: Arc<Mutex<Option<broadcast::Sender<Event>>>>,
}

impl Announcer {
    pub(crate) fn new() -> Self {
        Announcer {
            sender: Arc::new(Mutex::new(Some(broadcast::Sender::new(BACKLOG)))),
        }
    }

    /// Logs the event and passes it on. Never waits: a slow listener misses events, and learns that
    /// it did.
    pub(crate) fn announce(&self, event: Event) {
        match event.level() {
            tracing::Level::ERROR => tracing::error!(target: "streamvisor", "{event}"),
            tracing::Level::WARN => tracing::warn!(target: "streamvisor", "{event}"),
            tracing::Level::INFO => tracing::info!(target: "streamvisor", "{event}"),
            _ => tracing::debug!(target: "streamvisor", "{event}"),
        }
        if let Some(sender) = &*self.sender.lock().unwrap_or_else(PoisonError::into_inner) {
            // Nobody listens: nothing to do.
            let _ = sender.send(event);
        }
    }

    pub(crate) fn listen(&self) -> Events {
        let sender = self.sender.lock().unwrap_or_else(PoisonError::into_inner);
        let receiver = match &*sender {
            Some(sender) => sender.subscribe(),
            // Closed from the start.
            None => broadcast::Sender::new(1).subscribe(),
        };
        Events { receiver }
    }

    /// Nothing more will happen.
    pub(crate) fn close(&self) {
        self.sender
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
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

    /// The same as a `Stream`, which ends with the tree. `StreamExt` of `futures-util` has its methods.
    pub fn into_stream(self) -> impl Stream<Item = Result<Event, MissedEvents>> + Send + Unpin {
        Box::pin(stream::unfold(self, |mut events| async move {
            let next = events.next().await.transpose()?;
            Some((next, events))
        }))
    }

    /// Sends each event to an actor, until the tree or the actor ends. Where the actor's mailbox grows this does
    /// not slow the tree.
    ///
    /// ```no_run
    /// use ractor::ActorRef;
    /// use streamvisor::{Event, MissedEvents, SupervisorHandle};
    ///
    /// enum MonitorMessage {
    ///     Happened(Event),
    ///     Missed(u64),
    /// }
    ///
    /// impl From<Result<Event, MissedEvents>> for MonitorMessage {
    ///     fn from(event: Result<Event, MissedEvents>) -> Self {
    ///         match event {
    ///             Ok(event) => MonitorMessage::Happened(event),
    ///             Err(MissedEvents(missed)) => MonitorMessage::Missed(missed),
    ///         }
    ///     }
    /// }
    /// # #[cfg(feature = "cluster")]
    /// # impl ractor::Message for MonitorMessage {}
    ///
    /// # fn example(supervisor: &SupervisorHandle, monitor: ActorRef<MonitorMessage>) {
    /// supervisor.events().forward_to(monitor);
    /// # }
    /// ```
    ///
    /// # Panics
    ///
    /// Outside of a tokio runtime.
    pub fn forward_to<M>(mut self, actor: ActorRef<M>)
    where
        M: ractor::Message + From<Result<Event, MissedEvents>>,
    {
        tokio::spawn(async move {
            let cell = actor.get_cell();
            loop {
                let next = tokio::select! {
                    next = self.next() => next,
                    _ = cell.wait(None) => return,
                };
                let Some(event) = next.transpose() else {
                    return;
                };
                if actor.cast(event.into()).is_err() {
                    return;
                }
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn started(name: &str) -> Event {
        Event::Started {
            subscription: name.into(),
        }
    }

    #[tokio::test]
    async fn listeners_come_to_an_end_with_the_tree_even_late_ones() {
        let announcer = Announcer::new();
        let mut early = announcer.listen();
        announcer.announce(started("a"));
        announcer.close();
        announcer.announce(started("b"));
        assert_eq!(early.next().await, Ok(Some(started("a"))));
        assert_eq!(early.next().await, Ok(None));
        assert_eq!(announcer.listen().next().await, Ok(None));
    }

    #[tokio::test]
    async fn a_slow_listener_learns_how_much_it_missed() {
        let announcer = Announcer::new();
        let mut slow = announcer.listen();
        (0..BACKLOG + 10).for_each(|_| announcer.announce(started("a")));
        assert_eq!(slow.next().await, Err(MissedEvents(10)));
        assert!(matches!(slow.next().await, Ok(Some(_))));
    }
}
