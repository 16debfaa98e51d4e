//! Storing verdicts. Every step may be sent again: what was done the first time is not done twice.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use fred::types::Value;

use super::connect::{Connection, Script};
use super::delay::encode_ttl;
use super::errors::ServerError;
use super::frame::{self, Frame};
use super::group::Group;
use super::{Consumers, Ids, encode_milliseconds, encode_number};
use crate::message::{Destination, EntryId};

/// How many names and values an entry may have to be copied by a script.
pub(crate) const MOST_FIELDS: usize = 7990;
/// The scripts that look at every other group of the stream as well take fewer at a time.
const MOST_DELETED: usize = 100;
/// Counts and give-backs, with two commands for each entry: about a millisecond of the server's
/// time.
const MOST_CLAIMED: usize = 150;

/// How entries are deleted that no group of the stream needs any more (`AfterAck::Delete`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DeleteAcked {
    /// By `XACKDEL`, where the server has it (see `Capabilities`).
    Command,
    /// By a script that looks at the groups.
    Script,
}

fn deleting(delete: Option<DeleteAcked>) -> Value {
    Value::from_static_str(match delete {
        None => "keep",
        Some(DeleteAcked::Command) => "xackdel",
        Some(DeleteAcked::Script) => "xdel",
    })
}

/// Acknowledges entries, whoever owns them: the work is done. Returns how many were pending.
///
/// Callers bound the batch (see `SettleQueue`). Without deleting, a missing group is no error:
/// nothing is pending there.
pub(crate) async fn acknowledge(
    conn: &Connection,
    group: &Group,
    ids: &[EntryId],
    delete: Option<DeleteAcked>,
) -> Result<u64, ServerError> {
    static ACKNOWLEDGE: Script = Script::new(concat!(
        include_str!("scripts/errors.lua"),
        include_str!("scripts/pending.lua"),
        include_str!("scripts/take.lua"),
        include_str!("scripts/acknowledge.lua"),
    ));
    if ids.is_empty() {
        return Ok(0);
    }
    let mut encoded = Ids::with_capacity(ids.len());
    match delete {
        None => {
            let mut args = Vec::with_capacity(2 + ids.len());
            args.extend([group.key(), group.arg()]);
            args.extend(ids.iter().map(|id| encoded.encode(*id)));
            frame::count(conn.call("XACK", args).await?)
        }
        Some(DeleteAcked::Command) => {
            let mut args = Vec::with_capacity(5 + ids.len());
            args.extend([group.key(), group.arg()]);
            args.extend([
                Value::from_static_str("ACKED"),
                Value::from_static_str("IDS"),
            ]);
            args.push(encode_number(ids.len() as u64));
            args.extend(ids.iter().map(|id| encoded.encode(*id)));
            let mut acknowledged = 0;
            for outcome in frame::array(conn.call("XACKDEL", args).await?)? {
                // -1: not pending. 1: deleted. 2: acknowledged, and kept for another group.
                if frame::integer(outcome)? > 0 {
                    acknowledged += 1;
                }
            }
            Ok(acknowledged)
        }
        Some(DeleteAcked::Script) => {
            let mut acknowledged = 0;
            for chunk in ids.chunks(MOST_DELETED) {
                let mut args = Vec::with_capacity(2 + chunk.len());
                args.extend([group.arg(), deleting(delete)]);
                args.extend(chunk.iter().map(|id| encoded.encode(*id)));
                acknowledged +=
                    frame::count(conn.script(&ACKNOWLEDGE, vec![group.key()], args).await?)?;
            }
            Ok(acknowledged)
        }
    }
}

/// An entry that is to be replaced by a copy.
#[derive(Debug, Clone)]
pub(crate) struct Copy {
    pub(crate) id: EntryId,
    /// The consumer that owns the original.
    pub(crate) consumer: Arc<str>,
    /// The finished copy, names and values in turn.
    pub(crate) fields: Vec<Bytes>,
    /// From the server's now; for delay sets.
    pub(crate) delay: Duration,
    /// For delay sets.
    pub(crate) attempt: u64,
    /// Whether the copy was made before ([`Settled::Copied`]), so that only the original is to go.
    pub(crate) copied: bool,
}

