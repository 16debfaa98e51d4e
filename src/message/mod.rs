//! What flows through the tree: entries, their headers and bodies, and what handlers say of them.

mod codec;
mod copy;
mod delivery;
mod entry;
#[cfg(test)]
mod fuzz;
mod headers;
mod key;
mod outcome;
mod publisher;
mod received;
mod suspect;

pub use codec::{Codec, CodecError, Fields, Json, Raw};
pub use delivery::{Delivery, NotStored, Settlement};
pub use entry::{Entry, EntryId, InvalidEntryId};
pub use headers::Headers;
pub use key::StreamKey;
pub use outcome::Outcome;
pub use publisher::{DraftEntry, PublishError, Publisher};
pub use received::{Context, DELIVERY_COUNT_HEADER, Mode};

pub(crate) use copy::{Destination, dead_letter, group_of, retry, retry_headers};
pub(crate) use delivery::Desk;
pub(crate) use headers::wire;
pub(crate) use outcome::{Verdict, with_causes};
pub(crate) use publisher::{Append, Appended};
pub(crate) use received::{Received, Source};
pub(crate) use suspect::{ALONE_FOR, Turn};

/// The error type that handlers return: any error, boxed.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

#[cfg(any(test, feature = "bench"))]
pub(crate) use received::source as test_source;
