//! Every entry of a group that this process holds.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use hashbrown::{HashMap, HashSet};
use tokio::sync::{Notify, oneshot};

use super::lock;
use crate::message::{EntryId, Received};

/// Every entry of one (stream, group) that this process holds, with the consumer that owns it.
///
/// An entry comes in when a reader registers what it read, and goes out when the server has stored
/// its verdict. In between it is in exactly one place: waiting in the [`Lanes`](super::Lanes) of its
/// subscription, running in a worker, or parked or settling in the [`SettleQueue`](super::SettleQueue).
/// This table holds it all the while: it is what credit is derived from, what the keep-alive keeps
/// fresh, and what no reader hands over a second time.
#[derive(Default)]
pub(crate) struct InFlight {
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    held: HashMap<EntryId, Held>,
    /// The subscriptions of the group; a handful at most, so they are found by looking through them.
    subscriptions: Vec<Member>,
    /// How many subscriptions there ever were: the index of the next one.
    joined: usize,
    /// Entries that were let go of and stay pending in our name. Only kept while a recovery could find
    /// them and hand them over again.
    left: HashSet<EntryId>,
    /// The subscriptions that are recovering.
    recovering: HashSet<usize>,
    /// Who waits until an entry has been let go of.
    awaited: HashMap<EntryId, Vec<oneshot::Sender<()>>>,
    /// Nothing more is let go of.
    closed: bool,
}

/// A subscription of the group.
struct Member {
    index: usize,
    usage: Usage,
    /// Of its entries, those whose verdict the server has stored.
    settled: u64,
    /// Told whenever something was let go of, for whoever waits for room.
    freed: Arc<Notify>,
    /// Told when nothing is in hand or parked any more.
    emptied: Arc<Notify>,
}

fn member(subscriptions: &mut [Member], index: usize) -> Option<&mut Member> {
    subscriptions.iter_mut().find(|it| it.index == index)
}

impl Table {
    fn member(&mut self, index: usize) -> Option<&mut Member> {
        member(&mut self.subscriptions, index)
    }

    fn usage(&mut self, index: usize) -> Option<&mut Usage> {
        self.member(index).map(|it| &mut it.usage)
    }
}

struct Held {
    what: What,
    /// When it was read or last kept fresh.
    fresh_since: Instant,
}

enum What {
    InHand(Arc<Received>),
    /// Waits for an in-process delay; its body is no longer in memory.
    Parked {
        owner: Arc<str>,
        subscription: usize,
    },
    /// Its handler hangs in a call that cannot be ended. It is not kept fresh, so that another
    /// consumer can have it, and not run here again while the call lasts.
    Abandoned {
        owner: Arc<str>,
    },
}

impl What {
    fn owner(&self) -> &Arc<str> {
        match self {
            What::InHand(received) => &received.source.consumer,
            What::Parked { owner, .. } | What::Abandoned { owner } => owner,
        }
    }
}

/// What a subscription has in hand.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Usage {
    /// Entries in hand: waiting, running or settling.
    pub entries: usize,
    /// Their bytes.
    pub bytes: usize,
    /// Entries that wait for an in-process delay without their body.
    pub parked: usize,
    /// The size of the largest entry of late.
    pub largest: usize,
}

impl Table {
    /// The verdict on this entry is stored, as far as it can be.
    fn tell(&mut self, id: EntryId) {
        if self.awaited.is_empty() {
            return;
        }
        for waits in self.awaited.remove(&id).unwrap_or_default() {
            // Whoever waited may be gone.
            let _ = waits.send(());
        }
    }
}

impl Usage {
    fn remove(&mut self, bytes: usize) {
        self.entries = self.entries.saturating_sub(1);
        self.bytes = self.bytes.saturating_sub(bytes);
    }

    fn is_empty(&self) -> bool {
        self.entries == 0 && self.parked == 0
    }
}

/// Why an entry is let go of.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Because {
    /// The server has stored its verdict.
    Settled,
    /// It is another's, or nobody's.
    NotOurs,
    /// It stays pending in our name.
    Left,
}

