//! Everything that can go wrong, for as long as you like, and then the books are closed.
//!
//! ```sh
//! cargo run --release --features fail_points --example soak -- --minutes 10 --seed 7
//! ```
//!
//! Producers number what they publish to three streams. Several supervisor processes (this program, run
//! again) consume them in four groups: with functions, batches and actors, in all read modes, with every
//! verdict there is. Meanwhile processes are killed and frozen, so is the server, connections break,
//! replies are lost, memory fills up, actors panic. In the end everything comes to rest, and for every
//! number it is counted what became of it. docs/reliability.md says what is checked, and what is not.
//!
//! Read `accounting.rs` for what has to hold, `plan.rs` for who consumes what and `faults.rs` for what is
//! done to them. The last line is the verdict.

mod accounting;
mod evidence;
mod faults;
mod guard;
mod journal;
mod options;
mod plan;
mod processes;
mod producers;
mod server;
mod supervisor;

// What the tests use, which stands on nothing but the standard library.
#[cfg(target_os = "linux")]
#[allow(dead_code)]
#[path = "../../tests/support/clock.rs"]
mod clock;
#[allow(dead_code)]
#[path = "../../tests/support/proxy.rs"]
mod proxy;
#[allow(dead_code)]
#[path = "../../tests/support/resp.rs"]
mod resp;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use accounting::{Disturbance, End, Findings, Reach, account};
use faults::{Injector, System};
use guard::Guard;
use journal::{Micros, now};
use options::{Damage, Options, USAGE};
use plan::{GROUPS, STREAMS};
use processes::Processes;
use producers::{Producers, Published};
use resp::{Client, Reply};
use server::Server;
use streamvisor::BoxError;

/// How often the main loop looks at everything.
const TICK: Duration = Duration::from_millis(10);
const PROGRESS: Duration = Duration::from_secs(5);
/// From the last fault until nothing is left to do. What the server refuses for good is looked at again
/// after 30 s, so it is more than that.
const RESTS_WITHIN: Duration = Duration::from_secs(90);
/// How many violations are shown; all are in the run's folder.
const SHOWN: usize = 20;

fn main() -> ExitCode {
    let mut args = std::env::args().skip(1).peekable();
    if args.next_if(|arg| arg == "--supervisor").is_some() {
        return match supervisor_process(&args.collect::<Vec<_>>()) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("{error}");
                ExitCode::FAILURE
            }
        };
    }
    if args
        .peek()
        .is_some_and(|arg| arg == "--help" || arg == "-h")
    {
        println!("{USAGE}");
        return ExitCode::SUCCESS;
    }
    let options = match Options::parse(args) {
        Ok(options) => options,
        Err(error) => {
            eprintln!("soak: {error}\n{USAGE}");
            return ExitCode::from(2);
        }
    };
    match soak(&options) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("soak: {error}");
            println!(
                "soak: VIOLATION, the run did not come to its end: {error}; repeat: {}",
                options.command()
            );
            ExitCode::FAILURE
        }
    }
}

fn supervisor_process(args: &[String]) -> Result<(), BoxError> {
    let [url, seed, slot, journal, server_claims] = args else {
        return Err("--supervisor is for this program's own use".into());
    };
    supervisor::run(supervisor::Orders {
        url: url.clone(),
        seed: seed.parse()?,
        slot: slot.parse()?,
        journal: journal.into(),
        server_claims: server_claims.parse()?,
    })
}

