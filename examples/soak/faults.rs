//! The faults: which ones, to whom, when and for how long follows from the seed. (What they hit does not:
//! that is a matter of microseconds.)

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use streamvisor::BoxError;

use crate::accounting::{Disturbance, Reach};
use crate::journal::{Micros, now};
use crate::plan::{GROUPS, STREAMS};
use crate::processes::Processes;
use crate::proxy::Fault as Loss;
use crate::resp::Client;
use crate::server::Server;

/// A fault that was made.
#[derive(Clone, Debug)]
pub struct Fault {
    pub kind: &'static str,
    /// `None`: the server.
    pub slot: Option<usize>,
    pub from: Micros,
    /// `None` while it lasts.
    pub to: Option<Micros>,
    /// `None` for what disturbs nobody, and for what ends a process: that is known otherwise.
    pub reach: Option<Reach>,
}

/// What ends a fault.
#[derive(Clone, Debug)]
enum Undo {
    StartProcess(usize),
    Thaw(usize),
    Accept(usize),
    Undelay(usize),
    Release(usize),
    Tell(usize, String),
    StartServer,
    ThawServer,
    FreeMemory,
    /// It ends by itself.
    Nothing,
}

struct Lasting {
    until: Instant,
    undo: Undo,
    /// An index into the faults.
    fault: usize,
}

pub struct Injector {
    random: StdRng,
    next: Instant,
    lasting: Vec<Lasting>,
    /// Replies and requests that are to be lost: the fault, and whether it has come.
    losses: Vec<(usize, Loss)>,
    /// Slots with a process that was told to stop, and is then started again.
    restarting: Vec<(usize, usize)>,
    pub faults: Vec<Fault>,
    log: File,
    server_claims: bool,
}

/// The system under test.
pub struct System<'a> {
    pub server: &'a mut Server,
    pub processes: &'a mut Processes,
}

/// Each with how often it is chosen, compared with the others.
const KINDS: [(&str, u32); 25] = [
    ("process killed", 8),
    ("process frozen", 7),
    ("process restarted in order", 5),
    ("connections cut", 6),
    ("connections refused", 3),
    ("replies delayed", 4),
    ("replies held", 3),
    ("black hole", 3),
    ("half-open connections", 2),
    ("reply lost", 10),
    ("request lost", 4),
    ("half a reply lost", 4),
    ("subscription paused", 4),
    ("workers changed", 4),
    ("max_in_flight changed", 2),
    ("actor panicked", 10),
    ("server killed", 4),
    ("server frozen", 4),
    ("scripts flushed", 3),
    ("a client killed by the server", 5),
    ("all clients killed by the server", 2),
    ("memory full", 4),
    ("writes paused by the server", 2),
    ("clock changed", 3),
    ("nothing", 1),
];

/// Where an actor is made to panic: at each point the entry that was in its hands must be neither lost
/// nor handled again. (At those points of a worker that are next to the handler's call, the entry has
/// crashed without the handler's having written that down: they are the tests' business.)
#[cfg(feature = "fail_points")]
const POINTS: [&str; 24] = [
    "reader.before_read",
    "reader.reply",
    "reader.handed_over",
    "reader.registered",
    "reader.pending_listed",
    "reader.pending_taken",
    "reader.recovered",
    "reader.given_back_taken",
    "reclaim.before",
    "reclaim.reply",
    "reclaim.handed_over",
    "reclaim.moved",
    "handler.start",
    "handler.between",
    "settler.acks",
    "settler.copies",
    "settler.due",
    "settler.starts",
    "settler.sent",
    "settler.answered",
    "settler.confirmed",
    "sweeper.before",
    "sweeper.swept",
    "keep_alive.before",
];

