//! `actors`, `forward_to` and `forward_to_named`: the application's own actors.

use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use ractor::concurrency::JoinHandle;
use ractor::{Actor, ActorCell, ActorRef};

use super::{BoxFuture, Code, Forwards, Handling, MessageType, Target, WorkPlace, Worker, decode};
use crate::message::{BoxError, Codec, Context, Delivery, Desk, Verdict};

/// Actors that are spawned and supervised here, one for each worker.
pub(crate) struct Own<T, C, F> {
    codec: Arc<C>,
    make: F,
    message: PhantomData<fn() -> T>,
}

impl<T, C, F> Own<T, C, F> {
    pub(crate) fn new(codec: C, make: F) -> Self {
        Own {
            codec: Arc::new(codec),
            make,
            message: PhantomData,
        }
    }
}

impl<T, C, A, F> Handling for Own<T, C, F>
where
    T: Send + 'static,
    C: Codec<T>,
    A: Actor,
    A::Msg: From<Delivery<T>>,
    F: Fn(Worker) -> (A, A::Arguments) + Send + Sync + 'static,
{
    fn start(&self, place: WorkPlace) -> BoxFuture<'_, Result<Code, BoxError>> {
        Box::pin(async move {
            let (actor, arguments) = (self.make)(place.worker);
            let (actor, task) = Actor::spawn_linked(None, actor, arguments, place.parent).await?;
            Ok(Code::Actor(Box::new(Sending {
                id: Some(task.id()),
                ends: Ends::Task(Some(task)),
                actor,
                codec: Arc::clone(&self.codec),
                desk: place.desk,
                message: PhantomData::<fn() -> T>,
            })))
        })
    }

    fn messages(&self) -> Option<MessageType> {
        Some(MessageType::of::<A::Msg>())
    }
}

/// An actor that lives elsewhere in the application.
pub(crate) struct ByReference<T, C, M> {
    codec: Arc<C>,
    actor: ActorRef<M>,
    message: PhantomData<fn() -> T>,
}

impl<T, C, M> ByReference<T, C, M> {
    pub(crate) fn new(codec: C, actor: ActorRef<M>) -> Self {
        ByReference {
            codec: Arc::new(codec),
            actor,
            message: PhantomData,
        }
    }
}

impl<T, C, M> Handling for ByReference<T, C, M>
where
    T: Send + 'static,
    C: Codec<T>,
    M: ractor::Message + From<Delivery<T>>,
{
    fn start(&self, place: WorkPlace) -> BoxFuture<'_, Result<Code, BoxError>> {
        let sending = forward::<T, C, M>(&self.codec, self.actor.clone(), place.desk);
        Box::pin(async move { Ok(Code::Actor(Box::new(sending))) })
    }

    fn forwards(&self) -> Option<Forwards> {
        Some(Forwards::ToReference)
    }
}

/// The same, found by its name in ractor's registry, again after it was restarted.
pub(crate) struct ByName<T, C, M> {
    codec: Arc<C>,
    name: String,
    message: PhantomData<fn(T) -> M>,
}

impl<T, C, M> ByName<T, C, M> {
    pub(crate) fn new(codec: C, name: String) -> Self {
        ByName {
            codec: Arc::new(codec),
            name,
            message: PhantomData,
        }
    }
}

impl<T, C, M> Handling for ByName<T, C, M>
where
    T: Send + 'static,
    C: Codec<T>,
    M: ractor::Message + From<Delivery<T>>,
{
    fn start(&self, place: WorkPlace) -> BoxFuture<'_, Result<Code, BoxError>> {
        Box::pin(async move {
            self.check()?;
            let Some(cell) = ractor::registry::where_is(&self.name) else {
                return Ok(Code::TargetGone);
            };
            let sending = forward::<T, C, M>(&self.codec, cell.into(), place.desk);
            Ok(Code::Actor(Box::new(sending)))
        })
    }

    fn forwards(&self) -> Option<Forwards> {
        Some(Forwards::ToName)
    }

    fn check(&self) -> Result<(), String> {
        match ractor::registry::where_is(&self.name) {
            Some(cell) if cell.is_message_type_of::<M>() == Some(false) => Err(format!(
                "the actor named `{}` does not take `{}`, which the entries are forwarded as",
                self.name,
                std::any::type_name::<M>()
            )),
            _ => Ok(()),
        }
    }
}

fn forward<T, C, M>(codec: &Arc<C>, actor: ActorRef<M>, desk: Arc<dyn Desk>) -> Sending<T, C, M> {
    Sending {
        actor,
        id: None,
        ends: Ends::Elsewhere,
        codec: Arc::clone(codec),
        desk,
        message: PhantomData,
    }
}

/// How an actor's end is learned of.
enum Ends {
    /// It was spawned here; `None` once it has ended.
    Task(Option<JoinHandle<()>>),
    Elsewhere,
}

struct Sending<T, C, M> {
    actor: ActorRef<M>,
    id: Option<tokio::task::Id>,
    ends: Ends,
    codec: Arc<C>,
    desk: Arc<dyn Desk>,
    message: PhantomData<fn() -> T>,
}

impl<T, C, M> Target for Sending<T, C, M>
where
    T: Send + 'static,
    C: Codec<T>,
    M: ractor::Message + From<Delivery<T>>,
{
    fn cell(&self) -> ActorCell {
        self.actor.get_cell()
    }

    fn task(&self) -> Option<tokio::task::Id> {
        self.id
    }

    fn deliver(&self, run: u64, context: Context) -> Result<(), Verdict> {
        let message = decode(&*self.codec, &context)?;
        let delivery = Delivery::new(message, run, context, Arc::clone(&self.desk));
        // The application's code too. A panic in it must cost neither this worker nor what its actor is at.
        match catch_unwind(AssertUnwindSafe(|| M::from(delivery))) {
            Ok(message) => {
                // What comes back from an actor that is gone is dropped here, unseen.
                let _ = self.actor.cast(message);
                Ok(())
            }
            Err(payload) => {
                // It may be a value that panics when it is dropped.
                std::mem::forget(payload);
                let text = "making its actor's message of it panicked";
                Err(Verdict::Crashed(text.to_owned()))
            }
        }
    }

    fn ended(&mut self) -> BoxFuture<'_, ()> {
        Box::pin(async move {
            match &mut self.ends {
                Ends::Task(task) => {
                    if let Some(running) = task {
                        // Its failure is its supervisor's news.
                        let _ = running.await;
                        *task = None;
                    }
                }
                Ends::Elsewhere => {
                    let _ = self.actor.get_cell().wait(None).await;
                }
            }
        })
    }
}
