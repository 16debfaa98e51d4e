//! Code that is called: handlers, functions, batch handlers.

use std::sync::Arc;
use std::time::Instant;

use tokio::time::timeout;

use super::{HANDLER_OF, Next, Post, address};
use crate::actors::make_way::make_way;
use crate::message::{Context, Received, Verdict};
use crate::state::Taken;
use crate::topology::{Runner, Supply};

pub(super) struct Calls {
    /// `None` once it was told to stop.
    runner: Option<Box<dyn Runner>>,
}

impl Calls {
    pub(super) fn new(runner: Box<dyn Runner>) -> Self {
        Calls {
            runner: Some(runner),
        }
    }

    pub(super) async fn round(&mut self, post: &mut Post) -> Next {
        let subscription = Arc::clone(&post.subscription);
        match subscription.lanes.take(&post.seat) {
            Taken::Closed => {
                if let Some(runner) = self.runner.take() {
                    let _ = timeout(post.patience(), runner.stop()).await;
                }
                return Next::End;
            }
            Taken::Nothing => subscription.lanes.woken(&post.seat).await,
            Taken::Work => self.work(post).await,
        }
        Next::Round
    }

    async fn work(&mut self, post: &mut Post) {
        let lanes = &post.subscription.lanes;
        let Some(next) = lanes.next(&post.seat) else {
            return;
        };
        if next.is_lost() {
            // Another consumer has it; it gives the verdict.
            post.let_go(&next);
            return;
        }
        if !post.is_certain() {
            post.until_certain().await;
            return;
        }
        let may_begin = next.fresh || post.turn_of(&next).await && post.count_start(&next).await;
        if !may_begin {
            return;
        }
        let Some(runner) = self.runner.as_mut() else {
            return;
        };
        let mut share = Share {
            post,
            counted: (!next.fresh).then_some(next),
            started: 0,
        };
        // Others were woken for what waits, and the handler may block this thread.
        make_way();
        let began = Instant::now();
        let of = (address(&post.tree), post.subscription.number);
        HANDLER_OF.scope(of, runner.run(&mut share)).await;
        let started = share.started;
        post.subscription.lanes.measured(started, began.elapsed());
    }
}

/// What one round runs: all fresh entries of the lane up to the first that is not, or one that is not
/// and whose start the server has counted.
struct Share<'a> {
    post: &'a Post,
    counted: Option<Arc<Received>>,
    started: u64,
}

impl Supply for Share<'_> {
    fn next(&mut self) -> Option<(u64, Context)> {
        // One that was counted is the only one of its round.
        let counted = self.counted.take();
        let may = |next: &Received| match &counted {
            Some(counted) => counted.id() == next.id(),
            None => next.fresh && !next.is_lost(),
        };
        if !self.post.is_certain() {
            return None;
        }
        let Post {
            subscription, seat, ..
        } = self.post;
        let run = subscription.lanes.start(seat, may)?;
        self.started += 1;
        subscription.at("handler.started");
        Some((run.number, Context::new(run.received)))
    }

    fn settle(&mut self, run: u64, verdict: Verdict) {
        let Post {
            subscription, seat, ..
        } = self.post;
        subscription.at("handler.returned");
        // Someone else has given the verdict if this worker was replaced meanwhile.
        subscription.lanes.finish(seat, run, |received| {
            subscription.settle(received, verdict);
        });
        subscription.at("handler.settled");
    }
}
