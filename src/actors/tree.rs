//! What the actors of a tree share: the state they are lent, the connections, and the word to stop.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use tokio::sync::{Notify, watch};

use super::verdict::{self, Step};
use crate::fail_point::fail_point;
use crate::message::{EntryId, Received, Source, StreamKey};
use crate::observe::{Announcer, Child, Event};
use crate::server::capabilities::Capabilities;
use crate::server::{Connection, Group, Role, ServerError};
use crate::state::{Cursor, InFlight, Lanes, SettleQueue};
use crate::topology::{PlannedSubscription, Redis, RestartPolicy, Verdict};

/// How long a subscription that the server refuses waits before it looks again.
pub(crate) const BLOCKED_FOR: Duration = Duration::from_secs(30);

/// A running topology, but for its actors.
pub(crate) struct Tree {
    pub redis: Redis,
    /// Host, process and a random part: what its connections are called on the server.
    pub instance: String,
    pub restart: RestartPolicy,
    pub shutdown_timeout: Duration,
    pub capabilities: Capabilities,
    pub announcer: Announcer,
    /// Settles, sweeps, counts starts, gives back: everything that may be sent twice.
    pub settling: Arc<Connection>,
    pub publishing: Arc<Connection>,
    pub groups: Vec<Arc<GroupState>>,
    pub subscriptions: Vec<Arc<SubscriptionState>>,
    pub delay_sets: Vec<Arc<DelaySet>>,
    /// The readers' connections and the keep-alive's, so that none outlives the tree.
    pub others: Mutex<Vec<Weak<Connection>>>,
    pub order: watch::Sender<Order>,
}

/// What an actor is to do.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Order {
    /// Read nothing more.
    pub stop_reading: bool,
    /// End, once there is nothing left to do.
    pub stop: bool,
}

/// A (stream, group) pair of this process.
pub(crate) struct GroupState {
    pub group: Arc<Group>,
    pub stream: StreamKey,
    pub in_flight: InFlight,
    pub queue: SettleQueue,
    pub keep_alive: Duration,
    /// Those of this process that read from it, by their index.
    pub subscriptions: Mutex<Vec<Weak<SubscriptionState>>>,
    pub acknowledged: AtomicU64,
}

/// A subscription of this process.
pub(crate) struct SubscriptionState {
    pub plan: PlannedSubscription,
    pub source: Arc<Source>,
    pub group: Arc<GroupState>,
    pub cursor: Mutex<Cursor>,
    pub lanes: Lanes,
    /// The connection of the reader of the moment.
    pub connection: Mutex<Option<Arc<Connection>>>,
    pub condition: Condition,
    pub announcer: Announcer,
    pub delay_set: Option<Arc<DelaySet>>,
    /// Its order to stop, beside the tree's: set when it alone fails.
    pub failed: watch::Sender<bool>,
    pub parked_full: std::sync::atomic::AtomicBool,
}

/// A delay set and who waits on it.
pub(crate) struct DelaySet {
    pub set: StreamKey,
    pub stream: StreamKey,
    pub ttl: Option<Duration>,
    /// Told when this process has put an entry in.
    pub added: Notify,
}

impl Tree {
    /// Opens a connection that is closed with the tree at the latest.
    pub(crate) async fn connect(
        &self,
        role: Role,
        what: &str,
        within: Duration,
    ) -> Result<Arc<Connection>, ServerError> {
        let name = connection_name(&self.instance, what);
        let connection = Arc::new(Connection::open(&self.redis, role, &name, within).await?);
        let mut others = self.others.lock().unwrap_or_else(PoisonError::into_inner);
        others.retain(|other| other.strong_count() > 0);
        others.push(Arc::downgrade(&connection));
        Ok(connection)
    }

    /// Closes every connection where it stands: nobody is left to close them in order.
    pub(crate) fn abort_connections(&self) {
        let others = self.others.lock().unwrap_or_else(PoisonError::into_inner);
        for connection in others.iter().filter_map(Weak::upgrade) {
            connection.abort();
        }
        self.settling.abort();
        self.publishing.abort();
    }

    /// Closes every connection with a goodbye.
    pub(crate) async fn close_connections(&self) {
        let others: Vec<_> = {
            let others = self.others.lock().unwrap_or_else(PoisonError::into_inner);
            others.iter().filter_map(Weak::upgrade).collect()
        };
        futures_util::future::join_all(others.iter().map(|connection| connection.close())).await;
        tokio::join!(self.settling.close(), self.publishing.close());
    }
}

impl DelaySet {
    /// A place where this crate's tests have its sweeper fail.
    pub(crate) fn at(&self, point: &'static str) {
        fail_point(point, self.set.as_bytes());
    }
}

/// `CLIENT SETNAME` takes no blanks and no line breaks.
pub(crate) fn connection_name(instance: &str, what: &str) -> String {
    let name = format!("streamvisor-{instance}-{what}");
    name.chars()
        .map(|c| if c.is_ascii_graphic() { c } else { '_' })
        .collect()
}

impl SubscriptionState {
    pub(crate) fn name(&self) -> &Arc<str> {
        &self.plan.name
    }

