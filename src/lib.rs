//! Supervised consumers of Redis and Valkey Streams.

#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod actors;
mod handle;
pub mod message;
pub mod observe;
mod server;
mod state;
pub mod topology;

#[cfg(test)]
#[path = "../tests/support/mod.rs"]
mod support;

pub use fred;
pub use ractor;

pub use actors::{Failure, Remaining, ShutdownReport, StartError, SupervisorMessage};
pub use handle::{ShutdownError, Supervisor, SupervisorHandle};
pub use message::*;
pub use observe::{Child, Event, Events, MissedEvents};
pub use topology::*;

/// What most programs need.
pub mod prelude {
    pub use crate::handle::{Supervisor, SupervisorHandle};
    pub use crate::message::{BoxError, Context, EntryId, Fields, Json, Outcome, Raw};
    pub use crate::topology::{
        AfterAck, DelayedRetry, Handler, OnCrash, Redis, RestartPolicy, RetryPolicy, Start,
        Subscription, Topology, Worker,
    };
}
