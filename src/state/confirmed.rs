//! Until when something is certain that has to be confirmed again and again.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tokio::sync::Notify;

/// Something that holds for a while after it was confirmed: that what is in hand is ours, that a name
/// is. A process that was frozen, or could not reach the server, finds it uncertain afterwards, and does
/// nothing that depends on it until it is confirmed once more.
#[derive(Debug)]
pub(crate) struct Confirmed {
    since: Instant,
    /// Until when, in microseconds after `since`.
    until: AtomicU64,
    told: Notify,
}

impl Confirmed {
    /// Certain for this long from now.
    pub(crate) fn new(holds_for: Duration) -> Self {
        let confirmed = Confirmed {
            since: Instant::now(),
            until: AtomicU64::new(0),
            told: Notify::new(),
        };
        confirmed.confirm(confirmed.since, holds_for);
        confirmed
    }

    fn micros(&self, at: Instant) -> u64 {
        let after = at.saturating_duration_since(self.since);
        u64::try_from(after.as_micros()).unwrap_or(u64::MAX)
    }

    /// It was so at this moment, and holds for as long as this from there.
    pub(crate) fn confirm(&self, at: Instant, holds_for: Duration) {
        let holds_for = u64::try_from(holds_for.as_micros()).unwrap_or(u64::MAX);
        let until = self.micros(at).saturating_add(holds_for);
        self.until.fetch_max(until, Ordering::AcqRel);
        self.told.notify_waiters();
    }

    pub(crate) fn is_certain(&self, now: Instant) -> bool {
        self.micros(now) < self.until.load(Ordering::Acquire)
    }

    /// Returns once it is certain.
    pub(crate) async fn certain(&self) {
        loop {
            let told = self.told.notified();
            tokio::pin!(told);
            told.as_mut().enable();
            if self.is_certain(Instant::now()) {
                return;
            }
            told.await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn it_is_certain_for_a_while_and_again_when_it_was_confirmed() {
        let confirmed = Confirmed::new(Duration::from_secs(10));
        let start = confirmed.since;
        let after = |seconds| start + Duration::from_secs(seconds);
        assert!(confirmed.is_certain(after(9)));
        assert!(!confirmed.is_certain(after(10)));
        confirmed.confirm(after(8), Duration::from_secs(10));
        // An earlier word that comes later takes nothing back.
        confirmed.confirm(after(5), Duration::from_secs(10));
        assert!(confirmed.is_certain(after(17)));
        assert!(!confirmed.is_certain(after(18)));
    }

    #[tokio::test]
    async fn whoever_waits_goes_on_when_it_is_confirmed() {
        let confirmed = Confirmed::new(Duration::ZERO);
        let mut waiting = Box::pin(confirmed.certain());
        assert!(futures_util::poll!(waiting.as_mut()).is_pending());
        confirmed.confirm(Instant::now(), Duration::from_secs(10));
        waiting.await;
    }
}
