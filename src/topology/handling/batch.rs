//! `handle_batch`: a [`BatchHandler`], several entries in one call.

use std::future::Future;
use std::sync::Arc;

use super::{BoxFuture, Code, Handling, Runner, Supply, WorkPlace, Worker, decode};
use crate::message::{BoxError, Codec, Context, Outcome, Verdict};

/// The application's code for several entries at a time, with a state per worker: for a database that
/// takes them in bulk.
///
/// One call has up to [`batch`](crate::Draft::batch) entries: what is there, without waiting for more.
/// An entry that was recovered comes alone, so that one that kills the process is not blamed on its
/// neighbours.
///
/// ```
/// use streamvisor::prelude::*;
///
/// #[derive(serde::Deserialize)]
/// struct Reading { sensor: u32, value: f64 }
///
/// struct Store;
///
/// impl BatchHandler for Store {
///     type Message = Reading;
///     type State = Vec<(u32, f64)>;
///
///     async fn start(&self, _worker: Worker) -> Result<Self::State, BoxError> {
///         Ok(Vec::new())
///     }
///
///     async fn handle_batch(
///         &self,
///         batch: Vec<(Reading, Context)>,
///         rows: &mut Self::State,
///     ) -> Result<Vec<Outcome>, BoxError> {
///         rows.extend(batch.iter().map(|(reading, _)| (reading.sensor, reading.value)));
///         Ok(vec![Outcome::Ack; batch.len()])
///     }
/// }
///
/// let subscription = Subscription::tail("readings").group("store").batch(500).handle_batch(Store);
/// ```
pub trait BatchHandler: Send + Sync + 'static {
    /// What the codec makes of an entry.
    type Message: Send + 'static;
    /// What one worker keeps between batches.
    type State: Send + 'static;

    /// Makes the state of a worker, as [`Handler::start`](super::Handler::start) does.
    fn start(&self, worker: Worker) -> impl Future<Output = Result<Self::State, BoxError>> + Send;

    /// Handles a batch, which is never empty: a verdict for each entry, in the same order. An error is a
    /// failed attempt of every entry in it, and so is a wrong number of verdicts. A panic ends this worker,
    /// and every entry of the batch gets what `on_crash` says.
    fn handle_batch(
        &self,
        batch: Vec<(Self::Message, Context)>,
        state: &mut Self::State,
    ) -> impl Future<Output = Result<Vec<Outcome>, BoxError>> + Send;

    /// Called with the state when a worker stops in good order.
    fn stop(&self, state: Self::State) -> impl Future<Output = ()> + Send {
        async move { drop(state) }
    }
}

/// One handler for several subscriptions.
impl<H: BatchHandler> BatchHandler for Arc<H> {
    type Message = H::Message;
    type State = H::State;

    async fn start(&self, worker: Worker) -> Result<Self::State, BoxError> {
        H::start(self, worker).await
    }

    async fn handle_batch(
        &self,
        batch: Vec<(Self::Message, Context)>,
        state: &mut Self::State,
    ) -> Result<Vec<Outcome>, BoxError> {
        H::handle_batch(self, batch, state).await
    }

    async fn stop(&self, state: Self::State) {
        H::stop(self, state).await;
    }
}

pub(crate) struct Batches<C, H> {
    inner: Arc<(C, H)>,
    most: usize,
}

impl<C, H> Batches<C, H> {
    pub(crate) fn new(codec: C, handler: H, most: usize) -> Self {
        Batches {
            inner: Arc::new((codec, handler)),
            most,
        }
    }
}

impl<C: Codec<H::Message>, H: BatchHandler> Handling for Batches<C, H> {
    fn start(&self, place: WorkPlace) -> BoxFuture<'_, Result<Code, BoxError>> {
        Box::pin(async move {
            let state = self.inner.1.start(place.worker).await?;
            Ok(Code::Calls(Box::new(BatchRunner {
                inner: Arc::clone(&self.inner),
                most: self.most,
                state,
            })))
        })
    }

    fn takes(&self) -> usize {
        self.most
    }
}

struct BatchRunner<C, H: BatchHandler> {
    inner: Arc<(C, H)>,
    most: usize,
    state: H::State,
}

impl<C: Codec<H::Message>, H: BatchHandler> BatchRunner<C, H> {
    async fn one_batch(&mut self, supply: &mut dyn Supply) -> bool {
        let (codec, handler) = &*self.inner;
        let taken = supply.next_batch(self.most);
        if taken.is_empty() {
            return false;
        }
        let mut runs = Vec::with_capacity(taken.len());
        let mut batch = Vec::with_capacity(taken.len());
        for (run, context) in taken {
            match decode(codec, &context) {
                Ok(message) => {
                    runs.push(run);
                    batch.push((message, context));
                }
                Err(undecodable) => supply.settle(run, undecodable),
            }
        }
        if batch.is_empty() {
            return true;
        }
        let verdicts = match handler.handle_batch(batch, &mut self.state).await {
            Ok(outcomes) if outcomes.len() == runs.len() => {
                outcomes.into_iter().map(Verdict::Said).collect::<Vec<_>>()
            }
            Ok(outcomes) => {
                let (given, entries) = (outcomes.len(), runs.len());
                let text = format!("the batch handler gave {given} verdicts for {entries} entries");
                vec![Verdict::Failed(text); runs.len()]
            }
            Err(error) => vec![Verdict::from(Err(error)); runs.len()],
        };
        supply.settle_batch(runs.into_iter().zip(verdicts).collect());
        true
    }
}

impl<C: Codec<H::Message>, H: BatchHandler> Runner for BatchRunner<C, H> {
    fn run<'a>(&'a mut self, supply: &'a mut dyn Supply) -> BoxFuture<'a, ()> {
        Box::pin(async move { while self.one_batch(supply).await {} })
    }

    fn stop(self: Box<Self>) -> BoxFuture<'static, ()> {
        Box::pin(async move {
            let BatchRunner { inner, state, .. } = *self;
            inner.1.stop(state).await;
        })
    }
}
