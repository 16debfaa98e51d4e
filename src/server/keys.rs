//! What a key holds.

use fred::types::Value;

use super::connect::Connection;
use super::errors::ServerError;
use super::frame;
use crate::message::StreamKey;

/// The type of what the key holds, in the server's words; `None` if there is no such key, or this user
/// may not ask.
pub(crate) async fn type_of(
    conn: &Connection,
    key: &StreamKey,
) -> Result<Option<String>, ServerError> {
    let found = match conn.call("TYPE", vec![Value::Bytes(key.0.clone())]).await {
        Ok(reply) => frame::text(reply)?,
        Err(denied) if denied.is_denied() => return Ok(None),
        Err(error) => return Err(error),
    };
    Ok((found != "none").then_some(found))
}
