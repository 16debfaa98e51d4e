//! What one worker has before it: the entries that it will start, and those that it has.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use tokio::sync::Notify;

use super::lock;
use crate::message::Received;

/// The lane of one worker. It outlives the worker.
#[derive(Default)]
pub(super) struct Lane {
    inner: Mutex<Inner>,
    /// Runs that have ended and whose verdicts are being given.
    settling: AtomicUsize,
    /// The start of the entry at its head is being counted on the server.
    pub(super) counting: AtomicBool,
    /// The subscription has fewer workers now: what runs here ends, and nothing more starts.
    pub(super) retired: AtomicBool,
    pub(super) wake: Notify,
}

#[derive(Default)]
pub(super) struct Inner {
    pub(super) queue: VecDeque<Arc<Received>>,
    /// What was started, the oldest first.
    running: VecDeque<Run>,
    /// What an actor was given and dropped without a verdict, until somebody says what that means.
    dropped: Vec<Run>,
    /// Of what runs, what lies in an actor's mailbox unseen.
    unseen: usize,
    /// Who is given entries in advance waits until no more than this many lie unseen, or, for
    /// [`NOTHING_RUNS`], until nothing runs.
    awaited: Option<usize>,
    /// Counts what was started, so that one run can be told from the next.
    pub(super) started: u64,
    /// The latest run that the worker's actor is known to have got out of its mailbox, or to have dropped.
    pub(super) last_known: u64,
    /// Counts what that actor did with what it was given.
    pub(super) signs_of_life: u64,
    /// Counts the workers that had this lane; only the latest may start anything.
    pub(super) incarnation: u64,
    /// Crashes since the last entry that was handled without one.
    pub(super) crashes_in_a_row: u32,
    /// The worker's actor died over an entry, which has had its verdict.
    pub(super) blamed: bool,
    pub(super) idle: bool,
    /// When a run ended last.
    last_end: Option<Instant>,
}

/// What [`Lane::room`] waits for when nothing at all may run.
const NOTHING_RUNS: usize = usize::MAX;

/// An entry that was started.
#[derive(Clone)]
pub(crate) struct Run {
    pub received: Arc<Received>,
    /// Differs between any two runs of a lane.
    pub number: u64,
    /// Its handler has it; not so as long as it lies in an actor's mailbox unseen.
    pub seen: bool,
    /// Given to an actor, which may hold it for longer than its worker lives.
    given: bool,
    since: Option<Instant>,
}