impl Injector {
    pub fn new(seed: u64, server_claims: bool, log: &Path) -> Result<Injector, BoxError> {
        Ok(Injector {
            random: StdRng::seed_from_u64(seed),
            // Everybody is at work by then.
            next: Instant::now() + Duration::from_secs(2),
            lasting: Vec::new(),
            losses: Vec::new(),
            restarting: Vec::new(),
            faults: Vec::new(),
            log: File::create(log)?,
            server_claims,
        })
    }

    /// How many faults of each kind there were.
    pub fn by_kind(&self) -> BTreeMap<&'static str, u64> {
        let mut kinds = BTreeMap::new();
        for fault in &self.faults {
            *kinds.entry(fault.kind).or_default() += 1;
        }
        kinds
    }

    pub fn disturbances(&self) -> impl Iterator<Item = Disturbance> {
        self.faults.iter().filter_map(|fault| {
            Some(Disturbance {
                kind: fault.kind,
                reach: fault.reach?,
                slot: fault.slot,
                from: fault.from,
                to: fault.to.unwrap_or_else(now),
            })
        })
    }

    /// When the server was started for the last time, if it was killed.
    pub fn server_started(&self) -> Micros {
        let kills = self
            .faults
            .iter()
            .filter(|fault| fault.kind == "server killed");
        kills.filter_map(|fault| fault.to).max().unwrap_or_default()
    }

    /// Whether the server can be asked something now.
    pub fn server_answers(&self) -> bool {
        !self
            .lasting
            .iter()
            .any(|lasting| matches!(lasting.undo, Undo::StartServer | Undo::ThawServer))
    }

    /// Makes the next fault if it is time, and ends those whose time is over.
    pub fn look(&mut self, system: &mut System<'_>) -> Result<(), BoxError> {
        self.end(system, |lasting| lasting.until <= Instant::now())?;
        if Instant::now() >= self.next {
            let pause = self.random.gen_range(200..1_200);
            self.next = Instant::now() + Duration::from_millis(pause);
            if let Err(error) = self.make_one(system) {
                // Another fault was in the way.
                let _ = writeln!(self.log, "{} not made: {error}", now());
            }
        }
        Ok(())
    }

    /// Ends all that last, and makes no more. What was to be lost and was not yet may still be.
    pub fn end_all(&mut self, system: &mut System<'_>) -> Result<(), BoxError> {
        self.end(system, |_| true)
    }

    /// Processes that were stopped to be started again.
    pub fn look_after_restarts(&mut self, system: &mut System<'_>) -> Result<(), BoxError> {
        for (slot, fault) in std::mem::take(&mut self.restarting) {
            if system.processes.runs(slot) {
                self.restarting.push((slot, fault));
            } else {
                system.processes.start(slot)?;
                self.over(fault);
            }
        }
        let came = |(_, loss): &(usize, Loss)| loss.happened();
        let losses = std::mem::take(&mut self.losses);
        let (come, to_come): (Vec<_>, Vec<_>) = losses.into_iter().partition(came);
        self.losses = to_come;
        for (fault, _) in come {
            self.over(fault);
        }
        Ok(())
    }

    fn end(
        &mut self,
        system: &mut System<'_>,
        over: impl Fn(&Lasting) -> bool,
    ) -> Result<(), BoxError> {
        self.look_after_restarts(system)?;
        let lasting = std::mem::take(&mut self.lasting);
        let (mut ended, lasting): (Vec<_>, Vec<_>) = lasting.into_iter().partition(over);
        self.lasting = lasting;
        // First the server, since others need its answer.
        ended.sort_by_key(|lasting| !matches!(lasting.undo, Undo::StartServer | Undo::ThawServer));
        for Lasting { undo, fault, .. } in ended {
            match undo {
                Undo::FreeMemory if !self.server_answers() => {
                    self.lasts(fault, 50, Undo::FreeMemory);
                    continue;
                }
                Undo::StartProcess(slot) => system.processes.start(slot)?,
                Undo::Thaw(slot) => system.processes.thaw(slot),
                Undo::Accept(slot) => system.processes.slots[slot].proxy.accept(),
                Undo::Undelay(slot) => {
                    system.processes.slots[slot].proxy.delay(Duration::ZERO);
                }
                Undo::Release(slot) => system.processes.slots[slot].proxy.release(),
                Undo::Tell(slot, order) => system.processes.tell(slot, &order),
                Undo::StartServer => system.server.run()?,
                Undo::ThawServer => system.server.thaw(),
                Undo::FreeMemory => {
                    // A server that was killed meanwhile has forgotten the limit.
                    let _ = ask(system.server, &["CONFIG", "SET", "maxmemory", "0"]);
                }
                Undo::Nothing => {}
            }
            self.over(fault);
        }
        Ok(())
    }

    fn over(&mut self, fault: usize) {
        let fault = &mut self.faults[fault];
        let to = *fault.to.insert(now());
        let lasted = to.saturating_sub(fault.from) / 1000;
        // Nobody's business but the reader's.
        let _ = writeln!(
            self.log,
            "{to} over: {} {} after {lasted} ms",
            fault.kind,
            whom(fault.slot)
        );
    }

    fn begin(&mut self, kind: &'static str, slot: Option<usize>, detail: &str) -> usize {
        let from = now();
        let _ = writeln!(self.log, "{from} {kind} {} {detail}", whom(slot));
        self.faults.push(Fault {
            kind,
            slot,
            from,
            to: None,
            reach: reach(kind),
        });
        self.faults.len() - 1
    }

    fn lasts(&mut self, fault: usize, millis: u64, undo: Undo) {
        self.lasting.push(Lasting {
            until: Instant::now() + Duration::from_millis(millis),
            undo,
            fault,
        });
    }

    /// The process of this slot is dead, frozen, cut off or stopping.
    fn is_hit(&self, slot: usize, system: &System<'_>) -> bool {
        !system.processes.is_ready(slot)
            || self.restarting.iter().any(|(it, _)| *it == slot)
            || self.lasting.iter().any(|lasting| match lasting.undo {
                Undo::StartProcess(it)
                | Undo::Thaw(it)
                | Undo::Accept(it)
                | Undo::Undelay(it)
                | Undo::Release(it) => it == slot,
                _ => false,
            })
    }

    fn make_one(&mut self, system: &mut System<'_>) -> Result<(), BoxError> {
        // All is drawn before anything is looked at, so that the same seed draws the same faults.
        let kind = self.draw_kind();
        let slot = self.random.gen_range(0..system.processes.slots.len());
        let (short, long) = (
            self.random.gen_range(20..600),
            self.random.gen_range(600..6_000),
        );
        let millis = if self.random.gen_bool(0.6) {
            short
        } else {
            long
        };
        let detail: usize = self.random.gen_range(0..1_000_000);
        let hit = self.is_hit(slot, system);
        let server_answers = self.server_answers();
        let proxy = &system.processes.slots[slot].proxy;
        let name = self.subscription(detail);
        match kind {
            "process killed" if !hit => {
                let fault = self.begin(kind, Some(slot), "");
                system.processes.kill(slot);
                self.lasts(fault, millis / 2, Undo::StartProcess(slot));
            }
            "process frozen" if !hit => {
                system.processes.freeze(slot);
                let fault = self.begin(kind, Some(slot), &format!("for {millis} ms"));
                self.lasts(fault, millis, Undo::Thaw(slot));
            }
            "process restarted in order" if !hit => {
                let fault = self.begin(kind, Some(slot), "");
                system.processes.stop(slot);
                self.restarting.push((slot, fault));
            }
            "connections cut" if !hit => {
                proxy.cut_all();
                let fault = self.begin(kind, Some(slot), "");
                self.over(fault);
            }
            "connections refused" if !hit => {
                proxy.refuse();
                proxy.cut_all();
                let fault = self.begin(kind, Some(slot), &format!("for {millis} ms"));
                self.lasts(fault, millis, Undo::Accept(slot));
            }
            "replies delayed" if !hit => {
                let delay = 5 + detail as u64 % 200;
                proxy.delay(Duration::from_millis(delay));
                let fault = self.begin(kind, Some(slot), &format!("by {delay} ms"));
                self.lasts(fault, millis, Undo::Undelay(slot));
            }
            "replies held" if !hit => {
                proxy.hold_replies();
                let fault = self.begin(kind, Some(slot), &format!("for {millis} ms"));
                self.lasts(fault, millis, Undo::Release(slot));
            }
            "black hole" if !hit => {
                proxy.black_hole();
                let fault = self.begin(kind, Some(slot), &format!("for {millis} ms"));
                self.lasts(fault, millis, Undo::Release(slot));
            }
            "half-open connections" if !hit => {
                proxy.half_open();
                let fault = self.begin(kind, Some(slot), "");
                // It takes the process some seconds to notice that nobody answers.
                self.lasts(fault, 6_000, Undo::Nothing);
            }
            "reply lost" | "request lost" | "half a reply lost" => {
                let matcher = matcher(detail);
                let loss = match kind {
                    "reply lost" => proxy.drop_next_reply(&matcher),
                    "request lost" => proxy.drop_next_request(&matcher),
                    _ => proxy.tear_next_reply(&matcher),
                };
                let fault = self.begin(kind, Some(slot), &matcher);
                self.losses.push((fault, loss));
            }
            "subscription paused" if !hit => {
                system.processes.tell(slot, &format!("pause {name}"));
                let fault = self.begin(kind, Some(slot), &name);
                self.lasts(fault, millis, Undo::Tell(slot, format!("resume {name}")));
            }
            "workers changed" if !hit => {
                let order = format!("workers {name} {}", 1 + detail % 8);
                self.told(kind, slot, &order, system);
            }
            "max_in_flight changed" if !hit => {
                let order = format!("in-flight {name} {}", 5 + detail % 400);
                self.told(kind, slot, &order, system);
            }
            #[cfg(feature = "fail_points")]
            "actor panicked" if !hit => {
                let point = POINTS[detail % POINTS.len()];
                let group = &GROUPS[detail / POINTS.len() % GROUPS.len()];
                let of = match point.split('.').next() {
                    Some("settler" | "keep_alive") => group.stream().to_owned(),
                    Some("sweeper") => group.delayed.unwrap_or("orders.delayed").to_owned(),
                    Some("reclaim") => format!("{}-reclaim", group.name),
                    _ => name,
                };
                self.told(kind, slot, &format!("crash {point} {of}"), system);
            }
            "server killed" if server_answers => {
                system.server.kill();
                let fault = self.begin(kind, None, &format!("for {} ms", millis / 2));
                self.lasts(fault, millis / 2, Undo::StartServer);
            }
            "server frozen" if server_answers => {
                system.server.freeze();
                let fault = self.begin(kind, None, &format!("for {millis} ms"));
                self.lasts(fault, millis, Undo::ThawServer);
            }
            "scripts flushed" if server_answers => {
                ask(system.server, &["SCRIPT", "FLUSH"])?;
                let fault = self.begin(kind, None, "");
                self.over(fault);
            }
            "a client killed by the server" if server_answers => {
                let list = ask(system.server, &["CLIENT", "LIST"])?;
                let ids = list.lines().filter_map(|line| {
                    let id = line.split(' ').next()?;
                    id.strip_prefix("id=")
                });
                let ids: Vec<_> = ids.collect();
                if let Some(id) = ids.get(detail % ids.len().max(1)) {
                    let fault = self.begin(kind, None, id);
                    // The one that asks is on the list, and gets no answer when it is chosen.
                    let _ = ask(system.server, &["CLIENT", "KILL", "ID", id]);
                    self.over(fault);
                }
            }
            "all clients killed by the server" if server_answers => {
                let fault = self.begin(kind, None, "");
                ask(system.server, &["CLIENT", "KILL", "TYPE", "normal"])?;
                self.over(fault);
            }
            "memory full" if server_answers => {
                ask(system.server, &["CONFIG", "SET", "maxmemory", "1mb"])?;
                let fault = self.begin(kind, None, &format!("for {} ms", millis / 2));
                self.lasts(fault, millis / 2, Undo::FreeMemory);
            }
            "writes paused by the server" if server_answers => {
                let fault = self.begin(kind, None, &format!("for {} ms", millis / 2));
                ask(
                    system.server,
                    &["CLIENT", "PAUSE", &(millis / 2).to_string(), "WRITE"],
                )?;
                self.lasts(fault, millis / 2, Undo::Nothing);
            }
            #[cfg(target_os = "linux")]
            "clock changed" if !hit => {
                let seconds = detail as i64 % 7_201 - 3_600;
                system.processes.slots[slot].clock.set(seconds)?;
                let fault = self.begin(kind, Some(slot), &format!("to {seconds} s ahead"));
                self.over(fault);
            }
            // Nothing, or it cannot be done now.
            _ => {}
        }
        Ok(())
    }

    /// A fault that an entry made, and is over.
    pub fn note(&mut self, kind: &'static str, slot: usize) {
        let fault = self.begin(kind, Some(slot), "");
        self.over(fault);
    }

    /// A fault that is an order to a process.
    fn told(&mut self, kind: &'static str, slot: usize, order: &str, system: &mut System<'_>) {
        system.processes.tell(slot, order);
        let fault = self.begin(kind, Some(slot), order);
        self.over(fault);
    }

    fn draw_kind(&mut self) -> &'static str {
        let all = KINDS.iter().map(|(_, weight)| weight).sum();
        let mut drawn = self.random.gen_range(0..all);
        for (kind, weight) in KINDS {
            if drawn < weight {
                return kind;
            }
            drawn -= weight;
        }
        "nothing"
    }

    fn subscription(&self, detail: usize) -> String {
        let all = GROUPS
            .iter()
            .flat_map(|group| group.subscriptions(self.server_claims));
        let all: Vec<_> = all.collect();
        all[detail % all.len()].clone()
    }
}