/// What became of an item.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Settled {
    /// The copy stands, the original is acknowledged.
    Done,
    /// The original is pending for nobody, nothing was done. After a call without a reply this is
    /// what `Done` looks like the second time; else somebody else settled it.
    NotPending,
    /// Another consumer owns the original, nothing was done.
    Anothers,
    /// The original was deleted before a copy was made of it; it is not pending any more.
    Gone,
    /// The copy stands, and the server refused to acknowledge the original, for this reason. From
    /// now on only that is to be sent.
    Copied(ServerError),
    /// The server refused the copy; the original is pending as before. Worth trying again while the
    /// error [passes](ServerError::is_passing).
    Refused(ServerError),
}

/// Puts copies where they belong, each together with the acknowledgement of its original. Items
/// that are too large for a script are refused without asking.
///
/// Callers bound the batch (see `SettleQueue`). The outcomes are in the order of the items.
pub(crate) async fn copy_and_acknowledge(
    conn: &Connection,
    group: &Group,
    to: &Destination,
    items: &[Copy],
    delete: Option<DeleteAcked>,
) -> Result<Vec<Settled>, ServerError> {
    static COPY: Script = Script::new(concat!(
        include_str!("scripts/errors.lua"),
        include_str!("scripts/pending.lua"),
        include_str!("scripts/take.lua"),
        include_str!("scripts/copy.lua"),
    ));
    let (target, kind, ttl) = match to {
        Destination::Stream => (group.key(), "stream", None),
        Destination::Delay { set, ttl } => (Value::Bytes(set.0.clone()), "delay", *ttl),
        Destination::DeadLetter { stream } => (Value::Bytes(stream.0.clone()), "stream", None),
    };
    let (mut ids, mut consumers) = (Ids::with_capacity(items.len()), Consumers::default());
    let strings: usize = items.iter().map(|item| item.fields.len()).sum();
    let mut args = Vec::with_capacity(4 + 6 * items.len() + strings);
    args.extend([
        group.arg(),
        deleting(delete),
        Value::from_static_str(kind),
        encode_ttl(ttl),
    ]);
    let mut settled = Vec::with_capacity(items.len());
    for item in items {
        let fields: &[Bytes] = if item.copied { &[] } else { &item.fields };
        if let Some(reason) = uncopiable(item) {
            settled.push(Some(Settled::Refused(ServerError::Refused(reason))));
            continue;
        }
        settled.push(None);
        args.extend([ids.encode(item.id), consumers.encode(&item.consumer)]);
        args.extend([
            Value::Integer(item.copied.into()),
            encode_milliseconds(item.delay),
        ]);
        args.extend([
            encode_number(item.attempt),
            encode_number(fields.len() as u64),
        ]);
        args.extend(fields.iter().cloned().map(Value::Bytes));
    }
    if settled.iter().all(Option::is_some) {
        return Ok(settled.into_iter().flatten().collect());
    }
    let reply = conn.script(&COPY, vec![group.key(), target], args).await?;
    let asked = settled.iter().filter(|outcome| outcome.is_none()).count();
    let mut told = outcomes(reply, asked)?.into_iter();
    Ok(settled
        .into_iter()
        .filter_map(|outcome| outcome.or_else(|| told.next()))
        .collect())
}

/// Why an item cannot be copied, whatever the server says.
fn uncopiable(item: &Copy) -> Option<String> {
    match item.fields.len() {
        _ if item.copied => None,
        0 => Some("an entry without fields cannot be added".to_owned()),
        odd if odd % 2 == 1 => Some("the copy has a field without a value".to_owned()),
        many if many > MOST_FIELDS => Some(format!(
            "the copy has {} fields, more than the {} that a script can add",
            many / 2,
            MOST_FIELDS / 2
        )),
        _ => None,
    }
}

