//! Headers: the fields whose names begin with `h:`, and the few that this crate keeps for itself.

use std::fmt;

use bytes::Bytes;

/// The names of fields, as they stand in the stream.
pub(crate) mod wire {
    /// The body of an entry.
    pub const PAYLOAD: &str = "_payload";
    /// What the name of a header begins with.
    pub const HEADER: &[u8] = b"h:";
    /// How often an entry was put back as a copy.
    pub const RETRY_COUNT: &str = "h:retry-count";
    /// The group that a copy belongs to.
    pub const RETRY_GROUP: &str = "h:retry-group";
    /// Why the entry was put back.
    pub const RETRY_ERROR: &str = "h:retry-error";
    /// RustStream's own count of copies.
    pub const FOREIGN_RETRY_COUNT: &str = "h:x-ruststream-retry-count";
    /// On a recovered delivery: the server's delivery count, the coming start included.
    pub const DELIVERY_COUNT: &str = "redis-delivery-count";
    /// On a recovered delivery: how long it had been idle, in milliseconds.
    pub const IDLE_MS: &str = "redis-idle-ms";

    /// Whether only copies have a field of this name, or nearly so.
    pub fn is_of_copy(name: &[u8]) -> bool {
        name.ends_with(b"retry-count") || name == RETRY_GROUP.as_bytes()
    }
}

/// The headers of an entry: every field named `h:<name>`, under `<name>`, in the stream's order.
///
/// Names and values are bytes; the `…_str` methods read them as text. The headers that this crate
/// keeps its own books in (`retry-count`, `retry-group`, `retry-error`) are not shown.
#[derive(Clone, Copy)]
pub struct Headers<'a> {
    fields: &'a [Bytes],
    /// Headers that no field stands for, made from what the server said of a recovered entry.
    told: &'a [(&'static str, String)],
}

impl<'a> Headers<'a> {
    pub(crate) fn new(fields: &'a [Bytes], told: &'a [(&'static str, String)]) -> Self {
        Headers { fields, told }
    }

    /// The first header of this name.
    pub fn get(&self, name: impl AsRef<[u8]>) -> Option<&'a [u8]> {
        let name = name.as_ref();
        self.iter()
            .find(|(header, _)| *header == name)
            .map(|(_, value)| value)
    }

    /// The first header of this name, if it is UTF-8.
    pub fn get_str(&self, name: impl AsRef<[u8]>) -> Option<&'a str> {
        self.get(name)
            .and_then(|value| std::str::from_utf8(value).ok())
    }

    /// Every value of a header that may be repeated, in the stream's order.
    pub fn get_all(&self, name: impl AsRef<[u8]>) -> impl Iterator<Item = &'a [u8]> {
        let name = name.as_ref().to_owned();
        self.iter()
            .filter(move |(header, _)| *header == name)
            .map(|(_, value)| value)
    }

    /// Every header, in the stream's order.
    pub fn iter(&self) -> impl Iterator<Item = (&'a [u8], &'a [u8])> + use<'a> {
        let told = self
            .told
            .iter()
            .map(|(name, value)| (name.as_bytes(), value.as_bytes()));
        self.fields
            .as_chunks()
            .0
            .iter()
            .filter(|[name, _]| !is_kept_back(name))
            .filter_map(|[name, value]| Some((name.strip_prefix(wire::HEADER)?, &**value)))
            .chain(told)
    }
}

impl fmt::Debug for Headers<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map()
            .entries(self.iter().map(|(name, value)| {
                (
                    String::from_utf8_lossy(name),
                    String::from_utf8_lossy(value),
                )
            }))
            .finish()
    }
}

/// Whether this field is this crate's own book-keeping, which handlers do not see.
fn is_kept_back(field: &[u8]) -> bool {
    [wire::RETRY_COUNT, wire::RETRY_GROUP, wire::RETRY_ERROR]
        .iter()
        .any(|name| name.as_bytes() == field)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_keep_order_repetition_and_bytes_and_hide_our_own() {
        let fields: Vec<Bytes> = [
            &b"h:a"[..],
            b"1",
            b"_payload",
            b"{}",
            b"h:retry-group",
            b"g",
            b"h:a",
            b"2",
            b"h:\xff",
            b"\xfe",
        ]
        .iter()
        .map(|bytes| Bytes::copy_from_slice(bytes))
        .collect();
        let told = [(wire::DELIVERY_COUNT, "3".to_owned())];
        let headers = Headers::new(&fields, &told);
        assert_eq!(headers.get("a"), Some(&b"1"[..]));
        assert_eq!(headers.get_all("a").collect::<Vec<_>>(), [b"1", b"2"]);
        assert_eq!(headers.get(b"\xff"), Some(&b"\xfe"[..]));
        assert_eq!(headers.get_str(b"\xff"), None);
        assert_eq!(headers.get("retry-group"), None);
        assert_eq!(headers.get_str("redis-delivery-count"), Some("3"));
        assert_eq!(headers.iter().count(), 4);
    }
}