    pub(crate) fn cursor(&self) -> std::sync::MutexGuard<'_, Cursor> {
        self.cursor.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does what a verdict on one of its entries asks for. The entry is in flight until the server has
    /// stored it.
    pub(crate) fn settle(&self, received: &Received, verdict: Verdict) {
        let group = &self.group;
        let id = received.id();
        match verdict::step(received, verdict, &self.plan.settings) {
            Step::Acknowledge => group.queue.acknowledge([id]),
            // Its owner gives a verdict of its own.
            Step::Copy(_) | Step::Park(..) if received.is_lost() => {
                group.in_flight.release([id]);
            }
            Step::Copy(job) => group.queue.copy(job),
            Step::Park(delay, job) => {
                if !group.in_flight.park(id, self.plan.settings.max_parked) {
                    if !self.parked_full.swap(true, Ordering::Relaxed) {
                        self.announcer.announce(Event::ParkedFull {
                            subscription: self.name().clone(),
                        });
                    }
                } else {
                    self.parked_full.store(false, Ordering::Relaxed);
                }
                // A delay beyond what the clock can say is as good as for ever.
                let far = Duration::from_secs(u64::from(u32::MAX));
                group.queue.park(Instant::now() + delay.min(far), job);
            }
            Step::Leave(reason) => {
                group.in_flight.leave([id]);
                if let Some(reason) = reason {
                    let subscription = self.name().clone();
                    self.announcer.announce(Event::LeftPending {
                        subscription,
                        id,
                        reason,
                    });
                }
            }
        }
    }

    /// A place where this crate's tests have one of its actors fail.
    pub(crate) fn at(&self, point: &'static str) {
        fail_point(point, self.name().as_bytes());
    }

    pub(crate) fn reader(&self) -> Child {
        Child::Reader {
            subscription: self.name().clone(),
        }
    }

    pub(crate) fn handler(&self, worker: usize) -> Child {
        Child::Handler {
            subscription: self.name().clone(),
            worker,
        }
    }
}

impl GroupState {
    /// The subscription of this index.
    pub(crate) fn subscription(&self, index: usize) -> Option<Arc<SubscriptionState>> {
        let subscriptions = self
            .subscriptions
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        subscriptions.get(index).and_then(Weak::upgrade)
    }

    pub(crate) fn each_subscription(&self) -> Vec<Arc<SubscriptionState>> {
        self.subscriptions
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .iter()
            .filter_map(Weak::upgrade)
            .collect()
    }

    /// A place where this crate's tests have one of its actors fail.
    pub(crate) fn at(&self, point: &'static str) {
        fail_point(point, self.stream.as_bytes());
    }

    pub(crate) fn settler(&self) -> Child {
        Child::Settler {
            stream: self.stream.clone(),
            group: self.group.name.clone(),
        }
    }

    /// An entry that another consumer owns now: its handler is told, and whoever waits for it does
    /// not start it.
    pub(crate) fn lose(&self, ids: &[EntryId]) {
        for &id in ids {
            let Some(index) = self.in_flight.lose(id) else {
                continue;
            };
            if let Some(subscription) = self.subscription(index) {
                let name = subscription.name().clone();
                subscription.announcer.announce(Event::OwnershipLost {
                    subscription: name,
                    id,
                });
            }
        }
    }
}

/// How the server is to a subscription, by what its reader and its settler last heard.
pub(crate) struct Condition {
    name: Arc<str>,
    announcer: Announcer,
    inner: Mutex<BTreeMap<Part, Trouble>>,
}

/// Whose experience it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Part {
    Reading,
    Settling,
}

struct Trouble {
    blocked: bool,
    since: Instant,
    error: String,
}

impl Condition {
    pub(crate) fn new(name: Arc<str>, announcer: Announcer) -> Self {
        Condition {
            name,
            announcer,
            inner: Mutex::default(),
        }
    }

    /// It works.
    pub(crate) fn well(&self, part: Part) {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(trouble) = inner.remove(&part) else {
            return;
        };
        if !inner.is_empty() {
            return;
        }
        drop(inner);
        let subscription = self.name.clone();
        self.announcer.announce(if trouble.blocked {
            Event::Unblocked { subscription }
        } else {
            Event::ServerBack {
                subscription,
                after: trouble.since.elapsed(),
            }
        });
    }

    /// The server is away, or refuses. Said once, however often it happens.
    pub(crate) fn trouble(&self, part: Part, error: &ServerError) {
        let blocked = error.is_lasting();
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        let known = inner.values().any(|trouble| trouble.blocked == blocked);
        let error = error.to_string();
        let since = inner
            .get(&part)
            .map_or_else(Instant::now, |trouble| trouble.since);
        inner.insert(
            part,
            Trouble {
                blocked,
                since,
                error: error.clone(),
            },
        );
        drop(inner);
        if known {
            tracing::debug!(target: "streamvisor", subscription = %self.name, error, "still in trouble");
            return;
        }
        let subscription = self.name.clone();
        self.announcer.announce(if blocked {
            Event::Blocked {
                subscription,
                error,
            }
        } else {
            Event::ServerAway {
                subscription,
                error,
            }
        });
    }

    /// What is wrong now.
    pub(crate) fn error(&self) -> Option<String> {
        let inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        inner.values().next().map(|trouble| trouble.error.clone())
    }
}