/// An entry that waited in the stream for the time of its retry.
#[derive(Debug, Clone)]
pub(crate) struct Parked {
    pub(crate) id: EntryId,
    /// The consumer that owns it.
    pub(crate) consumer: Arc<str>,
    /// Fields of the copy that differ: the first field of that name gets the value; where there is
    /// none it is added at the end.
    pub(crate) headers: Vec<(Bytes, Bytes)>,
}

/// Puts parked entries back at the end of their stream, from what stands there, each together with
/// the acknowledgement of the original. The outcomes are in the order of the items.
pub(crate) async fn copy_parked(
    conn: &Connection,
    group: &Group,
    items: &[Parked],
    delete: Option<DeleteAcked>,
) -> Result<Vec<Settled>, ServerError> {
    static COPY_PARKED: Script = Script::new(concat!(
        include_str!("scripts/errors.lua"),
        include_str!("scripts/pending.lua"),
        include_str!("scripts/take.lua"),
        include_str!("scripts/copy_parked.lua"),
    ));
    if items.is_empty() {
        return Ok(Vec::new());
    }
    let (mut ids, mut consumers) = (Ids::with_capacity(items.len()), Consumers::default());
    let mut args = vec![group.arg(), deleting(delete)];
    for item in items {
        args.extend([ids.encode(item.id), consumers.encode(&item.consumer)]);
        args.push(encode_number(2 * item.headers.len() as u64));
        for (name, value) in &item.headers {
            args.extend([Value::Bytes(name.clone()), Value::Bytes(value.clone())]);
        }
    }
    outcomes(
        conn.script(&COPY_PARKED, vec![group.key()], args).await?,
        items.len(),
    )
}

/// One outcome for each item: a number, or a number and the server's text.
pub(super) fn outcomes(reply: Frame, expected: usize) -> Result<Vec<Settled>, ServerError> {
    let outcomes = frame::array(reply)?;
    if outcomes.len() != expected {
        let found = outcomes.len();
        return Err(ServerError::Malformed(format!(
            "expected {expected} outcomes, found {found}"
        )));
    }
    outcomes.into_iter().map(outcome).collect()
}

fn outcome(reply: Frame) -> Result<Settled, ServerError> {
    let (code, reason) = match reply {
        Frame::Array { .. } => {
            let [code, reason] = frame::tuple(reply)?;
            (
                frame::integer(code)?,
                ServerError::from_reply(&frame::text(reason)?),
            )
        }
        code => (frame::integer(code)?, ServerError::Refused(String::new())),
    };
    match code {
        0 => Ok(Settled::Done),
        1 => Ok(Settled::NotPending),
        2 => Ok(Settled::Anothers),
        3 => Ok(Settled::Gone),
        4 => Ok(Settled::Copied(reason)),
        5 => Ok(Settled::Refused(reason)),
        other => Err(ServerError::Malformed(format!("{other} is no outcome"))),
    }
}

/// Gives entries that `consumer` claimed by mistake back to those that work on them: (id, who is to have
/// it, its count). Returns how many changed hands.
pub(crate) async fn return_to(
    conn: &Connection,
    group: &Group,
    consumer: &Arc<str>,
    items: &[(EntryId, Arc<str>, u64)],
) -> Result<u64, ServerError> {
    static RETURN_TO: Script = Script::new(concat!(
        include_str!("scripts/errors.lua"),
        include_str!("scripts/pending.lua"),
        include_str!("scripts/return_to.lua"),
    ));
    let mut returned = 0;
    for chunk in items.chunks(MOST_CLAIMED) {
        let (mut ids, mut consumers) = (Ids::with_capacity(chunk.len()), Consumers::default());
        let mut args = Vec::with_capacity(1 + 4 * chunk.len());
        args.push(group.arg());
        for (id, to, count) in chunk {
            args.extend([ids.encode(*id), consumers.encode(consumer)]);
            args.extend([consumers.encode(to), encode_number(*count)]);
        }
        returned += frame::count(conn.script(&RETURN_TO, vec![group.key()], args).await?)?;
    }
    Ok(returned)
}

