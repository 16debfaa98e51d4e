//! Waiting for what happens in its own time, and names that no other test uses.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// How long to leave what is tested alone between two looks at it.
const POLL: Duration = Duration::from_millis(5);

/// Waits until `condition` holds; panics with `what` when it does not within `deadline`.
#[track_caller]
pub fn eventually(
    deadline: Duration,
    what: &str,
    mut condition: impl FnMut() -> bool,
) -> impl Future<Output = ()> {
    eventually_some(deadline, what, move || condition().then_some(()))
}

/// Waits until `look` finds something and returns it; panics with `what` when it does not within
/// `deadline`.
///
/// Not an `async fn`, so that the panic can name the line of the test that waited.
#[track_caller]
pub fn eventually_some<T>(
    deadline: Duration,
    what: &str,
    mut look: impl FnMut() -> Option<T>,
) -> impl Future<Output = T> {
    let caller = std::panic::Location::caller();
    async move {
        // The clock on the wall: servers do not stand still when a test pauses tokio's.
        let started = Instant::now();
        loop {
            if let Some(found) = look() {
                return found;
            }
            let elapsed = started.elapsed();
            assert!(
                elapsed < deadline,
                "waited {elapsed:.1?} in vain for: {what} (at {caller})"
            );
            tokio::time::sleep(POLL).await;
        }
    }
}

/// `name` with a suffix that no other test has, in this process or another, now or in a later run:
/// for streams, groups and keys on a server that tests share.
pub fn unique(name: &str) -> String {
    static COUNTER: AtomicU64 = AtomicU64::new(0);
    let count = COUNTER.fetch_add(1, Ordering::Relaxed);
    let since_epoch = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .expect("the system's clock should be set to a date after 1970");
    format!(
        "{name}-{:x}-{:x}-{count}",
        std::process::id(),
        since_epoch.as_micros()
    )
}
