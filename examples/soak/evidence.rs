//! Gathers what a run has left behind: on the server, in the journals, in the driver's memory.

use std::collections::{BTreeSet, HashMap};
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::time::Duration;

use streamvisor::BoxError;

use crate::accounting::{
    DeadLetter, Disturbance, Entry, Evidence, GroupRules, Left, Process, Reach, Run,
};
use crate::journal::{Id, Micros, Record, now, parse_id};
use crate::plan::{CONSUMER_TTL, GROUPS, Handling, MIN_IDLE, STREAMS, group_of, is_garbage};
use crate::processes::Past;
use crate::producers::Published;
use crate::resp::{Client, Reply};

/// A process that is not run for so long may lose what it has in hand; the keep-alive comes a third of
/// `MIN_IDLE` apart, and a busy machine needs a moment for everything.
const MARGIN: Duration = Duration::from_millis(300);

pub fn gather(
    client: &mut Client,
    seed: u64,
    published: Vec<Vec<Published>>,
    past: &[Past],
    disturbances: Vec<Disturbance>,
    server_started: Micros,
) -> Result<Evidence, BoxError> {
    let loses_after = MIN_IDLE - MIN_IDLE / 3 - MARGIN;
    let mut evidence = Evidence {
        loses_after: Micros::try_from(loses_after.as_micros())?,
        at: now(),
        server_started,
        // They are looked for that often too.
        forgotten_after: Micros::try_from((CONSUMER_TTL * 3).as_micros())?,
        disturbances,
        ..Evidence::default()
    };
    for group in &GROUPS {
        evidence.groups.push(GroupRules {
            name: group.name.to_owned(),
            stream: group.stream,
            ordered: group.ordered,
            batches: group.handling == Handling::Batch,
            crash_leaves_pending: group.crash_leaves_pending,
            claiming: group.claiming,
        });
        evidence
            .left
            .push(left(client, group.stream(), group.name)?);
        if let Some(set) = group.delayed {
            for set in [set.to_owned(), format!("{set}:unreadable")] {
                let members = count(client, &["ZCARD", &set])?;
                evidence.delayed.push((set, members));
            }
        }
    }
    for (stream, published) in STREAMS.iter().zip(published) {
        let numbers = 0..published.len() as u64;
        let garbage: BTreeSet<u64> = numbers.filter(|it| is_garbage(seed, *it)).collect();
        evidence.garbage.push(garbage);
        evidence.published.push(published);
        let entries = entries(client, stream)?.into_iter().map(|(id, fields)| {
            Ok(Entry {
                id,
                number: number(&fields)?,
                copy_of: fields.get("h:retry-group").cloned(),
            })
        });
        evidence
            .entries
            .push(entries.collect::<Result<_, BoxError>>()?);
        let dead = entries_of_dead(client, stream)?;
        evidence.dead_letters.push(dead);
    }
    for (process, past) in past.iter().enumerate() {
        evidence.processes.push(Process {
            slot: past.slot,
            pid: past.pid,
            end: past.end,
        });
        read_journal(process, past, &mut evidence)?;
    }
    Ok(evidence)
}

/// How a group stands.
pub fn left(client: &mut Client, stream: &str, group: &str) -> Result<Left, BoxError> {
    let info = ask(client, &["XINFO", "STREAM", stream])?;
    let last = field(&info, "last-generated-id").map(text);
    let groups = ask(client, &["XINFO", "GROUPS", stream])?;
    let found = items(&groups)
        .iter()
        .find(|it| field(it, "name").map(text).as_deref() == Some(group))
        .ok_or_else(|| format!("{stream} has no group {group}"))?;
    let consumers = ask(client, &["XINFO", "CONSUMERS", stream, group])?;
    Ok(Left {
        pending: field(found, "pending").map_or(0, integer),
        has_had_all: field(found, "last-delivered-id").map(text) == last,
        consumers: items(&consumers)
            .iter()
            .map(|it| {
                (
                    field(it, "name").map(text).unwrap_or_default(),
                    field(it, "pending").map_or(0, integer),
                )
            })
            .collect(),
    })
}

pub fn count(client: &mut Client, command: &[&str]) -> Result<u64, BoxError> {
    match ask(client, command) {
        Ok(reply) => Ok(integer(&reply)),
        // The set of unreadable members is no set of its own.
        Err(error) => Err(error),
    }
}

pub fn ask(client: &mut Client, command: &[&str]) -> Result<Reply, BoxError> {
    match client.command(command)? {
        Reply::Error(error) => Err(format!("{command:?}: {error}").into()),
        reply => Ok(reply),
    }
}

fn entries_of_dead(client: &mut Client, stream: &str) -> Result<Vec<DeadLetter>, BoxError> {
    let dead = entries(client, &format!("{stream}.dead"))?;
    let dead = dead.into_iter().map(|(_, fields)| {
        let of = |name: &str| {
            fields
                .get(name)
                .ok_or(format!("a dead letter without {name}"))
        };
        Ok(DeadLetter {
            group: of("h:dead-group")?.clone(),
            number: number(&fields)?,
            origin: parse_id(of("h:dead-entry-id")?).ok_or("a dead letter of no id")?,
        })
    });
    dead.collect()
}

fn number(fields: &HashMap<String, String>) -> Result<u64, BoxError> {
    let number = fields.get("h:number").ok_or("an entry without a number")?;
    Ok(number.parse()?)
}

type Fields = HashMap<String, String>;

