//! Whether everything that was published came to a good end: arithmetic over what was found, no I/O.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;

use crate::journal::{Id, Micros, Started, Verdict};
use crate::producers::Published;

/// After a disturbance an entry that was taken over meanwhile may wait for a worker for so long.
const AFTERMATH: Micros = 15_000_000;
/// For so long a process may not know that another one has taken over what it has in hand: it has to connect
/// again and to ask, and so do all the others.
const UNAWARE: Micros = 4_000_000;

/// A group, as far as the accounting cares.
#[derive(Clone, Debug)]
pub struct GroupRules {
    pub name: String,
    pub stream: usize,
    pub ordered: bool,
    /// One call has several entries, which run at the same time whatever their order.
    pub batches: bool,
    pub crash_leaves_pending: bool,
    /// What was left behind comes in the read itself, which counts it as delivered.
    pub claiming: bool,
}

/// An entry that stands in a stream in the end.
#[derive(Clone, Debug)]
pub struct Entry {
    pub id: Id,
    pub number: u64,
    /// The group that asked for it; `None` for what a producer has published.
    pub copy_of: Option<String>,
}

/// An entry of a dead-letter stream.
#[derive(Clone, Debug)]
pub struct DeadLetter {
    pub group: String,
    pub number: u64,
    /// The entry that it is a copy of.
    pub origin: Id,
}

/// A group in the end, in the server's words.
#[derive(Clone, Debug, Default)]
pub struct Left {
    pub pending: u64,
    /// It has had the stream's last entry.
    pub has_had_all: bool,
    /// The consumers that there still are, with what they have pending.
    pub consumers: Vec<(String, u64)>,
}

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    Killed,
    /// As asked for, with so many handlers left running or verdicts not stored, and so many entries given
    /// back: those are pending in its consumers' names until somebody takes them.
    Stopped {
        left: u64,
        given_back: u64,
    },
    ByItself,
}

/// One process: a slot has one after the other.
#[derive(Clone, Debug)]
pub struct Process {
    pub slot: usize,
    pub pid: u32,
    pub end: Option<(Micros, End)>,
}

/// One call of a handler, for one entry.
#[derive(Clone, Debug)]
pub struct Run {
    /// An index into the processes.
    pub process: usize,
    pub group: usize,
    pub started: Started,
    pub at: Micros,
    pub end: Option<(Micros, Verdict)>,
}

/// What a disturbance does to a process that works on something.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reach {
    /// It works as usual, and should keep what it has.
    Bothers,
    /// It is out of touch for as long as this lasts.
    Severs,
}

/// A time during which a process, or all of them, could not work as usual.
#[derive(Clone, Debug)]
pub struct Disturbance {
    pub kind: &'static str,
    pub reach: Reach,
    /// `None`: the server, and with it everybody.
    pub slot: Option<usize>,
    pub from: Micros,
    pub to: Micros,
}

/// All there is to know of a run of the soak.
#[derive(Clone, Debug, Default)]
pub struct Evidence {
    /// How long a process may be out of touch before others take over what it has: `min_idle` less what
    /// may have passed since it last kept its entries fresh.
    pub loses_after: Micros,
    /// When everything had come to rest.
    pub at: Micros,
    /// When the server was started last: it does not remember for how long a consumer is gone.
    pub server_started: Micros,
    /// A consumer that is gone for so long, with nothing pending, is removed.
    pub forgotten_after: Micros,
    pub groups: Vec<GroupRules>,
    /// For each stream, what became of its numbers from 0.
    pub published: Vec<Vec<Published>>,
    /// The numbers of each stream that nobody can read.
    pub garbage: Vec<BTreeSet<u64>>,
    pub entries: Vec<Vec<Entry>>,
    /// For each stream.
    pub dead_letters: Vec<Vec<DeadLetter>>,
    /// Members of delay sets, and of sets of unreadable members: (set, how many).
    pub delayed: Vec<(String, u64)>,
    pub left: Vec<Left>,
    pub processes: Vec<Process>,
    pub runs: Vec<Run>,
    pub disturbances: Vec<Disturbance>,
}

