//! What can be seen of a running tree from outside.

mod events;

pub use events::{Child, Event, Events, MissedEvents};

pub(crate) use events::Announcer;