impl InFlight {
    /// A subscription comes to the group. Returns the index by which it goes from now on; none is given
    /// twice.
    pub(crate) fn join(&self) -> usize {
        let mut table = lock(&self.table);
        let index = table.joined;
        table.joined += 1;
        table.subscriptions.push(Member {
            index,
            usage: Usage::default(),
            settled: 0,
            freed: Arc::default(),
            emptied: Arc::default(),
        });
        index
    }

    /// A subscription leaves the group. What it still has in hand stays here until it is let go of.
    pub(crate) fn part(&self, index: usize) {
        lock(&self.table)
            .subscriptions
            .retain(|it| it.index != index);
        self.keep_left(index, false);
    }

    /// Takes in what one subscription has read. What is held already is left out of what it returns: it is being taken
    /// care of.
    pub(crate) fn register(
        &self,
        mut received: Vec<Arc<Received>>,
        now: Instant,
    ) -> Vec<Arc<Received>> {
        let mut table = lock(&self.table);
        let table = &mut *table;
        table.held.reserve(received.len());
        received.retain(|received| {
            let place = match table.held.entry(received.id()) {
                hashbrown::hash_map::Entry::Vacant(place) => place,
                hashbrown::hash_map::Entry::Occupied(_) => return false,
            };
            place.insert(Held {
                what: What::InHand(Arc::clone(received)),
                fresh_since: now,
            });
            true
        });
        let of = received.first().map(|first| first.source.index);
        if let Some(usage) = of.and_then(|index| table.usage(index)) {
            let sizes = || received.iter().map(|received| received.bytes);
            usage.entries += received.len();
            usage.bytes += sizes().sum::<usize>();
            // Falls by an eighth with each reply, so that one large entry is not for ever.
            usage.largest = sizes()
                .max()
                .unwrap_or_default()
                .max(usage.largest - usage.largest / 8);
        }
        received
    }

    /// Whether this process holds the entry.
    #[cfg(test)]
    pub(crate) fn holds(&self, id: EntryId) -> bool {
        lock(&self.table).held.contains_key(&id)
    }

    /// The consumer in whose name the entry is held here.
    pub(crate) fn owner(&self, id: EntryId) -> Option<Arc<str>> {
        lock(&self.table)
            .held
            .get(&id)
            .map(|held| Arc::clone(held.what.owner()))
    }

    /// Those of the ids that are neither held nor were left pending on purpose.
    pub(crate) fn unknown_of<T>(&self, pending: Vec<T>, id: impl Fn(&T) -> EntryId) -> Vec<T> {
        let table = lock(&self.table);
        let known = |id| table.held.contains_key(&id) || table.left.contains(&id);
        pending
            .into_iter()
            .filter(|entry| !known(id(entry)))
            .collect()
    }

    /// The server has stored the verdicts: these are no longer ours.
    pub(crate) fn settled(&self, ids: impl IntoIterator<Item = EntryId>) {
        self.let_go(ids, Because::Settled);
    }

    /// Others see to these: they are no longer ours.
    pub(crate) fn release(&self, ids: impl IntoIterator<Item = EntryId>) {
        self.let_go(ids, Because::NotOurs);
    }

    /// These stay pending in our name, and nobody here handles them.
    pub(crate) fn leave(&self, ids: impl IntoIterator<Item = EntryId>) {
        self.let_go(ids, Because::Left);
    }

    /// The same for entries that were not started, of which another subscription may have some by now.
    pub(crate) fn hand_back(&self, entries: &[Arc<Received>]) {
        let ours: Vec<EntryId> = {
            let table = lock(&self.table);
            let ours = entries.iter().filter(|entry| {
                let held = table.held.get(&entry.id()).map(|held| &held.what);
                matches!(held, Some(What::InHand(held)) if Arc::ptr_eq(held, entry))
            });
            ours.map(|entry| entry.id()).collect()
        };
        self.leave(ours);
    }

