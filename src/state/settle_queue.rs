//! Verdicts that were given and are not yet stored on the server.

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::sync::{Notify, oneshot};

use super::lock;
use crate::message::{Destination, EntryId};

/// The most ids of one acknowledgement.
const MOST_ACKS: usize = 500;
/// The most items of any other step, and the most bytes of fields of one that copies.
const MOST_ITEMS: usize = 100;
const MOST_BYTES: usize = 1 << 20;

/// The verdicts of one (stream, group) that the server has not confirmed, in three lines that do not
/// wait for each other: plain acknowledgements, steps that make a copy, and starts to be counted.
///
/// Whoever settles takes a batch, sends it, and says what came of it. A batch stays here until then:
/// a settler that dies in between leaves it to its successor, which sends it again. Every step is made
/// so that this changes nothing.
pub(crate) struct SettleQueue {
    inner: Mutex<Inner>,
    /// The settler waits for something to do.
    waits: AtomicBool,
    work: Notify,
    changed: Notify,
}

#[derive(Default)]
struct Inner {
    acks: Vec<EntryId>,
    acks_sent: Vec<EntryId>,
    copies: VecDeque<CopyJob>,
    copies_sent: Vec<CopyJob>,
    starts: Vec<StartJob>,
    /// Entries that wait here for their delay, by the time when they are due.
    parked: BTreeMap<(Instant, EntryId), ParkedJob>,
    due: Vec<ParkedJob>,
    /// Nobody will be here when a delay is over: none is waited for.
    ending: bool,
    /// The subscriptions of which the same is true.
    leaving: HashSet<usize>,
    /// Nothing is started any more.
    starts_closed: bool,
}

/// An entry that is acknowledged once its copy was made.
#[derive(Debug, Clone)]
pub(crate) struct CopyJob {
    pub id: EntryId,
    /// The consumer that owns the entry.
    pub owner: Arc<str>,
    /// The subscription it belongs to.
    pub subscription: usize,
    pub to: Destination,
    /// The finished copy.
    pub fields: Vec<Bytes>,
    pub delay: Duration,
    pub attempt: u64,
    /// The copy was made before; only the acknowledgement is missing.
    pub copied: bool,
    /// How often the server refused it for good.
    pub refusals: u32,
}

impl CopyJob {
    fn bytes(&self) -> usize {
        self.fields.iter().map(Bytes::len).sum()
    }
}

/// An entry whose copy the server makes from the stream itself when its delay is over.
#[derive(Debug, Clone)]
pub(crate) struct ParkedJob {
    pub id: EntryId,
    pub owner: Arc<str>,
    pub subscription: usize,
    /// The headers that the copy gets.
    pub headers: Vec<(Bytes, Bytes)>,
    pub refusals: u32,
}

/// A start that the server has to count before the handler is called.
#[derive(Debug)]
pub(crate) struct StartJob {
    pub id: EntryId,
    pub owner: Arc<str>,
    /// The count that it shall have.
    pub count: u64,
    pub answer: oneshot::Sender<StartAnswer>,
}

/// Whether an entry may be started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StartAnswer {
    /// The start is counted.
    Counted,
    /// Another consumer owns it.
    Anothers,
    /// It was deleted.
    Gone,
    /// Somebody has settled it.
    Settled,
}

impl SettleQueue {
    pub(crate) fn new() -> Self {
        SettleQueue {
            inner: Mutex::default(),
            waits: AtomicBool::new(false),
            work: Notify::new(),
            changed: Notify::new(),
        }
    }

    /// These are done with.
    pub(crate) fn acknowledge(&self, ids: impl IntoIterator<Item = EntryId>) {
        lock(&self.inner).acks.extend(ids);
        self.work.notify_one();
    }

    /// A copy is to be made.
    pub(crate) fn copy(&self, job: CopyJob) {
        lock(&self.inner).copies.push_back(job);
        self.work.notify_one();
    }

