//! Every step against real servers.

mod connections;
mod delays;
mod groups;
mod reading;
mod settling;
mod timing;

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use super::connect::{Connection, Role};
use super::group::Group;
use crate::message::EntryId;
use crate::support::{Reply, Server, Version};
use crate::topology::Redis;

const STREAM: &str = "s{t}";
const OTHER: &str = "other{t}";
const WITHIN: Duration = Duration::from_secs(5);

/// A server with a stream and a group, and a connection to it.
struct Stage {
    server: Server,
    conn: Arc<Connection>,
    group: Arc<Group>,
}

/// A stage on each of these servers, one after the other.
async fn stages(versions: &[Version]) -> Vec<Stage> {
    let mut stages = Vec::new();
    for version in versions {
        stages.push(Stage::on(*version).await);
    }
    stages
}

impl Stage {
    async fn on(version: Version) -> Stage {
        Stage::with(version, &[]).await
    }

    async fn with(version: Version, directives: &[(&str, &str)]) -> Stage {
        let server = Server::start_with(version, directives);
        server.xgroup_create(STREAM, "g", "0");
        let conn = connect(&server.url(), Role::Settler).await;
        Stage {
            server,
            conn,
            group: Arc::new(Group::new(STREAM, "g")),
        }
    }

    /// What the test says it is about, should it fail.
    fn said(&self) -> Version {
        eprintln!("on {}", self.server.version());
        self.server.version()
    }

    /// Adds entries with ids `1-1`, `2-1`, … and delivers them to a consumer, once.
    fn deliver(&self, consumer: &str, count: u64) -> Vec<EntryId> {
        let ids: Vec<_> = (1..=count).map(|ms| EntryId::new(ms, 1)).collect();
        for id in &ids {
            self.ok(&["XADD", STREAM, &id.to_string(), "f", &format!("v{}", id.ms)]);
        }
        self.read(consumer);
        ids
    }

    /// Delivers all that is there.
    fn read(&self, consumer: &str) {
        self.ok(&[
            "XREADGROUP",
            "GROUP",
            "g",
            consumer,
            "COUNT",
            "100000",
            "STREAMS",
            STREAM,
            ">",
        ]);
    }

    /// Lets another consumer have it.
    fn steal(&self, id: EntryId, thief: &str) {
        self.ok(&["XCLAIM", STREAM, "g", thief, "0", &id.to_string(), "JUSTID"]);
    }

    /// Makes an entry look idle, with a count.
    fn age(&self, id: EntryId, owner: &str, idle: u64, count: u64) {
        let (id, idle, count) = (id.to_string(), idle.to_string(), count.to_string());
        let claim = [
            "XCLAIM",
            STREAM,
            "g",
            owner,
            "0",
            &id,
            "IDLE",
            &idle,
            "RETRYCOUNT",
            &count,
            "JUSTID",
        ];
        self.ok(&claim);
    }

    fn delete(&self, id: EntryId) {
        assert_eq!(self.ok(&["XDEL", STREAM, &id.to_string()]).as_int(), 1);
    }

    fn ok<A: AsRef<[u8]>>(&self, args: &[A]) -> Reply {
        match self.server.command(args) {
            Reply::Error(text) => panic!("{}: {text}", self.server.version()),
            reply => reply,
        }
    }

    /// Id, owner and count of all that is pending.
    fn pending(&self) -> Vec<(EntryId, String, i64)> {
        let pending = self.server.xpending(STREAM, "g").into_iter();
        pending
            .map(|(id, owner, _, count)| (id.parse().unwrap(), owner, count))
            .collect()
    }

    fn idle(&self, id: EntryId) -> Duration {
        let pending = self.server.xpending(STREAM, "g");
        let found = pending.iter().find(|entry| entry.0 == id.to_string());
        found.expect("the entry should be pending").2
    }

    /// The values of the fields of all entries of a stream.
    fn entries(&self, stream: &str) -> Vec<Vec<(Vec<u8>, Vec<u8>)>> {
        self.server
            .xrange(stream)
            .into_iter()
            .map(|(_, fields)| fields)
            .collect()
    }

    /// From now on memory is full.
    fn fill_memory(&self) {
        self.ok(&["CONFIG", "SET", "maxmemory-policy", "noeviction"]);
        self.ok(&["CONFIG", "SET", "maxmemory", "1"]);
    }

    fn free_memory(&self) {
        self.ok(&["CONFIG", "SET", "maxmemory", "0"]);
    }

    /// A connection as a user with these rights.
    async fn as_user(&self, rights: &[&str]) -> Arc<Connection> {
        let setuser = [
            "ACL", "SETUSER", "limited", "reset", "on", ">secret", "~*", "+@all",
        ];
        self.ok(&[&setuser, rights].concat());
        let url = self
            .server
            .url()
            .replace("redis://", "redis://limited:secret@");
        connect(&url, Role::Settler).await
    }
}

async fn connect(url: &str, role: Role) -> Arc<Connection> {
    let redis = Redis::url(url).unwrap();
    Arc::new(
        Connection::open(&redis, role, "tested", WITHIN)
            .await
            .unwrap(),
    )
}

fn owner(name: &str) -> Arc<str> {
    Arc::from(name)
}

fn fields(parts: &[&[u8]]) -> Vec<Bytes> {
    parts
        .iter()
        .map(|part| Bytes::copy_from_slice(part))
        .collect()
}

fn pairs(parts: &[&[u8]]) -> Vec<(Vec<u8>, Vec<u8>)> {
    parts
        .chunks(2)
        .map(|pair| (pair[0].to_vec(), pair[1].to_vec()))
        .collect()
}