    fn let_go(&self, ids: impl IntoIterator<Item = EntryId>, because: Because) {
        let mut freed: Vec<(usize, Arc<Notify>)> = Vec::new();
        let mut emptied: Vec<Arc<Notify>> = Vec::new();
        let mut gone = Vec::new(); // bodies are freed after the lock
        {
            let mut table = lock(&self.table);
            let table = &mut *table;
            for id in ids {
                if because == Because::Left && !table.recovering.is_empty() {
                    table.left.insert(id);
                }
                let Some(held) = table.held.remove(&id) else {
                    continue;
                };
                table.tell(id);
                let index = match &held.what {
                    What::InHand(received) => {
                        received.end_turn();
                        received.source.index
                    }
                    What::Parked { subscription, .. } => *subscription,
                    What::Abandoned { .. } => continue,
                };
                if let Some(member) = table.member(index) {
                    match &held.what {
                        What::InHand(received) => member.usage.remove(received.bytes),
                        _ => member.usage.parked = member.usage.parked.saturating_sub(1),
                    }
                    member.settled += u64::from(because == Because::Settled);
                    if !freed.iter().any(|(of, _)| *of == index) {
                        freed.push((index, Arc::clone(&member.freed)));
                    }
                    if member.usage.is_empty() {
                        emptied.push(Arc::clone(&member.emptied));
                    }
                }
                gone.push(held);
            }
        }
        freed.iter().for_each(|(_, freed)| freed.notify_one());
        emptied.iter().for_each(|emptied| emptied.notify_waiters());
    }

    /// Gives the entry's body and credit back while it waits for its delay; `false` when `most` of
    /// the subscription are parked already, and then it keeps both.
    pub(crate) fn park(&self, id: EntryId, most: usize) -> bool {
        let mut table = lock(&self.table);
        let table = &mut *table;
        let Some(held) = table.held.get_mut(&id) else {
            return true;
        };
        let What::InHand(received) = &held.what else {
            return true;
        };
        received.end_turn();
        let (index, bytes) = (received.source.index, received.bytes);
        let Some(member) = member(&mut table.subscriptions, index) else {
            return false;
        };
        if member.usage.parked >= most {
            return false;
        }
        member.usage.parked += 1;
        member.usage.remove(bytes);
        member.freed.notify_one();
        held.what = What::Parked {
            owner: Arc::clone(&received.source.consumer),
            subscription: index,
        };
        table.tell(id);
        true
    }

    /// Resolves once the entry has been let go of, or is parked; fails if the tree ends before.
    pub(crate) fn let_go_of(&self, id: EntryId) -> oneshot::Receiver<()> {
        let (sender, receiver) = oneshot::channel();
        let mut table = lock(&self.table);
        match table.held.get(&id) {
            None => {
                let _ = sender.send(());
            }
            Some(_) if table.closed => {}
            Some(_) => table.awaited.entry(id).or_default().push(sender),
        }
        receiver
    }

    /// Nobody will let go of anything any more.
    pub(crate) fn close(&self) {
        let mut table = lock(&self.table);
        table.closed = true;
        table.awaited = HashMap::new();
    }

    /// Everything of this subscription that is held.
    pub(crate) fn of(&self, subscription: usize) -> Vec<EntryId> {
        let table = lock(&self.table);
        let is_its = |held: &Held| match &held.what {
            What::InHand(received) => received.source.index == subscription,
            What::Parked {
                subscription: of, ..
            } => *of == subscription,
            What::Abandoned { .. } => false,
        };
        let its = table.held.iter().filter(|(_, held)| is_its(held));
        its.map(|(&id, _)| id).collect()
    }

    /// Whether the entry was given up on.
    pub(crate) fn is_abandoned(&self, id: EntryId) -> bool {
        let table = lock(&self.table);
        matches!(table.held.get(&id), Some(held) if matches!(held.what, What::Abandoned { .. }))
    }

