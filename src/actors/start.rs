//! From a topology to a tree that can be spawned: everything that can be wrong with it, or with the
//! server, is found here.

use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex};

use tokio::sync::watch;

use super::lease::Lease;
use super::tree::{Attached, Order, Tree, connection_name};
use crate::message::{Publisher, StreamKey};
use crate::observe::{Announcer, Events};
use crate::server::capabilities::{self, Capabilities, Uses};
use crate::server::group::{self, Origin};
use crate::server::publish::Appending;
use crate::server::{Connection, Group, Role, ServerError};
use crate::topology::{
    AfterAck, Defaults, InvalidTopology, PlannedSubscription, ReadMode, Subscription, Topology,
    plan,
};

/// Why a tree could not be started, or a subscription not be added to one. Nothing of it runs then.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// The topology contradicts itself.
    #[error("{0}")]
    Invalid(#[from] InvalidTopology),
    /// The server could not be reached within `Topology::connect_timeout`, or refused the credentials.
    #[error("{0}")]
    Connect(String),
    /// The server lacks a command that is needed.
    #[error("{found} has no {missing}: {needed}")]
    TooOld {
        /// What the server is.
        found: String,
        /// The command.
        missing: &'static str,
        /// What to do.
        needed: String,
    },
    /// The group does not exist, and the subscription is not to create it.
    #[error(
        "subscription `{subscription}`: the stream `{stream}` has no group `{group}`; create it with XGROUP CREATE, or leave `.create_group(false)` out"
    )]
    NoSuchGroup {
        /// The subscription's name.
        subscription: Arc<str>,
        /// The stream's key.
        stream: StreamKey,
        /// The group's name.
        group: Arc<str>,
    },
    /// Another process uses the consumer's name, and is alive.
    #[error(
        "subscription `{subscription}`: another process uses the consumer name `{consumer}`; end that one, give this one another name, or leave `.consumer(…)` out"
    )]
    ConsumerInUse {
        /// The subscription's name.
        subscription: Arc<str>,
        /// The consumer's name.
        consumer: Arc<str>,
    },
    /// A key holds something else than it should.
    #[error(
        "subscription `{subscription}`: the key `{key}` holds a {found}, and a {expected} is needed; name another key, or move what is there away"
    )]
    WrongType {
        /// The subscription's name.
        subscription: Arc<str>,
        /// The key.
        key: StreamKey,
        /// What it holds.
        found: String,
        /// What is needed.
        expected: &'static str,
    },
    /// The user lacks rights that are needed.
    #[error(
        "subscription `{subscription}`: the user may not do what is needed; grant it with ACL SETUSER: {}", .denied.join("; ")
    )]
    NoRight {
        /// The subscription's name.
        subscription: Arc<str>,
        /// Each command, with the server's answer.
        denied: Vec<String>,
    },
    /// The server refused something that is needed.
    #[error("subscription `{subscription}`: {reason}")]
    Refused {
        /// The subscription's name.
        subscription: Arc<str>,
        /// The server's answer.
        reason: String,
    },
    /// The supervisor actor could not be spawned.
    #[error("the supervisor could not be started: {0}")]
    Spawn(String),
}

/// The same as `Display`: a `main` that returns the error shows its text.
impl std::fmt::Debug for StartError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Display::fmt(self, f)
    }
}

/// A tree whose actors have not been spawned.
pub(crate) struct StartedTree {
    pub tree: Arc<Tree>,
    /// Hears everything from the beginning.
    pub events: Events,
}

/// Checks the topology and the server, and makes what the actors are lent.
pub(crate) async fn assemble(topology: &Topology) -> Result<StartedTree, StartError> {
    let instance = instance();
    let planned = topology.plan(&instance)?;
    let open = |role, what: &'static str| {
        let name = connection_name(&instance, what);
        async move { Connection::open(&topology.redis, role, &name, topology.connect_timeout).await }
    };
    let settling = open(Role::Settler, "settler").await.map_err(unconnected)?;
    let checked = check(&settling, &planned).await;
    let publishing = match checked {
        Ok(()) => open(Role::Publisher, "publisher")
            .await
            .map_err(unconnected),
        Err(error) => Err(error),
    };
    let publishing = match publishing {
        Ok(publishing) => publishing,
        Err(error) => {
            settling.close().await;
            return Err(error);
        }
    };
    let (settling, publishing) = (Arc::new(settling), Arc::new(publishing));
    let made = make(topology, instance, planned, &settling, &publishing).await;
    if made.is_err() {
        tokio::join!(settling.close(), publishing.close());
    }
    made
}

fn unconnected(error: ServerError) -> StartError {
    StartError::Connect(error.to_string())
}

