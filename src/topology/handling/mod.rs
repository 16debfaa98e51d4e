//! What handles the entries of a subscription: the application's code, with its types erased.
//!
//! It comes in two kinds. What is *called* is given one entry after the other, or several, and returns
//! with a verdict. What is an *actor* is sent deliveries, and says when it is done.

mod actors;
mod batch;
mod function;
mod handler;

use std::any::TypeId;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::Arc;

use ractor::ActorCell;

use crate::message::{BoxError, Codec, CodecError, Context, Desk, Verdict, with_causes};

pub use batch::BatchHandler;
pub use handler::Handler;

pub(super) use actors::{ByName, ByReference, Own};
pub(super) use batch::Batches;
pub(super) use function::Function;
pub(super) use handler::Stateful;

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

pub(crate) type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// Makes what runs in a worker: once when it starts, and once more after each crash.
pub(crate) trait Handling: Send + Sync {
    fn start(&self, place: WorkPlace) -> BoxFuture<'_, Result<Code, BoxError>>;

    /// How many entries one call takes at most.
    fn takes(&self) -> usize {
        1
    }

    /// What the actors of the application take that are spawned here.
    fn messages(&self) -> Option<MessageType> {
        None
    }

    /// Whether entries are sent to an actor that lives elsewhere.
    fn forwards(&self) -> Option<Forwards> {
        None
    }

    /// What is wrong with it already, before anything starts.
    fn check(&self) -> Result<(), String> {
        Ok(())
    }
}

/// How the actor is known that entries are sent to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Forwards {
    ToReference,
    ToName,
}

/// A type, for comparison and for people.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MessageType {
    pub id: TypeId,
    pub name: &'static str,
}

impl MessageType {
    pub(crate) fn of<M: 'static>() -> Self {
        MessageType {
            id: TypeId::of::<M>(),
            name: std::any::type_name::<M>(),
        }
    }
}

/// Where a worker starts.
pub(crate) struct WorkPlace {
    pub worker: Worker,
    /// Where deliveries report to.
    pub desk: Arc<dyn Desk>,
    /// What an actor that is spawned here is linked to.
    pub parent: ActorCell,
}

/// The application's code in one worker.
pub(crate) enum Code {
    Calls(Box<dyn Runner>),
    Actor(Box<dyn Target>),
    /// The actor is not there at the moment.
    TargetGone,
}

/// Code that is called. A whole supply at a time, so that the price of the erased type is paid per supply
/// and not per entry.
pub(crate) trait Runner: Send {
    fn run<'a>(&'a mut self, supply: &'a mut dyn Supply) -> BoxFuture<'a, ()>;
    fn stop(self: Box<Self>) -> BoxFuture<'static, ()>;
}

/// Where a worker takes its entries from and puts the verdicts.
pub(crate) trait Supply: Send {
    /// The next entry to be handled, with the number of its run; it is running from now on.
    fn next(&mut self) -> Option<(u64, Context)>;
    /// What came of this run.
    fn settle(&mut self, run: u64, verdict: Verdict);
    /// What came of this run, and the next entry.
    fn settle_and_next(&mut self, run: u64, verdict: Verdict) -> Option<(u64, Context)>;
    /// The next entries to be handled, this many at most; they are running from now on.
    fn next_batch(&mut self, most: usize) -> Vec<(u64, Context)>;
    /// What came of these runs.
    fn settle_batch(&mut self, runs: Vec<(u64, Verdict)>);
}

/// An actor that is sent deliveries.
pub(crate) trait Target: Send + Sync {
    fn cell(&self) -> ActorCell;
    /// The task that runs it, where that is known.
    fn task(&self) -> Option<tokio::task::Id>;
    /// Makes a message of the entry and sends it. What an actor that is gone cannot take is dropped, and
    /// reports itself.
    ///
    /// # Errors
    ///
    /// No message could be made of it: this is its verdict.
    fn deliver(&self, run: u64, context: Context) -> Result<(), Verdict>;
    /// Returns once the actor has ended, and dropped what lay in its mailbox.
    fn ended(&mut self) -> BoxFuture<'_, ()>;
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