/// Runs, counts, tells; returns whether everything is as promised.
fn soak(options: &Options) -> Result<bool, BoxError> {
    let dir = folder(options)?;
    println!(
        "soak: seed {}, {} min, {}",
        options.seed,
        options.minutes,
        dir.display()
    );
    let guard = Guard::start()?;
    let mut server = Server::start(&options.server, &dir.join("server"), &guard)?;
    let mut client = server.connect()?;
    let server_claims = claims(&mut client)?;
    println!(
        "soak: {}, {}",
        version(&mut client)?,
        match server_claims {
            true => "with CLAIM",
            false => "without CLAIM: a tail and a reclaim take its place",
        }
    );
    for group in &GROUPS {
        let command = [
            "XGROUP",
            "CREATE",
            group.stream(),
            group.name,
            "0",
            "MKSTREAM",
        ];
        evidence::ask(&mut client, &command)?;
    }
    let mut processes = Processes::new(
        options.processes,
        server.port(),
        options.seed,
        server_claims,
        &dir,
        &guard,
    )?;
    for slot in 0..options.processes {
        processes.start(slot)?;
    }
    let pulse = Pulse::feel(server.port());
    let began = Instant::now();
    let producers = Producers::start(server.port(), options.seed, options.rate);
    let mut injector = Injector::new(options.seed, server_claims, &dir.join("faults.log"))?;
    let mut progress = Progress::new(began);

    while began.elapsed() < options.length() {
        thread::sleep(TICK);
        if server.has_ended() {
            return Err("the server ended by itself".into());
        }
        let mut system = System {
            server: &mut server,
            processes: &mut processes,
        };
        look_after(&mut system, &mut injector)?;
        match options.calm {
            true => injector.look_after_restarts(&mut system)?,
            false => injector.look(&mut system)?,
        }
        progress.tell(&server, &processes, &producers, &injector);
    }
    let mut system = System {
        server: &mut server,
        processes: &mut processes,
    };
    injector.end_all(&mut system)?;
    let mut published = producers.stop();
    let lasted = began.elapsed();
    println!("soak: no more faults, no more entries; waiting for rest");
    // The one before may have met a fault.
    client = server.connect()?;
    let rests = rest(&mut server, &mut processes, &mut injector, &mut client)?;
    if options.damage == Some(Damage::Double) {
        copy_without_being_asked(&mut client)?;
    }
    stop(&mut processes);
    match options.damage {
        Some(Damage::Lose) => lose_one(&mut client, &mut published)?,
        Some(Damage::Pending) => leave_one_pending(&mut client)?,
        Some(Damage::Double) | None => {}
    }
    let mut disturbances: Vec<_> = injector.disturbances().collect();
    disturbances.extend(pulse.stop());
    let handled = processes.handled();
    let evidence = evidence::gather(
        &mut client,
        options.seed,
        published,
        &processes.past,
        disturbances,
        injector.server_started(),
    )?;
    drop((processes, server));

    let findings = account(&evidence);
    fs::write(
        dir.join("extra-runs.txt"),
        findings.extra_runs_told.join("\n"),
    )?;
    let mut wrong: Vec<String> = findings
        .violations
        .iter()
        .map(ToString::to_string)
        .collect();
    if rests.is_none() {
        wrong.push(format!("not at rest {RESTS_WITHIN:?} after the last fault"));
    }
    tell(&findings, &injector, &evidence, handled, lasted, rests);
    verdict(&wrong, options, &dir)
}

/// The run's own folder, which must not have been one before.
fn folder(options: &Options) -> Result<PathBuf, BoxError> {
    let dir = match &options.dir {
        Some(dir) => dir.clone(),
        None => Path::new(env!("CARGO_MANIFEST_DIR")).join(format!(
            "target/soak/seed-{}-{}",
            options.seed,
            std::process::id()
        )),
    };
    if dir.exists() {
        return Err(format!("{} is there already", dir.display()).into());
    }
    fs::create_dir_all(&dir)?;
    Ok(std::path::absolute(dir)?)
}

/// Whether the server has `XREADGROUP … CLAIM`.
fn claims(client: &mut Client) -> Result<bool, BoxError> {
    let (stream, group) = ("probe", "probe");
    evidence::ask(
        client,
        &["XGROUP", "CREATE", stream, group, "0", "MKSTREAM"],
    )?;
    let read = [
        "XREADGROUP",
        "GROUP",
        group,
        "probe",
        "CLAIM",
        "1000",
        "STREAMS",
        stream,
        ">",
    ];
    let reply = client.command(&read)?;
    evidence::ask(client, &["DEL", stream])?;
    Ok(!matches!(reply, Reply::Error(_)))
}

fn version(client: &mut Client) -> Result<String, BoxError> {
    let info = evidence::ask(client, &["INFO", "server"])?;
    let Reply::Bytes(info) = info else {
        return Ok("a server that does not say what it is".to_owned());
    };
    let info = String::from_utf8_lossy(&info).into_owned();
    let of = |name: &str| {
        let line = info.lines().find_map(|line| line.strip_prefix(name));
        line.map(|version| version.trim_start_matches(':').to_owned())
    };
    Ok(match (of("valkey_version"), of("redis_version")) {
        (Some(version), _) => format!("Valkey {version}"),
        (None, version) => format!("Redis {}", version.unwrap_or_default()),
    })
}

/// Notices processes that ended without having been told to, and puts others in their place.
fn look_after(system: &mut System<'_>, injector: &mut Injector) -> Result<(), BoxError> {
    for (slot, end) in system.processes.look() {
        let kind = match end {
            End::Killed => "process aborted by a handler",
            _ => "process ended by itself",
        };
        injector.note(kind, slot);
        system.processes.start(slot)?;
    }
    Ok(())
}

