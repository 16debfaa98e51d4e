//! How the body of an entry becomes a message, and a message a body.

use bytes::Bytes;
use serde::Serialize;
use serde::de::{DeserializeOwned, IntoDeserializer, value::MapDeserializer};

use super::{BoxError, Entry};

/// Why an entry could not become a message, or a value a body.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CodecError {
    /// The codec reads the `_payload` field and the entry has none.
    #[error(
        "the entry has no `_payload` field; use the codec `Fields` or `Raw` for entries that carry their data in fields of their own"
    )]
    NoPayload,
    /// The bytes are not what the codec or the message type expects.
    #[error("{0}")]
    Malformed(#[source] BoxError),
}

/// Makes messages of type `T` from entries.
///
/// Chosen with [`Draft::codec`](crate::Draft::codec); the default is [`Json`]. A codec of your own is
/// a type with one method:
///
/// ```
/// use streamvisor::{Codec, CodecError, Entry};
///
/// /// The body is a decimal number.
/// #[derive(Clone)]
/// struct Decimal;
///
/// impl Codec<u64> for Decimal {
///     fn decode(&self, entry: &Entry) -> Result<u64, CodecError> {
///         let body = entry.payload().ok_or(CodecError::NoPayload)?;
///         let text = std::str::from_utf8(body).map_err(|e| CodecError::Malformed(e.into()))?;
///         text.parse().map_err(|e: std::num::ParseIntError| CodecError::Malformed(e.into()))
///     }
/// }
/// ```
pub trait Codec<T>: Send + Sync + 'static {
    /// The message that this entry carries.
    fn decode(&self, entry: &Entry) -> Result<T, CodecError>;
}

/// The body is JSON in the `_payload` field: the default.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Json;

impl<T: DeserializeOwned> Codec<T> for Json {
    fn decode(&self, entry: &Entry) -> Result<T, CodecError> {
        let body = entry.payload().ok_or(CodecError::NoPayload)?;
        serde_json::from_slice(body).map_err(|error| CodecError::Malformed(error.into()))
    }
}

impl Json {
    /// The body for a value: what a publisher puts into `_payload`.
    pub(crate) fn encode<T: Serialize + ?Sized>(value: &T) -> Result<Bytes, CodecError> {
        serde_json::to_vec(value)
            .map(Bytes::from)
            .map_err(|error| CodecError::Malformed(error.into()))
    }
}

/// No decoding: the message is the whole [`Entry`], or its body as [`Bytes`] (empty without one).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Raw;

impl Codec<Entry> for Raw {
    fn decode(&self, entry: &Entry) -> Result<Entry, CodecError> {
        Ok(entry.clone())
    }
}

impl Codec<Bytes> for Raw {
    fn decode(&self, entry: &Entry) -> Result<Bytes, CodecError> {
        Ok(entry.payload().cloned().unwrap_or_default())
    }
}

/// The message is a struct whose members are the entry's own fields: `XADD orders * id 7 customer c-12`.
///
/// Values are read as text and turned into what the member's type asks for (numbers, booleans, enums
/// without data, strings, options). Headers and `_payload` are offered under their field names. Where
/// a name is repeated the first one counts.
///
/// ```
/// # use streamvisor::{Codec, Entry, EntryId, Fields};
/// #[derive(serde::Deserialize)]
/// struct Order { id: u64, customer: String }
///
/// let entry = Entry::new(EntryId::new(1, 0), [("id", "7"), ("customer", "c-12")]);
/// let order: Order = Fields.decode(&entry).unwrap();
/// assert_eq!((order.id, order.customer.as_str()), (7, "c-12"));
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Fields;

impl<T: DeserializeOwned> Codec<T> for Fields {
    fn decode(&self, entry: &Entry) -> Result<T, CodecError> {
        let mut named: Vec<(&str, FieldValue<'_>)> = Vec::with_capacity(entry.fields.len() / 2);
        for (name, value) in entry.fields() {
            // A name that is no text cannot be a member of a struct.
            let Ok(name) = std::str::from_utf8(name) else {
                continue;
            };
            if !named.iter().any(|(known, _)| *known == name) {
                named.push((name, FieldValue(value)));
            }
        }
        T::deserialize(MapDeserializer::new(named.into_iter()))
            .map_err(|error: serde::de::value::Error| CodecError::Malformed(error.into()))
    }
}

/// The value of a field, to be read as whatever type is asked for.
struct FieldValue<'a>(&'a [u8]);

impl<'a> FieldValue<'a> {
    fn text(&self) -> Result<&'a str, serde::de::value::Error> {
        std::str::from_utf8(self.0).map_err(serde::de::Error::custom)
    }

    fn parse<N: std::str::FromStr<Err: std::fmt::Display>>(
        &self,
    ) -> Result<N, serde::de::value::Error> {
        let text = self.text()?;
        text.parse().map_err(|error| {
            serde::de::Error::custom(format_args!("field value `{text}`: {error}"))
        })
    }
}

impl<'de> IntoDeserializer<'de> for FieldValue<'_> {
    type Deserializer = Self;

    fn into_deserializer(self) -> Self {
        self
    }
}

macro_rules! parsed {
    ($($method:ident => $visit:ident),* $(,)?) => {$(
        fn $method<V: serde::de::Visitor<'de>>(self, visitor: V) -> Result<V::Value, Self::Error> {
            visitor.$visit(self.parse()?)
        }
    )*};
}

