//! Adding entries to streams.

use bytes::Bytes;
use fred::types::Value;

use super::connect::Connection;
use super::errors::ServerError;
use super::frame;
use crate::message::{EntryId, StreamKey};

/// Adds an entry and returns its id. After an error that [passes](ServerError::is_passing) it may
/// have been added, unless memory was full.
pub(crate) async fn add(
    conn: &Connection,
    stream: &StreamKey,
    fields: Vec<Bytes>,
) -> Result<EntryId, ServerError> {
    let mut args = Vec::with_capacity(2 + fields.len());
    args.extend([Value::Bytes(stream.0.clone()), Value::from_static_str("*")]);
    args.extend(fields.into_iter().map(Value::Bytes));
    frame::id(conn.call("XADD", args).await?)
}
