//! Code that is called: handlers, functions, batch handlers.

use std::sync::Arc;
use std::time::Instant;

use tokio::time::timeout;

use super::{HANDLER_OF, Next, Post, address};
use crate::actors::make_way::make_way;
use crate::message::{Context, Outcome, Received, Verdict};
use crate::state::{Run, Taken};
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

impl Share<'_> {
    fn started(&mut self, run: Run) -> (u64, Context) {
        self.started += 1;
        self.post.subscription.at("handler.started");
        (run.number, Context::new(run.received))
    }
}

/// What is started beside or behind others: one whose start has to be counted first is neither.
fn may_follow(next: &Received) -> bool {
    next.fresh && !next.is_lost()
}

impl Supply for Share<'_> {
    fn next(&mut self) -> Option<(u64, Context)> {
        // One that was counted is the only one of its round.
        let counted = self.counted.take();
        let may = |next: &Received| match &counted {
            Some(counted) => counted.id() == next.id(),
            None => may_follow(next),
        };
        if !self.post.is_certain() {
            return None;
        }
        let Post {
            subscription, seat, ..
        } = self.post;
        let run = subscription.lanes.start(seat, may)?;
        Some(self.started(run))
    }

    fn next_batch(&mut self, most: usize) -> Vec<(u64, Context)> {
        if self.counted.is_some() {
            return self.next().into_iter().collect();
        }
        if !self.post.is_certain() {
            return Vec::new();
        }
        let Post {
            subscription, seat, ..
        } = self.post;
        let runs = subscription.lanes.start_batch(seat, most, may_follow);
        runs.into_iter().map(|run| self.started(run)).collect()
    }

    fn settle_and_next(&mut self, run: u64, verdict: Verdict) -> Option<(u64, Context)> {
        let Verdict::Said(Outcome::Ack) = verdict else {
            self.settle(run, verdict);
            return self.next();
        };
        let may = self.post.is_certain().then_some(may_follow);
        let Post {
            subscription, seat, ..
        } = self.post;
        subscription.at("handler.returned");
        let note = |ended: &Received| {
            subscription.acknowledge([ended.id()]);
            subscription.at("handler.settled");
        };
        let next = subscription.lanes.end_and_start(seat, run, note, may);
        subscription.make_way_for_settler();
        next.map(|run| self.started(run))
    }

    fn settle_batch(&mut self, runs: Vec<(u64, Verdict)>) {
        let Post {
            subscription, seat, ..
        } = self.post;
        let (mut acknowledged, mut others) = (Vec::with_capacity(runs.len()), Vec::new());
        for (run, verdict) in runs {
            match verdict {
                Verdict::Said(Outcome::Ack) => acknowledged.push(run),
                verdict => others.push((run, verdict)),
            }
        }
        if !acknowledged.is_empty() {
            subscription.at("handler.returned");
            subscription.lanes.end_batch(seat, &acknowledged, |ended| {
                subscription.acknowledge(ended.iter().map(|it| it.id()));
                subscription.at("handler.settled");
            });
            subscription.make_way_for_settler();
        }
        for (run, verdict) in others {
            self.settle(run, verdict);
        }
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
