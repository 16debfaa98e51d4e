//! Supervised consumers of Redis and Valkey Streams.

pub mod message;
mod state;
pub mod topology;

pub use message::*;
pub use topology::*;

/// What most programs need.
pub mod prelude {
    pub use crate::message::{BoxError, Context, EntryId, Fields, Json, Outcome, Raw};
    pub use crate::topology::{
        AfterAck, DelayedRetry, Handler, OnCrash, Redis, RestartPolicy, RetryPolicy, Start,
        Subscription, Topology, Worker,
    };
}
