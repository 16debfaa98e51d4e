//! What flows through the tree: entries, their headers and bodies, and what handlers say of them.

mod codec;
mod copy;
mod delivery;
mod entry;
mod headers;
mod key;
mod outcome;
mod publisher;

pub use codec::{Codec, CodecError, Fields, Json, Raw};
pub use delivery::{Context, DELIVERY_COUNT_HEADER, Mode};
pub use entry::{Entry, EntryId, InvalidEntryId};
pub use headers::Headers;
pub use key::StreamKey;
pub use outcome::Outcome;
pub use publisher::{DraftEntry, PublishError, Publisher};

pub(crate) use copy::{Destination, dead_letter, group_of, retry, retry_headers};
pub(crate) use delivery::{Received, Source};
pub(crate) use headers::wire;
pub(crate) use publisher::{Append, Appended};

/// The error type that handlers return: any error, boxed.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

#[cfg(test)]
pub(crate) use delivery::tests::source as test_source;
