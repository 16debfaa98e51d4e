//! The fault table: processes that die, servers that die, freeze and lose their data, links that break,
//! handlers that hang. Nothing is lost, and nothing is handled again that need not be.

mod support;

use std::collections::{HashMap, HashSet};
use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use streamvisor::fail_point::{self, Fail};
use streamvisor::prelude::*;
use streamvisor::{Entry, Event, Mode};
use support::record::{GROUP, Gate, Heard, Recorder, SOON, fill, ms, stream_of, topology};
use support::watch::{Logged, Most};
use support::*;

/// For what takes a while on a machine that has other things to do.
const LATER: Duration = Duration::from_secs(60);

async fn all_acknowledged(server: &Server, stream: &str) {
    let what = format!("nothing of {stream} is pending");
    eventually(LATER, &what, || server.xpending_count(stream, GROUP) == 0).await;
}

/// The group has had everything, and nothing of it is pending.
fn is_done(server: &Server, stream: &str, last: &str) -> bool {
    let groups = server.command(&["XINFO", "GROUPS", stream]);
    let group = groups.as_array()[0].as_array();
    let of = |name: &str| {
        let found = group.chunks(2).find(|pair| pair[0].as_str() == name);
        &found.expect("XINFO GROUPS should have it")[1]
    };
    of("pending").as_int() == 0 && of("last-delivered-id").as_str() == last
}

fn is_away(event: &Event) -> bool {
    matches!(event, Event::ServerAway { .. })
}

fn is_back(event: &Event) -> bool {
    matches!(event, Event::ServerBack { .. })
}

// ---- processes that die -------------------------------------------------------------------------------

/// A process of its own that consumes a stream: this executable, run again for `worker_process` alone.
/// Dropping it kills it.
struct Worker(Child);

impl Worker {
    fn start(server: &Server, stream: &str, role: &str) -> Worker {
        Worker::start_to(server, stream, role, "")
    }

    /// The same, for one that stands still at this point, says so, and waits for its death.
    fn start_to(server: &Server, stream: &str, role: &str, point: &str) -> Worker {
        Worker::start_as(server, stream, role, point, |_| {})
    }

    fn start_as(
        server: &Server,
        stream: &str,
        role: &str,
        point: &str,
        with: impl FnOnce(&mut Command),
    ) -> Worker {
        let this = std::env::current_exe().expect("the path of this test");
        let mut command = Command::new(this);
        with(&mut command);
        let child = command
            .args(["--exact", "worker_process", "--nocapture"])
            .env("STREAMVISOR_WORKER", role)
            .env("STREAMVISOR_PORT", server.port().to_string())
            .env("STREAMVISOR_STREAM", stream)
            .env("STREAMVISOR_POINT", point)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        Worker(child.expect("this test should be able to run itself"))
    }

    fn has_ended(&mut self) -> bool {
        let status = self.0.try_wait();
        status.expect("a child can be asked").is_some()
    }

    /// Kills it where it stands (SIGKILL) and waits until the server has noticed.
    async fn kill(self, server: &Server) {
        drop(self);
        only_we_are_connected(server).await;
    }

    /// How much memory it has, in KiB.
    fn resident(&self) -> Option<u64> {
        let path = format!("/proc/{}/status", self.0.id());
        let status = std::fs::read_to_string(path).ok()?;
        let line = status.lines().find(|line| line.starts_with("VmRSS:"))?;
        line.split_whitespace().nth(1)?.parse().ok()
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What the dead have sent has been worked off.
async fn only_we_are_connected(server: &Server) {
    eventually(SOON, "only we are connected", || {
        let all = server.command(&["CLIENT", "LIST"]);
        all.as_str().lines().count() == 1
    })
    .await;
}

/// The process behind [`Worker`]. As a test of its own it does nothing.
#[test]
fn worker_process() {
    let Ok(role) = std::env::var("STREAMVISOR_WORKER") else {
        return;
    };
    let of = |name: &str| std::env::var(name).expect("the test that starts it says it");
    let (port, stream) = (
        of("STREAMVISOR_PORT").parse().unwrap(),
        of("STREAMVISOR_STREAM"),
    );
    // It ends with the test that started it.
    std::thread::spawn(|| {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        std::process::exit(0);
    });
    #[cfg(target_os = "linux")]
    the_clock_is_as_wrong_as_was_asked_for(port);
    stand_still_at(&of("STREAMVISOR_POINT"), port, &stream);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        let topology = worker_topology(&role, port, &stream);
        let supervisor = Supervisor::start(topology).await.unwrap();
        supervisor.wait().await.unwrap();
    });
}

/// Or whatever passes with a wrong clock would prove nothing.
#[cfg(target_os = "linux")]
fn the_clock_is_as_wrong_as_was_asked_for(port: u16) {
    let mut client = Client::connect(port, None).unwrap();
    let time = client.command(&["TIME"]).unwrap();
    let right: i64 = time.as_array()[0].as_str().parse().unwrap();
    let ahead = support::clock::seconds() - right;
    let wanted = support::clock::own_error();
    assert!(
        (ahead - wanted).abs() < 60,
        "it is {ahead} s ahead, not {wanted}"
    );
}

fn stand_still_at(point: &str, port: u16, stream: &str) {
    let known = fail_point::POINTS.iter().find(|known| **known == point);
    let Some(point) = known else { return };
    let of = match point.split('.').next() {
        Some("settler" | "keep_alive") => stream.to_owned(),
        Some("sweeper") => format!("{stream}.delayed"),
        Some("reclaim") => "reclaim".to_owned(),
        // Whichever of the two comes there.
        _ if stream.contains("left-behind") => "reclaim".to_owned(),
        _ => "tail".to_owned(),
    };
    let armed = fail_point::arm(point, &of, Fail::Pause, 3..=u64::MAX);
    let mut client = Client::connect(port, None).unwrap();
    let told = format!("{stream}.stands-still");
    std::thread::spawn(move || {
        while armed.failed() == 0 {
            std::thread::sleep(ms(1));
        }
        client.command(&["SET", &told, "1"]).unwrap();
        // Dropped, it would let them go on.
        std::mem::forget(armed);
    });
}

fn worker_topology(role: &str, port: u16, stream: &str) -> Topology {
    let topology = topology(&format!("redis://127.0.0.1:{port}"));
    let starts = Starts::of(port, stream);
    let tail = || Subscription::tail(stream).start(Start::Beginning);
    let reclaim = |min_idle| Subscription::reclaim(stream, min_idle).block(ms(50));
    let poison = |draft: streamvisor::Draft| {
        let five = RetryPolicy::exponential(ms(10)).max_attempts(5);
        starts.then_act(
            draft
                .workers(4)
                .retry(five.then_dead_letter())
                .dead_letter(format!("{stream}.dead")),
        )
    };
    match role {
        "slow" => topology
            .subscribe(starts.then_act(tail()))
            .subscribe(starts.then_act(reclaim(Duration::from_secs(1)))),
        "me" => topology.subscribe(starts.then_act(tail().workers(10).consumer("me"))),
        "poison-me" => topology.subscribe(poison(tail().consumer("me"))),
        "poison" => topology
            .subscribe(poison(tail()))
            .subscribe(poison(reclaim(ms(500)))),
        "all-verdicts" => topology
            .subscribe(all_verdicts(&starts, stream, tail().named("tail")))
            .subscribe(all_verdicts(
                &starts,
                stream,
                reclaim(ms(300)).named("reclaim"),
            )),
        "delays" => {
            let delayed = || DelayedRetry::durable(format!("{stream}.delayed"));
            topology
                .subscribe(delays(&starts, tail().delayed_retry(delayed())))
                .subscribe(delays(
                    &starts,
                    reclaim(Duration::from_secs(1)).delayed_retry(delayed()),
                ))
        }
        "parks" => topology
            .subscribe(delays(&starts, tail()))
            .subscribe(delays(&starts, reclaim(Duration::from_secs(1)))),
        "plain" => topology.subscribe(plain(tail())),
        "plain-me" => topology.subscribe(plain(tail().consumer("me"))),
        other => panic!("no such worker: {other}"),
    }
}

/// Where worker processes write down what they start, before they start it: a list on the server.
#[derive(Clone)]
struct Starts {
    list: String,
    client: Arc<Mutex<Client>>,
}

impl Starts {
    fn of(port: u16, stream: &str) -> Starts {
        let client = Client::connect(port, None).expect("the server should be there");
        Starts {
            list: format!("{stream}.starts"),
            client: Arc::new(Mutex::new(client)),
        }
    }

