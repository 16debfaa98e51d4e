//! The only code that speaks to Redis and Valkey. What it says, and why, is written in
//! ARCHITECTURE.md.

pub(crate) mod capabilities;
pub(crate) mod connect;
pub(crate) mod delay;
pub(crate) mod errors;
mod frame;
pub(crate) mod group;
pub(crate) mod keep_alive;
pub(crate) mod publish;
pub(crate) mod read;
pub(crate) mod reclaim;
pub(crate) mod settle;

#[cfg(test)]
mod fuzz;
#[cfg(test)]
mod tests;

pub(crate) use connect::{Connection, Role};
pub(crate) use errors::ServerError;
pub(crate) use group::Group;

use std::sync::Arc;

use bytes::{BufMut, Bytes, BytesMut};
use fred::types::Value;

use crate::message::EntryId;

/// Entry ids as arguments, all in one buffer: no allocation for each.
pub(crate) struct Ids {
    text: BytesMut,
}

impl Ids {
    pub(crate) fn with_capacity(ids: usize) -> Self {
        // Milliseconds of thirteen digits, a dash and a short sequence number, nearly always.
        Ids {
            text: BytesMut::with_capacity(ids * 18),
        }
    }

    pub(crate) fn encode(&mut self, id: EntryId) -> Value {
        put_number(&mut self.text, id.ms);
        self.text.put_u8(b'-');
        put_number(&mut self.text, id.seq);
        Value::Bytes(self.text.split().freeze())
    }
}

fn put_number(text: &mut BytesMut, mut number: u64) {
    let mut digits = [0; 20];
    let mut first = digits.len();
    for place in digits.iter_mut().rev() {
        *place = b'0' + (number % 10) as u8;
        number /= 10;
        first -= 1;
        if number == 0 {
            break;
        }
    }
    text.put_slice(digits.get(first..).unwrap_or_default());
}

pub(crate) fn encode_id(id: EntryId) -> Value {
    Ids::with_capacity(1).encode(id)
}

/// A number as an argument, beyond what fits an `i64` too.
pub(crate) fn encode_number(number: u64) -> Value {
    i64::try_from(number).map_or_else(|_| Value::from(number.to_string()), Value::Integer)
}

/// A duration as an argument, in whole milliseconds, rounded up.
pub(crate) fn encode_milliseconds(duration: std::time::Duration) -> Value {
    let whole = duration.as_nanos().div_ceil(1_000_000);
    // Beyond this a script could not count exactly.
    Value::Integer(i64::try_from(whole).unwrap_or(i64::MAX).min(1 << 52))
}

/// Names of consumers as arguments. Neighbours mostly share one: only a change copies it.
#[derive(Default)]
pub(crate) struct Consumers {
    last: Option<(Arc<str>, Bytes)>,
}

impl Consumers {
    pub(crate) fn encode(&mut self, consumer: &Arc<str>) -> Value {
        match &self.last {
            Some((last, encoded)) if Arc::ptr_eq(last, consumer) => Value::Bytes(encoded.clone()),
            _ => {
                let encoded = Bytes::copy_from_slice(consumer.as_bytes());
                self.last = Some((consumer.clone(), encoded.clone()));
                Value::Bytes(encoded)
            }
        }
    }
}

/// Text as an argument; a copy of it.
pub(crate) fn encode_text(text: &str) -> Value {
    Value::Bytes(Bytes::copy_from_slice(text.as_bytes()))
}

#[cfg(test)]
mod encoding {
    use super::*;

    #[test]
    fn each_consumer_is_written_by_its_own_name() {
        let (a, b): (Arc<str>, Arc<str>) = ("a".into(), "b".into());
        let mut consumers = Consumers::default();
        let written = [&a, &a, &b, &a, &"a".into()].map(|consumer| consumers.encode(consumer));
        let expected = ["a", "a", "b", "a", "a"].map(|name| Value::Bytes(Bytes::from(name)));
        assert_eq!(written, expected);
    }

    #[test]
    fn ids_are_written_as_the_server_writes_them() {
        let mut ids = Ids::with_capacity(1);
        for id in [
            EntryId::MIN,
            EntryId::MAX,
            EntryId::new(1_517_363_399_650, 7),
            EntryId::new(10, 100),
            EntryId::new(0, u64::MAX),
        ] {
            let Value::Bytes(text) = ids.encode(id) else {
                panic!("bytes")
            };
            assert_eq!(text, id.to_string());
        }
    }
}
