//! What a supervisor process writes down while it works: one line a record, each with a single write to
//! a file that is only appended to, so that a kill loses nothing that was written.

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;
use std::str::FromStr;
use std::sync::{LazyLock, Mutex, PoisonError};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// Microseconds since 1970, by this machine's clock, whatever a process is made to take for the time.
pub type Micros = u64;

/// An entry's id.
pub type Id = (u64, u64);

pub fn now() -> Micros {
    // A clock that is changed while a process runs does not show in what it measures.
    static BEGAN: LazyLock<(i128, Instant)> = LazyLock::new(|| {
        let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH);
        let micros = since_epoch.map_or(0, |elapsed| elapsed.as_micros() as i128);
        (micros - i128::from(own_error()) * 1_000_000, Instant::now())
    });
    let (began, at) = &*BEGAN;
    Micros::try_from(began + at.elapsed().as_micros() as i128).unwrap_or(Micros::MAX)
}

/// By how many seconds the clock of this process is ahead.
#[cfg(target_os = "linux")]
fn own_error() -> i64 {
    crate::clock::own_error()
}

#[cfg(not(target_os = "linux"))]
fn own_error() -> i64 {
    0
}

pub fn parse_id(text: &str) -> Option<Id> {
    let (ms, sequence) = text.split_once('-')?;
    Some((ms.parse().ok()?, sequence.parse().ok()?))
}

/// What came of a run, as the handler said it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    Ack,
    Reject,
    Retry,
    RetryAfter,
    DeadLetter,
    LeavePending,
    Error,
    Panic,
    Hang,
    Abort,
}

impl Verdict {
    const ALL: [(Verdict, &'static str); 10] = [
        (Verdict::Ack, "ack"),
        (Verdict::Reject, "reject"),
        (Verdict::Retry, "retry"),
        (Verdict::RetryAfter, "retry-after"),
        (Verdict::DeadLetter, "dead-letter"),
        (Verdict::LeavePending, "leave-pending"),
        (Verdict::Error, "error"),
        (Verdict::Panic, "panic"),
        (Verdict::Hang, "hang"),
        (Verdict::Abort, "abort"),
    ];

    pub fn as_str(self) -> &'static str {
        let found = Verdict::ALL.iter().find(|(verdict, _)| *verdict == self);
        found.map_or("?", |(_, name)| name)
    }
}

impl FromStr for Verdict {
    type Err = ();

    fn from_str(text: &str) -> Result<Verdict, ()> {
        let found = Verdict::ALL.iter().find(|(_, name)| *name == text);
        found.map(|(verdict, _)| *verdict).ok_or(())
    }
}

/// A handler was called with an entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Started {
    pub subscription: String,
    pub id: Id,
    pub number: u64,
    pub attempt: u64,
    pub delivery_count: u64,
    /// It came straight from the stream: nobody had it before.
    pub fresh: bool,
    pub key: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Record {
    Process {
        pid: u32,
    },
    Started(Started),
    Ended {
        subscription: String,
        id: Id,
        number: u64,
        verdict: Verdict,
    },
    /// The process was not given a processor for this long, up to now.
    Stalled {
        micros: u64,
    },
    /// Another consumer took the entry over.
    OwnershipLost {
        subscription: String,
        id: String,
    },
    /// Anything else worth knowing when a run is looked into.
    Note(String),
}

impl Record {
    fn line(&self, at: Micros, monotonic: u128) -> String {
        let what = match self {
            Record::Process { pid } => format!("process {pid}"),
            Record::Started(started) => {
                let Started {
                    subscription,
                    id: (ms, sequence),
                    number,
                    attempt,
                    delivery_count,
                    fresh,
                    key,
                } = started;
                let fresh = u8::from(*fresh);
                format!(
                    "start {subscription} {ms}-{sequence} {number} {attempt} {delivery_count} {fresh} {key}"
                )
            }
            Record::Ended {
                subscription,
                id: (ms, sequence),
                number,
                verdict,
            } => format!(
                "end {subscription} {ms}-{sequence} {number} {}",
                verdict.as_str()
            ),
            Record::Stalled { micros } => format!("stalled {micros}"),
            Record::OwnershipLost { subscription, id } => format!("lost {subscription} {id}"),
            Record::Note(note) => format!("note {}", note.replace('\n', " ")),
        };
        format!("{at} {monotonic} {what}\n")
    }

    /// Reads a line back; `None` for one that makes no sense, or was not written to its end.
    pub fn parse(line: &str) -> Option<(Micros, Record)> {
        let mut words = line.splitn(4, ' ');
        let at = words.next()?.parse().ok()?;
        let _monotonic: u64 = words.next()?.parse().ok()?;
        let (what, rest) = (words.next()?, words.next()?);
        let words: Vec<_> = rest.split(' ').collect();
        let record = match (what, words.as_slice()) {
            ("process", [pid]) => Record::Process {
                pid: pid.parse().ok()?,
            },
            ("start", [subscription, id, number, attempt, count, fresh, key]) => {
                Record::Started(Started {
                    subscription: (*subscription).to_owned(),
                    id: parse_id(id)?,
                    number: number.parse().ok()?,
                    attempt: attempt.parse().ok()?,
                    delivery_count: count.parse().ok()?,
                    fresh: *fresh == "1",
                    key: key.parse().ok()?,
                })
            }
            ("end", [subscription, id, number, verdict]) => Record::Ended {
                subscription: (*subscription).to_owned(),
                id: parse_id(id)?,
                number: number.parse().ok()?,
                verdict: verdict.parse().ok()?,
            },
            ("stalled", [micros]) => Record::Stalled {
                micros: micros.parse().ok()?,
            },
            ("lost", [subscription, id]) => Record::OwnershipLost {
                subscription: (*subscription).to_owned(),
                id: (*id).to_owned(),
            },
            ("note", _) => Record::Note(rest.to_owned()),
            _ => return None,
        };
        Some((at, record))
    }
}

/// The file of one process.
pub struct Journal {
    file: Mutex<File>,
    began: Instant,
}

impl Journal {
    pub fn append_to(path: &Path) -> io::Result<Journal> {
        let file = File::options().create(true).append(true).open(path)?;
        Ok(Journal {
            file: Mutex::new(file),
            began: Instant::now(),
        })
    }

    /// Writes a record with the time of now. Under the lock, so that lines are in the order of their
    /// times.
    pub fn write(&self, record: &Record) {
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        let line = record.line(now(), self.began.elapsed().as_micros());
        if let Err(error) = file.write_all(line.as_bytes()) {
            // What it does from here on could not be accounted for.
            eprintln!("cannot write the journal: {error}");
            std::process::abort();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_read_back_as_it_was_written() {
        let records = [
            Record::Process { pid: 7 },
            Record::Started(Started {
                subscription: "functions-tail".to_owned(),
                id: (5, 1),
                number: 42,
                attempt: 2,
                delivery_count: 1,
                fresh: true,
                key: 3,
            }),
            Record::Ended {
                subscription: "functions-tail".to_owned(),
                id: (5, 1),
                number: 42,
                verdict: Verdict::RetryAfter,
            },
            Record::Stalled { micros: 900_000 },
            Record::Note("two words".to_owned()),
        ];
        for record in records {
            let line = record.line(17, 3);
            assert_eq!(Record::parse(line.trim_end()), Some((17, record)));
        }
        assert_eq!(Record::parse("17 3 end functions-tail 5-1 42 ac"), None);
    }
}
