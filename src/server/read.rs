//! Reading entries: fresh ones, and what this consumer already has pending.

use std::sync::Arc;
use std::time::Duration;

use fred::types::Value;
use tokio::time::timeout;

use super::connect::{BLOCKING_SLACK, Connection, Script};
use super::errors::ServerError;
use super::frame::{self, Frame, Listed};
use super::group::Group;
use super::{Ids, encode_milliseconds, encode_number, encode_text};
use crate::message::{Entry, EntryId};

/// How many entries a script takes over at most.
pub(crate) const MOST_TAKEN: usize = 100;

/// What a read brought.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Read {
    pub(crate) entries: Vec<Entry>,
    /// Ids whose entries were deleted.
    pub(crate) gone: Vec<EntryId>,
}

/// An entry that was delivered before.
#[derive(Debug, PartialEq)]
pub(crate) struct Recovered {
    /// Each with its delivery count and its idle time as they were before it was taken over.
    pub(crate) entries: Vec<(Entry, u64, Duration)>,
    /// What was pending and is deleted; it is not pending any more.
    pub(crate) gone: Vec<EntryId>,
    /// Where the next call goes on; [`EntryId::MIN`] at the end.
    pub(crate) next: EntryId,
}

/// An entry of a pending list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Pending {
    pub(crate) id: EntryId,
    pub(crate) idle: Duration,
    /// How often it was delivered.
    pub(crate) count: u64,
}

/// How long it is waited for that a blocked read is ended.
const END_TIMEOUT: Duration = Duration::from_secs(1);

/// Ends the blocking read that is under way on `reading`, as if its time were over. Before the read has got
/// to the server there is nothing to end: repeat this while it is pending.
///
/// Redis 6.2 and 7.0 crash when they are asked to unblock a client whose write waits for the end of a
/// `CLIENT PAUSE … WRITE` (redis/redis#14164). So a write that changes nothing goes first, which waits for
/// that end as well.
pub(crate) async fn end_blocked(reading: &Connection, through: &Connection, group: &Group) {
    for client in reading.server_ids() {
        let nothing = vec![group.key(), group.arg(), Value::from_static_str("0-0")];
        let unblock = vec![
            Value::from_static_str("UNBLOCK"),
            Value::Integer(client),
            Value::from_static_str("TIMEOUT"),
        ];
        let both = through.call_together([("XACK", nothing), ("CLIENT", unblock)]);
        // No answer, or no right to ask: the read ends when its time is over.
        let _ = timeout(END_TIMEOUT, both).await;
    }
}

/// Reads entries that no consumer of the group has had, waiting for some for `block`, if given.
///
/// Never drop the future: entries would be delivered to nobody. After an error that
/// [passes](ServerError::is_passing) they may have been.
pub(crate) async fn read_fresh(
    conn: Arc<Connection>,
    group: Arc<Group>,
    consumer: Arc<str>,
    count: usize,
    block: Option<Duration>,
) -> Result<Read, ServerError> {
    let args = read_args(&group, &consumer, count, block, None);
    fresh(fetch(&conn, &group, args, block).await?)
}

/// What a read of fresh entries was answered with.
pub(crate) fn fresh(reply: Frame) -> Result<Read, ServerError> {
    let mut read = Read::default();
    for entry in entries(reply)? {
        match frame::listed(entry)?.0 {
            Listed::Entry(entry) => read.entries.push(entry),
            Listed::Gone(id) => read.gone.push(id),
            Listed::Nil => {}
        }
    }
    Ok(read)
}

/// Reads entries that have been pending for at least `least_idle`, the longest first, and then
/// fresh ones, as [`read_fresh`]; waits for either. For servers that can (see `Capabilities`).
///
/// Counts and idle times are those before this read, which counted a delivery for each. Deleted
/// entries are not reported, and stay pending.
pub(crate) async fn read_claiming(
    conn: Arc<Connection>,
    group: Arc<Group>,
    consumer: Arc<str>,
    count: usize,
    block: Option<Duration>,
    least_idle: Duration,
) -> Result<Recovered, ServerError> {
    let args = read_args(&group, &consumer, count, block, Some(least_idle));
    let mut read = Recovered {
        entries: Vec::new(),
        gone: Vec::new(),
        next: EntryId::MIN,
    };
    for entry in entries(fetch(&conn, &group, args, block).await?)? {
        let (entry, mut rest) = frame::listed(entry)?;
        let idle = rest
            .next()
            .map_or(Ok(Duration::ZERO), frame::milliseconds)?;
        let count = rest.next().map_or(Ok(0), frame::count)?;
        match entry {
            Listed::Entry(entry) => read.entries.push((entry, count, idle)),
            Listed::Gone(id) => read.gone.push(id),
            Listed::Nil => {}
        }
    }
    Ok(read)
}

fn read_args(
    group: &Group,
    consumer: &str,
    count: usize,
    block: Option<Duration>,
    claim: Option<Duration>,
) -> Vec<Value> {
    let mut args = Vec::with_capacity(12);
    args.extend([
        Value::from_static_str("GROUP"),
        group.arg(),
        encode_text(consumer),
    ]);
    args.extend([
        Value::from_static_str("COUNT"),
        encode_number(count.max(1) as u64),
    ]);
    if let Some(block) = block {
        // BLOCK 0 would block for ever.
        let block = block.max(Duration::from_millis(1));
        args.extend([Value::from_static_str("BLOCK"), encode_milliseconds(block)]);
    }
    if let Some(least_idle) = claim {
        args.extend([
            Value::from_static_str("CLAIM"),
            encode_milliseconds(least_idle),
        ]);
    }
    args.extend([
        Value::from_static_str("STREAMS"),
        group.key(),
        Value::from_static_str(">"),
    ]);
    args
}

