//! Growing, jittered delays between tries.
//!
//! The only file that uses the crate `backoff`, which is no longer maintained: whoever replaces it
//! finds everything here.

use std::time::Duration;

use backoff::ExponentialBackoff;
use backoff::backoff::Backoff;

/// Delays that double from one try to the next, up to a longest one, each off by up to a third.
#[derive(Debug)]
pub(crate) struct Delays {
    inner: ExponentialBackoff,
}

impl Delays {
    pub(crate) fn new(first: Duration, longest: Duration) -> Self {
        let inner = ExponentialBackoff {
            current_interval: first,
            initial_interval: first,
            randomization_factor: 1.0 / 3.0,
            multiplier: 2.0,
            max_interval: longest,
            // By default it gives up after 15 minutes.
            max_elapsed_time: None,
            ..ExponentialBackoff::default()
        };
        Delays { inner }
    }

    /// How long to wait before the next try.
    pub(crate) fn next(&mut self) -> Duration {
        // The jitter comes after the cap there; here the longest delay is the longest.
        self.inner
            .next_backoff()
            .unwrap_or(self.inner.max_interval)
            .min(self.inner.max_interval)
    }

    /// Begins with the first delay again.
    pub(crate) fn reset(&mut self) {
        self.inner.reset();
    }

    /// The delay before the try after this many, without going through those before it.
    pub(crate) fn after(first: Duration, longest: Duration, tries: u64) -> Duration {
        let doublings = u32::try_from(tries.saturating_sub(1))
            .unwrap_or(u32::MAX)
            .min(63);
        let start = first
            .saturating_mul(2u32.saturating_pow(doublings.min(31)))
            .min(longest);
        Delays::new(start, longest).next()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn delays_double_within_a_third_up_to_the_longest() {
        for tries in 1..=12 {
            let exact = (SECOND * 2u32.pow(tries - 1)).min(60 * SECOND);
            let delay = Delays::after(SECOND, 60 * SECOND, tries.into());
            assert!(
                delay >= exact.mul_f64(0.66) && delay <= exact.mul_f64(1.34).min(60 * SECOND),
                "{delay:?}"
            );
        }
        assert!(Delays::after(SECOND, 300 * SECOND, u64::MAX) >= 200 * SECOND);
    }

    #[test]
    fn a_reset_begins_again() {
        let mut delays = Delays::new(SECOND, 60 * SECOND);
        let last = (0..10).map(|_| delays.next()).last();
        assert!(last.is_some_and(|delay| delay > 30 * SECOND));
        delays.reset();
        assert!(delays.next() < 2 * SECOND);
    }
}
