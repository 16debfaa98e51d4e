//! Supervised consumers of Redis and Valkey Streams.

pub mod message;
pub mod topology;

pub use message::*;
pub use topology::*;
