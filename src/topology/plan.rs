//! A topology made complete and checked: every name resolved, every contradiction found, before
//! anything starts.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use super::handling::Handling;
use super::retry::{End, OnCrash, Place};
use super::subscription::{Settings, Start, Subscription};
use super::topology::Topology;
use crate::message::StreamKey;

/// The most that a keep-alive interval is when nobody sets it.
const LONGEST_KEEP_ALIVE: Duration = Duration::from_secs(5);
/// Below this a keep-alive cannot be relied on: one round trip and a busy moment take as long.
const SHORTEST_KEEP_ALIVE: Duration = Duration::from_millis(30);

/// Each worker is an actor with its lane, and a number that was meant for another setting would take all memory.
pub(crate) const MOST_WORKERS: usize = 65_536;

/// What is wrong with a topology, and what to change.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)] // each variant's text says it
pub enum InvalidTopology {
    #[error("the topology has no subscription: add one with `Topology::subscribe`")]
    Empty,
    #[error(
        "subscription of stream `{stream}`: no consumer group; name one with `.group(…)` or set `Topology::default_group`"
    )]
    NoGroup { stream: StreamKey },
    #[error(
        "two subscriptions are called `{name}`: give one of them another name with `.named(…)`"
    )]
    DuplicateName { name: String },
    #[error("subscription `{subscription}`: `{setting}` must not be {value}; {instead}")]
    Setting {
        subscription: String,
        setting: &'static str,
        value: String,
        instead: String,
    },
    #[error(
        "subscription `{subscription}`: min_idle of {min_idle:?} is shorter than three keep-alives of {keep_alive:?}, so entries that are being worked on could be taken away; raise min_idle or set `.keep_alive({})` on the group's subscriptions", a_third_of(.min_idle)
    )]
    MinIdleTooShort {
        subscription: String,
        min_idle: Duration,
        keep_alive: Duration,
    },
    #[error(
        "subscriptions `{first}` and `{second}` use the consumer name `{consumer}` in the same group: give each its own, or leave it out"
    )]
    DuplicateConsumer {
        first: String,
        second: String,
        consumer: String,
    },
    #[error(
        "subscriptions `{first}` and `{second}` give their group different places to start: set the same `.start(…)` on both, or on one only"
    )]
    DifferentStarts { first: String, second: String },
    #[error(
        "the delay set `{set}` is used for the streams `{first}` and `{second}`: give each stream its own set"
    )]
    SharedDelaySet {
        set: StreamKey,
        first: StreamKey,
        second: StreamKey,
    },
    #[error(
        "subscription `{subscription}`: the key `{key}` is its stream and its {role} at once: name another key"
    )]
    SameKey {
        subscription: String,
        key: StreamKey,
        role: &'static str,
    },
    #[error(
        "subscription `{subscription}`: max_attempts has no end; add `.then_dead_letter()` or `.then_reject()` to the retry policy"
    )]
    CapWithoutEnd { subscription: String },
    #[error(
        "subscription `{subscription}`: {what} needs a dead-letter stream; name one with `.dead_letter(…)`"
    )]
    NoDeadLetter {
        subscription: String,
        what: &'static str,
    },
    #[error(
        "subscription `{subscription}`: `{key}` and the stream `{stream}` are in different slots of the cluster; put the same {{tag}} into both names, such as `{{orders}}` and `{{orders}}.dead`"
    )]
    OtherSlot {
        subscription: String,
        stream: StreamKey,
        key: StreamKey,
    },
}

/// The longest keep-alive for this `min_idle`, as it is written in code.
fn a_third_of(min_idle: &Duration) -> String {
    format!("Duration::from_millis({})", min_idle.as_millis() / 3)
}

/// A subscription with everything known but what the server says.
#[derive(Clone)]
pub(crate) struct PlannedSubscription {
    pub name: Arc<str>,
    pub group: Arc<str>,
    pub consumer: Arc<str>,
    /// How often what is in hand is kept fresh.
    pub keep_alive: Duration,
    pub settings: Settings,
    pub handling: Arc<dyn Handling>,
}

