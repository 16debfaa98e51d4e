//! What happens to an entry whose handler failed: delays, the cap on attempts and its end.

use std::time::Duration;

use crate::message::StreamKey;

/// When a failed entry is tried again, and how often.
///
/// The default retries for ever: from 1 s, doubled each time, jittered, at most 5 min.
///
/// ```
/// use std::time::Duration;
/// use streamvisor::RetryPolicy;
///
/// let policy = RetryPolicy::exponential(Duration::from_secs(1))
///     .max_delay(Duration::from_secs(300))
///     .max_attempts(8)
///     .then_dead_letter();
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct RetryPolicy {
    pub(crate) initial: Duration,
    pub(crate) max_delay: Duration,
    pub(crate) max_attempts: Option<u64>,
    pub(crate) end: Option<End>,
}

/// What comes after the last attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    DeadLetter,
    Reject,
}

impl Default for RetryPolicy {
    fn default() -> Self {
        RetryPolicy::exponential(Duration::from_secs(1))
    }
}

impl RetryPolicy {
    /// Delays that start at `initial` and double with each attempt, jittered by up to a third
    /// either way.
    pub fn exponential(initial: Duration) -> Self {
        RetryPolicy {
            initial,
            max_delay: Duration::from_secs(300),
            max_attempts: None,
            end: None,
        }
    }

    /// The longest delay. Default: 5 min.
    pub fn max_delay(mut self, longest: Duration) -> Self {
        self.max_delay = longest;
        self
    }

    /// How many attempts an entry has, the first one included. What comes after the last has to be
    /// named too: [`then_dead_letter`](Self::then_dead_letter) or [`then_reject`](Self::then_reject).
    /// Default: no cap.
    pub fn max_attempts(mut self, attempts: u64) -> Self {
        self.max_attempts = Some(attempts);
        self
    }

    /// An entry whose attempts are spent goes to the subscription's dead-letter stream.
    pub fn then_dead_letter(mut self) -> Self {
        self.end = Some(End::DeadLetter);
        self
    }

    /// An entry whose attempts are spent is acknowledged and dropped.
    pub fn then_reject(mut self) -> Self {
        self.end = Some(End::Reject);
        self
    }

    /// What follows a failure of this attempt: `None` is another attempt.
    pub(crate) fn end_after(&self, attempt: u64) -> Option<End> {
        self.max_attempts
            .filter(|&most| attempt >= most)
            .and(self.end)
    }
}

/// Where a retry waits for its delay.
///
/// ```
/// use std::time::Duration;
/// use streamvisor::DelayedRetry;
///
/// let durable = DelayedRetry::durable("orders.delayed");
/// let forgotten_after_a_week = DelayedRetry::durable("orders.delayed").ttl(Duration::from_secs(7 * 86_400));
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DelayedRetry {
    pub(crate) place: Place,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Place {
    InProcess,
    Durable {
        set: StreamKey,
        ttl: Option<Duration>,
    },
}

impl Default for DelayedRetry {
    fn default() -> Self {
        DelayedRetry::in_process()
    }
}

impl DelayedRetry {
    /// The entry stays pending on the server, and this process makes the copy when it is due: the
    /// default. A crash of the process leaves it pending, so it comes back early or late through
    /// recovery, and never gets lost.
    pub fn in_process() -> Self {
        DelayedRetry {
            place: Place::InProcess,
        }
    }

    /// The entry moves into this sorted set at once and comes back to the stream when it is due by
    /// the server's clock, whatever happens to this process. One set serves one stream.
    pub fn durable(set: impl Into<StreamKey>) -> Self {
        DelayedRetry {
            place: Place::Durable {
                set: set.into(),
                ttl: None,
            },
        }
    }

    /// Lets the server forget a durable set that nobody swept for this long after its last entry
    /// came due. Default: never.
    pub fn ttl(mut self, after: Duration) -> Self {
        if let Place::Durable { ttl, .. } = &mut self.place {
            *ttl = Some(after);
        }
        self
    }
}

/// What a crash means for the entry that was being handled: a panic, a handler past its deadline, an
/// actor that ended while it held the entry.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum OnCrash {
    /// As if the handler had returned an error: the retry policy decides.
    #[default]
    Retry,
    /// The entry is left pending for a reclaim or claiming subscription.
    LeavePending,
    /// The entry goes to the dead-letter stream at once.
    DeadLetter,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_attempt_is_the_one_that_reaches_the_cap() {
        let policy = RetryPolicy::default().max_attempts(3).then_reject();
        assert_eq!(policy.end_after(2), None);
        assert_eq!(policy.end_after(3), Some(End::Reject));
        assert_eq!(policy.end_after(9), Some(End::Reject));
        assert_eq!(RetryPolicy::default().end_after(u64::MAX), None);
    }
}
