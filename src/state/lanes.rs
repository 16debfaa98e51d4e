//! Who handles what next: the entries of a subscription that wait, and those that run.

use std::collections::{HashSet, VecDeque};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::Notify;

use super::lane::{Inner, Lane, Run, put_before_newer};
use super::lock;
use crate::message::Received;

/// How much work a worker takes at a time.
const SHARE: Duration = Duration::from_millis(1);
/// The most entries that it takes at a time.
const LARGEST_SHARE: usize = 256;
/// For how long there is work in hand, beside what the server needs to answer.
const AHEAD: Duration = Duration::from_millis(20);
/// What is in hand before anything is known of how long it takes.
const AT_FIRST: usize = 256;

/// The entries of a subscription on their way to its workers.
///
/// A worker *takes*: nobody sends it anything. What was read waits in one buffer for whichever worker
/// is free first, or, under `ordered_by`, in the lane of the worker that its key belongs to. A worker
/// moves about a millisecond of work into its lane at a time and starts one entry after the other from
/// there. Lanes outlive workers: a worker that crashed leaves the rest of its share, and what it was
/// running, where its replacement and the supervisor find them.
pub(crate) struct Lanes {
    buffer: Mutex<Buffer>,
    /// Only ever grows; those beyond the number of workers are retired.
    lanes: RwLock<Vec<Arc<Lane>>>,
    workers: AtomicUsize,
    /// Entries with the same value of this field go to the same lane.
    ordered_by: Option<Bytes>,
    /// Not a quick one: it must spread keys that look alike over a handful of workers.
    hasher: RandomState,
    /// A worker takes so many entries at a time at least, where they are there.
    smallest_share: usize,
    /// The workers' code is called, and is no actor.
    called: bool,
    /// Nothing is started any more.
    closed: AtomicBool,
    /// Nothing is started for the time being.
    held: AtomicBool,
    /// The number of workers was changed, and some keys still have entries with their former one.
    moving: AtomicBool,
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
    /// Entries whose key is about to move to another lane, and has entries in its former one.
    held_back: VecDeque<Arc<Received>>,
}

/// A worker's place at its lane. What one that was replaced still tries to do with it has no effect.
#[derive(Clone)]
pub(crate) struct Seat {
    pub worker: usize,
    lane: Arc<Lane>,
    incarnation: u64,
}

/// See [`Lanes::count`].
pub(crate) struct Counting<'a> {
    lanes: &'a Lanes,
    lane: Arc<Lane>,
}

