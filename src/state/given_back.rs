//! What was read and not started, on its way back to the server and after.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use super::lock;
use crate::message::{EntryId, Received};

/// Entries of a subscription that were not started and go back to the server, and those that have
/// gone there.
///
/// What goes back stays here until the server has it, so that whoever gives it back may die over it.
/// Afterwards it is still pending in this consumer's name, unless another one takes it: a subscription
/// that goes on takes up what is left of it, and no one else would where nothing reclaims.
#[derive(Default)]
pub(crate) struct GivenBack {
    /// One at a time gives back, so that nothing is given back, or counted, twice.
    pub turn: tokio::sync::Mutex<()>,
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    going: VecDeque<Arc<Received>>,
    /// In the order of their ids, with the count that each has.
    gone: VecDeque<(EntryId, u64)>,
}

impl GivenBack {
    /// These will not be started.
    pub(crate) fn put(&self, waiting: Vec<Arc<Received>>) {
        lock(&self.inner).going.extend(waiting);
    }

    /// Nothing is on its way.
    pub(crate) fn is_idle(&self) -> bool {
        lock(&self.inner).going.is_empty()
    }

    /// The entries to give back next, at most so many; they stay here until [`went`](Self::went).
    pub(crate) fn next(&self, most: usize) -> Vec<Arc<Received>> {
        let inner = lock(&self.inner);
        inner.going.iter().take(most).cloned().collect()
    }

    /// The first so many of those on their way are pending on the server as if they had never been
    /// read. With `remember` they are taken up again one day.
    pub(crate) fn went(&self, count: usize, remember: bool) {
        let mut inner = lock(&self.inner);
        let inner = &mut *inner;
        let went = inner.going.drain(..count.min(inner.going.len()));
        if remember {
            let went = went.map(|received| (received.id(), received.count_before()));
            inner.gone.extend(went);
            inner.gone.make_contiguous().sort_unstable();
        }
    }

    /// The first so many of those that were given back and may still be ours, with their counts.
    pub(crate) fn ours(&self, most: usize) -> Vec<(EntryId, u64)> {
        lock(&self.inner).gone.iter().take(most).copied().collect()
    }

    /// The first so many of those were taken up again, or have found another owner.
    pub(crate) fn taken_up(&self, count: usize) {
        let mut inner = lock(&self.inner);
        let count = count.min(inner.gone.len());
        inner.gone.drain(..count);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::{Entry, test_source as source};

    fn received(ms: std::ops::RangeInclusive<u64>) -> Vec<Arc<Received>> {
        let entry = |ms| Entry::new(EntryId::new(ms, 0), [("f", "v")]);
        ms.map(|ms| Arc::new(Received::fresh(entry(ms), &source(0))))
            .collect()
    }

    fn ours(given_back: &GivenBack, most: usize) -> Vec<(u64, u64)> {
        let ours = given_back.ours(most).into_iter();
        ours.map(|(id, count)| (id.ms, count)).collect()
    }

    #[test]
    fn an_entry_is_on_its_way_until_the_server_has_it_and_then_ours_until_it_is_taken_up() {
        let given_back = GivenBack::default();
        given_back.put(received(4..=6));
        assert_eq!(given_back.next(2).len(), 2);
        // Whoever took these has died.
        assert_eq!(given_back.next(2).len(), 2);
        given_back.went(2, true);
        assert!(!given_back.is_idle());
        given_back.went(1, true);
        assert!(given_back.is_idle());
        given_back.put(received(1..=1));
        given_back.went(1, true);
        assert_eq!(ours(&given_back, 2), [(1, 0), (4, 0)]);
        given_back.taken_up(2);
        given_back.put(received(9..=9));
        given_back.went(1, false);
        assert_eq!(ours(&given_back, 9), [(5, 0), (6, 0)]);
    }
}