    /// Does what the body says: `hang`, `abort`, or, after a moment, nothing.
    fn then_act(&self, draft: streamvisor::Draft) -> Subscription {
        let starts = self.clone();
        draft.codec(Raw).handle_fn(move |entry: Entry, context| {
            let starts = starts.clone();
            async move {
                starts.note(&context);
                match entry.payload().map(|body| &body[..]) {
                    Some(b"hang") => std::future::pending().await,
                    Some(b"abort") => std::process::abort(),
                    _ => tokio::time::sleep(ms(2)).await,
                }
                Ok(Outcome::Ack)
            }
        })
    }

    fn note(&self, context: &Context) {
        let start = format!("{} {}", context.id(), context.attempt());
        let reply = self
            .client
            .lock()
            .unwrap()
            .command(&["RPUSH", &self.list, &start]);
        assert!(reply.unwrap().as_error().is_none());
    }
}

/// By the last digit of the body: 0 is retried, 1 is retried later, 2 is dead-lettered; once each.
fn all_verdicts(starts: &Starts, stream: &str, draft: streamvisor::Draft) -> Subscription {
    let starts = starts.clone();
    draft
        .workers(4)
        .delayed_retry(DelayedRetry::durable(format!("{stream}.delayed")))
        .dead_letter(format!("{stream}.dead"))
        .codec(Raw)
        .handle_fn(move |entry: Entry, context| {
            starts.note(&context);
            let last = entry.payload().and_then(|body| body.last()).copied();
            std::future::ready(Ok(match last {
                Some(b'0') if context.attempt() == 1 => Outcome::Retry,
                Some(b'1') if context.attempt() == 1 => Outcome::RetryAfter(ms(20)),
                Some(b'2') => Outcome::DeadLetter("unwanted".to_owned()),
                _ => Outcome::Ack,
            }))
        })
}

fn plain(draft: streamvisor::Draft) -> Subscription {
    draft
        .codec(Raw)
        .handle_fn(|_: Entry, _| async { Ok(Outcome::Ack) })
}

/// What is wanted later is, once. All else takes longer than others wait for what nobody keeps fresh.
fn delays(starts: &Starts, draft: streamvisor::Draft) -> Subscription {
    let starts = starts.clone();
    draft
        .workers(40)
        .codec(Raw)
        .handle_fn(move |entry: Entry, context| {
            starts.note(&context);
            let later = entry.payload().is_some_and(|body| &body[..] == b"later");
            let first = context.attempt() == 1;
            async move {
                if later && first {
                    return Ok(Outcome::RetryAfter(ms(3_000)));
                }
                if !later {
                    tokio::time::sleep(ms(4_000)).await;
                }
                Ok(Outcome::Ack)
            }
        })
}