/// Something that was promised and is not so.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    pub kind: &'static str,
    pub text: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.kind, self.text)
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Findings {
    pub violations: Vec<Violation>,
    /// Numbers that are in a stream.
    pub numbers: u64,
    pub runs: u64,
    pub copies: u64,
    pub dead_letters: u64,
    pub garbage: u64,
    /// Runs of an entry that had been started before, by what explains them.
    pub extra_runs: BTreeMap<String, u64>,
    /// Of these, those that began while the run before went on.
    pub at_the_same_time: u64,
    /// A line for each of them, for whoever wants to know more.
    pub extra_runs_told: Vec<String>,
}

impl Findings {
    fn violation(&mut self, kind: &'static str, text: String) {
        self.violations.push(Violation { kind, text });
    }
}

/// What is known of one number in one group.
#[derive(Default)]
struct Account<'a> {
    /// The original, and the copies that this group has asked for.
    entries: BTreeSet<Id>,
    dead: Vec<Id>,
    /// In the order in which they began.
    runs: BTreeMap<Id, Vec<&'a Run>>,
}

pub fn account(evidence: &Evidence) -> Findings {
    let mut findings = Findings {
        runs: evidence.runs.len() as u64,
        ..Findings::default()
    };
    for stream in 0..evidence.entries.len() {
        check_published(evidence, stream, &mut findings);
    }
    for group in 0..evidence.groups.len() {
        check_group(evidence, group, &mut findings);
        check_order(evidence, group, &mut findings);
    }
    check_leftovers(evidence, &mut findings);
    findings
}

fn show((ms, sequence): Id) -> String {
    format!("{ms}-{sequence}")
}

/// The stream has what its producer was told it has, once.
fn check_published(evidence: &Evidence, stream: usize, findings: &mut Findings) {
    let mut originals: HashMap<u64, Vec<Id>> = HashMap::new();
    let entries = &evidence.entries[stream];
    for entry in entries.iter().filter(|entry| entry.copy_of.is_none()) {
        originals.entry(entry.number).or_default().push(entry.id);
    }
    findings.numbers += originals.len() as u64;
    let published = &evidence.published[stream];
    for (number, published) in (0..).zip(published) {
        let found = originals.remove(&number).unwrap_or_default();
        let right = match published {
            Published::As(id) => found == [*id],
            Published::Refused => found.is_empty(),
            Published::Unknown => found.len() <= 1,
        };
        if !right {
            let text =
                format!("number {number} of stream {stream}: {published:?}, found {found:?}");
            findings.violation("the stream is not what was published", text);
        }
    }
    for (number, found) in originals {
        let text =
            format!("number {number} of stream {stream} was never published, found {found:?}");
        findings.violation("the stream is not what was published", text);
    }
}

/// Every number is handled, and copied as often as that was asked for.
fn check_group(evidence: &Evidence, group: usize, findings: &mut Findings) {
    let rules = &evidence.groups[group];
    let mut accounts: BTreeMap<u64, Account<'_>> = BTreeMap::new();
    for entry in &evidence.entries[rules.stream] {
        if entry.copy_of.as_ref().is_none_or(|of| *of == rules.name) {
            let account = accounts.entry(entry.number).or_default();
            account.entries.insert(entry.id);
        }
    }
    for dead in &evidence.dead_letters[rules.stream] {
        if dead.group == rules.name {
            accounts
                .entry(dead.number)
                .or_default()
                .dead
                .push(dead.origin);
        }
    }
    for run in evidence.runs.iter().filter(|run| run.group == group) {
        let account = accounts.entry(run.started.number).or_default();
        account.runs.entry(run.started.id).or_default().push(run);
    }
    for (number, mut account) in accounts {
        for runs in account.runs.values_mut() {
            runs.sort_by_key(|run| run.at);
        }
        let name = format!("number {number} of {}", rules.name);
        findings.copies += (account.entries.len() as u64).saturating_sub(1);
        findings.dead_letters += account.dead.len() as u64;
        if evidence.garbage[rules.stream].contains(&number) {
            findings.garbage += 1;
            check_garbage(&name, &account, findings);
        } else {
            check_number(rules, &name, &account, findings);
        }
        check_attempts(evidence, rules, &name, &account, findings);
        for (id, runs) in &account.runs {
            if !account.entries.contains(id) {
                let text = format!("{name}: {} is not an entry of that group", show(*id));
                findings.violation("handled what is not there", text);
            }
            check_runs(evidence, rules, &name, runs, findings);
        }
    }
}

