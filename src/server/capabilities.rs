//! What this server can do, asked by trying: version numbers lie, and commands can be renamed away.

use fred::types::Value;

use super::connect::{Connection, Script};
use super::delay;
use super::errors::ServerError;
use super::frame::{self, Frame};
use super::settle::DeleteAcked;
use crate::message::StreamKey;

/// What the server can do for this user.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Capabilities {
    /// `XAUTOCLAIM`: from 6.2. Nothing here calls it; a server without it is too old for what is
    /// called.
    pub(crate) autoclaim: bool,
    /// `XREADGROUP … CLAIM`: Redis from 8.4.
    pub(crate) claim_read: bool,
    /// `XACKDEL`: Redis from 8.2.
    pub(crate) ack_delete: bool,
    /// `XNACK`.
    pub(crate) negative_ack: bool,
    /// As in "Redis 7.0.15", for messages only.
    pub(crate) version: String,
}

impl Capabilities {
    /// How entries are deleted that no group needs any more.
    pub(crate) fn delete_acked(&self) -> DeleteAcked {
        if self.ack_delete {
            DeleteAcked::Command
        } else {
            DeleteAcked::Script
        }
    }
}

/// A name that no group has.
const NO_GROUP: &str = "streamvisor: is this command known?";

/// Asks. `stream` is a key that the user may use; nothing is done to it.
pub(crate) async fn ask(
    conn: &Connection,
    stream: &StreamKey,
) -> Result<Capabilities, ServerError> {
    let key = stream.0.clone();
    let key = || Value::Bytes(key.clone());
    let word = Value::from_static_str;
    let autoclaim = vec![key(), word(NO_GROUP), word("c"), word("0"), word("0-0")];
    let claim_read = vec![
        word("GROUP"),
        word(NO_GROUP),
        word("c"),
        word("CLAIM"),
        word("0"),
        word("STREAMS"),
        key(),
        word(">"),
    ];
    let negative_ack = vec![
        key(),
        word(NO_GROUP),
        word("SILENT"),
        word("IDS"),
        word("1"),
        word("0-1"),
    ];
    Ok(Capabilities {
        autoclaim: can(conn, stream, "XAUTOCLAIM", autoclaim).await?,
        claim_read: can(conn, stream, "XREADGROUP", claim_read).await?,
        ack_delete: can(conn, stream, "XACKDEL", ack_delete(stream)).await?,
        negative_ack: can(conn, stream, "XNACK", negative_ack).await?,
        version: version(conn).await,
    })
}

/// XACKDEL of a group that does not exist.
fn ack_delete(stream: &StreamKey) -> Vec<Value> {
    let words = [NO_GROUP, "ACKED", "IDS", "1", "0-1"];
    let words = words.into_iter().map(Value::from_static_str);
    std::iter::once(Value::Bytes(stream.0.clone()))
        .chain(words)
        .collect()
}

/// Tries a command. Where the stream's key is no text it is tried by a script: errors repeat the key, and
/// the client takes an error that is no text for a broken connection.
async fn attempt(
    conn: &Connection,
    stream: &StreamKey,
    command: &'static str,
    args: Vec<Value>,
) -> Result<Frame, ServerError> {
    static ATTEMPT: Script = Script::new(concat!(
        include_str!("scripts/errors.lua"),
        include_str!("scripts/attempt.lua"),
    ));
    if std::str::from_utf8(stream.as_bytes()).is_ok() {
        return conn.call(command, args).await;
    }
    let words = std::iter::once(Value::from_static_str(command)).chain(args);
    let key = Value::Bytes(stream.0.clone());
    conn.script(&ATTEMPT, vec![key], words.collect()).await
}

/// Whether a command is known, permitted, and takes these arguments.
async fn can(
    conn: &Connection,
    stream: &StreamKey,
    command: &'static str,
    args: Vec<Value>,
) -> Result<bool, ServerError> {
    match attempt(conn, stream, command, args).await {
        Ok(_) | Err(ServerError::GroupGone(_)) => Ok(true),
        // "ERR unknown command", "ERR syntax error".
        Err(ServerError::Refused(_)) => Ok(false),
        Err(denied) if denied.is_denied() => Ok(false),
        // The key holds something else, which somebody else will say: the command is known.
        Err(ServerError::Blocked(_)) => Ok(true),
        Err(error) => Err(error),
    }
}

async fn version(conn: &Connection) -> String {
    let Ok(info) = info(conn, "server").await else {
        return "of unknown version".to_owned();
    };
    let line = |name: &str| line(&info, name);
    match (line("valkey_version"), line("redis_version")) {
        (Some(version), _) => format!("Valkey {version}"),
        (None, Some(version)) => format!("Redis {version}"),
        (None, None) => "of unknown version".to_owned(),
    }
}

async fn info(conn: &Connection, section: &'static str) -> Result<String, ServerError> {
    frame::text(
        conn.call("INFO", vec![Value::from_static_str(section)])
            .await?,
    )
}

fn line<'a>(info: &'a str, name: &str) -> Option<&'a str> {
    info.lines()
        .find_map(|line| Some(line.strip_prefix(name)?.strip_prefix(':')?.trim()))
}

