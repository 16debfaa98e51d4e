//! What can be seen of a running tree from outside.

mod events;
mod status;

pub use events::{Child, Event, Events, MissedEvents};
pub use status::{LastError, Restarts, State, Status, SubscriptionStatus, Verdicts};

pub(crate) use events::Announcer;
