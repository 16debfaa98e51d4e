//! A worker of a subscription: has the application's code handle what waits.
//!
//! One round is one message: the worker takes a share of what waits into its lane, has it handled, and casts
//! the next round to itself; with nothing to do it waits to be woken. Code that is called runs in this
//! actor, which dies of a panic in it. An actor of the application's own is spawned by this one, which ends
//! when that one does. Either way what was started is then in its lane, where the supervisor finds it and gives
//! the verdict; the rest of its share is there too, for its replacement.

mod calls;
mod desk;
mod sends;
mod target_gone;

use std::sync::Arc;
use std::time::{Duration, Instant};

use ractor::{Actor, ActorCell, ActorProcessingErr, ActorRef, SupervisionEvent};
use tokio::sync::{oneshot, watch};

use super::supervisor::{KILLED, LAST_WORD};
use super::tree::{Order, SubscriptionState, Tree};
use super::verdict::is_suspect;
use crate::message::{ALONE_FOR, Received, Turn};
use crate::observe::Event;
use crate::state::{Reason, Seat, StartAnswer, StartJob};
use crate::topology::{Code, WorkPlace, Worker};

use calls::Calls;
use desk::WorkersDesk;
use sends::Sends;
use target_gone::TargetGone;

tokio::task_local! {
    /// The tree whose handler this task runs, by its address, and the number of the subscription.
    static HANDLER_OF: (usize, usize);
}

fn address(tree: &Arc<Tree>) -> usize {
    Arc::as_ptr(tree) as usize
}

/// Whether this code is called by a handler of the tree, or is one of its actors.
pub(crate) fn is_in_handler_of(tree: &Arc<Tree>) -> bool {
    let called = HANDLER_OF.try_with(|(of, _)| *of == address(tree));
    called.unwrap_or(false) || tree.subscriptions().iter().any(|it| is_actor_of(it))
}

/// Whether this code is called by a handler of the subscription, or is one of its actors.
pub(crate) fn is_in_handler_of_subscription(tree: &Arc<Tree>, number: usize) -> bool {
    let called = HANDLER_OF.try_with(|of| *of == (address(tree), number));
    called.unwrap_or(false) || tree.subscription(number).is_some_and(|it| is_actor_of(&it))
}

fn is_actor_of(subscription: &SubscriptionState) -> bool {
    tokio::task::try_id().is_some_and(|task| subscription.roster.is_run_by(task))
}

pub(crate) struct HandlerActor;

pub(crate) enum HandlerMessage {
    /// Time for the next round.
    Next,
}

#[cfg(feature = "cluster")]
impl ractor::Message for HandlerMessage {}

pub(crate) struct HandlerState {
    post: Post,
    code: Option<Running>,
}

/// A worker's place in the tree.
struct Post {
    tree: Arc<Tree>,
    subscription: Arc<SubscriptionState>,
    seat: Seat,
    order: watch::Receiver<Order>,
}

/// The application's code, once it was started.
enum Running {
    Calls(Calls),
    Sends(Sends),
    TargetGone(TargetGone),
}

/// What a worker does next.
enum Next {
    Round,
    /// Another round, with the code started anew.
    Anew(Running),
    /// Nothing more will come, and everything has ended.
    End,
}

impl Actor for HandlerActor {
    type Msg = HandlerMessage;
    type State = HandlerState;
    type Arguments = (Arc<Tree>, Arc<SubscriptionState>, usize);

    async fn pre_start(
        &self,
        myself: ActorRef<HandlerMessage>,
        (tree, subscription, worker): Self::Arguments,
    ) -> Result<HandlerState, ActorProcessingErr> {
        let seat = subscription.lanes.enter(worker).ok_or("no such worker")?;
        myself.cast(HandlerMessage::Next)?;
        let order = tree.order.subscribe();
        let post = Post {
            tree,
            order,
            subscription,
            seat,
        };
        Ok(HandlerState { post, code: None })
    }

    async fn handle(
        &self,
        myself: ActorRef<HandlerMessage>,
        HandlerMessage::Next: HandlerMessage,
        state: &mut HandlerState,
    ) -> Result<(), ActorProcessingErr> {
        let HandlerState { post, code } = state;
        post.subscription.at("handler.between");
        // Before it takes anything, and before it can be woken for anything: until its code was started it is
        // no worker that others could rely on.
        if code.is_none() && !post.subscription.lanes.is_closed() {
            *code = Some(post.start(myself.get_cell()).await?);
        }
        let next = match code {
            None => Next::End,
            Some(Running::Calls(calls)) => calls.round(post).await,
            Some(Running::Sends(sends)) => sends.round(post, myself.get_cell()).await?,
            Some(Running::TargetGone(gone)) => gone.round(post).await?,
        };
        match next {
            Next::Anew(running) => {
                *code = Some(running);
                myself.cast(HandlerMessage::Next)?;
            }
            Next::Round => myself.cast(HandlerMessage::Next)?,
            Next::End => myself.stop(None),
        }
        Ok(())
    }