impl Lane {
    pub(super) fn lock(&self) -> MutexGuard<'_, Inner> {
        lock(&self.inner)
    }

    pub(super) fn is_busy(&self) -> bool {
        let inner = self.lock();
        !inner.running.is_empty()
            || !inner.dropped.is_empty()
            || self.settling.load(Ordering::Acquire) > 0
    }

    /// The run that began first of those that go on.
    pub(super) fn oldest(&self) -> Option<Run> {
        self.lock().running.front().cloned()
    }

    /// Everything that was started and has had no verdict.
    pub(super) fn all(&self) -> Vec<Arc<Received>> {
        let inner = self.lock();
        let runs = inner.running.iter().chain(&inner.dropped);
        runs.map(|run| Arc::clone(&run.received)).collect()
    }

    /// How many more entries may be given in advance when this many may lie unseen; 0 for `most` means that
    /// the next one runs alone. Where there is no room, the worker is woken once there is.
    pub(super) fn room(&self, most: usize) -> usize {
        let mut inner = self.lock();
        let alone = most == 0;
        if alone && inner.running.is_empty() && inner.dropped.is_empty() {
            return 1;
        }
        if !alone && inner.unseen < most {
            return most - inner.unseen;
        }
        inner.awaited = Some(if alone { NOTHING_RUNS } else { most / 2 });
        0
    }

    pub(super) fn see(&self, number: u64) {
        let mut inner = self.lock();
        let run = inner.running.iter_mut().find(|run| run.number == number);
        if let Some(run) = run.filter(|run| !run.seen) {
            run.seen = true;
            inner.last_known = inner.last_known.max(number);
            inner.signs_of_life += 1;
            inner.unseen = inner.unseen.saturating_sub(1);
            self.tell_of_room(&mut inner);
        }
    }

    fn tell_of_room(&self, inner: &mut Inner) {
        let met = match inner.awaited {
            None => false,
            Some(NOTHING_RUNS) => inner.running.is_empty(),
            Some(most) => inner.unseen <= most,
        };
        if met {
            inner.awaited = None;
            self.wake.notify_one();
        }
    }

    /// Ends a run with a verdict, and begins to give it; see [`given`](Self::given).
    pub(super) fn end(&self, number: u64) -> Option<(Arc<Received>, Option<Duration>)> {
        let mut inner = self.lock();
        let this = |run: &Run| run.number == number;
        // Nearly always the first.
        let (run, dropped) = if let Some(at) = inner.running.iter().position(this) {
            (inner.running.remove(at)?, false)
        } else {
            let at = inner.dropped.iter().position(this)?;
            (inner.dropped.remove(at), true)
        };
        inner.crashes_in_a_row = 0;
        let mut took = None;
        if run.given {
            inner.last_known = inner.last_known.max(number);
            inner.signs_of_life += 1;
            if !run.seen && !dropped {
                inner.unseen = inner.unseen.saturating_sub(1);
            }
            let now = Instant::now();
            let began = inner.last_end.replace(now).max(run.since);
            took = began.map(|began| now.saturating_duration_since(began));
            self.tell_of_room(&mut inner);
        }
        self.settling.fetch_add(1, Ordering::AcqRel);
        Some((run.received, took))
    }

    /// The entries of a lane that its key may not leave: what was started, and what is about to be.
    pub(super) fn keeps(&self) -> Vec<Arc<Received>> {
        let inner = self.lock();
        let runs = inner.running.iter().chain(&inner.dropped);
        let started = runs.map(|run| &run.received);
        started.chain(&inner.queue).cloned().collect()
    }

    /// Takes away what waits, but for an entry whose start is being counted.
    pub(super) fn take_waiting(&self) -> Vec<Arc<Received>> {
        self.take_waiting_behind(0)
    }

    /// The same for what waits behind the first so many.
    pub(super) fn take_waiting_behind(&self, kept: usize) -> Vec<Arc<Received>> {
        let counted = usize::from(self.counting.load(Ordering::Acquire));
        let queue = &mut self.lock().queue;
        queue.drain(counted.max(kept).min(queue.len())..).collect()
    }

    /// Ends what runs with its worker, but for what an actor was given: that reports itself when it is
    /// dropped, and may be worked on elsewhere.
    pub(super) fn end_with_worker(&self) -> Vec<Run> {
        let mut inner = self.lock();
        let (given, ended): (VecDeque<Run>, VecDeque<Run>) =
            inner.running.drain(..).partition(|run| run.given);
        inner.running = given;
        self.settling.fetch_add(ended.len(), Ordering::AcqRel);
        ended.into()
    }

    /// Ends everything that runs.
    pub(super) fn end_all(&self) -> Vec<Run> {
        let mut inner = self.lock();
        inner.unseen = 0;
        let running = std::mem::take(&mut inner.running);
        self.settling.fetch_add(running.len(), Ordering::AcqRel);
        running.into()
    }

    /// Ends what hangs: everything that was called, or of what an actor was given the oldest, which is what it
    /// is at. What lies behind that in the mailbox of an actor that is given up is returned too.
    pub(super) fn end_hung(&self, with_mailbox: bool) -> (Vec<Run>, Vec<Run>) {
        let mut inner = self.lock();
        let Some(oldest) = inner.running.pop_front() else {
            return (Vec::new(), Vec::new());
        };
        inner.unseen = inner.unseen.saturating_sub(usize::from(!oldest.seen));
        let rest = std::mem::take(&mut inner.running);
        let given = oldest.given;
        let (mut hung, mut behind) = (vec![oldest], Vec::new());
        if !given {
            hung.extend(rest);
        } else if with_mailbox {
            let (unseen, others): (VecDeque<Run>, VecDeque<Run>) =
                rest.into_iter().partition(|run| !run.seen);
            behind.extend(unseen);
            inner.running = others;
            inner.unseen = 0;
        } else {
            inner.running = rest;
        }
        self.tell_of_room(&mut inner);
        self.settling.fetch_add(hung.len(), Ordering::AcqRel);
        (hung, behind)
    }

    /// An actor has dropped what it was given. Nobody knows yet whether it goes on itself.
    pub(super) fn drop_unsettled(&self, number: u64, seen: bool) -> bool {
        let mut inner = self.lock();
        let Some(at) = inner.running.iter().position(|run| run.number == number) else {
            return false;
        };
        let Some(mut run) = inner.running.remove(at) else {
            return false;
        };
        if !run.seen {
            inner.unseen = inner.unseen.saturating_sub(1);
        }
        run.seen |= seen;
        inner.last_known = inner.last_known.max(number);
        inner.dropped.push(run);
        inner.awaited = None;
        self.wake.notify_one();
        true
    }

    /// The worker's actor has ended. A mailbox that is closed while something is put in can swallow that, until
    /// whoever can send to it is gone: what was sent after everything that is known to have arrived counts as
    /// dropped.
    pub(super) fn take_back_swallowed(&self) {
        let mut inner = self.lock();
        let last_known = inner.last_known;
        let (swallowed, running): (VecDeque<Run>, VecDeque<Run>) =
            std::mem::take(&mut inner.running)
                .into_iter()
                .partition(|run| run.given && !run.seen && run.number > last_known);
        inner.running = running;
        inner.unseen = inner.unseen.saturating_sub(swallowed.len());
        inner.dropped.extend(swallowed);
    }

    pub(super) fn has_dropped(&self) -> bool {
        !self.lock().dropped.is_empty()
    }

    /// What was dropped without a verdict, the oldest first. Their verdicts begin to be given.
    pub(super) fn take_dropped(&self) -> Vec<Run> {
        let mut inner = self.lock();
        let mut dropped = std::mem::take(&mut inner.dropped);
        self.settling.fetch_add(dropped.len(), Ordering::AcqRel);
        drop(inner);
        dropped.sort_by_key(|run| run.number);
        dropped
    }

    /// So many verdicts have been given.
    pub(super) fn given(&self, verdicts: usize) {
        self.settling.fetch_sub(verdicts, Ordering::AcqRel);
    }
}

