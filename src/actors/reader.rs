//! Reads the entries of one subscription and hands them over.
//!
//! One round is one message: it sends what there is room for, takes one reply, and casts the next
//! round to itself. A read that was sent is always awaited to its end, because a reply that nobody
//! takes is a delivery to nobody: to stop, a blocked read is ended on the server and its reply taken
//! like any other. Where that fails — a lost connection, a crash of this actor — the cursor says
//! from where the next incarnation has to look for what was delivered and never seen.

mod left_behind;
mod upkeep;

use std::collections::VecDeque;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Poll;
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use futures_util::future::BoxFuture;
use futures_util::stream::FuturesOrdered;
use ractor::{Actor, ActorProcessingErr, ActorRef};
use tokio::sync::watch;

use self::upkeep::{LOOK_AT_GROUP_EVERY, LOOK_FOR_HOT_KEY_EVERY};
use super::condition::Part;
use super::delays::Delays;
use super::drain::rest;
use super::tree::{BLOCKED_FOR, Order, SubscriptionState, Tree};
use super::verdict::is_spent;
use crate::message::{self, Entry, EntryId, Received, Verdict};
use crate::observe::Event;
use crate::server::read::{self, Read, Recovered};
use crate::server::{Connection, Role, ServerError};
use crate::state::{Hold, Usage};
use crate::topology::ReadMode;

/// What is asked for before anything is known of the size of entries.
const FIRST_COUNT: usize = 16;
/// How often a read that is to end is ended again, until its reply is there.
const UNBLOCK_AGAIN: Duration = Duration::from_millis(20);
/// How often the runtime gets its turn so that a read that was sent reaches the socket: its client has
/// a task that writes, and one before that.
const YIELDS: usize = 2;
/// The pauses while the server is away.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(3);

pub(crate) struct Reader;

pub(crate) enum ReaderMessage {
    /// Time for the next round.
    Next,
}

#[cfg(feature = "cluster")]
impl ractor::Message for ReaderMessage {}

/// What a read was to bring at most, how long its answer took where it did not wait for entries, and what it
/// brought.
type Reply = (usize, Option<Duration>, Result<Fetched, ServerError>);

/// What a read brought.
#[derive(Default)]
struct Fetched {
    fresh: Vec<Entry>,
    /// What was left behind, with its delivery count and how long it lay idle.
    claimed: Vec<(Entry, u64, Duration)>,
    gone: Vec<EntryId>,
}

impl From<Read> for Fetched {
    fn from(read: Read) -> Self {
        Fetched {
            fresh: read.entries,
            gone: read.gone,
            claimed: Vec::new(),
        }
    }
}

impl From<Recovered> for Fetched {
    fn from(read: Recovered) -> Self {
        let mut fetched = Fetched {
            gone: read.gone,
            ..Fetched::default()
        };
        for (entry, count, idle) in read.entries {
            // What is claimed has been idle for some time; a fresh entry never was. The count alone
            // does not tell: an entry that was given back has none either.
            if count == 0 && idle.is_zero() {
                fetched.fresh.push(entry);
            } else {
                fetched.claimed.push((entry, count, idle));
            }
        }
        fetched
    }
}

pub(crate) struct ReaderState {
    tree: Arc<Tree>,
    subscription: Arc<SubscriptionState>,
    connection: Option<Arc<Connection>>,
    /// Reads whose reply is still to come, in the order in which they were sent, and what they ask for.
    reads: FuturesOrdered<BoxFuture<'static, Reply>>,
    asked: usize,
    /// Replies that came while a read was being sent; they go before the others.
    arrived: VecDeque<Reply>,
    /// Replies in a row that held less than was asked for: two of them, and the stream is at its end.
    short: u32,
    stop: Stop,
    delays: Delays,
    /// The next read claims nothing.
    plain: bool,
    /// When consumers that are gone are looked for.
    tidy_at: Instant,
    /// When deleted entries are looked for.
    purge_at: Instant,
    /// It is the purge's turn, and not that of a read.
    purge_turn: bool,
    look_for_hot_key_at: Instant,
    look_at_group_at: Instant,
    /// How long the server takes to answer a read, smoothed.
    answer: Duration,
}

/// The word to stop reading: the tree's, or the subscription's own, which may be taken back.
struct Stop {
    order: watch::Receiver<Order>,
    hold: watch::Receiver<Hold>,
}

