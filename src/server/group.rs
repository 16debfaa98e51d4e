//! Consumer groups: attached to, made anew when they are gone, looked at, tidied.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use fred::types::Value;

use super::connect::{Connection, Script};
use super::errors::ServerError;
use super::frame::{self, Frame};
use super::{Ids, encode_id, encode_milliseconds, encode_number, encode_text};
use crate::message::{EntryId, StreamKey};

/// A consumer group of a stream.
#[derive(Clone)]
pub(crate) struct Group {
    pub(crate) stream: StreamKey,
    pub(crate) name: Arc<str>,
    /// The name as an argument: cloning it copies nothing.
    encoded: Bytes,
}

impl Group {
    pub(crate) fn new(stream: impl Into<StreamKey>, name: impl Into<Arc<str>>) -> Self {
        let name = name.into();
        let encoded = Bytes::copy_from_slice(name.as_bytes());
        Group {
            stream: stream.into(),
            name,
            encoded,
        }
    }

    /// The stream's key as an argument.
    pub(super) fn key(&self) -> Value {
        Value::Bytes(self.stream.0.clone())
    }

    /// The group's name as an argument.
    pub(super) fn arg(&self) -> Value {
        Value::Bytes(self.encoded.clone())
    }
}

impl PartialEq for Group {
    fn eq(&self, other: &Self) -> bool {
        self.stream == other.stream && self.name == other.name
    }
}

impl Eq for Group {}

impl Hash for Group {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.stream.hash(state);
        self.name.hash(state);
    }
}

impl fmt::Display for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "group `{}` of stream `{}`", self.name, self.stream)
    }
}

impl fmt::Debug for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Group({:?} of {:?})", self.name, self.stream)
    }
}

/// Where a group begins that does not exist yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Origin {
    /// Behind the last entry there is.
    Last,
    /// Behind this id; behind [`EntryId::MIN`] is the beginning.
    After(EntryId),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Attached {
    /// The last id that the group delivered: the mark to begin with.
    pub(crate) last_delivered: EntryId,
    /// Whether the group was made just now.
    pub(crate) created: bool,
}

/// Makes sure that the group exists, with an origin, or finds it, without one.
pub(crate) async fn attach(
    conn: &Connection,
    group: &Group,
    origin: Option<Origin>,
) -> Result<Attached, ServerError> {
    // Looked for first: with full memory nothing can be created, and mostly nothing has to.
    if let Some(found) = find(conn, group).await? {
        return Ok(Attached {
            last_delivered: found.last_delivered,
            created: false,
        });
    }
    let gone = || ServerError::GroupGone(format!("there is no {group}"));
    let created = create(conn, group, origin.ok_or_else(gone)?).await?;
    let found = find(conn, group).await?.ok_or_else(gone)?;
    Ok(Attached {
        last_delivered: found.last_delivered,
        created,
    })
}

/// The last id that the group delivered; `None` if there is no such group.
pub(crate) async fn position(
    conn: &Connection,
    group: &Group,
) -> Result<Option<EntryId>, ServerError> {
    let found = find(conn, group).await?;
    Ok(found.map(|found| found.last_delivered))
}

async fn find(conn: &Connection, group: &Group) -> Result<Option<GroupSummary>, ServerError> {
    let groups = groups(conn, &group.stream).await?;
    Ok(groups
        .into_iter()
        .find(|found| *found.name == *group.name.as_bytes()))
}

/// Whether the group was made; else it existed.
async fn create(conn: &Connection, group: &Group, origin: Origin) -> Result<bool, ServerError> {
    let start = match origin {
        Origin::Last => Value::from_static_str("$"),
        Origin::After(id) => encode_id(id),
    };
    let create = Value::from_static_str("CREATE");
    let args = vec![
        create,
        group.key(),
        group.arg(),
        start,
        Value::from_static_str("MKSTREAM"),
    ];
    match conn.call("XGROUP", args).await {
        Ok(_) => Ok(true),
        Err(ServerError::Refused(text)) if text.starts_with("BUSYGROUP") => Ok(false),
        Err(error) => Err(naming(error, &group.stream)),
    }
}

/// The same error with the key in its text: the server does not name it.
fn naming(error: ServerError, key: &StreamKey) -> ServerError {
    error.explained(|text| format!("{text} (key `{key}`)"))
}