impl PlannedSubscription {
    pub(crate) fn delay_set(&self) -> Option<(&StreamKey, Option<Duration>)> {
        match &self.settings.delayed_retry.place {
            Place::Durable { set, ttl } => Some((set, *ttl)),
            Place::InProcess => None,
        }
    }

    /// Whether the other one reads from the same group.
    pub(crate) fn is_beside(&self, other: &PlannedSubscription) -> bool {
        self.group == other.group && self.settings.stream == other.settings.stream
    }
}

impl Topology {
    /// Resolves and checks. `instance` makes default consumer names unique: host, process and a random
    /// part.
    pub(crate) fn plan(&self, instance: &str) -> Result<Vec<PlannedSubscription>, InvalidTopology> {
        if self.subscriptions.is_empty() {
            return Err(InvalidTopology::Empty);
        }
        let defaults = Defaults {
            group: self.default_group.as_deref(),
            clustered: self.redis.is_clustered(),
            instance,
        };
        plan(Vec::new(), &self.subscriptions, &defaults)
    }
}

/// What a subscription is given where it says nothing itself.
pub(crate) struct Defaults<'a> {
    pub group: Option<&'a str>,
    /// Whether the keys of one step have to share a slot.
    pub clustered: bool,
    /// What makes default consumer names unique.
    pub instance: &'a str,
}

/// Resolves these subscriptions and checks them with those that run. Returns all of them, these last.
pub(crate) fn plan(
    running: Vec<PlannedSubscription>,
    new: &[Subscription],
    defaults: &Defaults<'_>,
) -> Result<Vec<PlannedSubscription>, InvalidTopology> {
    let mut subscriptions = running;
    let first_new = subscriptions.len();
    for subscription in new {
        subscriptions.push(resolve(subscription, defaults)?);
    }
    for subscription in subscriptions.iter().skip(first_new) {
        check_settings(subscription)?;
        if defaults.clustered {
            check_slots(subscription)?;
        }
    }
    check_names(&subscriptions)?;
    check_delay_sets(&subscriptions)?;
    set_keep_alives(&mut subscriptions)?;
    Ok(subscriptions)
}

fn resolve(
    subscription: &Subscription,
    defaults: &Defaults<'_>,
) -> Result<PlannedSubscription, InvalidTopology> {
    let settings = subscription.settings.clone();
    let Some(group) = settings.group.as_deref().or(defaults.group) else {
        return Err(InvalidTopology::NoGroup {
            stream: settings.stream,
        });
    };
    let mode = settings.mode.as_str();
    let name = settings
        .name
        .clone()
        .unwrap_or_else(|| format!("{}/{group}/{mode}", settings.stream));
    let consumer = settings
        .consumer
        .clone()
        .unwrap_or_else(|| format!("{}-{name}", defaults.instance));
    Ok(PlannedSubscription {
        name: name.into(),
        group: group.into(),
        consumer: consumer.into(),
        keep_alive: LONGEST_KEEP_ALIVE,
        settings,
        handling: Arc::clone(&subscription.handling),
    })
}

/// What a number may be, where it is out of bounds. Only workers are bounded from above.
pub(crate) fn bounds(value: usize, most: usize) -> Result<(), &'static str> {
    if value == 0 {
        return Err("it must be at least 1");
    }
    if value > most {
        return Err("there can be 65,536 at most, each an actor; more processes do more");
    }
    Ok(())
}

