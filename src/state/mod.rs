//! What survives the crash of an actor: owned by the tree, lent to each incarnation.
//!
//! Nothing here knows an actor or a socket.

mod cursor;
mod given_back;
mod hold;
mod in_flight;
mod lane;
mod lanes;
mod settle_queue;

pub(crate) use cursor::Cursor;
pub(crate) use given_back::GivenBack;
pub(crate) use hold::{Hold, Reason};
pub(crate) use in_flight::{InFlight, Usage};
pub(crate) use lane::Run;
pub(crate) use lanes::{Lanes, Seat, Taken};
pub(crate) use settle_queue::{CopyJob, ParkedJob, SettleQueue, StartAnswer, StartJob};

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks what survives crashes. A panic while it was held leaves it as consistent as each of its
/// steps is, which is what these types are written for, so poison is of no use here.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
