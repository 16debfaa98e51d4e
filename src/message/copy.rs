//! The copies that are made of an entry: a retry, and a dead letter.
//!
//! A copy is the entry's own fields, byte for byte and in their order, with this crate's headers
//! changed in place or added at the end.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;

use super::headers::wire;
use super::{Entry, Received, StreamKey};

/// The most bytes of an error's text that travel with a copy.
const LONGEST_ERROR: usize = 1024;

mod dead {
    pub const REASON: &str = "h:dead-reason";
    pub const ERROR: &str = "h:dead-error";
    pub const STREAM: &str = "h:dead-stream";
    pub const GROUP: &str = "h:dead-group";
    pub const ENTRY_ID: &str = "h:dead-entry-id";
    pub const ATTEMPTS: &str = "h:dead-attempts";
    pub const AT_MS: &str = "h:dead-at-ms";
    pub const ALL: [&str; 7] = [REASON, ERROR, STREAM, GROUP, ENTRY_ID, ATTEMPTS, AT_MS];
}

/// Where a copy goes, in one step with the acknowledgement of its original.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Destination {
    /// To the end of the stream.
    Stream,
    /// Into a delay set, until it is due. A set with a `ttl` expires that long after its last entry
    /// comes due.
    Delay {
        set: StreamKey,
        ttl: Option<Duration>,
    },
    /// To the dead-letter stream.
    DeadLetter { stream: StreamKey },
}

/// The headers that a retry of this delivery carries, with the field names they have in the stream.
pub(crate) fn retry_headers(received: &Received, error: Option<&str>) -> Vec<(Bytes, Bytes)> {
    let attempt = Bytes::from(received.attempt().to_string());
    let group = Bytes::copy_from_slice(received.source.group.as_bytes());
    let name = |name: &'static str| Bytes::from_static(name.as_bytes());
    let mut headers = vec![
        (name(wire::RETRY_COUNT), attempt.clone()),
        (name(wire::RETRY_GROUP), group),
    ];
    if let Some(error) = error {
        headers.push((name(wire::RETRY_ERROR), text(error)));
    }
    if received.entry.field(wire::FOREIGN_RETRY_COUNT).is_some() {
        headers.push((name(wire::FOREIGN_RETRY_COUNT), attempt));
    }
    headers
}

/// The fields of the entry that a retry appends to the stream.
pub(crate) fn retry(received: &Received, error: Option<&str>) -> Vec<Bytes> {
    let mut fields = received.entry.fields.clone();
    for (name, value) in retry_headers(received, error) {
        set(&mut fields, name, value);
    }
    fields
}

/// The fields of the entry that goes to the dead-letter stream after so many attempts.
pub(crate) fn dead_letter(
    received: &Received,
    attempts: u64,
    reason: &str,
    error: Option<&str>,
) -> Vec<Bytes> {
    let stale = |name: &[u8]| {
        // A dead letter that is consumed again and dies again tells of its latest death.
        [wire::RETRY_COUNT, wire::RETRY_GROUP]
            .iter()
            .chain(&dead::ALL)
            .any(|gone| gone.as_bytes() == name)
    };
    let mut fields: Vec<Bytes> = received
        .entry
        .fields
        .as_chunks::<2>()
        .0
        .iter()
        .filter(|[name, _]| !stale(name))
        .flatten()
        .cloned()
        .collect();
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    let mut add = |name: &'static str, value: Bytes| {
        fields.push(Bytes::from_static(name.as_bytes()));
        fields.push(value);
    };
    add(dead::REASON, text(reason));
    if let Some(error) = error {
        add(dead::ERROR, text(error));
    }
    add(dead::STREAM, received.source.stream.0.clone());
    add(
        dead::GROUP,
        Bytes::copy_from_slice(received.source.group.as_bytes()),
    );
    add(dead::ENTRY_ID, received.id().to_string().into());
    add(dead::ATTEMPTS, attempts.to_string().into());
    add(dead::AT_MS, now.as_millis().to_string().into());
    fields
}

/// The group that a copy belongs to; `None` for an entry that is no copy.
pub(crate) fn group_of(entry: &Entry) -> Option<&Bytes> {
    entry.field(wire::RETRY_GROUP)
}

/// Sets the first field of this name, or adds it.
fn set(fields: &mut Vec<Bytes>, name: Bytes, value: Bytes) {
    let mut pairs = fields.as_chunks_mut().0.iter_mut();
    match pairs.find(|[known, _]| *known == name) {
        Some([_, known]) => *known = value,
        None => fields.extend([name, value]),
    }
}

/// An error's text, cut at the end of a character when it is long.
fn text(text: &str) -> Bytes {
    let mut end = text.len().min(LONGEST_ERROR);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    Bytes::copy_from_slice(text.as_bytes().get(..end).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::message::test_source as source;
    use crate::message::{Context, EntryId};

    fn received(fields: &[(&'static [u8], &'static [u8])]) -> Received {
        let entry = Entry::new(EntryId::new(5, 1), fields.iter().copied());
        Received::fresh(entry, &source(0))
    }

    fn joined(fields: &[Bytes]) -> String {
        fields
            .iter()
            .map(|field| field.escape_ascii().to_string())
            .collect::<Vec<_>>()
            .join(" ")
    }

    #[test]
    fn a_retry_keeps_every_field_and_counts_up_in_place() {
        let original = received(&[
            (b"a", b"1"),
            (b"h:retry-count", b"2"),
            (b"b", b"\xff"),
            (b"a", b"3"),
            (b"h:x-ruststream-retry-count", b"1"),
        ]);
        assert_eq!(
            joined(&retry(&original, Some("no"))),
            "a 1 h:retry-count 3 b \\xff a 3 h:x-ruststream-retry-count 3 h:retry-group g h:retry-error no"
        );
    }

    #[test]
    fn a_dead_letter_tells_its_history_and_belongs_to_no_group() {
        let original = received(&[
            (b"h:dead-reason", b"old"),
            (b"h:retry-count", b"2"),
            (b"h:retry-group", b"g"),
            (b"_payload", b"x"),
        ]);
        let fields = dead_letter(&original, original.attempt(), "spent", Some("boom"));
        let shown = joined(&fields);
        assert!(
            shown.starts_with(
                "_payload x h:dead-reason spent h:dead-error boom h:dead-stream s h:dead-group g \
                 h:dead-entry-id 5-1 h:dead-attempts 3 h:dead-at-ms "
            ),
            "{shown}"
        );
        let again = Received::fresh(
            Entry {
                id: EntryId::new(6, 0),
                fields,
            },
            &source(0),
        );
        assert_eq!(Context::new(Arc::new(again)).attempt(), 1);
    }

    #[test]
    fn long_errors_are_cut_between_characters() {
        let long = "é".repeat(LONGEST_ERROR);
        assert_eq!(text(&format!("x{long}")).len(), LONGEST_ERROR - 1);
        assert_eq!(text("short"), "short");
    }
}