/// What nobody can read is a dead letter, once, and no handler has seen it.
fn check_garbage(name: &str, account: &Account<'_>, findings: &mut Findings) {
    let entries: Vec<_> = account.entries.iter().copied().collect();
    if account.dead != entries || entries.len() > 1 {
        let text = format!(
            "{name}: dead letters of {:?}, not of {entries:?}",
            account.dead
        );
        findings.violation("unreadable, and not a dead letter once", text);
    }
    if !account.runs.is_empty() {
        let text = format!("{name} was given to a handler");
        findings.violation("unreadable, and handled", text);
    }
}

fn check_number(rules: &GroupRules, name: &str, account: &Account<'_>, findings: &mut Findings) {
    // An entry comes to its end once: it is acknowledged, or one copy takes its place. Where its runs said
    // both (the first was killed, or lost it to another), either is right.
    let (mut certain_copies, mut possible_copies) = (0, 0);
    for id in &account.entries {
        let runs = account.runs.get(id).map_or(&[][..], Vec::as_slice);
        let (mut acknowledged, mut copied) = (false, false);
        for run in runs {
            match run.end.map(|(_, verdict)| what_follows(rules, verdict)) {
                Some(Follows::Acknowledged) => acknowledged = true,
                Some(Follows::Copied) => copied = true,
                Some(Follows::Pending) | None => {}
            }
        }
        // Every start of it ended with its process, so often that it was given up.
        let given_up = !copied && !acknowledged && account.dead.contains(id);
        if runs.is_empty() {
            let text = format!("{name}: {} was never handled", show(*id));
            findings.violation("lost", text);
        } else if !acknowledged && !copied && !given_up {
            let text = format!("{name}: {} was started and came to no end", show(*id));
            findings.violation("lost", text);
        }
        certain_copies += usize::from(copied && !acknowledged || given_up);
        possible_copies += usize::from(copied || given_up);
    }
    for id in account
        .dead
        .iter()
        .filter(|id| !account.entries.contains(id))
    {
        let text = format!("{name}: {} is not an entry of that group", show(*id));
        findings.violation("a dead letter of what is not there", text);
    }
    let distinct: BTreeSet<_> = account.dead.iter().collect();
    if distinct.len() < account.dead.len() {
        let text = format!("{name}: dead letters of {:?}", account.dead);
        findings.violation("copied twice", text);
    }
    if account.entries.is_empty() {
        return;
    }
    let copies = account.entries.len() - 1 + account.dead.len();
    if copies < certain_copies {
        let text = format!("{name}: {certain_copies} copies were asked for and {copies} are there");
        findings.violation("lost", text);
    }
    if copies > possible_copies {
        let text =
            format!("{name}: {possible_copies} copies were asked for and {copies} are there");
        findings.violation("copied twice", text);
    }
}

/// No attempt was counted that was not made: or an entry would be given up before its time.
fn check_attempts(
    evidence: &Evidence,
    rules: &GroupRules,
    name: &str,
    account: &Account<'_>,
    findings: &mut Findings,
) {
    let Some((published_at_ms, _)) = account.entries.first() else {
        return;
    };
    let deaths: Vec<Micros> = evidence
        .processes
        .iter()
        .filter_map(|process| match process.end {
            Some((at, End::Killed | End::ByItself)) => Some(at),
            _ => None,
        })
        .filter(|at| *at >= published_at_ms * 1000)
        .collect();
    let mut made = 0;
    // Entries of a number come one after the other, so their runs do.
    for (entries, (id, runs)) in (1..).zip(&account.runs) {
        for run in runs {
            made += 1;
            // The server cannot tell what was fetched from what was started, so each entry may have one too
            // many. A process that died may have been about to start it.
            let deaths = deaths.iter().filter(|at| **at <= run.at).count() as u64;
            // What the server delivers to a connection that is dead already is counted by a claiming read.
            let unheard = evidence.disturbances.iter().filter(|it| {
                rules.claiming && it.from <= run.at && it.to >= published_at_ms * 1000
            });
            let most = made + entries + deaths + unheard.count() as u64;
            if run.started.attempt > most {
                let attempt = run.started.attempt;
                let text = format!(
                    "{name}: {} was told attempt {attempt} in run {made}",
                    show(*id)
                );
                findings.violation("attempts that were not made", text);
            }
        }
    }
}