async fn fetch(
    conn: &Connection,
    group: &Group,
    args: Vec<Value>,
    block: Option<Duration>,
) -> Result<Frame, ServerError> {
    let reply = match block {
        Some(block) => {
            conn.call_blocking("XREADGROUP", args, block + BLOCKING_SLACK)
                .await
        }
        None => conn.call("XREADGROUP", args).await,
    };
    match reply {
        Err(error) if error.is_unblocked() => Ok(Frame::Null),
        // The server repeats the key and the group in its NOGROUP. The client takes errors for
        // text, and a reply that is none for a broken connection: it may be only that.
        Err(error @ ServerError::Away(_))
            if std::str::from_utf8(group.stream.as_bytes()).is_err() =>
        {
            match own_pending(conn, group, "", EntryId::MIN, 1).await {
                Err(gone @ ServerError::GroupGone(_)) => Err(gone),
                _ => Err(error),
            }
        }
        reply => reply,
    }
}

/// The entries in a reply of one stream: `[[key, [entry, …]]]`, or nil.
pub(super) fn entries(reply: Frame) -> Result<Vec<Frame>, ServerError> {
    match frame::array(reply)?.into_iter().next() {
        Some(stream) => {
            let [_key, entries] = frame::tuple(stream)?;
            frame::array(entries)
        }
        None => Ok(Vec::new()),
    }
}

/// What a consumer has pending behind an id, in the order of ids, at most `limit`; touches nothing.
pub(crate) async fn own_pending(
    conn: &Connection,
    group: &Group,
    consumer: &str,
    after: EntryId,
    limit: usize,
) -> Result<Vec<Pending>, ServerError> {
    static PENDING: Script = Script::new(concat!(
        include_str!("scripts/errors.lua"),
        include_str!("scripts/pending.lua"),
        include_str!("scripts/own_pending.lua"),
    ));
    let Some(first) = after.next() else {
        return Ok(Vec::new());
    };
    let args = vec![
        group.arg(),
        encode_text(consumer),
        super::encode_id(first),
        encode_number(limit as u64),
    ];
    let reply = conn.script(&PENDING, vec![group.key()], args).await?;
    frame::array(reply)?.into_iter().map(pending).collect()
}

pub(super) fn pending(reply: Frame) -> Result<Pending, ServerError> {
    let [id, _consumer, idle, count] = frame::tuple(reply)?;
    Ok(Pending {
        id: frame::id(id)?,
        idle: frame::milliseconds(idle)?,
        count: frame::count(count)?,
    })
}

/// Takes up again what the consumer already has pending: those of `wanted` that it still owns, with
/// the counts given there.
pub(crate) async fn take_own(
    conn: &Connection,
    group: &Group,
    consumer: &str,
    wanted: &[(EntryId, u64)],
) -> Result<Recovered, ServerError> {
    static TAKE_OWN: Script = Script::new(concat!(
        include_str!("scripts/errors.lua"),
        include_str!("scripts/pending.lua"),
        include_str!("scripts/claim.lua"),
        include_str!("scripts/take_own.lua"),
    ));
    let mut all = Recovered {
        entries: Vec::new(),
        gone: Vec::new(),
        next: EntryId::MIN,
    };
    for chunk in wanted.chunks(MOST_TAKEN) {
        let mut ids = Ids::with_capacity(chunk.len());
        let mut args = Vec::with_capacity(2 + 2 * chunk.len());
        args.extend([group.arg(), encode_text(consumer)]);
        for (id, count) in chunk {
            args.extend([ids.encode(*id), encode_number(*count)]);
        }
        let taken = recovered(
            conn.script(&TAKE_OWN, vec![group.key()], args).await?,
            |_| Ok(EntryId::MIN),
        )?;
        all.entries.extend(taken.entries);
        all.gone.extend(taken.gone);
    }
    Ok(all)
}

/// `[next, [[id, fields, count, idle], …], [deleted id, …]]`.
pub(super) fn recovered(
    reply: Frame,
    next: impl FnOnce(Frame) -> Result<EntryId, ServerError>,
) -> Result<Recovered, ServerError> {
    let [at, taken, gone] = frame::tuple(reply)?;
    let taken = frame::array(taken)?;
    let mut entries = Vec::with_capacity(taken.len());
    for entry in taken {
        let [id, fields, count, idle] = frame::tuple(entry)?;
        let entry = Entry {
            id: frame::id(id)?,
            fields: frame::fields(fields)?,
        };
        entries.push((entry, frame::count(count)?, frame::milliseconds(idle)?));
    }
    Ok(Recovered {
        entries,
        gone: frame::ids(gone)?,
        next: next(at)?,
    })
}

#[cfg(test)]
mod tests {
    use super::super::frame::tests::{any_frame, blob, list, number};
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn an_empty_read_is_nil_and_brings_nothing() {
        assert!(entries(Frame::Null).unwrap().is_empty());
        assert!(entries(list(vec![])).unwrap().is_empty());
        assert!(
            entries(list(vec![list(vec![blob("key"), list(vec![])])]))
                .unwrap()
                .is_empty()
        );
        assert!(entries(number(1)).is_err());
    }

    proptest! {
        #[test]
        fn no_reply_makes_a_decoder_panic(frame in any_frame()) {
            let _ = entries(frame.clone());
            let _ = pending(frame.clone());
            let _ = recovered(frame, frame::id);
        }
    }
}
