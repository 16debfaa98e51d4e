//! What an application publishes.

use std::sync::Arc;

use bytes::Bytes;

use super::connect::Connection;
use super::errors::ServerError;
use super::publish;
use crate::message::{Append, Appended, PublishError, StreamKey};

/// Adds entries for the application's publishers.
pub(crate) struct Appending(pub(crate) Arc<Connection>);

impl Append for Appending {
    fn append(&self, stream: StreamKey, fields: Vec<Bytes>) -> Appended {
        let connection = Arc::clone(&self.0);
        Box::pin(async move {
            if connection.is_closed() {
                return Err(PublishError::Closed);
            }
            match publish::add(&connection, &stream, fields).await {
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
