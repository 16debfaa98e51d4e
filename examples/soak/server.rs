//! The server of a run: started with its data on disk, frozen, killed and started again.

use std::fs::{self, File};
use std::io;
use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use streamvisor::BoxError;

use crate::guard::{Guard, signal};
use crate::resp::{Client, Reply};

/// From the start of the process to its first answer, with its data to load.
const READY_WITHIN: Duration = Duration::from_secs(60);

pub struct Server {
    binary: PathBuf,
    dir: PathBuf,
    port: u16,
    guard: Guard,
    /// `None` while it is dead.
    process: Option<Child>,
}

impl Server {
    /// Everything that a client was told is on the disk by then, so a kill costs nothing of it.
    pub fn start(binary: &Path, dir: &Path, guard: &Guard) -> Result<Server, BoxError> {
        fs::create_dir_all(dir)?;
        let port = free_port();
        let config = format!(
            "bind 127.0.0.1\n\
             port {port}\n\
             daemonize no\n\
             save \"\"\n\
             appendonly yes\n\
             appendfsync always\n\
             maxmemory-policy noeviction\n"
        );
        fs::write(dir.join("server.conf"), config)?;
        let mut server = Server {
            binary: std::path::absolute(binary)?,
            dir: dir.to_owned(),
            port,
            guard: guard.clone(),
            process: None,
        };
        server.run()?;
        Ok(server)
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    /// Starts the process and waits until it answers.
    pub fn run(&mut self) -> Result<(), BoxError> {
        let log = File::options()
            .create(true)
            .append(true)
            .open(self.dir.join("server.log"))?;
        let process = Command::new(&self.binary)
            .arg("server.conf")
            .current_dir(&self.dir)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .map_err(|error| format!("cannot run {}: {error}", self.binary.display()))?;
        self.guard.watch(process.id());
        let process = self.process.insert(process);
        let deadline = Instant::now() + READY_WITHIN;
        loop {
            if let Some(status) = process.try_wait()? {
                let log = self.dir.join("server.log");
                return Err(format!("the server ended ({status}); see {}", log.display()).into());
            }
            if let Ok(mut client) = Client::connect(self.port, None)
                && let Ok(Reply::Status(_)) = client.command(&["PING"])
            {
                return Ok(());
            }
            if Instant::now() > deadline {
                return Err(format!("the server gave no answer within {READY_WITHIN:?}").into());
            }
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// SIGKILL.
    pub fn kill(&mut self) {
        if let Some(mut process) = self.process.take() {
            self.guard.forget(process.id());
            // Errors mean that it ended by itself.
            let _ = process.kill();
            let _ = process.wait();
        }
    }

    pub fn freeze(&self) {
        self.signal("STOP");
    }

    pub fn thaw(&self) {
        self.signal("CONT");
    }

    /// Whether it has ended without having been killed here.
    pub fn has_ended(&mut self) -> bool {
        match &mut self.process {
            Some(process) => !matches!(process.try_wait(), Ok(None)),
            None => false,
        }
    }

    fn signal(&self, name: &str) {
        if let Some(process) = &self.process {
            signal(name, process.id());
        }
    }

    pub fn connect(&self) -> io::Result<Client> {
        Client::connect(self.port, None)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A port of the loopback interface that nobody listens on.
///
/// Below the range from which the system takes the ports of outgoing connections, so that none of
/// those sits on it when a killed server, or a proxy that refused, comes back to it.
pub fn free_port() -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    const FIRST: u32 = 12_000;
    const COUNT: u32 = 20_000;

    // Runs side by side should not all try the same ports.
    let start = std::process::id().wrapping_mul(7919);
    for _ in 0..COUNT {
        let step = NEXT.fetch_add(1, Ordering::Relaxed);
        let port = FIRST + start.wrapping_add(step.wrapping_mul(37)) % COUNT;
        let port = u16::try_from(port).expect("the range should end below 65536");
        if TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok() {
            return port;
        }
    }
    panic!("no free port between {FIRST} and {}", FIRST + COUNT);
}
