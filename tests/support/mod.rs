//! What the tests against real servers stand on: servers that a test starts, freezes and kills, a
//! proxy that loses replies on purpose, and a client that shares no code with what is tested.
//!
//! The binaries come from `scripts/servers.sh`. A missing one fails the test; nothing is skipped.

// Every test binary compiles this module for itself and uses a part of it.
#![allow(dead_code)]
#![allow(unused_imports)]

#[cfg(target_os = "linux")]
pub mod clock;
mod inspect;
pub mod pending;
mod proxy;
pub mod record;
pub mod resp;
mod server;
mod wait;
pub mod watch;

pub use inspect::{Entry, PendingEntry};
pub use proxy::{Fault, FaultProxy};
pub use resp::{Client, Reply};
pub use server::{Server, Version};
pub use wait::{eventually, eventually_some, unique};
