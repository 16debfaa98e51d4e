//! Any bytes that a server may answer with, and any reply that is nearly right: decoding never panics, and
//! what is right is taken apart without loss. How to run these for longer: `docs/reliability.md`.

use std::time::Duration;

use bytes::{Bytes, BytesMut};

use super::errors::ServerError;
use super::frame::{self, Frame, Listed, tests::blob, tests::list, tests::number};
use super::group::group_state;
use super::read::{entries, pending, recovered};
use super::settle::outcomes;
use super::{Ids, encode_id};
use crate::message::{Entry, EntryId};

/// Bytes of the input, one after the other; zeroes once they are used up.
struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    fn byte(&mut self) -> u8 {
        let (byte, rest) = self.0.split_first().unwrap_or((&0, &[]));
        self.0 = rest;
        *byte
    }

    fn number(&mut self) -> u64 {
        match self.byte() {
            // Small numbers mostly, and now and then one of any size.
            small @ 0..=250 => u64::from(small),
            251 => u64::MAX,
            252 => i64::MAX as u64,
            _ => u64::from_le_bytes(std::array::from_fn(|_| self.byte())),
        }
    }

    fn bytes(&mut self) -> &'a [u8] {
        let length = usize::from(self.byte() % 16).min(self.0.len());
        let (bytes, rest) = self.0.split_at(length);
        self.0 = rest;
        bytes
    }

    fn id(&mut self) -> EntryId {
        EntryId::new(self.number(), self.number())
    }

    fn fields(&mut self) -> Vec<Bytes> {
        let pairs = usize::from(self.byte() % 4);
        (0..2 * pairs)
            .map(|_| match self.byte() {
                0 => Bytes::from_static(b"message"),
                1 => Bytes::from_static(b"pmessage"),
                _ => Bytes::copy_from_slice(self.bytes()),
            })
            .collect()
    }

    /// Sometimes the frame, sometimes another one in its place.
    fn perhaps(&mut self, frame: Frame) -> Frame {
        match self.byte() {
            0..=239 => frame,
            240..=243 => Frame::Null,
            244..=247 => number(self.number() as i64),
            248..=250 => blob(self.bytes()),
            251 => list(vec![frame]),
            252 => list(vec![]),
            253 => Frame::Double {
                data: f64::from_bits(self.number()),
                attributes: None,
            },
            254 => Frame::Push {
                data: vec![frame],
                attributes: None,
            },
            _ => Frame::SimpleError {
                data: String::from_utf8_lossy(self.bytes()).into_owned().into(),
                attributes: None,
            },
        }
    }

    fn list(&mut self, frames: Vec<Frame>) -> Frame {
        let mut frames: Vec<_> = frames
            .into_iter()
            .map(|frame| self.perhaps(frame))
            .collect();
        match self.byte() {
            255 => drop(frames.pop()),
            254 => frames.push(number(7)),
            _ => {}
        }
        list(frames)
    }

    /// An entry as it is listed, with what a read that claims puts behind it.
    fn listed(&mut self, claimed: bool) -> Frame {
        let id = self.id();
        let fields = self.fields().into_iter().map(blob).collect();
        let mut parts = vec![blob(id.to_string()), self.list(fields)];
        if claimed {
            parts.push(number(self.number() as i64));
            parts.push(number(self.number() as i64));
        }
        self.list(parts)
    }

    fn many(&mut self, one: impl Fn(&mut Self) -> Frame) -> Frame {
        let count = self.byte() % 5;
        let all = (0..count).map(|_| one(self)).collect();
        self.list(all)
    }
}

/// Everything that takes a reply apart has a look at this one.
fn decode(frame: Frame) {
    if let Err(error) = frame::checked(frame.clone()) {
        assert!(!matches!(error, ServerError::Malformed(_)));
    }
    if let Ok(listed) = entries(frame.clone()) {
        for entry in listed {
            if let Ok((_, mut rest)) = frame::listed(entry) {
                let _ = rest.next().map(frame::milliseconds);
                let _ = rest.next().map(frame::count);
            }
        }
    }
    let _ = pending(frame.clone());
    let _ = recovered(frame.clone(), frame::id);
    let _ = group_state(frame.clone());
    let _ = outcomes(frame.clone(), 2);
    let _ = frame::ids(frame.clone());
    let _ = frame::fields(frame.clone());
    let _ = frame::text(frame.clone());
    let _ = frame::tuple::<3>(frame.clone());
    if let Ok(elements) = frame::array(frame) {
        for element in elements {
            let _ = pending(element.clone());
            let _ = group_state(element);
        }
    }
}

#[test]
fn no_bytes_of_a_server_make_a_decoder_panic() {
    bolero::check!().for_each(|input: &[u8]| {
        let mut buffer = BytesMut::from(input);
        // As the client takes them apart before they come here.
        while let Ok(Some((reply, _, _))) =
            redis_protocol::resp2::decode::decode_bytes_mut(&mut buffer)
        {
            decode(reply.into_resp3());
        }
    });
}

