//! Messages from the application to its actors that work here.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ractor::concurrency::oneshot;
use ractor::{ActorRef, MessagingErr, RpcReplyPort};
use tokio::sync::watch;
use tokio::time::timeout_at;

use crate::actors::{Occupant, Seats, SubscriptionState, there_are};
use crate::topology::MessageType;

/// The application's own actors that work for one subscription, by worker, across their restarts. Made by
/// [`SupervisorHandle::handlers`](crate::SupervisorHandle::handlers).
///
/// A message sent is handled at most once: an actor that crashes takes its mailbox with it, but for the
/// deliveries in it. A call says whether it was answered.
///
/// ```no_run
/// use std::time::Duration;
/// use ractor::RpcReplyPort;
/// use streamvisor::prelude::*;
///
/// # struct Payment;
/// enum LedgerMessage {
///     Posted(Delivery<Payment>),
///     Freeze(u64),
///     Balance(u64, RpcReplyPort<i64>),
/// }
/// # #[cfg(feature = "cluster")]
/// # impl ractor::Message for LedgerMessage {}
///
/// # async fn example(supervisor: SupervisorHandle) -> Result<(), BoxError> {
/// let ledger: HandlerRef<LedgerMessage> = supervisor.handlers("ledger")?;
/// // The worker that gets the payments of acct-7.
/// ledger.send_keyed("acct-7", LedgerMessage::Freeze(7))?;
/// let balance = ledger
///     .call_keyed("acct-7", |reply| LedgerMessage::Balance(7, reply), Duration::from_secs(1))
///     .await?;
/// # Ok(())
/// # }
/// ```
pub struct HandlerRef<M> {
    subscription: Arc<SubscriptionState>,
    message: PhantomData<fn(M)>,
}

impl<M> Clone for HandlerRef<M> {
    fn clone(&self) -> Self {
        HandlerRef {
            subscription: Arc::clone(&self.subscription),
            message: PhantomData,
        }
    }
}

impl<M> fmt::Debug for HandlerRef<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HandlerRef")
            .field("subscription", self.subscription.name())
            .finish_non_exhaustive()
    }
}

/// Why there is no [`HandlerRef`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HandlersError {
    /// No subscription has this name.
    #[error("there is no subscription `{name}`; {}", there_are(.known))]
    NoSuchSubscription {
        /// The name that was asked for.
        name: String,
        /// Those that there are.
        known: Vec<Arc<str>>,
    },
    /// Its entries are not handled by actors that are spawned here.
    #[error(
        "the entries of `{name}` are not handled by actors that are spawned here: use `.actors(…)`, or send to the actor that they are forwarded to"
    )]
    NoActors {
        /// The subscription's name.
        name: Arc<str>,
    },
    /// Its actors take messages of another type.
    #[error("the actors of `{name}` take `{takes}`, not `{asked}`")]
    OtherMessage {
        /// The subscription's name.
        name: Arc<str>,
        /// What they take.
        takes: &'static str,
        /// What was asked for.
        asked: &'static str,
    },
}

/// Why a message could not be sent.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Undelivered {
    /// The worker's actor is just being started again.
    #[error("worker {worker} is being restarted")]
    Restarting {
        /// The worker.
        worker: usize,
    },
    /// There are fewer workers.
    #[error("there is no worker {worker}: they are numbered from 0, and there are {workers}")]
    NoSuchWorker {
        /// The worker that was asked for.
        worker: usize,
        /// How many there are.
        workers: usize,
    },
    /// No key belongs to a worker.
    #[error("the subscription is not `ordered_by` a header, so no key belongs to a worker of it")]
    NotOrdered,
    /// The tree or the subscription has ended.
    #[error("the subscription has ended")]
    Ended,
}

/// A message that could not be sent, with the reason.
pub struct SendError<M> {
    /// The message.
    pub message: M,
    /// Why it was not sent.
    pub reason: Undelivered,
}

impl<M> fmt::Debug for SendError<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SendError")
            .field("reason", &self.reason)
            .finish_non_exhaustive()
    }
}

impl<M> fmt::Display for SendError<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the message was not sent: {}", self.reason)
    }
}

impl<M> std::error::Error for SendError<M> {}

/// Why a call was not answered.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CallError {
    /// The message was never handed over.
    #[error("the call was not made: {0}")]
    NotMade(#[from] Undelivered),
    /// The actor ended, or let go of the reply port, before it answered. It may have done what it was asked.
    #[error("worker {worker} ended before it answered, or dropped the reply port")]
    NoReply {
        /// The worker.
        worker: usize,
    },
    /// No answer came in time. The message may still be handled.
    #[error("worker {worker} did not answer within {within:?}")]
    TimedOut {
        /// The worker.
        worker: usize,
        /// The time it had.
        within: Duration,
    },
    /// An actor that calls itself would wait for itself.
    #[error("worker {worker} was called by itself, and would wait for itself")]
    Itself {
        /// The worker.
        worker: usize,
    },
}

impl<M: ractor::Message> HandlerRef<M> {
    pub(crate) fn new(subscription: Arc<SubscriptionState>) -> Result<Self, HandlersError> {
        let name = || Arc::clone(subscription.name());
        let asked = MessageType::of::<M>();
        match subscription.plan.handling.messages() {
            None => Err(HandlersError::NoActors { name: name() }),
            Some(takes) if takes != asked => Err(HandlersError::OtherMessage {
                name: name(),
                takes: takes.name,
                asked: asked.name,
            }),
            Some(_) => Ok(HandlerRef {
                subscription,
                message: PhantomData,
            }),
        }
    }

