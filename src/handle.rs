//! What the application holds of a running tree.

mod control;

use std::future::Future;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ractor::{Actor, ActorCell, ActorRef};
use tokio::sync::watch;

use crate::actors::{
    Ended, Failure, Front, Message, Outline, ShutdownReport, StartError, StartedTree,
    SupervisorActor, SupervisorMessage, Tree, assemble, is_in_handler_of, status,
};
use crate::handler_ref::{HandlerRef, HandlersError};
use crate::message::Publisher;
use crate::observe::{Child, Events, Status};
use crate::topology::Topology;

/// Starts trees.
#[derive(Debug)]
pub struct Supervisor;

impl Supervisor {
    /// Starts everything the topology describes and returns once its actors run.
    ///
    /// # Errors
    ///
    /// [`StartError`] names what is wrong with the topology or the server, and what to do about it.
    /// Nothing runs then.
    pub async fn start(topology: Topology) -> Result<SupervisorHandle, StartError> {
        Self::spawn(topology, None).await
    }

    /// The same as a branch of the application's own supervision tree: what is linked to `parent` is an
    /// actor that stands for the tree, [`SupervisorHandle::actor`].
    ///
    /// A tree that fails arrives at the parent as `SupervisionEvent::ActorFailed` with a [`Failure`], and
    /// one that was shut down as `ActorTerminated`; the parent may start the topology, cloned, again.
    /// When the parent ends, by a stop, a kill or a panic, the tree drains by itself. A process that ends
    /// right after its parent has to wait for that: `shutdown().await`, or `wait().await`, first.
    ///
    /// # Errors
    ///
    /// As [`start`](Self::start).
    pub async fn start_linked(
        topology: Topology,
        parent: ActorCell,
    ) -> Result<SupervisorHandle, StartError> {
        Self::spawn(topology, Some(parent)).await
    }

    async fn spawn(
        topology: Topology,
        parent: Option<ActorCell>,
    ) -> Result<SupervisorHandle, StartError> {
        let StartedTree { tree, events } = assemble(&topology).await?;
        let (ended, end) = watch::channel(None);
        let outline = Outline {
            tree: Arc::clone(&tree),
            ended: ended.clone(),
        };
        let (supervisor, running) = match Actor::spawn(None, SupervisorActor, outline).await {
            Ok(spawned) => spawned,
            Err(error) => {
                tree.close_connections().await;
                return Err(StartError::Spawn(error.to_string()));
            }
        };
        let front = match parent {
            None => Ok(None),
            Some(parent) => Actor::spawn_linked(None, Front, supervisor.clone(), parent)
                .await
                .map(|(front, _)| Some(front)),
        };
        // However the supervisor ends, whoever waits for it learns of it and no connection stays open.
        tokio::spawn({
            let front = front.as_ref().ok().cloned().flatten();
            let end = EndOfTree {
                tree: Arc::clone(&tree),
                ended: ended.clone(),
            };
            async move {
                let _ = running.await;
                end.tree.order.send_modify(|order| {
                    order.stop_reading = true;
                    order.stop = true;
                });
                end.tree.abort_connections();
                drop(end);
                if let Some(front) = front {
                    let failure = ended.borrow().as_ref().and_then(|end| end.failure.clone());
                    // A front that has ended did so first.
                    let _ = front.cast(SupervisorMessage(Message::Ended(failure)));
                }
            }
        });
        // Without a front the parent is ending, and the tree has been told to drain.
        let front = front.map_err(|error| {
            let _ = supervisor.cast(SupervisorMessage(Message::Shutdown));
            StartError::Spawn(error.to_string())
        })?;
        let actor = front.unwrap_or_else(|| supervisor.clone());
        let first_events = Mutex::new(Some(events));
        Ok(SupervisorHandle {
            held: Arc::new(Held {
                actor,
                supervisor,
                tree,
                first_events,
                end,
            }),
        })
    }
}

/// Tells everybody that the tree has ended. Dropped with its runtime if that goes first: then nothing of the
/// tree runs any more, and those who wait elsewhere would wait for ever.
struct EndOfTree {
    tree: Arc<Tree>,
    ended: watch::Sender<Option<Ended>>,
}

impl Drop for EndOfTree {
    fn drop(&mut self) {
        self.tree.close();
        self.tree.announcer.close();
        self.ended.send_if_modified(|end| {
            let unknown = end.is_none();
            // It tells the end itself, unless it was killed or panicked, or its runtime is gone.
            end.get_or_insert_with(|| Ended {
                report: ShutdownReport::default(),
                failure: Some(Failure {
                    child: Child::Supervisor,
                    restarts: 0,
                    within: Duration::ZERO,
                    error: "it was killed, or it panicked, before the tree had stopped".to_owned(),
                }),
            });
            unknown
        });
    }
}

/// A running tree, as the application holds it. Cheap to clone; when the last clone is dropped the tree
/// is drained.
#[derive(Clone)]
pub struct SupervisorHandle {
    held: Arc<Held>,
}

