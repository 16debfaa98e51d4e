//! Getting tasks out of the way of a thread that may be about to block.

use tokio::runtime::Handle;

/// Lets another thread have the task that was woken last on this one.
///
/// A thread of tokio's runtime keeps the task that it woke last for itself, to run it next; no other thread
/// takes that one over. If the application's code then blocks the thread, the task, the settler perhaps or
/// another worker, stands still for as long. A task that is woken afterwards takes its place and lets it go to
/// the others: an empty one serves.
pub(crate) fn make_way() {
    // Outside of a runtime there is no such place.
    if let Ok(runtime) = Handle::try_current() {
        runtime.spawn(std::future::ready(()));
    }
}
