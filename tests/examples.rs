//! The examples are programs that work: each is run as a user runs it, and the README shows one of
//! them word for word.

mod support;

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use support::*;

const SOON: Duration = Duration::from_secs(10);

#[test]
fn the_earthquakes_are_all_accounted_for() {
    let server = Server::start(Server::default_version());
    let mut program = Program::start("earthquakes", &server);
    let status = program.ends_within(Duration::from_secs(90));
    let (output, errors) = program.said();

    assert!(status.success(), "{status}\n{output}\n{errors}");
    assert_eq!(output.lines().last(), Some("lost: 0"), "{output}");
    assert_eq!(errors, "", "nothing is wrong, so nothing is said of it");
    leaves_no_key(&server);
}

#[tokio::test]
async fn an_interrupted_run_leaves_nothing_behind() {
    let server = Server::start(Server::default_version());
    let mut program = Program::start("earthquakes", &server);
    // The tree runs, and the alerts that are delayed for a second keep it running.
    eventually(SOON, "its tree and its keys", || {
        server.client_list().len() > 1 && !server.command(&["KEYS", "*"]).as_array().is_empty()
    })
    .await;
    program.interrupt();
    let status = program.ends_within(SOON);
    let (output, errors) = program.said();

    assert_eq!(status.code(), Some(130), "{output}\n{errors}");
    assert!(errors.contains("interrupted"), "{errors}");
    leaves_no_key(&server);
    eventually(SOON, "no connection left", || {
        server.client_list().is_empty()
    })
    .await;
}