/// Waits until nothing is pending, delayed or not read yet; returns how long that took, or `None` when it
/// takes too long.
fn rest(
    server: &mut Server,
    processes: &mut Processes,
    injector: &mut Injector,
    client: &mut Client,
) -> Result<Option<Duration>, BoxError> {
    let began = Instant::now();
    let mut quiet = 0;
    while quiet < 3 {
        thread::sleep(Duration::from_millis(200));
        let mut system = System { server, processes };
        look_after(&mut system, injector)?;
        injector.end_all(&mut system)?;
        quiet = match evidence::is_at_rest(client) {
            Ok(true) => quiet + 1,
            Ok(false) => 0,
            // A reply of this very connection can be lost to the last fault.
            Err(_) => {
                *client = system.server.connect()?;
                0
            }
        };
        if began.elapsed() > RESTS_WITHIN {
            return Ok(None);
        }
    }
    Ok(Some(began.elapsed()))
}

/// Stops all processes in order.
fn stop(processes: &mut Processes) {
    for slot in 0..processes.slots.len() {
        processes.stop(slot);
    }
    while (0..processes.slots.len()).any(|slot| processes.runs(slot)) {
        thread::sleep(TICK);
        processes.look();
    }
}

// What the library must never do, for the accounting to find.

const DAMAGED: &plan::Group = &GROUPS[2];

/// Publishes an entry and acknowledges it unhandled.
fn lose_one(client: &mut Client, published: &mut [Vec<Published>]) -> Result<(), BoxError> {
    let stream = DAMAGED.stream();
    let number = published[DAMAGED.stream].len().to_string();
    let add = ["XADD", stream, "*", "h:number", &number];
    let id = evidence::ask(client, &add)?;
    let parsed = journal::parse_id(id.as_str()).ok_or("XADD answers with an id")?;
    published[DAMAGED.stream].push(Published::As(parsed));
    let group = DAMAGED.name;
    let read = [
        "XREADGROUP",
        "GROUP",
        group,
        "nobody",
        "STREAMS",
        stream,
        ">",
    ];
    evidence::ask(client, &read)?;
    evidence::ask(client, &["XACK", stream, group, id.as_str()])?;
    evidence::ask(client, &["XGROUP", "DELCONSUMER", stream, group, "nobody"])?;
    Ok(())
}

/// Adds a copy of the first entry, which is handled like any other.
fn copy_without_being_asked(client: &mut Client) -> Result<(), BoxError> {
    let first = ["XRANGE", DAMAGED.stream(), "-", "+", "COUNT", "1"];
    let first = evidence::ask(client, &first)?;
    let fields = first.as_array()[0].as_array()[1].as_array();
    let mut copy = vec!["XADD", DAMAGED.stream(), "*"];
    copy.extend(fields.iter().map(Reply::as_str));
    copy.extend(["h:retry-group", DAMAGED.name]);
    evidence::ask(client, &copy)?;
    thread::sleep(Duration::from_secs(1));
    Ok(())
}

/// Makes an entry pending again that was acknowledged.
fn leave_one_pending(client: &mut Client) -> Result<(), BoxError> {
    let (stream, group) = (DAMAGED.stream(), DAMAGED.name);
    let first = evidence::ask(client, &["XRANGE", stream, "-", "+", "COUNT", "1"])?;
    let id = first.as_array()[0].as_array()[0].as_str();
    let claim = [
        "XCLAIM", stream, group, "nobody", "0", id, "FORCE", "JUSTID",
    ];
    evidence::ask(client, &claim)?;
    Ok(())
}

// ---- what is told ----------------------------------------------------------------------------------------

struct Progress {
    began: Instant,
    last: Instant,
    handled: u64,
}

impl Progress {
    fn new(began: Instant) -> Progress {
        Progress {
            began,
            last: began,
            handled: 0,
        }
    }

    fn tell(
        &mut self,
        server: &Server,
        processes: &Processes,
        producers: &Producers,
        injector: &Injector,
    ) {
        let since = self.last.elapsed();
        if since < PROGRESS {
            return;
        }
        self.last = Instant::now();
        let handled = processes.handled();
        let rate = handled.saturating_sub(self.handled) as f64 / since.as_secs_f64();
        self.handled = handled;
        let pending = match injector.server_answers() {
            true => server
                .connect()
                .map_err(BoxError::from)
                .and_then(|mut client| {
                    client.set_read_timeout(Duration::from_secs(1))?;
                    evidence::pending(&mut client)
                }),
            false => Err("the server is away".into()),
        };
        let pending = pending.map_or("?".to_owned(), |pending| pending.to_string());
        println!(
            "{:5.0} s  {} published, {handled} handled ({rate:.0}/s), {pending} pending, faults: {}",
            self.began.elapsed().as_secs_f64(),
            producers.confirmed(),
            listed(&injector.by_kind()),
        );
    }
}