    /// An entry waits here until `due`.
    pub(crate) fn park(&self, due: Instant, job: ParkedJob) {
        let mut inner = lock(&self.inner);
        let at_once = inner.ending || inner.leaving.contains(&job.subscription);
        let due = if at_once { Instant::now() } else { due };
        inner.parked.insert((due, job.id), job);
        drop(inner);
        self.work.notify_one();
    }

    /// A start is to be counted; the answer comes through the job.
    pub(crate) fn count_start(&self, job: StartJob) {
        let mut inner = lock(&self.inner);
        if !inner.starts_closed {
            inner.starts.push(job);
            self.work.notify_one();
        }
    }

    /// What was not to be sent may be by now.
    pub(crate) fn look_again(&self) {
        self.work.notify_one();
    }

    /// Returns when there may be something new to send.
    pub(crate) async fn work(&self) {
        self.waits.store(true, Ordering::Release);
        self.work.notified().await;
    }

    /// Whether the settler was waiting and has been woken since the last call.
    pub(crate) fn has_woken(&self) -> bool {
        self.waits.load(Ordering::Relaxed) && self.waits.swap(false, Ordering::AcqRel)
    }

    /// The ids to acknowledge next, those of a batch that nobody confirmed first.
    pub(crate) fn take_acks(&self) -> Vec<EntryId> {
        let mut inner = lock(&self.inner);
        if inner.acks_sent.is_empty() {
            inner.acks_sent = if inner.acks.len() <= MOST_ACKS {
                std::mem::take(&mut inner.acks)
            } else {
                let rest = inner.acks.split_off(MOST_ACKS);
                std::mem::replace(&mut inner.acks, rest)
            };
        }
        inner.acks_sent.clone()
    }

    /// The server has acknowledged the batch that was taken last.
    pub(crate) fn acks_done(&self) {
        lock(&self.inner).acks_sent.clear();
        self.changed.notify_waiters();
    }

    /// The copies to make next, all to one destination; those of a batch that nobody confirmed first.
    pub(crate) fn take_copies(&self) -> Vec<CopyJob> {
        let mut inner = lock(&self.inner);
        let inner = &mut *inner;
        if inner.copies_sent.is_empty() {
            let mut bytes = 0;
            while inner.copies_sent.len() < MOST_ITEMS {
                let Some(next) = inner.copies.front() else {
                    break;
                };
                bytes += next.bytes();
                let fits = match inner.copies_sent.first() {
                    None => true,
                    // One that was refused goes alone, so that it cannot fail the others.
                    Some(first) if first.refusals > 0 || next.refusals > 0 => false,
                    Some(first) => {
                        bytes <= MOST_BYTES && first.to == next.to && first.copied == next.copied
                    }
                };
                if !fits {
                    break;
                }
                inner.copies_sent.extend(inner.copies.pop_front());
            }
        }
        inner.copies_sent.clone()
    }

    /// What came of the batch that was taken last: these have to be sent again, all others are done.
    pub(crate) fn copies_done(&self, again: Vec<CopyJob>) {
        let mut inner = lock(&self.inner);
        inner.copies_sent.clear();
        // Behind what waits, so that one that is refused does not hold up the others.
        inner.copies.extend(again);
        drop(inner);
        self.changed.notify_waiters();
    }

    /// The parked entries whose delay is over, at most a batch of them; they stay here until
    /// [`due_done`](Self::due_done).
    pub(crate) fn take_due(&self, now: Instant) -> Vec<ParkedJob> {
        let mut inner = lock(&self.inner);
        let inner = &mut *inner;
        while inner.due.len() < MOST_ITEMS {
            match inner.parked.first_entry() {
                Some(first) if first.key().0 <= now => inner.due.push(first.remove()),
                _ => break,
            }
        }
        inner.due.clone()
    }

    /// What came of the entries that were due: these are due again at `at`.
    pub(crate) fn due_done(&self, again: Vec<ParkedJob>, at: Instant) {
        let mut inner = lock(&self.inner);
        inner.due.clear();
        for job in again {
            inner.parked.insert((at, job.id), job);
        }
        drop(inner);
        self.changed.notify_waiters();
    }

