//! What other consumers, dead or alive, did to a stream before or while a tree runs.

use std::time::Duration;

use super::server::Server;

/// Longer than any test runs: what is idle for so long was left behind, and what is not is young.
pub const AGES: Duration = Duration::from_secs(3600);

impl Server {
    /// Adds this many entries whose bodies are the numbers from 0, and returns their ids.
    #[track_caller]
    pub fn add_numbers(&self, stream: &str, numbers: std::ops::Range<usize>) -> Vec<String> {
        self.xadd_many(
            stream,
            numbers.map(|number| vec![("_payload", number.to_string())]),
        )
    }

    /// Has a consumer read up to this many fresh entries; they are pending in its name. Returns their
    /// ids.
    #[track_caller]
    pub fn read_as(&self, stream: &str, group: &str, consumer: &str, count: usize) -> Vec<String> {
        let count = count.to_string();
        let reply = self.expect(&[
            "XREADGROUP",
            "GROUP",
            group,
            consumer,
            "COUNT",
            &count,
            "STREAMS",
            stream,
            ">",
        ]);
        if reply.is_nil() {
            return Vec::new();
        }
        let entries = reply.as_array()[0].as_array()[1].as_array().iter();
        entries
            .map(|entry| entry.as_array()[0].as_str().to_owned())
            .collect()
    }

    /// Gives a pending entry to a consumer, with this idle time and delivery count.
    #[track_caller]
    pub fn give_to(
        &self,
        stream: &str,
        group: &str,
        consumer: &str,
        id: &str,
        (idle, count): (Duration, i64),
    ) {
        let (idle, count) = (idle.as_millis().to_string(), count.to_string());
        self.expect(&[
            "XCLAIM",
            stream,
            group,
            consumer,
            "0",
            id,
            "IDLE",
            &idle,
            "RETRYCOUNT",
            &count,
            "JUSTID",
        ]);
    }

    /// Makes a group that starts at the beginning, and has a consumer read everything and die long
    /// ago: all of it is pending and idle for [`AGES`], delivered once. Returns the ids.
    #[track_caller]
    pub fn leave_behind(&self, stream: &str, group: &str, consumer: &str) -> Vec<String> {
        self.xgroup_create(stream, group, "0");
        let ids = self.read_as(stream, group, consumer, 1_000_000);
        for id in &ids {
            self.give_to(stream, group, consumer, id, (AGES, 1));
        }
        ids
    }

    /// Deletes entries from the stream; they stay pending.
    #[track_caller]
    pub fn xdel(&self, stream: &str, ids: &[String]) {
        let mut args = vec!["XDEL", stream];
        args.extend(ids.iter().map(String::as_str));
        self.expect(&args);
    }
}
