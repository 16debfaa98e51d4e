//! A server process of a test's own: started on a free port, frozen, killed, restarted.

use std::fmt;
use std::fs;
use std::io;
use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use tempfile::TempDir;

use super::proxy::FaultProxy;
use super::resp::{Client, Reply};

/// From the start of the process to the first answer; long, since CI builds at the same time.
const READY_WITHIN: Duration = Duration::from_secs(20);

/// The servers that `scripts/servers.sh` provides.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Version {
    /// The oldest supported: no `XAUTOCLAIM` list of deleted ids.
    Redis62,
    /// The default. `REDIS_SERVER=/path/to/redis-server` stands in for it.
    Redis70,
    /// 8.4 or later: `XREADGROUP ... CLAIM`.
    Redis8,
    Valkey,
}

impl Version {
    pub const ALL: [Version; 4] = [
        Version::Redis62,
        Version::Redis70,
        Version::Redis8,
        Version::Valkey,
    ];

    /// The name by which `scripts/servers.sh` knows it.
    pub fn name(self) -> &'static str {
        match self {
            Version::Redis62 => "redis-6.2",
            Version::Redis70 => "redis-7.0",
            Version::Redis8 => "redis-8",
            Version::Valkey => "valkey",
        }
    }

    /// The executable. Panics when it is not there: a test that cannot run has failed.
    #[track_caller]
    pub fn binary(self) -> PathBuf {
        if self == Version::Redis70
            && let Some(path) = std::env::var_os("REDIS_SERVER")
        {
            let path = PathBuf::from(path);
            assert!(
                path.is_file(),
                "REDIS_SERVER={} is not a file: set it to the path of a redis-server, or unset it",
                path.display()
            );
            // It will run in another directory. Links stay: some servers look at their name.
            return std::path::absolute(path).expect("the current directory should exist");
        }
        let file = match self {
            Version::Valkey => "valkey-server",
            _ => "redis-server",
        };
        let path = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("target/servers")
            .join(self.name())
            .join(file);
        assert!(
            path.is_file(),
            "{} is missing: run scripts/servers.sh {}",
            path.display(),
            self.name()
        );
        path
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A server process with a directory and a port of its own. Dropping it kills it.
///
/// All methods take `&self`, so that a test can share one between tasks and threads.
pub struct Server {
    version: Version,
    binary: PathBuf,
    /// Its working directory: configuration, log, and the data of a test that turns persistence on.
    dir: TempDir,
    port: u16,
    password: Option<String>,
    /// `None` between `kill` and `restart`.
    process: Mutex<Option<Process>>,
    /// The connection behind `command`, opened when it is first used.
    client: Mutex<Option<Client>>,
}

/// The server's process, and the guard that ends it should ours be killed before it can.
struct Process {
    server: Child,
    /// A shell that waits for the end of its input, which comes when this process is gone, however
    /// it went: by an abort, by a test runner's time-out, by the end of `main` with a server in a
    /// static.
    guard: Child,
}

impl Server {
    /// A server without persistence, ready for commands.
    #[track_caller]
    pub fn start(version: Version) -> Server {
        Server::start_with(version, &[])
    }

    /// The same with configuration directives of its own, written as in redis.conf: values with
    /// spaces or empty ones in quotes, as in `("rename-command", "XAUTOCLAIM \"\"")`.
    #[track_caller]
    pub fn start_with(version: Version, directives: &[(&str, &str)]) -> Server {
        let binary = version.binary();
        let mut last_failure = String::new();
        // Another process may take the port between our look at it and the server's start.
        for _ in 0..10 {
            let port = free_port();
            let dir = tempfile::Builder::new()
                .prefix("streamvisor-server-")
                .tempdir()
                .expect("the temporary directory (TMPDIR) should be writable and not full");
            write_config(dir.path(), version, port, directives);
            let server = Server {
                version,
                binary: binary.clone(),
                dir,
                port,
                password: directives
                    .iter()
                    .rev()
                    .find(|(key, _)| key.eq_ignore_ascii_case("requirepass"))
                    .map(|(_, value)| value.trim_matches('"').to_owned()),
                process: Mutex::new(None),
                client: Mutex::new(None),
            };
            match server.spawn() {
                Ok(()) => return server,
                Err(failure) if failure.contains("Address already in use") => {
                    last_failure = failure;
                }
                Err(failure) => panic!("{version} did not start: {failure}"),
            }
        }
        panic!("{version} found no free port in ten attempts; the last: {last_failure}");
    }

    /// What tests use that do not care about the version: Redis 7.0, or what `REDIS_SERVER` names.
    pub fn default_version() -> Version {
        Version::Redis70
    }

    pub fn version(&self) -> Version {
        self.version
    }

    pub fn url(&self) -> String {
        let auth = match &self.password {
            Some(password) => format!(":{password}@"),
            None => String::new(),
        };
        format!("redis://{auth}127.0.0.1:{}", self.port)
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    #[track_caller]
    pub fn pid(&self) -> u32 {
        match &*self.process() {
            Some(process) => process.server.id(),
            None => panic!("the server was killed: it has no pid until restart()"),
        }
    }

    pub fn is_running(&self) -> bool {
        self.process().is_some()
    }

    /// A proxy in front of this server.
    #[track_caller]
    pub fn proxy(&self) -> FaultProxy {
        FaultProxy::start(self.port)
    }

    /// Stops the process where it stands (SIGSTOP): connections stay open, nothing is answered.
    #[track_caller]
    pub fn freeze(&self) {
        signal("STOP", self.pid());
        // The signal takes effect a moment later; a test wants nothing to be answered from here on.
        let stat = PathBuf::from(format!("/proc/{}/stat", self.pid()));
        let deadline = Instant::now() + Duration::from_secs(5);
        while let Ok(text) = fs::read_to_string(&stat) {
            let state = text
                .rsplit(')')
                .next()
                .and_then(|rest| rest.split_whitespace().next());
            if state == Some("T") {
                return;
            }
            assert!(
                Instant::now() < deadline,
                "the server is still in state {state:?} 5 s after SIGSTOP"
            );
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// Lets a frozen server go on (SIGCONT).
    #[track_caller]
    pub fn thaw(&self) {
        signal("CONT", self.pid());
    }

    /// Kills the process (SIGKILL) and waits until it is gone. Does nothing when it already is.
    pub fn kill(&self) {
        let process = self.process().take();
        if let Some(process) = process {
            process.end();
        }
        // After that: a command that waits for a frozen server holds the connection until it ends.
        *self.client() = None;
    }

    /// Starts it again, with the same port, directory and configuration; kills it first when it
    /// still runs. Without persistence (`("appendonly", "yes")`) it comes back empty.
    #[track_caller]
    pub fn restart(&self) {
        self.kill();
        if let Err(failure) = self.spawn() {
            panic!("{} did not start again: {failure}", self.version);
        }
    }

    /// Sends a command on a connection kept for this, and returns the reply, errors included.
    ///
    /// Panics when there is no answer within 10 s (is the server frozen?).
    #[track_caller]
    pub fn command<A: AsRef<[u8]>>(&self, args: &[A]) -> Reply {
        match self.try_command(args) {
            Ok(reply) => reply,
            Err(error) => panic!("{}: no reply to {}: {error}", self.version, shown(args)),
        }
    }

    /// The same for a server that may be down or frozen.
    pub fn try_command<A: AsRef<[u8]>>(&self, args: &[A]) -> io::Result<Reply> {
        self.with_client(|client| client.command(args))
    }

    /// Sends many commands at once, each of them as in `command`.
    #[track_caller]
    pub fn pipeline<A: AsRef<[u8]>>(&self, commands: &[Vec<A>]) -> Vec<Reply> {
        match self.with_client(|client| client.pipeline(commands)) {
            Ok(replies) => replies,
            Err(error) => panic!("{}: no reply to a pipeline: {error}", self.version),
        }
    }

    /// A connection of the caller's own, for what blocks or has state (BLOCK, MULTI, WATCH).
    #[track_caller]
    pub fn connect(&self) -> Client {
        match Client::connect(self.port, self.password.as_deref()) {
            Ok(client) => client,
            Err(error) => panic!("{}: cannot connect: {error}", self.version),
        }
    }

    /// As `command`, for commands that must not fail.
    #[track_caller]
    pub(super) fn expect<A: AsRef<[u8]>>(&self, args: &[A]) -> Reply {
        match self.command(args) {
            Reply::Error(message) => panic!("{}: {}: {message}", self.version, shown(args)),
            reply => reply,
        }
    }

    /// The last lines of its log, for the message of a failed test.
    pub fn log_tail(&self) -> String {
        let log = fs::read(self.dir.path().join("server.log")).unwrap_or_default();
        let log = String::from_utf8_lossy(&log);
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(20)..].join("\n")
    }

    /// Starts the process and waits until it answers; says why when it does not.
    fn spawn(&self) -> Result<(), String> {
        let log = fs::File::options()
            .create(true)
            .append(true)
            .open(self.dir.path().join("server.log"))
            .map_err(|error| format!("cannot open its log: {error}"))?;
        let log_of_errors = log
            .try_clone()
            .map_err(|error| format!("cannot open its log: {error}"))?;
        let server = Command::new(&self.binary)
            .arg("server.conf")
            .current_dir(self.dir.path())
            .stdin(Stdio::null())
            .stdout(log)
            .stderr(log_of_errors)
            .spawn()
            .map_err(|error| format!("cannot run {}: {error}", self.binary.display()))?;
        let mut process = Process::guarded(server, self.dir.path());

        let deadline = Instant::now() + READY_WITHIN;
        let failure = loop {
            match process.server.try_wait() {
                Ok(None) => {}
                Ok(Some(status)) => break format!("it ended ({status})"),
                Err(error) => break format!("cannot wait for it: {error}"),
            }
            if self.answers_as(process.server.id()) {
                *self.process() = Some(process);
                return Ok(());
            }
            if Instant::now() > deadline {
                break format!("no answer within {READY_WITHIN:?}");
            }
            thread::sleep(Duration::from_millis(2));
        };
        process.end();
        Err(format!("{failure}; its log ends:\n{}", self.log_tail()))
    }

    /// Whether the server on our port is ready and is this process: were the port taken by another
    /// test's server at the same moment, that one would answer until ours gives up.
    fn answers_as(&self, pid: u32) -> bool {
        let Ok(mut client) = Client::connect(self.port, self.password.as_deref()) else {
            return false;
        };
        match client.command(&["PING"]) {
            Ok(Reply::Error(message)) if message.starts_with("LOADING") => return false,
            Ok(_) => {}
            Err(_) => return false,
        }
        match client.command(&["INFO", "server"]) {
            Ok(Reply::Bytes(info)) => String::from_utf8_lossy(&info)
                .lines()
                .any(|line| line == format!("process_id:{pid}")),
            // A test took INFO away.
            Ok(_) => true,
            Err(_) => false,
        }
    }

    fn with_client<T>(&self, ask: impl FnOnce(&mut Client) -> io::Result<T>) -> io::Result<T> {
        let mut kept = self.client();
        // Looked at before it is used, since a command that was sent must not be sent again.
        let mut client = match kept.take() {
            Some(client) if !client.is_closed() => client,
            _ => Client::connect(self.port, self.password.as_deref())?,
        };
        let result = ask(&mut client);
        // After a failure a late reply might still arrive: that connection is not used again.
        if result.is_ok() {
            *kept = Some(client);
        }
        result
    }

    // A test that panicked while it held one of these has not left it half changed.

    fn process(&self) -> MutexGuard<'_, Option<Process>> {
        self.process.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn client(&self) -> MutexGuard<'_, Option<Client>> {
        self.client.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
    }
}

impl Process {
    fn guarded(mut server: Child, dir: &Path) -> Process {
        let guard = Command::new("sh")
            .arg("-c")
            .arg("trap '' INT TERM HUP; read -r line; kill -KILL \"$1\"; rm -rf \"$2\"")
            .arg("sh")
            .arg(server.id().to_string())
            .arg(dir)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        match guard {
            Ok(guard) => Process { server, guard },
            Err(error) => {
                end_child(&mut server);
                panic!("cannot run sh, which ends a server whose test was killed: {error}");
            }
        }
    }

    fn end(mut self) {
        // The guard first: it must not live to kill whatever gets this pid next.
        end_child(&mut self.guard);
        end_child(&mut self.server);
    }
}

/// Kills a child and waits for it. Errors mean that it ended by itself.
fn end_child(child: &mut Child) {
    let _ = child.kill();
    let _ = child.wait();
}

/// Through the shell's own `kill`, since this crate forbids unsafe code.
#[track_caller]
fn signal(name: &str, pid: u32) {
    let status = Command::new("sh")
        .arg("-c")
        .arg("kill -s \"$1\" \"$2\"")
        .args(["sh", name, &pid.to_string()])
        .status();
    match status {
        Ok(status) if status.success() => {}
        other => panic!("cannot send SIG{name} to {pid}: {other:?}"),
    }
}

fn write_config(dir: &Path, version: Version, port: u16, directives: &[(&str, &str)]) {
    let mut config = format!(
        "bind 127.0.0.1\n\
         port {port}\n\
         daemonize no\n\
         save \"\"\n\
         appendonly no\n"
    );
    // Needed from 7.0 on, unknown before.
    if version != Version::Redis62 {
        config.push_str("enable-debug-command yes\n");
    }
    for (key, value) in directives {
        config.push_str(&format!("{key} {value}\n"));
    }
    fs::write(dir.join("server.conf"), config)
        .expect("the temporary directory (TMPDIR) should be writable and not full");
}

/// A port of the loopback interface that nobody listens on.
///
/// Below the range from which the system takes the ports of outgoing connections, so that none of
/// those sits on it when a killed server, or a proxy that refused, comes back to it.
pub(super) fn free_port() -> u16 {
    static SEED: AtomicU32 = AtomicU32::new(0);
    const FIRST: u32 = 12_000;
    const COUNT: u32 = 20_000;

    // Test processes run side by side: they should not all try the same ports.
    let clock = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |elapsed| elapsed.subsec_nanos());
    let start = std::process::id().wrapping_mul(7919).wrapping_add(clock);
    for _ in 0..COUNT {
        let step = SEED.fetch_add(1, Ordering::Relaxed);
        let port = FIRST + start.wrapping_add(step.wrapping_mul(37)) % COUNT;
        let port = u16::try_from(port).expect("the range should end below 65536");
        if TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok() {
            return port;
        }
    }
    panic!("no free port between {FIRST} and {}", FIRST + COUNT);
}

fn shown<A: AsRef<[u8]>>(args: &[A]) -> String {
    let words: Vec<_> = args
        .iter()
        .map(|arg| String::from_utf8_lossy(arg.as_ref()))
        .collect();
    words.join(" ")
}
