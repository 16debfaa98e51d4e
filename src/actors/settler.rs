//! Stores the verdicts of one group.
//!
//! Four lines run side by side, each with one batch on its way while the next one fills: plain
//! acknowledgements, copies with their acknowledgement, parked entries whose delay is over, and starts
//! to be counted. None waits for another: with the server's memory full, copies wait and
//! acknowledgements flow. A batch stays in the queue until its answer is there, so a settler that dies
//! has lost nothing, and sending a batch again changes nothing.

use std::ops::{Index, IndexMut};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;
use ractor::{Actor, ActorProcessingErr, ActorRef};
use tokio::sync::{OwnedRwLockReadGuard, watch};

use super::condition::Part;
use super::delays::Delays;
use super::lease::RENEW_EVERY;
use super::tree::{BLOCKED_FOR, GroupState, Order, Tree};
use crate::message::{Destination, EntryId};
use crate::observe::Event;
use crate::server::settle::{self, DeleteAcked, Settled, Started};
use crate::server::{Connection, ServerError};
use crate::state::{CopyJob, ParkedJob, StartAnswer, StartJob};

/// How often a copy may be refused for good before its entry is left pending.
const REFUSALS: u32 = 3;
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(3);

pub(crate) struct Settler;

pub(crate) enum SettlerMessage {
    /// Time for the next round.
    Next,
}

#[cfg(feature = "cluster")]
impl ractor::Message for SettlerMessage {}

/// What stands in a line of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Plain acknowledgements.
    Acks,
    /// Copies, with the acknowledgement of the original.
    Copies,
    /// Parked entries whose delay is over.
    Due,
    /// Starts to be counted.
    Starts,
}

/// What came of a batch.
enum Answer {
    Acks(Vec<EntryId>, Result<u64, ServerError>),
    Copies(Vec<CopyJob>, Result<Vec<Settled>, ServerError>),
    Due(Vec<ParkedJob>, Result<Vec<Settled>, ServerError>),
    Starts(Vec<StartJob>, Result<Vec<Started>, ServerError>),
}

pub(crate) struct SettlerState {
    tree: Arc<Tree>,
    group: Arc<GroupState>,
    /// Each answer with the word that the group is not made again meanwhile, kept until the answer was
    /// taken.
    under_way: FuturesUnordered<BoxFuture<'static, (Answer, OwnedRwLockReadGuard<()>)>>,
    lines: Lines,
    order: watch::Receiver<Order>,
}

/// The four lines.
struct Lines([Line; 4]);

impl Lines {
    fn new() -> Self {
        Lines([Line::new(), Line::new(), Line::new(), Line::new()])
    }

    fn iter(&self) -> impl Iterator<Item = &Line> {
        self.0.iter()
    }
}

impl Index<Kind> for Lines {
    type Output = Line;

    fn index(&self, kind: Kind) -> &Line {
        let Lines([acks, copies, due, starts]) = self;
        match kind {
            Kind::Acks => acks,
            Kind::Copies => copies,
            Kind::Due => due,
            Kind::Starts => starts,
        }
    }
}

impl IndexMut<Kind> for Lines {
    fn index_mut(&mut self, kind: Kind) -> &mut Line {
        let Lines([acks, copies, due, starts]) = self;
        match kind {
            Kind::Acks => acks,
            Kind::Copies => copies,
            Kind::Due => due,
            Kind::Starts => starts,
        }
    }
}

struct Line {
    busy: bool,
    /// After a failure nothing is sent before this.
    not_before: Option<Instant>,
    delays: Delays,
}

impl Line {
    fn new() -> Self {
        Line {
            busy: false,
            not_before: None,
            delays: Delays::new(FIRST_PAUSE, LONGEST_PAUSE),
        }
    }

    fn is_free(&self, now: Instant) -> bool {
        !self.busy && self.not_before.is_none_or(|at| at <= now)
    }

    fn well(&mut self) {
        self.delays.reset();
        self.not_before = None;
    }

    fn wait(&mut self, error: &ServerError) {
        let pause = if error.is_lasting() {
            BLOCKED_FOR
        } else {
            self.delays.next()
        };
        self.not_before = Some(Instant::now() + pause);
    }
}

impl Actor for Settler {
    type Msg = SettlerMessage;
    type State = SettlerState;
    type Arguments = (Arc<Tree>, Arc<GroupState>);

    async fn pre_start(
        &self,
        myself: ActorRef<SettlerMessage>,
        (tree, group): Self::Arguments,
    ) -> Result<SettlerState, ActorProcessingErr> {
        myself.cast(SettlerMessage::Next)?;
        Ok(SettlerState {
            order: tree.order.subscribe(),
            tree,
            group,
            under_way: FuturesUnordered::new(),
            lines: Lines::new(),
        })
    }