    /// Gives up on an entry whose handler cannot be ended.
    pub(crate) fn abandon(&self, id: EntryId) {
        let mut table = lock(&self.table);
        let table = &mut *table;
        let Some(held) = table.held.get_mut(&id) else {
            return;
        };
        if let What::InHand(received) = &held.what {
            received.end_turn();
            let index = received.source.index;
            let member = member(&mut table.subscriptions, index);
            if let Some(member) = member {
                member.usage.remove(received.bytes);
                member.freed.notify_one();
                if member.usage.is_empty() {
                    member.emptied.notify_waiters();
                }
            }
            held.what = What::Abandoned {
                owner: Arc::clone(&received.source.consumer),
            };
        }
    }

    /// Everything that the subscription has in hand, but for these, stays pending in our name.
    pub(crate) fn leave_all_of(&self, subscription: usize, except: &HashSet<EntryId>) {
        let ids: Vec<EntryId> = {
            let table = lock(&self.table);
            let its = table.held.iter().filter(|(id, held)| {
                let What::InHand(received) = &held.what else {
                    return false;
                };
                received.source.index == subscription && !except.contains(*id)
            });
            its.map(|(id, _)| *id).collect()
        };
        self.leave(ids);
    }

    /// What the subscription has in hand.
    pub(crate) fn usage(&self, subscription: usize) -> Usage {
        let usage = lock(&self.table).usage(subscription).copied();
        usage.unwrap_or_default()
    }

    /// How many of its entries have their verdict stored on the server.
    pub(crate) fn settled_of(&self, subscription: usize) -> u64 {
        let mut table = lock(&self.table);
        table.member(subscription).map_or(0, |it| it.settled)
    }

    /// Those of the ids that belong to the subscription.
    pub(crate) fn only_of(&self, subscription: usize, ids: Vec<EntryId>) -> Vec<EntryId> {
        let table = lock(&self.table);
        let of = |id: &EntryId| match table.held.get(id).map(|held| &held.what) {
            Some(What::InHand(received)) => received.source.index == subscription,
            Some(What::Parked {
                subscription: of, ..
            }) => *of == subscription,
            Some(What::Abandoned { .. }) | None => false,
        };
        ids.into_iter().filter(of).collect()
    }

    /// Returns when something of the subscription was let go of since the last call.
    pub(crate) async fn freed(&self, subscription: usize) {
        let freed = lock(&self.table)
            .member(subscription)
            .map(|it| Arc::clone(&it.freed));
        match freed {
            Some(freed) => freed.notified().await,
            None => std::future::pending().await,
        }
    }

    /// Returns once the subscription has nothing in hand, and nothing parked.
    pub(crate) async fn emptied(&self, subscription: usize) {
        loop {
            let Some(emptied) = lock(&self.table)
                .member(subscription)
                .map(|it| Arc::clone(&it.emptied))
            else {
                return;
            };
            let told = emptied.notified();
            tokio::pin!(told);
            told.as_mut().enable();
            if self.usage(subscription).is_empty() {
                return;
            }
            told.await;
        }
    }

    /// Has whoever waits for something to be let go of look again.
    pub(crate) fn nudge(&self, subscription: usize) {
        if let Some(member) = lock(&self.table).member(subscription) {
            member.freed.notify_one();
        }
    }

    /// This subscription's reader recovers from now on, or no longer. As long as one does, ids that
    /// stay pending are remembered.
    pub(crate) fn keep_left(&self, subscription: usize, recovering: bool) {
        let mut table = lock(&self.table);
        if recovering {
            table.recovering.insert(subscription);
        } else {
            table.recovering.remove(&subscription);
            if table.recovering.is_empty() {
                table.left = HashSet::new();
            }
        }
    }

    /// Everything held, with the consumer that owns it and the server's count of its deliveries.
    pub(crate) fn owned(&self) -> Vec<(EntryId, Arc<str>, u64)> {
        let count = |what: &What| match what {
            What::InHand(received) => received.count_now(),
            What::Parked { .. } | What::Abandoned { .. } => 1,
        };
        let table = lock(&self.table);
        table
            .held
            .iter()
            .map(|(&id, held)| (id, Arc::clone(held.what.owner()), count(&held.what)))
            .collect()
    }

