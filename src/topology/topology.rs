//! All that a tree consumes, and from where.

use std::time::Duration;

use super::redis::Redis;
use super::restart::RestartPolicy;
use super::subscription::Subscription;

/// As good as for ever, and still a time that can be added to another.
pub(super) const FAR: Duration = Duration::from_secs(10 * 365 * 86_400);

/// What to consume: any number of subscriptions, of several streams and groups, of one server.
///
/// Plain data: nothing runs before [`Supervisor::start`](crate::Supervisor::start), and a clone can be
/// started again.
///
/// ```
/// use std::time::Duration;
/// use streamvisor::prelude::*;
///
/// # async fn fulfil(_: String, _: Context) -> Result<Outcome, BoxError> { Ok(Outcome::Ack) }
/// let topology = Topology::new(Redis::url("redis://localhost:6379")?)
///     .default_group("workers")
///     .shutdown_timeout(Duration::from_secs(10))
///     .subscribe(Subscription::tail("orders").handle_fn(fulfil))
///     .subscribe(Subscription::reclaim("orders", Duration::from_secs(60)).handle_fn(fulfil));
/// # Ok::<(), BoxError>(())
/// ```
#[must_use = "a topology runs once it is given to `Supervisor::start`"]
#[derive(Debug, Clone)]
pub struct Topology {
    pub(crate) redis: Redis,
    pub(crate) default_group: Option<String>,
    pub(crate) restart: RestartPolicy,
    pub(crate) connect_timeout: Duration,
    pub(crate) shutdown_timeout: Duration,
    pub(crate) subscriptions: Vec<Subscription>,
}

impl Topology {
    /// A topology of this server, with nothing to consume yet.
    pub fn new(redis: Redis) -> Self {
        Topology {
            redis,
            default_group: None,
            restart: RestartPolicy::default(),
            connect_timeout: Duration::from_secs(5),
            shutdown_timeout: Duration::from_secs(30),
            subscriptions: Vec::new(),
        }
    }

    /// The group of subscriptions that name none.
    pub fn default_group(mut self, group: impl Into<String>) -> Self {
        self.default_group = Some(group.into());
        self
    }

    /// How the tree's own actors are restarted.
    pub fn restart(mut self, policy: RestartPolicy) -> Self {
        self.restart = policy;
        self
    }

    /// How long `start` tries to reach the server before it fails. Once started, a server that is away
    /// is waited out. Default: 5 s.
    pub fn connect_timeout(mut self, within: Duration) -> Self {
        self.connect_timeout = within.min(FAR);
        self
    }

    /// How long a shutdown may take, all of it. Handlers that still run by then are reported, and
    /// their entries stay pending. Default: 30 s.
    pub fn shutdown_timeout(mut self, within: Duration) -> Self {
        self.shutdown_timeout = within.min(FAR);
        self
    }

    /// Adds a subscription.
    pub fn subscribe(mut self, subscription: Subscription) -> Self {
        self.subscriptions.push(subscription);
        self
    }
}
