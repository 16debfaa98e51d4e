//! Who handles what next: the entries of a subscription that wait, and those that run.

use std::collections::VecDeque;
use std::hash::{BuildHasher, Hasher};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use hashbrown::DefaultHashBuilder;
use tokio::sync::Notify;

use super::lock;
use crate::message::Received;

/// How much work a worker takes at a time.
const SHARE: Duration = Duration::from_millis(1);
/// The most entries that it takes at a time.
const LARGEST_SHARE: usize = 256;

/// The entries of a subscription on their way to its workers.
///
/// A worker *takes*: nobody sends it anything. What was read waits in one buffer for whichever worker
/// is free first, or, under `ordered_by`, in the lane of the worker that its key belongs to. A worker
/// moves about a millisecond of work into its lane at a time and starts one entry after the other from
/// there. Lanes outlive workers: a worker that crashed leaves the rest of its share, and what it was
/// running, where its replacement and the supervisor find them.
pub(crate) struct Lanes {
    buffer: Mutex<Buffer>,
    lanes: Vec<Lane>,
    /// Entries with the same value of this field go to the same lane.
    ordered_by: Option<Bytes>,
    hasher: DefaultHashBuilder,
    /// Nothing is started any more.
    closed: AtomicBool,
    /// Nothing is started for the time being.
    held: AtomicBool,
    /// Nanoseconds that an entry takes, smoothed; 0: not known yet.
    cost: AtomicU64,
    /// Entries that wait, in the buffer and in lanes.
    waiting: AtomicUsize,
    /// Told when a running entry has ended, or a start is counted.
    quiet: Notify,
    /// Told when workers begin to run out of entries.
    hungry: Notify,
}

#[derive(Default)]
struct Buffer {
    waiting: VecDeque<Arc<Received>>,
    /// Workers that found nothing to do, the latest last.
    idle: Vec<usize>,
}

#[derive(Default)]
struct Lane {
    inner: Mutex<LaneInner>,
    /// What it ran last has ended, and its verdict is being given.
    settling: AtomicBool,
    /// The start of the entry at its head is being counted on the server.
    counting: AtomicBool,
    wake: Notify,
}

#[derive(Default)]
struct LaneInner {
    queue: VecDeque<Arc<Received>>,
    running: Option<Arc<Received>>,
    /// Counts what was started, so that whoever watches can tell one running entry from the next.
    started: u64,
    /// Counts the workers that had this lane; only the latest may start and finish anything.
    incarnation: u64,
    /// Crashes since the last entry that was handled without one.
    crashes_in_a_row: u32,
    idle: bool,
}

/// See [`Lanes::count`].
pub(crate) struct Counting<'a> {
    lanes: &'a Lanes,
    worker: usize,
}

impl Drop for Counting<'_> {
    fn drop(&mut self) {
        if let Some(lane) = self.lanes.lanes.get(self.worker) {
            lane.counting.store(false, Ordering::Release);
        }
        if self.lanes.is_barred() {
            self.lanes.quiet.notify_waiters();
        }
    }
}

/// What a worker is to do.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Taken {
    /// Entries wait in its lane.
    Work,
    /// Nothing is there; wait to be woken.
    Nothing,
    /// Nothing will be started any more.
    Closed,
}

/// What a lane runs, for whoever watches over it.
#[derive(Clone)]
pub(crate) struct Running {
    pub received: Arc<Received>,
    /// Differs between any two runs of a lane.
    pub run: u64,
}

impl Lane {
    fn is_running(&self) -> bool {
        lock(&self.inner).running.is_some() || self.settling.load(Ordering::Acquire)
    }

    fn end_run(&self, inner: &mut LaneInner) -> Option<Arc<Received>> {
        let ended = inner.running.take();
        self.settling.store(ended.is_some(), Ordering::Release);
        ended
    }
}

impl Lanes {
    pub(crate) fn new(workers: usize, ordered_by: Option<Bytes>) -> Self {
        Lanes {
            buffer: Mutex::default(),
            lanes: (0..workers).map(|_| Lane::default()).collect(),
            ordered_by,
            hasher: DefaultHashBuilder::default(),
            closed: AtomicBool::new(false),
            held: AtomicBool::new(false),
            cost: AtomicU64::new(0),
            waiting: AtomicUsize::new(0),
            quiet: Notify::new(),
            hungry: Notify::new(),
        }
    }

