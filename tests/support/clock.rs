//! Processes whose clocks are wrong: `clock.c`, preloaded. For Linux, with a C compiler.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{SystemTime, UNIX_EPOCH};

/// Tells a process where its error stands.
const FILE: &str = "STREAMVISOR_CLOCK";

/// The library that makes clocks wrong.
#[derive(Clone, Debug)]
pub struct Clockwork(PathBuf);

impl Clockwork {
    /// Compiles it into this folder.
    pub fn build(dir: &Path) -> io::Result<Clockwork> {
        let library = dir.join("clock.so");
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/clock.c");
        let compiler = std::env::var_os("CC").unwrap_or_else(|| "cc".into());
        let compiled = Command::new(&compiler)
            .args(["-shared", "-fPIC", "-O1", "-o"])
            .args([library.as_os_str(), OsStr::new(source)])
            .output()
            .map_err(|error| io::Error::other(format!("{}: {error}", compiler.display())))?;
        if compiled.status.success() {
            Ok(Clockwork(library))
        } else {
            let said = String::from_utf8_lossy(&compiled.stderr).into_owned();
            Err(io::Error::other(said))
        }
    }

    /// A clock that is this many seconds ahead; its error is kept in this file.
    pub fn clock(&self, file: &Path, seconds: i64) -> io::Result<Clock> {
        let clock = Clock {
            file: file.to_owned(),
            library: self.0.clone(),
        };
        fs::write(&clock.file, seconds.to_ne_bytes())?;
        Ok(clock)
    }
}

#[derive(Debug)]
pub struct Clock {
    file: PathBuf,
    library: PathBuf,
}

impl Clock {
    /// Sets it, for processes that run too.
    pub fn set(&self, seconds: i64) -> io::Result<()> {
        // Not truncated: somebody may be looking.
        let file = fs::File::options().write(true).open(&self.file)?;
        file.write_all_at(&seconds.to_ne_bytes(), 0)
    }

    /// Makes this the clock of a process that is to be started.
    pub fn wind(&self, command: &mut Command) {
        command
            .env("LD_PRELOAD", &self.library)
            .env(FILE, &self.file);
    }
}

/// By how many seconds the clock of this very process is ahead.
pub fn own_error() -> i64 {
    let path = std::env::var_os(FILE);
    let bytes = path.and_then(|path| fs::read(path).ok());
    let bytes = bytes.and_then(|bytes| <[u8; 8]>::try_from(bytes).ok());
    bytes.map_or(0, i64::from_ne_bytes)
}

/// Seconds since 1970 by this process's clock.
pub fn seconds() -> i64 {
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH);
    since_epoch.map_or(0, |elapsed| elapsed.as_secs() as i64)
}