fn entries(client: &mut Client, stream: &str) -> Result<Vec<(Id, Fields)>, BoxError> {
    let mut all = Vec::new();
    let mut from = "-".to_owned();
    loop {
        let page = ask(client, &["XRANGE", stream, &from, "+", "COUNT", "1000"])?;
        for entry in items(&page) {
            let [id, fields] = items(entry) else {
                return Err("an entry is an id and fields".into());
            };
            let id = parse_id(&text(id)).ok_or("an entry has an id")?;
            let pairs = items(fields).chunks_exact(2);
            all.push((id, pairs.map(|it| (text(&it[0]), text(&it[1]))).collect()));
        }
        match (all.last(), items(&page).len()) {
            (Some(((ms, sequence), _)), 1..) => from = format!("({ms}-{sequence}"),
            _ => return Ok(all),
        }
    }
}

fn items(reply: &Reply) -> &[Reply] {
    match reply {
        Reply::Array(items) => items,
        _ => &[],
    }
}

fn text(reply: &Reply) -> String {
    match reply {
        Reply::Bytes(bytes) => String::from_utf8_lossy(bytes).into_owned(),
        Reply::Status(text) => text.clone(),
        Reply::Int(number) => number.to_string(),
        _ => String::new(),
    }
}

fn integer(reply: &Reply) -> u64 {
    text(reply).parse().unwrap_or(0)
}

/// A value of a reply that lists names and values.
fn field<'a>(reply: &'a Reply, name: &str) -> Option<&'a Reply> {
    let pairs = items(reply).chunks_exact(2);
    let mut found = pairs.filter(|pair| text(&pair[0]) == name);
    found.next().map(|pair| &pair[1])
}

fn read_journal(process: usize, past: &Past, evidence: &mut Evidence) -> Result<(), BoxError> {
    let lines = match File::open(&past.journal) {
        Ok(file) => BufReader::new(file).lines(),
        // It was killed before it had begun.
        Err(_) => return Ok(()),
    };
    // Runs that have no end yet, by what they are a run of.
    let mut open: HashMap<(String, Id), usize> = HashMap::new();
    for line in lines {
        let line = line?;
        let Some((at, record)) = Record::parse(&line) else {
            return Err(format!("{}: what is {line:?}?", past.journal.display()).into());
        };
        match record {
            Record::Started(started) => {
                let group = group_of(&started.subscription).ok_or("no such group")?;
                let of = (started.subscription.clone(), started.id);
                open.insert(of, evidence.runs.len());
                evidence.runs.push(Run {
                    process,
                    group,
                    started,
                    at,
                    end: None,
                });
            }
            Record::Ended {
                subscription,
                id,
                verdict,
                ..
            } => {
                let run = open
                    .remove(&(subscription, id))
                    .ok_or_else(|| format!("{}: {line}: no start", past.journal.display()))?;
                evidence.runs[run].end = Some((at, verdict));
            }
            Record::Stalled { micros } => evidence.disturbances.push(Disturbance {
                kind: "process not run by the machine",
                reach: Reach::Severs,
                slot: Some(past.slot),
                from: at.saturating_sub(micros),
                to: at,
            }),
            Record::Process { .. } | Record::OwnershipLost { .. } | Record::Note(_) => {}
        }
    }
    Ok(())
}

/// The longest time from the end of a fault until work went on where it had hit: (microseconds, kind).
/// Faults that another one joined before that are left out.
pub fn slowest_recovery(
    evidence: &Evidence,
    faults: &[(&'static str, Option<usize>, Micros, Micros)],
) -> Option<(Micros, &'static str)> {
    let mut starts: Vec<(Micros, usize)> = evidence
        .runs
        .iter()
        .map(|run| (run.at, evidence.processes[run.process].slot))
        .collect();
    starts.sort_unstable();
    let recovery = |(kind, slot, _, to): &(&'static str, Option<usize>, Micros, Micros)| {
        let first = starts.partition_point(|(at, _)| at <= to);
        let concerns = |of: usize| slot.is_none_or(|slot| slot == of);
        let (at, _) = starts[first..].iter().find(|(_, of)| concerns(*of))?;
        let joined = faults.iter().any(|(_, other, from, until)| {
            let same = slot.is_none() || other.is_none() || slot == other;
            same && until > to && from < at
        });
        (!joined).then_some((at - to, *kind))
    };
    faults.iter().filter_map(recovery).max()
}

/// Whether nothing is left to do: for each group what is pending or not had yet, and what is delayed.
pub fn is_at_rest(client: &mut Client) -> Result<bool, BoxError> {
    for group in &GROUPS {
        let left = left(client, group.stream(), group.name)?;
        if left.pending > 0 || !left.has_had_all {
            return Ok(false);
        }
        if let Some(set) = group.delayed
            && count(client, &["ZCARD", set])? > 0
        {
            return Ok(false);
        }
    }
    Ok(true)
}

/// How many entries are pending in all groups.
pub fn pending(client: &mut Client) -> Result<u64, BoxError> {
    let mut pending = 0;
    for group in &GROUPS {
        let summary = ask(client, &["XPENDING", group.stream(), group.name])?;
        pending += items(&summary).first().map_or(0, integer);
    }
    Ok(pending)
}

/// Where the journals of a run are, for whoever looks into it.
pub fn journals_of(dir: &Path, id: &str) -> String {
    format!("grep -h -- {id} {}/*.journal", dir.display())
}