    /// How many workers there are. They are numbered from 0.
    pub fn workers(&self) -> usize {
        self.subscription.lanes.workers()
    }

    /// Sends a message to this worker.
    ///
    /// # Errors
    ///
    /// [`SendError`] gives the message back, in particular when the worker is just being restarted.
    pub fn send(&self, worker: usize, message: M) -> Result<(), SendError<M>> {
        let workers = self.workers();
        if worker >= workers {
            let reason = Undelivered::NoSuchWorker { worker, workers };
            return Err(SendError { message, reason });
        }
        self.send_to(worker, message)
    }

    /// Sends a message to the worker that handles the entries with this value of the header that the
    /// subscription is [`ordered_by`](crate::Draft::ordered_by).
    ///
    /// # Errors
    ///
    /// As [`send`](Self::send), and when the subscription has no such order.
    pub fn send_keyed(&self, key: impl AsRef<[u8]>, message: M) -> Result<(), SendError<M>> {
        match self.subscription.lanes.worker_of(key.as_ref()) {
            Some(worker) => self.send_to(worker, message),
            None => Err(SendError {
                message,
                reason: Undelivered::NotOrdered,
            }),
        }
    }

    /// Sends a message to every worker. Returns the workers that it could not be sent to, as they were
    /// just being restarted, or had ended.
    pub fn broadcast(&self, mut make: impl FnMut() -> M) -> Vec<usize> {
        (0..self.workers())
            .filter(|&worker| self.send_to(worker, make()).is_err())
            .collect()
    }

    /// Sends a message with a reply port to this worker, and waits for the answer. A worker that is just being
    /// restarted is waited for.
    ///
    /// # Errors
    ///
    /// [`CallError`] says whether the message was handed over.
    pub async fn call<R: Send + 'static>(
        &self,
        worker: usize,
        make: impl FnOnce(RpcReplyPort<R>) -> M,
        within: Duration,
    ) -> Result<R, CallError> {
        let workers = self.workers();
        if worker >= workers {
            return Err(Undelivered::NoSuchWorker { worker, workers }.into());
        }
        self.call_to(worker, make, within).await
    }

    /// The same to the worker that handles the entries with this value of the header.
    ///
    /// # Errors
    ///
    /// As [`call`](Self::call), and when the subscription has no such order.
    pub async fn call_keyed<R: Send + 'static>(
        &self,
        key: impl AsRef<[u8]>,
        make: impl FnOnce(RpcReplyPort<R>) -> M,
        within: Duration,
    ) -> Result<R, CallError> {
        let worker = self.subscription.lanes.worker_of(key.as_ref());
        let worker = worker.ok_or(Undelivered::NotOrdered)?;
        self.call_to(worker, make, within).await
    }

    fn send_to(&self, worker: usize, message: M) -> Result<(), SendError<M>> {
        let seats = self.subscription.roster.watch();
        let (occupant, closed) = {
            let seats = seats.borrow();
            (seats.get(worker).cloned(), seats.closed)
        };
        let message = match occupant {
            None => message,
            Some(occupant) => match cast(&occupant, message) {
                None => return Ok(()),
                Some(message) => message,
            },
        };
        let reason = match closed {
            true => Undelivered::Ended,
            false => Undelivered::Restarting { worker },
        };
        Err(SendError { message, reason })
    }

    async fn call_to<R: Send + 'static>(
        &self,
        worker: usize,
        make: impl FnOnce(RpcReplyPort<R>) -> M,
        within: Duration,
    ) -> Result<R, CallError> {
        // Beyond any clock is as good as for ever.
        let far = Duration::from_secs(u64::from(u32::MAX));
        let deadline = (Instant::now() + within.min(far)).into();
        let (port, reply) = oneshot();
        let message = make(port.into());
        let mut seats = self.subscription.roster.watch();
        match timeout_at(deadline, hand_over(&mut seats, worker, message)).await {
            Ok(handed_over) => handed_over?,
            Err(_) => return Err(Undelivered::Restarting { worker }.into()),
        }
        match timeout_at(deadline, reply).await {
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(_)) => Err(CallError::NoReply { worker }),
            Err(_) => Err(CallError::TimedOut { worker, within }),
        }
    }
}

/// Sends the message to whoever works there, as soon as somebody does.
async fn hand_over<M: ractor::Message>(
    seats: &mut watch::Receiver<Seats>,
    worker: usize,
    mut message: M,
) -> Result<(), CallError> {
    loop {
        let (occupant, closed) = {
            let seats = seats.borrow_and_update();
            (seats.get(worker).cloned(), seats.closed)
        };
        if closed {
            return Err(Undelivered::Ended.into());
        }
        if let Some(occupant) = occupant {
            if occupant.task.is_some() && occupant.task == tokio::task::try_id() {
                return Err(CallError::Itself { worker });
            }
            message = match cast(&occupant, message) {
                None => return Ok(()),
                Some(message) => message,
            };
        }
        // Its end is followed by its leaving, and that by its replacement.
        if seats.changed().await.is_err() {
            return Err(Undelivered::Ended.into());
        }
    }
}

/// Gives the message back if the actor takes none any more.
fn cast<M: ractor::Message>(occupant: &Occupant, message: M) -> Option<M> {
    match ActorRef::<M>::from(occupant.cell.clone()).cast(message) {
        Err(MessagingErr::SendErr(message)) => Some(message),
        _ => None,
    }
}