    async fn handle(
        &self,
        myself: ActorRef<SettlerMessage>,
        SettlerMessage::Next: SettlerMessage,
        state: &mut SettlerState,
    ) -> Result<(), ActorProcessingErr> {
        let ends = state.order.borrow().stop || state.group.retired.load(Ordering::Acquire);
        if ends && state.under_way.is_empty() {
            myself.stop(None);
            return Ok(());
        }
        state.send();
        if !state.under_way.is_empty() {
            state.group.at("settler.sent");
        }
        let wake = state.wakes_at();
        let group = Arc::clone(&state.group);
        tokio::select! {
            Some((answer, _whole)) = state.under_way.next() => state.take(answer)?,
            () = group.queue.work() => {}
            () = tokio::time::sleep_until(wake.into()) => {}
            _ = state.order.changed() => {}
        }
        myself.cast(SettlerMessage::Next)?;
        Ok(())
    }
}

impl SettlerState {
    /// Sends a batch on every line that is free and has one.
    fn send(&mut self) {
        let now = Instant::now();
        let connection = Arc::clone(&self.tree.settling);
        let group = Arc::clone(&self.group.group);
        let deletes = self.group.deletes();
        let delete = deletes.then(|| self.tree.capabilities.delete_acked());
        let whole = || Arc::clone(&self.group.whole).read_owned();
        // In a group that was just made again, what is in hand and not registered yet is pending for nobody
        // and looks settled. Once readers stop nobody makes it again.
        let missing = self.group.missing.load(Ordering::Acquire);
        let stands_still = missing && !self.order.borrow().stop_reading;
        if self.lines[Kind::Acks].is_free(now) {
            let ids = self.group.queue.take_acks();
            if !ids.is_empty() {
                self.group.at("settler.acks");
                self.lines[Kind::Acks].busy = true;
                let (connection, group) = (Arc::clone(&connection), Arc::clone(&group));
                let whole = whole();
                self.under_way.push(Box::pin(async move {
                    let whole = whole.await;
                    let stored = settle::acknowledge(&connection, &group, &ids, delete).await;
                    (Answer::Acks(ids, stored), whole)
                }));
            }
        }
        // Their scripts ask who owns an entry, and cannot tell two processes of one name apart.
        let copies = self.group.has_its_names(now) && !stands_still;
        if copies && self.lines[Kind::Copies].is_free(now) {
            let jobs = self.group.queue.take_copies();
            if !jobs.is_empty() {
                self.group.at("settler.copies");
                self.lines[Kind::Copies].busy = true;
                let (connection, group) = (Arc::clone(&connection), Arc::clone(&group));
                let whole = whole();
                self.under_way.push(Box::pin(async move {
                    let whole = whole.await;
                    let outcomes = copy(&connection, &group, &jobs, delete).await;
                    (Answer::Copies(jobs, outcomes), whole)
                }));
            }
        }
        if copies && self.lines[Kind::Due].is_free(now) {
            let jobs = self.group.queue.take_due(now);
            if !jobs.is_empty() {
                self.group.at("settler.due");
                self.lines[Kind::Due].busy = true;
                let (connection, group) = (Arc::clone(&connection), Arc::clone(&group));
                let whole = whole();
                self.under_way.push(Box::pin(async move {
                    let parked: Vec<_> = jobs.iter().map(parked).collect();
                    let whole = whole.await;
                    let outcomes = settle::copy_parked(&connection, &group, &parked, delete).await;
                    (Answer::Due(jobs, outcomes), whole)
                }));
            }
        }
        if self.lines[Kind::Starts].is_free(now) && !stands_still {
            let jobs = self.group.queue.take_starts();
            if !jobs.is_empty() {
                self.group.at("settler.starts");
                self.lines[Kind::Starts].busy = true;
                let whole = whole();
                self.under_way.push(Box::pin(async move {
                    let starts: Vec<_> = jobs
                        .iter()
                        .map(|job| (job.id, Arc::clone(&job.owner), job.count))
                        .collect();
                    let whole = whole.await;
                    let outcomes = settle::count_starts(&connection, &group, &starts).await;
                    (Answer::Starts(jobs, outcomes), whole)
                }));
            }
        }
    }

