//! Supervised consumers of Redis and Valkey Streams.

#![forbid(unsafe_code)]
#![warn(missing_docs)]
// Nothing that a server sends or an entry holds may make this crate panic.
#![cfg_attr(
    not(test),
    warn(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::indexing_slicing,
        clippy::panic
    )
)]

mod actors;
#[cfg(feature = "bench")]
#[doc(hidden)]
pub mod bench;
#[cfg(not(feature = "fail_points"))]
mod fail_point;
#[cfg(feature = "fail_points")]
#[doc(hidden)]
pub mod fail_point;
mod handle;
mod handler_ref;
pub mod message;
pub mod observe;
mod server;
mod state;
pub mod topology;

// What the tests share names this crate as an application does.
#[cfg(test)]
extern crate self as streamvisor;

#[cfg(test)]
#[path = "../tests/support/mod.rs"]
mod support;

pub use fred;
pub use ractor;

pub use actors::{ControlError, Failure, Remaining, ShutdownReport, StartError, SupervisorMessage};
pub use handle::{ShutdownError, Supervisor, SupervisorHandle};
pub use handler_ref::{CallError, HandlerRef, HandlersError, SendError, Undelivered};
pub use message::*;
pub use observe::{
    Child, Event, Events, LastError, MissedEvents, Restarts, State, Status, SubscriptionStatus,
    Verdicts,
};
pub use topology::*;

/// What most programs need.
pub mod prelude {
    pub use crate::actors::{ControlError, Failure, StartError};
    pub use crate::handle::{ShutdownError, Supervisor, SupervisorHandle};
    pub use crate::handler_ref::{CallError, HandlerRef, HandlersError, SendError};
    pub use crate::message::{
        BoxError, Codec, CodecError, Context, Delivery, Entry, EntryId, Fields, Json, NotStored,
        Outcome, Publisher, Raw, Settlement,
    };
    pub use crate::observe::{Child, Event, MissedEvents};
    pub use crate::topology::{
        AfterAck, BatchHandler, DelayedRetry, Draft, Handler, OnCrash, Redis, RestartPolicy,
        RetryPolicy, Start, Subscription, Topology, Worker,
    };
}

/// The programs of the README compile. With `cluster`, actors' messages need one more line, which is not for
/// the README.
#[cfg(all(doctest, not(feature = "cluster")))]
#[doc = include_str!("../README.md")]
struct Readme;