impl Stop {
    /// Whether it is for good.
    fn is_final(&self) -> bool {
        self.order.borrow().stop_reading || self.hold.borrow().is_final()
    }

    /// Whether the workers are to start nothing.
    fn is_barred(&self) -> bool {
        self.hold.borrow().is_barred()
    }

    async fn given(&mut self) {
        // A sender that is gone went with the tree.
        tokio::select! {
            _ = self.order.wait_for(|order| order.stop_reading) => {}
            // Noticed even if it was taken back at once: the workers wait to be let go.
            _ = self.hold.wait_for(|hold| hold.is_barred()) => {}
        }
    }

    /// Returns when it is taken back, or for good.
    async fn taken_back(&mut self) {
        tokio::select! {
            _ = self.order.wait_for(|order| order.stop_reading) => {}
            _ = self.hold.wait_for(|hold| !hold.is_on() || hold.is_final()) => {}
        }
    }

    /// Waits for something, or for the word to stop, whichever comes first.
    async fn or<F: Future>(&mut self, waited_for: F) -> Option<F::Output> {
        tokio::select! {
            biased;
            () = self.given() => None,
            output = waited_for => Some(output),
        }
    }
}

impl Actor for Reader {
    type Msg = ReaderMessage;
    type State = ReaderState;
    type Arguments = (Arc<Tree>, Arc<SubscriptionState>);

    async fn pre_start(
        &self,
        myself: ActorRef<ReaderMessage>,
        (tree, subscription): Self::Arguments,
    ) -> Result<ReaderState, ActorProcessingErr> {
        if subscription.plan.settings.mode.reads_fresh() {
            let mut cursor = subscription.cursor();
            cursor.resume();
            subscription
                .group
                .in_flight
                .keep_left(subscription.source.index, cursor.is_recovering());
        }
        let stop = Stop {
            order: tree.order.subscribe(),
            hold: subscription.hold.subscribe(),
        };
        myself.cast(ReaderMessage::Next)?;
        Ok(ReaderState {
            tree,
            subscription,
            connection: None,
            reads: FuturesOrdered::new(),
            asked: 0,
            arrived: VecDeque::new(),
            short: 2,
            stop,
            delays: Delays::new(FIRST_PAUSE, LONGEST_PAUSE),
            plain: false,
            tidy_at: Instant::now(),
            purge_at: Instant::now(),
            purge_turn: false,
            look_for_hot_key_at: Instant::now(),
            look_at_group_at: Instant::now(),
            answer: Duration::ZERO,
        })
    }

    async fn handle(
        &self,
        myself: ActorRef<ReaderMessage>,
        ReaderMessage::Next: ReaderMessage,
        state: &mut ReaderState,
    ) -> Result<(), ActorProcessingErr> {
        if state.stop.is_final() {
            state.finish().await;
            myself.stop(None);
            return Ok(());
        }
        if state.stop.is_barred() && !state.goes_on() {
            state.rest().await;
        } else if let Err(error) = state.round().await {
            state.face(error).await?;
        }
        myself.cast(ReaderMessage::Next)?;
        Ok(())
    }
}

impl ReaderState {
    async fn round(&mut self) -> Result<(), ServerError> {
        let settings = &self.subscription.plan.settings;
        if settings.create_group && self.subscription.group.missing.load(Ordering::Acquire) {
            // Somebody else was told so. Or this reader was, and had no answer when it registered what is in
            // hand; reading would not tell it so again.
            let group = &self.subscription.group.group;
            return Err(ServerError::GroupGone(format!("there was no {group}")));
        }
        let Some(connection) = self.connection().await? else {
            return Ok(());
        };
        if !self.subscription.has_its_name(Instant::now()) {
            let subscription = Arc::clone(&self.subscription);
            if self.stop.or(subscription.named()).await.is_none() {
                return Ok(());
            }
        }
        match self.subscription.plan.settings.mode {
            ReadMode::Tail => self.read(connection, None).await,
            ReadMode::Claiming { min_idle } => self.read(connection, Some(min_idle)).await,
            ReadMode::Reclaim { min_idle } => self.reclaim(&connection, min_idle).await,
        }
    }