fn check_settings(subscription: &PlannedSubscription) -> Result<(), InvalidTopology> {
    let settings = &subscription.settings;
    let name = || subscription.name.to_string();
    let wrong = |setting, value: &str, instead: &str| {
        Err(InvalidTopology::Setting {
            subscription: name(),
            setting,
            value: value.to_owned(),
            instead: instead.to_owned(),
        })
    };
    for (setting, value, most) in [
        ("workers", settings.workers, MOST_WORKERS),
        ("batch", settings.batch, usize::MAX),
        ("max_in_flight", settings.max_in_flight, usize::MAX),
        (
            "max_bytes_in_flight",
            settings.max_bytes_in_flight,
            usize::MAX,
        ),
    ] {
        if let Err(instead) = bounds(value, most) {
            return wrong(setting, &value.to_string(), instead);
        }
    }
    for (setting, value) in [
        ("block", settings.block),
        ("handler_timeout", settings.handler_timeout),
    ] {
        if value < Duration::from_millis(1) {
            return wrong(
                setting,
                &format!("{value:?}"),
                "it must be at least a millisecond",
            );
        }
    }
    if settings.block > Duration::from_secs(3600) {
        return wrong(
            "block",
            &format!("{:?}", settings.block),
            "at most an hour can be waited for",
        );
    }
    if settings.retry.max_attempts == Some(0) {
        return wrong(
            "max_attempts",
            "0",
            "the first attempt counts, so it must be at least 1",
        );
    }
    for (setting, value) in [
        ("stream", settings.stream.as_bytes()),
        ("group", subscription.group.as_bytes()),
        ("consumer", subscription.consumer.as_bytes()),
        ("named", subscription.name.as_bytes()),
    ] {
        if value.is_empty() {
            return wrong(setting, "empty", "give it a name");
        }
    }
    if settings.retry.max_attempts.is_some() && settings.retry.end.is_none() {
        return Err(InvalidTopology::CapWithoutEnd {
            subscription: name(),
        });
    }
    if settings.dead_letter.is_none() {
        let what = if settings.retry.end == Some(End::DeadLetter) {
            "`then_dead_letter()`"
        } else if settings.on_crash == OnCrash::DeadLetter {
            "`OnCrash::DeadLetter`"
        } else {
            ""
        };
        if !what.is_empty() {
            return Err(InvalidTopology::NoDeadLetter {
                subscription: name(),
                what,
            });
        }
    }
    let others = [
        (settings.dead_letter.as_ref(), "dead-letter stream"),
        (subscription.delay_set().map(|(set, _)| set), "delay set"),
    ];
    for (key, role) in others {
        if let Some(key) = key.filter(|key| **key == settings.stream) {
            return Err(InvalidTopology::SameKey {
                subscription: name(),
                key: key.clone(),
                role,
            });
        }
    }
    Ok(())
}

/// In a cluster a copy and its acknowledgement are one step only within one slot.
fn check_slots(subscription: &PlannedSubscription) -> Result<(), InvalidTopology> {
    let stream = &subscription.settings.stream;
    let slot = |key: &StreamKey| fred::util::redis_keyslot(key.as_bytes());
    let keys = [
        subscription.settings.dead_letter.as_ref(),
        subscription.delay_set().map(|(set, _)| set),
    ];
    match keys
        .into_iter()
        .flatten()
        .find(|key| slot(key) != slot(stream))
    {
        None => Ok(()),
        Some(key) => Err(InvalidTopology::OtherSlot {
            subscription: subscription.name.to_string(),
            stream: stream.clone(),
            key: key.clone(),
        }),
    }
}

fn check_names(subscriptions: &[PlannedSubscription]) -> Result<(), InvalidTopology> {
    for (at, second) in subscriptions.iter().enumerate() {
        for first in subscriptions.iter().take(at) {
            if first.name == second.name {
                return Err(InvalidTopology::DuplicateName {
                    name: first.name.to_string(),
                });
            }
            if !first.is_beside(second) {
                continue;
            }
            let names = || (first.name.to_string(), second.name.to_string());
            if first.consumer == second.consumer {
                let (first, second_name) = names();
                let consumer = second.consumer.to_string();
                return Err(InvalidTopology::DuplicateConsumer {
                    first,
                    second: second_name,
                    consumer,
                });
            }
            if let (Some(one), Some(other)) = (first.settings.start, second.settings.start)
                && one != other
            {
                let (first, second) = names();
                return Err(InvalidTopology::DifferentStarts { first, second });
            }
        }
    }
    Ok(())
}

fn check_delay_sets(subscriptions: &[PlannedSubscription]) -> Result<(), InvalidTopology> {
    let mut streams: HashMap<&StreamKey, &StreamKey> = HashMap::new();
    for subscription in subscriptions {
        let Some((set, _)) = subscription.delay_set() else {
            continue;
        };
        let stream = &subscription.settings.stream;
        let first = *streams.entry(set).or_insert(stream);
        if first != stream {
            return Err(InvalidTopology::SharedDelaySet {
                set: set.clone(),
                first: first.clone(),
                second: stream.clone(),
            });
        }
    }
    Ok(())
}

