//! Who does the work: the supervisor and its children. Each is a thin shell around state that it is
//! lent (`crate::state`) and what is said to the server (`crate::server`).

mod condition;
mod delays;
mod drain;
mod front;
mod handler;
mod keep_alive;
mod lease;
mod make_way;
mod reader;
mod roster;
mod settler;
mod start;
mod status;
mod supervisor;
mod sweeper;
mod tree;
mod verdict;

pub(crate) use front::Front;
pub(crate) use handler::{is_in_handler_of, is_in_handler_of_subscription};
pub(crate) use roster::{Occupant, Seats};
pub use start::StartError;
pub(crate) use start::{StartedTree, assemble, prepare};
pub(crate) use status::status;
pub(crate) use supervisor::{
    Addition, Ended, Message, Outline, Removal, SupervisorActor, there_are,
};
pub use supervisor::{ControlError, Failure, Remaining, ShutdownReport, SupervisorMessage};
pub(crate) use tree::{SubscriptionState, Tree};
