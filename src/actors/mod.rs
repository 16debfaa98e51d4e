//! Who does the work: the supervisor and its children. Each is a thin shell around state that it is
//! lent (`crate::state`) and what is said to the server (`crate::server`).

mod condition;
mod delays;
mod drain;
mod front;
mod handler;
mod keep_alive;
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
pub(crate) use handler::is_in_handler_of;
pub(crate) use roster::{Occupant, Seats};
pub use start::StartError;
pub(crate) use start::{StartedTree, assemble};
pub(crate) use status::status;
pub(crate) use supervisor::{Ended, Message, Outline, SupervisorActor};
pub use supervisor::{Failure, Remaining, ShutdownReport, SupervisorMessage};
pub(crate) use tree::{SubscriptionState, Tree};