/// The interval of a group is the shortest that one of its subscriptions asks for, else a third of
/// the smallest `min_idle`.
pub(crate) fn set_keep_alives(
    subscriptions: &mut [PlannedSubscription],
) -> Result<(), InvalidTopology> {
    /// What the subscriptions of a group ask for, the smallest of each.
    #[derive(Default)]
    struct Asked {
        keep_alive: Option<Duration>,
        min_idle: Option<Duration>,
    }
    let mut asked: HashMap<(StreamKey, Arc<str>), Asked> = HashMap::new();
    let key = |s: &PlannedSubscription| (s.settings.stream.clone(), Arc::clone(&s.group));
    let least = |a: Option<Duration>, b: Option<Duration>| a.into_iter().chain(b).min();
    for subscription in subscriptions.iter() {
        let asked = asked.entry(key(subscription)).or_default();
        asked.keep_alive = least(asked.keep_alive, subscription.settings.keep_alive);
        asked.min_idle = least(asked.min_idle, subscription.settings.mode.min_idle());
    }
    for subscription in subscriptions.iter_mut() {
        let asked = asked.entry(key(subscription)).or_default();
        let third = asked.min_idle.map_or(LONGEST_KEEP_ALIVE, |idle| {
            (idle / 3).min(LONGEST_KEEP_ALIVE)
        });
        subscription.keep_alive = asked.keep_alive.unwrap_or(third);
        let name = || subscription.name.to_string();
        if let Some(min_idle) = subscription.settings.mode.min_idle() {
            if min_idle < 3 * SHORTEST_KEEP_ALIVE {
                return Err(InvalidTopology::Setting {
                    subscription: name(),
                    setting: "min_idle",
                    value: format!("{min_idle:?}"),
                    instead: format!("it must be at least {:?}", 3 * SHORTEST_KEEP_ALIVE),
                });
            }
            if min_idle < 3 * subscription.keep_alive {
                let keep_alive = subscription.keep_alive;
                return Err(InvalidTopology::MinIdleTooShort {
                    subscription: name(),
                    min_idle,
                    keep_alive,
                });
            }
        }
        if subscription.keep_alive < SHORTEST_KEEP_ALIVE {
            return Err(InvalidTopology::Setting {
                subscription: name(),
                setting: "keep_alive",
                value: format!("{:?}", subscription.keep_alive),
                instead: format!("it must be at least {SHORTEST_KEEP_ALIVE:?}"),
            });
        }
    }
    Ok(())
}