/// Host, process and a random part.
fn instance() -> String {
    let host = gethostname::gethostname().to_string_lossy().into_owned();
    format!(
        "{host}-{}-{:08x}",
        std::process::id(),
        rand::random::<u32>()
    )
}

async fn make(
    topology: &Topology,
    instance: String,
    planned: Vec<PlannedSubscription>,
    settling: &Arc<Connection>,
    publishing: &Arc<Connection>,
) -> Result<StartedTree, StartError> {
    let Some(first) = planned.first() else {
        return Err(InvalidTopology::Empty.into());
    };
    let about = |error: ServerError| refused(&first.name, error);
    let capabilities = capabilities::ask(settling, &first.settings.stream)
        .await
        .map_err(about)?;
    check_capabilities(&capabilities, &planned)?;
    warn(settling, &planned, &planned).await;

    let announcer = Announcer::new();
    let events = announcer.listen();
    let tree = Arc::new(Tree {
        redis: topology.redis.clone(),
        instance,
        restart: topology.restart.clone(),
        connect_timeout: topology.connect_timeout,
        shutdown_timeout: topology.shutdown_timeout,
        default_group: topology.default_group.clone(),
        capabilities,
        announcer,
        settling: Arc::clone(settling),
        publishing: Arc::clone(publishing),
        publisher: Publisher::new(Arc::new(Appending(Arc::clone(publishing)))),
        parts: Mutex::default(),
        numbers: AtomicUsize::new(0),
        others: Mutex::default(),
        order: watch::Sender::new(Order::default()),
        asked: Mutex::default(),
        restarts: Mutex::default(),
    });
    for plan in &planned {
        let attached = attach(settling, &planned, plan).await?;
        tree.take_in(plan.clone(), attached);
    }
    Ok(StartedTree { tree, events })
}

/// Finds the subscription's group on the server, or makes it where `planned`, all there are, says.
/// Takes a lease on the consumer's name first, if the user gave it.
async fn attach(
    settling: &Connection,
    planned: &[PlannedSubscription],
    plan: &PlannedSubscription,
) -> Result<Attached, StartError> {
    let settings = &plan.settings;
    let same_group = |it: &&PlannedSubscription| it.is_beside(plan);
    let start = planned
        .iter()
        .filter(same_group)
        .find_map(|it| it.settings.start);
    let origin = settings.create_group.then(|| {
        let after = start.unwrap_or_default().after();
        after.map_or(Origin::Last, Origin::After)
    });
    let group = Group::new(settings.stream.clone(), Arc::clone(&plan.group));
    let lease = match &settings.consumer {
        None => None,
        Some(_) => {
            let lease = Lease::take(settling, &group, &plan.consumer).await;
            let lease = lease.map_err(|error| refused(&plan.name, error))?;
            Some(lease.ok_or_else(|| StartError::ConsumerInUse {
                subscription: Arc::clone(&plan.name),
                consumer: Arc::clone(&plan.consumer),
            })?)
        }
    };
    let attached = group::attach(settling, &group, origin).await;
    let attached = attached.map_err(|error| match error {
        ServerError::GroupGone(_) => StartError::NoSuchGroup {
            subscription: Arc::clone(&plan.name),
            stream: settings.stream.clone(),
            group: Arc::clone(&plan.group),
        },
        other => refused(&plan.name, other),
    })?;
    Ok(Attached {
        last_delivered: attached.last_delivered,
        lease,
    })
}

/// Checks a subscription that is to come to a tree that runs, as if it had been there from the start,
/// and finds its group.
pub(crate) async fn prepare(
    tree: &Tree,
    subscription: &Subscription,
) -> Result<Attached, StartError> {
    let planned = tree.plan_with(subscription)?;
    let Some(new) = planned.last() else {
        return Err(InvalidTopology::Empty.into());
    };
    let checks = async {
        let only = std::slice::from_ref(new);
        check(&tree.settling, only).await?;
        check_capabilities(&tree.capabilities, only)?;
        warn(&tree.settling, &planned, only).await;
        attach(&tree.settling, &planned, new).await
    };
    let within = tree.connect_timeout;
    tokio::time::timeout(within, checks)
        .await
        .unwrap_or_else(|_| {
            let redis = &tree.redis;
            let text = format!("no answer from {redis} within {within:?}");
            Err(StartError::Connect(text))
        })
}

impl Tree {
    /// What runs, and this subscription as the last one, checked as a whole.
    pub(crate) fn plan_with(
        &self,
        subscription: &Subscription,
    ) -> Result<Vec<PlannedSubscription>, InvalidTopology> {
        let defaults = Defaults {
            group: self.default_group.as_deref(),
            clustered: self.redis.is_clustered(),
            instance: &self.instance,
        };
        plan(self.plans(), std::slice::from_ref(subscription), &defaults)
    }
}