    /// The connection of this incarnation; `None` when the word to stop came first.
    async fn connection(&mut self) -> Result<Option<Arc<Connection>>, ServerError> {
        if let Some(connection) = &self.connection {
            return Ok(Some(Arc::clone(connection)));
        }
        let what = format!("reader-{}", self.subscription.name());
        let connect = self.tree.connect(Role::Reader, &what, LONGEST_PAUSE);
        let Some(connection) = self.stop.or(connect).await.transpose()? else {
            return Ok(None);
        };
        self.connection = Some(Arc::clone(&connection));
        *self
            .subscription
            .connection
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner) = Some(Arc::clone(&connection));
        Ok(Some(connection))
    }

    /// Lets the workers go on if nothing is against it.
    fn goes_on(&self) -> bool {
        // What was on its way back when its reader died goes all the way first.
        self.subscription.given_back.is_idle() && self.subscription.reopen()
    }

    /// Reads nothing for as long as there is a reason for it, and gives back what the workers have not
    /// started.
    async fn rest(&mut self) {
        if let Some(connection) = self.connection.clone() {
            self.take_last_replies(&connection).await;
        }
        loop {
            rest(&self.tree, &self.subscription, None, &AtomicU64::new(0)).await;
            self.subscription.at("reader.rests");
            tokio::select! {
                biased;
                () = self.stop.taken_back() => return,
                // From an actor that has ended meanwhile.
                () = self.subscription.lanes.returned() => {}
            }
        }
    }

    /// One round of reading from `>`; with `claim`, what was left behind for so long as well.
    async fn read(
        &mut self,
        connection: Arc<Connection>,
        claim: Option<Duration>,
    ) -> Result<(), ServerError> {
        let nothing_outstanding = self.reads.is_empty() && self.arrived.is_empty();
        if nothing_outstanding && self.take_up(&connection).await? {
            return Ok(());
        }
        if self.look_at_group_at <= Instant::now() {
            let every = self.subscription.plan.settings.block;
            self.look_at_group_at = Instant::now() + every.max(LOOK_AT_GROUP_EVERY);
            let look = upkeep::was_moved_back(&self.tree, &self.subscription);
            if self.stop.or(look).await.transpose()? == Some(true) {
                upkeep::remake_group(&self.tree, &self.subscription, false).await?;
            }
        }
        let due = self.subscription.cursor().recovery_due(Instant::now());
        // What a read has brought and nobody has taken yet is pending, and would be taken for lost.
        if let Some(after) = due.filter(|_| nothing_outstanding) {
            return self.recover(&connection, after).await;
        }
        let purging = claim.is_some() && self.purge_at <= Instant::now();
        if let Some(min_idle) = claim.filter(|_| purging)
            && nothing_outstanding
            && std::mem::take(&mut self.purge_turn)
        {
            return self.purge(&connection, min_idle).await;
        }
        self.purge_turn = true;
        self.subscription.at("reader.before_read");
        self.send_reads(&connection, claim);
        if self.reads.is_empty() && self.arrived.is_empty() {
            self.wait_for_room().await;
            return Ok(());
        }
        let mut stopping = false;
        let group = &self.subscription.group.group;
        let reply = loop {
            tokio::select! {
                biased;
                reply = next_reply(&mut self.arrived, &mut self.reads) => break reply,
                () = self.stop.given(), if !stopping => stopping = true,
                () = tokio::time::sleep(UNBLOCK_AGAIN), if stopping => {
                    read::end_blocked(&connection, &self.tree.settling, group).await;
                }
            }
        };
        let Some((asked, took, reply)) = reply else {
            return Ok(());
        };
        if let Some(took) = took {
            self.answer = self.answer / 4 * 3 + took / 4;
        }
        self.subscription.at("reader.reply");
        let fetched = reply?;
        if !fetched.claimed.is_empty() {
            // Nothing of the reply starts before these counts are what they were.
            left_behind::put_back(&self.subscription, &connection, &fetched.claimed).await?;
            // A long backlog of these does not keep fresh ones waiting.
            self.plain = fetched.claimed.len() >= asked;
        } else if fetched.fresh.len() >= asked && !stopping && !purging {
            self.read_ahead(&connection, claim).await;
        }
        self.take(asked, fetched)
    }

    /// While entries keep coming, the next read leaves before this reply is handed over: the workers
    /// may take the processor for a while, and the server would wait for them. What has come is still
    /// among what was asked for, so there is room for it.
    async fn read_ahead(&mut self, connection: &Arc<Connection>, claim: Option<Duration>) {
        self.short = 0;
        self.send_reads(connection, claim);
        // A read is sent when it is polled, and those before it may be ready already.
        while let Poll::Ready(Some(reply)) = futures_util::poll!(self.reads.next()) {
            self.arrived.push_back(reply);
        }
        for _ in 0..YIELDS {
            tokio::task::yield_now().await;
        }
    }

    /// Sends the reads that there is room for: two that do not block while entries keep coming, and
    /// one that blocks when the stream is at its end.
    fn send_reads(&mut self, connection: &Arc<Connection>, claim: Option<Duration>) {
        let settings = &self.subscription.plan.settings;
        // A recovery waits until nothing is outstanding.
        if self
            .subscription
            .cursor()
            .recovery_due(Instant::now())
            .is_some()
        {
            return;
        }
        // The steps of a purge come between reads that do not block, one at a time.
        let purging = claim.is_some() && self.purge_at <= Instant::now();
        let most = if purging { 1 } else { 2 };
        while self.reads.len() + self.arrived.len() < most {
            let at_end = self.short >= 2 && !purging;
            if at_end && !self.reads.is_empty() {
                return;
            }
            let count = self.room();
            if count == 0 {
                return;
            }
            let block = at_end.then(|| {
                // The second look of a recovery is not slept through.
                let until = self.subscription.cursor().recovery_waits_until();
                let left = until.map_or(settings.block, |at| {
                    at.saturating_duration_since(Instant::now())
                });
                left.min(settings.block).max(Duration::from_millis(1))
            });
            self.subscription.cursor().sent();
            self.asked += count;
            let (connection, group) = (
                Arc::clone(connection),
                Arc::clone(&self.subscription.group.group),
            );
            let consumer = Arc::clone(&self.subscription.source.consumer);
            let plain = std::mem::take(&mut self.plain);
            let claim = claim.filter(|_| !plain);
            let read: BoxFuture<'static, Reply> = Box::pin(async move {
                let sent = Instant::now();
                let fetched = match claim {
                    None => read::read_fresh(connection, group, consumer, count, block)
                        .await
                        .map(Fetched::from),
                    Some(idle) => {
                        read::read_claiming(connection, group, consumer, count, block, idle)
                            .await
                            .map(Fetched::from)
                    }
                };
                (count, block.is_none().then(|| sent.elapsed()), fetched)
            });
            self.reads.push_back(read);
            if at_end {
                return;
            }
        }
    }

    /// How many entries the next read may ask for.
    fn room(&self) -> usize {
        let settings = &self.subscription.plan.settings;
        let usage = self
            .subscription
            .group
            .in_flight
            .usage(self.subscription.source.index);
        let most = self.subscription.max_in_flight.load(Ordering::Relaxed);
        let most = most.min(self.subscription.lanes.enough(self.answer));
        let room = room(
            usage,
            self.asked,
            most,
            settings.max_bytes_in_flight,
            settings.batch,
        );
        // As long as the workers have enough to do, a small read only costs; it comes when there is
        // room for a larger one, or when they run out.
        let worth_it = settings.batch.min(most.div_ceil(4));
        if room < worth_it && !self.subscription.lanes.is_hungry() {
            return 0;
        }
        room
    }

    async fn wait_for_room(&mut self) {
        let subscription = Arc::clone(&self.subscription);
        if self.look_for_hot_key_at <= Instant::now() {
            self.look_for_hot_key_at = Instant::now() + LOOK_FOR_HOT_KEY_EVERY;
            upkeep::tell_of_hot_key(&subscription);
        }
        let changed = async {
            tokio::select! {
                () = subscription.group.in_flight.freed(subscription.source.index) => {}
                () = subscription.lanes.hungry() => {}
            }
        };
        let _ = self.stop.or(changed).await;
    }

    fn take(&mut self, asked: usize, fetched: Fetched) -> Result<(), ServerError> {
        let Fetched {
            fresh,
            claimed,
            gone,
        } = fetched;
        self.asked = self.asked.saturating_sub(asked);
        let brought = fresh.len() + claimed.len() + gone.len();
        self.short = if brought < asked { self.short + 1 } else { 0 };
        let highest = fresh.iter().map(|entry| entry.id()).max();
        let highest = highest.max(if claimed.is_empty() {
            gone.iter().copied().max()
        } else {
            None
        });
        if !claimed.is_empty() {
            self.take_recovered(claimed);
        }
        let source = &self.subscription.source;
        let received = fresh
            .into_iter()
            .map(|entry| Arc::new(Received::fresh(entry, source)))
            .collect();
        self.hand_over(received);
        self.subscription.at("reader.handed_over");
        self.subscription.cursor().registered(highest);
        self.subscription.at("reader.registered");
        self.report_gone(gone);
        self.well();
        Ok(())
    }

    /// Entries that were read before, and given back before anybody had started them: they are as fresh as
    /// ever, and were counted as read.
    fn take_up_fresh(&self, entries: impl Iterator<Item = Entry>) {
        let source = &self.subscription.source;
        let received = entries
            .map(|entry| Arc::new(Received::fresh(entry, source)))
            .collect();
        let again = self.hand_over(received) as u64;
        let read = &self.subscription.counters.read;
        read.fetch_sub(again, Ordering::Relaxed);
    }

    fn take_recovered(&mut self, entries: Vec<(Entry, u64, Duration)>) {
        let source = &self.subscription.source;
        let received = entries
            .into_iter()
            .map(|(entry, count, idle)| Arc::new(Received::recovered(entry, source, count, idle)))
            .collect();
        let handed = self.hand_over(received);
        if handed > 0 {
            let recovered = &self.subscription.counters.recovered;
            recovered.fetch_add(handed as u64, Ordering::Relaxed);
            let subscription = self.subscription.name().clone();
            self.tree.announcer.announce(Event::Recovered {
                subscription,
                entries: handed,
            });
        }
    }

    /// Registers what was read and puts it before the workers: one step, with nothing in between that
    /// could fail. Returns how many entries were new here.
    fn hand_over(&self, received: Vec<Arc<Received>>) -> usize {
        let subscription = &self.subscription;
        let group = &subscription.group;
        let foreign = |received: &Arc<Received>| {
            let group = subscription.plan.group.as_bytes();
            received.is_copy && message::group_of(&received.entry).is_some_and(|of| of != group)
        };
        // Copies that another group asked for are none of this group's business.
        let (others, ours): (Vec<_>, Vec<_>) = if received.iter().any(foreign) {
            received.into_iter().partition(foreign)
        } else {
            (Vec::new(), received)
        };
        if !others.is_empty() {
            let foreign_copies = &subscription.counters.foreign_copies;
            foreign_copies.fetch_add(others.len() as u64, Ordering::Relaxed);
            group
                .queue
                .acknowledge(others.iter().map(|other| other.id()));
        }
        let new = group.in_flight.register(ours, Instant::now());
        let count = new.len();
        let counters = &subscription.counters;
        counters.read.fetch_add(count as u64, Ordering::Relaxed);
        let settings = &subscription.plan.settings;
        if new.iter().any(|received| is_spent(received, settings)) {
            let (spent, new): (Vec<_>, Vec<_>) = new
                .into_iter()
                .partition(|received| is_spent(received, settings));
            subscription.lanes.push(new);
            for received in spent {
                subscription.settle(&received, Verdict::Spent);
            }
        } else {
            subscription.lanes.push(new);
        }
        count
    }

    fn report_gone(&self, gone: Vec<EntryId>) {
        if !gone.is_empty() {
            self.subscription.tell_of_gone(gone);
        }
    }

    fn well(&mut self) {
        self.delays.reset();
        self.subscription.condition.well(Part::Reading);
        if !self.subscription.started.swap(true, Ordering::Relaxed) {
            let subscription = self.subscription.name().clone();
            self.tree
                .announcer
                .announce(Event::Started { subscription });
        }
    }

    /// Decides what a failed read means, and waits where waiting helps.
    async fn face(&mut self, error: ServerError) -> Result<(), ActorProcessingErr> {
        if self.subscription.plan.settings.mode.reads_fresh() {
            self.lose_track().await;
        }
        match error {
            ServerError::Refused(_) | ServerError::Malformed(_) => return Err(error.into()),
            ServerError::GroupGone(_) if !self.subscription.plan.settings.create_group => {
                return Err(error.into());
            }
            _ => {}
        }
        // A group that can be made again is no trouble.
        if !matches!(error, ServerError::GroupGone(_)) {
            self.subscription.condition.trouble(Part::Reading, &error);
        }
        let pause = match error {
            ServerError::Blocked(_) => BLOCKED_FOR,
            ServerError::GroupGone(_) => {
                match upkeep::remake_group(&self.tree, &self.subscription, true).await {
                    Ok(()) => return Ok(()),
                    Err(error) => {
                        self.subscription.condition.trouble(Part::Reading, &error);
                        self.delays.next()
                    }
                }
            }
            _ => self.delays.next(),
        };
        let _ = self.stop.or(tokio::time::sleep(pause)).await;
        Ok(())
    }

    /// The outcome of a read is unknown. The replies that come after it are not registered: the recovery
    /// returns their entries.
    async fn lose_track(&mut self) {
        let index = self.subscription.source.index;
        self.subscription.cursor().lose_track();
        self.subscription.group.in_flight.keep_left(index, true);
        while next_reply(&mut self.arrived, &mut self.reads)
            .await
            .is_some()
        {}
        self.asked = 0;
        self.short = 2;
    }

    /// Takes the replies that are still to come, so that what they hold is given back and not lost
    /// sight of.
    async fn take_last_replies(&mut self, connection: &Connection) {
        let group = Arc::clone(&self.subscription.group.group);
        loop {
            let reply = loop {
                tokio::select! {
                    biased;
                    reply = next_reply(&mut self.arrived, &mut self.reads) => break reply,
                    () = tokio::time::sleep(UNBLOCK_AGAIN) => {
                        read::end_blocked(connection, &self.tree.settling, &group).await;
                    }
                }
            };
            match reply {
                None => return,
                Some((asked, _, Ok(read))) => {
                    let _ = self.take(asked, read);
                }
                Some((_, _, Err(error))) => {
                    tracing::debug!(target: "streamvisor", subscription = %self.subscription.name(), %error, "a last read failed");
                    self.lose_track().await;
                }
            }
        }
    }

    /// Takes the last replies and closes the connection.
    async fn finish(&mut self) {
        if let Some(connection) = self.connection.take() {
            self.take_last_replies(&connection).await;
            connection.close().await;
        }
    }
}

