//! `handle`: a [`Handler`], with a state per worker.

use std::future::Future;
use std::sync::Arc;

use super::{BoxFuture, Code, Handling, Runner, Supply, WorkPlace, Worker, decode};
use crate::message::{BoxError, Codec, Context, Outcome};

/// The application's code, with a state per worker.
///
/// One value serves all workers of a subscription. Each worker has a [`State`](Handler::State) of its
/// own, made by [`start`](Handler::start) when the worker starts, and again when it was restarted
/// after a panic.
///
/// ```
/// use streamvisor::prelude::*;
///
/// #[derive(serde::Deserialize)]
/// struct Payment { amount: i64 }
///
/// struct Totals;
///
/// impl Handler for Totals {
///     type Message = Payment;
///     type State = i64;
///
///     async fn start(&self, _worker: Worker) -> Result<i64, BoxError> {
///         Ok(0)
///     }
///
///     async fn handle(&self, payment: Payment, _: &Context, total: &mut i64) -> Result<Outcome, BoxError> {
///         *total += payment.amount;
///         Ok(Outcome::Ack)
///     }
/// }
///
/// let subscription = Subscription::tail("payments").group("totals").workers(4).handle(Totals);
/// ```
pub trait Handler: Send + Sync + 'static {
    /// What the codec makes of an entry.
    type Message: Send + 'static;
    /// What one worker keeps between entries.
    type State: Send + 'static;

    /// Makes the state of a worker. An error counts as a crash of the worker: it is started again
    /// after a delay, within the restart budget.
    fn start(&self, worker: Worker) -> impl Future<Output = Result<Self::State, BoxError>> + Send;

    /// Handles one entry. An error is a failed attempt: the retry policy decides, and its text
    /// travels with the copy. A panic ends this worker, which is restarted with a fresh state; the
    /// entry gets what `on_crash` says.
    fn handle(
        &self,
        message: Self::Message,
        context: &Context,
        state: &mut Self::State,
    ) -> impl Future<Output = Result<Outcome, BoxError>> + Send;

    /// Called with the state when a worker stops in good order.
    fn stop(&self, state: Self::State) -> impl Future<Output = ()> + Send {
        async move { drop(state) }
    }
}

/// One handler for several subscriptions.
impl<H: Handler> Handler for Arc<H> {
    type Message = H::Message;
    type State = H::State;

    async fn start(&self, worker: Worker) -> Result<Self::State, BoxError> {
        H::start(self, worker).await
    }

    async fn handle(
        &self,
        message: Self::Message,
        context: &Context,
        state: &mut Self::State,
    ) -> Result<Outcome, BoxError> {
        H::handle(self, message, context, state).await
    }

    async fn stop(&self, state: Self::State) {
        H::stop(self, state).await;
    }
}

pub(crate) struct Stateful<C, H> {
    inner: Arc<(C, H)>,
}

impl<C, H> Stateful<C, H> {
    pub(crate) fn new(codec: C, handler: H) -> Self {
        Stateful {
            inner: Arc::new((codec, handler)),
        }
    }
}

impl<C: Codec<H::Message>, H: Handler> Handling for Stateful<C, H> {
    fn start(&self, place: WorkPlace) -> BoxFuture<'_, Result<Code, BoxError>> {
        Box::pin(async move {
            let state = self.inner.1.start(place.worker).await?;
            Ok(Code::Calls(Box::new(StatefulRunner {
                inner: Arc::clone(&self.inner),
                state,
            })))
        })
    }
}

struct StatefulRunner<C, H: Handler> {
    inner: Arc<(C, H)>,
    state: H::State,
}

impl<C: Codec<H::Message>, H: Handler> Runner for StatefulRunner<C, H> {
    fn run<'a>(&'a mut self, supply: &'a mut dyn Supply) -> BoxFuture<'a, ()> {
        let (codec, handler) = &*self.inner;
        let state = &mut self.state;
        Box::pin(async move {
            let mut next = supply.next();
            while let Some((run, context)) = next {
                let verdict = match decode(codec, &context) {
                    Ok(message) => handler.handle(message, &context, state).await.into(),
                    Err(undecodable) => undecodable,
                };
                next = supply.settle_and_next(run, verdict);
            }
        })
    }

    fn stop(self: Box<Self>) -> BoxFuture<'static, ()> {
        Box::pin(async move {
            let StatefulRunner { inner, state } = *self;
            inner.1.stop(state).await;
        })
    }
}