    /// Entries that were not kept fresh for this long, with the consumers that own them.
    pub(crate) fn aging(&self, age: Duration, now: Instant) -> Vec<(EntryId, Arc<str>)> {
        let table = lock(&self.table);
        let old = |held: &Held| now.saturating_duration_since(held.fresh_since) >= age;
        let kept = |held: &Held| match &held.what {
            What::InHand(received) => !received.is_lost(),
            What::Parked { .. } => true,
            What::Abandoned { .. } => false,
        };
        let aging = table
            .held
            .iter()
            .filter(|(_, held)| old(held) && kept(held));
        aging
            .map(|(&id, held)| (id, Arc::clone(held.what.owner())))
            .collect()
    }

    /// What a reclaim that takes entries idle for `age` could take from this process itself: what was
    /// not kept fresh of late, as after a pause of the whole process, and what was given up on.
    pub(crate) fn stale(&self, age: Duration, now: Instant) -> Vec<EntryId> {
        let table = lock(&self.table);
        let stale = |held: &Held| {
            matches!(held.what, What::Abandoned { .. })
                // The server's clock began earlier than ours, by the time that the reply took.
                || now.saturating_duration_since(held.fresh_since) >= age / 2
        };
        let stale = table.held.iter().filter(|(_, held)| stale(held));
        stale.map(|(&id, _)| id).collect()
    }

    /// The server has these as fresh since `now`.
    pub(crate) fn refreshed(&self, ids: &[EntryId], now: Instant) {
        let mut table = lock(&self.table);
        for id in ids {
            if let Some(held) = table.held.get_mut(id) {
                held.fresh_since = now;
            }
        }
    }