    pub(crate) fn workers(&self) -> usize {
        self.lanes.len()
    }

    /// How many entries wait for a worker.
    pub(crate) fn waiting(&self) -> usize {
        self.waiting.load(Ordering::Relaxed)
    }

    /// Puts what was read behind what waits already, and wakes a worker for it.
    pub(crate) fn push(&self, received: Vec<Arc<Received>>) {
        if received.is_empty() {
            return;
        }
        self.waiting.fetch_add(received.len(), Ordering::Relaxed);
        match &self.ordered_by {
            None => {
                let mut buffer = lock(&self.buffer);
                buffer.waiting.extend(received);
                self.wake_one(&mut buffer);
            }
            Some(header) => self.push_ordered(header, received),
        }
    }

    fn push_ordered(&self, header: &Bytes, received: Vec<Arc<Received>>) {
        let mut shares: Vec<Vec<Arc<Received>>> = vec![Vec::new(); self.lanes.len()];
        for received in received {
            let mut hasher = self.hasher.build_hasher();
            // A missing header is a value like any other, and not the empty one.
            match received.entry.field(header) {
                Some(key) => hasher.write(key),
                None => hasher.write_u8(0),
            }
            let lane = (hasher.finish() % self.lanes.len() as u64) as usize;
            if let Some(share) = shares.get_mut(lane) {
                share.push(received);
            }
        }
        for (lane, share) in self.lanes.iter().zip(shares) {
            if !share.is_empty() {
                let mut inner = lock(&lane.inner);
                inner.queue.extend(share);
                if std::mem::take(&mut inner.idle) {
                    lane.wake.notify_one();
                }
            }
        }
    }

    /// Wakes the worker that fell idle last: its memory is the warmest.
    fn wake_one(&self, buffer: &mut Buffer) {
        if let Some(lane) = buffer.idle.pop().and_then(|index| self.lanes.get(index)) {
            lane.wake.notify_one();
        }
    }

    /// A new worker takes the lane over. What a predecessor that could not be ended still tries to do
    /// with it has no effect from now on.
    pub(crate) fn enter(&self, worker: usize) -> u64 {
        let Some(lane) = self.lanes.get(worker) else {
            return 0;
        };
        let mut inner = lock(&lane.inner);
        inner.incarnation += 1;
        inner.incarnation
    }

    /// The worker's actor has died. Returns how many times in a row that happened over an entry.
    pub(crate) fn crashed(&self, worker: usize) -> u32 {
        let Some(lane) = self.lanes.get(worker) else {
            return 0;
        };
        let mut inner = lock(&lane.inner);
        inner.crashes_in_a_row += 1;
        inner.crashes_in_a_row
    }

    /// Called by a worker that has nothing left: moves a share of what waits into its lane.
    pub(crate) fn take(&self, worker: usize) -> Taken {
        let Some(lane) = self.lanes.get(worker) else {
            return Taken::Closed;
        };
        if self.closed.load(Ordering::Acquire) {
            return Taken::Closed;
        }
        if self.held.load(Ordering::Acquire) {
            return Taken::Nothing;
        }
        if self.ordered_by.is_some() {
            let mut inner = lock(&lane.inner);
            inner.idle = inner.queue.is_empty();
            return if inner.idle {
                Taken::Nothing
            } else {
                Taken::Work
            };
        }
        if !lock(&lane.inner).queue.is_empty() {
            return Taken::Work;
        }
        let mut buffer = lock(&self.buffer);
        if buffer.waiting.is_empty() {
            if !buffer.idle.contains(&worker) {
                buffer.idle.push(worker);
            }
            self.hungry.notify_one();
            return Taken::Nothing;
        }
        buffer.idle.retain(|&idle| idle != worker);
        let share = self.share(buffer.waiting.len());
        let share = buffer.waiting.drain(..share);
        let mut inner = lock(&lane.inner);
        inner.queue.extend(share);
        drop(inner);
        if buffer.waiting.len() <= self.lanes.len() {
            self.hungry.notify_one();
        }
        // Each worker that has found work wakes the next as long as there is more, so that a burst
        // wakes no more of them than it needs.
        if !buffer.waiting.is_empty() {
            self.wake_one(&mut buffer);
        }
        Taken::Work
    }

    /// Whether nothing is started any more.
    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Whether a worker has run out of entries, or is about to.
    pub(crate) fn is_hungry(&self) -> bool {
        if self.ordered_by.is_some() {
            self.lanes.iter().any(|lane| lock(&lane.inner).idle)
        } else {
            lock(&self.buffer).waiting.len() <= self.lanes.len()
        }
    }