fn listed<N: AsRef<str>>(counts: &BTreeMap<N, u64>) -> String {
    if counts.is_empty() {
        return "none".to_owned();
    }
    let each: Vec<_> = counts
        .iter()
        .map(|(kind, count)| format!("{count} {}", kind.as_ref()))
        .collect();
    each.join(", ")
}

fn tell(
    findings: &Findings,
    injector: &Injector,
    evidence: &accounting::Evidence,
    handled: u64,
    lasted: Duration,
    rests: Option<Duration>,
) {
    let seconds = lasted.as_secs_f64();
    println!(
        "soak: {} numbers in {} streams, {} runs by {} processes, {:.0} handled a second",
        findings.numbers,
        STREAMS.len(),
        findings.runs,
        evidence.processes.len(),
        handled as f64 / seconds,
    );
    println!(
        "soak: {} retried copies, {} dead letters, {} entries that nobody could read",
        findings.copies, findings.dead_letters, findings.garbage
    );
    println!("soak: faults: {}", listed(&injector.by_kind()));
    println!(
        "soak: extra runs: {}; of these at the same time as the run before: {}",
        listed(&findings.extra_runs),
        findings.at_the_same_time
    );
    let faults: Vec<_> = injector
        .faults
        .iter()
        .filter_map(|fault| Some((fault.kind, fault.slot, fault.from, fault.to?)))
        .collect();
    if let Some((micros, kind)) = evidence::slowest_recovery(evidence, &faults) {
        let seconds = Duration::from_micros(micros).as_secs_f64();
        println!("soak: slowest recovery: {seconds:.2} s after: {kind}");
    }
    if let Some(rests) = rests {
        println!(
            "soak: at rest {:.1} s after the last fault",
            rests.as_secs_f64()
        );
    }
}

/// The last line, and what becomes of the folder.
fn verdict(wrong: &[String], options: &Options, dir: &Path) -> Result<bool, BoxError> {
    let command = options.command();
    let seed = options.seed;
    if wrong.is_empty() {
        if !options.keep {
            fs::remove_dir_all(dir)?;
        }
        println!("soak: OK, seed {seed}, repeat: {command}");
        return Ok(true);
    }
    fs::write(dir.join("violations.txt"), wrong.join("\n"))?;
    for wrong in wrong.iter().take(SHOWN) {
        println!("soak: {wrong}");
    }
    println!("soak: everything is in {}", dir.display());
    println!("soak: look one up: {}", evidence::journals_of(dir, "<id>"));
    println!(
        "soak: VIOLATION, {} of them, seed {seed}, repeat: {command}",
        wrong.len()
    );
    Ok(false)
}

// ---- the machine itself ----------------------------------------------------------------------------------

/// Asks the server for a sign of life again and again: where it is slow to give one, nobody could keep
/// anything fresh meanwhile, whoever made it slow.
struct Pulse {
    stop: Arc<AtomicBool>,
    slow: Arc<Mutex<Vec<Disturbance>>>,
    thread: JoinHandle<()>,
}

impl Pulse {
    const SLOW: Micros = 300_000;

    fn feel(port: u16) -> Pulse {
        let stop = Arc::new(AtomicBool::new(false));
        let slow: Arc<Mutex<Vec<_>>> = Arc::default();
        let thread = thread::spawn({
            let (stop, slow) = (Arc::clone(&stop), Arc::clone(&slow));
            move || {
                let mut client = None;
                while !stop.load(Ordering::Relaxed) {
                    let from = now();
                    client = client
                        .take()
                        .or_else(|| Client::connect(port, None).ok())
                        .and_then(|mut client: Client| {
                            client.command(&["PING"]).ok().map(|_| client)
                        });
                    let to = now();
                    if to - from > Pulse::SLOW {
                        let mut slow = slow.lock().unwrap_or_else(PoisonError::into_inner);
                        slow.push(Disturbance {
                            kind: "server slow to answer",
                            reach: Reach::Severs,
                            slot: None,
                            from,
                            to,
                        });
                    }
                    thread::sleep(Duration::from_millis(50));
                }
            }
        });
        Pulse { stop, slow, thread }
    }

    fn stop(self) -> Vec<Disturbance> {
        self.stop.store(true, Ordering::Relaxed);
        // A pulse that panicked has found nothing more.
        let _ = self.thread.join();
        std::mem::take(&mut self.slow.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
