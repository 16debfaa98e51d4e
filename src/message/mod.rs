//! What flows through the tree: entries, their headers and bodies, and what handlers say of them.

mod codec;
mod entry;
mod headers;
mod key;
mod outcome;

pub use codec::{Codec, CodecError, Fields, Json, Raw};
pub use entry::{Entry, EntryId, InvalidEntryId};
pub use headers::Headers;
pub use key::StreamKey;
pub use outcome::Outcome;

pub(crate) use headers::wire;

/// The error type that handlers return: any error, boxed.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;