#[tokio::test]
async fn the_quickstart_acknowledges_orders_and_stops_on_ctrl_c() {
    let server = Server::start(Server::default_version());
    let mut program = Program::start("quickstart", &server);
    // The group begins with what is added after it.
    eventually(SOON, "the group", || {
        matches!(server.command(&["XINFO", "GROUPS", "orders"]), Reply::Array(groups) if groups.len() == 1)
    })
    .await;
    server.xadd("orders", &[("_payload", r#"{"id": 7}"#)]);
    let last = server.xadd("orders", &[("_payload", r#"{"id": 8}"#)]);
    eventually(SOON, "both orders read and acknowledged", || {
        last_delivered(&server) == last && server.xpending_count("orders", "workers") == 0
    })
    .await;

    program.interrupt();
    let status = program.ends_within(SOON);
    let (output, errors) = program.said();
    assert!(status.success(), "{status}\n{output}\n{errors}");
    assert_eq!(output.matches("fulfilled").count(), 2, "{output}");
    assert_eq!(server.xpending_count("orders", "workers"), 0);
    assert_eq!(server.xlen("orders"), 2);
    let consumers = server.command(&["XINFO", "CONSUMERS", "orders", "workers"]);
    assert!(consumers.as_array().is_empty(), "{consumers:?}");
}

#[test]
fn an_embedded_branch_that_fails_is_mended_by_its_parent_and_books_every_order() {
    let server = Server::start(Server::default_version());
    let mut program = Program::start("embedded", &server);
    let status = program.ends_within(Duration::from_secs(90));
    let (output, errors) = program.said();

    assert!(status.success(), "{status}\n{output}\n{errors}");
    assert_eq!(output.matches("finds no database").count(), 3, "{output}");
    told_in_this_order(
        &output,
        &[
            "100 orders published",
            "the application runs",
            "finds no database",
            "the branch has failed: handler 0 of `orders` failed more than 2 times",
            "starts the branch again",
            "all orders are booked",
            "0 given back, 0 left running, 0 verdicts not stored",
            "100 lines in the database, 100 orders, 5050 cents; 0 pending",
            "lost: 0",
        ],
    );
    // The escalation, and nothing else.
    assert_eq!(errors.lines().count(), 1, "{errors}");
    assert!(errors.contains("is given up"), "{errors}");
    leaves_no_key(&server);
}

#[test]
fn fresh_and_left_behind_entries_come_through_one_claiming_subscription() {
    let server = Server::start(Version::Redis8);
    let output = claiming(&server);
    told_in_this_order(&output, &["one claiming subscription reads both", "order"]);
    assert!(!output.contains("refused"), "{output}");
}

#[test]
fn where_claiming_is_refused_a_tail_and_a_reclaim_do_the_same() {
    for (version, named) in [(Version::Redis70, "Redis 7.0"), (Version::Valkey, "Valkey")] {
        let server = Server::start(version);
        let output = claiming(&server);
        told_in_this_order(
            &output,
            &[
                &format!("claiming is refused: {named}"),
                "needs Redis 8.4 or later",
                "a tail and a reclaim subscription run instead",
                "order",
            ],
        );
    }
}

#[test]
fn the_batches_are_stored_once_in_spite_of_a_panic() {
    let output = ends_well_and_leaves_nothing("batches");
    for line in [
        "a worker panics after the commit, on purpose",
        "rows stored:          9990",
        "dead letters:           10",
    ] {
        assert!(output.lines().any(|it| it == line), "{line}\n{output}");
    }
    let last = output.lines().last();
    assert_eq!(last, Some("lost: 0, stored twice: 0"), "{output}");
}

#[test]
fn the_ledger_is_right_in_spite_of_a_panic_and_a_frozen_account() {
    let output = ends_well_and_leaves_nothing("ledger");
    for line in [
        "  acct-7 is frozen",
        "  an actor panics after it has booked a payment, on purpose",
        "  payment 350 had been booked already: acknowledged",
        "balance of acct-7 while it is frozen: 768.80",
        "  acct-7     1496.69",
        "stopped: 0 given back, 0 left running, 0 verdicts not stored",
    ] {
        assert!(output.lines().any(|it| it == line), "{line}\n{output}");
    }
    let last = output.lines().last();
    assert_eq!(last, Some("every balance is right"), "{output}");
}

/// Runs an example that ends by itself, and returns what it said.
#[track_caller]
fn ends_well_and_leaves_nothing(example: &str) -> String {
    let server = Server::start(Server::default_version());
    let mut program = Program::start(example, &server);
    let status = program.ends_within(Duration::from_secs(90));
    let (output, errors) = program.said();
    assert!(status.success(), "{status}\n{output}\n{errors}");
    leaves_no_key(&server);
    output
}

/// Runs the example and returns what it said, in which ten orders are handled, each once.
#[track_caller]
fn claiming(server: &Server) -> String {
    let mut program = Program::start("claiming", server);
    let status = program.ends_within(Duration::from_secs(90));
    let (output, errors) = program.said();
    assert!(status.success(), "{status}\n{output}\n{errors}");
    assert_eq!(errors, "", "nothing is wrong, so nothing is said of it");
    let mut handled: Vec<(u64, bool, u64, bool)> = output.lines().filter_map(order).collect();
    handled.sort_unstable();
    let expected = (1..=10).map(|id| match id {
        1..=2 => (id, false, 3, true),
        3..=5 => (id, false, 2, true),
        _ => (id, true, 1, false),
    });
    assert_eq!(handled, expected.collect::<Vec<_>>(), "{output}");
    let last = "5 fresh and 5 left behind were handled; 0 pending, 0 verdicts not stored";
    assert_eq!(output.lines().last(), Some(last), "{output}");
    leaves_no_key(server);
    output
}

/// A line that tells of an order: its number, whether it is fresh, which delivery it is, and whether it
/// was idle for a second before.
fn order(line: &str) -> Option<(u64, bool, u64, bool)> {
    let after = |word: &str| {
        let (_, rest) = line.split_once(word)?;
        rest.split_whitespace().next()
    };
    let idle: f64 = after("idle for ")?.parse().ok()?;
    Some((
        after("order ")?.parse().ok()?,
        line.contains("fresh"),
        after("delivery ")?.parse().ok()?,
        idle >= 1.0,
    ))
}

#[track_caller]
fn told_in_this_order(output: &str, told: &[&str]) {
    let mut rest = output;
    for words in told {
        let Some((_, after)) = rest.split_once(words) else {
            panic!("`{words}` is missing, or comes too early:\n{output}");
        };
        rest = after;
    }
}

#[track_caller]
fn leaves_no_key(server: &Server) {
    let keys = server.command(&["KEYS", "*"]);
    assert!(
        keys.as_array().is_empty(),
        "the run left these keys behind: {keys:?}"
    );
}

#[test]
fn the_readme_shows_the_quickstart_word_for_word() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let read = |path: &str| std::fs::read_to_string(root.join(path)).expect(path);
    let quickstart = read("examples/quickstart.rs");
    let program: Vec<&str> = quickstart
        .lines()
        .skip_while(|line| line.starts_with("//!") || line.is_empty())
        .collect();
    assert!(
        read("README.md").contains(&program.join("\n")),
        "README.md and examples/quickstart.rs differ: make them the same again"
    );
}

fn last_delivered(server: &Server) -> String {
    let groups = server.command(&["XINFO", "GROUPS", "orders"]);
    let group = groups.as_array()[0].as_array();
    let named = |pair: &&[Reply]| pair[0].as_str() == "last-delivered-id";
    let id = group.chunks(2).find(named).map(|pair| pair[1].as_str());
    id.unwrap_or_default().to_owned()
}

/// A built example, run against a server. Dropping it kills it.
struct Program {
    process: Child,
    output: Option<JoinHandle<String>>,
    errors: Option<JoinHandle<String>>,
}

impl Program {
    #[track_caller]
    fn start(example: &str, server: &Server) -> Program {
        let path = binary(example);
        let mut process = Command::new(&path)
            .env("REDIS_URL", server.url())
            .env_remove("RUST_LOG")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap_or_else(|error| panic!("cannot run {}: {error}", path.display()));
        let output = process.stdout.take().map(collect);
        let errors = process.stderr.take().map(collect);
        Program {
            process,
            output,
            errors,
        }
    }

    /// What Ctrl-C sends.
    fn interrupt(&self) {
        let status = Command::new("sh")
            .arg("-c")
            .arg("kill -s INT \"$1\"")
            .args(["sh", &self.process.id().to_string()])
            .status();
        assert!(status.is_ok_and(|status| status.success()), "kill failed");
    }

    #[track_caller]
    fn ends_within(&mut self, deadline: Duration) -> ExitStatus {
        let started = Instant::now();
        while started.elapsed() < deadline {
            let ended = self.process.try_wait();
            if let Some(status) = ended.expect("a child can be waited for") {
                return status;
            }
            thread::sleep(Duration::from_millis(10));
        }
        let _ = self.process.kill();
        let (output, errors) = self.said();
        panic!("it still runs after {deadline:?}\n{output}\n{errors}");
    }

    /// All that it wrote, once it has ended.
    fn said(&mut self) -> (String, String) {
        let text = |said: &mut Option<JoinHandle<String>>| {
            let collected = said.take().map(|thread| thread.join());
            collected.and_then(Result::ok).unwrap_or_default()
        };
        (text(&mut self.output), text(&mut self.errors))
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Where cargo puts examples: beside the folder of the test that runs. It builds them with the tests,
/// unless one test is asked for by name (`--test examples`).
#[track_caller]
fn binary(example: &str) -> PathBuf {
    let test = std::env::current_exe().expect("a running test has a path");
    let profile = test.parent().and_then(Path::parent);
    let folder = profile.expect("target/<profile>/deps/<test>");
    let path = folder.join("examples").join(example);
    assert!(
        path.is_file(),
        "{} is missing: run `cargo build --examples` first",
        path.display()
    );
    path
}

/// Takes what a process writes as it writes it, so that it never waits for a reader.
fn collect(mut from: impl Read + Send + 'static) -> JoinHandle<String> {
    thread::spawn(move || {
        let mut text = Vec::new();
        let _ = from.read_to_end(&mut text);
        String::from_utf8_lossy(&text).into_owned()
    })
}
