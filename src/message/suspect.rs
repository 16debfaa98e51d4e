//! Entries that may have ended the process that handled them begin one at a time.

use std::time::Duration;

use tokio::sync::{Semaphore, SemaphorePermit};

/// One for the process: whatever ends it ends all of its trees.
static ONE: Semaphore = Semaphore::const_new(1);

/// How long an entry has begun alone. Past that it has not done what it is suspected of, or takes too
/// long to do it for all the others to wait.
pub(crate) const ALONE_FOR: Duration = Duration::from_secs(5);

/// The turn of one suspect. Nobody else of its kind is begun until it is dropped, so that a process that
/// dies meanwhile leaves one start more behind with the one that may be to blame, and with no other.
#[derive(Debug)]
pub(crate) struct Turn(#[allow(dead_code, reason = "held for its end")] SemaphorePermit<'static>);

impl Turn {
    /// Waits until it is this entry's turn.
    pub(crate) async fn of_one() -> Turn {
        match ONE.acquire().await {
            Ok(permit) => Turn(permit),
            // Nobody closes it.
            Err(_closed) => std::future::pending().await,
        }
    }
}