    /// Another consumer owns the entry. One in hand is told of it; a parked one is let go of, since
    /// the other consumer will give the verdict. Returns its subscription, if this is news.
    pub(crate) fn lose(&self, id: EntryId) -> Option<usize> {
        let (subscription, received) = {
            let table = lock(&self.table);
            match &table.held.get(&id)?.what {
                What::InHand(received) if received.is_lost() => return None,
                What::InHand(received) => (received.source.index, Some(Arc::clone(received))),
                What::Parked { subscription, .. } => (*subscription, None),
                What::Abandoned { .. } => return None,
            }
        };
        match received {
            Some(received) => received.lose(),
            None => self.release([id]),
        }
        Some(subscription)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::Entry;
    use crate::message::test_source as source;

    fn received(ms: u64, subscription: usize) -> Arc<Received> {
        let entry = Entry::new(EntryId::new(ms, 0), [("f", "1234567")]);
        Arc::new(Received::fresh(entry, &source(subscription)))
    }

    fn id(ms: u64) -> EntryId {
        EntryId::new(ms, 0)
    }

    fn group_of(subscriptions: usize) -> InFlight {
        let held = InFlight::default();
        (0..subscriptions).for_each(|index| assert_eq!(held.join(), index));
        held
    }

    fn usage(entries: usize, parked: usize) -> Usage {
        Usage {
            entries,
            bytes: entries * 8,
            parked,
            largest: 8,
        }
    }

    #[test]
    fn an_entry_is_taken_in_once_and_its_credit_comes_back_once() {
        let held = group_of(2);
        assert_eq!(
            held.register(vec![received(1, 0), received(2, 0)], Instant::now())
                .len(),
            2
        );
        assert_eq!(
            held.register(vec![received(2, 0), received(2, 1)], Instant::now())
                .len(),
            0
        );
        assert_eq!(held.usage(0), usage(2, 0));
        assert_eq!(held.usage(1).entries, 0);
        held.release([id(2), id(2), id(9)]);
        assert_eq!(held.usage(0), usage(1, 0));
    }

    #[test]
    fn parking_gives_the_credit_back_until_the_bound() {
        let held = group_of(1);
        held.register((1..=3).map(|ms| received(ms, 0)).collect(), Instant::now());
        assert!(held.park(id(1), 2));
        assert!(held.park(id(2), 2));
        assert!(!held.park(id(3), 2));
        assert_eq!(held.usage(0), usage(1, 2));
        held.release([id(1), id(3)]);
        assert_eq!(held.usage(0), usage(0, 1));
    }

    #[test]
    fn only_what_is_old_is_kept_fresh_and_nothing_that_was_given_up() {
        let held = group_of(1);
        let (then, age) = (Instant::now(), Duration::from_secs(5));
        held.register((1..=4).map(|ms| received(ms, 0)).collect(), then);
        assert!(held.aging(age, then).is_empty());
        held.park(id(1), 1);
        held.abandon(id(2));
        held.refreshed(&[id(3)], then + age);
        let mut aging: Vec<_> = held
            .aging(age, then + age)
            .into_iter()
            .map(|(id, _)| id)
            .collect();
        aging.sort();
        assert_eq!(aging, [id(1), id(4)]);
        assert_eq!((held.lose(id(4)), held.lose(id(1))), (Some(0), Some(0)));
        assert_eq!((held.lose(id(4)), held.lose(id(1))), (None, None));
        assert!(!held.holds(id(1)));
        assert!(held.aging(age, then + age).is_empty());
    }

    #[test]
    fn what_was_left_pending_is_remembered_while_a_recovery_could_find_it() {
        let held = group_of(1);
        held.keep_left(0, true);
        held.register(vec![received(1, 0), received(2, 0)], Instant::now());
        held.leave([id(1)]);
        held.release([id(2)]);
        let ids = vec![id(1), id(2), id(3)];
        assert_eq!(held.unknown_of(ids.clone(), |id| *id), [id(2), id(3)]);
        held.keep_left(0, false);
        assert_eq!(held.unknown_of(ids, |id| *id), [id(1), id(2), id(3)]);
    }

    #[test]
    fn what_another_subscription_has_taken_over_meanwhile_is_not_let_go_of() {
        let held = group_of(2);
        let given_back = held.register(vec![received(1, 0)], Instant::now());
        held.hand_back(&given_back);
        assert!(!held.holds(id(1)));
        held.register(vec![received(1, 1)], Instant::now());
        held.hand_back(&given_back);
        assert_eq!((held.usage(0).entries, held.usage(1).entries), (0, 1));
    }

    #[test]
    fn what_waits_is_registered_as_often_as_it_was_started() {
        let held = group_of(1);
        let entry = Entry::new(id(2), [("f", "v")]);
        let waiting = Arc::new(Received::recovered(entry, &source(0), 1, Duration::ZERO));
        let held_now = held.register(vec![received(1, 0), waiting], Instant::now());
        let counts = || {
            let mut owned = held.owned();
            owned.sort();
            owned.into_iter().map(|(.., count)| count)
        };
        assert!(counts().eq([1, 1]));
        held_now[1].start_counted();
        assert!(counts().eq([1, 2]));
    }

    #[tokio::test]
    async fn freeing_is_noticed_even_when_it_comes_first() {
        let held = group_of(2);
        held.register(vec![received(1, 1)], Instant::now());
        held.release([id(1)]);
        held.freed(1).await;
    }

    #[tokio::test]
    async fn a_subscription_that_has_left_takes_nothing_along_and_leaves_its_index_to_nobody() {
        let held = group_of(2);
        held.register(vec![received(1, 0), received(2, 0)], Instant::now());
        held.register(vec![received(3, 1)], Instant::now());
        assert_eq!(held.only_of(0, vec![id(1), id(2), id(3)]), [id(1), id(2)]);
        held.settled([id(1)]);
        assert_eq!((held.settled_of(0), held.settled_of(1)), (1, 0));
        let mut emptied = Box::pin(held.emptied(0));
        assert!(futures_util::poll!(emptied.as_mut()).is_pending());
        held.park(id(2), 1);
        assert!(futures_util::poll!(emptied.as_mut()).is_pending());
        held.release([id(2)]);
        emptied.await;
        held.part(0);
        assert_eq!(held.join(), 2);
        assert_eq!(held.usage(1).entries, 1);
        held.settled([id(3)]);
        held.emptied(1).await;
        held.freed(1).await;
    }
}