/// The server's `maxmemory-policy`, if it can be found out: some evict streams.
pub(crate) async fn eviction_policy(conn: &Connection) -> Option<String> {
    if let Ok(info) = info(conn, "memory").await
        && let Some(policy) = line(&info, "maxmemory_policy")
    {
        return Some(policy.to_owned());
    }
    let args = vec![
        Value::from_static_str("GET"),
        Value::from_static_str("maxmemory-policy"),
    ];
    let [_name, policy] = frame::tuple(conn.call("CONFIG", args).await.ok()?).ok()?;
    frame::text(policy).ok()
}

/// What consuming a stream needs rights for.
pub(crate) struct Uses<'a> {
    pub(crate) stream: &'a StreamKey,
    pub(crate) delay_set: Option<&'a StreamKey>,
    /// The delay set has a `ttl`.
    pub(crate) expires: bool,
    pub(crate) dead_letter: Option<&'a StreamKey>,
    /// The lease on the consumer's name.
    pub(crate) lease: Option<&'a StreamKey>,
    /// Acknowledged entries are deleted.
    pub(crate) deletes: bool,
}

/// The commands that this user lacks the right to, of those that are needed, each with its key, where
/// that is not the stream, and as the server says it. Nothing is changed by asking.
pub(crate) async fn denied(conn: &Connection, uses: &Uses<'_>) -> Result<Vec<String>, ServerError> {
    let word = Value::from_static_str;
    let key = |key: &StreamKey| Value::Bytes(key.0.clone());
    let stream = || key(uses.stream);
    let read = vec![
        word("GROUP"),
        word(NO_GROUP),
        word("c"),
        word("STREAMS"),
        stream(),
        word(">"),
    ];
    // An id that the server refuses, whatever the stream holds.
    let add = |key: Value| vec![key, word("NOMKSTREAM"), word("0-0"), word("f"), word("v")];
    let of_stream: Vec<(&'static str, Vec<Value>)> = vec![
        ("XREADGROUP", read),
        ("XACK", vec![stream(), word(NO_GROUP), word("0-1")]),
        ("XPENDING", vec![stream(), word(NO_GROUP)]),
        (
            "XCLAIM",
            vec![stream(), word(NO_GROUP), word("c"), word("0"), word("0-1")],
        ),
        ("XRANGE", vec![stream(), word("0-1"), word("0-1")]),
        ("XINFO", vec![word("GROUPS"), stream()]),
        (
            "XGROUP",
            vec![word("SETID"), stream(), word(NO_GROUP), word("0-0")],
        ),
        ("XADD", add(stream())),
        (
            "EVALSHA",
            vec![
                word("no script has this digest"),
                Value::Integer(1),
                stream(),
            ],
        ),
        ("EVAL", vec![word("return 1"), Value::Integer(1), stream()]),
        ("TIME", Vec::new()),
    ];
    let mut needed: Vec<_> = of_stream
        .into_iter()
        .map(|(command, args)| (command, String::new(), args))
        .collect();
    let mut need = |command, on: &StreamKey, args: Vec<Value>| {
        let args = std::iter::once(key(on)).chain(args).collect();
        needed.push((command, format!(" on `{on}`"), args));
    };
    if let Some(set) = uses.delay_set {
        let (zero, unreadable) = (|| word("0"), delay::unreadable(set));
        // XX: only where it is a member already.
        let add = || vec![word("XX"), zero(), word(NO_GROUP)];
        need("ZADD", set, add());
        need("ZADD", &unreadable, add());
        need("ZREM", set, vec![word(NO_GROUP)]);
        let none = vec![zero(), zero(), word("LIMIT"), zero(), zero()];
        need("ZRANGEBYSCORE", set, none);
        need("ZRANGE", set, vec![zero(), zero()]);
        if uses.expires {
            need("PEXPIREAT", set, vec![word("no time")]);
        }
    }
    if let Some(lease) = uses.lease {
        need("GET", lease, vec![]);
        need("PTTL", lease, vec![]);
        // XX and NX at once: only where it is and is not.
        need("SET", lease, vec![word(NO_GROUP), word("NX"), word("XX")]);
        need("PEXPIRE", lease, vec![word("no time")]);
    }
    if let Some(dead) = uses.dead_letter {
        need("XADD", dead, add(key(dead)).split_off(1));
    }
    // No entry has this id. With XACKDEL nothing else deletes.
    if uses.deletes && !can(conn, uses.stream, "XACKDEL", ack_delete(uses.stream)).await? {
        need("XDEL", uses.stream, vec![word("0-0")]);
    }
    let mut denied = Vec::new();
    for (command, on, args) in needed {
        match attempt(conn, uses.stream, command, args).await {
            Err(ServerError::Blocked(text)) if text.starts_with("NOPERM") => {
                denied.push(format!("{command}{on}: {text}"));
            }
            Err(error) if error.is_passing() && !error.is_memory() => return Err(error),
            _ => {}
        }
    }
    Ok(denied)
}

/// The type of what the key holds, in the server's words; `None` if there is no such key, or this user
/// may not ask.
pub(crate) async fn type_of(
    conn: &Connection,
    key: &StreamKey,
) -> Result<Option<String>, ServerError> {
    let found = match conn.call("TYPE", vec![Value::Bytes(key.0.clone())]).await {
        Ok(reply) => frame::text(reply)?,
        Err(denied) if denied.is_denied() => return Ok(None),
        Err(error) => return Err(error),
    };
    Ok((found != "none").then_some(found))
}