enum Follows {
    Acknowledged,
    Copied,
    Pending,
}

fn what_follows(rules: &GroupRules, verdict: Verdict) -> Follows {
    match verdict {
        Verdict::Ack | Verdict::Reject => Follows::Acknowledged,
        Verdict::Panic | Verdict::Hang if rules.crash_leaves_pending => Follows::Pending,
        Verdict::LeavePending | Verdict::Abort => Follows::Pending,
        Verdict::Retry
        | Verdict::RetryAfter
        | Verdict::DeadLetter
        | Verdict::Error
        | Verdict::Panic
        | Verdict::Hang => Follows::Copied,
    }
}

/// Nobody started an entry again without a reason.
fn check_runs(
    evidence: &Evidence,
    rules: &GroupRules,
    name: &str,
    runs: &[&Run],
    findings: &mut Findings,
) {
    for run in runs {
        let process = &evidence.processes[run.process];
        let ended_meanwhile = matches!(
            process.end,
            Some((
                _,
                End::Killed | End::ByItself | End::Stopped { left: 1.., .. }
            ))
        );
        if run.end.is_none() && !ended_meanwhile {
            let text = format!(
                "{name}: {} in process {}",
                show(run.started.id),
                process.pid
            );
            findings.violation("a run without an end", text);
        }
    }
    for pair in runs.windows(2) {
        let (before, again) = (pair[0], pair[1]);
        let ended = before.end.map(|(at, _)| at);
        let process_ended = evidence.processes[before.process].end.map(|(at, _)| at);
        let at_once = ended.or(process_ended).is_none_or(|at| at > again.at);
        let verdict = before.end.map_or("none", |(_, verdict)| verdict.as_str());
        let pid = |run: &Run| evidence.processes[run.process].pid;
        let text = format!(
            "{name}: {} in process {} at {} (verdict: {verdict}), again in process {} at {} ({})",
            show(before.started.id),
            pid(before),
            before.at,
            pid(again),
            again.at,
            again.started.subscription,
        );
        match explanation(evidence, rules, before, again) {
            Some((why, false)) => findings.violation("an extra run", format!("{text}; {why}")),
            Some((why, true)) => {
                findings.extra_runs_told.push(format!("{why}: {text}"));
                *findings.extra_runs.entry(why).or_default() += 1;
                findings.at_the_same_time += u64::from(at_once);
            }
            None if at_once => findings.violation("two runs at the same time", text),
            None => findings.violation("an extra run", text),
        }
    }
}

/// What happened before an entry that had been started was started again, and whether that is a reason.
fn explanation(
    evidence: &Evidence,
    rules: &GroupRules,
    before: &Run,
    again: &Run,
) -> Option<(String, bool)> {
    if let Some((at, verdict)) = before.end
        && at <= again.at
        && matches!(what_follows(rules, verdict), Follows::Pending)
    {
        let aborted = verdict == Verdict::Abort;
        let why = match aborted {
            true => "its handler aborted the process",
            false => "left pending on purpose",
        };
        return Some((why.to_owned(), true));
    }
    let (process, other) = (
        &evidence.processes[before.process],
        &evidence.processes[again.process],
    );
    let ended_between = process
        .end
        .filter(|(at, _)| before.at <= *at && *at <= again.at);
    match ended_between {
        Some((_, End::Killed | End::ByItself)) => return Some(("process killed".to_owned(), true)),
        Some((_, End::Stopped { left: 1.., .. })) => {
            return Some(("process stopped before it was done".to_owned(), true));
        }
        _ => {}
    }
    let concerns = |it: &&Disturbance| {
        it.slot
            .is_none_or(|slot| slot == process.slot || slot == other.slot)
            && it.from <= again.at
            && it.to + UNAWARE >= before.at
            && it.to + AFTERMATH >= again.at
    };
    let is_long =
        |it: &Disturbance| it.reach == Reach::Severs && it.to - it.from >= evidence.loses_after;
    let concerning = evidence.disturbances.iter().filter(concerns);
    // The worst there was, and of those the last.
    let worst = concerning.max_by_key(|it| (is_long(it), it.reach, it.to))?;
    let how = match worst.reach {
        _ if is_long(worst) => "for longer than min_idle",
        Reach::Severs => "for less than min_idle",
        Reach::Bothers => "which should not matter",
    };
    Some((
        format!("{} {how}", worst.kind),
        worst.reach == Reach::Severs,
    ))
}