/// What was started, in order: the id and the attempt.
fn starts(server: &Server, stream: &str) -> Vec<(String, u64)> {
    let all = server.command(&["LRANGE", &format!("{stream}.starts"), "0", "-1"]);
    let starts = all.as_array().iter().map(|start| {
        let (id, attempt) = start.as_str().split_once(' ').unwrap();
        (id.to_owned(), attempt.parse().unwrap())
    });
    starts.collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn processes_that_are_killed_under_load_lose_nothing_and_repeat_only_what_they_had_started() {
    const ENTRIES: usize = 4_000;
    let server = Server::start(Server::default_version());
    let stream = stream_of(&server, "killed");
    let ids = fill(&server, &stream, ENTRIES);
    let last = ids.last().unwrap();
    let mut may_be_repeated = 0;
    for kill in 1..=3 {
        let worker = Worker::start(&server, &stream, "slow");
        eventually(LATER, "many are started and many wait", || {
            starts(&server, &stream).len() >= kill * 600
                && server.xpending_count(&stream, GROUP) >= 25
        })
        .await;
        worker.kill(&server).await;
        let started: HashSet<String> = starts(&server, &stream)
            .into_iter()
            .map(|(id, _)| id)
            .collect();
        let pending = server.xpending(&stream, GROUP);
        assert!(pending.len() > 10, "it was killed too late");
        may_be_repeated += pending.iter().filter(|it| started.contains(&it.0)).count();
    }
    let _worker = Worker::start(&server, &stream, "slow");
    eventually(LATER, "all is handled", || is_done(&server, &stream, last)).await;
    let starts = starts(&server, &stream);
    let distinct: HashSet<&String> = starts.iter().map(|(id, _)| id).collect();
    assert_eq!(distinct.len(), ENTRIES);
    let repeated = starts.len() - ENTRIES;
    assert!(
        repeated <= may_be_repeated,
        "{repeated} were repeated, and only {may_be_repeated} had been started at the kills"
    );
}

/// The process is killed between two lines, and another one takes over.
async fn killed_at(points: &[&str], left_behind: bool) {
    const ENTRIES: usize = 1_000;
    let server = Server::start(Server::default_version());
    for point in points {
        let kind = if left_behind { "left-behind" } else { "fresh" };
        let stream = stream_of(&server, &format!("{point}-{kind}"));
        let keys = ["delayed", "dead", "stands-still"].map(|of| format!("{stream}.{of}"));
        let [delayed, dead, stands_still] = &keys;
        fill(&server, &stream, ENTRIES);
        if left_behind {
            let count = ENTRIES.to_string();
            let read = ["XREADGROUP", "GROUP", GROUP, "dead", "COUNT", &count];
            server.command(&[&read[..], &["STREAMS", &stream, ">"]].concat());
        }
        let worker = Worker::start_to(&server, &stream, "all-verdicts", point);
        eventually(LATER, point, || {
            !server.command(&["GET", stands_still]).is_nil()
        })
        .await;
        worker.kill(&server).await;
        let started: HashSet<String> = starts(&server, &stream)
            .into_iter()
            .map(|(id, _)| id)
            .collect();
        let pending = server.xpending(&stream, GROUP);
        let may_be_repeated = pending.iter().filter(|it| started.contains(&it.0)).count();

        let heir = Worker::start(&server, &stream, "all-verdicts");
        eventually(LATER, &format!("all is done after {point}"), || {
            let entries = server.xrange(&stream);
            let last = &entries.last().expect("there are some").0;
            server.command(&["ZCARD", delayed]).as_int() == 0 && is_done(&server, &stream, last)
        })
        .await;
        heir.kill(&server).await;

        let mut copies: HashMap<Vec<u8>, usize> = HashMap::new();
        let entries = server.xrange(&stream);
        for (_, fields) in &entries {
            *copies.entry(fields[0].1.clone()).or_default() += 1;
        }
        assert_eq!(copies.len(), ENTRIES, "{point}");
        for (body, copies) in copies {
            let most = if matches!(body.last(), Some(b'0' | b'1')) {
                2
            } else {
                1
            };
            assert!(
                copies <= most,
                "{point}: {copies} of {}",
                body.escape_ascii()
            );
        }
        assert_eq!(server.xlen(dead) as usize, ENTRIES / 10, "{point}");
        let starts = starts(&server, &stream);
        let distinct: HashSet<&String> = starts.iter().map(|(id, _)| id).collect();
        assert_eq!(distinct.len(), entries.len(), "{point}");
        let repeated = starts.len() - distinct.len();
        assert!(
            repeated <= may_be_repeated,
            "{point}: {repeated} were repeated, and only {may_be_repeated} had been started"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_killed_at_any_step_with_fresh_entries_loses_nothing_and_copies_nothing_twice() {
    let points = [
        "reader.before_read",
        "reader.reply",
        "reader.handed_over",
        "reader.registered",
        "handler.started",
        "handler.returned",
        "handler.settled",
        "settler.acks",
        "settler.copies",
        "settler.sent",
        "settler.answered",
        "settler.confirmed",
        "sweeper.before",
        "sweeper.swept",
    ];
    killed_at(&points, false).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_killed_at_any_step_with_what_others_left_loses_nothing_and_copies_nothing_twice()
{
    let points = [
        "reclaim.before",
        "reclaim.reply",
        "reclaim.handed_over",
        "reclaim.moved",
        "settler.starts",
        "handler.counted",
        "handler.started",
        "handler.returned",
    ];
    killed_at(&points, true).await;
}

/// B56: only new entries were read after a restart.
#[tokio::test(flavor = "multi_thread")]
async fn b56_a_killed_process_of_the_same_name_starts_what_it_had_in_hand_each_once() {
    let server = Server::start(Server::default_version());
    let stream = stream_of(&server, "b56");
    let bodies = (0..30).map(|_| vec![("_payload", "hang")]);
    let ids = server.xadd_many(&stream, bodies);
    let worker = Worker::start(&server, &stream, "me");
    eventually(LATER, "ten run and twenty wait", || {
        starts(&server, &stream).len() == 10 && server.xpending_count(&stream, GROUP) == 30
    })
    .await;
    worker.kill(&server).await;
    server.command(&["DEL", &format!("{stream}.starts")]);
    // Now their handlers end. Nothing reclaims here.
    let recorder = Recorder::acking();
    let tail = Subscription::tail(&*stream).consumer("me");
    let supervisor = Supervisor::start(topology(&server.url()).subscribe(recorder.on(tail)))
        .await
        .unwrap();
    recorder.reaches(30).await;
    all_acknowledged(&server, &stream).await;
    supervisor.shutdown().await.unwrap();
    let mut handled = recorder.ids();
    handled.sort_by_key(|id| id.parse::<streamvisor::EntryId>().unwrap());
    assert_eq!(handled, ids);
    assert!(recorder.calls().iter().all(|call| call.attempt == 2));
}

/// Delays are due by the server's clock or by what a process measures, never by its time of day; and so are
/// keeping fresh and taking over.
#[cfg(target_os = "linux")]
#[tokio::test(flavor = "multi_thread")]
async fn processes_whose_clocks_are_an_hour_off_delay_and_keep_and_take_over_as_others_do() {
    const LATER_ONES: usize = 20;
    let dir = tempfile::tempdir().unwrap();
    let clockwork = support::clock::Clockwork::build(dir.path()).unwrap();
    let clock = |ahead: i64| {
        let file = dir.path().join(ahead.to_string());
        clockwork.clock(&file, ahead).unwrap()
    };
    let clocks = [clock(3_600), clock(-3_600)];
    for (role, first, second) in [
        ("delays", 0, 1),
        ("delays", 1, 0),
        ("parks", 0, 1),
        ("parks", 1, 0),
    ] {
        let server = Server::start(Server::default_version());
        let stream = stream_of(&server, &format!("clocks-{role}-{first}"));
        let start = |clock: usize| {
            Worker::start_as(&server, &stream, role, "", |command| {
                clocks[clock].wind(command);
            })
        };
        let bodies = (0..LATER_ONES + 4).map(|n| match n < LATER_ONES {
            true => vec![("_payload", "later")],
            false => vec![("_payload", "long")],
        });
        let ids = server.xadd_many(&stream, bodies);
        let worker = start(first);
        let left = if role == "delays" {
            4
        } else {
            ids.len() as i64
        };
        eventually(LATER, "all have been started once", || {
            starts(&server, &stream).len() == ids.len()
                && server.xpending_count(&stream, GROUP) == left
        })
        .await;
        worker.kill(&server).await;
        // One is to take over; the other one is not to think that it did not.
        let _workers = [start(second), start(first)];
        eventually(LATER, "all is handled", || {
            starts(&server, &stream).len() >= 2 * ids.len()
                && server.xpending_count(&stream, GROUP) == 0
        })
        .await;
        let mut second_starts = starts(&server, &stream).split_off(ids.len());
        assert_eq!(second_starts.len(), ids.len(), "{role}: {second_starts:?}");
        assert!(second_starts.iter().all(|(_, attempt)| *attempt == 2));
        // The copies are as old as the server says: they were not made before their time.
        second_starts.retain(|(id, _)| !ids.contains(id));
        let copies = if role == "delays" { LATER_ONES } else { 0 };
        assert_eq!(second_starts.len(), copies, "{role}");
        let millis = |id: &str| id.parse::<streamvisor::EntryId>().unwrap().ms;
        let added = millis(&ids[0]);
        let early = second_starts
            .iter()
            .find(|(id, _)| millis(id) < added + 3_000);
        assert_eq!(early, None, "{role}");
    }
}

/// B63: an entry that ends the process was never counted. Here its neighbours are not counted instead.
async fn one_entry_aborts_the_process(role: &str) {
    let server = Server::start(Server::default_version());
    let stream = stream_of(&server, "b63");
    let dead = format!("{stream}.dead");
    let bodies = (0..101).map(|n| vec![("_payload", if n == 50 { "abort" } else { "good" })]);
    let ids = server.xadd_many(&stream, bodies);
    let (poison, last) = (&ids[50], &ids[100]);
    let mut crashes = 0;
    let mut worker = Worker::start(&server, &stream, role);
    eventually(2 * LATER, "all is handled or dead", || {
        if worker.has_ended() {
            crashes += 1;
            assert!(crashes <= 10, "it is never given up");
            worker = Worker::start(&server, &stream, role);
        }
        is_done(&server, &stream, last)
    })
    .await;
    assert_eq!(crashes, 5);
    let letters = server.xrange(&dead);
    assert_eq!(letters.len(), 1);
    let field = |name: &[u8]| {
        let found = letters[0].1.iter().find(|(field, _)| field == name);
        String::from_utf8(found.expect("a dead letter has it").1.clone()).unwrap()
    };
    assert_eq!(field(b"h:dead-entry-id"), *poison);
    assert_eq!(field(b"h:dead-attempts"), "5");

    let mut started: HashMap<String, Vec<u64>> = HashMap::new();
    for (id, attempt) in starts(&server, &stream) {
        started.entry(id).or_default().push(attempt);
    }
    assert_eq!(started.len(), 101);
    assert_eq!(started.remove(poison), Some(vec![1, 2, 3, 4, 5]));
    for (id, attempts) in started {
        // The start itself, those before it, one for a fetch, and one that was counted beside the poison's
        // second start, for a call that its process did not live to make. From then on both begin alone.
        for (before, attempt) in attempts.iter().enumerate() {
            assert!(
                *attempt <= before as u64 + 3,
                "{id} is blamed: {attempts:?}"
            );
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn b63_an_entry_that_aborts_a_process_of_one_name_is_dead_after_its_attempts() {
    one_entry_aborts_the_process("poison-me").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn b63_an_entry_that_aborts_processes_of_any_name_is_dead_after_its_attempts() {
    one_entry_aborts_the_process("poison").await;
}

/// Starts a worker of this role for 100,000 entries of 1,000 bytes, waits until it has acknowledged them, and
/// looks at its memory meanwhile.
async fn all_are_acknowledged_in_flat_memory(stream: &str, role: &str, left: bool) {
    const ENTRIES: usize = 100_000;
    const KIB: u64 = 1024;
    let server = Server::start(Server::default_version());
    let stream = stream_of(&server, stream);
    let body = "x".repeat(1_000);
    let mut last = String::new();
    for _ in 0..10 {
        let ids = server.xadd_many(
            &stream,
            (0..ENTRIES / 10).map(|_| vec![("_payload", &body)]),
        );
        last = ids.last().unwrap().clone();
    }
    if left {
        for _ in 0..10 {
            server.read_as(&stream, GROUP, "me", ENTRIES / 10);
        }
        assert_eq!(server.xpending_count(&stream, GROUP), ENTRIES as i64);
    }
    let before = server.commandstat("xreadgroup") + server.commandstat("evalsha");
    let worker = Worker::start(&server, &stream, role);
    let mut resident = Vec::new();
    eventually(LATER, "all are acknowledged", || {
        if server.commandstat("xreadgroup") + server.commandstat("evalsha") > before {
            resident.extend(worker.resident());
        }
        is_done(&server, &stream, &last)
    })
    .await;
    resident.extend(worker.resident());
    let (first, most) = (resident[0], *resident.iter().max().unwrap());
    let grown = most - first;
    assert!(
        grown <= 64 * KIB,
        "it grew by {grown} KiB, from {first} to {most}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hundred_thousand_entries_are_acknowledged_in_flat_memory() {
    all_are_acknowledged_in_flat_memory("many", "plain", false).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hundred_thousand_own_pending_entries_are_recovered_in_flat_memory() {
    all_are_acknowledged_in_flat_memory("many-own", "plain-me", true).await;
}

/// B55: what one process knew of the others was lost with the server's data.
#[tokio::test(flavor = "multi_thread")]
async fn b55_after_a_flush_a_process_that_dies_is_noticed_and_live_work_is_left_alone() {
    let server = Server::start(Server::default_version());
    let stream = stream_of(&server, "b55");
    let min_idle = Duration::from_secs(1);
    let of = |recorder: &Recorder| {
        let reclaim = Subscription::reclaim(&*stream, min_idle).block(ms(50));
        topology(&server.url())
            .subscribe(recorder.on(Subscription::tail(&*stream).block(ms(200))))
            .subscribe(recorder.on(reclaim))
    };
    let (gates, never) = (Gate::closed(), Gate::closed());
    let (doomed, living) = (Recorder::behind(&never), Recorder::behind(&gates));
    let dies = Supervisor::start(of(&doomed)).await.unwrap();
    let lives = Supervisor::start(of(&living)).await.unwrap();
    server.command(&["FLUSHALL"]);
    // By one of the two.
    eventually(SOON, "the group is made again", || {
        matches!(server.command(&["XINFO", "GROUPS", &stream]), Reply::Array(groups) if groups.len() == 1)
    })
    .await;
    // Both are at work, each with what it can run and some more.
    let mut entries = 0;
    eventually(SOON, "both have all hands full", || {
        if doomed.running_now() < 8 || living.running_now() < 8 {
            fill(&server, &stream, 1);
            entries += 1;
        }
        doomed.running_now() == 8 && living.running_now() == 8
    })
    .await;
    // For longer than either would need to take the other's for left behind.
    let began = Instant::now();
    eventually(SOON, "they run for long", || began.elapsed() > 2 * min_idle).await;
    assert_eq!((doomed.count(), living.count()), (8, 8));
    dies.actor().kill();
    drop(dies);
    eventually(SOON, "what it had is in the other's hands", || {
        let pending = server.xpending(&stream, GROUP);
        pending.len() == entries && doomed.running_now() == 0 && living.running_now() == 16
    })
    .await;
    gates.open();
    eventually(SOON, "all is handled", || living.distinct() == entries).await;
    all_acknowledged(&server, &stream).await;
    lives.shutdown().await.unwrap();
    assert_eq!(living.count(), entries, "what it ran itself ran once");
    assert!(living.overlapped().is_empty());
}

// ---- servers that die, freeze, and change roles -------------------------------------------------------------

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_killed_under_load_and_comes_back_costs_no_entry_and_no_second_handling() {
    const ENTRIES: usize = 4_000;
    let server = Server::start_with(Server::default_version(), &[("appendonly", "yes")]);
    let stream = stream_of(&server, "server-killed");
    fill(&server, &stream, ENTRIES);
    let recorder = Recorder::running(|call| async move {
        tokio::time::sleep(ms(1)).await;
        let number: usize = call.text().parse().unwrap();
        Ok(match call.attempt {
            1 if number.is_multiple_of(10) => Outcome::Retry,
            _ => Outcome::Ack,
        })
    });
    let tail = Subscription::tail(&*stream).block(ms(500));
    let supervisor = Supervisor::start(topology(&server.url()).subscribe(recorder.on(tail)))
        .await
        .unwrap();
    let heard = Heard::of(&supervisor);
    for kill in 1..=2 {
        recorder.reaches(kill * 1_000).await;
        server.kill();
        eventually(LATER, "it is away", || heard.count(is_away) == kill).await;
        server.restart();
        eventually(LATER, "it is back", || heard.count(is_back) == kill).await;
    }
    eventually(LATER, "all are handled", || recorder.distinct() >= ENTRIES).await;
    all_acknowledged(&server, &stream).await;
    supervisor.shutdown().await.unwrap();
    // An entry that was read and whose reply was lost counts as delivered: it may look retried.
    let copies = server.xlen(&stream) as usize - ENTRIES;
    assert!(
        (ENTRIES / 10 - 100..=ENTRIES / 10).contains(&copies),
        "{copies}"
    );
    assert_eq!(recorder.distinct(), ENTRIES + copies);
    assert_eq!(recorder.count(), ENTRIES + copies);
    heard.assert_nobody_crashed();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_frozen_for_thirty_seconds_is_waited_out_and_work_goes_on_by_itself() {
    const ENTRIES: usize = 1_000;
    let server = Server::start(Server::default_version());
    let stream = stream_of(&server, "frozen");
    let recorder = Recorder::running(|call| async move {
        tokio::time::sleep(ms(2)).await;
        let number: usize = call.text().parse().unwrap();
        Ok(match call.attempt {
            1 if number.is_multiple_of(4) => Outcome::RetryAfter(ms(100)),
            _ => Outcome::Ack,
        })
    });
    let tail = Subscription::tail(&*stream)
        .block(ms(500))
        .max_in_flight(200)
        .delayed_retry(DelayedRetry::durable(format!("{stream}.delayed")));
    let supervisor = Supervisor::start(topology(&server.url()).subscribe(recorder.on(tail)))
        .await
        .unwrap();
    let heard = Heard::of(&supervisor);
    fill(&server, &stream, ENTRIES);
    // It reads, settles and sweeps.
    recorder.reaches(ENTRIES / 4).await;
    server.freeze();
    tokio::time::sleep(Duration::from_secs(30)).await;
    server.thaw();
    fill(&server, &stream, ENTRIES);
    eventually(LATER, "all are handled", || {
        recorder.distinct() >= 2 * ENTRIES + 2 * ENTRIES / 4 - 200
    })
    .await;
    all_acknowledged(&server, &stream).await;
    eventually(LATER, "nothing is delayed", || {
        let set = format!("{stream}.delayed");
        server.command(&["ZCARD", &set]).as_int() == 0 && server.xpending_count(&stream, GROUP) == 0
    })
    .await;
    heard
        .wait("it is away", |event| is_away(event).then_some(()))
        .await;
    heard
        .wait("it is back", |event| is_back(event).then_some(()))
        .await;
    supervisor.shutdown().await.unwrap();
    // An entry that was read and whose reply was lost counts as delivered: it may look retried.
    let copies = server.xlen(&stream) as usize - 2 * ENTRIES;
    assert!((300..=500).contains(&copies), "{copies}");
    assert_eq!(recorder.count(), 2 * ENTRIES + copies);
    assert_eq!(recorder.distinct(), 2 * ENTRIES + copies);
    heard.assert_nobody_crashed();
}

/// B23: after a failover every write failed, for good.
#[tokio::test(flavor = "multi_thread")]
async fn b23_a_primary_that_becomes_a_replica_for_a_while_is_waited_out() {
    for version in Version::ALL {
        let server = Server::start(version);
        let stream = stream_of(&server, "readonly");
        let gate = Gate::closed();
        let recorder = Recorder::running({
            let gate = gate.clone();
            move |call| {
                let gate = gate.clone();
                async move {
                    gate.passed().await;
                    let number: usize = call.text().parse().unwrap();
                    Ok(match call.attempt {
                        1 if number.is_multiple_of(10) => Outcome::Retry,
                        _ => Outcome::Ack,
                    })
                }
            }
        });
        let tail = Subscription::tail(&*stream)
            .block(ms(500))
            .max_in_flight(100);
        let supervisor = Supervisor::start(topology(&server.url()).subscribe(recorder.on(tail)))
            .await
            .unwrap();
        let heard = Heard::of(&supervisor);
        fill(&server, &stream, 500);
        recorder.reaches(8).await;
        // Of a server that is not there, so that it keeps its data.
        let nobody = Server::start(version);
        let port = nobody.port().to_string();
        nobody.kill();
        server.command(&["REPLICAOF", "127.0.0.1", &port]);
        gate.open();
        heard
            .wait("it cannot work", |event| is_away(event).then_some(()))
            .await;
        server.command(&["REPLICAOF", "NO", "ONE"]);
        recorder.reaches(550).await;
        all_acknowledged(&server, &stream).await;
        heard
            .wait("it can again", |event| is_back(event).then_some(()))
            .await;
        supervisor.shutdown().await.unwrap();
        assert_eq!(
            (recorder.count(), recorder.distinct()),
            (550, 550),
            "{version}"
        );
        heard.assert_nobody_crashed();
    }
}

/// B24: LOADING was an error like any other.
#[tokio::test(flavor = "multi_thread")]
async fn b24_a_server_that_loads_its_data_is_waited_for() {
    let directives = [("appendonly", "yes"), ("key-load-delay", "1000")];
    let server = Server::start_with(Server::default_version(), &directives);
    let stream = stream_of(&server, "loading");
    let commands: Vec<Vec<String>> = (0..3_000)
        .map(|n| vec!["SET".to_owned(), format!("key-{n}"), "value".to_owned()])
        .collect();
    server.pipeline(&commands);
    let recorder = Recorder::acking();
    let tail = Subscription::tail(&*stream).block(ms(500));
    let supervisor = Supervisor::start(topology(&server.url()).subscribe(recorder.on(tail)))
        .await
        .unwrap();
    let heard = Heard::of(&supervisor);
    fill(&server, &stream, 100);
    recorder.reaches(100).await;
    server.kill();
    heard
        .wait("it is away", |event| is_away(event).then_some(()))
        .await;
    let port = server.port();
    let (server, was_loading) = std::thread::scope(|scope| {
        let restarting = scope.spawn(|| server.restart());
        let mut loading = false;
        while !restarting.is_finished() {
            let mut client = Client::connect(port, None).ok();
            let reply = client.as_mut().and_then(|it| it.command(&["PING"]).ok());
            loading |= reply.is_some_and(|it| {
                it.as_error()
                    .is_some_and(|text| text.starts_with("LOADING"))
            });
            std::thread::sleep(ms(5));
        }
        restarting.join().unwrap();
        (&server, loading)
    });
    assert!(was_loading, "it was ready at once: this test tests nothing");
    heard
        .wait("it is back", |event| is_back(event).then_some(()))
        .await;
    fill(server, &stream, 100);
    recorder.reaches(200).await;
    all_acknowledged(server, &stream).await;
    supervisor.shutdown().await.unwrap();
    assert_eq!((recorder.count(), recorder.distinct()), (200, 200));
    heard.assert_nobody_crashed();
}

/// B19: without a server, what was to be said to it filled the memory.
#[tokio::test(flavor = "multi_thread")]
async fn b19_while_the_server_is_away_no_more_verdicts_wait_than_there_is_room_for() {
    const ROOM: usize = 200;
    let server = Server::start_with(Server::default_version(), &[("appendonly", "yes")]);
    let stream = stream_of(&server, "b19");
    fill(&server, &stream, 5 * ROOM);
    let gate = Gate::closed();
    let recorder = Recorder::behind(&gate);
    let tail = Subscription::tail(&*stream)
        .block(ms(500))
        .max_in_flight(ROOM);
    let supervisor = Supervisor::start(topology(&server.url()).subscribe(recorder.on(tail)))
        .await
        .unwrap();
    let heard = Heard::of(&supervisor);
    let in_hand = || server.xpending_count(&stream, GROUP) as usize;
    eventually(SOON, "the room is used", || in_hand() > ROOM * 3 / 4).await;
    // A last read may be on its way.
    let mut held = 0;
    eventually(SOON, "nothing more is read", || {
        std::mem::replace(&mut held, in_hand()) == in_hand()
    })
    .await;
    server.kill();
    gate.open();
    heard
        .wait("it is away", |event| is_away(event).then_some(()))
        .await;
    eventually(SOON, "all that was read is handled", || {
        recorder.running_now() == 0 && recorder.count() >= held
    })
    .await;
    let status = supervisor.status().await.subscriptions.swap_remove(0);
    assert!(recorder.count() <= ROOM, "{}", recorder.count());
    assert!(status.in_flight <= ROOM, "{status:?}");
    assert_eq!((status.waiting, status.running), (0, 0));
    server.restart();
    eventually(LATER, "all is handled", || recorder.distinct() == 5 * ROOM).await;
    all_acknowledged(&server, &stream).await;
    supervisor.shutdown().await.unwrap();
    assert_eq!(recorder.count(), 5 * ROOM, "nothing was handled again");
    heard.assert_nobody_crashed();
}

/// B96: after a snapshot that failed every write was refused, and the workers stopped.
#[tokio::test(flavor = "multi_thread")]
async fn b96_writes_that_are_refused_after_a_failed_snapshot_are_waited_out() {
    let server = Server::start(Server::default_version());
    let stream = stream_of(&server, "b96");
    fill(&server, &stream, 500);
    let gate = Gate::closed();
    let passes = gate.clone();
    let recorder = Recorder::running(move |call| {
        let gate = passes.clone();
        async move {
            gate.passed().await;
            let number: usize = call.text().parse().unwrap();
            Ok(match call.attempt {
                1 if number % 10 == 9 => Outcome::Retry,
                _ => Outcome::Ack,
            })
        }
    });
    let tail = Subscription::tail(&*stream)
        .block(ms(500))
        .max_in_flight(100);
    let supervisor = Supervisor::start(topology(&server.url()).subscribe(recorder.on(tail)))
        .await
        .unwrap();
    let heard = Heard::of(&supervisor);
    recorder.reaches(8).await;
    let snapshot = |expected: &str| {
        server.command(&["BGSAVE"]);
        let what = format!("a snapshot that ends with {expected}");
        let ends_with = expected.to_owned();
        let server = &server;
        async move {
            eventually(SOON, &what, || {
                let info = server.info("persistence");
                info["rdb_bgsave_in_progress"] == "0" && info["rdb_last_bgsave_status"] == ends_with
            })
            .await;
        }
    };
    // A folder where the file should be.
    let name = server.command(&["CONFIG", "GET", "dbfilename"]);
    let file = server.dir().join(name.as_array()[1].as_str());
    std::fs::create_dir_all(file.join("in-the-way")).unwrap();
    server.command(&["CONFIG", "SET", "save", "3600 1"]);
    snapshot("err").await;
    let refused = server.command(&["SET", "key", "value"]);
    assert!(
        refused
            .as_error()
            .is_some_and(|text| text.starts_with("MISCONF"))
    );
    gate.open();
    let error = heard
        .wait("it is told", |event| match event {
            Event::ServerAway { error, .. } => Some(error.clone()),
            _ => None,
        })
        .await;
    assert!(error.contains("MISCONF"), "{error}");
    std::fs::remove_dir_all(&file).unwrap();
    snapshot("ok").await;
    recorder.reaches(550).await;
    all_acknowledged(&server, &stream).await;
    heard
        .wait("it is back", |event| is_back(event).then_some(()))
        .await;
    supervisor.shutdown().await.unwrap();
    assert_eq!((recorder.count(), recorder.distinct()), (550, 550));
    assert_eq!(server.xlen(&stream), 550);
    heard.assert_nobody_crashed();
}

// ---- links that break ------------------------------------------------------------------------------------

/// B18: the client did not come back after a cut.
#[tokio::test(flavor = "multi_thread")]
async fn b18_links_that_are_cut_again_and_again_cost_no_entry_and_no_second_handling() {
    const ENTRIES: usize = 1_000;
    let server = Server::start(Server::default_version());
    let proxy = server.proxy();
    let stream = stream_of(&server, "b18");
    let recorder = Recorder::answering(|call| {
        let number: usize = call.text().parse().unwrap();
        Ok(match call.attempt {
            1 if number.is_multiple_of(10) => Outcome::Retry,
            _ => Outcome::Ack,
        })
    });
    let tail = Subscription::tail(&*stream).block(ms(500));
    let supervisor = Supervisor::start(topology(&proxy.url()).subscribe(recorder.on(tail)))
        .await
        .unwrap();
    let heard = Heard::of(&supervisor);
    let adding = std::thread::spawn({
        let (mut client, stream) = (server.connect(), stream.clone());
        move || {
            for n in 0..ENTRIES {
                let body = n.to_string();
                client
                    .command(&["XADD", &stream, "*", "_payload", &body])
                    .unwrap();
                std::thread::sleep(ms(5));
            }
        }
    });
    while !adding.is_finished() {
        tokio::time::sleep(ms(200)).await;
        proxy.cut_all();
    }
    adding.join().unwrap();
    eventually(LATER, "all are handled", || recorder.distinct() >= ENTRIES).await;
    all_acknowledged(&server, &stream).await;
    supervisor.shutdown().await.unwrap();
    // An entry that was read and whose reply was lost counts as delivered: it may look retried.
    let copies = server.xlen(&stream) as usize - ENTRIES;
    assert!(copies <= ENTRIES / 10, "{copies}");
    assert_eq!(recorder.distinct(), ENTRIES + copies);
    assert_eq!(recorder.count(), ENTRIES + copies);
    heard.assert_nobody_crashed();
}

#[tokio::test(flavor = "multi_thread")]
async fn half_open_links_are_noticed_and_made_anew_and_what_went_into_them_is_handled() {
    let server = Server::start(Server::default_version());
    let proxy = server.proxy();
    let stream = stream_of(&server, "half-open");
    let recorder = Recorder::acking();
    let tail = Subscription::tail(&*stream).block(ms(500));
    let supervisor = Supervisor::start(topology(&proxy.url()).subscribe(recorder.on(tail)))
        .await
        .unwrap();
    let heard = Heard::of(&supervisor);
    fill(&server, &stream, 10);
    recorder.reaches(10).await;
    all_acknowledged(&server, &stream).await;
    let before = proxy.accepted();
    proxy.half_open();
    // The first goes to the read that waits on the old link, and nobody hears of it.
    fill(&server, &stream, 10);
    recorder.reaches(20).await;
    all_acknowledged(&server, &stream).await;
    assert!(proxy.accepted() > before);
    fill(&server, &stream, 10);
    recorder.reaches(30).await;
    all_acknowledged(&server, &stream).await;
    supervisor.shutdown().await.unwrap();
    assert_eq!((recorder.count(), recorder.distinct()), (30, 30));
    heard.assert_nobody_crashed();
}

/// B11: what was added while nobody was connected was never delivered.
#[tokio::test(flavor = "multi_thread")]
async fn b11_what_is_added_while_the_process_or_the_link_is_down_is_delivered() {
    let server = Server::start(Server::default_version());
    let proxy = server.proxy();
    let stream = unique("b11");
    let recorder = Recorder::acking();
    // The group begins with what is added from its making on, and is not made anew.
    let tail = Subscription::tail(&*stream).block(ms(200));
    let topology = topology(&proxy.url()).subscribe(recorder.on(tail));
    let first = Supervisor::start(topology.clone()).await.unwrap();
    fill(&server, &stream, 5);
    recorder.reaches(5).await;
    first.shutdown().await.unwrap();
    fill(&server, &stream, 50);
    let second = Supervisor::start(topology).await.unwrap();
    let heard = Heard::of(&second);
    recorder.reaches(55).await;

    proxy.refuse();
    proxy.cut_all();
    heard
        .wait("it is away", |event| is_away(event).then_some(()))
        .await;
    fill(&server, &stream, 50);
    proxy.accept();
    recorder.reaches(105).await;
    all_acknowledged(&server, &stream).await;
    second.shutdown().await.unwrap();
    assert_eq!((recorder.count(), recorder.distinct()), (105, 105));
}

/// B123: a sender failed because the settler had too much to do.
#[tokio::test(flavor = "multi_thread")]
async fn b123_with_a_slow_server_handlers_and_readers_wait_and_nobody_fails() {
    const ENTRIES: usize = 400;
    const ROOM: usize = 200;
    // Of the two seconds of the case less than one: a link that says nothing for 1.5 s longer than its
    // read blocks counts as dead.
    let latency = ms(600);
    for mode in [Mode::Tail, Mode::Claiming] {
        let server = Server::start(Version::Redis8);
        let proxy = server.proxy();
        let stream = stream_of(&server, "b123");
        let recorder = Recorder::answering(|call| {
            let number: usize = call.text().parse().unwrap();
            Ok(match call.attempt {
                1 if number % 10 == 9 => Outcome::Retry,
                _ => Outcome::Ack,
            })
        });
        let draft = match mode {
            Mode::Tail => Subscription::tail(&*stream),
            _ => Subscription::claiming(&*stream, Duration::from_secs(3600)),
        };
        let draft = draft.block(ms(500)).max_in_flight(ROOM);
        let supervisor = Supervisor::start(topology(&proxy.url()).subscribe(recorder.on(draft)))
            .await
            .unwrap();
        let heard = Heard::of(&supervisor);
        // From the first ones it is known how large they are.
        fill(&server, &stream, 5);
        recorder.reaches(5).await;
        all_acknowledged(&server, &stream).await;

        let most = Most::pending(&server, &stream, None);
        proxy.delay(latency);
        let began = Instant::now();
        fill(&server, &stream, ENTRIES);
        let copies = ENTRIES / 10;
        eventually(LATER, "all are handled", || {
            recorder.count() >= 5 + ENTRIES + copies
        })
        .await;
        all_acknowledged(&server, &stream).await;
        let slow = began.elapsed();
        // What was handled and not stored counts as in hand, so the handlers could not run ahead.
        let most = most.seen() as usize;
        assert!((ROOM / 2..=ROOM).contains(&most), "{mode:?}: {most}");
        assert!(
            slow >= latency * (ENTRIES / ROOM) as u32,
            "{mode:?}: {slow:?}"
        );

        proxy.delay(Duration::ZERO);
        let began = Instant::now();
        fill(&server, &stream, ENTRIES);
        let all = 5 + 2 * (ENTRIES + copies);
        eventually(LATER, "all are handled", || recorder.count() >= all).await;
        all_acknowledged(&server, &stream).await;
        let fast = began.elapsed();
        // Replies of before may still have been on their way.
        assert!(fast < slow, "{mode:?}: {fast:?} after {slow:?}");
        supervisor.shutdown().await.unwrap();
        assert_eq!((recorder.count(), recorder.distinct()), (all, all));
        heard.assert_nobody_crashed();
        let trouble = heard.count(|event| is_away(event) || matches!(event, Event::Blocked { .. }));
        assert_eq!(trouble, 0, "{mode:?}");
    }
}

// ---- groups and streams that disappear ---------------------------------------------------------------------

/// B1: after the group was gone both loops failed for ever.
#[tokio::test(flavor = "multi_thread")]
async fn b1_a_destroyed_group_is_made_again_for_every_mode_and_what_runs_stays_in_hand() {
    for version in Version::ALL {
        let server = Server::start(version);
        let stream = stream_of(&server, "b1");
        let gate = Gate::closed();
        let recorder = Recorder::running({
            let gate = gate.clone();
            move |call| {
                let gate = gate.clone();
                async move {
                    if call.text() == "long" {
                        gate.passed().await;
                    }
                    Ok(Outcome::Ack)
                }
            }
        });
        let reclaimed = Recorder::acking();
        let min_idle = Duration::from_secs(1);
        let supervisor = Supervisor::start(
            topology(&server.url())
                .subscribe(recorder.on(Subscription::tail(&*stream).block(ms(500))))
                .subscribe(reclaimed.on(Subscription::reclaim(&*stream, min_idle).block(ms(100)))),
        )
        .await
        .unwrap();
        let heard = Heard::of(&supervisor);
        let handled = fill(&server, &stream, 10);
        recorder.reaches(10).await;
        let long = server.xadd_many(&stream, (0..4).map(|_| vec![("_payload", "long")]));
        recorder.reaches(14).await;
        eventually(SOON, "only the long ones run", || {
            server.xpending_count(&stream, GROUP) == 4
        })
        .await;
        server.command(&["XGROUP", "DESTROY", &stream, GROUP]);
        heard
            .wait("the group is made again", |event| match event {
                Event::GroupRemade { .. } => Some(()),
                _ => None,
            })
            .await;
        eventually(SOON, "what runs is in hand again", || {
            server.xpending_count(&stream, GROUP) == 4
        })
        .await;
        fill(&server, &stream, 3);
        recorder.reaches(17).await;
        // The other mode is alive as well.
        let claim = ["XCLAIM", &stream, GROUP, "dead", "0", &handled[0], "FORCE"];
        server.command(&claim);
        reclaimed.reaches(1).await;
        assert_eq!(reclaimed.ids(), [&*handled[0]], "{version}");
        gate.open();
        all_acknowledged(&server, &stream).await;
        supervisor.shutdown().await.unwrap();
        assert_eq!(
            (recorder.count(), recorder.distinct()),
            (17, 17),
            "{version}"
        );
        assert!(long.iter().all(|id| recorder.calls_of(id).len() == 1));
        heard.assert_nobody_crashed();
    }
}

/// B2: what could not be made again was tried for in a loop, with a line in the log for each try.
#[tokio::test]
async fn b2_groups_that_may_not_be_made_again_are_tried_for_calmly_and_told_of_once() {
    const SUBSCRIPTIONS: usize = 20;
    let (logged, _collecting) = Logged::collect();
    let server = Server::start(Server::default_version());
    server.command(&[
        "ACL", "SETUSER", "app", "on", ">secret", "~*", "&*", "+@all",
    ]);
    let recorder = Recorder::acking();
    let mut topology = topology(&format!("redis://app:secret@127.0.0.1:{}", server.port()));
    let streams: Vec<String> = (0..SUBSCRIPTIONS)
        .map(|_| stream_of(&server, "b2"))
        .collect();
    for stream in &streams {
        topology = topology.subscribe(recorder.on(Subscription::tail(&**stream).block(ms(200))));
    }
    let supervisor = Supervisor::start(topology).await.unwrap();
    let heard = Heard::of(&supervisor);
    for stream in &streams {
        fill(&server, stream, 1);
    }
    recorder.reaches(SUBSCRIPTIONS).await;
    server.command(&["ACL", "SETUSER", "app", "-xgroup"]);
    server.command(&["FLUSHALL"]);
    let blocked = || heard.count(|event| matches!(event, Event::Blocked { .. }));
    eventually(SOON, "all are blocked", || blocked() >= SUBSCRIPTIONS).await;
    let commands = || server.commandstat("xreadgroup") + server.commandstat("evalsha");
    let (before, began) = (commands(), Instant::now());
    // A loop would show in this time.
    eventually(SOON, "five seconds", || began.elapsed() > 25 * ms(200)).await;
    let tries = commands() - before;
    // Pauses that double from 50 ms come to about six tries of two commands each.
    assert!(tries <= 20 * SUBSCRIPTIONS as u64, "{tries} within 5 s");
    assert_eq!(blocked(), SUBSCRIPTIONS, "each is told of once");
    assert_eq!(logged.lines(&["NOPERM"]).len(), SUBSCRIPTIONS);

    server.command(&["ACL", "SETUSER", "app", "+xgroup"]);
    for stream in &streams {
        fill(&server, stream, 1);
    }
    eventually(LATER, "all are handled", || {
        recorder.count() == 2 * SUBSCRIPTIONS
    })
    .await;
    for stream in &streams {
        all_acknowledged(&server, stream).await;
    }
    supervisor.shutdown().await.unwrap();
    heard.assert_nobody_crashed();
}

/// B9: a policy that evicts keys took a stream with its groups away.
#[tokio::test]
async fn b9_a_policy_that_evicts_streams_is_warned_of_and_an_evicted_stream_is_read_again() {
    let (logged, _collecting) = Logged::collect();
    let directives = [("maxmemory-policy", "allkeys-lru")];
    let server = Server::start_with(Server::default_version(), &directives);
    let stream = stream_of(&server, "b9");
    let gate = Gate::closed();
    let recorder = Recorder::behind(&gate);
    let tail = Subscription::tail(&*stream).block(ms(200));
    let supervisor = Supervisor::start(topology(&server.url()).subscribe(recorder.on(tail)))
        .await
        .unwrap();
    let heard = Heard::of(&supervisor);
    assert_eq!(logged.lines(&["WARN", "allkeys-lru", "evict"]).len(), 1);
    fill(&server, &stream, 4);
    recorder.reaches(4).await;
    server.command(&["CONFIG", "SET", "maxmemory", "1"]);
    eventually(SOON, "the stream is evicted", || {
        server.command(&["SET", "key", "value"]);
        server.command(&["EXISTS", &stream]).as_int() == 0
    })
    .await;
    server.command(&["CONFIG", "SET", "maxmemory", "0"]);
    heard
        .wait("it is told", |event| {
            matches!(event, Event::GroupRemade { .. }).then_some(())
        })
        .await;
    gate.open();
    eventually(SOON, "what ran has ended", || recorder.running_now() == 0).await;
    fill(&server, &stream, 10);
    recorder.reaches(14).await;
    all_acknowledged(&server, &stream).await;
    supervisor.shutdown().await.unwrap();
    assert_eq!((recorder.count(), recorder.distinct()), (14, 14));
    heard.assert_nobody_crashed();
}

/// B7: whatever ended a blocked read ended the loop. B5: on older servers nothing ends it.
#[tokio::test(flavor = "multi_thread")]
async fn b5_b7_nothing_that_happens_to_a_blocked_read_ends_the_reading() {
    for version in Version::ALL {
        let server = Server::start(version);
        let stream = stream_of(&server, "b7");
        let recorder = Recorder::acking();
        let tail = Subscription::tail(&*stream).block(Duration::from_secs(1));
        let supervisor = Supervisor::start(topology(&server.url()).subscribe(recorder.on(tail)))
            .await
            .unwrap();
        let heard = Heard::of(&supervisor);
        let mut expected = 0;
        for fault in [
            "nothing",
            "UNBLOCK TIMEOUT",
            "UNBLOCK ERROR",
            "DEL",
            "RENAME",
            "FLUSHALL",
        ] {
            let id = eventually_some(SOON, "a blocked read", || blocked_reader(&server)).await;
            let other = unique("elsewhere");
            match fault {
                "nothing" => Reply::Nil,
                "UNBLOCK TIMEOUT" => server.command(&["CLIENT", "UNBLOCK", &id, "TIMEOUT"]),
                "UNBLOCK ERROR" => server.command(&["CLIENT", "UNBLOCK", &id, "ERROR"]),
                "DEL" => server.command(&["DEL", &stream]),
                "RENAME" => server.command(&["RENAME", &stream, &other]),
                _ => server.command(&["FLUSHALL"]),
            };
            fill(&server, &stream, 3);
            expected += 3;
            recorder.reaches(expected).await;
            eventually(SOON, "they are acknowledged", || {
                let groups = server.command(&["XPENDING", &stream, GROUP]);
                groups.as_error().is_none() && groups.as_array()[0].as_int() == 0
            })
            .await;
            assert_eq!(recorder.count(), expected, "{version}: {fault}");
        }
        heard.assert_nobody_crashed();
        supervisor.shutdown().await.unwrap();
        let reads = server.commandstat("xreadgroup");
        assert!(reads < 500, "{version}: {reads} reads");
    }
}

/// The id of a reader's connection that waits in a read.
fn blocked_reader(server: &Server) -> Option<String> {
    let connections = server.client_list();
    let line = connections
        .iter()
        .find(|line| line.contains("cmd=xreadgroup") && line.contains(" flags=b "))?;
    let id = line.split(' ').next()?.strip_prefix("id=")?;
    Some(id.to_owned())
}

#[tokio::test(flavor = "multi_thread")]
async fn b7_b92_a_stream_that_is_overwritten_blocks_its_subscription_and_no_other() {
    let server = Server::start(Server::default_version());
    let (stream, other) = (
        stream_of(&server, "overwritten"),
        stream_of(&server, "other"),
    );
    let recorder = Recorder::acking();
    let supervisor = Supervisor::start(
        topology(&server.url())
            .subscribe(recorder.on(Subscription::tail(&*stream).named("it").block(ms(500))))
            .subscribe(recorder.on(Subscription::tail(&*other).named("other").block(ms(500)))),
    )
    .await
    .unwrap();
    let heard = Heard::of(&supervisor);
    fill(&server, &stream, 1);
    recorder.reaches(1).await;
    server.command(&["SET", &stream, "text"]);
    let error = heard
        .wait("it is blocked", |event| match event {
            Event::Blocked {
                subscription,
                error,
            } if **subscription == *"it" => Some(error.clone()),
            _ => None,
        })
        .await;
    assert!(error.contains("WRONGTYPE"), "{error}");
    fill(&server, &other, 100);
    recorder.reaches(101).await;
    all_acknowledged(&server, &other).await;
    // A stop does not wait for it.
    supervisor.shutdown().await.unwrap();
    heard.assert_nobody_crashed();
    assert_eq!(
        heard.count(|event| matches!(event, Event::Blocked { .. })),
        1
    );
}

// ---- handlers that hang ---------------------------------------------------------------------------------

/// What handlers block their threads with, until the test has ended at the latest.
#[derive(Clone, Default)]
struct Blockade(Arc<AtomicBool>);

impl Blockade {
    fn stand(&self) {
        while !self.0.load(Ordering::SeqCst) {
            std::thread::sleep(ms(5));
        }
    }

    fn end(&self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

struct EndOf(Blockade);

impl Drop for EndOf {
    fn drop(&mut self) {
        self.0.end();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handler_that_hangs_holds_up_nothing_but_its_own_entry() {
    let server = Server::start(Server::default_version());
    let stream = stream_of(&server, "holds-up");
    let recorder = Recorder::running(|call| async move {
        if call.text() == "hang" {
            std::future::pending::<()>().await;
        }
        Ok(Outcome::Ack)
    });
    let tail = Subscription::tail(&*stream).workers(2);
    let supervisor = Supervisor::start(
        topology(&server.url())
            .shutdown_timeout(ms(500))
            .subscribe(recorder.on(tail)),
    )
    .await
    .unwrap();
    // Handlers are known to be fast, so a worker takes many at a time.
    fill(&server, &stream, 2_000);
    recorder.reaches(2_000).await;
    let bodies = (0..1_000).map(|n| if n == 10 { "hang" } else { "run" });
    server.xadd_many(&stream, bodies.map(|body| vec![("_payload", body)]));
    recorder.reaches(3_000).await;
    eventually(SOON, "all others are acknowledged", || {
        server.xpending_count(&stream, GROUP) == 1
    })
    .await;
    let report = supervisor.shutdown().await.unwrap();
    assert_eq!((report.left_running.len(), report.given_back), (1, 0));
}

/// B49: what hangs was kept fresh for ever.
#[tokio::test(flavor = "multi_thread")]
async fn b49_a_handler_past_its_deadline_is_ended_and_its_entry_retried_up_to_the_cap() {
    let server = Server::start(Server::default_version());
    let stream = stream_of(&server, "b49");
    let dead = format!("{stream}.dead");
    let recorder = Recorder::running(|call| async move {
        let hangs = match call.text() {
            "for ever" => true,
            "once" => call.attempt == 1,
            _ => false,
        };
        if hangs {
            std::future::pending::<()>().await;
        }
        Ok(Outcome::Ack)
    });
    let retry = RetryPolicy::exponential(ms(10)).max_attempts(3);
    let tail = Subscription::tail(&*stream)
        .workers(2)
        .handler_timeout(ms(300))
        .retry(retry.then_dead_letter())
        .dead_letter(&*dead);
    let supervisor = Supervisor::start(topology(&server.url()).subscribe(recorder.on(tail)))
        .await
        .unwrap();
    let heard = Heard::of(&supervisor);
    for body in ["once", "for ever", "good", "good"] {
        server.xadd(&stream, &[("_payload", body)]);
    }
    eventually(SOON, "it is dead", || server.xlen(&dead) == 1).await;
    all_acknowledged(&server, &stream).await;
    let of = |body: &str| -> Vec<u64> {
        let calls = recorder.calls().into_iter();
        calls
            .filter(|call| call.text() == body)
            .map(|call| call.attempt)
            .collect()
    };
    assert_eq!(of("once"), [1, 2]);
    assert_eq!(of("for ever"), [1, 2, 3]);
    assert_eq!(of("good"), [1, 1]);
    assert_eq!(recorder.running_now(), 0);
    let crashes = heard.pick(|event| match event {
        Event::Crashed { error, .. } => Some(error.clone()),
        _ => None,
    });
    assert_eq!(crashes.len(), 4);
    assert!(
        crashes.iter().all(|error| error.contains("deadline")),
        "{crashes:?}"
    );
    supervisor.shutdown().await.unwrap();
}

/// B49, for code that nobody can interrupt.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn b49_a_handler_that_blocks_its_thread_past_its_deadline_loses_its_entry_to_others() {
    let server = Server::start(Server::default_version());
    let stream = stream_of(&server, "b49-blocks");
    let blockade = Blockade::default();
    let _end = EndOf(blockade.clone());
    let recorder = Recorder::running({
        let blockade = blockade.clone();
        move |call| {
            std::future::ready(Ok(match call.text() {
                "block" => {
                    blockade.stand();
                    Outcome::Retry
                }
                _ => Outcome::Ack,
            }))
        }
    });
    let here = Recorder::acking();
    let tail = Subscription::tail(&*stream)
        .workers(1)
        .handler_timeout(ms(300))
        .dead_letter(format!("{stream}.dead"));
    // Its own process looks more often than the other, and must not keep the entry from it.
    let own = Subscription::reclaim(&*stream, ms(300)).block(ms(50));
    let supervisor = Supervisor::start(
        topology(&server.url())
            .shutdown_timeout(Duration::from_secs(3))
            .subscribe(recorder.on(tail))
            .subscribe(here.on(own)),
    )
    .await
    .unwrap();
    let heard = Heard::of(&supervisor);
    let blocks = server.xadd(&stream, &[("_payload", "block")]);
    let abandoned = heard
        .wait("it is given up", |event| match event {
            Event::Abandoned { id, .. } => Some(id.to_string()),
            _ => None,
        })
        .await;
    assert_eq!(abandoned, blocks);
    // Its worker was replaced.
    let next = server.xadd(&stream, &[("_payload", "good")]);
    eventually(SOON, "another entry is handled", || {
        !recorder.calls_of(&next).is_empty()
    })
    .await;

    let there = Recorder::acking();
    let reclaim = Subscription::reclaim(&*stream, Duration::from_secs(2)).block(ms(50));
    let other = Supervisor::start(topology(&server.url()).subscribe(there.on(reclaim)))
        .await
        .unwrap();
    eventually(SOON, "the other process has it", || {
        !there.calls_of(&blocks).is_empty()
    })
    .await;
    assert_eq!(there.calls_of(&blocks)[0].attempt, 2);
    assert!(
        here.calls_of(&blocks).is_empty(),
        "it ran twice at a time here"
    );
    blockade.end();
    eventually(SOON, "the call ends", || recorder.running_now() == 0).await;
    // What it said is not heard: no copy is made of what is not ours.
    let last = server.xadd(&stream, &[("_payload", "good")]);
    eventually(SOON, "a later entry is handled", || {
        !recorder.calls_of(&last).is_empty()
    })
    .await;
    supervisor.shutdown().await.unwrap();
    other.shutdown().await.unwrap();
    assert_eq!(server.xlen(&stream), 3);
    assert_eq!((recorder.count(), there.count(), here.count()), (3, 1, 0));
}

/// Has everything wait for the gate, and then asks for one retry.
fn retrying_behind(gate: &Gate) -> Recorder {
    let gate = gate.clone();
    Recorder::running(move |call| {
        let gate = gate.clone();
        async move {
            gate.passed().await;
            Ok(if call.attempt == 1 {
                Outcome::Retry
            } else {
                Outcome::Ack
            })
        }
    })
}

fn is_remade(event: &Event) -> Option<()> {
    matches!(event, Event::GroupRemade { .. }).then_some(())
}

/// A reader that has no room does not read, and a verdict that makes a copy finds no group: nobody would make
/// it again.
#[tokio::test(flavor = "multi_thread")]
async fn a_group_is_made_again_when_all_that_is_in_hand_waits_for_it() {
    let server = Server::start(Version::Redis70);
    let stream = stream_of(&server, "no-room");
    let gate = Gate::closed();
    let recorder = retrying_behind(&gate);
    let tail = Subscription::tail(&*stream).max_in_flight(1).block(ms(500));
    let supervisor = Supervisor::start(topology(&server.url()).subscribe(recorder.on(tail)))
        .await
        .unwrap();
    let heard = Heard::of(&supervisor);
    fill(&server, &stream, 2);
    recorder.reaches(1).await;
    server.command(&["XGROUP", "DESTROY", &stream, GROUP]);
    gate.open();
    heard.wait("the group is made again", is_remade).await;
    // Both, and a copy of each.
    recorder.reaches(4).await;
    all_acknowledged(&server, &stream).await;
    supervisor.shutdown().await.unwrap();
    assert_eq!((recorder.count(), recorder.distinct()), (4, 4));
    heard.assert_nobody_crashed();
}

/// A group that was made again and in which nothing could be registered has to be looked after once more:
/// the next read finds nothing wrong with it, and a verdict that makes a copy finds nothing pending.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_in_hand_is_registered_in_a_group_that_was_made_again_however_often_that_fails() {
    let server = Server::start(Version::Redis70);
    let proxy = FaultProxy::start(server.port());
    let stream = stream_of(&server, "registered");
    let gate = Gate::closed();
    let recorder = retrying_behind(&gate);
    let tail = Subscription::tail(&*stream).block(ms(500));
    let supervisor = Supervisor::start(topology(&proxy.url()).subscribe(recorder.on(tail)))
        .await
        .unwrap();
    let heard = Heard::of(&supervisor);
    fill(&server, &stream, 1);
    recorder.reaches(1).await;
    // The script that registers, as it is sent when the server does not know it, and as often as the client
    // sends it by itself.
    let lost: Vec<_> = (0..4)
        .map(|_| proxy.drop_next_request("EVAL anew"))
        .collect();
    server.command(&["XGROUP", "DESTROY", &stream, GROUP]);
    eventually(SOON, "it is lost", || lost.iter().all(Fault::happened)).await;
    eventually(LATER, "what runs is in hand again", || {
        server.xpending_count(&stream, GROUP) == 1
    })
    .await;
    heard.wait("the group is made again", is_remade).await;
    gate.open();
    recorder.reaches(2).await;
    all_acknowledged(&server, &stream).await;
    supervisor.shutdown().await.unwrap();
    assert_eq!((recorder.count(), recorder.distinct()), (2, 2));
    heard.assert_nobody_crashed();
}

/// Deleted and made anew in one step while nobody was reading: no reply says so. What was known of the old
/// stream must not decide what becomes of the new one.
#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_was_made_anew_group_and_all_is_noticed_without_an_error() {
    for version in Version::ALL {
        let server = Server::start(version);
        let stream = stream_of(&server, "anew");
        let gate = Gate::closed();
        let recorder = Recorder::behind(&gate);
        let tail = Subscription::tail(&*stream).max_in_flight(1).block(ms(200));
        let supervisor = Supervisor::start(topology(&server.url()).subscribe(recorder.on(tail)))
            .await
            .unwrap();
        let heard = Heard::of(&supervisor);
        fill(&server, &stream, 1);
        recorder.reaches(1).await;
        let anew = "redis.call('DEL', KEYS[1]) \
                    redis.call('XADD', KEYS[1], '5-1', '_payload', 'new') \
                    redis.call('XGROUP', 'CREATE', KEYS[1], ARGV[1], '0')";
        let reply = server.command(&["EVAL", anew, "1", &stream, GROUP]);
        assert!(reply.as_error().is_none(), "{reply:?}");
        gate.open();
        heard.wait("it is noticed", is_remade).await;
        recorder.reaches(2).await;
        all_acknowledged(&server, &stream).await;
        // This the reader is told. It knows where the new stream stood, and replays nothing of it.
        server.command(&["XGROUP", "DESTROY", &stream, GROUP]);
        let remade = || heard.count(|event| is_remade(event).is_some());
        eventually(SOON, "the group is made again", || remade() == 2).await;
        server.xadd(&stream, &[("_payload", "newer")]);
        recorder.reaches(3).await;
        all_acknowledged(&server, &stream).await;
        supervisor.shutdown().await.unwrap();
        assert_eq!((recorder.count(), remade()), (3, 2), "{version}");
        heard.assert_nobody_crashed();
    }
}
