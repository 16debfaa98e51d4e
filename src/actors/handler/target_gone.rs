//! An actor that entries are to be forwarded to, and that is not there.

use std::sync::Arc;
use std::time::Duration;

use ractor::{ActorCell, ActorProcessingErr};

use super::{Next, Post, Running};
use crate::actors::delays::Delays;
use crate::actors::tree::SubscriptionState;
use crate::observe::Event;
use crate::state::Reason;

/// How often it is looked for: nobody tells of a name that is taken.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);

/// The subscription stands still for as long as this lives.
pub(super) struct TargetGone {
    subscription: Arc<SubscriptionState>,
    myself: ActorCell,
    delays: Delays,
}

impl TargetGone {
    pub(super) fn new(subscription: &Arc<SubscriptionState>, myself: ActorCell) -> Self {
        if subscription.hold(Reason::TargetGone) {
            subscription
                .condition
                .note("the actor that its entries are forwarded to is not there");
            subscription.announcer.announce(Event::TargetGone {
                subscription: Arc::clone(subscription.name()),
            });
        }
        TargetGone {
            subscription: Arc::clone(subscription),
            myself,
            delays: Delays::new(FIRST_PAUSE, LONGEST_PAUSE),
        }
    }

    pub(super) async fn round(&mut self, post: &mut Post) -> Result<Next, ActorProcessingErr> {
        if self.subscription.lanes.is_closed() {
            return Ok(Next::End);
        }
        match post.start(self.myself.clone()).await? {
            Running::TargetGone(_) => {
                tokio::select! {
                    () = tokio::time::sleep(self.delays.next()) => {}
                    _ = post.order.wait_for(|order| order.stop_reading) => {}
                }
                Ok(Next::Round)
            }
            // It has let the subscription go on.
            found => Ok(Next::Anew(found)),
        }
    }
}
