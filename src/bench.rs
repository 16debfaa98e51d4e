//! What `benches/` measures: the way of a batch of entries from the server's reply to the acknowledgements
//! that are to be sent, without a server. Not covered by semver.
#![allow(missing_docs)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use fred::interfaces::Resp3Frame as Frame;

use crate::message::{Entry, EntryId, Received, Source, test_source};
use crate::server::read;
use crate::state::{InFlight, Lanes, Seat, SettleQueue, Taken};

/// What a read of fresh entries is answered with.
#[derive(Clone)]
pub struct Reply(Frame);

impl Reply {
    /// As many entries with this body and two headers.
    pub fn of(entries: u64, body: &Bytes) -> Reply {
        let blob = |data: Bytes| Frame::BlobString {
            data,
            attributes: None,
        };
        let list = |data: Vec<Frame>| Frame::Array {
            data,
            attributes: None,
        };
        let entry = |number: u64| {
            let id = EntryId::new(1_700_000_000_000 + number, 0).to_string();
            let fields = [
                "_payload".into(),
                body.clone(),
                "h:kind".into(),
                "order".into(),
                "h:key".into(),
                format!("account-{}", number % 100).into(),
            ];
            list(vec![
                blob(id.into()),
                list(fields.into_iter().map(blob).collect()),
            ])
        };
        let entries = list((0..entries).map(entry).collect());
        Reply(list(vec![list(vec![blob("stream".into()), entries])]))
    }

    pub fn decode(self) -> Option<Vec<Entry>> {
        Some(read::fresh(self.0).ok()?.entries)
    }
}

/// The tables that a subscription's entries pass through, and the one worker that they go to.
pub struct Way {
    source: Arc<Source>,
    in_flight: InFlight,
    lanes: Lanes,
    seat: Seat,
    verdicts: SettleQueue,
}

/// Entries that were read and not handed over yet.
#[derive(Clone)]
pub struct Batch(Vec<Arc<Received>>);

impl Way {
    /// For entries in any order, or in the order of their key.
    pub fn new(ordered: bool) -> Option<Way> {
        let in_flight = InFlight::default();
        let source = test_source(in_flight.join());
        let lanes = Lanes::new(1, ordered.then(|| "h:key".into()), 1, true);
        lanes.measured(1_000, Duration::from_micros(100));
        let seat = lanes.enter(0)?;
        Some(Way {
            source,
            in_flight,
            lanes,
            seat,
            verdicts: SettleQueue::new(),
        })
    }

    pub fn receive(&self, entries: Vec<Entry>) -> Batch {
        let received = |entry| Arc::new(Received::fresh(entry, &self.source));
        Batch(entries.into_iter().map(received).collect())
    }

    pub fn register(&self, batch: Batch) -> Batch {
        Batch(self.in_flight.register(batch.0, Instant::now()))
    }

    pub fn forget(&self, batch: &Batch) {
        let ids = batch.0.iter().map(|received| received.id());
        self.in_flight.settled(ids);
    }

    /// Hands the entries over and runs each. Returns how many there were.
    pub fn hand_over(&self, batch: Batch, mut handler: impl FnMut(&Entry)) -> usize {
        self.lanes.push(batch.0);
        let mut handled = 0;
        while self.lanes.take(&self.seat) == Taken::Work {
            let mut next = self.lanes.start(&self.seat, |_| true);
            while let Some(run) = next {
                handler(&run.received.entry);
                handled += 1;
                let note = |ended: &Received| self.verdicts.acknowledge([ended.id()]);
                let may = Some(|_: &Received| true);
                next = self.lanes.end_and_start(&self.seat, run.number, note, may);
            }
        }
        handled
    }

    pub fn acknowledge(&self, batch: &Batch) {
        for received in &batch.0 {
            self.verdicts.acknowledge([received.id()]);
        }
    }

    /// Takes all acknowledgements that wait, as if the server confirmed them at once. Returns how many.
    pub fn settle(&self) -> usize {
        let mut settled = 0;
        loop {
            let ids = self.verdicts.take_acks();
            if ids.is_empty() {
                return settled;
            }
            settled += ids.len();
            self.verdicts.acks_done();
            self.in_flight.settled(ids);
        }
    }
}
