//! Reading replies: RESP frames taken apart by value, so that payloads stay slices of the buffer
//! they arrived in. Nothing here trusts the form of a reply.

use std::time::Duration;

use bytes::Bytes;
pub(crate) use fred::interfaces::Resp3Frame as Frame;

use super::errors::ServerError;
use crate::message::{Entry, EntryId};

/// An element of a list of entries.
#[derive(Debug, PartialEq)]
pub(crate) enum Listed {
    Entry(Entry),
    /// The entry was deleted while it was pending: its id stands there without fields.
    Gone(EntryId),
    /// 6.2 lists a deleted entry as nil.
    Nil,
}

#[cold]
fn malformed(expected: &str, found: &Frame) -> ServerError {
    let mut found = format!("{found:?}");
    if let Some((end, _)) = found.char_indices().nth(200) {
        found.truncate(end);
        found.push('…');
    }
    ServerError::Malformed(format!("expected {expected}, found {found}"))
}

/// The error that the server answered with, if it did.
pub(crate) fn checked(frame: Frame) -> Result<Frame, ServerError> {
    match frame {
        Frame::SimpleError { data, .. } => Err(ServerError::from_reply(&data)),
        Frame::BlobError { data, .. } => {
            Err(ServerError::from_reply(&String::from_utf8_lossy(&data)))
        }
        frame => Ok(frame),
    }
}

/// The elements of an array; of nil, none.
#[inline]
pub(crate) fn array(frame: Frame) -> Result<Vec<Frame>, ServerError> {
    match frame {
        Frame::Array { data, .. } => Ok(data),
        // The client takes an array that begins with "pmessage" and has four elements, or three and
        // "message", for a message of a channel, at any depth: the two fields of an entry look like
        // that. It marks it so and puts one element before.
        Frame::Push { mut data, .. } if !data.is_empty() => {
            data.remove(0);
            Ok(data)
        }
        Frame::Null => Ok(Vec::new()),
        other => Err(malformed("an array", &other)),
    }
}

/// An array of exactly `N` elements.
pub(crate) fn tuple<const N: usize>(frame: Frame) -> Result<[Frame; N], ServerError> {
    array(frame)?.try_into().map_err(|found: Vec<Frame>| {
        ServerError::Malformed(format!("expected {N} elements, found {}", found.len()))
    })
}

#[inline]
pub(crate) fn bytes(frame: Frame) -> Result<Bytes, ServerError> {
    match frame {
        Frame::BlobString { data, .. } | Frame::SimpleString { data, .. } => Ok(data),
        other => Err(malformed("a string", &other)),
    }
}

/// Text for people: what is not UTF-8 is replaced.
pub(crate) fn text(frame: Frame) -> Result<String, ServerError> {
    Ok(String::from_utf8_lossy(&bytes(frame)?).into_owned())
}

pub(crate) fn integer(frame: Frame) -> Result<i64, ServerError> {
    match frame {
        Frame::Number { data, .. } => Ok(data),
        Frame::BlobString { ref data, .. } | Frame::SimpleString { ref data, .. } => {
            std::str::from_utf8(data)
                .ok()
                .and_then(|text| text.parse().ok())
                .ok_or_else(|| malformed("an integer", &frame))
        }
        other => Err(malformed("an integer", &other)),
    }
}

/// A count. The server has no negative ones; should one arrive, it is 0.
pub(crate) fn count(frame: Frame) -> Result<u64, ServerError> {
    Ok(u64::try_from(integer(frame)?).unwrap_or(0))
}

/// A duration in milliseconds; negative ones, after a step of the server's clock, are zero.
pub(crate) fn milliseconds(frame: Frame) -> Result<Duration, ServerError> {
    Ok(Duration::from_millis(count(frame)?))
}

#[inline]
pub(crate) fn id(frame: Frame) -> Result<EntryId, ServerError> {
    match &frame {
        Frame::BlobString { data, .. } | Frame::SimpleString { data, .. } => {
            EntryId::parse(data).ok_or_else(|| malformed("an entry id", &frame))
        }
        other => Err(malformed("an entry id", other)),
    }
}

/// A list of ids; nils in it are left out.
pub(crate) fn ids(frame: Frame) -> Result<Vec<EntryId>, ServerError> {
    array(frame)?
        .into_iter()
        .filter(|frame| *frame != Frame::Null)
        .map(id)
        .collect()
}

/// The fields of an entry, names and values in turn.
#[inline]
pub(crate) fn fields(frame: Frame) -> Result<Vec<Bytes>, ServerError> {
    let parts = array(frame)?;
    if parts.len() % 2 == 1 {
        return Err(ServerError::Malformed(
            "an entry has a field without a value".to_owned(),
        ));
    }
    // Collected like this they take the place of the frames that they were in, and nothing is allocated.
    parts.into_iter().map(bytes).collect()
}

