//! What is published, who consumes it, and what is to become of each entry: all of it follows from the
//! seed, so that the driver, the supervisor processes and a repeated run agree.

use std::time::Duration;

/// From this idle time on an entry counts as left behind. Short, so that crashes cost little time, and
/// long enough for a busy machine.
pub const MIN_IDLE: Duration = Duration::from_secs(2);
/// A handler past this is hung; also longer than any freeze, or a thawed process would end handlers that
/// did nothing wrong.
pub const HANDLER_TIMEOUT: Duration = Duration::from_secs(10);
/// A consumer that is gone for so long is removed by the others.
pub const CONSUMER_TTL: Duration = Duration::from_secs(20);
/// Attempts of an entry whose handler keeps failing.
pub const MOST_ATTEMPTS: u64 = 6;
/// How many values the header has that entries are ordered by.
const KEYS: u64 = 24;

pub const STREAMS: [&str; 3] = ["orders", "payments", "clicks"];

/// How the entries of a group are handled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Handling {
    Function,
    Batch,
    Actors,
}

/// One group of a stream. Each supervisor process consumes all of them.
pub struct Group {
    pub name: &'static str,
    /// An index into [`STREAMS`].
    pub stream: usize,
    pub handling: Handling,
    pub ordered: bool,
    /// The set in which its retries wait; without one they wait in the process.
    pub delayed: Option<&'static str>,
    /// A panic, or a handler past its deadline, leaves the entry pending; otherwise it is retried.
    pub crash_leaves_pending: bool,
    /// Fresh entries and those left behind come in one read, where the server can do that.
    pub claiming: bool,
    /// The consumer of its tail has a name that a restarted process is given again.
    pub named_consumer: bool,
}

pub const GROUPS: [Group; 4] = [
    Group {
        name: "functions",
        stream: 0,
        handling: Handling::Function,
        ordered: true,
        delayed: None,
        crash_leaves_pending: false,
        claiming: false,
        named_consumer: true,
    },
    // A second group of the same stream: the copies of one are nothing to the other.
    Group {
        name: "batches",
        stream: 0,
        handling: Handling::Batch,
        ordered: false,
        delayed: Some("orders.delayed"),
        crash_leaves_pending: true,
        claiming: false,
        named_consumer: false,
    },
    Group {
        name: "actors",
        stream: 1,
        handling: Handling::Actors,
        ordered: true,
        delayed: Some("payments.delayed"),
        crash_leaves_pending: false,
        claiming: false,
        named_consumer: false,
    },
    Group {
        name: "claimers",
        stream: 2,
        handling: Handling::Function,
        ordered: false,
        delayed: None,
        crash_leaves_pending: false,
        claiming: true,
        named_consumer: false,
    },
];

impl Group {
    pub fn stream(&self) -> &'static str {
        STREAMS[self.stream]
    }

    pub fn dead_letters(&self) -> String {
        format!("{}.dead", self.stream())
    }

    /// The names of its subscriptions.
    pub fn subscriptions(&self, server_claims: bool) -> Vec<String> {
        let modes: &[&str] = match self.claiming && server_claims {
            true => &["claiming"],
            false => &["tail", "reclaim"],
        };
        let name = self.name;
        modes.iter().map(|mode| format!("{name}-{mode}")).collect()
    }
}

/// The group that a subscription belongs to.
pub fn group_of(subscription: &str) -> Option<usize> {
    let (group, _) = subscription.rsplit_once('-')?;
    GROUPS.iter().position(|it| it.name == group)
}

/// What a handler does with an entry in the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Act {
    Ack,
    Reject,
    Retry,
    RetryAfter(Duration),
    DeadLetter,
    LeavePending,
    Error,
    Panic,
    /// Never returns.
    Hang,
    /// Takes the whole process with it.
    Abort,
}

/// How long a handler takes at this attempt, and what it does then.
pub fn act(seed: u64, group: usize, number: u64, attempt: u64) -> (Duration, Act) {
    let drawn = mix(seed ^ mix(number ^ mix(group as u64 + 1)));
    let (kind, detail) = (drawn % 10_000, drawn / 10_000);
    let first = attempt <= 1;
    let ms = |ms| Duration::from_millis(ms);
    let short = ms(detail % 4);
    let (takes, act) = match kind {
        0..400 => (short, Act::Reject),
        400..1000 if first => (short, Act::Retry),
        1000..1200 if attempt <= 3 => (short, Act::Retry),
        1200..1700 if first => (short, Act::RetryAfter(ms(20 + detail % 1_500))),
        1700..1800 if attempt <= 3 => (short, Act::RetryAfter(ms(20 + detail % 400))),
        1800..2100 => (short, Act::DeadLetter),
        2100..2500 if attempt <= 1 + detail % 3 => (short, Act::Error),
        // Until all attempts are spent.
        2500..2600 => (short, Act::Error),
        2600..2700 if first => (short, Act::Panic),
        2700..2750 if first => (short, Act::LeavePending),
        2750..2752 if first => (short, Act::Hang),
        2752 if first => (short, Act::Abort),
        // Until all attempts are spent.
        2753 if detail % 4 == 0 => (short, Act::Abort),
        // Longer than `MIN_IDLE`, some of them: they are kept fresh.
        2760..2800 => (ms(300 + detail % 3_000), Act::Ack),
        _ => (short, Act::Ack),
    };
    if GROUPS[group].handling != Handling::Batch {
        return (takes, act);
    }
    // There an error, a panic or a slow entry is everybody's in the batch, so most of them are milder.
    match act {
        Act::Error if attempt >= MOST_ATTEMPTS => (takes, Act::DeadLetter),
        Act::Error if detail % 8 > 0 => (takes, Act::RetryAfter(ms(100))),
        Act::Panic if detail % 8 > 0 => (takes, Act::Ack),
        _ => (takes, act),
    }
}

/// Whether the entry is published with a body that nobody can read.
pub fn is_garbage(seed: u64, number: u64) -> bool {
    mix(seed ^ mix(!number)).is_multiple_of(200)
}

pub fn key(seed: u64, number: u64) -> u64 {
    mix(seed ^ mix(number ^ 0x6b65_7973)) % KEYS
}

/// A number that has nothing to do with the one it is made of (the last step of splitmix64).
fn mix(number: u64) -> u64 {
    let mut z = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
