//! What a handler says of an entry.

use std::time::Duration;

/// A handler's verdict on one entry.
///
/// The entry stays pending on the server until the verdict is stored there; a copy is made before
/// the original is acknowledged, in the same step.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Outcome {
    /// Done: acknowledged.
    Ack,
    /// Again, later: a copy goes to the end of the stream and the original is acknowledged.
    Retry,
    /// The same, not before this delay. Where it waits is the subscription's `delayed_retry`.
    RetryAfter(Duration),
    /// Not wanted: acknowledged without a copy.
    Reject,
    /// To the subscription's dead-letter stream with this reason. Without such a stream the entry is
    /// left pending and an event says so.
    DeadLetter(String),
    /// Left as it is: a reclaim or claiming subscription takes it up once it has been idle for its
    /// `min_idle`.
    LeavePending,
}