    /// When there is something to do that nobody tells of.
    fn wakes_at(&self) -> Instant {
        let retries = self
            .lines
            .iter()
            .filter(|line| !line.busy)
            .filter_map(|line| line.not_before);
        let due = if self.lines[Kind::Due].busy {
            None
        } else {
            self.group.queue.next_due()
        };
        // Due entries wait for the pause of their line, if it has one.
        let due = due.map(|due| {
            self.lines[Kind::Due]
                .not_before
                .map_or(due, |at| at.max(due))
        });
        let now = Instant::now();
        let due = due.map(|due| match self.group.has_its_names(now) {
            true => due,
            false => due.max(now + RENEW_EVERY),
        });
        let named = (!self.group.has_its_names(now)).then(|| now + RENEW_EVERY);
        retries
            .filter(|at| *at > now)
            .chain(due)
            .chain(named)
            .min()
            .unwrap_or_else(|| now + Duration::from_secs(3600))
    }

    fn take(&mut self, answer: Answer) -> Result<(), ServerError> {
        self.group.at("settler.answered");
        match answer {
            Answer::Acks(ids, result) => {
                self.lines[Kind::Acks].busy = false;
                match result {
                    Ok(_) => {
                        self.stored(ids);
                        self.well(Kind::Acks);
                        self.group.queue.acks_done();
                    }
                    Err(error) => self.trouble(Kind::Acks, &error)?,
                }
            }
            Answer::Copies(jobs, result) => {
                self.lines[Kind::Copies].busy = false;
                match result {
                    Ok(outcomes) => self.copies(jobs, outcomes),
                    // Refused as a whole, before the script ran: a key that this user may not touch, or
                    // one in another slot. The stream itself works, as far as is known: only these
                    // entries have nowhere to go.
                    Err(error) if error.is_lasting() && !is_to_stream(&jobs) => {
                        let outcomes = vec![Settled::Refused(error); jobs.len()];
                        self.copies(jobs, outcomes);
                    }
                    Err(error) => self.trouble(Kind::Copies, &error)?,
                }
            }
            Answer::Due(jobs, result) => {
                self.lines[Kind::Due].busy = false;
                match result {
                    Ok(outcomes) => self.due(jobs, outcomes),
                    Err(error) => self.trouble(Kind::Due, &error)?,
                }
            }
            Answer::Starts(jobs, result) => {
                self.lines[Kind::Starts].busy = false;
                match result {
                    Ok(outcomes) => {
                        self.well(Kind::Starts);
                        for (job, outcome) in jobs.into_iter().zip(outcomes) {
                            // A worker that no longer waits has been replaced.
                            let _ = job.answer.send(match outcome {
                                Started::Done => StartAnswer::Counted,
                                Started::Anothers => StartAnswer::Anothers,
                                Started::Gone => StartAnswer::Gone,
                                Started::NotPending => StartAnswer::Settled,
                            });
                        }
                    }
                    Err(error) => {
                        // Whoever waits for an answer asks again, if it still wants one.
                        drop(jobs);
                        self.trouble(Kind::Starts, &error)?;
                    }
                }
            }
        }
        self.group.at("settler.confirmed");
        Ok(())
    }

    /// The server has stored these. Said before the queue forgets them: an actor that dies in between
    /// has them sent again, and whoever waits for an empty queue finds all of it done.
    fn stored(&self, ids: Vec<EntryId>) {
        self.group
            .acknowledged
            .fetch_add(ids.len() as u64, Ordering::Relaxed);
        self.group.in_flight.settled(ids);
    }

    /// A line works. The group is well when all of them do.
    fn well(&mut self, line: Kind) {
        self.lines[line].well();
        if self.lines.iter().all(|line| line.not_before.is_none()) {
            for subscription in self.group.each_subscription() {
                subscription.condition.well(Part::Settling);
            }
        }
    }