    /// When the next parked entry is due.
    pub(crate) fn next_due(&self) -> Option<Instant> {
        let inner = lock(&self.inner);
        if inner.due.is_empty() {
            inner.parked.keys().next().map(|(due, _)| *due)
        } else {
            Some(Instant::now())
        }
    }

    /// Everything parked is due now, and so is what is still to come: the process is about to end.
    pub(crate) fn all_due(&self) {
        let mut inner = lock(&self.inner);
        inner.ending = true;
        let now = Instant::now();
        inner.parked = std::mem::take(&mut inner.parked)
            .into_iter()
            .map(|((_, id), job)| ((now, id), job))
            .collect();
        drop(inner);
        self.work.notify_one();
    }

    /// The same for one subscription, which is about to leave.
    pub(crate) fn all_due_of(&self, subscription: usize) {
        let mut inner = lock(&self.inner);
        inner.leaving.insert(subscription);
        let now = Instant::now();
        inner.parked = std::mem::take(&mut inner.parked)
            .into_iter()
            .map(|((due, id), job)| {
                let due = if job.subscription == subscription {
                    now
                } else {
                    due
                };
                ((due, id), job)
            })
            .collect();
        drop(inner);
        self.work.notify_one();
    }

    /// The subscription has left: nothing more of it will come.
    pub(crate) fn left(&self, subscription: usize) {
        lock(&self.inner).leaving.remove(&subscription);
    }

    /// The starts to be counted next. They are not kept: a worker that gets no answer asks again.
    pub(crate) fn take_starts(&self) -> Vec<StartJob> {
        let mut inner = lock(&self.inner);
        let rest = inner.starts.len().min(MOST_ITEMS);
        let later = inner.starts.split_off(rest);
        std::mem::replace(&mut inner.starts, later)
    }

    /// Nothing is started any more: whoever waits for a start to be counted learns that it is not.
    pub(crate) fn close_starts(&self) {
        lock(&self.inner).starts_closed = true;
        self.cancel_starts();
    }

    /// Whoever waits for a start to be counted learns that it is not, and may ask again.
    pub(crate) fn cancel_starts(&self) {
        let cancelled = std::mem::take(&mut lock(&self.inner).starts);
        drop(cancelled);
    }

    /// How many verdicts wait to be stored, those that wait for a delay included.
    pub(crate) fn len(&self) -> usize {
        let inner = lock(&self.inner);
        inner.acks.len()
            + inner.acks_sent.len()
            + inner.copies.len()
            + inner.copies_sent.len()
            + inner.parked.len()
            + inner.due.len()
    }