    /// Its one child, if it has one, is the application's actor.
    async fn handle_supervisor_evt(
        &self,
        _: ActorRef<HandlerMessage>,
        event: SupervisionEvent,
        state: &mut HandlerState,
    ) -> Result<(), ActorProcessingErr> {
        let (error, crashed) = match event {
            SupervisionEvent::ActorFailed(_, error) => (error.to_string(), true),
            SupervisionEvent::ActorTerminated(_, kept, reason) => {
                // There may be deliveries in it.
                drop(kept);
                match reason {
                    Some(reason) if reason == KILLED => (reason, true),
                    Some(reason) => (format!("the actor stopped: {reason}"), false),
                    None => ("the actor stopped".to_owned(), false),
                }
            }
            _ => return Ok(()),
        };
        if let Some(Running::Sends(sends)) = &mut state.code {
            sends.died(&state.post, crashed, &error).await;
        }
        Err(error.into())
    }
}

/// The actor that entries are forwarded to has ended, and no other can take its place.
#[derive(Debug, thiserror::Error)]
#[error("the actor that its entries are forwarded to has ended")]
pub(crate) struct ReferenceEnded;

impl Post {
    fn is_certain(&self) -> bool {
        self.subscription.is_certain(Instant::now())
    }

    /// Waits until what is in hand is known to be ours, or there is news.
    async fn until_certain(&mut self) {
        tokio::select! {
            () = self.subscription.certain() => {}
            () = self.subscription.lanes.woken(&self.seat) => {}
            _ = self.order.wait_for(|order| order.stop) => {}
        }
    }

    /// Has the application make what runs its code.
    async fn start(&mut self, myself: ActorCell) -> Result<Running, ActorProcessingErr> {
        self.subscription.at("handler.start");
        let place = WorkPlace {
            worker: Worker {
                index: self.seat.worker,
                subscription: self.subscription.name().clone(),
            },
            desk: Arc::new(WorkersDesk {
                subscription: Arc::clone(&self.subscription),
                seat: self.seat.clone(),
            }),
            parent: myself.clone(),
        };
        Ok(match self.subscription.plan.handling.start(place).await? {
            Code::Calls(runner) => Running::Calls(Calls::new(runner)),
            Code::Actor(target) => {
                if self.subscription.release(Reason::TargetGone) {
                    let subscription = Arc::clone(self.subscription.name());
                    let back = Event::TargetBack { subscription };
                    self.subscription.announcer.announce(back);
                }
                Running::Sends(Sends::new(self, target))
            }
            Code::TargetGone => Running::TargetGone(TargetGone::new(&self.subscription, myself)),
        })
    }

    /// Waits until the entry at the head of the lane, which did not come fresh, may begin. Whether it may; if
    /// not, there is news.
    async fn turn_of(&mut self, next: &Arc<Received>) -> bool {
        let subscription = &self.subscription;
        if next.has_turn() || !is_suspect(next, &subscription.plan.settings) {
            return true;
        }
        // The other workers need not wait with this one.
        subscription.lanes.share_out_rest(&self.seat);
        let turn = tokio::select! {
            turn = Turn::of_one() => turn,
            () = subscription.lanes.woken(&self.seat) => return false,
            _ = self.order.wait_for(|order| order.stop) => return false,
        };
        next.take_turn(turn);
        // Given back meanwhile, it has no use for it.
        let at_head = |head: Arc<Received>| Arc::ptr_eq(&head, next);
        let goes_on = subscription.lanes.next(&self.seat).is_some_and(at_head);
        if !goes_on {
            next.end_turn();
        }
        goes_on
    }

    /// Has the server count the start of an entry that did not come fresh from it. Whether it may be
    /// started.
    async fn count_start(&mut self, next: &Arc<Received>) -> bool {
        let _counting = self.subscription.lanes.count(&self.seat);
        let (answer, answered) = oneshot::channel();
        let owner = Arc::clone(&next.source.consumer);
        let queue = &self.subscription.group.queue;
        queue.count_start(StartJob {
            id: next.id(),
            owner,
            count: next.delivery_count,
            answer,
        });
        let answer = tokio::select! {
            answer = answered => answer,
            // Nothing is started any more, and the entry is given back as it was.
            _ = self.order.wait_for(|order| order.stop) => return false,
        };
        match answer {
            Ok(StartAnswer::Counted) => {
                next.start_counted();
                if next.has_turn() {
                    let suspect = Arc::downgrade(next);
                    tokio::spawn(async move {
                        tokio::time::sleep(ALONE_FOR).await;
                        if let Some(suspect) = suspect.upgrade() {
                            suspect.end_turn();
                        }
                    });
                }
                self.subscription.at("handler.counted");
                return true;
            }
            Ok(StartAnswer::Anothers) => {
                self.subscription.group.lose(&[next.id()]);
                self.let_go(next);
            }
            Ok(StartAnswer::Gone) => {
                self.subscription.tell_of_gone(vec![next.id()]);
                self.let_go(next);
            }
            Ok(StartAnswer::Settled) => self.let_go(next),
            // The settler crashed in between, or the server is away: asked again.
            Err(_) => {}
        }
        false
    }

    /// How long the application's code may take to end. It would keep its place from whoever comes after it.
    fn patience(&self) -> Duration {
        let hung = self.subscription.plan.settings.handler_timeout;
        hung.max(LAST_WORD)
    }

    /// Takes the entry off the lane without a verdict.
    fn let_go(&self, next: &Arc<Received>) {
        if self.subscription.lanes.discard(&self.seat, next) {
            self.subscription.group.in_flight.release([next.id()]);
        }
    }
}