struct Held {
    /// What stands for the tree in the application's own: the front, or the supervisor itself.
    actor: ActorRef<SupervisorMessage>,
    supervisor: ActorRef<SupervisorMessage>,
    tree: Arc<Tree>,
    first_events: Mutex<Option<Events>>,
    end: watch::Receiver<Option<Ended>>,
}

impl Drop for Held {
    fn drop(&mut self) {
        // It has ended already, or it drains by itself from here.
        let _ = self.supervisor.cast(SupervisorMessage(Message::Shutdown));
    }
}

impl std::fmt::Debug for SupervisorHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SupervisorHandle")
            .field("actor", &self.held.actor.get_id())
            .finish_non_exhaustive()
    }
}

/// Why a shutdown did not come to its report.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ShutdownError {
    /// It was asked for by a handler, which would have waited for its own end. The tree goes on.
    #[error(
        "a handler cannot wait for the shutdown of its own tree, which waits for the handler; spawn a task that does"
    )]
    FromHandler,
    /// The tree has ended by itself before: one of its actors kept failing.
    #[error(transparent)]
    Failed(#[from] Failure),
    /// `run_until` only: somebody else has shut the tree down before the future was done.
    #[error("the tree was shut down before the future that it was to run until was done")]
    Ended(ShutdownReport),
}

/// The same as `Display`: a `main` that returns the error shows its text.
impl std::fmt::Debug for ShutdownError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Display::fmt(self, f)
    }
}

impl SupervisorHandle {
    /// The root of the tree: an ordinary actor, to be monitored or linked like any other.
    pub fn actor(&self) -> ActorRef<SupervisorMessage> {
        self.held.actor.clone()
    }

    /// Adds entries to streams of the same server.
    pub fn publisher(&self) -> Publisher {
        self.held.tree.publisher.clone()
    }

    /// What happens in the tree from now on, to be waited for, as a stream, or sent to an actor. The first to ask hears what has happened since the start.
    pub fn events(&self) -> Events {
        let first = self
            .held
            .first_events
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        first.unwrap_or_else(|| self.held.tree.announcer.listen())
    }

    /// The application's own actors that work for this subscription, for messages other than deliveries: see
    /// [`Draft::actors`](crate::Draft::actors). `M` is the message type of those actors.
    ///
    /// # Errors
    ///
    /// [`HandlersError`] when there is no such subscription, when its entries are not handled by actors that
    /// are spawned here, or when those take other messages.
    pub fn handlers<M: ractor::Message>(&self, name: &str) -> Result<HandlerRef<M>, HandlersError> {
        match self.held.tree.named(name) {
            Some(subscription) => HandlerRef::new(subscription),
            None => Err(HandlersError::NoSuchSubscription {
                name: name.to_owned(),
                known: {
                    let known = self.held.tree.subscriptions();
                    known.iter().map(|it| it.name().clone()).collect()
                },
            }),
        }
    }

    /// How the tree is doing. What only the server knows is asked of it, for a second at the most.
    pub async fn status(&self) -> Status {
        status(&self.held.tree).await
    }

    /// Ends the tree in order: nothing new is read, what was not started is given back, running handlers
    /// finish, every verdict is stored. Returns what was done, within `Topology::shutdown_timeout`.
    ///
    /// # Errors
    ///
    /// [`ShutdownError::FromHandler`] when called by a handler of this tree, and
    /// [`ShutdownError::Failed`] when the tree has ended by itself.
    pub async fn shutdown(&self) -> Result<ShutdownReport, ShutdownError> {
        if is_in_handler_of(&self.held.tree) {
            return Err(ShutdownError::FromHandler);
        }
        // An actor that is gone has ended; the report is there.
        let _ = self
            .held
            .supervisor
            .cast(SupervisorMessage(Message::Shutdown));
        Ok(self.wait().await?)
    }

    /// Waits for the end of the tree, whoever brings it about.
    ///
    /// # Errors
    ///
    /// [`Failure`] when the tree ended because one of its actors kept failing.
    pub async fn wait(&self) -> Result<ShutdownReport, Failure> {
        let mut end = self.held.end.clone();
        let ended = match end.wait_for(Option::is_some).await {
            Ok(ended) => ended.clone(),
            // Its sender goes only after it has told the end.
            Err(_) => None,
        };
        match ended {
            Some(Ended {
                failure: Some(failure),
                ..
            }) => Err(failure),
            Some(Ended { report, .. }) => Ok(report),
            None => Ok(ShutdownReport::default()),
        }
    }

    /// Runs until this future is done, for instance `tokio::signal::ctrl_c()`, then shuts down.
    ///
    /// # Errors
    ///
    /// As [`shutdown`](Self::shutdown). A tree that ends before the future is done is not waited with:
    /// [`ShutdownError::Failed`] if it failed, [`ShutdownError::Ended`] if somebody else shut it down.
    pub async fn run_until<F: Future>(
        &self,
        until: F,
    ) -> Result<(F::Output, ShutdownReport), ShutdownError> {
        let output = tokio::select! {
            output = until => output,
            ended = self.wait() => return Err(ShutdownError::Ended(ended?)),
        };
        Ok((output, self.shutdown().await?))
    }
}