async fn next_reply(
    arrived: &mut VecDeque<Reply>,
    reads: &mut FuturesOrdered<BoxFuture<'static, Reply>>,
) -> Option<Reply> {
    match arrived.pop_front() {
        Some(reply) => Some(reply),
        None => reads.next().await,
    }
}

/// How many entries may be asked for, with this in hand and this many asked for already.
fn room(usage: Usage, asked: usize, most: usize, most_bytes: usize, batch: usize) -> usize {
    let entries = most.saturating_sub(usage.entries).saturating_sub(asked);
    let by_size = match usage.largest {
        0 => FIRST_COUNT,
        largest => {
            // What was asked for may turn out as large as the largest of late.
            let expected = asked.saturating_mul(largest);
            most_bytes
                .saturating_sub(usage.bytes)
                .saturating_sub(expected)
                / largest
        }
    };
    let nothing_in_hand = usage.entries == 0 && asked == 0;
    entries
        .min(by_size)
        .min(batch)
        .max(usize::from(nothing_in_hand && most > 0))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn usage(entries: usize, bytes: usize, largest: usize) -> Usage {
        Usage {
            entries,
            bytes,
            largest,
            parked: 0,
        }
    }

    #[test]
    fn room_is_bounded_by_entries_by_bytes_and_by_the_batch() {
        assert_eq!(room(usage(0, 0, 0), 0, 1000, 1 << 20, 200), FIRST_COUNT);
        assert_eq!(room(usage(0, 0, 100), 0, 1000, 1 << 20, 200), 200);
        assert_eq!(room(usage(900, 0, 100), 50, 1000, 1 << 20, 200), 50);
        assert_eq!(room(usage(900, 0, 100), 100, 1000, 1 << 20, 200), 0);
        assert_eq!(
            room(usage(10, 900_000, 10_000), 0, 1000, 1_000_000, 200),
            10
        );
        assert_eq!(
            room(usage(10, 900_000, 10_000), 10, 1000, 1_000_000, 200),
            0
        );
        assert_eq!(
            room(usage(10, 2_000_000, 10_000), 0, 1000, 1_000_000, 200),
            0
        );
    }

    #[test]
    fn with_nothing_in_hand_one_entry_of_any_size_is_read() {
        assert_eq!(room(usage(0, 0, 5_000_000), 0, 1000, 1_000_000, 200), 1);
        assert_eq!(room(usage(0, 0, 5_000_000), 1, 1000, 1_000_000, 200), 0);
        assert_eq!(
            room(usage(1, 5_000_000, 5_000_000), 0, 1000, 1_000_000, 200),
            0
        );
    }
}
