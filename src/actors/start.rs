//! From a topology to a tree that can be spawned: everything that can be wrong with it, or with the
//! server, is found here.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};
use std::sync::{Arc, Mutex};

use tokio::sync::{Notify, watch};

use super::condition::Condition;
use super::roster::Roster;
use super::tree::{
    Counters, DelaySet, GroupState, Order, SubscriptionState, Tree, connection_name,
};
use crate::message::{Mode, Publisher, Source, StreamKey};
use crate::observe::{Announcer, Events};
use crate::server::capabilities::{self, Capabilities, Uses};
use crate::server::group::{self, Origin};
use crate::server::publish::Appending;
use crate::server::{Connection, Group, Role, ServerError};
use crate::state::{Cursor, GivenBack, Hold, InFlight, Lanes, SettleQueue};
use crate::topology::{AfterAck, InvalidTopology, PlannedSubscription, ReadMode, Start, Topology};

/// Why a tree could not be started. Nothing runs then.
#[derive(thiserror::Error)]
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
    pub publisher: Publisher,
    /// Hears everything from the beginning.
    pub events: Events,
}

/// Checks the topology and the server, and makes what the actors are lent.
pub(crate) async fn assemble(topology: &Topology) -> Result<StartedTree, StartError> {
    let instance = instance();
    let plan = topology.plan(&instance)?;
    let open = |role, what: &'static str| {
        let name = connection_name(&instance, what);
        async move { Connection::open(&topology.redis, role, &name, topology.connect_timeout).await }
    };
    let settling = open(Role::Settler, "settler").await.map_err(unconnected)?;
    let checked = check(&settling, &plan.subscriptions).await;
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
    let made = make(
        topology,
        instance,
        plan.subscriptions,
        &settling,
        &publishing,
    )
    .await;
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
    warn(settling, &planned).await;

    let announcer = Announcer::new();
    let events = announcer.listen();
    let publisher = Publisher::new(Arc::new(Appending(Arc::clone(publishing))));
    let mut groups: Vec<Arc<GroupState>> = Vec::new();
    let mut delay_sets: Vec<Arc<DelaySet>> = Vec::new();
    let mut subscriptions = Vec::with_capacity(planned.len());
    let places = places_to_start(&planned);
    for plan in planned {
        let settings = &plan.settings;
        let key = (settings.stream.clone(), Arc::clone(&plan.group));
        let known = groups
            .iter()
            .find(|group| group.stream == key.0 && group.group.name == key.1);
        let group = match known {
            Some(group) => Arc::clone(group),
            None => {
                let group = Arc::new(GroupState {
                    group: Arc::new(Group::new(key.0.clone(), Arc::clone(&key.1))),
                    stream: key.0.clone(),
                    in_flight: InFlight::new(
                        places.get(&key).map_or(1, |place| place.subscriptions),
                    ),
                    queue: SettleQueue::new(),
                    keep_alive: plan.keep_alive,
                    subscriptions: Mutex::default(),
                    acknowledged: AtomicU64::new(0),
                    given_up: AtomicBool::new(false),
                    missing: AtomicBool::new(false),
                    whole: Arc::default(),
                });
                groups.push(Arc::clone(&group));
                group
            }
        };
        let origin = settings.create_group.then(|| {
            let start = places
                .get(&key)
                .and_then(|place| place.start)
                .unwrap_or_default();
            start.after().map_or(Origin::Last, Origin::After)
        });
        let attached = group::attach(settling, &group.group, origin)
            .await
            .map_err(|error| match error {
                ServerError::GroupGone(_) => StartError::NoSuchGroup {
                    subscription: Arc::clone(&plan.name),
                    stream: key.0.clone(),
                    group: Arc::clone(&key.1),
                },
                other => refused(&plan.name, other),
            })?;
        let delay_set = plan.delay_set().map(|(set, ttl)| {
            let known = delay_sets.iter().find(|it| it.set == *set).cloned();
            known.unwrap_or_else(|| {
                let stream = settings.stream.clone();
                let new = Arc::new(DelaySet {
                    set: set.clone(),
                    stream,
                    ttl,
                    added: Notify::new(),
                });
                delay_sets.push(Arc::clone(&new));
                new
            })
        });
        let mut in_group = group
            .subscriptions
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        let source = Arc::new(Source {
            stream: settings.stream.clone(),
            group: Arc::clone(&plan.group),
            consumer: Arc::clone(&plan.consumer),
            subscription: Arc::clone(&plan.name),
            mode: match settings.mode {
                ReadMode::Tail => Mode::Tail,
                ReadMode::Reclaim { .. } => Mode::Reclaim,
                ReadMode::Claiming { .. } => Mode::Claiming,
            },
            publisher: publisher.clone(),
            index: in_group.len(),
            lost: Notify::new(),
        });
        let subscription = Arc::new(SubscriptionState {
            source,
            group: Arc::clone(&group),
            cursor: Mutex::new(Cursor::new(attached.last_delivered)),
            lanes: Lanes::new(
                settings.workers,
                settings.ordered_by.clone(),
                plan.handling.takes(),
            ),
            roster: Roster::new(),
            connection: Mutex::new(None),
            condition: Condition::new(Arc::clone(&plan.name), announcer.clone()),
            announcer: announcer.clone(),
            delay_set,
            hold: watch::Sender::new(Hold::default()),
            given_back: GivenBack::default(),
            max_in_flight: AtomicUsize::new(settings.max_in_flight),
            parked_full: AtomicBool::new(false),
            hot_key_told: AtomicBool::new(false),
            started: AtomicBool::new(false),
            counters: Counters::default(),
            plan,
        });
        in_group.push(Arc::downgrade(&subscription));
        drop(in_group);
        subscriptions.push(subscription);
    }
    let tree = Arc::new(Tree {
        redis: topology.redis.clone(),
        instance,
        restart: topology.restart.clone(),
        shutdown_timeout: topology.shutdown_timeout,
        capabilities,
        announcer,
        settling: Arc::clone(settling),
        publishing: Arc::clone(publishing),
        groups,
        subscriptions,
        delay_sets,
        others: Mutex::default(),
        order: watch::Sender::new(Order::default()),
        asked: Mutex::default(),
        restarts: Mutex::default(),
    });
    Ok(StartedTree {
        tree,
        publisher,
        events,
    })
}

/// What the subscriptions of a group say together.
#[derive(Default)]
struct Place {
    subscriptions: usize,
    start: Option<Start>,
}

fn places_to_start(planned: &[PlannedSubscription]) -> HashMap<(StreamKey, Arc<str>), Place> {
    let mut places: HashMap<_, Place> = HashMap::new();
    for plan in planned {
        let place = places
            .entry((plan.settings.stream.clone(), Arc::clone(&plan.group)))
            .or_default();
        place.subscriptions += 1;
        place.start = place.start.or(plan.settings.start);
    }
    places
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
        let uses = Uses {
            stream: &plan.settings.stream,
            delay_set: delay_set.map(|(set, _)| set),
            expires: delay_set.is_some_and(|(_, ttl)| ttl.is_some()),
            dead_letter: plan.settings.dead_letter.as_ref(),
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

/// What is no mistake, and may surprise.
async fn warn(connection: &Connection, planned: &[PlannedSubscription]) {
    for plan in planned {
        let same_group = |other: &&PlannedSubscription| {
            other.group == plan.group && other.settings.stream == plan.settings.stream
        };
        let recovered = planned
            .iter()
            .filter(same_group)
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
