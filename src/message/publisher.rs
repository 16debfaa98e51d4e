//! Adding entries to streams.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use bytes::Bytes;
use serde::Serialize;

use super::headers::wire;
use super::{CodecError, EntryId, Json, StreamKey};

/// Why an entry was not added to a stream, or may not have been.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PublishError {
    /// The value could not be made a body.
    #[error("the value cannot be encoded: {0}")]
    Encode(#[source] CodecError),
    /// The server refused the entry: nothing was added.
    #[error("the server refused the entry for `{stream}`: {reason}")]
    Refused {
        /// The stream's key.
        stream: StreamKey,
        /// The server's answer.
        reason: String,
    },
    /// No answer came, so it is not known whether the entry was added. Publishing again may add it
    /// twice.
    #[error(
        "no answer from the server, so it is not known whether the entry was added to `{stream}`: {reason}"
    )]
    Unknown {
        /// The stream's key.
        stream: StreamKey,
        /// What happened instead.
        reason: String,
    },
    /// The tree has ended, and its connections with it.
    #[error("the tree has been shut down; its publisher with it")]
    Closed,
}

/// The id that the entry got, once it is there.
pub(crate) type Appended = Pin<Box<dyn Future<Output = Result<EntryId, PublishError>> + Send>>;

/// What adds the finished fields to a stream.
pub(crate) trait Append: Send + Sync {
    fn append(&self, stream: StreamKey, fields: Vec<Bytes>) -> Appended;
}

/// Adds entries to streams, with headers, in the form that subscriptions read: the body as JSON in
/// `_payload`, each header in `h:<name>`.
///
/// Cheap to clone. An entry is sent once and never repeated by itself: an answer that was lost is
/// [`PublishError::Unknown`].
///
/// ```no_run
/// # async fn example(supervisor: streamvisor::SupervisorHandle) -> Result<(), streamvisor::BoxError> {
/// let publisher = supervisor.publisher();
/// let id = publisher.publish("orders", &serde_json::json!({ "id": 7 })).await?;
/// publisher
///     .entry("orders", &serde_json::json!({ "id": 8 }))
///     .header("customer", "c-12")
///     .send()
///     .await?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Publisher {
    append: Arc<dyn Append>,
}

impl Publisher {
    pub(crate) fn new(append: Arc<dyn Append>) -> Self {
        Publisher { append }
    }

    /// Adds one entry: `value` as JSON, no headers.
    pub async fn publish<T: Serialize + ?Sized>(
        &self,
        stream: impl Into<StreamKey>,
        value: &T,
    ) -> Result<EntryId, PublishError> {
        self.entry(stream, value).send().await
    }

    /// An entry with `value` as JSON, to which headers can be added before it is sent.
    pub fn entry<T: Serialize + ?Sized>(
        &self,
        stream: impl Into<StreamKey>,
        value: &T,
    ) -> DraftEntry<'_> {
        let body = Json::encode(value);
        self.draft(stream.into(), body)
    }

    /// An entry with these bytes as its body.
    pub fn raw(&self, stream: impl Into<StreamKey>, body: impl Into<Bytes>) -> DraftEntry<'_> {
        self.draft(stream.into(), Ok(body.into()))
    }

    fn draft(&self, stream: StreamKey, body: Result<Bytes, CodecError>) -> DraftEntry<'_> {
        DraftEntry {
            publisher: self,
            stream,
            body,
            headers: Vec::new(),
        }
    }

    #[cfg(any(test, feature = "bench"))]
    pub(crate) fn unconnected() -> Self {
        struct Nowhere;
        impl Append for Nowhere {
            fn append(&self, _: StreamKey, _: Vec<Bytes>) -> Appended {
                Box::pin(async { Err(PublishError::Closed) })
            }
        }
        Publisher::new(Arc::new(Nowhere))
    }
}

impl fmt::Debug for Publisher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Publisher")
    }
}

/// An entry to be published, made by [`Publisher::entry`] or [`Publisher::raw`].
#[must_use = "the entry is added by `send`"]
pub struct DraftEntry<'a> {
    publisher: &'a Publisher,
    stream: StreamKey,
    body: Result<Bytes, CodecError>,
    headers: Vec<Bytes>,
}

impl DraftEntry<'_> {
    /// Adds a header. The ones that count retries belong to the entry they were written on and are
    /// left out.
    pub fn header(mut self, name: impl AsRef<[u8]>, value: impl AsRef<[u8]>) -> Self {
        let field = [wire::HEADER, name.as_ref()].concat();
        let counts_retries = [wire::RETRY_COUNT, wire::RETRY_GROUP, wire::RETRY_ERROR];
        if !counts_retries.iter().any(|kept| kept.as_bytes() == field) {
            self.headers.push(field.into());
            self.headers.push(Bytes::copy_from_slice(value.as_ref()));
        }
        self
    }

    /// Adds the entry to its stream and returns the id it got.
    pub async fn send(self) -> Result<EntryId, PublishError> {
        let mut fields = Vec::with_capacity(2 + self.headers.len());
        fields.push(Bytes::from_static(wire::PAYLOAD.as_bytes()));
        fields.push(self.body.map_err(PublishError::Encode)?);
        fields.extend(self.headers);
        self.publisher.append.append(self.stream, fields).await
    }
}