    /// Returns when workers began to run out of entries since the last call.
    pub(crate) async fn hungry(&self) {
        self.hungry.notified().await;
    }

    /// About a millisecond of work: fast handlers do not come back for every entry, and a slow one
    /// holds up nothing that another worker could do.
    fn share(&self, waiting: usize) -> usize {
        let cost = self.cost.load(Ordering::Relaxed);
        // As long as nothing is known of the cost, one.
        let affordable = (SHARE.as_nanos() as u64)
            .checked_div(cost)
            .unwrap_or(1)
            .max(1);
        waiting
            .min(LARGEST_SHARE)
            .min(usize::try_from(affordable).unwrap_or(LARGEST_SHARE))
    }

    /// A worker has handled this many entries in this time.
    pub(crate) fn measured(&self, entries: u64, took: Duration) {
        if entries == 0 {
            return;
        }
        let each = (u64::try_from(took.as_nanos()).unwrap_or(u64::MAX) / entries).max(1);
        let before = self.cost.load(Ordering::Relaxed);
        let smoothed = if before == 0 {
            each
        } else {
            (before / 4 * 3 + each / 4).max(1)
        };
        self.cost.store(smoothed, Ordering::Relaxed);
    }

    /// Returns when the worker has been woken since it last fell idle.
    pub(crate) async fn woken(&self, worker: usize) {
        match self.lanes.get(worker) {
            Some(lane) => lane.wake.notified().await,
            None => std::future::pending().await,
        }
    }

    /// Starts the next entry of the worker's lane if `may` accepts it: from now on it runs.
    pub(crate) fn start(
        &self,
        worker: usize,
        incarnation: u64,
        may: impl FnOnce(&Received) -> bool,
    ) -> Option<Arc<Received>> {
        let lane = self.lanes.get(worker)?;
        let mut inner = lock(&lane.inner);
        // Looked at under the lock under which the rest is given back: what `close` has not seen here
        // is not started.
        let barred = self.is_barred() || inner.incarnation != incarnation;
        if barred || !inner.queue.front().is_some_and(|next| may(next)) {
            return None;
        }
        let next = inner.queue.pop_front()?;
        inner.running = Some(Arc::clone(&next));
        inner.started += 1;
        drop(inner);
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        Some(next)
    }

    /// The entry that waits at the head of the worker's lane.
    pub(crate) fn next(&self, worker: usize) -> Option<Arc<Received>> {
        lock(&self.lanes.get(worker)?.inner).queue.front().cloned()
    }

    /// Takes the entry at the head of the worker's lane away without starting it, if it still is that
    /// one.
    pub(crate) fn discard(&self, worker: usize, unwanted: &Arc<Received>) -> bool {
        let Some(lane) = self.lanes.get(worker) else {
            return false;
        };
        let mut inner = lock(&lane.inner);
        if !inner
            .queue
            .front()
            .is_some_and(|next| Arc::ptr_eq(next, unwanted))
        {
            return false;
        }
        inner.queue.pop_front();
        drop(inner);
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        true
    }

    /// What this worker was running has ended, and not by a crash: `settle` gets it. Nobody does if the
    /// worker was replaced meanwhile.
    pub(crate) fn finish(
        &self,
        worker: usize,
        incarnation: u64,
        settle: impl FnOnce(&Arc<Received>),
    ) -> bool {
        let ended = self.lanes.get(worker).and_then(|lane| {
            let mut inner = lock(&lane.inner);
            if inner.incarnation != incarnation {
                return None;
            }
            inner.crashes_in_a_row = 0;
            lane.end_run(&mut inner)
        });
        self.settle(worker, ended, settle)
    }

    /// What the lane was running has ended with its worker: `settle` gets it.
    pub(crate) fn cut_off(&self, worker: usize, settle: impl FnOnce(&Arc<Received>)) -> bool {
        let ended = self.lanes.get(worker).and_then(|lane| {
            let mut inner = lock(&lane.inner);
            lane.end_run(&mut inner)
        });
        self.settle(worker, ended, settle)
    }

