//! What a test asks its server: streams, groups, connections, counters.

use std::collections::HashMap;
use std::time::Duration;

use super::resp::CLIENT_NAME;
use super::server::Server;

/// An entry as `XRANGE` shows it: its id, and its fields in order, repeated ones included.
pub type Entry = (String, Vec<(Vec<u8>, Vec<u8>)>);

/// An entry as `XPENDING` shows it: its id, the consumer that owns it, how long it has been idle, and
/// how often it was delivered.
pub type PendingEntry = (String, String, Duration, i64);

impl Server {
    // ---- streams ----

    #[track_caller]
    pub fn xlen(&self, stream: &str) -> i64 {
        self.expect(&["XLEN", stream]).as_int()
    }

    /// Adds an entry and returns its id.
    #[track_caller]
    pub fn xadd<F: AsRef<[u8]>, V: AsRef<[u8]>>(&self, stream: &str, fields: &[(F, V)]) -> String {
        self.expect(&xadd_args(stream, fields)).as_str().to_owned()
    }

    /// Adds many entries, fast, and returns their ids.
    #[track_caller]
    pub fn xadd_many<F: AsRef<[u8]>, V: AsRef<[u8]>>(
        &self,
        stream: &str,
        entries: impl IntoIterator<Item = Vec<(F, V)>>,
    ) -> Vec<String> {
        let commands: Vec<Vec<Vec<u8>>> = entries
            .into_iter()
            .map(|fields| xadd_args(stream, &fields))
            .collect();
        let replies = self.pipeline(&commands);
        replies
            .iter()
            .map(|reply| reply.as_str().to_owned())
            .collect()
    }

    /// The whole stream.
    #[track_caller]
    pub fn xrange(&self, stream: &str) -> Vec<Entry> {
        let reply = self.expect(&["XRANGE", stream, "-", "+"]);
        let entries = reply.as_array().iter();
        entries
            .map(|entry| {
                let [id, fields] = entry.as_array() else {
                    panic!("expected an id and fields, the server sent {entry:?}");
                };
                let fields = fields.as_array().chunks(2);
                let fields =
                    fields.map(|pair| (pair[0].as_bytes().to_vec(), pair[1].as_bytes().to_vec()));
                (id.as_str().to_owned(), fields.collect())
            })
            .collect()
    }

    /// Makes a group that starts at `start` (`"0"`, `"$"`, an id), and the stream when it is missing.
    #[track_caller]
    pub fn xgroup_create(&self, stream: &str, group: &str, start: &str) {
        self.expect(&["XGROUP", "CREATE", stream, group, start, "MKSTREAM"]);
    }

    /// How many entries of the group are pending.
    #[track_caller]
    pub fn xpending_count(&self, stream: &str, group: &str) -> i64 {
        self.expect(&["XPENDING", stream, group]).as_array()[0].as_int()
    }

    /// All pending entries of the group, in the order of their ids.
    #[track_caller]
    pub fn xpending(&self, stream: &str, group: &str) -> Vec<PendingEntry> {
        let all = i32::MAX.to_string();
        let reply = self.expect(&["XPENDING", stream, group, "-", "+", &all]);
        let entries = reply.as_array().iter();
        entries
            .map(|entry| {
                let [id, consumer, idle, deliveries] = entry.as_array() else {
                    panic!("expected a pending entry, the server sent {entry:?}");
                };
                (
                    id.as_str().to_owned(),
                    consumer.as_str().to_owned(),
                    Duration::from_millis(idle.as_int().unsigned_abs()),
                    deliveries.as_int(),
                )
            })
            .collect()
    }

    // ---- what the server knows ----

    /// A line per connection, as `CLIENT LIST` has it, without this test's own and without those that
    /// have said goodbye and are listed for a moment more.
    #[track_caller]
    pub fn client_list(&self) -> Vec<String> {
        let own = format!(" name={CLIENT_NAME} ");
        let reply = self.expect(&["CLIENT", "LIST"]);
        reply
            .as_str()
            .lines()
            .filter(|line| !line.contains(&own) && !line.contains(" cmd=quit"))
            .map(str::to_owned)
            .collect()
    }

    #[track_caller]
    pub fn info(&self, section: &str) -> HashMap<String, String> {
        let reply = self.expect(&["INFO", section]);
        reply
            .as_str()
            .lines()
            .filter_map(|line| line.split_once(':'))
            .map(|(key, value)| (key.to_owned(), value.to_owned()))
            .collect()
    }

    /// How often a command was called since the start or `CONFIG RESETSTAT`, by whomever, this test
    /// included. Subcommands from 7.0 on as `"xgroup|create"`.
    #[track_caller]
    pub fn commandstat(&self, command: &str) -> u64 {
        let key = format!("cmdstat_{}", command.to_lowercase());
        let stats = self.info("commandstats");
        let Some(line) = stats.get(&key) else {
            return 0;
        };
        line.split(',')
            .find_map(|part| part.strip_prefix("calls="))
            .and_then(|calls| calls.parse().ok())
            .unwrap_or_else(|| panic!("expected calls=, the server sent {line:?}"))
    }

    /// The version number it reports, for tests that expect different things of different servers
    /// while `REDIS_SERVER` may name any: `(7, 0, 15)`. Valkey's own number, not the Redis one that
    /// it reports for compatibility.
    #[track_caller]
    pub fn version_number(&self) -> (u32, u32, u32) {
        let info = self.info("server");
        let text = info
            .get("valkey_version")
            .or_else(|| info.get("redis_version"))
            .expect("INFO server should name a version");
        let mut parts = text.split('.').map(|part| part.parse().unwrap_or(0));
        let mut next = || parts.next().unwrap_or(0);
        (next(), next(), next())
    }
}

fn xadd_args<F: AsRef<[u8]>, V: AsRef<[u8]>>(stream: &str, fields: &[(F, V)]) -> Vec<Vec<u8>> {
    let mut args = vec![b"XADD".to_vec(), stream.as_bytes().to_vec(), b"*".to_vec()];
    for (field, value) in fields {
        args.push(field.as_ref().to_vec());
        args.push(value.as_ref().to_vec());
    }
    args
}
