//! The supervisor processes: this program, run again, behind a proxy each. A slot has one process after
//! the other.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use streamvisor::BoxError;

use crate::accounting::End;
#[cfg(target_os = "linux")]
use crate::clock::{Clock, Clockwork};
use crate::guard::{Guard, signal};
use crate::journal::{Micros, now};
use crate::proxy::FaultProxy;

/// By how many seconds the clocks of the slots are ahead in the beginning.
#[cfg(target_os = "linux")]
const CLOCKS_AT_FIRST: [i64; 3] = [0, 3_600, -3_600];
/// Longer than a shutdown may take.
const STOPS_WITHIN: Duration = Duration::from_secs(40);

/// A process that runs or has run.
pub struct Past {
    pub slot: usize,
    pub pid: u32,
    pub journal: PathBuf,
    pub end: Option<(Micros, End)>,
}

pub struct Slot {
    pub proxy: FaultProxy,
    /// What its processes take for the time.
    #[cfg(target_os = "linux")]
    pub clock: Clock,
    running: Option<Running>,
}

struct Running {
    child: Child,
    input: ChildStdin,
    said: Arc<Mutex<Said>>,
    /// An index into the past.
    number: usize,
    stopping_since: Option<Instant>,
}

/// What a process has said last.
#[derive(Default)]
struct Said {
    ready: bool,
    handled: u64,
    /// Handlers left running and verdicts not stored; entries given back.
    stopped: Option<(u64, u64)>,
}

pub struct Processes {
    pub slots: Vec<Slot>,
    pub past: Vec<Past>,
    /// What processes that are gone have handled.
    handled: u64,
    dir: PathBuf,
    seed: u64,
    server_claims: bool,
    guard: Guard,
}

impl Processes {
    pub fn new(
        count: usize,
        server_port: u16,
        seed: u64,
        server_claims: bool,
        dir: &Path,
        guard: &Guard,
    ) -> Result<Processes, BoxError> {
        #[cfg(target_os = "linux")]
        let clockwork = Clockwork::build(dir)?;
        let slot = |_number: usize| {
            Ok::<_, BoxError>(Slot {
                proxy: FaultProxy::start(server_port),
                #[cfg(target_os = "linux")]
                clock: clockwork.clock(
                    &dir.join(format!("slot-{_number}.clock")),
                    CLOCKS_AT_FIRST[_number % CLOCKS_AT_FIRST.len()],
                )?,
                running: None,
            })
        };
        Ok(Processes {
            slots: (0..count).map(slot).collect::<Result<_, _>>()?,
            past: Vec::new(),
            handled: 0,
            dir: dir.to_owned(),
            seed,
            server_claims,
            guard: guard.clone(),
        })
    }

