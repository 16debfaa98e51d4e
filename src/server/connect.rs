//! Connections: one per role, each made anew when its client has come to an end.
//!
//! The client library reconnects by itself, and its commands wait for that within their time. Three
//! things it does not do, and they are done here: its task may end while calls to it would wait for
//! ever (after an ASK redirection, for one); a link on which nothing comes back stays in use; and
//! nothing closes a connection that is merely dropped.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use fred::clients::Client;
use fred::error::{Error, ErrorKind};
use fred::interfaces::{ClientInterface, ClientLike, EventInterface};
use fred::types::config::{Blocking, Options, ReconnectError, ReconnectPolicy, Server, TcpConfig};
use fred::types::{Builder, ClusterHash, ConnectHandle, CustomCommand, RespVersion, Value};
use tokio::sync::broadcast;
use tokio::time::timeout;

use super::errors::ServerError;
use super::frame::{self, Frame};
use crate::topology::Redis;

/// What a blocking command may take beyond the time it blocks for, before the link counts as dead.
/// The server looks at expired blocks about every 100 ms.
pub(crate) const BLOCKING_SLACK: Duration = Duration::from_millis(1500);

/// To open a socket to a server that does not refuse it, and for each step of greeting it.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// `QUIT` waits for what is under way; on a dead link nothing bounds that but this.
const QUIT_TIMEOUT: Duration = Duration::from_secs(1);
/// The pauses between attempts to reconnect: doubled, with jitter.
const SHORTEST_PAUSE_MS: u32 = 50;
const LONGEST_PAUSE_MS: u32 = 2000;
const PAUSE_JITTER_MS: u32 = 50;
/// With less time than this left there is no further attempt to connect at first.
const LAST_ATTEMPT: Duration = Duration::from_millis(50);
/// How often a command is handed to the client that the client could not send.
const ROUTING_ATTEMPTS: u32 = 3;
/// What the client says then.
const NOT_SENT: &str = "Failed to route command.";

/// What a connection is for. Roles never share one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    /// Reads entries. Sent again by the client, a read would take entries that nobody waits for.
    Reader,
    /// Settles, sweeps, and runs every script that may be sent again.
    Settler,
    /// Keeps entries fresh, on a thread and a runtime of its own.
    KeepAlive,
    /// Publishes. Sent again, an entry would be there twice.
    Publisher,
}

impl Role {
    /// How often a command is written, if the connection breaks under it.
    fn attempts(self) -> u32 {
        match self {
            Role::Reader | Role::Publisher => 1,
            Role::Settler | Role::KeepAlive => 3,
        }
    }

    /// How long a command may take that does not block, waiting for a connection included.
    fn timeout(self) -> Duration {
        match self {
            Role::Reader | Role::Settler => Duration::from_secs(3),
            Role::KeepAlive => Duration::from_secs(1),
            Role::Publisher => Duration::from_secs(5),
        }
    }
}

/// A Lua script, called by its digest.
pub(crate) struct Script {
    source: &'static str,
    digest: OnceLock<String>,
}

impl Script {
    pub(crate) const fn new(source: &'static str) -> Self {
        Script {
            source,
            digest: OnceLock::new(),
        }
    }

    fn digest(&self) -> Value {
        let digest = self
            .digest
            .get_or_init(|| fred::util::sha1_hash(self.source));
        Value::String(digest.as_str().into())
    }
}

/// A connection to the server, or to the servers of one deployment. Dropping it closes it.
pub(crate) struct Connection {
    redis: Redis,
    role: Role,
    /// What the server shows in `CLIENT LIST`.
    name: String,
    live: Mutex<Live>,
    closed: AtomicBool,
}

/// The client of the moment and the tasks that move it.
struct Live {
    client: Client,
    /// Ends when the client is finished for good; ending it closes the sockets at once.
    router: ConnectHandle,
    /// Gives the connection its name, each time there is a new one.
    namer: tokio::task::JoinHandle<()>,
    /// Why it could not connect, lately.
    errors: broadcast::Receiver<(Error, Option<Server>)>,
    /// Tells the clients of this connection apart: a call that failed speaks of the client it used.
    generation: u64,
}

