//! Places in the actors where this crate's own tests make one die, or make it wait.
//!
//! Without the feature `fail_points` a point is nothing. With it, a test arms a point by its name (they
//! are listed in [`POINTS`]), for one subscription, stream or delay set, so that tests that run side by
//! side in one process do not meet.

/// A point that this subscription, stream or delay set has come to.
#[cfg(not(feature = "fail_points"))]
#[inline(always)]
pub(crate) fn fail_point(_: &'static str, _: &[u8]) {}

#[cfg(feature = "fail_points")]
pub(crate) use armed::fail_point;
#[cfg(feature = "fail_points")]
pub use armed::{Armed, Fail, POINTS, arm};

#[cfg(feature = "fail_points")]
mod armed {
    use std::ops::RangeInclusive;
    use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

    use tokio::runtime::{Handle, RuntimeFlavor};

    /// Every point. Those of readers and handlers are armed for a subscription, those of settlers and
    /// the keep-alive for a stream, those of sweepers for a delay set.
    pub const POINTS: [&str; 32] = [
        // It is about to send the reads that there is room for.
        "reader.before_read",
        // It holds a reply that nobody knows of yet.
        "reader.reply",
        // The entries are before the workers; the cursor does not know of them.
        "reader.handed_over",
        // The cursor knows of them too.
        "reader.registered",
        // It knows what it has pending, and has taken none of it.
        "reader.pending_listed",
        // It has taken a page of that, and nobody knows of it yet.
        "reader.pending_taken",
        // The page is before the workers; the cursor does not know of it.
        "reader.recovered",
        // It has taken up a page of what it gave back, and nobody knows of it yet.
        "reader.given_back_taken",
        // It stands still, and all that waited is given back.
        "reader.rests",
        // A step of what waits is given back, and nobody knows of it yet.
        "subscription.given_back",
        // It is about to take the next step of a reclaim pass.
        "reclaim.before",
        // It owns the entries of the step, and nobody knows of them yet.
        "reclaim.reply",
        // They are before the workers; the cursor does not know of them.
        "reclaim.handed_over",
        // The cursor knows of them too.
        "reclaim.moved",
        // A worker is about to make its state.
        "handler.start",
        // A worker is about to look for work.
        "handler.between",
        // The server has counted the start of a recovered entry.
        "handler.counted",
        // The entry runs; the application's code was not called yet.
        "handler.started",
        // The application's code has returned; the verdict is not given.
        "handler.returned",
        // The verdict is given.
        "handler.settled",
        // A delivery was sent to an actor.
        "handler.sent",
        // A batch of this line is taken, and not sent.
        "settler.acks",
        "settler.copies",
        "settler.due",
        "settler.starts",
        // Every batch there was is on its way, or about to be.
        "settler.sent",
        // The answer to a batch is there, and nobody knows of it yet.
        "settler.answered",
        // The answer is taken in.
        "settler.confirmed",
        // Before and after a sweep.
        "sweeper.before",
        "sweeper.swept",
        // Before and after a group's entries in hand are kept fresh.
        "keep_alive.before",
        "keep_alive.kept",
    ];

    static ARMED: Mutex<Vec<Arc<Trap>>> = Mutex::new(Vec::new());

    /// What happens at a point.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum Fail {
        /// The actor panics.
        Panic,
        /// The actor stands still, until [`Armed::release`] or the end of the process.
        Pause,
    }

    /// A point that a test has armed; it is disarmed when this is dropped.
    #[derive(Debug)]
    pub struct Armed(Arc<Trap>);

    #[derive(Debug)]
    struct Trap {
        point: &'static str,
        of: Vec<u8>,
        fail: Fail,
        on: RangeInclusive<u64>,
        state: Mutex<State>,
        released: Condvar,
    }

    #[derive(Debug, Default)]
    struct State {
        hits: u64,
        failed: u64,
        released: bool,
    }

    /// Makes this point fail for a subscription, stream or delay set, whichever the point is for, each
    /// time it is come to for the `on`th time from now on: `1..=1` is once, `3..=u64::MAX` from the
    /// third time on, `0..=0` never (and it is counted how often it is come to).
    pub fn arm(point: &'static str, of: &str, fail: Fail, on: RangeInclusive<u64>) -> Armed {
        assert!(POINTS.contains(&point), "there is no point `{point}`");
        let trap = Arc::new(Trap {
            point,
            of: of.into(),
            fail,
            on,
            state: Mutex::default(),
            released: Condvar::new(),
        });
        lock(&ARMED).push(Arc::clone(&trap));
        Armed(trap)
    }

    impl Armed {
        /// How often the point was come to.
        pub fn reached(&self) -> u64 {
            lock(&self.0.state).hits
        }

        /// How often the point has failed.
        pub fn failed(&self) -> u64 {
            lock(&self.0.state).failed
        }

        /// Lets whoever stands at the point go on, and stops nobody any more.
        pub fn release(&self) {
            lock(&self.0.state).released = true;
            self.0.released.notify_all();
        }
    }

    impl Drop for Armed {
        fn drop(&mut self) {
            lock(&ARMED).retain(|trap| !Arc::ptr_eq(trap, &self.0));
            self.release();
        }
    }

    /// A point that this subscription, stream or delay set has come to.
    pub(crate) fn fail_point(point: &'static str, of: &[u8]) {
        debug_assert!(POINTS.contains(&point), "`{point}` is not listed");
        let here = |trap: &&Arc<Trap>| trap.point == point && trap.of == of;
        let traps: Vec<_> = lock(&ARMED).iter().filter(here).cloned().collect();
        traps.iter().for_each(|trap| trap.spring());
    }

    impl Trap {
        fn spring(&self) {
            let mut state = lock(&self.state);
            state.hits += 1;
            if !self.on.contains(&state.hits) {
                return;
            }
            state.failed += 1;
            drop(state);
            match self.fail {
                #[allow(clippy::panic)] // what the tests ask for
                Fail::Panic => panic!("fail point `{}`", self.point),
                // Where others share this thread, they are moved to another one meanwhile.
                Fail::Pause => match Handle::try_current().map(|it| it.runtime_flavor()) {
                    Ok(RuntimeFlavor::MultiThread) => tokio::task::block_in_place(|| self.wait()),
                    _ => self.wait(),
                },
            }
        }

        fn wait(&self) {
            let state = lock(&self.state);
            let released = |state: &mut State| !state.released;
            drop(self.released.wait_while(state, released));
        }
    }

    fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
        mutex.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
