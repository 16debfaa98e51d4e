//! Leases on the names of consumers: two processes must not share one.

use std::time::Duration;

use fred::types::Value;

use super::connect::{Connection, Script};
use super::errors::ServerError;
use super::frame::{self, Frame};
use super::group::Group;
use super::{encode_milliseconds, encode_text};
use crate::message::StreamKey;

/// What a renewal found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Renewal {
    Renewed,
    /// It ran out, or somebody deleted it.
    Vanished,
    /// Another token stands there.
    Anothers,
}

/// The key of a lease: in the slot of its stream.
pub(crate) fn key(group: &Group, consumer: &str) -> StreamKey {
    let tail = format!(":streamvisor:lease:{}:{consumer}", group.name);
    StreamKey::from(
        [
            b"{",
            hash_tag(group.stream.as_bytes()),
            b"}",
            tail.as_bytes(),
        ]
        .concat(),
    )
}

/// What of a key a cluster hashes: what stands in its first braces, if that is anything, else all
/// of it.
fn hash_tag(key: &[u8]) -> &[u8] {
    let tag = key.iter().position(|&byte| byte == b'{').and_then(|open| {
        let rest = key.get(open + 1..)?;
        let close = rest.iter().position(|&byte| byte == b'}')?;
        rest.get(..close).filter(|tag| !tag.is_empty())
    });
    tag.unwrap_or(key)
}

/// Takes a lease, if nobody has it. Taking it again with the same token finds it taken.
pub(crate) async fn take(
    conn: &Connection,
    key: &StreamKey,
    token: &str,
    ttl: Duration,
) -> Result<bool, ServerError> {
    let args = vec![
        Value::Bytes(key.0.clone()),
        encode_text(token),
        Value::from_static_str("NX"),
        Value::from_static_str("PX"),
        encode_milliseconds(ttl),
    ];
    match conn.call("SET", args).await? {
        // It may be ours from a call whose reply was lost.
        Frame::Null => Ok(holder(conn, key).await?.as_deref() == Some(token)),
        _ => Ok(true),
    }
}

/// The token that stands there, if any.
pub(crate) async fn holder(
    conn: &Connection,
    key: &StreamKey,
) -> Result<Option<String>, ServerError> {
    match conn.call("GET", vec![Value::Bytes(key.0.clone())]).await? {
        Frame::Null => Ok(None),
        token => frame::text(token).map(Some),
    }
}

/// How long the lease that stands there has left, if any.
pub(crate) async fn time_left(
    conn: &Connection,
    key: &StreamKey,
) -> Result<Option<Duration>, ServerError> {
    let left = frame::integer(conn.call("PTTL", vec![Value::Bytes(key.0.clone())]).await?)?;
    Ok(u64::try_from(left).ok().map(Duration::from_millis))
}

/// Extends a lease to `ttl` from now, if it is ours. Goes through with full memory too.
pub(crate) async fn renew(
    conn: &Connection,
    key: &StreamKey,
    token: &str,
    ttl: Duration,
) -> Result<Renewal, ServerError> {
    static RENEW: Script = Script::new(include_str!("scripts/lease.lua"));
    let args = vec![encode_text(token), encode_milliseconds(ttl)];
    match frame::integer(
        conn.script(&RENEW, vec![Value::Bytes(key.0.clone())], args)
            .await?,
    )? {
        1 => Ok(Renewal::Renewed),
        0 => Ok(Renewal::Vanished),
        _ => Ok(Renewal::Anothers),
    }
}

/// Gives a lease up, if it is ours.
pub(crate) async fn release(
    conn: &Connection,
    key: &StreamKey,
    token: &str,
) -> Result<(), ServerError> {
    static RELEASE: Script = Script::new(include_str!("scripts/release.lua"));
    conn.script(
        &RELEASE,
        vec![Value::Bytes(key.0.clone())],
        vec![encode_text(token)],
    )
    .await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_is_in_the_slot_of_its_stream() {
        for (stream, lease) in [
            ("orders", "{orders}:streamvisor:lease:g:c"),
            ("{eu}:orders", "{eu}:streamvisor:lease:g:c"),
            ("orders{eu}{us}", "{eu}:streamvisor:lease:g:c"),
        ] {
            assert_eq!(key(&Group::new(stream, "g"), "c"), *lease);
            let slot = |key: &[u8]| fred::util::redis_keyslot(key);
            assert_eq!(slot(stream.as_bytes()), slot(lease.as_bytes()));
        }
    }
}
