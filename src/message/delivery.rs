//! What an actor is sent: an entry, and the means to say what came of it.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::outcome::{Verdict, with_causes};
use super::{BoxError, Context, EntryId, Outcome};

/// Where deliveries report to.
pub(crate) trait Desk: Send + Sync {
    /// The actor looks at it: it has started.
    fn seen(&self, run: u64);
    /// What came of it.
    fn settle(&self, run: u64, context: &Context, verdict: Verdict);
    /// It was dropped without a verdict.
    fn dropped(&self, run: u64, context: &Context, seen: bool);
    /// Resolves once the server has the verdict on this entry; to `false` if the tree ends before.
    fn stored(&self, id: EntryId) -> Pin<Box<dyn Future<Output = bool> + Send>>;
}

/// An entry that an actor of the application was sent, with the message that the codec made of it.
///
/// The actor says what is to become of it with one of the methods that consume it; that is no different
/// from what a [`Handler`](crate::Handler) returns. It may keep it for as long as it wants, or move it to
/// a task of its own: until then the entry counts as in hand.
///
/// **Dropped without a verdict** it reports itself. If it was looked at, with any method, that is a crash, and
/// the entry gets what [`on_crash`](crate::Draft::on_crash) says. If it was not, as in the mailbox of an actor
/// that ended, it was never started and goes back to where it came from, to be sent again, before what is newer.
/// A third time counts as a crash, unless the actor ended over another one. When an actor ends by a panic, an
/// error or a kill, the oldest delivery that it still held counts as started.
///
/// ```
/// use streamvisor::prelude::*;
///
/// #[derive(serde::Deserialize)]
/// struct Payment { amount: i64 }
///
/// enum LedgerMessage {
///     Posted(Delivery<Payment>),
/// }
///
/// impl From<Delivery<Payment>> for LedgerMessage {
///     fn from(payment: Delivery<Payment>) -> Self {
///         LedgerMessage::Posted(payment)
///     }
/// }
///
/// fn post(LedgerMessage::Posted(payment): LedgerMessage, balance: &mut i64) {
///     *balance += payment.message().amount;
///     payment.ack();
/// }
/// ```
#[must_use = "a delivery that is dropped without a verdict is handled again"]
pub struct Delivery<T> {
    message: T,
    settlement: Settlement,
}

impl<T> Delivery<T> {
    pub(crate) fn new(message: T, run: u64, context: Context, desk: Arc<dyn Desk>) -> Self {
        Delivery {
            message,
            settlement: Settlement {
                desk,
                run,
                context,
                seen: AtomicBool::new(false),
                settled: false,
            },
        }
    }

    /// What the codec made of the entry.
    pub fn message(&self) -> &T {
        self.settlement.see();
        &self.message
    }

    /// What is known of the entry.
    pub fn context(&self) -> &Context {
        self.settlement.see();
        &self.settlement.context
    }

    /// The message, what is known of the entry, and what it is settled with.
    pub fn into_parts(self) -> (T, Context, Settlement) {
        self.settlement.see();
        let context = self.settlement.context.clone();
        (self.message, context, self.settlement)
    }

    /// Done: acknowledged.
    pub fn ack(self) {
        self.settlement.ack();
    }

    /// Again: a copy goes to the end of the stream and the original is acknowledged.
    pub fn retry(self) {
        self.settlement.retry();
    }

    /// The same, not before this delay.
    pub fn retry_after(self, delay: Duration) {
        self.settlement.retry_after(delay);
    }

    /// This attempt has failed: the retry policy decides, and the error's text travels with the copy, as
    /// with a handler that returns it.
    pub fn fail(self, error: impl Into<BoxError>) {
        self.settlement.fail(error);
    }

    /// Not wanted: acknowledged without a copy.
    pub fn reject(self) {
        self.settlement.reject();
    }

    /// To the dead-letter stream with this reason.
    pub fn dead_letter(self, reason: impl Into<String>) {
        self.settlement.dead_letter(reason);
    }

    /// Left as it is, for a reclaim or claiming subscription.
    pub fn leave_pending(self) {
        self.settlement.leave_pending();
    }

    /// Gives this verdict, and returns when the server has stored it. For a delay in the process that is when
    /// the entry waits for it.
    ///
    /// # Errors
    ///
    /// [`NotStored`] when the tree ended before; the entry is then still pending, or the server has the
    /// verdict and nobody heard of it.
    pub async fn settle(self, outcome: Outcome) -> Result<(), NotStored> {
        self.settlement.settle(outcome).await
    }
}

impl<T: fmt::Debug> fmt::Debug for Delivery<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Delivery")
            .field("message", &self.message)
            .field("context", &self.settlement.context)
            .finish()
    }
}

/// The tree ended before the server had confirmed a verdict.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the tree ended before the server had confirmed the verdict")]
pub struct NotStored;

/// What a delivery is settled with, apart from its message: see [`Delivery::into_parts`].
///
/// Dropped without a verdict, its entry gets what [`on_crash`](crate::Draft::on_crash) says.
#[must_use = "a delivery that is dropped without a verdict is handled again"]
pub struct Settlement {
    desk: Arc<dyn Desk>,
    run: u64,
    context: Context,
    seen: AtomicBool,
    settled: bool,
}

impl Settlement {
    fn see(&self) {
        if !self.seen.load(Ordering::Relaxed) && !self.seen.swap(true, Ordering::Relaxed) {
            self.desk.seen(self.run);
        }
    }

    fn give(mut self, verdict: Verdict) {
        self.settled = true;
        self.desk.settle(self.run, &self.context, verdict);
    }

    /// See [`Delivery::ack`].
    pub fn ack(self) {
        self.give(Verdict::Said(Outcome::Ack));
    }

    /// See [`Delivery::retry`].
    pub fn retry(self) {
        self.give(Verdict::Said(Outcome::Retry));
    }

    /// See [`Delivery::retry_after`].
    pub fn retry_after(self, delay: Duration) {
        self.give(Verdict::Said(Outcome::RetryAfter(delay)));
    }

    /// See [`Delivery::fail`].
    pub fn fail(self, error: impl Into<BoxError>) {
        self.give(Verdict::Failed(with_causes(error.into().as_ref())));
    }

    /// See [`Delivery::reject`].
    pub fn reject(self) {
        self.give(Verdict::Said(Outcome::Reject));
    }

    /// See [`Delivery::dead_letter`].
    pub fn dead_letter(self, reason: impl Into<String>) {
        self.give(Verdict::Said(Outcome::DeadLetter(reason.into())));
    }

    /// See [`Delivery::leave_pending`].
    pub fn leave_pending(self) {
        self.give(Verdict::Said(Outcome::LeavePending));
    }

    /// See [`Delivery::settle`].
    ///
    /// # Errors
    ///
    /// As there.
    pub async fn settle(self, outcome: Outcome) -> Result<(), NotStored> {
        let stored = self.desk.stored(self.context.id());
        self.give(Verdict::Said(outcome));
        if stored.await { Ok(()) } else { Err(NotStored) }
    }
}

impl Drop for Settlement {
    fn drop(&mut self) {
        if !self.settled {
            // A panic drops what the actor was at and what lay in its mailbox alike.
            let seen = *self.seen.get_mut();
            self.desk.dropped(self.run, &self.context, seen);
        }
    }
}

impl fmt::Debug for Settlement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Settlement")
            .field("context", &self.context)
            .finish_non_exhaustive()
    }
}
