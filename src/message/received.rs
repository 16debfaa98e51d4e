//! An entry that was handed to this process: where it came from and how often it was tried.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;

use super::headers::wire;
use super::suspect::Turn;
use super::{Entry, EntryId, Headers, Publisher, StreamKey};

/// The header of a recovered delivery that holds its delivery count, this start included.
pub const DELIVERY_COUNT_HEADER: &str = wire::DELIVERY_COUNT;

/// No entry lies idle for so long, unless it was given back.
const GIVEN_BACK: Duration = Duration::from_secs(20 * 365 * 86_400);

/// How a subscription reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Mode {
    /// Fresh entries.
    Tail,
    /// What a crashed consumer left behind.
    Reclaim,
    /// Both.
    Claiming,
}

/// What all entries of one subscription have in common.
pub(crate) struct Source {
    pub stream: StreamKey,
    pub group: Arc<str>,
    pub consumer: Arc<str>,
    pub subscription: Arc<str>,
    pub mode: Mode,
    pub publisher: Publisher,
    /// The subscription's place among those of its group in this process.
    pub index: usize,
    /// Told whenever one of its entries was lost to another consumer.
    pub lost: Notify,
}

/// An entry that was read, with what the server said of it.
pub(crate) struct Received {
    pub entry: Entry,
    pub source: Arc<Source>,
    pub bytes: usize,
    /// How many copies were made before this one.
    pub copies: u64,
    /// It may be a copy that a group has asked for.
    pub is_copy: bool,
    /// How often it is delivered, the coming start included.
    pub delivery_count: u64,
    /// How long it lay idle before it was read; zero for a fresh one.
    pub idle: Duration,
    /// It came from `>`: the server has counted its start already.
    pub fresh: bool,
    /// What the server told of a recovered entry, as headers.
    told: Vec<(&'static str, String)>,
    lost: AtomicBool,
    /// The server has counted its start.
    counted: AtomicBool,
    returns: AtomicU32,
    /// It is the one suspect of this process that has begun.
    turn: Mutex<Option<Turn>>,
}

impl Received {
    /// An entry from a fresh read.
    pub(crate) fn fresh(entry: Entry, source: &Arc<Source>) -> Self {
        Received::new(entry, source, 1, Duration::ZERO, true)
    }

    /// An entry that was delivered `count` times before, taken over after lying idle.
    pub(crate) fn recovered(
        entry: Entry,
        source: &Arc<Source>,
        count: u64,
        idle: Duration,
    ) -> Self {
        // An entry that was given back has been made the oldest of all; how long it lay is not known.
        let idle = if idle > GIVEN_BACK {
            Duration::ZERO
        } else {
            idle
        };
        Received::new(entry, source, count.saturating_add(1), idle, false)
    }

    fn new(
        entry: Entry,
        source: &Arc<Source>,
        delivery_count: u64,
        idle: Duration,
        fresh: bool,
    ) -> Self {
        let told = if fresh {
            Vec::new()
        } else {
            vec![
                (wire::DELIVERY_COUNT, delivery_count.to_string()),
                (wire::IDLE_MS, idle.as_millis().to_string()),
            ]
        };
        // Few entries are, and the others are not looked through again and again.
        let is_copy = entry.fields().any(|(name, _)| wire::is_of_copy(name));
        Received {
            bytes: entry.len_bytes(),
            copies: if is_copy { copies(&entry) } else { 0 },
            is_copy,
            source: Arc::clone(source),
            entry,
            delivery_count,
            idle,
            fresh,
            told,
            lost: AtomicBool::new(false),
            counted: AtomicBool::new(fresh),
            returns: AtomicU32::new(0),
            turn: Mutex::default(),
        }
    }

    pub(crate) fn id(&self) -> EntryId {
        self.entry.id
    }

    /// Copies and starts, the coming start included.
    pub(crate) fn attempt(&self) -> u64 {
        self.copies.saturating_add(self.delivery_count)
    }

    /// The server's count before the coming start.
    pub(crate) fn count_before(&self) -> u64 {
        self.delivery_count.saturating_sub(1)
    }

    /// The server has counted its start.
    pub(crate) fn start_counted(&self) {
        self.counted.store(true, Ordering::Release);
    }

    /// From now until it is settled, or [`end_turn`](Self::end_turn), no other suspect begins.
    pub(crate) fn take_turn(&self, turn: Turn) {
        *self.turn.lock().unwrap_or_else(PoisonError::into_inner) = Some(turn);
    }

    pub(crate) fn end_turn(&self) {
        if self.fresh {
            // It never has one.
            return;
        }
        self.turn
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
    }

    pub(crate) fn has_turn(&self) -> bool {
        self.turn
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .is_some()
    }

    /// The server's count as it is.
    pub(crate) fn count_now(&self) -> u64 {
        if self.counted.load(Ordering::Acquire) {
            self.delivery_count
        } else {
            self.count_before()
        }
    }

    /// Another consumer owns it now.
    pub(crate) fn lose(&self) {
        self.lost.store(true, Ordering::Release);
        self.source.lost.notify_waiters();
    }

    /// An actor that it was sent to has dropped it without a look. Returns how often that happened.
    pub(crate) fn comes_back(&self) -> u32 {
        self.returns.fetch_add(1, Ordering::Relaxed) + 1
    }