    /// Until its verdict is given the run counts as going on, so that whoever waits for quiet finds the
    /// verdict where verdicts are.
    fn settle(
        &self,
        worker: usize,
        ended: Option<Arc<Received>>,
        settle: impl FnOnce(&Arc<Received>),
    ) -> bool {
        let Some(ended) = ended else { return false };
        settle(&ended);
        if let Some(lane) = self.lanes.get(worker) {
            lane.settling.store(false, Ordering::Release);
        }
        if self.closed.load(Ordering::Acquire) {
            self.quiet.notify_waiters();
        }
        true
    }

    /// The worker has the start of the entry at the head of its lane counted. Until what this returns is
    /// dropped the entry cannot be withdrawn: given back first, it would be counted afterwards.
    pub(crate) fn count(&self, worker: usize) -> Counting<'_> {
        if let Some(lane) = self.lanes.get(worker) {
            lane.counting.store(true, Ordering::Release);
        }
        Counting {
            lanes: self,
            worker,
        }
    }

    /// Puts what waits in a lane, behind a run that takes its time or a worker that has died, before all
    /// workers again. Under `ordered_by` it has to wait.
    pub(crate) fn share_out(&self, worker: usize) {
        let Some(lane) = self.lanes.get(worker).filter(|_| self.ordered_by.is_none()) else {
            return;
        };
        let mut buffer = lock(&self.buffer);
        let mut inner = lock(&lane.inner);
        if inner.queue.is_empty() {
            return;
        }
        for received in inner.queue.drain(..).rev() {
            buffer.waiting.push_front(received);
        }
        drop(inner);
        self.wake_one(&mut buffer);
    }

    /// What the worker runs now.
    pub(crate) fn running(&self, worker: usize) -> Option<Running> {
        let inner = lock(&self.lanes.get(worker)?.inner);
        inner.running.clone().map(|received| Running {
            received,
            run: inner.started,
        })
    }

    /// Everything that runs now.
    pub(crate) fn all_running(&self) -> Vec<Arc<Received>> {
        (0..self.lanes.len())
            .filter_map(|worker| self.running(worker))
            .map(|it| it.received)
            .collect()
    }

    /// Returns once nothing runs; only after [`close`](Self::close).
    pub(crate) async fn quiet(&self) {
        self.until_no(Lane::is_running).await;
    }

    /// Returns once no start is being counted, so that everything that waits can be withdrawn; only
    /// after [`close`](Self::close) or [`hold`](Self::hold).
    pub(crate) async fn counted(&self) {
        self.until_no(|lane| lane.counting.load(Ordering::Acquire))
            .await;
    }

    async fn until_no(&self, lane: impl Fn(&Lane) -> bool) {
        loop {
            let told = self.quiet.notified();
            tokio::pin!(told);
            told.as_mut().enable();
            if !self.lanes.iter().any(&lane) {
                return;
            }
            told.await;
        }
    }

    /// Starts nothing more and wakes every worker to see it. Returns what waited, in id order: it
    /// was not started and will not be.
    pub(crate) fn close(&self) -> Vec<Arc<Received>> {
        self.closed.store(true, Ordering::Release);
        let waiting = self.withdraw();
        for lane in &self.lanes {
            lane.wake.notify_one();
        }
        waiting
    }

    /// Starts nothing until [`release`](Self::release): what has not been started when this returns is
    /// not started.
    pub(crate) fn hold(&self) {
        self.held.store(true, Ordering::Release);
        for lane in &self.lanes {
            // A start that looked a moment earlier holds this, and is over then.
            drop(lock(&lane.inner));
        }
    }

    /// Lets the workers go on.
    pub(crate) fn release(&self) {
        self.held.store(false, Ordering::Release);
        for lane in &self.lanes {
            lane.wake.notify_one();
        }
    }

    fn is_barred(&self) -> bool {
        self.closed.load(Ordering::Acquire) || self.held.load(Ordering::Acquire)
    }

    /// Takes back what waits, in id order, but for entries whose start is being counted.
    pub(crate) fn withdraw(&self) -> Vec<Arc<Received>> {
        let mut waiting: Vec<Arc<Received>> = Vec::new();
        // The buffer stays locked meanwhile, or a share could pass by on its way into a lane.
        let mut buffer = lock(&self.buffer);
        waiting.extend(buffer.waiting.drain(..));
        for lane in &self.lanes {
            let counted = usize::from(lane.counting.load(Ordering::Acquire));
            let queue = &mut lock(&lane.inner).queue;
            waiting.extend(queue.drain(counted.min(queue.len())..));
        }
        drop(buffer);
        self.waiting.fetch_sub(waiting.len(), Ordering::Relaxed);
        waiting.sort_by_key(|received| received.id());
        waiting
    }

    /// A worker is gone for a while: wakes another one in its place, so that a wake-up that it had
    /// been given is not lost.
    pub(crate) fn hand_on(&self) {
        let mut buffer = lock(&self.buffer);
        if !buffer.waiting.is_empty() {
            self.wake_one(&mut buffer);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::test_source as source;
    use crate::message::{Entry, EntryId};

    fn received(ms: u64, key: &'static str) -> Arc<Received> {
        let entry = Entry::new(EntryId::new(ms, 0), [("h:key", key)]);
        Arc::new(Received::fresh(entry, &source(0)))
    }

    fn batch(ids: std::ops::RangeInclusive<u64>) -> Vec<Arc<Received>> {
        ids.map(|ms| received(ms, "k")).collect()
    }

    fn start(lanes: &Lanes, worker: usize) -> Option<u64> {
        lanes
            .start(worker, 0, |_| true)
            .map(|received| received.id().ms)
    }

    #[test]
    fn a_slow_handler_takes_one_entry_at_a_time_and_a_fast_one_a_share() {
        let lanes = Lanes::new(2, None);
        lanes.push(batch(1..=100));
        assert_eq!(lanes.take(0), Taken::Work);
        assert_eq!((start(&lanes, 0), start(&lanes, 0)), (Some(1), None));
        lanes.measured(10, Duration::from_micros(1000));
        assert_eq!(lanes.take(1), Taken::Work);
        let started: Vec<_> = std::iter::from_fn(|| start(&lanes, 1)).collect();
        assert_eq!(started, (2..=11).collect::<Vec<_>>());
        assert_eq!(lanes.waiting(), 89);
    }

    #[test]
    fn a_worker_that_crashed_leaves_its_share_to_its_replacement_in_order() {
        let lanes = Lanes::new(1, None);
        lanes.measured(1, Duration::from_nanos(1));
        lanes.push(batch(1..=3));
        lanes.take(0);
        assert_eq!(start(&lanes, 0), Some(1));
        // The worker dies here; the supervisor gives the verdict on what it ran.
        assert!(lanes.cut_off(0, |received| assert_eq!(received.id().ms, 1)));
        assert!(!lanes.cut_off(0, |_| ()));
        assert_eq!((lanes.crashed(0), lanes.crashed(0)), (1, 2));
        lanes.push(batch(4..=4));
        assert_eq!(lanes.take(0), Taken::Work);
        let started: Vec<_> = std::iter::from_fn(|| start(&lanes, 0)).collect();
        assert_eq!(started, [2, 3]);
    }

    #[test]
    fn what_waits_behind_a_long_run_can_be_had_by_others() {
        let lanes = Lanes::new(2, None);
        lanes.measured(1, Duration::from_nanos(1));
        lanes.push(batch(1..=4));
        lanes.take(0);
        assert_eq!(start(&lanes, 0), Some(1));
        lanes.push(batch(5..=5));
        lanes.share_out(0);
        assert_eq!(lanes.take(1), Taken::Work);
        let started: Vec<_> = std::iter::from_fn(|| start(&lanes, 1)).collect();
        assert_eq!(started, [2, 3, 4, 5]);
        assert_eq!(lanes.waiting(), 0);
    }

    #[test]
    fn an_entry_whose_start_is_being_counted_is_withdrawn_afterwards() {
        let lanes = Lanes::new(1, None);
        lanes.measured(1, Duration::from_nanos(1));
        lanes.push(batch(1..=3));
        lanes.take(0);
        let counting = lanes.count(0);
        let ids = |entries: Vec<Arc<Received>>| -> Vec<u64> {
            entries.iter().map(|received| received.id().ms).collect()
        };
        assert_eq!(ids(lanes.close()), [2, 3]);
        drop(counting);
        assert_eq!(start(&lanes, 0), None);
        assert_eq!(ids(lanes.withdraw()), [1]);
    }

    #[test]
    fn equal_keys_share_a_lane_whatever_batch_they_came_in() {
        let lanes = Lanes::new(4, Some("h:key".into()));
        let keys = ["a", "b", "c", "d", "e", "f"];
        lanes.push(
            (1..=60)
                .map(|ms| received(ms, keys[ms as usize % 6]))
                .collect(),
        );
        lanes.push(
            (61..=120)
                .map(|ms| received(ms, keys[ms as usize % 6]))
                .collect(),
        );
        let mut lane_of = std::collections::HashMap::new();
        let mut seen = 0;
        for worker in 0..4 {
            let mut last = 0;
            while let Some(next) = lanes.start(worker, 0, |_| true) {
                let key = next.entry.field("h:key").cloned();
                assert_eq!(*lane_of.entry(key).or_insert(worker), worker);
                assert!(next.id().ms > last);
                (last, seen) = (next.id().ms, seen + 1);
            }
        }
        assert_eq!(seen, 120);
    }

    #[test]
    fn after_close_nothing_starts_and_all_that_waited_is_returned_in_order() {
        let lanes = Lanes::new(2, None);
        lanes.measured(1, Duration::from_micros(500));
        lanes.push(batch(1..=6));
        lanes.take(0);
        lanes.take(1);
        assert_eq!(start(&lanes, 0), Some(1));
        let returned: Vec<_> = lanes
            .close()
            .iter()
            .map(|received| received.id().ms)
            .collect();
        assert_eq!(returned, [2, 3, 4, 5, 6]);
        assert_eq!((start(&lanes, 0), start(&lanes, 1)), (None, None));
        assert_eq!(lanes.take(1), Taken::Closed);
        assert_eq!(lanes.waiting(), 0);
        assert_eq!(lanes.all_running().len(), 1);
    }

    #[tokio::test]
    async fn what_is_held_starts_nothing_and_goes_on_where_it_stood() {
        let lanes = Lanes::new(2, None);
        lanes.push(batch(1..=2));
        assert_eq!(lanes.take(0), Taken::Work);
        lanes.hold();
        assert_eq!(start(&lanes, 0), None);
        assert_eq!(
            (lanes.take(0), lanes.take(1)),
            (Taken::Nothing, Taken::Nothing)
        );
        let counting = lanes.count(0);
        let mut counted = Box::pin(lanes.counted());
        assert!(futures_util::poll!(counted.as_mut()).is_pending());
        drop(counting);
        counted.await;
        lanes.release();
        // Whoever fell idle meanwhile looks again.
        lanes.woken(0).await;
        lanes.woken(1).await;
        assert_eq!((lanes.take(0), lanes.take(1)), (Taken::Work, Taken::Work));
        assert_eq!((start(&lanes, 0), start(&lanes, 1)), (Some(1), Some(2)));
    }

    #[test]
    fn a_worker_that_was_replaced_neither_starts_nor_finishes_anything() {
        let lanes = Lanes::new(1, Some("h:key".into()));
        lanes.push(batch(1..=2));
        let old = lanes.enter(0);
        assert!(lanes.start(0, old, |_| true).is_some());
        assert!(lanes.cut_off(0, |_| ()));
        let new = lanes.enter(0);
        assert!(lanes.start(0, old, |_| true).is_none());
        assert!(lanes.start(0, new, |_| true).is_some());
        assert!(!lanes.finish(0, old, |_| ()));
        assert!(lanes.finish(0, new, |_| ()));
    }

    #[tokio::test]
    async fn one_worker_is_woken_for_a_burst_and_wakes_the_next_while_there_is_more() {
        let lanes = Lanes::new(3, None);
        for worker in 0..3 {
            assert_eq!(lanes.take(worker), Taken::Nothing);
        }
        lanes.push(batch(1..=2));
        lanes.woken(2).await;
        assert_eq!(lanes.take(2), Taken::Work);
        lanes.woken(1).await;
        assert_eq!(lanes.take(1), Taken::Work);
        assert!(
            tokio::time::timeout(Duration::from_millis(20), lanes.woken(0))
                .await
                .is_err()
        );
    }

    #[tokio::test]
    async fn quiet_comes_when_the_last_run_ends() {
        let lanes = Arc::new(Lanes::new(1, None));
        lanes.push(batch(1..=1));
        lanes.take(0);
        start(&lanes, 0);
        lanes.close();
        let quiet = tokio::spawn({
            let lanes = Arc::clone(&lanes);
            async move { lanes.quiet().await }
        });
        tokio::task::yield_now().await;
        assert!(!quiet.is_finished());
        let told = AtomicBool::new(false);
        lanes.finish(0, 0, |_| {
            told.store(!quiet.is_finished(), Ordering::Relaxed)
        });
        assert!(told.into_inner());
        quiet.await.unwrap();
    }
}
