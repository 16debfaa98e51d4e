//! An entry of a stream: its id and its fields, exactly as the server has them.

use std::fmt;
use std::str::FromStr;

use bytes::Bytes;

use super::headers::wire;

/// The id of an entry: milliseconds and a sequence number, ordered as the server orders them.
///
/// ```
/// use streamvisor::EntryId;
///
/// let id: EntryId = "1517363399650-7".parse().unwrap();
/// assert_eq!((id.ms, id.seq), (1_517_363_399_650, 7));
/// assert_eq!(id.to_string(), "1517363399650-7");
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct EntryId {
    /// The part before the dash: usually the server's clock in milliseconds when it was added.
    pub ms: u64,
    /// The part after the dash: tells entries of the same millisecond apart.
    pub seq: u64,
}

/// The text is not an entry id: two unsigned 64-bit numbers joined by a dash, such as `1517363399650-0`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` is not an entry id: two unsigned 64-bit numbers joined by a dash are, such as 1517363399650-0"
)]
pub struct InvalidEntryId(String);

impl EntryId {
    /// `0-0`: before every entry. No entry has it.
    pub const MIN: EntryId = EntryId { ms: 0, seq: 0 };
    /// The largest id that an entry can have.
    pub const MAX: EntryId = EntryId {
        ms: u64::MAX,
        seq: u64::MAX,
    };

    /// The id with these two parts.
    pub const fn new(ms: u64, seq: u64) -> Self {
        EntryId { ms, seq }
    }

    /// The smallest id above this one; `None` after [`EntryId::MAX`].
    pub const fn next(self) -> Option<EntryId> {
        match self.seq.checked_add(1) {
            Some(seq) => Some(EntryId { ms: self.ms, seq }),
            None => match self.ms.checked_add(1) {
                Some(ms) => Some(EntryId { ms, seq: 0 }),
                None => None,
            },
        }
    }

    /// Reads an id as the server writes it.
    pub(crate) fn parse(text: &[u8]) -> Option<EntryId> {
        let dash = text.iter().position(|&b| b == b'-')?;
        let (ms, seq) = text.split_at(dash);
        Some(EntryId {
            ms: number(ms)?,
            seq: number(seq.get(1..)?)?,
        })
    }
}

/// An unsigned decimal number of at least one digit, without a sign.
fn number(digits: &[u8]) -> Option<u64> {
    if digits.is_empty() {
        return None;
    }
    if digits.len() < 20 {
        // It cannot overflow, and nearly all are as short.
        let mut n = 0;
        for &digit in digits {
            n = n * 10 + u64::from(digit.is_ascii_digit().then(|| digit - b'0')?);
        }
        return Some(n);
    }
    digits.iter().try_fold(0u64, |n, &digit| match digit {
        b'0'..=b'9' => n.checked_mul(10)?.checked_add(u64::from(digit - b'0')),
        _ => None,
    })
}

impl fmt::Display for EntryId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.ms, self.seq)
    }
}

impl fmt::Debug for EntryId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for EntryId {
    type Err = InvalidEntryId;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        EntryId::parse(text.as_bytes()).ok_or_else(|| InvalidEntryId(text.to_owned()))
    }
}

impl serde::Serialize for EntryId {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> serde::Deserialize<'de> for EntryId {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = <std::borrow::Cow<'de, str>>::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

/// An entry as it stands in the stream: its id and its fields in their order, repeated and binary
/// ones included.
///
/// Cloning is cheap: the bytes are shared.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    pub(crate) id: EntryId,
    /// Names and values in turn; always an even number.
    pub(crate) fields: Vec<Bytes>,
}

impl Entry {
    /// An entry with these fields.
    pub fn new<N, V>(id: EntryId, fields: impl IntoIterator<Item = (N, V)>) -> Self
    where
        N: Into<Bytes>,
        V: Into<Bytes>,
    {
        let fields = fields
            .into_iter()
            .flat_map(|(name, value)| [name.into(), value.into()])
            .collect();
        Entry { id, fields }
    }

    /// The entry's id.
    pub fn id(&self) -> EntryId {
        self.id
    }

    /// Every field in the stream's order, headers and the body included.
    pub fn fields(&self) -> impl ExactSizeIterator<Item = (&Bytes, &Bytes)> {
        self.fields
            .as_chunks()
            .0
            .iter()
            .map(|[name, value]| (name, value))
    }

    /// The value of the first field of this name.
    pub fn field(&self, name: impl AsRef<[u8]>) -> Option<&Bytes> {
        let name = name.as_ref();
        self.fields()
            .find(|(field, _)| *field == name)
            .map(|(_, value)| value)
    }

    /// The value of the first `_payload` field, where publishers put the body.
    pub fn payload(&self) -> Option<&Bytes> {
        self.field(wire::PAYLOAD)
    }

    /// How many bytes the names and values are, together.
    pub(crate) fn len_bytes(&self) -> usize {
        self.fields.iter().map(Bytes::len).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_two_64_bit_numbers() {
        let largest = "18446744073709551615-18446744073709551615";
        assert_eq!(largest.parse(), Ok(EntryId::MAX));
        assert_eq!(EntryId::MAX.to_string(), largest);
        assert_eq!(EntryId::MAX.next(), None);
        assert_eq!(EntryId::new(4, u64::MAX).next(), Some(EntryId::new(5, 0)));
        assert_eq!("1-70000".parse(), Ok(EntryId::new(1, 70_000)));
        for wrong in [
            "",
            "-",
            "1",
            "1-",
            "-1",
            "+1-2",
            "1-2-3",
            "1-x",
            "18446744073709551616-0",
        ] {
            assert!(wrong.parse::<EntryId>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn ids_are_ordered_as_numbers_not_as_text() {
        assert!(EntryId::new(9, 0) < EntryId::new(10, 0));
        assert!(EntryId::new(10, 2) < EntryId::new(10, 10));
    }
}