impl Inner {
    /// Starts the entry at the head.
    pub(super) fn start(&mut self, given: bool) -> Option<Run> {
        let received = self.queue.pop_front()?;
        self.started += 1;
        let run = Run {
            received,
            number: self.started,
            seen: !given,
            given,
            since: given.then(Instant::now),
        };
        self.unseen += usize::from(given);
        self.running.push_back(run.clone());
        Some(run)
    }

    /// Ends a run of code that is called, which was no crash.
    pub(super) fn end_called(&mut self, number: u64) -> Option<Arc<Received>> {
        // Nearly always the first.
        let at = self.running.iter().position(|run| run.number == number)?;
        self.crashes_in_a_row = 0;
        self.running.remove(at).map(|run| run.received)
    }

    /// Puts an entry where it was taken from: before all that are newer and like it.
    pub(super) fn put_back(&mut self, received: Arc<Received>, alike: impl Fn(&Received) -> bool) {
        put_before_newer(&mut self.queue, received, alike);
    }
}

/// Puts an entry before the first that is newer and like it, or at the end.
pub(super) fn put_before_newer(
    queue: &mut VecDeque<Arc<Received>>,
    received: Arc<Received>,
    alike: impl Fn(&Received) -> bool,
) {
    let newer = |it: &Arc<Received>| it.id() > received.id() && alike(it);
    let at = queue.iter().position(newer);
    queue.insert(at.unwrap_or(queue.len()), received);
}