/// What was done about a group that disappeared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Remaking {
    /// It exists: its last delivered id is the truth.
    Followed,
    /// Somebody else made it anew further back: it was raised to the mark.
    Raised,
    /// It was made again where it stood.
    Made,
    /// The stream is another one: it was made from its beginning.
    Restarted,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Remade {
    pub(crate) last_delivered: EntryId,
    pub(crate) action: Remaking,
}

/// Makes the group again, or follows it where it exists; see "The group disappears" in
/// ARCHITECTURE.md. `in_hand` is what this process works on (id, owning consumer, delivery count):
/// what of it exists and is pending for nobody is made pending again.
pub(crate) async fn remake(
    conn: &Connection,
    group: &Group,
    mark: EntryId,
    saw_missing: bool,
    in_hand: &[(EntryId, &str, u64)],
) -> Result<Remade, ServerError> {
    static REMAKE: Script = Script::new(concat!(
        include_str!("scripts/errors.lua"),
        include_str!("scripts/pending.lua"),
        include_str!("scripts/take.lua"),
        include_str!("scripts/remake.lua"),
    ));
    static REGISTER: Script = Script::new(concat!(
        include_str!("scripts/errors.lua"),
        include_str!("scripts/pending.lua"),
        include_str!("scripts/register.lua"),
    ));
    let highest = in_hand
        .iter()
        .map(|(id, ..)| *id)
        .max()
        .unwrap_or_default()
        .max(mark);
    let args = vec![
        group.arg(),
        Value::from_static_str("keep"),
        encode_id(mark),
        encode_id(highest),
        Value::Integer(saw_missing.into()),
    ];
    let reply = conn.script(&REMAKE, vec![group.key()], args).await;
    let [action, last_delivered] =
        frame::tuple(reply.map_err(|error| naming(error, &group.stream))?)?;
    let action = match frame::integer(action)? {
        0 => Remaking::Followed,
        1 => Remaking::Raised,
        2 => Remaking::Made,
        3 => Remaking::Restarted,
        other => {
            return Err(ServerError::Malformed(format!(
                "{other} is no action of a remake"
            )));
        }
    };
    let last_delivered = frame::id(last_delivered)?;
    for chunk in in_hand.chunks(super::keep_alive::CHUNK) {
        let mut ids = Ids::with_capacity(chunk.len());
        let mut args = Vec::with_capacity(1 + 3 * chunk.len());
        args.push(group.arg());
        for (id, consumer, count) in chunk {
            args.extend([
                ids.encode(*id),
                encode_text(consumer),
                encode_number(*count),
            ]);
        }
        conn.script(&REGISTER, vec![group.key()], args).await?;
    }
    Ok(Remade {
        last_delivered,
        action,
    })
}

static TIDY: Script = Script::new(concat!(
    include_str!("scripts/errors.lua"),
    include_str!("scripts/pending.lua"),
    include_str!("scripts/tidy.lua"),
));

/// Removes one consumer, if it has nothing pending. Whether it was removed.
pub(crate) async fn remove_consumer(
    conn: &Connection,
    group: &Group,
    consumer: &str,
) -> Result<bool, ServerError> {
    let args = vec![
        group.arg(),
        Value::Integer(0),
        Value::from_static_str("only"),
        encode_text(consumer),
    ];
    let removed = frame::count(conn.script(&TIDY, vec![group.key()], args).await?)?;
    Ok(removed > 0)
}

/// Removes the consumers that have been idle for `ttl` and have nothing pending, but for those in
/// `keep`. Returns how many.
pub(crate) async fn tidy_consumers(
    conn: &Connection,
    group: &Group,
    ttl: Duration,
    keep: &[Arc<str>],
) -> Result<u64, ServerError> {
    let mut args = vec![
        group.arg(),
        encode_milliseconds(ttl),
        Value::from_static_str("all"),
    ];
    args.extend(keep.iter().map(|consumer| encode_text(consumer)));
    frame::count(conn.script(&TIDY, vec![group.key()], args).await?)
}

/// A group as the server describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct GroupSummary {
    /// Any bytes.
    pub(crate) name: Bytes,
    pub(crate) consumers: u64,
    pub(crate) pending: u64,
    pub(crate) last_delivered: EntryId,
    /// How many entries the group has not had yet; `None` where the server does not know.
    pub(crate) lag: Option<u64>,
}

