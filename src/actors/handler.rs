//! A worker of a subscription: runs the application's code, one entry at a time.
//!
//! One round is one message: the worker takes a share of what waits into its lane, runs it, and casts
//! the next round to itself; with nothing to do it waits to be woken. It dies of a panic in the
//! application's code. What it was running is then in its lane, where the supervisor finds it and
//! gives the verdict; the rest of its share is there too, for its replacement.

use std::sync::Arc;
use std::time::Instant;

use ractor::{Actor, ActorProcessingErr, ActorRef};
use tokio::sync::{oneshot, watch};

use super::tree::{Order, SubscriptionState, Tree};
use crate::message::{Context, Received};
use crate::observe::Event;
use crate::state::{StartAnswer, StartJob, Taken};
use crate::topology::{Runner, Supply, Verdict, Worker};

tokio::task_local! {
    /// The tree whose handler this task runs, by its address, and the number of the subscription.
    static HANDLER_OF: (usize, usize);
}

fn address(tree: &Arc<Tree>) -> usize {
    Arc::as_ptr(tree) as usize
}

/// Whether this code is called by a handler of the tree.
pub(crate) fn is_in_handler_of(tree: &Arc<Tree>) -> bool {
    HANDLER_OF
        .try_with(|(of, _)| *of == address(tree))
        .unwrap_or(false)
}

/// Whether this code is called by a handler of the subscription.
pub(crate) fn is_in_handler_of_subscription(tree: &Arc<Tree>, number: usize) -> bool {
    HANDLER_OF
        .try_with(|of| *of == (address(tree), number))
        .unwrap_or(false)
}

pub(crate) struct HandlerActor;

pub(crate) enum HandlerMessage {
    /// Time for the next round.
    Next,
}

#[cfg(feature = "cluster")]
impl ractor::Message for HandlerMessage {}

pub(crate) struct HandlerState {
    tree: Arc<Tree>,
    subscription: Arc<SubscriptionState>,
    worker: usize,
    incarnation: u64,
    /// `None` until the application's `start` has made it.
    runner: Option<Box<dyn Runner>>,
    order: watch::Receiver<Order>,
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
        let incarnation = subscription.lanes.enter(worker);
        myself.cast(HandlerMessage::Next)?;
        let order = tree.order.subscribe();
        Ok(HandlerState {
            tree,
            order,
            subscription,
            worker,
            incarnation,
            runner: None,
        })
    }

    async fn handle(
        &self,
        myself: ActorRef<HandlerMessage>,
        HandlerMessage::Next: HandlerMessage,
        state: &mut HandlerState,
    ) -> Result<(), ActorProcessingErr> {
        let subscription = Arc::clone(&state.subscription);
        subscription.at("handler.between");
        // Before it takes anything, and before it can be woken for anything: until it has a runner it is
        // no worker that others could rely on.
        if state.runner.is_none() && !subscription.lanes.is_closed() {
            state.start().await?;
        }
        match subscription.lanes.take(state.worker) {
            Taken::Closed => {
                if let Some(runner) = state.runner.take() {
                    runner.stop().await;
                }
                myself.stop(None);
                return Ok(());
            }
            Taken::Nothing => subscription.lanes.woken(state.worker).await,
            Taken::Work => state.work().await?,
        }
        myself.cast(HandlerMessage::Next)?;
        Ok(())
    }
}

impl HandlerState {
    /// Has the application make what runs its code.
    async fn start(&mut self) -> Result<(), ActorProcessingErr> {
        let worker = Worker {
            index: self.worker,
            subscription: self.subscription.name().clone(),
        };
        self.subscription.at("handler.start");
        self.runner = Some(self.subscription.plan.handling.start(worker).await?);
        Ok(())
    }

    async fn work(&mut self) -> Result<(), ActorProcessingErr> {
        let Some(next) = self.subscription.lanes.next(self.worker) else {
            return Ok(());
        };
        if next.is_lost() {
            // Another consumer has it; it gives the verdict.
            self.let_go(&next);
            return Ok(());
        }
        if !next.fresh && !self.count_start(&next).await {
            return Ok(());
        }
        if !next.fresh {
            self.subscription.at("handler.counted");
        }
        let mut share = Share {
            subscription: &self.subscription,
            worker: self.worker,
            incarnation: self.incarnation,
            counted: (!next.fresh).then_some(next),
            started: 0,
        };
        let Some(runner) = self.runner.as_mut() else {
            return Ok(());
        };
        let began = Instant::now();
        let of = (address(&self.tree), self.subscription.number);
        HANDLER_OF.scope(of, runner.run(&mut share)).await;
        let started = share.started;
        self.subscription.lanes.measured(started, began.elapsed());
        Ok(())
    }

    /// Has the server count the start of an entry that did not come fresh from it. Whether it may be
    /// started.
    async fn count_start(&mut self, next: &Arc<Received>) -> bool {
        let _counting = self.subscription.lanes.count(self.worker);
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
            Ok(StartAnswer::Counted) => true,
            Ok(StartAnswer::Anothers) => {
                self.subscription.group.lose(&[next.id()]);
                self.let_go(next);
                false
            }
            Ok(StartAnswer::Gone) => {
                self.subscription.announcer.announce(Event::Gone {
                    subscription: Arc::clone(self.subscription.name()),
                    ids: vec![next.id()],
                });
                self.let_go(next);
                false
            }
            Ok(StartAnswer::Settled) => {
                self.let_go(next);
                false
            }
            // The settler crashed in between, or the server is away: asked again.
            Err(_) => false,
        }
    }

    /// Takes the entry off the lane without a verdict.
    fn let_go(&self, next: &Arc<Received>) {
        if self.subscription.lanes.discard(self.worker, next) {
            self.subscription.group.in_flight.release([next.id()]);
        }
    }
}

/// What one round runs: all fresh entries of the lane up to the first that is not, or one that is not
/// and whose start the server has counted.
struct Share<'a> {
    subscription: &'a SubscriptionState,
    worker: usize,
    incarnation: u64,
    counted: Option<Arc<Received>>,
    started: u64,
}

impl Supply for Share<'_> {
    fn next(&mut self) -> Option<Context> {
        let counted = self.counted.take();
        let may = |next: &Received| match &counted {
            Some(counted) => counted.id() == next.id(),
            None => next.fresh && !next.is_lost(),
        };
        let next = self
            .subscription
            .lanes
            .start(self.worker, self.incarnation, may)?;
        self.started += 1;
        self.subscription.at("handler.started");
        Some(Context::new(next))
    }

    fn settle(&mut self, verdict: Verdict) {
        self.subscription.at("handler.returned");
        // Someone else has given the verdict if this worker was replaced meanwhile.
        let subscription = self.subscription;
        subscription
            .lanes
            .finish(self.worker, self.incarnation, |received| {
                subscription.settle(received, verdict);
            });
        self.subscription.at("handler.settled");
    }
}
