//! Producers: they number what they publish, and remember what the server said to each number.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::journal::{Id, parse_id};
use crate::plan::{STREAMS, is_garbage, key};
use crate::resp::{Client, Reply};

/// What became of publishing a number. No number is published twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Published {
    As(Id),
    /// It is certain not to be there.
    Refused,
    /// The connection or the server went before the answer came: it may be there or not.
    Unknown,
}

/// A thread for each stream.
pub struct Producers {
    stop: Arc<AtomicBool>,
    confirmed: Arc<AtomicU64>,
    threads: Vec<JoinHandle<Vec<Published>>>,
}

const TICK: Duration = Duration::from_millis(20);

impl Producers {
    /// `rate` is that of each stream, in entries a second.
    pub fn start(port: u16, seed: u64, rate: u64) -> Producers {
        let stop = Arc::new(AtomicBool::new(false));
        let confirmed = Arc::new(AtomicU64::new(0));
        let threads = (0..STREAMS.len())
            .map(|stream| {
                let (stop, confirmed) = (Arc::clone(&stop), Arc::clone(&confirmed));
                thread::spawn(move || publish(stream, port, seed, rate, &stop, &confirmed))
            })
            .collect();
        Producers {
            stop,
            confirmed,
            threads,
        }
    }

    /// How many entries the server has confirmed.
    pub fn confirmed(&self) -> u64 {
        self.confirmed.load(Ordering::Relaxed)
    }

    /// Ends them; returns for each stream what became of the numbers from 0.
    pub fn stop(self) -> Vec<Vec<Published>> {
        self.stop.store(true, Ordering::Relaxed);
        let join = |thread: JoinHandle<_>| thread.join().expect("a producer should not panic");
        self.threads.into_iter().map(join).collect()
    }
}

fn publish(
    stream: usize,
    port: u16,
    seed: u64,
    rate: u64,
    stop: &AtomicBool,
    confirmed: &AtomicU64,
) -> Vec<Published> {
    let mut published = Vec::new();
    let mut client = None;
    let began = Instant::now();
    let mut due = 0;
    while !stop.load(Ordering::Relaxed) {
        thread::sleep(TICK);
        let elapsed = u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX);
        let by_now = elapsed * rate / 1000;
        // What a dead server held up is not caught up with all at once.
        due = due.max(by_now.saturating_sub(rate));
        let portion = (by_now - due).min(50);
        due += portion;
        let Some(connected) = client.take().or_else(|| Client::connect(port, None).ok()) else {
            continue;
        };
        client = publish_some(connected, stream, seed, portion, &mut published, confirmed);
    }
    published
}

/// Publishes the next numbers; returns the connection if it still works.
fn publish_some(
    mut client: Client,
    stream: usize,
    seed: u64,
    portion: u64,
    published: &mut Vec<Published>,
    confirmed: &AtomicU64,
) -> Option<Client> {
    let first = published.len() as u64;
    for number in first..first + portion {
        let sent = client.send(&request(stream, seed, number));
        if sent.is_err() {
            // Even of this one the server may have got everything.
            published.resize(
                published.len() + (number + 1 - first) as usize,
                Published::Unknown,
            );
            return None;
        }
    }
    let mut replies = Vec::new();
    for _ in 0..portion {
        match client.receive() {
            Ok(reply) => replies.push(Some(reply)),
            Err(_) => replies.resize(portion as usize, None),
        }
        if replies.len() == portion as usize {
            break;
        }
    }
    let broken = replies.iter().any(Option::is_none);
    for reply in replies {
        match reply {
            Some(Reply::Bytes(id)) => {
                let id = parse_id(&String::from_utf8_lossy(&id));
                published.push(Published::As(id.expect("XADD should answer with an id")));
                confirmed.fetch_add(1, Ordering::Relaxed);
            }
            // Out of memory, or loading its data.
            Some(_) => published.push(Published::Refused),
            None => published.push(Published::Unknown),
        }
    }
    (!broken).then_some(client)
}

fn request(stream: usize, seed: u64, number: u64) -> Vec<String> {
    let body = match is_garbage(seed, number) {
        true => format!("{{\"number\": {number}"),
        false => format!("{{\"number\": {number}}}"),
    };
    [
        "XADD",
        STREAMS[stream],
        "*",
        "_payload",
        &body,
        "h:number",
        &number.to_string(),
        "h:key",
        &key(seed, number).to_string(),
    ]
    .map(str::to_owned)
    .to_vec()
}
