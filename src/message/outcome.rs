//! What a handler says of an entry, and what else can come of one.

use std::time::Duration;

use super::BoxError;

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

/// What came of one entry.
#[derive(Debug, Clone)]
pub(crate) enum Verdict {
    /// What the handler said.
    Said(Outcome),
    /// The handler returned an error.
    Failed(String),
    /// The handler's worker died over it, or had to be killed.
    Crashed(String),
    /// The codec could not make a message of it, so no handler saw it.
    Undecodable(String),
    /// Its attempts were spent when it arrived.
    Spent,
}

impl From<Result<Outcome, BoxError>> for Verdict {
    fn from(result: Result<Outcome, BoxError>) -> Self {
        match result {
            Ok(outcome) => Verdict::Said(outcome),
            Err(error) => Verdict::Failed(with_causes(error.as_ref())),
        }
    }
}

/// The most causes of an error that are told.
const MOST_CAUSES: usize = 16;

/// An error's text with that of its causes, each said once.
pub(crate) fn with_causes(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    // Nothing forbids an error to be its own cause.
    for _ in 0..MOST_CAUSES {
        let Some(error) = cause else { break };
        let said = error.to_string();
        if !text.contains(&said) {
            text.push_str(": ");
            text.push_str(&said);
        }
        cause = error.source();
    }
    text
}