impl Drop for Counting<'_> {
    fn drop(&mut self) {
        self.lane.counting.store(false, Ordering::Release);
        self.lanes.tell_of_quiet();
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

impl Lanes {
    pub(crate) fn new(
        workers: usize,
        ordered_by: Option<Bytes>,
        smallest_share: usize,
        called: bool,
    ) -> Self {
        Lanes {
            buffer: Mutex::default(),
            lanes: RwLock::new((0..workers).map(|_| Arc::default()).collect()),
            workers: AtomicUsize::new(workers),
            ordered_by,
            hasher: RandomState::new(),
            smallest_share,
            called,
            closed: AtomicBool::new(false),
            held: AtomicBool::new(false),
            moving: AtomicBool::new(false),
            cost: AtomicU64::new(0),
            waiting: AtomicUsize::new(0),
            quiet: Notify::new(),
            hungry: Notify::new(),
        }
    }

    /// How many workers there are to be.
    pub(crate) fn workers(&self) -> usize {
        self.workers.load(Ordering::Acquire)
    }

    /// How many lanes there are, those of workers that are retiring included.
    pub(crate) fn all(&self) -> usize {
        self.lanes
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .len()
    }

    fn lane(&self, worker: usize) -> Option<Arc<Lane>> {
        let lanes = self.lanes.read().unwrap_or_else(PoisonError::into_inner);
        lanes.get(worker).cloned()
    }

    fn each(&self) -> Vec<Arc<Lane>> {
        self.lanes
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// How many entries wait for a worker.
    pub(crate) fn waiting(&self) -> usize {
        self.waiting.load(Ordering::Relaxed)
    }

    // ---- coming in --------------------------------------------------------------------------------------

    /// Puts what was read behind what waits already, and wakes a worker for it.
    pub(crate) fn push(&self, received: Vec<Arc<Received>>) {
        if received.is_empty() {
            return;
        }
        self.waiting.fetch_add(received.len(), Ordering::Relaxed);
        let mut buffer = lock(&self.buffer);
        if self.ordered_by.is_none() {
            buffer.waiting.extend(received);
            self.wake_one(&mut buffer);
        } else if self.moving.load(Ordering::Acquire) {
            buffer.held_back.extend(received);
            self.move_on(&mut buffer);
        } else {
            self.distribute(received);
        }
    }

    /// Puts entries into the lanes that their keys belong to.
    fn distribute(&self, received: Vec<Arc<Received>>) {
        let lanes = self.each();
        let mut shares: Vec<Vec<Arc<Received>>> = vec![Vec::new(); lanes.len()];
        for received in received {
            let home = self.home(self.key_of(&received));
            if let Some(share) = shares.get_mut(home) {
                share.push(received);
            }
        }
        for (lane, share) in lanes.iter().zip(shares) {
            if !share.is_empty() {
                let mut inner = lane.lock();
                inner.queue.extend(share);
                if std::mem::take(&mut inner.idle) {
                    lane.wake.notify_one();
                }
            }
        }
    }

    /// The hash of the entry's key. A missing header is a value like any other, and not the empty one.
    /// Where nothing is ordered all entries are alike.
    fn key_of(&self, received: &Received) -> u64 {
        let header = self.ordered_by.as_ref();
        self.hash(
            header
                .and_then(|header| received.entry.field(header))
                .map(AsRef::as_ref),
        )
    }

    fn hash(&self, key: Option<&[u8]>) -> u64 {
        let mut hasher = self.hasher.build_hasher();
        match key {
            Some(key) => hasher.write(key),
            None => hasher.write_u8(0),
        }
        hasher.finish()
    }

    fn home(&self, key: u64) -> usize {
        (key % self.workers().max(1) as u64) as usize
    }

    /// The worker that entries with this value of the header belong to; `None` where they belong to none.
    pub(crate) fn worker_of(&self, key: &[u8]) -> Option<usize> {
        self.ordered_by.as_ref()?;
        let key = self.hash(Some(key));
        if self.moving.load(Ordering::Acquire) {
            // Its former worker, as long as that one has some of it.
            let lanes = self.each();
            let has = |lane: &&Arc<Lane>| lane.keeps().iter().any(|it| self.key_of(it) == key);
            if let Some((worker, _)) = lanes.iter().enumerate().find(|(_, lane)| has(lane)) {
                return Some(worker);
            }
        }
        Some(self.home(key))
    }

    /// The worker of the key that most entries wait for, with how many do, if it is one that holds up
    /// the others.
    pub(crate) fn hottest(&self) -> Option<(Option<Bytes>, usize)> {
        let header = self.ordered_by.as_ref()?;
        let lanes = self.each();
        let fullest = lanes.iter().max_by_key(|lane| lane.lock().queue.len())?;
        let inner = fullest.lock();
        let mut counts: hashbrown::HashMap<Option<Bytes>, usize> = hashbrown::HashMap::new();
        for received in &inner.queue {
            *counts
                .entry(received.entry.field(header).cloned())
                .or_default() += 1;
        }
        counts.into_iter().max_by_key(|(_, count)| *count)
    }

    // ---- workers ----------------------------------------------------------------------------------------

    /// A new worker takes the lane over.
    pub(crate) fn enter(&self, worker: usize) -> Option<Seat> {
        let lane = self.lane(worker)?;
        let incarnation = {
            let mut inner = lane.lock();
            inner.incarnation += 1;
            inner.last_known = inner.started;
            inner.incarnation
        };
        Some(Seat {
            worker,
            lane,
            incarnation,
        })
    }

    /// Sets how many workers there are to be. A key moves to its new worker once the old one has none of
    /// its entries any more; whoever owns the workers starts those that are missing, and those that are too
    /// many end by themselves.
    pub(crate) fn set_workers(&self, workers: usize) {
        let mut buffer = lock(&self.buffer);
        {
            let mut lanes = self.lanes.write().unwrap_or_else(PoisonError::into_inner);
            while lanes.len() < workers {
                lanes.push(Arc::default());
            }
            for (at, lane) in lanes.iter().enumerate() {
                lane.retired.store(at >= workers, Ordering::Release);
            }
        }
        self.workers.store(workers, Ordering::Release);
        // Said before the lanes are looked through: what ends from here on looks whether a key can move on.
        self.moving
            .store(self.ordered_by.is_some(), Ordering::Release);
        let lanes = self.each();
        if self.ordered_by.is_some() {
            let mut waiting: VecDeque<_> =
                lanes.iter().flat_map(|lane| lane.take_waiting()).collect();
            waiting.append(&mut buffer.held_back);
            buffer.held_back = waiting;
            self.move_on(&mut buffer);
        } else {
            for lane in lanes.iter().skip(workers).rev() {
                for received in lane.take_waiting().into_iter().rev() {
                    buffer.waiting.push_front(received);
                }
            }
            buffer.idle.retain(|&idle| idle < workers);
            self.wake_one(&mut buffer);
        }
        for lane in &lanes {
            lane.wake.notify_one();
        }
    }

    /// Lets entries go to the lanes of their keys' new workers, where the old ones have none of them.
    fn move_on(&self, buffer: &mut Buffer) {
        let lanes = self.each();
        let mut away = HashSet::new();
        for (at, lane) in lanes.iter().enumerate() {
            let keys = lane.keeps().into_iter().map(|it| self.key_of(&it));
            away.extend(keys.filter(|key| self.home(*key) != at));
        }
        let held_back = std::mem::take(&mut buffer.held_back);
        let (rest, free): (VecDeque<_>, VecDeque<_>) = held_back
            .into_iter()
            .partition(|it| away.contains(&self.key_of(it)));
        buffer.held_back = rest;
        if away.is_empty() {
            self.moving.store(false, Ordering::Release);
        }
        self.distribute(free.into());
    }

    /// An entry has left a lane for good: its key may be free to move.
    fn left(&self) {
        if self.moving.load(Ordering::Acquire) {
            self.move_on(&mut lock(&self.buffer));
        }
    }

    /// Wakes the worker that fell idle last: its memory is the warmest.
    fn wake_one(&self, buffer: &mut Buffer) {
        while let Some(worker) = buffer.idle.pop() {
            let lane = self.lane(worker);
            // One that fell idle in the moment in which it was retired takes nothing any more.
            if let Some(lane) = lane.filter(|it| !it.retired.load(Ordering::Acquire)) {
                lane.wake.notify_one();
                return;
            }
        }
    }

    /// The worker's actor has died. Returns how many times in a row that happened over an entry.
    pub(crate) fn crashed(&self, worker: usize) -> u32 {
        let Some(lane) = self.lane(worker) else {
            return 0;
        };
        let mut inner = lane.lock();
        inner.crashes_in_a_row += 1;
        inner.crashes_in_a_row
    }

    /// Called by a worker that has nothing left: moves a share of what waits into its lane.
    pub(crate) fn take(&self, seat: &Seat) -> Taken {
        if self.is_closed() {
            return Taken::Closed;
        }
        if self.held.load(Ordering::Acquire) {
            return Taken::Nothing;
        }
        let lane = &seat.lane;
        let retired = lane.retired.load(Ordering::Acquire);
        if self.ordered_by.is_some() || retired {
            let mut inner = lane.lock();
            inner.idle = inner.queue.is_empty();
            let taken = match inner.idle {
                false => Taken::Work,
                true if retired => Taken::Closed,
                true => Taken::Nothing,
            };
            drop(inner);
            if taken == Taken::Nothing {
                self.hungry.notify_one();
            }
            return taken;
        }
        if !lane.lock().queue.is_empty() {
            return Taken::Work;
        }
        let mut buffer = lock(&self.buffer);
        if lane.retired.load(Ordering::Acquire) {
            // Since the look above: whoever retired it has no place for it among the idle any more.
            return Taken::Closed;
        }
        if buffer.waiting.is_empty() {
            if !buffer.idle.contains(&seat.worker) {
                buffer.idle.push(seat.worker);
            }
            self.hungry.notify_one();
            return Taken::Nothing;
        }
        buffer.idle.retain(|&idle| idle != seat.worker);
        let share = self.share(buffer.waiting.len());
        let share = buffer.waiting.drain(..share);
        lane.lock().queue.extend(share);
        if buffer.waiting.len() <= self.workers() {
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
        let workers = self.workers();
        if self.ordered_by.is_some() {
            let lanes = self.each();
            lanes.iter().take(workers).any(|lane| lane.lock().idle)
        } else {
            lock(&self.buffer).waiting.len() <= workers
        }
    }

    /// Returns when workers began to run out of entries since the last call.
    pub(crate) async fn hungry(&self) {
        self.hungry.notified().await;
    }

    /// About a millisecond of work: fast handlers do not come back for every entry, and a slow one
    /// holds up nothing that another worker could do.
    fn share(&self, waiting: usize) -> usize {
        let affordable = self.affordable().min(LARGEST_SHARE);
        let share = waiting.min(affordable.max(self.smallest_share));
        // Whole batches, or the last one would be a small one while more wait.
        match share.checked_rem(self.smallest_share) {
            Some(rest) if rest < share => share - rest,
            _ => share,
        }
    }

    /// How many entries a worker handles in about a millisecond; as long as nothing is known of that, one.
    fn affordable(&self) -> usize {
        let cost = self.cost.load(Ordering::Relaxed);
        let affordable = (SHARE.as_nanos() as u64).checked_div(cost).unwrap_or(1);
        usize::try_from(affordable).unwrap_or(usize::MAX).max(1)
    }

    /// How many entries are worth having in hand where the server takes this long to answer: enough to keep
    /// the workers busy until the next ones are here. More would only be kept from other processes.
    ///
    /// There is no telling where keys decide who may work on what, nor for actors, which may collect.
    pub(crate) fn enough(&self, answer: Duration) -> usize {
        if self.ordered_by.is_some() || !self.called {
            return usize::MAX;
        }
        let cost = self.cost.load(Ordering::Relaxed);
        let ahead = (AHEAD + 4 * answer).as_nanos() as u64;
        let Some(each) = ahead.checked_div(cost) else {
            return AT_FIRST.max(2 * self.workers() * self.smallest_share);
        };
        let each = usize::try_from(each).unwrap_or(usize::MAX);
        let each = each.saturating_add(1).max(2 * self.smallest_share);
        self.workers().saturating_mul(each)
    }

    /// How many entries an actor is given in advance.
    pub(crate) fn in_advance(&self) -> usize {
        self.affordable().clamp(2, LARGEST_SHARE)
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
    pub(crate) async fn woken(&self, seat: &Seat) {
        seat.lane.wake.notified().await;
    }

    // ---- running ----------------------------------------------------------------------------------------

    /// Starts the next entry of the worker's lane if `may` accepts it: from now on it runs.
    pub(crate) fn start(&self, seat: &Seat, may: impl FnOnce(&Received) -> bool) -> Option<Run> {
        self.start_as(seat, may, false)
    }

    /// The same for an entry that is given to an actor: its mailbox holds it first, and it may be held
    /// for longer than the actor lives.
    pub(crate) fn give(&self, seat: &Seat, may: impl FnOnce(&Received) -> bool) -> Option<Run> {
        self.start_as(seat, may, true)
    }

    fn start_as(
        &self,
        seat: &Seat,
        may: impl FnOnce(&Received) -> bool,
        given: bool,
    ) -> Option<Run> {
        let mut inner = seat.lane.lock();
        let run = self.start_in(&mut inner, seat, may, given)?;
        drop(inner);
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        Some(run)
    }

    fn start_in(
        &self,
        inner: &mut Inner,
        seat: &Seat,
        may: impl FnOnce(&Received) -> bool,
        given: bool,
    ) -> Option<Run> {
        // Looked at under the lock under which the rest is given back: what `close` has not seen here
        // is not started.
        let barred = self.is_barred() || inner.incarnation != seat.incarnation;
        if barred || !inner.queue.front().is_some_and(|next| may(next)) {
            return None;
        }
        inner.start(given)
    }

    /// Starts the next entries of the worker's lane, this many at most, for as long as `may` accepts them.
    pub(crate) fn start_batch(
        &self,
        seat: &Seat,
        most: usize,
        may: impl Fn(&Received) -> bool,
    ) -> Vec<Run> {
        let mut inner = seat.lane.lock();
        let mut runs = Vec::with_capacity(most.min(inner.queue.len()));
        while runs.len() < most {
            let Some(run) = self.start_in(&mut inner, seat, &may, false) else {
                break;
            };
            runs.push(run);
        }
        drop(inner);
        self.waiting.fetch_sub(runs.len(), Ordering::Relaxed);
        runs
    }

    /// This run has ended, and what came of it needs nothing but to be noted, which `note` does: in one step
    /// with its end, so that whoever finds it ended finds that too. Nobody notes it if it was ended before,
    /// with its worker. In the same step the next one is started, if `may` accepts it.
    pub(crate) fn end_and_start(
        &self,
        seat: &Seat,
        number: u64,
        note: impl FnOnce(&Received),
        may: Option<impl FnOnce(&Received) -> bool>,
    ) -> Option<Run> {
        let mut inner = seat.lane.lock();
        let ended = inner.end_called(number);
        if let Some(received) = &ended {
            note(received);
        }
        let next = may.and_then(|may| self.start_in(&mut inner, seat, may, false));
        drop(inner);
        if next.is_some() {
            self.waiting.fetch_sub(1, Ordering::Relaxed);
        }
        self.ended();
        next
    }

    /// The same for many, with none started.
    pub(crate) fn end_batch(
        &self,
        seat: &Seat,
        numbers: &[u64],
        note: impl FnOnce(&[Arc<Received>]),
    ) {
        let mut ended = Vec::with_capacity(numbers.len());
        let mut inner = seat.lane.lock();
        ended.extend(
            numbers
                .iter()
                .filter_map(|number| inner.end_called(*number)),
        );
        note(&ended);
        drop(inner);
        self.ended();
    }

    /// The entry that waits at the head of the worker's lane.
    pub(crate) fn next(&self, seat: &Seat) -> Option<Arc<Received>> {
        seat.lane.lock().queue.front().cloned()
    }

    /// Takes the entry at the head of the worker's lane away without starting it, if it still is that
    /// one.
    pub(crate) fn discard(&self, seat: &Seat, unwanted: &Arc<Received>) -> bool {
        let mut inner = seat.lane.lock();
        let front = inner.queue.front();
        if !front.is_some_and(|next| Arc::ptr_eq(next, unwanted)) {
            return false;
        }
        inner.queue.pop_front();
        drop(inner);
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        self.left();
        true
    }

    /// How many more entries the worker's actor may be given in advance, of this many at most. With none
    /// left the worker is woken once there is room.
    pub(crate) fn room(&self, seat: &Seat, most: usize) -> usize {
        seat.lane.room(most.max(1))
    }

    /// Whether nothing runs at this worker, so that the next entry would be alone. If something does, the
    /// worker is woken once it has ended.
    pub(crate) fn is_alone(&self, seat: &Seat) -> bool {
        seat.lane.room(0) > 0
    }

    /// An actor looks at an entry that it was given: it has started.
    pub(crate) fn see(&self, seat: &Seat, number: u64) {
        seat.lane.see(number);
    }

    /// This run has ended, and not by a crash: `settle` gets its entry. Nobody does if it was ended
    /// before, with its worker.
    pub(crate) fn finish(
        &self,
        seat: &Seat,
        number: u64,
        settle: impl FnOnce(&Arc<Received>),
    ) -> bool {
        let Some((received, took)) = seat.lane.end(number) else {
            return false;
        };
        if let Some(took) = took {
            self.measured(1, took);
        }
        settle(&received);
        self.settled(&seat.lane, 1);
        true
    }

    /// What the lane was running has ended with its worker: `settle` gets it. What an actor was given
    /// goes on until that is dropped. Whether the worker died over an entry.
    pub(crate) fn cut_off(&self, worker: usize, settle: impl FnMut(&Arc<Received>)) -> bool {
        let Some(lane) = self.lane(worker) else {
            return false;
        };
        let ended = lane.end_with_worker();
        ended.iter().map(|run| &run.received).for_each(settle);
        self.settled(&lane, ended.len());
        std::mem::take(&mut lane.lock().blamed) || !ended.is_empty()
    }

    /// The worker's actor has died over an entry, which has had its verdict; [`cut_off`](Self::cut_off) says
    /// so.
    pub(crate) fn blame(&self, seat: &Seat) {
        seat.lane.lock().blamed = true;
    }

    /// What hangs cannot be ended, and is given up: `settle` gets it. What lies behind it in the mailbox of an
    /// actor that is given up with it goes back to where it came from.
    pub(crate) fn give_up(
        &self,
        worker: usize,
        with_mailbox: bool,
        settle: impl FnMut(&Arc<Received>),
    ) {
        let Some(lane) = self.lane(worker) else {
            return;
        };
        let hung = {
            let mut buffer = lock(&self.buffer);
            let (hung, behind) = lane.end_hung(with_mailbox);
            for run in behind.into_iter().rev() {
                self.put_back(&mut buffer, worker, &lane, run.received);
            }
            hung
        };
        hung.iter().map(|run| &run.received).for_each(settle);
        self.settled(&lane, hung.len());
    }

    /// Gives up everything that runs, here or elsewhere: `settle` gets it. What was dropped has no verdict.
    pub(crate) fn abandon(&self, mut settle: impl FnMut(&Arc<Received>)) {
        for lane in self.each() {
            let runs = lane.end_all();
            runs.iter().map(|run| &run.received).for_each(&mut settle);
            self.settled(&lane, runs.len());
            let dropped = lane.take_dropped();
            self.settled(&lane, dropped.len());
        }
    }

    /// The verdicts of so many runs have been given. Until then they count as going on, so that whoever
    /// waits for quiet finds the verdicts where verdicts are.
    fn settled(&self, lane: &Lane, runs: usize) {
        if runs > 0 {
            lane.given(runs);
            self.ended();
        }
    }

    /// Runs have ended, and their verdicts have been given.
    fn ended(&self) {
        self.left();
        self.tell_of_quiet();
    }

    /// An actor has dropped an entry that it was given, without a verdict. Its worker is woken to say what
    /// that means. `false` if the run was ended before.
    pub(crate) fn dropped(&self, seat: &Seat, number: u64, seen: bool) -> bool {
        seat.lane.drop_unsettled(number, seen)
    }

    /// Whether the worker's actor has dropped something.
    pub(crate) fn has_dropped(&self, seat: &Seat) -> bool {
        seat.lane.has_dropped()
    }

    /// Grows with everything that the worker's actor does with what it was given, but for dropping it.
    pub(crate) fn signs_of_life(&self, seat: &Seat) -> u64 {
        seat.lane.lock().signs_of_life
    }

    /// The worker's actor has ended and dropped all that it could: what it never got is dropped too.
    pub(crate) fn take_back(&self, seat: &Seat) {
        seat.lane.take_back_swallowed();
    }

    /// What came of the entries that this worker's actor dropped, the oldest first: `judge` says of each
    /// whether it has settled it, or it was never started and goes back to where it came from. Returns
    /// whether one was settled.
    pub(crate) fn sort_out_dropped(
        &self,
        worker: usize,
        mut judge: impl FnMut(&Run) -> bool,
    ) -> bool {
        let Some(lane) = self.lane(worker) else {
            return false;
        };
        let (mut count, mut settled) = (0, false);
        {
            // Until they are back in their places nothing newer of their keys may move on.
            let mut buffer = lock(&self.buffer);
            let dropped = lane.take_dropped();
            count += dropped.len();
            let judged: Vec<_> = dropped.into_iter().map(|run| (judge(&run), run)).collect();
            // The newest first, so that each goes before those that were put back already.
            for (done, run) in judged.into_iter().rev() {
                settled |= done;
                if !done {
                    self.put_back(&mut buffer, worker, &lane, run.received);
                }
            }
        }
        self.settled(&lane, count);
        settled
    }

    /// Puts an entry that was not started back into its lane, before all that are newer.
    fn put_back(&self, buffer: &mut Buffer, worker: usize, lane: &Lane, received: Arc<Received>) {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let key = self.key_of(&received);
        let same_key = |it: &Received| self.key_of(it) == key;
        if self.moving.load(Ordering::Acquire) && self.home(key) != worker {
            // Its key is about to move, and what is newer waits for that.
            put_before_newer(&mut buffer.held_back, received, same_key);
        } else {
            lane.lock().put_back(received, same_key);
            lane.wake.notify_one();
        }
    }

    /// The worker has the start of the entry at the head of its lane counted. Until what this returns is
    /// dropped the entry cannot be withdrawn: given back first, it would be counted afterwards.
    pub(crate) fn count(&self, seat: &Seat) -> Counting<'_> {
        seat.lane.counting.store(true, Ordering::Release);
        Counting {
            lanes: self,
            lane: Arc::clone(&seat.lane),
        }
    }

    /// Puts what waits in a lane, behind a run that takes its time or a worker that has died, before all
    /// workers again. Under `ordered_by` it has to wait.
    pub(crate) fn share_out(&self, worker: usize) {
        if let Some(lane) = self.lane(worker) {
            self.share_out_behind(&lane, 0);
        }
    }

    /// The same for what waits behind the head of the worker's lane.
    pub(crate) fn share_out_rest(&self, seat: &Seat) {
        self.share_out_behind(&seat.lane, 1);
    }

    fn share_out_behind(&self, lane: &Lane, kept: usize) {
        if self.ordered_by.is_some() {
            return;
        }
        let mut buffer = lock(&self.buffer);
        let waiting = lane.take_waiting_behind(kept);
        if waiting.is_empty() {
            return;
        }
        for received in waiting.into_iter().rev() {
            buffer.waiting.push_front(received);
        }
        self.wake_one(&mut buffer);
    }

    /// The worker's oldest run.
    pub(crate) fn running(&self, worker: usize) -> Option<Run> {
        self.lane(worker)?.oldest()
    }

    /// Everything that runs now.
    pub(crate) fn all_running(&self) -> Vec<Arc<Received>> {
        self.each().iter().flat_map(|lane| lane.all()).collect()
    }

    // ---- the end ----------------------------------------------------------------------------------------

    /// Returns once nothing runs; only after [`close`](Self::close).
    pub(crate) async fn quiet(&self) {
        self.until_no(Lane::is_busy).await;
    }

    /// Returns once no start is being counted, so that everything that waits can be withdrawn; only
    /// after [`close`](Self::close) or [`hold`](Self::hold).
    pub(crate) async fn counted(&self) {
        self.until_no(|lane| lane.counting.load(Ordering::Acquire))
            .await;
    }

    /// Returns when something that was started has come back without a look; only after
    /// [`close`](Self::close) or [`hold`](Self::hold).
    pub(crate) async fn returned(&self) {
        loop {
            let told = self.quiet.notified();
            tokio::pin!(told);
            told.as_mut().enable();
            if self.waiting() > 0 {
                return;
            }
            told.await;
        }
    }

    async fn until_no(&self, is: impl Fn(&Lane) -> bool) {
        loop {
            let told = self.quiet.notified();
            tokio::pin!(told);
            told.as_mut().enable();
            if !self.each().iter().any(|lane| is(lane)) {
                return;
            }
            told.await;
        }
    }

    fn tell_of_quiet(&self) {
        if self.is_barred() {
            self.quiet.notify_waiters();
        }
    }

    /// Starts nothing more and wakes every worker to see it. Returns what waited, in id order: it
    /// was not started and will not be.
    pub(crate) fn close(&self) -> Vec<Arc<Received>> {
        self.closed.store(true, Ordering::Release);
        let waiting = self.withdraw();
        for lane in self.each() {
            lane.wake.notify_one();
        }
        waiting
    }

    /// Starts nothing until [`release`](Self::release): what has not been started when this returns is
    /// not started.
    pub(crate) fn hold(&self) {
        self.held.store(true, Ordering::Release);
        for lane in self.each() {
            // A start that looked a moment earlier holds this, and is over then.
            drop(lane.lock());
        }
    }

    /// Lets the workers go on.
    pub(crate) fn release(&self) {
        self.held.store(false, Ordering::Release);
        for lane in self.each() {
            lane.wake.notify_one();
        }
    }

    fn is_barred(&self) -> bool {
        self.is_closed() || self.held.load(Ordering::Acquire)
    }

    /// Takes back what waits, in id order, but for entries whose start is being counted.
    pub(crate) fn withdraw(&self) -> Vec<Arc<Received>> {
        let mut waiting: Vec<Arc<Received>> = Vec::new();
        // The buffer stays locked meanwhile, or a share could pass by on its way into a lane.
        let mut buffer = lock(&self.buffer);
        waiting.extend(buffer.waiting.drain(..));
        waiting.extend(buffer.held_back.drain(..));
        for lane in self.each() {
            waiting.extend(lane.take_waiting());
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

    fn lanes(workers: usize, ordered: bool) -> (Lanes, Vec<Seat>) {
        let lanes = Lanes::new(workers, ordered.then(|| "h:key".into()), 1, true);
        let seats = (0..workers).filter_map(|worker| lanes.enter(worker));
        let seats = seats.collect();
        (lanes, seats)
    }

    fn start(lanes: &Lanes, seat: &Seat) -> Option<u64> {
        lanes.start(seat, |_| true).map(|run| run.received.id().ms)
    }

    #[test]
    fn a_slow_handler_takes_one_entry_at_a_time_and_a_fast_one_a_share() {
        let (lanes, seats) = lanes(2, false);
        lanes.push(batch(1..=100));
        assert_eq!(lanes.take(&seats[0]), Taken::Work);
        assert_eq!(
            (start(&lanes, &seats[0]), start(&lanes, &seats[0])),
            (Some(1), None)
        );
        lanes.measured(10, Duration::from_micros(1000));
        assert_eq!(lanes.take(&seats[1]), Taken::Work);
        let started: Vec<_> = std::iter::from_fn(|| start(&lanes, &seats[1])).collect();
        assert_eq!(started, (2..=11).collect::<Vec<_>>());
        assert_eq!(lanes.waiting(), 89);
    }

    #[test]
    fn a_share_is_whole_batches_as_long_as_there_are_enough_entries_for_one() {
        let lanes = Lanes::new(1, None, 7, true);
        assert_eq!((lanes.share(3), lanes.share(100)), (3, 7));
        lanes.measured(1, Duration::from_micros(20));
        assert_eq!((lanes.share(6), lanes.share(45)), (6, 42));
        assert_eq!((lanes.share(50), lanes.share(1000)), (49, 49));
    }

    #[test]
    fn keys_that_look_alike_are_spread_over_all_workers() {
        for _ in 0..100 {
            let lanes = Lanes::new(8, Some("key".into()), 1, true);
            let mut keys = [0; 8];
            for n in 0..800 {
                let worker = lanes.worker_of(format!("account-{n}").as_bytes());
                keys[worker.unwrap()] += 1;
            }
            // Five standard deviations off the mean, and some more.
            assert!(
                keys.iter().all(|count| (50..=150).contains(count)),
                "{keys:?}"
            );
        }
    }

    #[test]
    fn a_worker_that_crashed_leaves_its_share_to_its_replacement_in_order() {
        let (lanes, seats) = lanes(1, false);
        lanes.measured(1, Duration::from_nanos(1));
        lanes.push(batch(1..=3));
        lanes.take(&seats[0]);
        assert_eq!(start(&lanes, &seats[0]), Some(1));
        // The worker dies here; the supervisor gives the verdict on what it ran.
        assert!(lanes.cut_off(0, |received| assert_eq!(received.id().ms, 1)));
        assert!(!lanes.cut_off(0, |_| ()));
        assert_eq!((lanes.crashed(0), lanes.crashed(0)), (1, 2));
        lanes.push(batch(4..=4));
        assert_eq!(lanes.take(&seats[0]), Taken::Work);
        let started: Vec<_> = std::iter::from_fn(|| start(&lanes, &seats[0])).collect();
        assert_eq!(started, [2, 3]);
    }

    #[test]
    fn what_waits_behind_a_long_run_can_be_had_by_others() {
        let (lanes, seats) = lanes(2, false);
        lanes.measured(1, Duration::from_nanos(1));
        lanes.push(batch(1..=4));
        lanes.take(&seats[0]);
        assert_eq!(start(&lanes, &seats[0]), Some(1));
        lanes.push(batch(5..=5));
        lanes.share_out(0);
        assert_eq!(lanes.take(&seats[1]), Taken::Work);
        let started: Vec<_> = std::iter::from_fn(|| start(&lanes, &seats[1])).collect();
        assert_eq!(started, [2, 3, 4, 5]);
        assert_eq!(lanes.waiting(), 0);
    }

    #[test]
    fn an_entry_whose_start_is_being_counted_is_withdrawn_afterwards() {
        let (lanes, seats) = lanes(1, false);
        lanes.measured(1, Duration::from_nanos(1));
        lanes.push(batch(1..=3));
        lanes.take(&seats[0]);
        let counting = lanes.count(&seats[0]);
        let ids = |entries: Vec<Arc<Received>>| -> Vec<u64> {
            entries.iter().map(|received| received.id().ms).collect()
        };
        assert_eq!(ids(lanes.close()), [2, 3]);
        drop(counting);
        assert_eq!(start(&lanes, &seats[0]), None);
        assert_eq!(ids(lanes.withdraw()), [1]);
    }

    #[test]
    fn equal_keys_share_a_lane_whatever_batch_they_came_in() {
        let (lanes, seats) = lanes(4, true);
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
        for (worker, seat) in seats.iter().enumerate() {
            let mut last = 0;
            while let Some(next) = lanes.start(seat, |_| true) {
                let next = next.received;
                let key = next.entry.field("h:key").cloned();
                assert_eq!(*lane_of.entry(key).or_insert(worker), worker);
                assert!(next.id().ms > last);
                (last, seen) = (next.id().ms, seen + 1);
            }
        }
        assert_eq!(seen, 120);
    }

    /// A reader that found nobody hungry, since no worker had started yet, would wait for ever.
    #[tokio::test]
    async fn a_worker_that_falls_idle_says_so_whether_entries_are_ordered_or_not() {
        for ordered in [false, true] {
            let (lanes, seats) = lanes(2, ordered);
            assert_eq!(lanes.take(&seats[0]), Taken::Nothing);
            assert!(lanes.is_hungry());
            let told = tokio::time::timeout(Duration::from_secs(5), lanes.hungry());
            assert!(told.await.is_ok(), "ordered: {ordered}");
        }
    }

    #[test]
    fn after_close_nothing_starts_and_all_that_waited_is_returned_in_order() {
        let (lanes, seats) = lanes(2, false);
        lanes.measured(1, Duration::from_micros(500));
        lanes.push(batch(1..=6));
        lanes.take(&seats[0]);
        lanes.take(&seats[1]);
        assert_eq!(start(&lanes, &seats[0]), Some(1));
        let returned: Vec<_> = lanes
            .close()
            .iter()
            .map(|received| received.id().ms)
            .collect();
        assert_eq!(returned, [2, 3, 4, 5, 6]);
        assert_eq!(
            (start(&lanes, &seats[0]), start(&lanes, &seats[1])),
            (None, None)
        );
        assert_eq!(lanes.take(&seats[1]), Taken::Closed);
        assert_eq!(lanes.waiting(), 0);
        assert_eq!(lanes.all_running().len(), 1);
    }

    #[tokio::test]
    async fn what_is_held_starts_nothing_and_goes_on_where_it_stood() {
        let (lanes, seats) = lanes(2, false);
        let take = |worker: usize| lanes.take(&seats[worker]);
        lanes.push(batch(1..=2));
        assert_eq!(take(0), Taken::Work);
        lanes.hold();
        assert_eq!(start(&lanes, &seats[0]), None);
        assert_eq!((take(0), take(1)), (Taken::Nothing, Taken::Nothing));
        let counting = lanes.count(&seats[0]);
        let mut counted = Box::pin(lanes.counted());
        assert!(futures_util::poll!(counted.as_mut()).is_pending());
        drop(counting);
        counted.await;
        lanes.release();
        // Whoever fell idle meanwhile looks again.
        lanes.woken(&seats[0]).await;
        lanes.woken(&seats[1]).await;
        assert_eq!((take(0), take(1)), (Taken::Work, Taken::Work));
        assert_eq!(start(&lanes, &seats[0]), Some(1));
        assert_eq!(start(&lanes, &seats[1]), Some(2));
    }

    #[test]
    fn a_worker_that_was_replaced_neither_starts_nor_finishes_anything() {
        let (lanes, seats) = lanes(1, true);
        lanes.push(batch(1..=2));
        let old = &seats[0];
        let cut_off = lanes.start(old, |_| true).unwrap();
        assert!(lanes.cut_off(0, |_| ()));
        let new = lanes.enter(0).unwrap();
        assert!(lanes.start(old, |_| true).is_none());
        let run = lanes.start(&new, |_| true).unwrap();
        assert!(!lanes.finish(old, cut_off.number, |_| ()));
        assert!(lanes.finish(&new, run.number, |_| ()));
    }

    #[test]
    fn what_an_actor_drops_unseen_goes_back_before_what_is_newer() {
        let (lanes, seats) = lanes(1, true);
        lanes.push(batch(1..=4));
        let runs: Vec<_> = (0..3)
            .map(|_| lanes.give(&seats[0], |_| true).unwrap())
            .collect();
        assert_eq!(lanes.room(&seats[0], 3), 0);
        lanes.see(&seats[0], runs[0].number);
        assert_eq!(lanes.room(&seats[0], 3), 1);
        // They are dropped in any order.
        assert!(lanes.dropped(&seats[0], runs[2].number, false));
        assert!(lanes.dropped(&seats[0], runs[0].number, false));
        assert!(lanes.dropped(&seats[0], runs[1].number, false));
        assert!(!lanes.dropped(&seats[0], runs[1].number, false));
        let mut seen = Vec::new();
        assert!(lanes.sort_out_dropped(0, |run| {
            seen.push((run.received.id().ms, run.seen));
            run.seen
        }));
        assert_eq!(seen, [(1, true), (2, false), (3, false)]);
        let again: Vec<_> = std::iter::from_fn(|| start(&lanes, &seats[0])).collect();
        assert_eq!(again, [2, 3, 4]);
    }

    #[test]
    fn what_an_actor_holds_outlives_its_worker_and_is_finished_once() {
        let (lanes, seats) = lanes(1, false);
        lanes.push(batch(1..=1));
        lanes.take(&seats[0]);
        let run = lanes.give(&seats[0], |_| true).unwrap();
        assert!(!lanes.cut_off(0, |_| ()));
        lanes.enter(0);
        assert!(lanes.finish(&seats[0], run.number, |_| ()));
        assert!(!lanes.finish(&seats[0], run.number, |_| ()));
    }

    #[test]
    fn a_hung_actor_loses_the_entry_it_hangs_over_and_what_it_has_not_seen() {
        let (lanes, seats) = lanes(1, true);
        lanes.push(batch(1..=3));
        let first = lanes.give(&seats[0], |_| true).unwrap();
        lanes.give(&seats[0], |_| true).unwrap();
        lanes.give_up(0, true, |hung| assert_eq!(hung.id(), first.received.id()));
        let new = lanes.enter(0).unwrap();
        let left: Vec<_> = std::iter::from_fn(|| start(&lanes, &new)).collect();
        assert_eq!(left, [2, 3]);
    }

    /// Every worker starts what it may, in turn, and finishes it; each start with its worker.
    fn run_dry(lanes: &Lanes, workers: usize) -> Vec<(usize, Arc<Received>)> {
        let seats: Vec<_> = (0..workers).filter_map(|it| lanes.enter(it)).collect();
        let mut done = Vec::new();
        loop {
            let before = done.len();
            for seat in &seats {
                lanes.take(seat);
                if let Some(run) = lanes.start(seat, |_| true) {
                    done.push((seat.worker, Arc::clone(&run.received)));
                    lanes.finish(seat, run.number, |_| ());
                }
            }
            if done.len() == before {
                return done;
            }
        }
    }

    #[test]
    fn a_key_moves_only_when_its_old_worker_has_none_of_it() {
        const KEYS: [&str; 9] = ["a", "b", "c", "d", "e", "f", "g", "h", "i"];
        for (before, after) in [(2, 5), (5, 2), (4, 1), (1, 4)] {
            let (lanes, seats) = lanes(before, true);
            lanes.push(
                (1..=90)
                    .map(|ms| received(ms, KEYS[ms as usize % 9]))
                    .collect(),
            );
            let runs: Vec<_> = seats
                .iter()
                .filter_map(|seat| Some((seat, lanes.start(seat, |_| true)?)))
                .collect();
            lanes.set_workers(after);
            lanes.push(
                (91..=180)
                    .map(|ms| received(ms, KEYS[ms as usize % 9]))
                    .collect(),
            );
            // As long as those run, nothing of their keys does.
            let busy: Vec<_> = runs
                .iter()
                .map(|(_, run)| lanes.key_of(&run.received))
                .collect();
            let mut later = Vec::new();
            for worker in 0..lanes.all() {
                let seat = lanes.enter(worker).unwrap();
                while let Some(run) = lanes.start(&seat, |_| true) {
                    let key = lanes.key_of(&run.received);
                    let at_home = lanes.home(key) == worker;
                    assert!(at_home);
                    let stays = runs.iter().any(|(seat, it)| {
                        lanes.key_of(&it.received) == key && seat.worker == worker
                    });
                    assert!(stays || !busy.contains(&key));
                    later.push(run.received.id().ms);
                    lanes.finish(&seat, run.number, |_| ());
                }
            }
            for (seat, run) in &runs {
                assert!(lanes.finish(seat, run.number, |_| ()));
            }
            assert!(!lanes.moving.load(Ordering::Relaxed));
            let rest = run_dry(&lanes, lanes.all());
            assert_eq!(runs.len() + later.len() + rest.len(), 180);
            assert_eq!(lanes.waiting(), 0);
            for (worker, received) in &rest {
                assert_eq!(lanes.home(lanes.key_of(received)), *worker);
            }
            for key in KEYS {
                let of: Vec<_> = rest
                    .iter()
                    .filter(|(_, it)| {
                        it.entry.field("h:key").map(AsRef::as_ref) == Some(key.as_bytes())
                    })
                    .map(|(_, it)| it.id())
                    .collect();
                assert!(of.is_sorted());
            }
        }
    }

    #[test]
    fn fewer_workers_leave_what_waited_to_the_others_and_end() {
        let (lanes, seats) = lanes(3, false);
        lanes.measured(1, Duration::from_micros(300));
        lanes.push(batch(1..=9));
        seats
            .iter()
            .for_each(|seat| assert_eq!(lanes.take(seat), Taken::Work));
        let run = lanes.start(&seats[2], |_| true).unwrap();
        lanes.set_workers(1);
        assert_eq!(lanes.start(&seats[2], |_| true).map(|run| run.number), None);
        assert!(lanes.finish(&seats[2], run.number, |_| ()));
        assert_eq!(lanes.take(&seats[2]), Taken::Closed);
        assert_eq!(lanes.take(&seats[1]), Taken::Closed);
        assert_eq!(run_dry(&lanes, 1).len(), 8);
    }

    #[tokio::test]
    async fn one_worker_is_woken_for_a_burst_and_wakes_the_next_while_there_is_more() {
        let (lanes, seats) = lanes(3, false);
        for seat in &seats {
            assert_eq!(lanes.take(seat), Taken::Nothing);
        }
        lanes.push(batch(1..=2));
        lanes.woken(&seats[2]).await;
        assert_eq!(lanes.take(&seats[2]), Taken::Work);
        lanes.woken(&seats[1]).await;
        assert_eq!(lanes.take(&seats[1]), Taken::Work);
        assert!(
            tokio::time::timeout(Duration::from_millis(20), lanes.woken(&seats[0]))
                .await
                .is_err()
        );
    }

    #[tokio::test]
    async fn a_worker_that_fell_idle_while_it_was_retired_is_not_woken_in_place_of_another() {
        let (lanes, seats) = lanes(2, false);
        assert_eq!(lanes.take(&seats[0]), Taken::Nothing);
        lanes.set_workers(1);
        lanes.woken(&seats[0]).await;
        assert_eq!(lanes.take(&seats[0]), Taken::Nothing);
        // It had looked whether it was retired a moment before it was.
        lock(&lanes.buffer).idle.push(1);
        lanes.push(batch(1..=1));
        lanes.woken(&seats[0]).await;
        assert_eq!(lanes.take(&seats[0]), Taken::Work);
    }

    #[tokio::test]
    async fn quiet_comes_when_the_last_run_ends() {
        let (lanes, seats) = lanes(1, false);
        let lanes = Arc::new(lanes);
        lanes.push(batch(1..=1));
        lanes.take(&seats[0]);
        let run = lanes.start(&seats[0], |_| true).unwrap();
        lanes.close();
        let quiet = tokio::spawn({
            let lanes = Arc::clone(&lanes);
            async move { lanes.quiet().await }
        });
        tokio::task::yield_now().await;
        assert!(!quiet.is_finished());
        let told = AtomicBool::new(false);
        lanes.finish(&seats[0], run.number, |_| {
            told.store(!quiet.is_finished(), Ordering::Relaxed)
        });
        assert!(told.into_inner());
        quiet.await.unwrap();
    }
}