/// First deliveries of a key come in order and one after the other, in each subscription of a process.
fn check_order(evidence: &Evidence, group: usize, findings: &mut Findings) {
    let rules = &evidence.groups[group];
    if !rules.ordered {
        return;
    }
    let copies: BTreeSet<Id> = evidence.entries[rules.stream]
        .iter()
        .filter(|entry| entry.copy_of.is_some())
        .map(|entry| entry.id)
        .collect();
    let mut last: HashMap<(usize, &str, u64), &Run> = HashMap::new();
    let mut runs: Vec<_> = evidence
        .runs
        .iter()
        .filter(|run| run.group == group)
        .collect();
    // Stable: runs of a process come in the order in which it wrote them down.
    runs.sort_by_key(|run| run.at);
    for run in runs {
        let started = &run.started;
        if !started.fresh || copies.contains(&started.id) {
            continue;
        }
        let lane = (run.process, started.subscription.as_str(), started.key);
        let Some(before) = last.insert(lane, run) else {
            continue;
        };
        let text = format!(
            "{} of {}, process {}, key {}: {} at {} after {} at {}",
            started.subscription,
            rules.name,
            evidence.processes[run.process].pid,
            started.key,
            show(started.id),
            run.at,
            show(before.started.id),
            before.at,
        );
        if before.started.id > started.id {
            findings.violation("out of order", text);
        } else if !rules.batches && before.end.is_none_or(|(at, _)| at > run.at) {
            findings.violation("ordered, and at the same time", text);
        }
    }
}