    pub(crate) fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Acquire)
    }
}

/// How many copies led to this entry, by our own count or RustStream's, whichever is larger.
fn copies(entry: &Entry) -> u64 {
    let count = |name: &str| {
        let text = entry
            .field(name)
            .and_then(|value| std::str::from_utf8(value).ok());
        text.and_then(|text| text.parse::<u64>().ok()).unwrap_or(0)
    };
    count(wire::RETRY_COUNT).max(count(wire::FOREIGN_RETRY_COUNT))
}

/// What a handler is told of the entry it handles.
///
/// Cheap to clone.
#[derive(Clone)]
pub struct Context {
    received: Arc<Received>,
}

impl Context {
    pub(crate) fn new(received: Arc<Received>) -> Self {
        Context { received }
    }

    pub(crate) fn entry(&self) -> &Entry {
        &self.received.entry
    }

    /// The entry's id.
    pub fn id(&self) -> EntryId {
        self.received.id()
    }

    /// The stream it was read from.
    pub fn stream(&self) -> &StreamKey {
        &self.received.source.stream
    }

    /// The consumer group.
    pub fn group(&self) -> &str {
        &self.received.source.group
    }

    /// The consumer that owns the entry on the server.
    pub fn consumer(&self) -> &str {
        &self.received.source.consumer
    }

    /// The name of the subscription.
    pub fn subscription(&self) -> &str {
        &self.received.source.subscription
    }

    /// The entry's headers.
    pub fn headers(&self) -> Headers<'_> {
        Headers::new(&self.received.entry.fields, &self.received.told)
    }

    /// Which attempt this is: 1 the first time. Copies that were made of the entry count, and so does
    /// every start of this copy, those that ended in a crash included.
    ///
    /// After a crash of the process it may be one too high, once: the server cannot tell an entry
    /// that was fetched from one that was started.
    pub fn attempt(&self) -> u64 {
        self.received.attempt()
    }

    /// How often the server has seen this very entry started, this start included.
    pub fn delivery_count(&self) -> u64 {
        self.received.delivery_count
    }

    /// How long the entry lay idle before this process took it over; zero for a fresh one.
    pub fn idle(&self) -> Duration {
        self.received.idle
    }

    /// How its subscription reads.
    pub fn mode(&self) -> Mode {
        self.received.source.mode
    }

    /// Ends when another consumer has taken the entry over, for instance after this process was
    /// frozen for longer than `min_idle`. The other one handles it now; what this handler still does
    /// is done twice. Pending for ever as long as the entry is ours.
    pub async fn ownership_lost(&self) {
        loop {
            // Registered before the look, so that nothing is missed in between.
            let told = self.received.source.lost.notified();
            if self.received.is_lost() {
                return;
            }
            told.await;
        }
    }

    /// Publishes to streams of the same server.
    pub fn publisher(&self) -> &Publisher {
        &self.received.source.publisher
    }
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Context")
            .field("id", &self.id())
            .field("subscription", &self.subscription())
            .field("attempt", &self.attempt())
            .finish_non_exhaustive()
    }
}

/// A source without a server.
#[cfg(any(test, feature = "bench"))]
pub(crate) fn source(index: usize) -> Arc<Source> {
    Arc::new(Source {
        stream: "s".into(),
        group: "g".into(),
        consumer: format!("c{index}").into(),
        subscription: format!("s{index}").into(),
        mode: Mode::Tail,
        publisher: Publisher::unconnected(),
        index,
        lost: Notify::new(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(fields: &[(&'static str, &'static str)]) -> Entry {
        Entry::new(EntryId::new(1, 0), fields.iter().copied())
    }

    #[test]
    fn attempts_are_copies_and_starts() {
        let copied = entry(&[("h:retry-count", "3"), ("h:x-ruststream-retry-count", "2")]);
        assert_eq!(Received::fresh(copied.clone(), &source(0)).attempt(), 4);
        let recovered = Received::recovered(copied, &source(0), 2, Duration::from_millis(7));
        assert_eq!((recovered.attempt(), recovered.count_before()), (6, 2));
        let context = Context::new(Arc::new(recovered));
        assert_eq!(context.headers().get_str(DELIVERY_COUNT_HEADER), Some("3"));
        assert_eq!(context.headers().get_str("redis-idle-ms"), Some("7"));
    }

    #[test]
    fn a_count_that_is_no_number_is_none() {
        let odd = entry(&[
            ("h:retry-count", "many"),
            ("h:x-ruststream-retry-count", "2"),
        ]);
        assert_eq!(Received::fresh(odd, &source(0)).attempt(), 3);
        assert_eq!(
            Received::fresh(entry(&[("h:retry-count", "-1")]), &source(0)).attempt(),
            1
        );
    }

    #[tokio::test]
    async fn ownership_lost_ends_before_and_after_it_is_waited_for() {
        let received = Arc::new(Received::fresh(entry(&[]), &source(0)));
        let context = Context::new(Arc::clone(&received));
        let waiting = tokio::spawn({
            let context = context.clone();
            async move { context.ownership_lost().await }
        });
        tokio::task::yield_now().await;
        assert!(!waiting.is_finished());
        received.lose();
        waiting.await.unwrap();
        context.ownership_lost().await;
    }
}
