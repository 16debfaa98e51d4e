//! Code that is an actor of the application: it is sent deliveries, a few in advance.

use std::sync::Arc;
use std::time::Duration;

use ractor::{ActorCell, ActorProcessingErr};
use tokio::time::{sleep, timeout};

use super::target_gone::TargetGone;
use super::{Next, Post, ReferenceEnded, Running};
use crate::actors::roster::Occupant;
use crate::actors::tree::{Blame, SubscriptionState};
use crate::message::{Context, Received};
use crate::state::{Run, Seat, Taken};
use crate::topology::{Forwards, Target};

/// How long an actor that has dropped a delivery may take to end, if that is what it is about to do.
const DYING: Duration = Duration::from_millis(20);

pub(super) struct Sends {
    target: Box<dyn Target>,
    forwards: Option<Forwards>,
    /// What it was given last was recovered: until that has ended it gets nothing else.
    alone: bool,
    has_ended: bool,
    /// Its signs of life when it dropped something and seemed to live on.
    dropped_at: Option<u64>,
    _seated: Seated,
}

/// On the roster for as long as it lives.
struct Seated {
    subscription: Arc<SubscriptionState>,
    seat: Seat,
    occupant: Occupant,
}

impl Drop for Seated {
    fn drop(&mut self) {
        let roster = &self.subscription.roster;
        roster.leave(self.seat.worker, &self.occupant.cell);
    }
}

impl Sends {
    pub(super) fn new(post: &Post, target: Box<dyn Target>) -> Self {
        let occupant = Occupant {
            cell: target.cell(),
            task: target.task(),
        };
        let roster = &post.subscription.roster;
        roster.enter(post.seat.worker, occupant.clone());
        Sends {
            target,
            forwards: post.subscription.plan.handling.forwards(),
            alone: false,
            has_ended: false,
            dropped_at: None,
            _seated: Seated {
                subscription: Arc::clone(&post.subscription),
                seat: post.seat.clone(),
                occupant,
            },
        }
    }

    /// Returns once the actor has ended and dropped what it had.
    pub(super) async fn ended(&mut self) {
        if !self.has_ended {
            self.target.ended().await;
            self.has_ended = true;
        }
    }

    /// The actor has ended, though nobody asked it to: says what becomes of what it had.
    pub(super) async fn died(&mut self, post: &Post, crashed: bool, error: &str) {
        self.ended().await;
        let lanes = &post.subscription.lanes;
        lanes.take_back(&post.seat);
        // If it was dying then, it had dropped what it died of, and the oldest of the rest is innocent.
        let was_dying = self.dropped_at == Some(lanes.signs_of_life(&post.seat));
        let worker = post.seat.worker;
        let blame = match (crashed, was_dying) {
            (false, _) => Blame::Nothing,
            (true, true) => Blame::Another,
            (true, false) => Blame::Oldest,
        };
        if post.subscription.sort_out_dropped(worker, blame, error) || blame == Blame::Another {
            lanes.blame(&post.seat);
        }
    }

    pub(super) async fn round(
        &mut self,
        post: &mut Post,
        myself: ActorCell,
    ) -> Result<Next, ActorProcessingErr> {
        let subscription = Arc::clone(&post.subscription);
        if self.has_ended {
            return match self.forwards {
                // The word of how it ended comes before any further round.
                None => Err("the actor has ended".into()),
                Some(forwards) => {
                    self.died(post, false, "the actor that it was forwarded to ended")
                        .await;
                    match forwards {
                        Forwards::ToReference => Err(ReferenceEnded.into()),
                        Forwards::ToName => {
                            let gone = TargetGone::new(&subscription, myself);
                            Ok(Next::Anew(Running::TargetGone(gone)))
                        }
                    }
                }
            };
        }
        let lanes = &subscription.lanes;
        if lanes.has_dropped(&post.seat) {
            // An actor that dies drops what it has first. Which of these it died of is for the supervisor to
            // say.
            tokio::select! {
                () = self.ended() => return Ok(Next::Round),
                () = sleep(DYING) => {}
            }
            self.dropped_at = Some(lanes.signs_of_life(&post.seat));
            let worker = post.seat.worker;
            subscription.sort_out_dropped(worker, Blame::Nothing, "dropped without a verdict");
            return Ok(Next::Round);
        }
        match lanes.take(&post.seat) {
            Taken::Closed => {
                if !lanes.is_alone(&post.seat) {
                    self.wait(post).await;
                    return Ok(Next::Round);
                }
                if self.forwards.is_none() {
                    // Messages that the application sent it are handled before it ends.
                    let _ = self.target.cell().drain();
                    if timeout(post.patience(), self.ended()).await.is_err() {
                        self.target.cell().kill();
                    }
                }
                return Ok(Next::End);
            }
            Taken::Nothing => self.wait(post).await,
            Taken::Work => {
                if !self.send(post).await {
                    self.wait(post).await;
                }
            }
        }
        Ok(Next::Round)
    }

    /// Waits until there is something to do, or the actor has ended.
    async fn wait(&mut self, post: &Post) {
        tokio::select! {
            () = self.ended() => {}
            () = post.subscription.lanes.woken(&post.seat) => {}
        }
    }

    /// Sends what there is room for. `false`: there is none.
    async fn send(&mut self, post: &mut Post) -> bool {
        let subscription = Arc::clone(&post.subscription);
        let lanes = &subscription.lanes;
        let Some(next) = lanes.next(&post.seat) else {
            return true;
        };
        if next.is_lost() {
            // Another consumer has it; it gives the verdict.
            post.let_go(&next);
            return true;
        }
        if !post.is_certain() {
            tokio::select! {
                () = self.ended() => {}
                () = post.until_certain() => {}
            }
            return true;
        }
        if (self.alone || !next.fresh) && !lanes.is_alone(&post.seat) {
            return false;
        }
        self.alone = !next.fresh;
        if !next.fresh {
            let may_begin = tokio::select! {
                () = self.ended() => false,
                may_begin = post.turn_of(&next) => may_begin,
            };
            if may_begin && post.count_start(&next).await {
                let counted = |it: &Received| it.id() == next.id();
                if let Some(run) = lanes.give(&post.seat, counted) {
                    self.deliver(post, run);
                }
            }
            return true;
        }
        let most = match self.forwards {
            None => lanes.in_advance(),
            Some(_) => usize::MAX,
        };
        let room = lanes.room(&post.seat, most);
        for _ in 0..room {
            let may = |it: &Received| it.fresh && !it.is_lost();
            let Some(run) = lanes.give(&post.seat, may) else {
                break;
            };
            self.deliver(post, run);
        }
        room > 0
    }

    fn deliver(&self, post: &Post, run: Run) {
        let subscription = &post.subscription;
        subscription.at("handler.started");
        let delivered = self.target.deliver(run.number, Context::new(run.received));
        if let Err(verdict) = delivered {
            subscription
                .lanes
                .finish(&post.seat, run.number, |received| {
                    subscription.settle(received, verdict);
                });
        }
        subscription.at("handler.sent");
    }
}
