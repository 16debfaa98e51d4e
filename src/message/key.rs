//! The key of a stream.

use std::fmt;

use bytes::Bytes;

/// The key of a stream, a delay set or a dead-letter stream: any bytes, usually text.
///
/// ```
/// use streamvisor::StreamKey;
///
/// let key = StreamKey::from("orders");
/// assert_eq!(key, *"orders");
/// assert_eq!(key.to_string(), "orders");
/// ```
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StreamKey(pub(crate) Bytes);

impl StreamKey {
    /// The key's bytes.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

impl AsRef<[u8]> for StreamKey {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Display for StreamKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&String::from_utf8_lossy(&self.0))
    }
}

impl fmt::Debug for StreamKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{}\"", self.0.escape_ascii())
    }
}

impl PartialEq<str> for StreamKey {
    fn eq(&self, other: &str) -> bool {
        self.0 == other.as_bytes()
    }
}

impl From<&str> for StreamKey {
    fn from(key: &str) -> Self {
        StreamKey(Bytes::copy_from_slice(key.as_bytes()))
    }
}

impl From<&[u8]> for StreamKey {
    fn from(key: &[u8]) -> Self {
        StreamKey(Bytes::copy_from_slice(key))
    }
}

impl From<String> for StreamKey {
    fn from(key: String) -> Self {
        StreamKey(key.into())
    }
}

impl From<&String> for StreamKey {
    fn from(key: &String) -> Self {
        StreamKey::from(key.as_str())
    }
}

impl From<Vec<u8>> for StreamKey {
    fn from(key: Vec<u8>) -> Self {
        StreamKey(key.into())
    }
}

impl From<Bytes> for StreamKey {
    fn from(key: Bytes) -> Self {
        StreamKey(key)
    }
}

impl From<&StreamKey> for StreamKey {
    fn from(key: &StreamKey) -> Self {
        key.clone()
    }
}

impl serde::Serialize for StreamKey {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}
