//! Delay sets: moving what is due back to its stream.

use std::time::Duration;

use bytes::Bytes;
use fred::types::Value;

use super::connect::{Connection, Script};
use super::encode_milliseconds;
use super::errors::ServerError;
use super::frame;
use crate::message::StreamKey;

/// How many entries one call moves at most.
pub(crate) const MOST_MOVED: usize = 100;

/// What a sweep did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Swept {
    /// Entries put back into the stream.
    pub(crate) moved: u64,
    /// Members that could not be read, moved out of the way.
    pub(crate) unreadable: u64,
    /// How long ago the oldest of them was due.
    pub(crate) oldest_late: Duration,
    /// Until the next one is due, by the server's clock; zero if one is due already, `None` if the
    /// set is empty.
    pub(crate) next_due: Option<Duration>,
    /// Why it stopped early, with the rest still in the set.
    pub(crate) refused: Option<ServerError>,
}

/// Where members go that cannot be read.
pub(crate) fn unreadable(set: &StreamKey) -> StreamKey {
    StreamKey::from([set.as_bytes(), b":unreadable"].concat())
}

/// Moves up to `limit` (and at most [`MOST_MOVED`]) entries that are due from a delay set to its
/// stream.
pub(crate) async fn sweep(
    conn: &Connection,
    set: &StreamKey,
    stream: &StreamKey,
    limit: usize,
    ttl: Option<Duration>,
) -> Result<Swept, ServerError> {
    static SWEEP: Script = Script::new(concat!(
        include_str!("scripts/errors.lua"),
        include_str!("scripts/sweep.lua"),
    ));
    let keys = [set, stream, &unreadable(set)].map(|key| Value::Bytes(key.0.clone()));
    let args = vec![
        Value::Integer(limit.clamp(1, MOST_MOVED) as i64),
        encode_ttl(ttl),
    ];
    let reply = conn.script(&SWEEP, keys.to_vec(), args).await?;
    let [moved, unreadable, oldest_late, next_due, refused] = frame::tuple(reply)?;
    let refused = frame::text(refused)?;
    let next_due = frame::integer(next_due)?;
    Ok(Swept {
        moved: frame::count(moved)?,
        unreadable: frame::count(unreadable)?,
        oldest_late: frame::milliseconds(oldest_late)?,
        next_due: u64::try_from(next_due).ok().map(Duration::from_millis),
        refused: (!refused.is_empty()).then(|| ServerError::from_reply(&refused)),
    })
}

/// How long a delay set outlives its last entry, as an argument.
pub(super) fn encode_ttl(ttl: Option<Duration>) -> Value {
    ttl.map_or(Value::Bytes(Bytes::new()), encode_milliseconds)
}