    /// A batch was not stored; it stays where it is and is sent again. Only what cannot be explained is
    /// this actor's own failure.
    fn trouble(&mut self, line: Kind, error: &ServerError) -> Result<(), ServerError> {
        self.lines[line].wait(error);
        for subscription in self.group.each_subscription() {
            subscription.condition.trouble(Part::Settling, error);
        }
        match error {
            ServerError::Malformed(_) => Err(error.clone()),
            ServerError::GroupGone(_) => {
                self.group.notice_missing();
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn copies(&mut self, jobs: Vec<CopyJob>, outcomes: Vec<Settled>) {
        let (mut done, mut again, mut refused) = (Vec::new(), Vec::new(), None);
        for (mut job, outcome) in jobs.into_iter().zip(outcomes) {
            match self.after(job.id, job.subscription, &mut job.refusals, outcome) {
                After::Done => {
                    self.copied(&job);
                    done.push(job.id);
                }
                After::NotOurs => done.push(job.id),
                After::Left => {}
                After::Again { error, copied } => {
                    job.copied |= copied;
                    refused = Some(error);
                    again.push(job);
                }
            }
        }
        self.stored(done);
        self.after_all(Kind::Copies, refused);
        self.group.queue.copies_done(again);
    }

    fn due(&mut self, jobs: Vec<ParkedJob>, outcomes: Vec<Settled>) {
        let (mut done, mut again, mut refused) = (Vec::new(), Vec::new(), None);
        for (mut job, outcome) in jobs.into_iter().zip(outcomes) {
            match self.after(job.id, job.subscription, &mut job.refusals, outcome) {
                After::Done | After::NotOurs => done.push(job.id),
                After::Left => {}
                // Its copy stands: only the original is to go.
                After::Again { copied: true, .. } => self.group.queue.acknowledge([job.id]),
                After::Again { error, .. } => {
                    refused = Some(error);
                    again.push(job);
                }
            }
        }
        self.stored(done);
        self.after_all(Kind::Due, refused);
        let at = self.lines[Kind::Due]
            .not_before
            .unwrap_or_else(Instant::now);
        self.group.queue.due_done(again, at);
    }

    /// What one item's outcome means.
    fn after(
        &self,
        id: EntryId,
        subscription: usize,
        refusals: &mut u32,
        outcome: Settled,
    ) -> After {
        let tell = |event: &dyn Fn(Arc<str>) -> Event| {
            if let Some(subscription) = self.group.subscription(subscription) {
                subscription
                    .announcer
                    .announce(event(subscription.name().clone()));
            }
        };
        match outcome {
            Settled::Done => After::Done,
            Settled::NotPending => After::NotOurs,
            Settled::Gone => {
                if let Some(subscription) = self.group.subscription(subscription) {
                    subscription.tell_of_gone(vec![id]);
                }
                After::NotOurs
            }
            Settled::Anothers => {
                self.group.lose(&[id]);
                After::NotOurs
            }
            Settled::Copied(error) => After::Again {
                error,
                copied: true,
            },
            Settled::Refused(error) if error.is_passing() => After::Again {
                error,
                copied: false,
            },
            Settled::Refused(error) => {
                *refusals += 1;
                if *refusals < REFUSALS {
                    return After::Again {
                        error,
                        copied: false,
                    };
                }
                self.group.in_flight.leave([id]);
                let reason = format!("its copy is refused: {error}");
                tell(&|subscription| Event::LeftPending {
                    subscription,
                    id,
                    reason: reason.clone(),
                });
                After::Left
            }
        }
    }

    /// What the batch as a whole says of its line: where some items were refused, the line waits, longer
    /// each time, whatever the reason.
    fn after_all(&mut self, line: Kind, refused: Option<ServerError>) {
        let Some(error) = refused else {
            return self.well(line);
        };
        let pause = self.lines[line].delays.next();
        self.lines[line].not_before = Some(Instant::now() + pause);
        if error.is_passing() {
            for subscription in self.group.each_subscription() {
                subscription.condition.trouble(Part::Settling, &error);
            }
        }
    }

    fn copied(&self, job: &CopyJob) {
        let Some(subscription) = self.group.subscription(job.subscription) else {
            return;
        };
        match &job.to {
            Destination::Stream => {}
            Destination::Delay { .. } => {
                if let Some(delay_set) = &subscription.delay_set {
                    delay_set.added.notify_one();
                }
            }
            Destination::DeadLetter { .. } => {
                let name = subscription.name().clone();
                subscription.announcer.announce(Event::DeadLettered {
                    subscription: name,
                    id: job.id,
                });
            }
        }
    }
}

fn is_to_stream(jobs: &[CopyJob]) -> bool {
    jobs.iter().any(|job| job.to == Destination::Stream)
}

enum After {
    Done,
    /// Somebody else has settled it, or will.
    NotOurs,
    /// It stays pending, and nobody here tries any more.
    Left,
    Again {
        error: ServerError,
        copied: bool,
    },
}

async fn copy(
    connection: &Connection,
    group: &crate::server::Group,
    jobs: &[CopyJob],
    delete: Option<DeleteAcked>,
) -> Result<Vec<Settled>, ServerError> {
    let Some(first) = jobs.first() else {
        return Ok(Vec::new());
    };
    let copies: Vec<_> = jobs
        .iter()
        .map(|job| settle::Copy {
            id: job.id,
            consumer: Arc::clone(&job.owner),
            fields: job.fields.clone(),
            delay: job.delay,
            attempt: job.attempt,
            copied: job.copied,
        })
        .collect();
    settle::copy_and_acknowledge(connection, group, &first.to, &copies, delete).await
}

fn parked(job: &ParkedJob) -> settle::Parked {
    settle::Parked {
        id: job.id,
        consumer: Arc::clone(&job.owner),
        headers: job.headers.clone(),
    }
}
