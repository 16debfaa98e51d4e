//! Adding entries to streams.

use std::sync::Arc;

use bytes::Bytes;
use fred::types::Value;

use super::connect::Connection;
use super::errors::ServerError;
use super::frame;
use crate::message::{Append, Appended, EntryId, PublishError, StreamKey};

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

/// Adds entries for the application's publishers.
pub(crate) struct Appending(pub(crate) Arc<Connection>);

impl Append for Appending {
    fn append(&self, stream: StreamKey, fields: Vec<Bytes>) -> Appended {
        let connection = Arc::clone(&self.0);
        Box::pin(async move {
            if connection.is_closed() {
                return Err(PublishError::Closed);
            }
            match add(&connection, &stream, fields).await {
                Ok(id) => Ok(id),
                // The command was not run: the server says why.
                Err(error) if error.is_memory() || !error.is_passing() => {
                    Err(PublishError::Refused {
                        stream,
                        reason: error.to_string(),
                    })
                }
                Err(error @ ServerError::NotPrimary(_)) => Err(PublishError::Refused {
                    stream,
                    reason: error.to_string(),
                }),
                Err(error) => Err(PublishError::Unknown {
                    stream,
                    reason: error.to_string(),
                }),
            }
        })
    }
}