/// What became of an entry whose start was to be counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Started {
    /// It is ours and counted: start it.
    Done,
    /// Another consumer owns it.
    Anothers,
    /// It was deleted.
    Gone,
    /// It was settled.
    NotPending,
}

/// Sets the delivery counts of entries (id, owning consumer, new count), of those that are still
/// owned by that consumer, and makes them fresh. The outcomes are in the order of the items.
pub(crate) async fn count_starts(
    conn: &Connection,
    group: &Group,
    items: &[(EntryId, Arc<str>, u64)],
) -> Result<Vec<Started>, ServerError> {
    static COUNT_STARTS: Script = Script::new(concat!(
        include_str!("scripts/errors.lua"),
        include_str!("scripts/pending.lua"),
        include_str!("scripts/take.lua"),
        include_str!("scripts/count_starts.lua"),
    ));
    let mut started = Vec::with_capacity(items.len());
    for chunk in items.chunks(MOST_CLAIMED) {
        let mut args = vec![group.arg(), Value::from_static_str("keep")];
        extend_with_counts(&mut args, chunk);
        let reply = conn.script(&COUNT_STARTS, vec![group.key()], args).await?;
        for outcome in outcomes(reply, chunk.len())? {
            started.push(match outcome {
                Settled::Done => Started::Done,
                Settled::Anothers => Started::Anothers,
                Settled::Gone => Started::Gone,
                Settled::NotPending => Started::NotPending,
                other => {
                    return Err(ServerError::Malformed(format!(
                        "{other:?} is no outcome of a start"
                    )));
                }
            });
        }
    }
    Ok(started)
}

/// Gives entries back that were not started (id, owning consumer, count), those that are still
/// owned by that consumer: any other may claim them at once. The first of them is claimed last,
/// where servers claim by age. Returns how many were given back.
pub(crate) async fn give_back(
    conn: &Connection,
    group: &Group,
    items: &[(EntryId, Arc<str>, u64)],
) -> Result<u64, ServerError> {
    static GIVE_BACK: Script = Script::new(concat!(
        include_str!("scripts/errors.lua"),
        include_str!("scripts/pending.lua"),
        include_str!("scripts/give_back.lua"),
    ));
    let mut given = 0;
    for chunk in items.chunks(MOST_CLAIMED) {
        let mut args = vec![group.arg()];
        extend_with_counts(&mut args, chunk);
        given += frame::count(conn.script(&GIVE_BACK, vec![group.key()], args).await?)?;
    }
    Ok(given)
}

fn extend_with_counts(args: &mut Vec<Value>, items: &[(EntryId, Arc<str>, u64)]) {
    let (mut ids, mut consumers) = (Ids::with_capacity(items.len()), Consumers::default());
    args.reserve(3 * items.len());
    for (id, consumer, count) in items {
        args.extend([
            ids.encode(*id),
            consumers.encode(consumer),
            encode_number(*count),
        ]);
    }
}

#[cfg(test)]
mod tests {
    use super::super::frame::tests::{any_frame, blob, list, number};
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn every_outcome_is_told() {
        let text = |code, text: &str| list(vec![number(code), blob(text)]);
        let reply = list(vec![
            number(0),
            number(1),
            number(2),
            number(3),
            text(4, "NOPERM x"),
            text(5, "OOM x"),
        ]);
        assert_eq!(
            outcomes(reply, 6).unwrap(),
            [
                Settled::Done,
                Settled::NotPending,
                Settled::Anothers,
                Settled::Gone,
                Settled::Copied(ServerError::Blocked("NOPERM x".to_owned())),
                Settled::Refused(ServerError::Away("OOM x".to_owned())),
            ]
        );
        assert!(outcomes(list(vec![number(0)]), 2).is_err());
        assert!(outcomes(list(vec![number(6)]), 1).is_err());
    }

    proptest! {
        #[test]
        fn no_reply_makes_the_decoder_panic(frame in any_frame()) {
            let _ = outcomes(frame, 1);
        }
    }
}
