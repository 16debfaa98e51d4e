//! What is looked at all the while a test runs.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use streamvisor::EntryId;

use super::record::{GROUP, SOON};
use super::resp::Reply;
use super::server::Server;
use super::wait::eventually_some;

/// Looks at something again and again, on a thread of its own, and keeps the most it saw.
pub struct Most {
    stop: Arc<AtomicBool>,
    most: Arc<AtomicI64>,
    thread: Option<JoinHandle<()>>,
}

impl Most {
    pub fn of(mut look: impl FnMut() -> i64 + Send + 'static) -> Most {
        let (stop, most) = (
            Arc::new(AtomicBool::new(false)),
            Arc::new(AtomicI64::new(0)),
        );
        let (stopped, kept) = (Arc::clone(&stop), Arc::clone(&most));
        let thread = std::thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                kept.fetch_max(look(), Ordering::Relaxed);
            }
        });
        Most {
            stop,
            most,
            thread: Some(thread),
        }
    }

    /// How many entries of the group are pending, for this consumer or for anybody.
    #[track_caller]
    pub fn pending(server: &Server, stream: &str, consumer: Option<&'static str>) -> Most {
        let (mut client, stream) = (server.connect(), stream.to_owned());
        Most::of(move || {
            let reply = client.command(&["XPENDING", &stream, GROUP]).unwrap();
            let Reply::Array(summary) = reply else {
                return 0; // there is no group yet
            };
            let Some(consumer) = consumer else {
                return summary[0].as_int();
            };
            let Reply::Array(consumers) = &summary[3] else {
                return 0;
            };
            let of = |entry: &&Reply| entry.as_array()[0].as_str() == consumer;
            let entry = consumers.iter().find(of);
            entry.map_or(0, |entry| entry.as_array()[1].as_int())
        })
    }

    pub fn seen(mut self) -> i64 {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take().unwrap().join().unwrap();
        self.most.load(Ordering::Relaxed)
    }
}

/// From where readers look through the pending list of a stream, as the server sees it.
#[derive(Clone)]
pub struct LookedFrom(Arc<Mutex<Vec<EntryId>>>);

impl LookedFrom {
    pub fn watch(server: &Server, stream: &str) -> LookedFrom {
        let looked = LookedFrom(Arc::default());
        let (all, pages) = (Arc::clone(&looked.0), format!("\"XPENDING\" \"{stream}\""));
        let mut monitor = server.connect();
        assert_eq!(monitor.command(&["MONITOR"]).unwrap().as_str(), "OK");
        std::thread::spawn(move || {
            // Until the server ends.
            while let Ok(line) = monitor.receive() {
                let line = line.as_str();
                if !line.contains(&pages) || !line.contains(" lua]") {
                    continue;
                }
                let words: Vec<&str> = line.split('"').filter(|word| *word != " ").collect();
                // The first page of a step: "XPENDING" stream group first "+" size.
                if words.get(5) != Some(&"+") {
                    continue;
                }
                let Some(from) = words.get(4).filter(|from| !from.starts_with('(')) else {
                    continue;
                };
                all.lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .push(from.parse().unwrap());
            }
        });
        looked
    }

    fn all(&self) -> Vec<EntryId> {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// How many passes over the list have begun.
    pub fn passes(&self) -> usize {
        let begins = |from: &&EntryId| **from == EntryId::new(0, 1);
        self.all().iter().filter(begins).count()
    }

    pub async fn until_beyond(&self, id: EntryId) -> Vec<EntryId> {
        eventually_some(SOON, "the last page", || {
            let looked = self.all();
            looked.iter().any(|from| *from > id).then_some(looked)
        })
        .await
    }

    pub async fn until_the_second_pass(&self) -> Vec<EntryId> {
        eventually_some(SOON, "a second pass", || {
            let looked = self.all();
            (self.passes() >= 2).then_some(looked)
        })
        .await
    }
}

/// What is logged on this thread, as text: for tests that run on one thread only.
#[derive(Clone, Default)]
pub struct Logged(Arc<Mutex<Vec<u8>>>);

impl Logged {
    /// Collects everything down to INFO until the guard is dropped.
    pub fn collect() -> (Logged, impl Drop) {
        use tracing_subscriber::util::SubscriberInitExt;
        let logged = Logged::default();
        let to = logged.clone();
        let collecting = tracing_subscriber::fmt()
            .with_ansi(false)
            .with_writer(move || to.clone())
            .set_default();
        (logged, collecting)
    }

    /// The lines that hold all of these words.
    pub fn lines(&self, words: &[&str]) -> Vec<String> {
        let bytes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let text = String::from_utf8_lossy(&bytes);
        let lines = text.lines();
        lines
            .filter(|line| words.iter().all(|word| line.contains(word)))
            .map(str::to_owned)
            .collect()
    }
}

impl io::Write for Logged {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