impl Connection {
    /// Connects within a time. A server that cannot be reached or is still loading is tried again
    /// until then; wrong credentials, or what is no server of this kind, fail at once.
    pub(crate) async fn open(
        redis: &Redis,
        role: Role,
        name: &str,
        within: Duration,
    ) -> Result<Self, ServerError> {
        let deadline = Instant::now() + within;
        let mut pause = Duration::from_millis(u64::from(SHORTEST_PAUSE_MS));
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let failure = match Live::open(redis, role, name, left).await {
                Ok(live) => {
                    return Ok(Connection {
                        redis: redis.clone(),
                        role,
                        name: name.to_owned(),
                        live: Mutex::new(live),
                        closed: AtomicBool::new(false),
                    });
                }
                Err(failure) => failure,
            };
            let left = deadline.saturating_duration_since(Instant::now());
            if !failure.is_passing() || left < LAST_ATTEMPT {
                return Err(failure.explained(|text| format!("cannot connect to {redis}: {text}")));
            }
            // The nearer the end, the shorter the pause, so that there is always a last attempt.
            tokio::time::sleep(pause.min(left / 2)).await;
            pause = (pause * 2).min(Duration::from_millis(u64::from(LONGEST_PAUSE_MS)));
        }
    }

    /// Sends a command that does not block. An error reply is an error.
    pub(crate) async fn call(
        &self,
        command: &'static str,
        args: Vec<Value>,
    ) -> Result<Frame, ServerError> {
        self.send(command, args, None).await
    }

    /// Sends a command that blocks. When nothing came back within `within`, the link counts as
    /// dead: it is closed, so that the server stops handing entries to it, and a new one is made.
    ///
    /// The future must be awaited to its end: dropping it takes nothing back.
    pub(crate) async fn call_blocking(
        &self,
        command: &'static str,
        args: Vec<Value>,
        within: Duration,
    ) -> Result<Frame, ServerError> {
        self.send(command, args, Some(within)).await
    }

    async fn send(
        &self,
        command: &'static str,
        mut args: Vec<Value>,
        blocking: Option<Duration>,
    ) -> Result<Frame, ServerError> {
        let mut attempts = ROUTING_ATTEMPTS;
        loop {
            attempts -= 1;
            let (client, generation) = self.client()?;
            let custom =
                CustomCommand::new_static(command, key_of(command, args.len()), blocking.is_some());
            // Written once, it may fail without having been written at all: see below.
            let again = if attempts > 0 && self.role.attempts() == 1 {
                args.clone()
            } else {
                Vec::new()
            };
            let reply = match blocking {
                None => client.custom_raw(custom, args).await,
                Some(within) => {
                    let options = Options {
                        timeout: Some(within),
                        ..Options::default()
                    };
                    client.with_options(&options).custom_raw(custom, args).await
                }
            };
            match reply {
                Ok(reply) => return frame::checked(reply),
                // The connection broke before this command came and the client noticed only now. It
                // was not sent; the next one waits for the new connection.
                Err(error) if error.details() == NOT_SENT && !again.is_empty() => args = again,
                Err(error) => return Err(self.failed(error, &client, generation)),
            }
        }
    }

    /// Runs a script. Where the server does not have it, it has not run, and is sent whole.
    pub(crate) async fn script(
        &self,
        script: &'static Script,
        keys: Vec<Value>,
        args: Vec<Value>,
    ) -> Result<Frame, ServerError> {
        let mut whole = Vec::with_capacity(2 + keys.len() + args.len());
        whole.push(script.digest());
        whole.push(Value::Integer(keys.len() as i64));
        whole.extend(keys);
        whole.extend(args);
        match self.call("EVALSHA", whole.clone()).await {
            Err(ServerError::Refused(text)) if text.starts_with("NOSCRIPT") => {
                if let Some(first) = whole.first_mut() {
                    *first = Value::from_static_str(script.source);
                }
                self.call("EVAL", whole).await
            }
            reply => reply,
        }
    }

    /// Sends commands right behind one another, so that the server runs them without anything in between
    /// that it has not begun with. Best effort: of their replies nothing is said.
    pub(super) async fn call_together(
        &self,
        commands: impl IntoIterator<Item = (&'static str, Vec<Value>)>,
    ) {
        let Ok((client, _)) = self.client() else {
            return;
        };
        let together = client.pipeline();
        for (command, args) in commands {
            let custom = CustomCommand::new_static(command, key_of(command, args.len()), false);
            // Only put on the list.
            let _: Result<Value, _> = together.custom(custom, args).await;
        }
        let _: Vec<Result<Value, Error>> = together.try_all().await;
    }

    /// Closes the link and makes a new one; what is under way on it fails with
    /// [`ServerError::Away`].
    #[cfg(test)]
    pub(crate) async fn reconnect(&self) {
        if !self.is_closed() {
            let mut live = self.live();
            self.replace(&mut live);
        }
    }

    /// The ids by which the server knows this connection, for [`kill`](Connection::kill). None
    /// where it is not connected, or may not ask for them.
    pub(crate) fn server_ids(&self) -> Vec<i64> {
        self.live().client.connection_ids().into_values().collect()
    }

    /// Closes connections on the server, so that replies to them are not sent any more. Best
    /// effort.
    pub(crate) async fn kill(&self, server_ids: &[i64]) {
        for &id in server_ids {
            let args = vec![
                Value::from_static_str("KILL"),
                Value::from_static_str("ID"),
                Value::Integer(id),
            ];
            let _ = self.call("CLIENT", args).await;
        }
    }

    /// Whether there is a link right now, as far as is known.
    #[cfg(test)]
    pub(crate) fn is_connected(&self) -> bool {
        let live = self.live();
        !self.is_closed() && !live.router.is_finished() && live.client.is_connected()
    }

    /// Says goodbye and closes. Calls fail from here on.
    pub(crate) async fn close(&self) {
        if self.closed.swap(true, Ordering::AcqRel) {
            return;
        }
        let client = self.live().client.clone();
        let _ = timeout(QUIT_TIMEOUT, client.quit()).await;
        self.live().end();
    }

    /// Closes the sockets where they stand. Calls fail from here on, those under way too.
    pub(crate) fn abort(&self) {
        self.closed.store(true, Ordering::Release);
        self.live().end();
    }

    /// As when the client's task ends by itself.
    #[cfg(test)]
    pub(super) fn end_client(&self) {
        self.live().router.abort();
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    fn live(&self) -> MutexGuard<'_, Live> {
        // Whoever panicked while holding it left a client there, the old one or the new one.
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A client that can be called, and which one it is.
    fn client(&self) -> Result<(Client, u64), ServerError> {
        let mut live = self.live();
        if self.is_closed() {
            return Err(ServerError::Away("the connection is closed".to_owned()));
        }
        if live.router.is_finished() {
            self.replace(&mut live);
        }
        Ok((live.client.clone(), live.generation))
    }

    /// Ends the client and starts another, which connects as soon as it can.
    fn replace(&self, live: &mut Live) {
        let generation = live.generation + 1;
        match Live::start(&self.redis, self.role, &self.name, false, generation) {
            Ok(next) => std::mem::replace(live, next).end(),
            // It was made from the same configuration before. The old one is asked again next time.
            Err(error) => {
                tracing::error!(%error, "the connection to {} cannot be made anew", self.redis)
            }
        }
    }

    /// What a call's failure means, and what is done about it.
    fn failed(&self, error: Error, client: &Client, generation: u64) -> ServerError {
        let timed_out = *error.kind() == ErrorKind::Timeout;
        let failure = ServerError::from(error);
        if !timed_out || self.is_closed() {
            return failure;
        }
        let mut live = self.live();
        if live.generation != generation {
            return failure;
        }
        if client.is_connected() {
            // Connected, and no answer: the other side is gone without a word, or stands still. The
            // client itself would wait on.
            self.replace(&mut live);
            return failure;
        }
        // It waited for a connection in vain; the reason is more useful than that.
        match live.last_error() {
            Some(reason) => {
                reason.explained(|text| format!("cannot connect to {}: {text}", self.redis))
            }
            None => failure,
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.abort();
    }
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Connection({} as {:?})", self.redis, self.role)
    }
}

impl Live {
    /// Starts a client and waits until it is connected and answers.
    async fn open(
        redis: &Redis,
        role: Role,
        name: &str,
        within: Duration,
    ) -> Result<Self, ServerError> {
        let mut live = Live::start(redis, role, name, true, 0)?;
        let answered = timeout(within, async {
            live.connected().await?;
            // It may have greeted us while it is still loading its data.
            let ping = CustomCommand::new_static("PING", ClusterHash::Random, false);
            let reply = live.client.custom_raw(ping, Vec::<Value>::new()).await?;
            match frame::checked(reply) {
                Err(loading @ ServerError::Away(_)) => Err(loading),
                Err(blocked @ ServerError::Blocked(_)) if !blocked.is_denied() => Err(blocked),
                _ => Ok(()),
            }
        })
        .await
        .unwrap_or_else(|_| {
            let silent = || ServerError::Away(format!("no answer within {within:.1?}"));
            Err(live.last_error().unwrap_or_else(silent))
        });
        match answered {
            Ok(()) => Ok(live),
            Err(failure) => {
                live.end();
                Err(failure)
            }
        }
    }

    /// Starts a client. With `once` it tries to connect once and ends if that fails; without, it
    /// tries for ever.
    fn start(
        redis: &Redis,
        role: Role,
        name: &str,
        once: bool,
        generation: u64,
    ) -> Result<Self, ServerError> {
        let mut config = redis.config().clone();
        config.version = RespVersion::RESP2;
        config.blocking = Blocking::Block;
        config.fail_fast = once;
        let mut policy =
            ReconnectPolicy::new_exponential(0, SHORTEST_PAUSE_MS, LONGEST_PAUSE_MS, 2);
        policy.set_jitter(PAUSE_JITTER_MS);
        let client = Builder::from_config(config)
            .with_connection_config(|connection| {
                connection.connection_timeout = CONNECT_TIMEOUT;
                connection.internal_command_timeout = CONNECT_TIMEOUT;
                connection.max_command_attempts = role.attempts();
                connection.tcp = TcpConfig {
                    nodelay: Some(true),
                    ..TcpConfig::default()
                };
                // Besides CLUSTERDOWN. These say that the primary is somewhere else now; LOADING
                // does not.
                connection.reconnect_errors =
                    vec![ReconnectError::ReadOnly, ReconnectError::MasterDown];
            })
            .with_performance_config(|performance| {
                performance.default_command_timeout = role.timeout();
            })
            .set_policy(policy)
            .build()?;
        let errors = client.error_rx();
        let namer = name_connections(client.clone(), client.reconnect_rx(), name.to_owned());
        let namer = tokio::spawn(namer);
        let router = client.connect();
        Ok(Live {
            client,
            router,
            namer,
            errors,
            generation,
        })
    }

    /// Returns when the client is connected, or has given up.
    async fn connected(&mut self) -> Result<(), ServerError> {
        let connected = async {
            // The event may have come before this waits for it.
            while !self.client.is_connected() {
                let _ = timeout(Duration::from_millis(10), self.client.wait_for_connect()).await;
            }
        };
        tokio::select! {
            biased;
            ended = &mut self.router => Err(match ended {
                Ok(Err(error)) => error.into(),
                _ => ServerError::Away("the connection ended".to_owned()),
            }),
            () = connected => Ok(()),
        }
    }

    /// The latest reason why there is no connection, if one was reported since last asked.
    fn last_error(&mut self) -> Option<ServerError> {
        let mut last = None;
        loop {
            match self.errors.try_recv() {
                Ok((error, _)) => last = Some(error),
                Err(broadcast::error::TryRecvError::Lagged(_)) => {}
                Err(_) => break,
            }
        }
        // Some are mere notices that a connection ended.
        last.filter(|error| !error.is_canceled())
            .map(ServerError::from)
    }

    fn end(&self) {
        self.router.abort();
        self.namer.abort();
    }
}

/// Nobody else closes its sockets: not when it is dropped while it is being opened, either.
impl Drop for Live {
    fn drop(&mut self) {
        self.end();
    }
}

/// Tells the server what to call a connection, each time one was made. Best effort.
async fn name_connections(
    client: Client,
    mut reconnected: broadcast::Receiver<Server>,
    name: String,
) {
    while let Ok(_) | Err(broadcast::error::RecvError::Lagged(_)) = reconnected.recv().await {
        let command = CustomCommand::new_static("CLIENT", ClusterHash::Random, false);
        let args = vec![
            Value::from_static_str("SETNAME"),
            Value::from(name.as_str()),
        ];
        let _ = client.custom_raw(command, args).await;
    }
}

/// Where the key stands among the arguments of a command: a cluster's client sends it to the key's
/// node.
fn key_of(command: &str, args: usize) -> ClusterHash {
    match command {
        "EVALSHA" | "EVAL" => ClusterHash::Offset(2),
        "XREADGROUP" => ClusterHash::Offset(args.saturating_sub(2)),
        "XGROUP" | "XINFO" => ClusterHash::Offset(1),
        "INFO" | "CONFIG" | "CLIENT" | "COMMAND" => ClusterHash::Random,
        _ => ClusterHash::FirstKey,
    }
}
