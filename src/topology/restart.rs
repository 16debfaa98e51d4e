//! How often the tree's own actors may fail.

use std::time::Duration;

/// How the tree's own actors are restarted, and when to give up on one.
///
/// Every actor has a budget of its own: more than `max_restarts` within `within` is too much. Then
/// the supervisor drains what it can and ends with an error that names the actor, or, after
/// [`isolate`](RestartPolicy::isolate), only that actor's subscription fails.
///
/// A handler that dies over an entry is started again at once and at no expense, since the entry is to
/// blame. From the fifth time in a row, with no entry handled in between, its restarts wait and count.
///
/// ```
/// use std::time::Duration;
/// use streamvisor::RestartPolicy;
///
/// let policy = RestartPolicy::default().max_restarts(3).within(Duration::from_secs(60)).isolate();
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RestartPolicy {
    pub(crate) max_restarts: u32,
    pub(crate) within: Duration,
    pub(crate) first_delay: Duration,
    pub(crate) max_delay: Duration,
    pub(crate) isolate: bool,
}

impl Default for RestartPolicy {
    /// At most 5 restarts within 30 s; the first is immediate, the following ones wait from 100 ms up
    /// to 5 s.
    fn default() -> Self {
        RestartPolicy {
            max_restarts: 5,
            within: Duration::from_secs(30),
            first_delay: Duration::from_millis(100),
            max_delay: Duration::from_secs(5),
            isolate: false,
        }
    }
}

impl RestartPolicy {
    /// How many restarts of one actor are accepted within the window. Default: 5.
    pub fn max_restarts(mut self, restarts: u32) -> Self {
        self.max_restarts = restarts;
        self
    }

    /// The window over which restarts are counted. Default: 30 s.
    pub fn within(mut self, window: Duration) -> Self {
        self.within = window;
        self
    }

    /// The delay before the second restart and the longest delay; delays double in between. The
    /// first restart is immediate. Default: 100 ms and 5 s.
    pub fn backoff(mut self, first: Duration, longest: Duration) -> Self {
        self.first_delay = first;
        self.max_delay = longest;
        self
    }

    /// A spent budget fails the subscription that the actor belongs to, and nothing else.
    pub fn isolate(mut self) -> Self {
        self.isolate = true;
        self
    }
}