/// `[id, [name, value, …]]`, `[id, nil]` or nil, and what else stands behind them.
#[inline]
pub(crate) fn listed(frame: Frame) -> Result<(Listed, std::vec::IntoIter<Frame>), ServerError> {
    if let Frame::Null = frame {
        return Ok((Listed::Nil, Vec::new().into_iter()));
    }
    let mut parts = array(frame)?.into_iter();
    let missing = || ServerError::Malformed("an entry has no id or no fields".to_owned());
    let id = id(parts.next().ok_or_else(missing)?)?;
    let listed = match parts.next().ok_or_else(missing)? {
        Frame::Null => Listed::Gone(id),
        list => Listed::Entry(Entry {
            id,
            fields: fields(list)?,
        }),
    };
    Ok((listed, parts))
}

/// A flat list of names and values, as the XINFO commands reply: the value of a name.
pub(crate) fn named(pairs: &mut [Frame], name: &str) -> Frame {
    pairs
        .chunks_exact_mut(2)
        .find_map(|pair| match pair {
            [
                Frame::BlobString { data, .. } | Frame::SimpleString { data, .. },
                value,
            ] if data == name => Some(std::mem::replace(value, Frame::Null)),
            _ => None,
        })
        .unwrap_or(Frame::Null)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;

    pub(crate) fn blob(data: impl AsRef<[u8]>) -> Frame {
        Frame::BlobString {
            data: Bytes::copy_from_slice(data.as_ref()),
            attributes: None,
        }
    }

    pub(crate) fn list(data: Vec<Frame>) -> Frame {
        Frame::Array {
            data,
            attributes: None,
        }
    }

    pub(crate) fn number(data: i64) -> Frame {
        Frame::Number {
            data,
            attributes: None,
        }
    }

    #[test]
    fn entries_keep_bytes_repetition_and_order() {
        let (entry, rest) = listed(list(vec![
            blob("1-2"),
            list(vec![blob("a"), blob(b"\xff"), blob("a"), blob("")]),
            number(7),
        ]))
        .unwrap();
        let Listed::Entry(entry) = entry else {
            panic!("{entry:?}")
        };
        assert_eq!(entry.id(), EntryId::new(1, 2));
        assert_eq!(entry.fields, [&b"a"[..], b"\xff", b"a", b""]);
        assert_eq!(rest.len(), 1);
    }

    #[test]
    fn deleted_entries_are_no_error() {
        assert_eq!(listed(Frame::Null).unwrap().0, Listed::Nil);
        let (gone, _) = listed(list(vec![blob("1-2"), Frame::Null])).unwrap();
        assert_eq!(gone, Listed::Gone(EntryId::new(1, 2)));
    }

    #[test]
    fn fields_that_look_like_a_message_of_a_channel_are_fields() {
        // As the client hands over the fields `pmessage: a, b: c`.
        let pushed = Frame::Push {
            data: vec![
                Frame::SimpleString {
                    data: Bytes::from_static(b"pubsub"),
                    attributes: None,
                },
                blob("pmessage"),
                blob("a"),
                blob("b"),
                blob("c"),
            ],
            attributes: None,
        };
        assert_eq!(fields(pushed).unwrap(), ["pmessage", "a", "b", "c"]);
    }

    #[test]
    fn strange_replies_are_errors() {
        for frame in [
            number(1),
            list(vec![]),
            list(vec![blob("1-2")]),
            list(vec![blob("1"), list(vec![])]),
            list(vec![number(1), list(vec![])]),
            list(vec![blob("1-2"), list(vec![blob("a")])]),
            list(vec![blob("1-2"), list(vec![blob("a"), number(1)])]),
            Frame::Push {
                data: vec![],
                attributes: None,
            },
        ] {
            assert!(
                matches!(listed(frame.clone()), Err(ServerError::Malformed(_))),
                "{frame:?}"
            );
        }
        assert!(integer(blob("1x")).is_err() && integer(Frame::Null).is_err());
        assert!(tuple::<2>(list(vec![number(1)])).is_err());
        assert_eq!(count(number(-1)), Ok(0));
    }

    pub(crate) fn any_frame() -> impl Strategy<Value = Frame> {
        let leaf = prop_oneof![
            Just(Frame::Null),
            any::<i64>().prop_map(number),
            any::<Vec<u8>>().prop_map(blob),
            (any::<u64>(), any::<u64>())
                .prop_map(|(ms, seq)| blob(EntryId::new(ms, seq).to_string())),
            "[a-z-]{0,12}".prop_map(blob),
        ];
        leaf.prop_recursive(4, 64, 6, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..6).prop_map(list),
                prop::collection::vec(inner, 0..6).prop_map(|data| Frame::Push {
                    data,
                    attributes: None
                }),
            ]
        })
    }

    proptest! {
        #[test]
        fn no_reply_makes_a_decoder_panic(frame in any_frame()) {
            let _ = listed(frame.clone());
            let _ = ids(frame.clone());
            let _ = integer(frame.clone());
            let _ = text(frame.clone());
            let _ = tuple::<3>(frame.clone());
            if let Ok(mut pairs) = array(frame) {
                named(&mut pairs, "name");
            }
        }
    }
}
