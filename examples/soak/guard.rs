//! Ends what a run has started, should the run itself be killed; and signals to processes.

use std::io::{self, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};

/// A shell that reads which processes there are, and kills them when its input ends: that comes when this
/// process is gone, however it went. A frozen process could not notice that by itself.
const SCRIPT: &str = r#"
trap '' INT TERM HUP
pids=
while read -r verb pid; do
    case $verb in
    watch) pids="$pids $pid" ;;
    forget)
        left=
        for it in $pids; do [ "$it" = "$pid" ] || left="$left $it"; done
        pids=$left
        ;;
    esac
done
for it in $pids; do kill -KILL "$it"; done
"#;

#[derive(Clone)]
pub struct Guard(Arc<Mutex<Shell>>);

struct Shell {
    process: Child,
    /// `None` once it is closed.
    input: Option<ChildStdin>,
}

impl Guard {
    pub fn start() -> io::Result<Guard> {
        let mut process = Command::new("sh")
            .args(["-c", SCRIPT])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        let input = process.stdin.take();
        Ok(Guard(Arc::new(Mutex::new(Shell { process, input }))))
    }

    pub fn watch(&self, pid: u32) {
        self.tell("watch", pid);
    }

    /// Before the process is waited for: afterwards its pid may be another's.
    pub fn forget(&self, pid: u32) {
        self.tell("forget", pid);
    }

    fn tell(&self, verb: &str, pid: u32) {
        let mut shell = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(input) = &mut shell.input {
            // A guard that is gone is no reason to stop a run.
            let _ = writeln!(input, "{verb} {pid}");
        }
    }
}

impl Drop for Shell {
    fn drop(&mut self) {
        drop(self.input.take());
        let _ = self.process.wait();
    }
}

/// Through the shell's own `kill`, since this crate forbids unsafe code.
pub fn signal(name: &str, pid: u32) {
    let status = Command::new("sh")
        .args(["-c", "kill -s \"$1\" \"$2\"", "sh", name])
        .arg(pid.to_string())
        .stderr(Stdio::null())
        .status();
    if !matches!(&status, Ok(status) if status.success()) {
        eprintln!("soak: cannot send SIG{name} to {pid}: {status:?}");
    }
}