fn refused(subscription: &Arc<str>, error: ServerError) -> StartError {
    StartError::Refused {
        subscription: Arc::clone(subscription),
        reason: error.to_string(),
    }
}

/// Every key holds what it should, or nothing.
async fn check(connection: &Connection, planned: &[PlannedSubscription]) -> Result<(), StartError> {
    for plan in planned {
        plan.handling
            .check()
            .map_err(|reason| StartError::Refused {
                subscription: Arc::clone(&plan.name),
                reason,
            })?;
        let stream = Some((&plan.settings.stream, "stream"));
        let dead_letter = plan
            .settings
            .dead_letter
            .as_ref()
            .map(|key| (key, "stream"));
        let delay_set = plan.delay_set().map(|(set, _)| (set, "zset"));
        for (key, expected) in [stream, dead_letter, delay_set].into_iter().flatten() {
            let found = capabilities::type_of(connection, key).await;
            let Some(found) = found.map_err(|error| refused(&plan.name, error))? else {
                continue;
            };
            if found != expected {
                return Err(StartError::WrongType {
                    subscription: Arc::clone(&plan.name),
                    key: key.clone(),
                    found,
                    expected,
                });
            }
        }
        let delay_set = plan.delay_set();
        let lease = plan.settings.consumer.as_ref().map(|consumer| {
            let group = Group::new(plan.settings.stream.clone(), Arc::clone(&plan.group));
            crate::server::lease::key(&group, consumer)
        });
        let uses = Uses {
            stream: &plan.settings.stream,
            delay_set: delay_set.map(|(set, _)| set),
            expires: delay_set.is_some_and(|(_, ttl)| ttl.is_some()),
            dead_letter: plan.settings.dead_letter.as_ref(),
            lease: lease.as_ref(),
            deletes: plan.settings.after_ack == AfterAck::Delete,
        };
        let denied = capabilities::denied(connection, &uses).await;
        let denied = denied.map_err(|error| refused(&plan.name, error))?;
        if !denied.is_empty() {
            return Err(StartError::NoRight {
                subscription: Arc::clone(&plan.name),
                denied,
            });
        }
    }
    Ok(())
}

fn check_capabilities(
    capabilities: &Capabilities,
    planned: &[PlannedSubscription],
) -> Result<(), StartError> {
    let too_old = |missing, needed: String| {
        let found = capabilities.version.clone();
        Err(StartError::TooOld {
            found,
            missing,
            needed,
        })
    };
    if !capabilities.autoclaim {
        let needed =
            "Redis 6.2 or later, or Valkey, is needed, with the command permitted and not renamed";
        return too_old(
            "XAUTOCLAIM (or this user may not use it)",
            needed.to_owned(),
        );
    }
    let claiming = planned.iter().find_map(|plan| match plan.settings.mode {
        ReadMode::Claiming { min_idle } => Some((plan, min_idle)),
        _ => None,
    });
    match claiming {
        Some((plan, min_idle)) if !capabilities.claim_read => too_old(
            "XREADGROUP with CLAIM",
            format!(
                "subscription `{}` needs Redis 8.4 or later; `Subscription::tail({stream:?})` and `Subscription::reclaim({stream:?}, Duration::from_millis({}))` together do the same here",
                plan.name,
                min_idle.as_millis(),
                stream = plan.settings.stream,
            ),
        ),
        _ => Ok(()),
    }
}

/// What is no mistake of these, with all there are, and may surprise.
async fn warn(
    connection: &Connection,
    planned: &[PlannedSubscription],
    of: &[PlannedSubscription],
) {
    for plan in of {
        let recovered = planned
            .iter()
            .filter(|other| other.is_beside(plan))
            .any(|other| other.settings.mode.min_idle().is_some());
        if plan.settings.mode == ReadMode::Tail && !recovered {
            tracing::warn!(target: "streamvisor", subscription = %plan.name, "nothing in this topology recovers what a crashed process of the group leaves pending; add a reclaim subscription, or run one elsewhere");
        }
        if plan.settings.after_ack == AfterAck::Delete {
            let others = group::groups(connection, &plan.settings.stream)
                .await
                .unwrap_or_default();
            if others
                .iter()
                .any(|group| group.name != plan.group.as_bytes())
            {
                tracing::warn!(target: "streamvisor", subscription = %plan.name, stream = %plan.settings.stream, "the stream has other groups: acknowledged entries are deleted only if the last group to acknowledge deletes them too");
            }
        }
    }
    if let Some(policy) = capabilities::eviction_policy(connection).await
        && policy.starts_with("allkeys")
    {
        tracing::warn!(target: "streamvisor", %policy, "the server may evict whole streams, with their groups, when its memory is full; `noeviction` or a volatile policy cannot");
    }
}