/// Nothing is left to do, and nobody is left who would.
fn check_leftovers(evidence: &Evidence, findings: &mut Findings) {
    for (set, members) in &evidence.delayed {
        if *members > 0 {
            findings.violation("left over", format!("{members} entries in {set}"));
        }
    }
    for (rules, left) in evidence.groups.iter().zip(&evidence.left) {
        let name = &rules.name;
        if left.pending > 0 {
            let text = format!("{} entries of {name} are pending", left.pending);
            findings.violation("left over", text);
        }
        if !left.has_had_all {
            let text = format!("{name} has not had the whole stream");
            findings.violation("left over", text);
        }
        for (consumer, _) in &left.consumers {
            // Not removed by its own process, and not gone for so long that others would have done it.
            let may_be_left = evidence.processes.iter().any(|process| {
                let leaves_some = matches!(
                    process.end,
                    Some((at, End::Killed | End::Stopped { given_back: 1.., .. }))
                        if at.max(evidence.server_started) + evidence.forgotten_after >= evidence.at
                );
                leaves_some && consumer.contains(&format!("-{}-", process.pid))
            });
            if !may_be_left {
                let text = format!("the consumer {consumer} of {name}");
                findings.violation("left over", text);
            }
        }
    }
    for process in &evidence.processes {
        match process.end {
            Some((_, End::ByItself)) => {
                let text = format!("process {}", process.pid);
                findings.violation("a process ended by itself", text);
            }
            None => {
                let text = format!("process {}", process.pid);
                findings.violation("a process that did not stop", text);
            }
            Some((_, End::Killed | End::Stopped { .. })) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Micros = 1_000_000;
    const STOPPED: End = End::Stopped {
        left: 0,
        given_back: 0,
    };

    /// Two slots, one process each, and a number that was published, handled once and acknowledged.
    fn all_well() -> Evidence {
        let mut evidence = Evidence {
            loses_after: SECOND,
            forgotten_after: 60 * SECOND,
            groups: vec![GroupRules {
                name: "g".to_owned(),
                stream: 0,
                ordered: true,
                batches: false,
                crash_leaves_pending: false,
                claiming: false,
            }],
            published: vec![Vec::new()],
            garbage: vec![BTreeSet::new()],
            entries: vec![Vec::new()],
            dead_letters: vec![Vec::new()],
            delayed: vec![("s.delayed".to_owned(), 0)],
            left: vec![Left {
                has_had_all: true,
                ..Left::default()
            }],
            ..Evidence::default()
        };
        for slot in 0..2 {
            evidence.processes.push(Process {
                slot,
                pid: 100 + slot as u32,
                end: Some((100 * SECOND, STOPPED)),
            });
        }
        publish(&mut evidence, 1);
        run(&mut evidence, 0, 1, 10, Verdict::Ack);
        evidence
    }

    /// Entry `n-0` has number n-1.
    fn publish(evidence: &mut Evidence, id: u64) {
        assert_eq!(evidence.published[0].len() as u64, id - 1);
        evidence.published[0].push(Published::As((id, 0)));
        evidence.entries[0].push(Entry {
            id: (id, 0),
            number: id - 1,
            copy_of: None,
        });
    }

    fn copy(evidence: &mut Evidence, number: u64, id: u64) {
        evidence.entries[0].push(Entry {
            id: (id, 0),
            number,
            copy_of: Some("g".to_owned()),
        });
    }

    /// A run that takes a second.
    fn run(evidence: &mut Evidence, process: usize, id: u64, at: u64, verdict: Verdict) {
        let entry = evidence.entries[0].iter().find(|entry| entry.id.0 == id);
        let number = entry.map_or(99, |entry| entry.number);
        evidence.runs.push(Run {
            process,
            group: 0,
            started: Started {
                subscription: "g-tail".to_owned(),
                id: (id, 0),
                number,
                attempt: 1,
                delivery_count: 1,
                fresh: true,
                key: 0,
            },
            at: at * SECOND,
            end: Some(((at + 1) * SECOND, verdict)),
        });
    }

    fn disturb(evidence: &mut Evidence, slot: usize, from: u64, to: u64) {
        evidence.disturbances.push(Disturbance {
            kind: "frozen",
            reach: Reach::Severs,
            slot: Some(slot),
            from: from * SECOND,
            to: to * SECOND,
        });
    }

    #[track_caller]
    fn finds(evidence: &Evidence, kinds: &[&str]) -> Findings {
        let findings = account(evidence);
        let found: Vec<_> = findings.violations.iter().map(|it| it.kind).collect();
        assert_eq!(found, kinds, "{:?}", findings.violations);
        findings
    }

    #[test]
    fn what_is_handled_once_is_right() {
        let findings = finds(&all_well(), &[]);
        assert_eq!(
            (findings.numbers, findings.runs, findings.copies),
            (1, 1, 0)
        );
    }

    #[test]
    fn an_entry_that_nobody_handled_is_lost() {
        let mut evidence = all_well();
        publish(&mut evidence, 2);
        finds(&evidence, &["lost"]);
    }

    #[test]
    fn a_confirmed_number_that_is_not_in_the_stream_is_found() {
        let mut evidence = all_well();
        evidence.published[0].push(Published::As((2, 0)));
        finds(&evidence, &["the stream is not what was published"]);
        evidence.published[0][1] = Published::Unknown;
        finds(&evidence, &[]);
    }

    #[test]
    fn an_entry_whose_every_run_ended_with_its_process_is_lost() {
        let mut evidence = all_well();
        evidence.runs[0].end = None;
        evidence.processes[0].end = Some((11 * SECOND, End::Killed));
        finds(&evidence, &["lost"]);
        // Unless it was given up after so many deaths.
        evidence.dead_letters[0].push(DeadLetter {
            group: "g".to_owned(),
            number: 0,
            origin: (1, 0),
        });
        finds(&evidence, &[]);
    }

    #[test]
    fn a_retry_without_its_copy_is_lost_and_with_two_is_copied_twice() {
        let mut evidence = all_well();
        evidence.runs[0].end = Some((11 * SECOND, Verdict::Retry));
        finds(&evidence, &["lost"]);
        copy(&mut evidence, 0, 5);
        run(&mut evidence, 1, 5, 20, Verdict::Ack);
        finds(&evidence, &[]);
        copy(&mut evidence, 0, 6);
        run(&mut evidence, 1, 6, 21, Verdict::Ack);
        finds(&evidence, &["copied twice"]);
    }

    #[test]
    fn a_copy_that_nobody_asked_for_is_found_although_it_was_handled() {
        let mut evidence = all_well();
        copy(&mut evidence, 0, 5);
        run(&mut evidence, 1, 5, 20, Verdict::Ack);
        finds(&evidence, &["copied twice"]);
    }

    #[test]
    fn two_dead_letters_of_one_entry_are_found() {
        let mut evidence = all_well();
        evidence.runs[0].end = Some((11 * SECOND, Verdict::DeadLetter));
        let dead = DeadLetter {
            group: "g".to_owned(),
            number: 0,
            origin: (1, 0),
        };
        evidence.dead_letters[0].push(dead.clone());
        finds(&evidence, &[]);
        evidence.dead_letters[0].push(dead);
        finds(&evidence, &["copied twice", "copied twice"]);
    }

    #[test]
    fn another_groups_copy_is_nothing_to_this_one() {
        let mut evidence = all_well();
        copy(&mut evidence, 0, 5);
        evidence.entries[0][1].copy_of = Some("other".to_owned());
        finds(&evidence, &[]);
        run(&mut evidence, 0, 5, 20, Verdict::Ack);
        finds(&evidence, &["handled what is not there"]);
    }

    #[test]
    fn an_extra_run_needs_a_reason() {
        let mut evidence = all_well();
        run(&mut evidence, 1, 1, 20, Verdict::Ack);
        finds(&evidence, &["an extra run"]);

        let mut killed = evidence.clone();
        killed.processes[0].end = Some((15 * SECOND, End::Killed));
        let findings = finds(&killed, &[]);
        assert_eq!(findings.extra_runs["process killed"], 1);
        // Before the first run or after the second one it explains nothing.
        killed.processes[0].end = Some((25 * SECOND, End::Killed));
        finds(&killed, &["an extra run"]);

        let mut frozen = evidence.clone();
        disturb(&mut frozen, 0, 12, 19);
        let findings = finds(&frozen, &[]);
        assert_eq!(findings.extra_runs["frozen for longer than min_idle"], 1);

        evidence.runs[0].end = Some((11 * SECOND, Verdict::LeavePending));
        let findings = finds(&evidence, &[]);
        assert_eq!(findings.extra_runs["left pending on purpose"], 1);
    }

    #[test]
    fn what_happened_to_somebody_else_or_long_ago_explains_nothing() {
        let mut evidence = all_well();
        evidence.processes.push(Process {
            slot: 2,
            pid: 102,
            end: Some((100 * SECOND, STOPPED)),
        });
        run(&mut evidence, 1, 1, 40, Verdict::Ack);
        disturb(&mut evidence, 2, 12, 38);
        disturb(&mut evidence, 0, 1, 7);
        disturb(&mut evidence, 0, 12, 19);
        finds(&evidence, &["an extra run"]);
    }

    #[test]
    fn two_runs_at_the_same_time_need_more_than_a_later_kill() {
        let mut evidence = all_well();
        evidence.runs[0].end = None;
        evidence.processes[0].end = Some((50 * SECOND, End::Killed));
        run(&mut evidence, 1, 1, 20, Verdict::Ack);
        finds(&evidence, &["two runs at the same time"]);
        disturb(&mut evidence, 0, 11, 19);
        let findings = finds(&evidence, &[]);
        assert_eq!(findings.at_the_same_time, 1);
    }

    #[test]
    fn a_run_without_an_end_needs_the_death_of_its_process() {
        let mut evidence = all_well();
        run(&mut evidence, 0, 1, 5, Verdict::Ack);
        evidence.runs[1].end = None;
        disturb(&mut evidence, 0, 5, 9);
        finds(
            &evidence,
            &["a run without an end", "ordered, and at the same time"],
        );
    }

    #[test]
    fn first_deliveries_of_a_key_come_in_order_and_one_by_one() {
        let mut evidence = all_well();
        publish(&mut evidence, 2);
        publish(&mut evidence, 3);
        run(&mut evidence, 0, 3, 20, Verdict::Ack);
        run(&mut evidence, 0, 2, 30, Verdict::Ack);
        finds(&evidence, &["out of order"]);
        // Recovered entries may come at any time.
        evidence.runs[2].started.fresh = false;
        finds(&evidence, &[]);
        // So may those that another process had.
        evidence.runs[2].started.fresh = true;
        evidence.runs[2].process = 1;
        finds(&evidence, &[]);
        evidence.runs[2].process = 0;
        evidence.runs[2].started.key = 1;
        finds(&evidence, &[]);

        evidence.runs[1].at = 10 * SECOND + 1;
        finds(&evidence, &["ordered, and at the same time"]);
    }

    #[test]
    fn a_lost_reply_is_no_reason_to_start_an_entry_again() {
        let mut evidence = all_well();
        run(&mut evidence, 1, 1, 20, Verdict::Ack);
        disturb(&mut evidence, 0, 12, 19);
        evidence.disturbances[0].reach = Reach::Bothers;
        finds(&evidence, &["an extra run"]);
    }

    #[test]
    fn attempts_that_were_not_made_are_not_counted() {
        let mut evidence = all_well();
        evidence.runs[0].started.attempt = 2;
        finds(&evidence, &[]);
        evidence.runs[0].started.attempt = 3;
        finds(&evidence, &["attempts that were not made"]);
        let mut killed = evidence.clone();
        killed.processes[1].end = Some((5 * SECOND, End::Killed));
        finds(&killed, &[]);
        // A reply that nobody heard counts where the read claims.
        disturb(&mut evidence, 0, 0, 1);
        finds(&evidence, &["attempts that were not made"]);
        evidence.groups[0].claiming = true;
        finds(&evidence, &[]);
    }

    #[test]
    fn an_entry_that_aborts_every_process_is_given_up() {
        let mut evidence = all_well();
        for process in 0..2 {
            evidence.processes[process].end = Some((90 * SECOND, End::Killed));
        }
        evidence.runs[0].end = Some((11 * SECOND, Verdict::Abort));
        run(&mut evidence, 1, 1, 20, Verdict::Abort);
        finds(&evidence, &["lost"]);
        evidence.dead_letters[0].push(DeadLetter {
            group: "g".to_owned(),
            number: 0,
            origin: (1, 0),
        });
        let findings = finds(&evidence, &[]);
        assert_eq!(findings.extra_runs["its handler aborted the process"], 1);
    }

    #[test]
    fn nothing_is_left_over() {
        let mut evidence = all_well();
        evidence.left[0].pending = 1;
        evidence.left[0].has_had_all = false;
        evidence.left[0].consumers = vec![("host-101-x-g-tail".to_owned(), 0)];
        evidence.delayed[0].1 = 2;
        evidence.processes[0].end = Some((50 * SECOND, End::ByItself));
        finds(
            &evidence,
            &[
                "left over",
                "left over",
                "left over",
                "left over",
                "a process ended by itself",
            ],
        );
    }

    #[test]
    fn a_dead_process_leaves_its_consumers_for_a_while() {
        let mut evidence = all_well();
        evidence.at = 70 * SECOND;
        evidence.left[0].consumers = vec![("host-101-x-g-tail".to_owned(), 0)];
        evidence.processes[1].end = Some((50 * SECOND, STOPPED));
        finds(&evidence, &["left over"]);
        evidence.processes[1].end = Some((50 * SECOND, End::Killed));
        finds(&evidence, &[]);
        let given_back = 3;
        evidence.processes[1].end = Some((
            50 * SECOND,
            End::Stopped {
                left: 0,
                given_back,
            },
        ));
        finds(&evidence, &[]);
        evidence.at = 120 * SECOND;
        finds(&evidence, &["left over"]);
        evidence.server_started = 90 * SECOND;
        finds(&evidence, &[]);
    }

    #[test]
    fn what_nobody_can_read_is_a_dead_letter_and_no_handler_sees_it() {
        let mut evidence = all_well();
        publish(&mut evidence, 2);
        evidence.garbage[0].insert(1);
        finds(&evidence, &["unreadable, and not a dead letter once"]);
        evidence.dead_letters[0].push(DeadLetter {
            group: "g".to_owned(),
            number: 1,
            origin: (2, 0),
        });
        finds(&evidence, &[]);
        run(&mut evidence, 0, 2, 20, Verdict::Ack);
        finds(&evidence, &["unreadable, and handled"]);
        evidence.runs.pop();
        copy(&mut evidence, 1, 3);
        evidence.dead_letters[0].push(DeadLetter {
            group: "g".to_owned(),
            number: 1,
            origin: (3, 0),
        });
        finds(&evidence, &["unreadable, and not a dead letter once"]);
    }
}