    /// Returns once every verdict is stored.
    pub(crate) async fn empty(&self) {
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            if self.len() == 0 {
                return;
            }
            changed.await;
        }
    }

    /// The ids of every verdict that is not stored.
    pub(crate) fn unsettled(&self) -> Vec<EntryId> {
        let inner = lock(&self.inner);
        let mut ids: Vec<EntryId> = inner.acks.iter().chain(&inner.acks_sent).copied().collect();
        ids.extend(
            inner
                .copies
                .iter()
                .chain(&inner.copies_sent)
                .map(|job| job.id),
        );
        ids.extend(inner.parked.values().chain(&inner.due).map(|job| job.id));
        ids.sort_unstable();
        ids
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(ms: u64) -> EntryId {
        EntryId::new(ms, 0)
    }

    fn job(ms: u64, to: Destination, bytes: usize) -> CopyJob {
        CopyJob {
            id: id(ms),
            owner: "c".into(),
            subscription: 0,
            to,
            fields: vec![Bytes::new(), vec![0; bytes].into()],
            delay: Duration::ZERO,
            attempt: 1,
            copied: false,
            refusals: 0,
        }
    }

    fn parked(ms: u64) -> ParkedJob {
        ParkedJob {
            id: id(ms),
            owner: "c".into(),
            subscription: 0,
            headers: Vec::new(),
            refusals: 0,
        }
    }

    #[test]
    fn of_a_subscription_that_leaves_all_is_due_and_of_the_others_nothing() {
        let queue = SettleQueue::new();
        let of = |ms, subscription| ParkedJob {
            subscription,
            ..parked(ms)
        };
        let later = Instant::now() + Duration::from_secs(3600);
        queue.park(later, of(1, 0));
        queue.park(later, of(2, 1));
        queue.all_due_of(1);
        queue.park(later, of(3, 1));
        let due = queue.take_due(Instant::now());
        assert_eq!(due.iter().map(|it| it.id.ms).collect::<Vec<_>>(), [2, 3]);
        queue.due_done(Vec::new(), later);
        queue.left(1);
        assert_eq!(queue.next_due(), Some(later));
    }

    fn ids(jobs: &[CopyJob]) -> Vec<u64> {
        jobs.iter().map(|job| job.id.ms).collect()
    }

    #[test]
    fn a_batch_stays_until_it_is_confirmed() {
        let queue = SettleQueue::new();
        queue.acknowledge((1..=700).map(id));
        assert_eq!(queue.take_acks().len(), 500);
        // The settler dies here, and more comes in meanwhile.
        queue.acknowledge([id(800)]);
        assert_eq!(queue.take_acks().last(), Some(&id(500)));
        queue.acks_done();
        assert_eq!(queue.take_acks().len(), 201);
        assert_eq!(queue.len(), 201);
        queue.acks_done();
        assert_eq!(queue.len(), 0);
        assert!(queue.take_acks().is_empty());
    }

    #[test]
    fn one_step_has_one_destination_and_a_bounded_size() {
        let queue = SettleQueue::new();
        let dead = Destination::DeadLetter { stream: "d".into() };
        queue.copy(job(1, Destination::Stream, 10));
        queue.copy(job(2, Destination::Stream, 10));
        queue.copy(job(3, dead.clone(), 10));
        queue.copy(job(4, Destination::Stream, 2 * MOST_BYTES));
        queue.copy(job(5, Destination::Stream, 10));
        for expected in [vec![1, 2], vec![3], vec![4], vec![5]] {
            assert_eq!(ids(&queue.take_copies()), expected);
            assert_eq!(ids(&queue.take_copies()), expected);
            queue.copies_done(Vec::new());
        }
        assert_eq!(queue.len(), 0);
    }

    #[test]
    fn what_is_refused_goes_behind_the_others() {
        let queue = SettleQueue::new();
        (1..=2).for_each(|ms| queue.copy(job(ms, Destination::Stream, 1)));
        let refused = queue.take_copies().swap_remove(0);
        queue.copy(job(3, Destination::Stream, 1));
        queue.copies_done(vec![refused]);
        assert_eq!(ids(&queue.take_copies()), [3, 1]);
    }

    #[test]
    fn parked_entries_are_due_in_their_order_and_stay_until_they_are_done() {
        let queue = SettleQueue::new();
        let now = Instant::now();
        let second = Duration::from_secs(1);
        queue.park(now + 2 * second, parked(1));
        queue.park(now + second, parked(2));
        assert!(queue.take_due(now).is_empty());
        assert_eq!(queue.next_due(), Some(now + second));
        assert_eq!(queue.take_due(now + second)[0].id, id(2));
        assert_eq!(queue.take_due(now + second).len(), 1);
        assert_eq!(queue.len(), 2);
        queue.due_done(vec![parked(2)], now + 3 * second);
        assert_eq!(queue.next_due(), Some(now + 2 * second));
        queue.all_due();
        assert_eq!(queue.take_due(Instant::now()).len(), 2);
        assert_eq!(queue.unsettled(), [id(1), id(2)]);
    }

    #[tokio::test]
    async fn empty_comes_with_the_last_confirmation() {
        let queue = Arc::new(SettleQueue::new());
        queue.acknowledge([id(1)]);
        queue.take_acks();
        let empty = tokio::spawn({
            let queue = Arc::clone(&queue);
            async move { queue.empty().await }
        });
        tokio::task::yield_now().await;
        assert!(!empty.is_finished());
        queue.acks_done();
        empty.await.unwrap();
    }
}