fn reach(kind: &str) -> Option<Reach> {
    match kind {
        "process frozen"
        | "connections refused"
        | "replies held"
        | "black hole"
        | "half-open connections"
        | "server killed"
        | "server frozen"
        | "writes paused by the server" => Some(Reach::Severs),
        "connections cut"
        | "replies delayed"
        | "reply lost"
        | "request lost"
        | "half a reply lost"
        | "a client killed by the server"
        | "all clients killed by the server" => Some(Reach::Bothers),
        _ => None,
    }
}

fn whom(slot: Option<usize>) -> String {
    match slot {
        Some(slot) => format!("(slot {slot})"),
        None => "(server)".to_owned(),
    }
}

/// The requests of which one is to be lost, or its reply.
fn matcher(detail: usize) -> String {
    let stream = STREAMS[detail / 8 % STREAMS.len()];
    let group = GROUPS[detail / 8 % GROUPS.len()].name;
    match detail % 8 {
        0 | 1 => format!("XREADGROUP {stream}"),
        2 => format!("XACK {stream}"),
        3 => format!("EVALSHA {stream}"),
        4 => format!("EVALSHA {group}"),
        5 => format!("* {group}"),
        6 => "EVALSHA".to_owned(),
        _ => "*".to_owned(),
    }
}

/// Asks the server something on a connection of its own; an error reply is an error.
fn ask(server: &Server, command: &[&str]) -> Result<String, BoxError> {
    let mut client: Client = server.connect()?;
    match client.command(command)? {
        crate::resp::Reply::Error(error) => Err(format!("{command:?}: {error}").into()),
        crate::resp::Reply::Bytes(text) => Ok(String::from_utf8_lossy(&text).into_owned()),
        other => Ok(format!("{other:?}")),
    }
}