/// All groups of a stream; of a stream that does not exist, none.
pub(crate) async fn groups(
    conn: &Connection,
    stream: &StreamKey,
) -> Result<Vec<GroupSummary>, ServerError> {
    let args = vec![
        Value::from_static_str("GROUPS"),
        Value::Bytes(stream.0.clone()),
    ];
    match conn.call("XINFO", args).await {
        Ok(reply) => frame::array(reply)?.into_iter().map(group_state).collect(),
        Err(ServerError::Refused(text)) if text.contains("no such key") => Ok(Vec::new()),
        Err(error) => Err(naming(error, stream)),
    }
}

pub(super) fn group_state(reply: Frame) -> Result<GroupSummary, ServerError> {
    let mut pairs = frame::array(reply)?;
    Ok(GroupSummary {
        // A copy: the slice would keep the whole reply.
        name: Bytes::copy_from_slice(&frame::bytes(frame::named(&mut pairs, "name"))?),
        consumers: frame::count(frame::named(&mut pairs, "consumers"))?,
        pending: frame::count(frame::named(&mut pairs, "pending"))?,
        last_delivered: frame::id(frame::named(&mut pairs, "last-delivered-id"))?,
        lag: match frame::named(&mut pairs, "lag") {
            Frame::Null => None,
            lag => Some(frame::count(lag)?),
        },
    })
}

/// A consumer as the server describes it.
#[cfg(test)]
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ConsumerState {
    pub(crate) name: Bytes,
    pub(crate) pending: u64,
    /// Since it last asked for entries; before 7.2, since it last got some.
    pub(crate) idle: Duration,
}

/// All consumers of a group.
#[cfg(test)]
pub(crate) async fn consumers(
    conn: &Connection,
    group: &Group,
) -> Result<Vec<ConsumerState>, ServerError> {
    let args = vec![
        Value::from_static_str("CONSUMERS"),
        group.key(),
        group.arg(),
    ];
    let reply = match conn.call("XINFO", args).await {
        Err(ServerError::Refused(text)) if text.contains("no such key") => {
            return Err(ServerError::GroupGone(format!("there is no {group}")));
        }
        reply => reply?,
    };
    let state = |reply| {
        let mut pairs = frame::array(reply)?;
        Ok(ConsumerState {
            name: Bytes::copy_from_slice(&frame::bytes(frame::named(&mut pairs, "name"))?),
            pending: frame::count(frame::named(&mut pairs, "pending"))?,
            idle: frame::milliseconds(frame::named(&mut pairs, "idle"))?,
        })
    };
    frame::array(reply)?.into_iter().map(state).collect()
}

/// How long the oldest pending entry of a group has been idle; `None` if nothing is pending.
pub(crate) async fn oldest_idle(
    conn: &Connection,
    group: &Group,
) -> Result<Option<Duration>, ServerError> {
    let word = Value::from_static_str;
    let args = vec![
        group.key(),
        group.arg(),
        word("-"),
        word("+"),
        Value::Integer(1),
    ];
    let Some(oldest) = frame::array(conn.call("XPENDING", args).await?)?.pop() else {
        return Ok(None);
    };
    let [_id, _consumer, idle, _count] = frame::tuple(oldest)?;
    frame::milliseconds(idle).map(Some)
}

/// How many entries a stream holds; none, if it does not exist.
#[cfg(test)]
pub(crate) async fn length(conn: &Connection, stream: &StreamKey) -> Result<u64, ServerError> {
    let reply = conn
        .call("XLEN", vec![Value::Bytes(stream.0.clone())])
        .await;
    frame::count(reply.map_err(|error| naming(error, stream))?)
}

#[cfg(test)]
mod tests {
    use super::super::frame::tests::{any_frame, blob, list, number};
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn an_unknown_lag_is_none_and_not_zero() {
        let described = |lag: Option<Frame>| {
            let mut pairs = vec![blob("name"), blob(b"\xff"), blob("consumers"), number(2)];
            pairs.extend([
                blob("pending"),
                number(3),
                blob("last-delivered-id"),
                blob("5-1"),
            ]);
            pairs.extend(lag.into_iter().flat_map(|lag| [blob("lag"), lag]));
            group_state(list(pairs)).unwrap()
        };
        assert_eq!(described(Some(number(4))).lag, Some(4));
        assert_eq!(described(Some(Frame::Null)).lag, None);
        let state = described(None);
        assert_eq!(state.lag, None);
        assert_eq!(
            (&state.name[..], state.last_delivered),
            (&b"\xff"[..], EntryId::new(5, 1))
        );
    }

    proptest! {
        #[test]
        fn no_reply_makes_the_decoder_panic(frame in any_frame()) {
            let _ = group_state(frame);
        }
    }
}