impl<'de> serde::Deserializer<'de> for FieldValue<'_> {
    type Error = serde::de::value::Error;

    parsed! {
        deserialize_i8 => visit_i8, deserialize_i16 => visit_i16, deserialize_i32 => visit_i32,
        deserialize_i64 => visit_i64, deserialize_i128 => visit_i128,
        deserialize_u8 => visit_u8, deserialize_u16 => visit_u16, deserialize_u32 => visit_u32,
        deserialize_u64 => visit_u64, deserialize_u128 => visit_u128,
        deserialize_f32 => visit_f32, deserialize_f64 => visit_f64, deserialize_char => visit_char,
    }

    fn deserialize_bool<V: serde::de::Visitor<'de>>(
        self,
        visitor: V,
    ) -> Result<V::Value, Self::Error> {
        match self.text()? {
            "true" | "1" => visitor.visit_bool(true),
            "false" | "0" => visitor.visit_bool(false),
            other => Err(serde::de::Error::custom(format_args!(
                "field value `{other}` is no boolean"
            ))),
        }
    }

    fn deserialize_any<V: serde::de::Visitor<'de>>(
        self,
        visitor: V,
    ) -> Result<V::Value, Self::Error> {
        match std::str::from_utf8(self.0) {
            Ok(text) => visitor.visit_str(text),
            Err(_) => visitor.visit_bytes(self.0),
        }
    }

    fn deserialize_option<V: serde::de::Visitor<'de>>(
        self,
        visitor: V,
    ) -> Result<V::Value, Self::Error> {
        // A field that is there is a value; a missing one never comes this far.
        visitor.visit_some(self)
    }

    fn deserialize_bytes<V: serde::de::Visitor<'de>>(
        self,
        visitor: V,
    ) -> Result<V::Value, Self::Error> {
        visitor.visit_bytes(self.0)
    }

    fn deserialize_byte_buf<V: serde::de::Visitor<'de>>(
        self,
        visitor: V,
    ) -> Result<V::Value, Self::Error> {
        visitor.visit_bytes(self.0)
    }

    fn deserialize_newtype_struct<V: serde::de::Visitor<'de>>(
        self,
        _name: &'static str,
        visitor: V,
    ) -> Result<V::Value, Self::Error> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_enum<V: serde::de::Visitor<'de>>(
        self,
        name: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Self::Error> {
        let variant: serde::de::value::StrDeserializer<'_, Self::Error> =
            self.text()?.into_deserializer();
        variant.deserialize_enum(name, variants, visitor)
    }

    serde::forward_to_deserialize_any! {
        str string unit unit_struct seq tuple tuple_struct map struct identifier ignored_any
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::EntryId;

    fn entry(fields: &[(&'static str, &'static [u8])]) -> Entry {
        Entry::new(
            EntryId::new(1, 0),
            fields.iter().map(|(name, value)| (*name, *value)),
        )
    }

    #[derive(Debug, PartialEq, serde::Deserialize)]
    #[serde(rename_all = "lowercase")]
    enum Size {
        Small,
        Large,
    }

    #[derive(Debug, PartialEq, serde::Deserialize)]
    struct Order {
        id: u64,
        price: f64,
        express: bool,
        size: Size,
        note: Option<String>,
        #[serde(default)]
        count: i32,
    }

    #[test]
    fn fields_become_the_types_that_the_struct_asks_for() {
        let whole = entry(&[
            ("id", b"7"),
            ("id", b"8"),
            ("price", b"1.5"),
            ("express", b"1"),
            ("size", b"large"),
            ("unknown", b"\xff\xfe"),
        ]);
        let expected = Order {
            id: 7,
            price: 1.5,
            express: true,
            size: Size::Large,
            note: None,
            count: 0,
        };
        assert_eq!(
            <Fields as Codec<Order>>::decode(&Fields, &whole).unwrap(),
            expected
        );
    }

    #[test]
    fn a_field_that_does_not_fit_is_named_in_the_error() {
        let wrong = entry(&[
            ("id", b"seven"),
            ("price", b"1"),
            ("express", b"0"),
            ("size", b"small"),
        ]);
        let error = <Fields as Codec<Order>>::decode(&Fields, &wrong).unwrap_err();
        assert!(error.to_string().contains("seven"), "{error}");
    }

    #[test]
    fn a_number_is_read_as_it_was_written() {
        for number in [
            0.1,
            37_095_516_151_844_674_407_370_955_161.0,
            5.551_115_123_125_783e-17,
            2.041_694_201_525_631,
            f64::MIN_POSITIVE,
            f64::MAX,
        ] {
            let body = Json::encode(&number).unwrap();
            let entry = Entry::new(EntryId::new(1, 0), [("_payload", body)]);
            let read = <Json as Codec<f64>>::decode(&Json, &entry).unwrap();
            assert_eq!(
                read.to_bits(),
                number.to_bits(),
                "{number:e} became {read:e}"
            );
        }
    }

    #[test]
    fn json_wants_a_payload_and_raw_does_not() {
        let bare = entry(&[("id", b"7")]);
        let error = <Json as Codec<u64>>::decode(&Json, &bare).unwrap_err();
        assert!(matches!(error, CodecError::NoPayload));
        assert_eq!(
            <Raw as Codec<Bytes>>::decode(&Raw, &bare).unwrap(),
            Bytes::new()
        );
        assert_eq!(<Raw as Codec<Entry>>::decode(&Raw, &bare).unwrap(), bare);
        let whole = entry(&[("_payload", b"41")]);
        assert_eq!(<Json as Codec<u64>>::decode(&Json, &whole).unwrap(), 41);
        let broken = entry(&[("_payload", b"{\xff")]);
        assert!(matches!(
            <Json as Codec<u64>>::decode(&Json, &broken),
            Err(CodecError::Malformed(_))
        ));
    }
}
