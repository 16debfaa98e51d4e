//! Any bytes as an id, as the fields of an entry, as its body and its headers. How to run these for longer:
//! `docs/reliability.md`.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use super::*;

/// The fields of an entry, made of the input: any bytes, and often the names that mean something here.
fn fields(input: &[u8]) -> Vec<Bytes> {
    const KNOWN: [&str; 16] = [
        wire::PAYLOAD,
        wire::RETRY_COUNT,
        wire::RETRY_GROUP,
        wire::RETRY_ERROR,
        wire::FOREIGN_RETRY_COUNT,
        "h:dead-reason",
        "h:dead-entry-id",
        "h:",
        "h:a",
        "id",
        "price",
        "size",
        "note",
        "18446744073709551615",
        "-1",
        "",
    ];
    let (mut fields, mut rest) = (Vec::new(), input);
    while let Some((first, after)) = rest.split_first() {
        rest = after;
        fields.push(match KNOWN.get(usize::from(first >> 2)) {
            Some(known) => Bytes::from_static(known.as_bytes()),
            None => {
                let length = usize::from(*first & 0x3f).min(rest.len());
                let (bytes, after) = rest.split_at(length);
                rest = after;
                Bytes::copy_from_slice(bytes)
            }
        });
    }
    if fields.len() % 2 == 1 {
        fields.push(Bytes::new());
    }
    fields
}

fn entry(input: &[u8]) -> Entry {
    Entry {
        id: EntryId::new(5, 1),
        fields: fields(input),
    }
}

#[test]
fn an_id_is_what_it_is_shown_as() {
    bolero::check!().for_each(|input: &[u8]| {
        if let Some(id) = EntryId::parse(input) {
            assert_eq!(EntryId::parse(id.to_string().as_bytes()), Some(id));
            assert!(id.next().is_none_or(|next| next > id));
        }
        let text = String::from_utf8_lossy(input);
        if let Err(error) = text.parse::<EntryId>() {
            let _ = error.to_string();
        }
        let _ = serde_json::from_slice::<EntryId>(input);
    });
}

#[test]
fn any_entry_can_be_looked_at() {
    bolero::check!().for_each(|input: &[u8]| {
        let entry = entry(input);
        assert_eq!(entry.fields().len() * 2, entry.fields.len());
        for (name, _) in entry.fields() {
            let first = entry.fields().find(|(other, _)| *other == name);
            assert_eq!(entry.field(name), first.map(|(_, value)| value));
        }
        let told = [(wire::DELIVERY_COUNT, "3".to_owned())];
        let headers = Headers::new(&entry.fields, &told);
        let shown = headers.iter().count();
        assert!(shown >= 1 && shown <= entry.fields().len() + 1);
        for (name, _) in headers.iter() {
            assert_eq!(headers.get(name), headers.get_all(name).next());
            let _ = headers.get_str(name);
        }
        let _ = format!("{headers:?} {entry:?}");
        let _ = group_of(&entry);
    });
}

