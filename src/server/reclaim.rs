//! Taking over what other consumers left pending.

use std::time::Duration;

use fred::types::Value;

use super::connect::{Connection, Script};
use super::errors::ServerError;
use super::frame;
use super::group::Group;
use super::read::{MOST_TAKEN, Recovered, recovered};
use super::{encode_milliseconds, encode_text};
use crate::message::EntryId;

/// How many pending entries one call looks at, at most.
const MOST_LOOKED_AT: i64 = 1000;

/// Takes over up to `count` entries (and at most [`MOST_TAKEN`]) that have been idle for
/// `least_idle`, whoever has them, this consumer included, in the order of their ids behind
/// `cursor`.
///
/// A pass begins with [`EntryId::MIN`] as the cursor and goes on with the `next` of each reply
/// until that is [`EntryId::MIN`] again: an empty reply is not the end. What is `held` is left to
/// whoever has it.
pub(crate) async fn reclaim(
    conn: &Connection,
    group: &Group,
    consumer: &str,
    least_idle: Duration,
    cursor: EntryId,
    count: usize,
    held: &[EntryId],
) -> Result<Recovered, ServerError> {
    static RECLAIM: Script = Script::new(concat!(
        include_str!("scripts/errors.lua"),
        include_str!("scripts/pending.lua"),
        include_str!("scripts/claim.lua"),
        include_str!("scripts/reclaim.lua"),
    ));
    let Some(first) = cursor.next() else {
        return Ok(Recovered {
            entries: Vec::new(),
            gone: Vec::new(),
            next: EntryId::MIN,
        });
    };
    let mut args = vec![
        group.arg(),
        encode_text(consumer),
        encode_milliseconds(least_idle),
        super::encode_id(first),
        Value::Integer(count.clamp(1, MOST_TAKEN) as i64),
        Value::Integer(MOST_LOOKED_AT),
    ];
    let mut ids = super::Ids::with_capacity(held.len());
    args.extend(held.iter().map(|id| ids.encode(*id)));
    recovered(
        conn.script(&RECLAIM, vec![group.key()], args).await?,
        frame::id,
    )
}