#[test]
fn no_reply_that_is_nearly_right_makes_a_decoder_panic() {
    bolero::check!().for_each(|input: &[u8]| {
        let mut input = Input(input);
        let reply = match input.byte() % 6 {
            0 => {
                let claimed = input.byte() % 2 == 0;
                let all = input.many(|input| input.listed(claimed));
                let stream = input.list(vec![blob("s"), all]);
                input.list(vec![stream])
            }
            1 => {
                let taken = input.many(|input| {
                    let id = blob(input.id().to_string());
                    let fields = input.fields().into_iter().map(blob).collect();
                    let fields = input.list(fields);
                    let (count, idle) = (number(input.number() as i64), number(3));
                    input.list(vec![id, fields, count, idle])
                });
                let gone = input.many(|input| blob(input.id().to_string()));
                let next = blob(input.id().to_string());
                input.list(vec![next, taken, gone])
            }
            2 => input.many(|input| {
                let id = blob(input.id().to_string());
                let (idle, count) = (number(input.number() as i64), number(1));
                input.list(vec![id, blob("c"), idle, count])
            }),
            3 => input.many(|input| {
                let last = blob(input.id().to_string());
                let name = blob(input.bytes());
                let lag = number(input.number() as i64);
                input.list(vec![
                    blob("name"),
                    name,
                    blob("consumers"),
                    number(1),
                    blob("pending"),
                    number(2),
                    blob("last-delivered-id"),
                    last,
                    blob("lag"),
                    lag,
                ])
            }),
            4 => input.many(|input| {
                let code = number(i64::from(input.byte() % 8));
                let text = blob(input.bytes());
                match input.byte() % 2 {
                    0 => code,
                    _ => input.list(vec![code, text]),
                }
            }),
            _ => Frame::SimpleError {
                data: String::from_utf8_lossy(input.0).into_owned().into(),
                attributes: None,
            },
        };
        decode(reply);
    });
}

#[test]
fn a_read_that_is_right_is_decoded_without_loss() {
    bolero::check!().for_each(|input: &[u8]| {
        let mut input = Input(input);
        let count = input.byte() % 5;
        let expected: Vec<(Entry, u64, Duration)> = (0..count)
            .map(|_| {
                let (id, fields) = (input.id(), input.fields());
                let count = input.number() >> 1;
                let idle = Duration::from_millis(input.number() >> 1);
                (Entry { id, fields }, count, idle)
            })
            .collect();
        let fields = |entry: &Entry| {
            let mut fields: Vec<Frame> = entry.fields.iter().map(blob).collect();
            // What the client takes for a message of a channel comes like this.
            let message = match fields.len() {
                4 => entry.fields.first().is_some_and(|name| name == "pmessage"),
                3 => entry.fields.first().is_some_and(|name| name == "message"),
                _ => false,
            };
            if !message {
                return list(fields);
            }
            fields.insert(0, blob("pubsub"));
            Frame::Push {
                data: fields,
                attributes: None,
            }
        };
        let id = |entry: &Entry| blob(entry.id.to_string());
        let listed = expected.iter().map(|(entry, count, idle)| {
            let (idle, count) = (number(idle.as_millis() as i64), number(*count as i64));
            list(vec![id(entry), fields(entry), idle, count])
        });
        let read = list(vec![list(vec![blob("s"), list(listed.collect())])]);
        let read: Vec<_> = entries(read).unwrap();
        assert_eq!(read.len(), expected.len());
        for (frame, (entry, count, idle)) in read.into_iter().zip(&expected) {
            let (decoded, mut rest) = frame::listed(frame).unwrap();
            assert_eq!(decoded, Listed::Entry(entry.clone()));
            assert_eq!(frame::milliseconds(rest.next().unwrap()).unwrap(), *idle);
            assert_eq!(frame::count(rest.next().unwrap()).unwrap(), *count);
        }
        let taken = expected.iter().map(|(entry, count, idle)| {
            let (count, idle) = (number(*count as i64), number(idle.as_millis() as i64));
            list(vec![id(entry), fields(entry), count, idle])
        });
        let gone: Vec<_> = expected.iter().map(|(entry, ..)| entry.id).collect();
        let reply = list(vec![
            blob("7-0"),
            list(taken.collect()),
            list(expected.iter().map(|(entry, ..)| id(entry)).collect()),
        ]);
        let taken = recovered(reply, frame::id).unwrap();
        assert_eq!((taken.entries, taken.gone), (expected, gone));
        assert_eq!(taken.next, EntryId::new(7, 0));
    });
}

#[test]
fn no_error_text_makes_its_sorting_panic() {
    bolero::check!().for_each(|input: &[u8]| {
        let text = String::from_utf8_lossy(input);
        for text in [
            text.clone().into_owned(),
            format!("ERR Error running script (call to f_1): @user_script:3: -{text}"),
            format!("@user_script: 12: {text}"),
            format!("{text} @user_script:"),
        ] {
            let error = ServerError::from_reply(&text);
            let _ = (error.is_passing(), error.is_unblocked(), error.is_denied());
            let _ = error.to_string();
            let kind = fred::error::ErrorKind::Unknown;
            let _ = ServerError::from(fred::error::Error::new(kind, text));
        }
    });
}

#[test]
fn an_id_is_written_as_it_is_shown() {
    bolero::check!().for_each(|input: &[u8]| {
        let mut input = Input(input);
        let mut ids = Ids::with_capacity(1);
        for _ in 0..3 {
            let id = input.id();
            let shown = fred::types::Value::Bytes(id.to_string().into());
            assert_eq!(ids.encode(id), shown);
            assert_eq!(encode_id(id), shown);
        }
    });
}