impl Start {
    /// The id after which a group that is created starts; `None` is the end of the stream.
    pub(crate) fn after(self) -> Option<crate::message::EntryId> {
        match self {
            Start::New => None,
            Start::Beginning => Some(crate::message::EntryId::MIN),
            Start::After(id) => Some(id),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::{Context, Outcome};
    use crate::topology::{DelayedRetry, Draft, Redis, RetryPolicy};

    const SECOND: Duration = Duration::from_secs(1);

    fn handled(draft: Draft) -> Subscription {
        draft.handle_fn(|_: u64, _: Context| async { Ok(Outcome::Ack) })
    }

    fn check(url: &str, drafts: Vec<Draft>) -> Result<Vec<PlannedSubscription>, InvalidTopology> {
        let topology = Topology::new(Redis::url(url).unwrap()).default_group("g");
        drafts
            .into_iter()
            .map(handled)
            .fold(topology, Topology::subscribe)
            .plan("here-1-abc")
    }

    fn refused(drafts: Vec<Draft>) -> String {
        check("redis://localhost", drafts)
            .err()
            .expect("refused")
            .to_string()
    }

    #[test]
    fn names_groups_and_consumers_have_defaults() {
        let plan = check("redis://localhost", vec![Subscription::tail("s")])
            .ok()
            .unwrap();
        let only = &plan[0];
        assert_eq!(&*only.name, "s/g/tail");
        assert_eq!(&*only.consumer, "here-1-abc-s/g/tail");
        assert_eq!(only.keep_alive, 5 * SECOND);
    }

    #[test]
    fn the_groups_smallest_min_idle_sets_the_keep_alive_of_all_its_subscriptions() {
        let drafts = vec![
            Subscription::tail("s"),
            Subscription::reclaim("s", 3 * SECOND),
            Subscription::reclaim("s", 60 * SECOND).named("slow"),
            Subscription::tail("other"),
        ];
        let plan = check("redis://localhost", drafts).ok().unwrap();
        let intervals: Vec<_> = plan.iter().map(|s| s.keep_alive).collect();
        assert_eq!(intervals, [SECOND, SECOND, SECOND, 5 * SECOND]);
    }

    #[test]
    fn every_mistake_is_refused_with_what_to_change() {
        let tail = || Subscription::tail("s");
        let reclaim = |idle| Subscription::reclaim("s", idle);
        let capped = || RetryPolicy::default().max_attempts(3);
        let cases: Vec<(Vec<Draft>, &str)> = vec![
            (vec![], "add one with `Topology::subscribe`"),
            (vec![tail(), tail()], "another name with `.named"),
            (vec![tail().workers(0)], "`workers` must not be 0"),
            (
                vec![tail().workers(MOST_WORKERS + 1)],
                "`workers` must not be 65537; there can be 65,536",
            ),
            (vec![tail().batch(0)], "`batch` must not be 0"),
            (
                vec![tail().max_in_flight(0)],
                "`max_in_flight` must not be 0",
            ),
            (
                vec![tail().block(Duration::ZERO)],
                "`block` must not be 0ns",
            ),
            (vec![tail().group("")], "`group` must not be empty"),
            (vec![Subscription::tail("")], "`stream` must not be empty"),
            (
                vec![tail().keep_alive(SECOND), reclaim(2 * SECOND)],
                "shorter than three keep-alives",
            ),
            (
                vec![reclaim(Duration::from_millis(10))],
                "`min_idle` must not be 10ms",
            ),
            (
                vec![tail().consumer("c"), reclaim(SECOND).consumer("c")],
                "consumer name `c`",
            ),
            (
                vec![
                    tail().start(Start::Beginning),
                    reclaim(SECOND).start(Start::New),
                ],
                "different places to start",
            ),
            (
                vec![
                    tail().delayed_retry(DelayedRetry::durable("d")),
                    Subscription::tail("t").delayed_retry(DelayedRetry::durable("d")),
                ],
                "give each stream its own set",
            ),
            (
                vec![tail().delayed_retry(DelayedRetry::durable("s"))],
                "its delay set at once",
            ),
            (
                vec![tail().dead_letter("s")],
                "its dead-letter stream at once",
            ),
            (vec![tail().retry(capped())], "then_reject"),
            (
                vec![tail().retry(capped().then_dead_letter())],
                "`.dead_letter",
            ),
            (vec![tail().on_crash(OnCrash::DeadLetter)], "`.dead_letter"),
            (
                vec![tail().retry(RetryPolicy::default().max_attempts(0).then_reject())],
                "at least 1",
            ),
        ];
        for (drafts, expected) in cases {
            let text = refused(drafts);
            assert!(text.contains(expected), "expected `{expected}` in: {text}");
        }
    }

    #[test]
    fn a_subscription_without_a_group_is_refused() {
        let topology = Topology::new(Redis::url("redis://localhost").unwrap());
        let error = topology
            .subscribe(handled(Subscription::tail("s")))
            .plan("x")
            .err()
            .unwrap();
        assert!(
            error.to_string().contains("Topology::default_group"),
            "{error}"
        );
    }

    #[test]
    fn in_a_cluster_the_keys_of_one_step_share_a_slot() {
        let apart = vec![Subscription::tail("orders").dead_letter("orders-dead")];
        let error = check("redis-cluster://localhost", apart)
            .err()
            .unwrap()
            .to_string();
        assert!(
            error.contains("orders-dead") && error.contains("{tag}"),
            "{error}"
        );
        let together = vec![Subscription::tail("{orders}").dead_letter("{orders}-dead")];
        assert!(check("redis-cluster://localhost", together).is_ok());
    }
}