    pub fn start(&mut self, slot: usize) -> Result<(), BoxError> {
        if self.slots[slot].running.is_some() {
            return Ok(());
        }
        let number = self.past.len();
        let name = format!("process-{number:04}-slot-{slot}");
        let journal = self.dir.join(format!("{name}.journal"));
        let log = File::create(self.dir.join(format!("{name}.log")))?;
        let mut command = Command::new(std::env::current_exe()?);
        #[cfg(target_os = "linux")]
        self.slots[slot].clock.wind(&mut command);
        let mut child = command
            .arg("--supervisor")
            .arg(self.slots[slot].proxy.url())
            .arg(self.seed.to_string())
            .arg(slot.to_string())
            .arg(&journal)
            .arg(self.server_claims.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(log)
            .spawn()?;
        self.guard.watch(child.id());
        let (input, output) = (child.stdin.take(), child.stdout.take());
        let (Some(input), Some(output)) = (input, output) else {
            return Err("a process has no standard input or output".into());
        };
        let said = Arc::new(Mutex::new(Said::default()));
        thread::spawn({
            let said = Arc::clone(&said);
            move || listen(BufReader::new(output), &said)
        });
        self.past.push(Past {
            slot,
            pid: child.id(),
            journal,
            end: None,
        });
        self.slots[slot].running = Some(Running {
            child,
            input,
            said,
            number,
            stopping_since: None,
        });
        Ok(())
    }

    /// SIGKILL. What it wrote before stays written.
    pub fn kill(&mut self, slot: usize) {
        let Some(mut running) = self.slots[slot].running.take() else {
            return;
        };
        self.guard.forget(running.child.id());
        // Errors mean that it has ended by itself.
        let _ = running.child.kill();
        let _ = running.child.wait();
        self.gone(&running, End::Killed);
    }

    pub fn freeze(&self, slot: usize) {
        self.signal(slot, "STOP");
    }

    pub fn thaw(&self, slot: usize) {
        self.signal(slot, "CONT");
    }

    fn signal(&self, slot: usize, name: &str) {
        if let Some(running) = &self.slots[slot].running {
            signal(name, running.child.id());
        }
    }

    /// Tells a process to do something; one that is gone need not.
    pub fn tell(&mut self, slot: usize, order: &str) {
        if let Some(running) = &mut self.slots[slot].running {
            let _ = writeln!(running.input, "{order}");
        }
    }

    /// Tells a process to stop in order.
    pub fn stop(&mut self, slot: usize) {
        self.tell(slot, "stop");
        if let Some(running) = &mut self.slots[slot].running {
            running.stopping_since.get_or_insert_with(Instant::now);
        }
    }

    /// Notices the processes that have ended; returns the slots of those that nobody had told to, and
    /// how they ended.
    pub fn look(&mut self) -> Vec<(usize, End)> {
        let mut unexpected = Vec::new();
        for slot in 0..self.slots.len() {
            let Some(running) = &mut self.slots[slot].running else {
                continue;
            };
            let overdue = running
                .stopping_since
                .is_some_and(|since| since.elapsed() > STOPS_WITHIN);
            if overdue {
                // Counted as one that did not stop, since it has no end.
                eprintln!("soak: process {} does not stop", running.child.id());
                self.guard.forget(running.child.id());
                let _ = running.child.kill();
                let _ = running.child.wait();
                self.slots[slot].running = None;
                continue;
            }
            let Ok(Some(status)) = running.child.try_wait() else {
                continue;
            };
            let Some(running) = self.slots[slot].running.take() else {
                continue;
            };
            self.guard.forget(running.child.id());
            // What it said last may still be on its way.
            thread::sleep(Duration::from_millis(20));
            let stopped = lock(&running.said).stopped;
            let end = match (running.stopping_since, stopped) {
                (Some(_), Some((left, given_back))) if status.success() => {
                    End::Stopped { left, given_back }
                }
                // A kill like any other.
                _ if aborted(&self.past[running.number].journal) => End::Killed,
                _ => {
                    eprintln!("soak: process {} ended ({status})", running.child.id());
                    End::ByItself
                }
            };
            self.gone(&running, end);
            if !matches!(end, End::Stopped { .. }) {
                unexpected.push((slot, end));
            }
        }
        unexpected
    }

    fn gone(&mut self, running: &Running, end: End) {
        self.handled += lock(&running.said).handled;
        self.past[running.number].end = Some((now(), end));
    }

    pub fn runs(&self, slot: usize) -> bool {
        self.slots[slot].running.is_some()
    }

    pub fn is_ready(&self, slot: usize) -> bool {
        let running = self.slots[slot].running.as_ref();
        running.is_some_and(|running| lock(&running.said).ready)
    }

    /// How many runs have come to their end, as far as is known: processes tell twice a second.
    pub fn handled(&self) -> u64 {
        let running = self.slots.iter().filter_map(|slot| slot.running.as_ref());
        let handled: u64 = running.map(|running| lock(&running.said).handled).sum();
        self.handled + handled
    }
}

impl Drop for Processes {
    fn drop(&mut self) {
        for slot in 0..self.slots.len() {
            self.kill(slot);
        }
    }
}

/// Whether the last thing that a process did was what its handler was meant to do to it. (Others may have
/// written something while it was on its way.)
fn aborted(journal: &Path) -> bool {
    let journal = std::fs::read_to_string(journal).unwrap_or_default();
    let last = journal.lines().rev().take(100);
    last.into_iter().any(|line| line.ends_with(" abort"))
}

fn listen(output: impl BufRead, said: &Mutex<Said>) {
    for line in output.lines() {
        let Ok(line) = line else { return };
        let words: Vec<_> = line.split(' ').collect();
        let number = |text: &str| text.parse().unwrap_or(0);
        match words.as_slice() {
            ["ready"] => lock(said).ready = true,
            ["handled", handled] => lock(said).handled = number(handled),
            ["stopped", _settled, given_back, running, unsettled] => {
                let left = number(running) + number(unsettled);
                lock(said).stopped = Some((left, number(given_back)));
            }
            _ => {}
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
