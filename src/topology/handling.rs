//! What handles the entries of a subscription: the application's code, with its types erased.

use std::future::Future;
use std::marker::PhantomData;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::Arc;

use crate::message::{BoxError, Codec, CodecError, Context, Outcome};

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

/// One of the workers of a subscription.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Worker {
    pub(crate) index: usize,
    pub(crate) subscription: Arc<str>,
}

impl Worker {
    /// Its number, from 0.
    pub fn index(&self) -> usize {
        self.index
    }

    /// The name of its subscription.
    pub fn subscription(&self) -> &str {
        &self.subscription
    }
}

/// What came of one entry.
#[derive(Debug)]
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

pub(crate) type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// Where a worker takes its entries from and puts the verdicts.
pub(crate) trait Supply: Send {
    /// The next entry to be handled; it is running from now on.
    fn next(&mut self) -> Option<Context>;
    /// What came of the entry that is running.
    fn settle(&mut self, verdict: Verdict);
}

/// Makes the runner of a worker: once when it starts, and once more after each crash.
pub(crate) trait Handling: Send + Sync {
    fn start(&self, worker: Worker) -> BoxFuture<'_, Result<Box<dyn Runner>, BoxError>>;
}

/// The application's code in one worker. A whole supply at a time, so that the price of the erased
/// type is paid per supply and not per entry.
pub(crate) trait Runner: Send {
    fn run<'a>(&'a mut self, supply: &'a mut dyn Supply) -> BoxFuture<'a, ()>;
    fn stop(self: Box<Self>) -> BoxFuture<'static, ()>;
}

fn verdict(result: Result<Outcome, BoxError>) -> Verdict {
    match result {
        Ok(outcome) => Verdict::Said(outcome),
        Err(error) => Verdict::Failed(with_causes(error.as_ref())),
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

/// A codec is the application's code too, and one that panics must not be taken for a poisoned
/// handler: the entry never reached one.
fn decode<T, C: Codec<T>>(codec: &C, context: &Context) -> Result<T, Verdict> {
    match std::panic::catch_unwind(AssertUnwindSafe(|| codec.decode(context.entry()))) {
        Ok(Ok(message)) => Ok(message),
        Ok(Err(error @ CodecError::NoPayload)) => Err(Verdict::Undecodable(error.to_string())),
        Ok(Err(error)) => Err(Verdict::Undecodable(with_causes(&error))),
        Err(payload) => {
            // It may be a value that panics when it is dropped.
            std::mem::forget(payload);
            Err(Verdict::Undecodable("the codec panicked".to_owned()))
        }
    }
}

/// `handle_fn`: a function, no state.
pub(crate) struct Function<T, C, F> {
    inner: Arc<(C, F)>,
    message: PhantomData<fn() -> T>,
}

impl<T, C, F> Function<T, C, F> {
    pub(crate) fn new(codec: C, function: F) -> Self {
        Function {
            inner: Arc::new((codec, function)),
            message: PhantomData,
        }
    }
}

impl<T, C, F, Fut> Handling for Function<T, C, F>
where
    T: Send + 'static,
    C: Codec<T>,
    F: Fn(T, Context) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = Result<Outcome, BoxError>> + Send + 'static,
{
    fn start(&self, _: Worker) -> BoxFuture<'_, Result<Box<dyn Runner>, BoxError>> {
        let runner = Function {
            inner: Arc::clone(&self.inner),
            message: PhantomData,
        };
        Box::pin(async move { Ok(Box::new(runner) as Box<dyn Runner>) })
    }
}

impl<T, C, F, Fut> Runner for Function<T, C, F>
where
    T: Send + 'static,
    C: Codec<T>,
    F: Fn(T, Context) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = Result<Outcome, BoxError>> + Send + 'static,
{
    fn run<'a>(&'a mut self, supply: &'a mut dyn Supply) -> BoxFuture<'a, ()> {
        let (codec, function) = &*self.inner;
        Box::pin(async move {
            while let Some(context) = supply.next() {
                let verdict = match decode(codec, &context) {
                    Ok(message) => verdict(function(message, context).await),
                    Err(undecodable) => undecodable,
                };
                supply.settle(verdict);
            }
        })
    }

    fn stop(self: Box<Self>) -> BoxFuture<'static, ()> {
        Box::pin(async {})
    }
}

/// `handle`: a [`Handler`].
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
    fn start(&self, worker: Worker) -> BoxFuture<'_, Result<Box<dyn Runner>, BoxError>> {
        Box::pin(async move {
            let state = self.inner.1.start(worker).await?;
            Ok(Box::new(StatefulRunner {
                inner: Arc::clone(&self.inner),
                state,
            }) as Box<dyn Runner>)
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
            while let Some(context) = supply.next() {
                let verdict = match decode(codec, &context) {
                    Ok(message) => verdict(handler.handle(message, &context, state).await),
                    Err(undecodable) => undecodable,
                };
                supply.settle(verdict);
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