#[test]
fn any_entry_can_be_copied_again_and_again() {
    bolero::check!().for_each(|input: &[u8]| {
        let (count, input) = input.split_first().unwrap_or((&0, &[]));
        let count = match count {
            255 => u64::MAX,
            count => u64::from(*count),
        };
        let entry = entry(input);
        let error = String::from_utf8_lossy(input);
        let received = Received::recovered(
            entry.clone(),
            &test_source(0),
            count,
            Duration::from_secs(1),
        );
        let context = Context::new(Arc::new(Received::fresh(entry.clone(), &test_source(0))));
        assert!(context.attempt() >= 1);

        let copy = retry(&received, Some(&error));
        assert_eq!(copy.len() % 2, 0);
        assert!(copy.len() >= entry.fields.len());
        // The server makes the copy of a parked entry from its headers: the first field of that name gets
        // the value, where there is none it is added.
        let mut by_server = entry.fields.clone();
        for (name, value) in retry_headers(&received, Some(&error)) {
            let place = (0..by_server.len())
                .step_by(2)
                .find(|at| by_server[*at] == name);
            match place {
                Some(at) => by_server[at + 1] = value,
                None => by_server.extend([name, value]),
            }
        }
        assert_eq!(copy, by_server);
        let copy = Entry {
            id: EntryId::new(6, 0),
            fields: copy,
        };
        assert_eq!(group_of(&copy), Some(&Bytes::from_static(b"g")));
        let again = Received::fresh(copy, &test_source(0));
        assert_eq!(again.copies, received.attempt());
        // Made once more, a copy only changes in place.
        let twice = retry(&again, Some("no"));
        assert_eq!(twice.len(), again.entry.fields.len());

        let dead = Entry {
            id: EntryId::new(7, 0),
            fields: dead_letter(&received, received.attempt(), &error, Some(&error)),
        };
        assert_eq!(group_of(&dead), None);
        assert!(dead.field(wire::RETRY_COUNT).is_none());
        let kept = |entry: &Entry| {
            let mut fields: Vec<_> = entry
                .fields()
                .map(|(n, v)| (n.clone(), v.clone()))
                .collect();
            fields.retain(|(name, _)| {
                !name.starts_with(b"h:dead-")
                    && name != wire::RETRY_COUNT
                    && name != wire::RETRY_GROUP
            });
            fields
        };
        assert_eq!(kept(&dead), kept(&entry));
    });
}

#[derive(Debug, serde::Deserialize)]
#[allow(dead_code, reason = "only decoded")]
struct Order {
    id: u64,
    price: Option<f64>,
    size: Option<Size>,
    note: Option<String>,
    #[serde(default)]
    express: bool,
    #[serde(default)]
    initial: char,
    #[serde(default)]
    wide: i128,
    #[serde(default)]
    parts: Vec<u8>,
}

#[derive(Debug, serde::Deserialize)]
enum Size {
    Small,
    Large,
}

#[test]
fn no_entry_makes_a_codec_panic() {
    bolero::check!().for_each(|input: &[u8]| {
        let told = |error: CodecError| error.to_string();
        let with_body = Entry::new(
            EntryId::new(1, 0),
            [("_payload", Bytes::copy_from_slice(input))],
        );
        for entry in [with_body, entry(input)] {
            let _ = <Json as Codec<Order>>::decode(&Json, &entry).map_err(told);
            let _ = <Json as Codec<serde_json::Value>>::decode(&Json, &entry).map_err(told);
            let _ = <Json as Codec<EntryId>>::decode(&Json, &entry).map_err(told);
            let _ = <Fields as Codec<Order>>::decode(&Fields, &entry).map_err(told);
            let _ = <Fields as Codec<HashMap<String, String>>>::decode(&Fields, &entry);
            let _ = <Fields as Codec<HashMap<i64, f32>>>::decode(&Fields, &entry);
            let _ = <Fields as Codec<serde_json::Value>>::decode(&Fields, &entry).map_err(told);
            let _ = <Fields as Codec<()>>::decode(&Fields, &entry).map_err(told);
            assert_eq!(<Raw as Codec<Entry>>::decode(&Raw, &entry).unwrap(), entry);
            let body = <Raw as Codec<Bytes>>::decode(&Raw, &entry).unwrap();
            assert_eq!(body, entry.payload().cloned().unwrap_or_default());
        }
        if let Ok(value) = serde_json::from_slice::<serde_json::Value>(input) {
            let body = Json::encode(&value).unwrap();
            let entry = Entry::new(EntryId::new(1, 0), [("_payload", body)]);
            let decoded = <Json as Codec<serde_json::Value>>::decode(&Json, &entry).unwrap();
            assert_eq!(decoded, value);
        }
    });
}

#[test]
fn any_bytes_are_a_key() {
    bolero::check!().for_each(|input: &[u8]| {
        let key = StreamKey::from(input.to_vec());
        assert_eq!(key.as_bytes(), input);
        let _ = format!("{key} {key:?}");
    });
}
