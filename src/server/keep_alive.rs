//! Keeping what is being worked on fresh, so that nobody takes it over.

use std::sync::Arc;

use super::connect::{Connection, Script};
use super::errors::ServerError;
use super::frame;
use super::group::Group;
use super::{Consumers, Ids};
use crate::message::EntryId;

/// How many entries one call of a script looks at: about a millisecond of the server's time.
pub(super) const CHUNK: usize = 150;

/// What is not kept fresh.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct NotKept {
    /// Another consumer claimed them.
    pub(crate) anothers: Vec<EntryId>,
    /// Deleted; still pending, so that a verdict finds them.
    pub(crate) gone: Vec<EntryId>,
    /// Pending for nobody: settled meanwhile, here or elsewhere.
    pub(crate) settled: Vec<EntryId>,
}

/// Sets the idle time of entries to nothing, those that the consumer named still owns.
pub(crate) async fn keep_alive(
    conn: &Connection,
    group: &Group,
    items: &[(EntryId, Arc<str>)],
) -> Result<NotKept, ServerError> {
    static KEEP_ALIVE: Script = Script::new(concat!(
        include_str!("scripts/errors.lua"),
        include_str!("scripts/pending.lua"),
        include_str!("scripts/keep_alive.lua"),
    ));
    let mut all = NotKept::default();
    for chunk in items.chunks(CHUNK) {
        let (mut ids, mut consumers) = (Ids::with_capacity(chunk.len()), Consumers::default());
        let mut args = Vec::with_capacity(1 + 2 * chunk.len());
        args.push(group.arg());
        for (id, consumer) in chunk {
            args.extend([ids.encode(*id), consumers.encode(consumer)]);
        }
        let reply = conn.script(&KEEP_ALIVE, vec![group.key()], args).await?;
        let [anothers, gone, settled] = frame::tuple(reply)?;
        all.anothers.extend(frame::ids(anothers)?);
        all.gone.extend(frame::ids(gone)?);
        all.settled.extend(frame::ids(settled)?);
    }
    Ok(all)
}
