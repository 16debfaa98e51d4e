//! What becomes of an entry once its handler has spoken, failed or gone.

mod support;

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use streamvisor::prelude::*;
use streamvisor::{Draft, Event, Mode, SupervisorHandle};
use support::pending::AGES;
use support::record::*;
use support::*;

type Fields = Vec<(Vec<u8>, Vec<u8>)>;

const LONG: Duration = Duration::from_secs(600);
const SHORT: Duration = Duration::from_millis(50);
const HOUR: Duration = Duration::from_secs(3600);

// ---- what the tests have in common ----------------------------------------------------------------------

async fn start(
    url: &str,
    subscriptions: impl IntoIterator<Item = Subscription>,
) -> (SupervisorHandle, Heard) {
    let topology = subscriptions
        .into_iter()
        .fold(topology(url), |topology, subscription| {
            topology.subscribe(subscription)
        });
    let supervisor = Supervisor::start(topology).await.unwrap();
    let heard = Heard::of(&supervisor);
    (supervisor, heard)
}

/// The first attempt of each entry ends so, every other one with `Ack`.
fn at_first(outcome: impl Fn() -> Answer + Send + Sync + 'static) -> Recorder {
    Recorder::answering(move |call| match call.attempt {
        1 => outcome(),
        _ => Ok(Outcome::Ack),
    })
}

/// Short delays, this many attempts, then the dead-letter stream `dead`.
fn capped(draft: Draft, attempts: u64) -> Draft {
    let quick =
        RetryPolicy::exponential(Duration::from_millis(10)).max_delay(Duration::from_millis(40));
    draft
        .retry(quick.max_attempts(attempts).then_dead_letter())
        .dead_letter("dead")
}

/// Fields that break what is careless: all bytes, repeated names, empty ones, an order of their own.
fn strange() -> Fields {
    let all: Vec<u8> = (0..=255).collect();
    let pairs: [(&[u8], &[u8]); 10] = [
        (b"a", b"1"),
        (b"b", b"2"),
        (b"a", b"3"),
        (b"h:x", b"one"),
        (b"\xff\xfe", &all),
        (b"_payload", &all),
        (b"h:x", b"two"),
        (b"h:\xff", b"\xfe"),
        (b"", b""),
        (b"_payload", b"again"),
    ];
    pairs
        .iter()
        .map(|(name, value)| (name.to_vec(), value.to_vec()))
        .collect()
}

/// The fields with these added at the end.
fn with(fields: &Fields, added: &[(&str, &str)]) -> Fields {
    let added = added
        .iter()
        .map(|(name, value)| (name.as_bytes().to_vec(), value.as_bytes().to_vec()));
    fields.iter().cloned().chain(added).collect()
}

/// The value of the first field of this name, as text.
#[track_caller]
fn field(fields: &Fields, name: &str) -> Option<String> {
    let found = fields.iter().find(|(field, _)| field == name.as_bytes())?;
    Some(String::from_utf8(found.1.clone()).expect("it should be text"))
}

fn fields_at(server: &Server, stream: &str, index: usize) -> Fields {
    server.xrange(stream)[index].1.clone()
}

#[track_caller]
fn nothing_pending<'a>(server: &'a Server, stream: &'a str) -> impl Future<Output = ()> + 'a {
    eventually(SOON, "nothing is pending", move || {
        server.xpending_count(stream, GROUP) == 0
    })
}

/// The members of a delay set with their scores, the next one due first.
fn delayed(server: &Server, set: &str) -> Vec<(Vec<u8>, u64)> {
    let reply = server.command(&["ZRANGE", set, "0", "-1", "WITHSCORES"]);
    let members = reply.as_array().chunks(2);
    members
        .map(|pair| (pair[0].as_bytes().to_vec(), pair[1].as_int() as u64))
        .collect()
}

/// What a member of a delay set says: version, unique id, group, attempt, and the fields of the copy.
fn unpacked(server: &Server, member: &[u8]) -> (Vec<Reply>, Fields) {
    let unpack: [&[u8]; 4] = [b"EVAL", b"return cmsgpack.unpack(ARGV[1])", b"0", member];
    let parts = server.command(&unpack).as_array().to_vec();
    let fields = parts[4..].chunks(2);
    let fields = fields.map(|pair| (pair[0].as_bytes().to_vec(), pair[1].as_bytes().to_vec()));
    (parts[..4].to_vec(), fields.collect())
}

fn server_clock(server: &Server) -> u64 {
    let time = server.command(&["TIME"]);
    let part = |at: usize| time.as_array()[at].as_int() as u64;
    part(0) * 1000 + part(1) / 1000
}

fn left_pending(event: &Event) -> Option<(EntryId, String)> {
    match event {
        Event::LeftPending { id, reason, .. } => Some((*id, reason.clone())),
        _ => None,
    }
}

fn is_dead_lettered(event: &Event) -> bool {
    matches!(event, Event::DeadLettered { .. })
}

// ---- the six verdicts -------------------------------------------------------------------------------------

#[tokio::test(flavor = "multi_thread")]
async fn ack_and_reject_acknowledge_and_leave_the_entry_in_the_stream() {
    for outcome in [Outcome::Ack, Outcome::Reject] {
        let server = Server::start(Version::Redis70);
        let said = outcome.clone();
        let recorder = Recorder::answering(move |_| Ok(said.clone()));
        let tail = recorder.on(Subscription::tail("s").dead_letter("dead"));
        let (supervisor, _) = start(&server.url(), [tail]).await;
        server.xadd("s", &strange());
        recorder.reaches(1).await;
        nothing_pending(&server, "s").await;
        supervisor.shutdown().await.unwrap();
        assert_eq!(recorder.count(), 1, "{outcome:?}");
        assert_eq!(server.xlen("s"), 1);
        assert_eq!(fields_at(&server, "s", 0), strange());
        assert_eq!(server.xlen("dead"), 0);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn b98_b99_a_retry_is_a_byte_exact_copy_with_its_count_and_group() {
    for version in Version::ALL {
        let server = Server::start(version);
        let recorder = Recorder::answering(|call| match call.attempt {
            1 | 2 => Ok(Outcome::Retry),
            _ => Ok(Outcome::Ack),
        });
        let (supervisor, _) = start(&server.url(), [recorder.on(Subscription::tail("s"))]).await;
        server.xadd("s", &strange());
        recorder.reaches(3).await;
        nothing_pending(&server, "s").await;
        supervisor.shutdown().await.unwrap();
        assert_eq!(server.xlen("s"), 3, "{version}");
        assert_eq!(fields_at(&server, "s", 0), strange());
        for (index, count) in [(1, "1"), (2, "2")] {
            let expected = [("h:retry-count", count), ("h:retry-group", GROUP)];
            assert_eq!(
                fields_at(&server, "s", index),
                with(&strange(), &expected),
                "{version}"
            );
        }
        let calls = recorder.calls();
        let attempts: Vec<_> = calls
            .iter()
            .map(|call| (call.attempt, call.delivery_count))
            .collect();
        assert_eq!(attempts, [(1, 1), (2, 1), (3, 1)]);
        // Handlers see the headers of the entry, and none of this crate's books.
        for call in &calls {
            assert_eq!(call.headers, calls[0].headers);
            assert_eq!(call.headers.len(), 3);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn b98_b99_an_in_process_delay_ends_in_a_byte_exact_copy() {
    for version in Version::ALL {
        let server = Server::start(version);
        let recorder = Recorder::answering(|call| match call.attempt {
            1 => Ok(Outcome::RetryAfter(Duration::from_millis(30))),
            2 => Err("not yet".into()),
            _ => Ok(Outcome::Ack),
        });
        let tail = capped(Subscription::tail("s"), 9);
        let (supervisor, _) = start(&server.url(), [recorder.on(tail)]).await;
        server.xadd("s", &strange());
        recorder.reaches(3).await;
        nothing_pending(&server, "s").await;
        supervisor.shutdown().await.unwrap();
        assert_eq!(server.xlen("s"), 3, "{version}");
        let first = [("h:retry-count", "1"), ("h:retry-group", GROUP)];
        assert_eq!(
            fields_at(&server, "s", 1),
            with(&strange(), &first),
            "{version}"
        );
        let second = [
            ("h:retry-count", "2"),
            ("h:retry-group", GROUP),
            ("h:retry-error", "not yet"),
        ];
        assert_eq!(
            fields_at(&server, "s", 2),
            with(&strange(), &second),
            "{version}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn b98_b99_a_durable_delay_ends_in_a_byte_exact_copy() {
    for version in Version::ALL {
        let server = Server::start(version);
        let recorder = at_first(|| Ok(Outcome::RetryAfter(Duration::from_millis(100))));
        let tail = Subscription::tail("s").delayed_retry(DelayedRetry::durable("later"));
        let (supervisor, _) = start(&server.url(), [recorder.on(tail)]).await;
        // Two that are equal stay two.
        server.xadd("s", &strange());
        server.xadd("s", &strange());
        recorder.reaches(4).await;
        nothing_pending(&server, "s").await;
        supervisor.shutdown().await.unwrap();
        assert_eq!(server.xlen("s"), 4, "{version}");
        let expected = with(
            &strange(),
            &[("h:retry-count", "1"), ("h:retry-group", GROUP)],
        );
        for index in [2, 3] {
            assert_eq!(fields_at(&server, "s", index), expected, "{version}");
        }
        assert_eq!(delayed(&server, "later"), []);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn b98_b99_a_dead_letter_is_a_byte_exact_copy_with_reason_and_history() {
    for version in Version::ALL {
        let server = Server::start(version);
        let recorder = Recorder::answering(|call| match call.attempt {
            1 => Ok(Outcome::Retry),
            2 => Err("it broke".into()),
            _ => Ok(Outcome::DeadLetter("not \u{fc}seful".to_owned())),
        });
        let tail = capped(Subscription::tail("s"), 9);
        let (supervisor, heard) = start(&server.url(), [recorder.on(tail)]).await;
        let now = || {
            SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .unwrap()
                .as_millis()
        };
        let before = now();
        server.xadd("s", &strange());
        recorder.reaches(3).await;
        nothing_pending(&server, "s").await;
        heard
            .wait("it is told", |event| is_dead_lettered(event).then_some(()))
            .await;
        supervisor.shutdown().await.unwrap();
        assert_eq!((server.xlen("s"), server.xlen("dead")), (3, 1), "{version}");
        let mut dead = fields_at(&server, "dead", 0);
        let (name, at) = dead.pop().unwrap();
        let at: u128 = String::from_utf8(at).unwrap().parse().unwrap();
        assert_eq!(name, b"h:dead-at-ms");
        assert!(before <= at && at <= now());
        let last = server.xrange("s")[2].0.clone();
        let history = [
            ("h:retry-error", "it broke"),
            ("h:dead-reason", "not \u{fc}seful"),
            ("h:dead-stream", "s"),
            ("h:dead-group", GROUP),
            ("h:dead-entry-id", last.as_str()),
            ("h:dead-attempts", "3"),
        ];
        assert_eq!(dead, with(&strange(), &history), "{version}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_letter_that_is_consumed_again_starts_over_and_tells_of_its_latest_death() {
    let server = Server::start(Version::Redis70);
    let dying = Recorder::answering(|call| match call.attempt {
        1 => Ok(Outcome::Retry),
        _ => Ok(Outcome::DeadLetter("first".to_owned())),
    });
    let again = Recorder::answering(|_| Ok(Outcome::DeadLetter("second".to_owned())));
    let (supervisor, _) = start(
        &server.url(),
        [
            dying.on(Subscription::tail("s").dead_letter("dead")),
            again.on(Subscription::tail("dead").dead_letter("deader")),
        ],
    )
    .await;
    server.xadd("s", &[("_payload", "1")]);
    again.reaches(1).await;
    nothing_pending(&server, "dead").await;
    supervisor.shutdown().await.unwrap();
    assert_eq!(again.calls()[0].attempt, 1);
    assert_eq!(
        again.calls()[0].header("dead-reason").as_deref(),
        Some("first")
    );
    let fields = fields_at(&server, "deader", 0);
    assert_eq!(field(&fields, "h:dead-reason").as_deref(), Some("second"));
    assert_eq!(field(&fields, "h:dead-stream").as_deref(), Some("dead"));
    assert_eq!(field(&fields, "h:dead-attempts").as_deref(), Some("1"));
    assert_eq!(fields.len(), 7, "{fields:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_letter_without_a_stream_for_it_is_left_pending_and_told() {
    let server = Server::start(Version::Redis70);
    let recorder = Recorder::answering(|call| match call.text() {
        "0" => Ok(Outcome::DeadLetter("no use".to_owned())),
        _ => Ok(Outcome::Ack),
    });
    let tail = Subscription::tail("s").max_in_flight(1);
    let (supervisor, heard) = start(&server.url(), [recorder.on(tail)]).await;
    let ids = server.add_numbers("s", 0..3);
    // With room for one only: what is left pending takes up none.
    recorder.reaches(3).await;
    eventually(SOON, "acknowledged", || {
        server.xpending_count("s", GROUP) == 1
    })
    .await;
    let (id, reason) = heard.wait("it is told", left_pending).await;
    supervisor.shutdown().await.unwrap();
    assert_eq!(id.to_string(), ids[0]);
    assert!(
        reason.contains("no use") && reason.contains("dead-letter stream"),
        "{reason}"
    );
    assert_eq!(server.xpending("s", GROUP)[0].0, ids[0]);
    assert_eq!((server.xlen("s"), recorder.count()), (3, 3));
}

#[tokio::test(flavor = "multi_thread")]
async fn leave_pending_leaves_it_to_a_reclaim() {
    let server = Server::start(Version::Redis70);
    let tail = Recorder::answering(|_| Ok(Outcome::LeavePending));
    let draft = Subscription::tail("s").consumer("t").max_in_flight(1);
    let (supervisor, heard) = start(&server.url(), [tail.on(draft)]).await;
    server.add_numbers("s", 0..3);
    tail.reaches(3).await;
    supervisor.shutdown().await.unwrap();
    let pending = server.xpending("s", GROUP);
    assert_eq!(pending.len(), 3);
    assert!(
        pending
            .iter()
            .all(|(_, owner, _, count)| owner == "t" && *count == 1)
    );
    assert_eq!(
        heard.count(|event| left_pending(event).is_some()),
        0,
        "it was asked for"
    );

    let rescue = Recorder::acking();
    let reclaim = Subscription::reclaim("s", Duration::from_millis(100)).block(SHORT);
    let (supervisor, _) = start(&server.url(), [rescue.on(reclaim)]).await;
    rescue.reaches(3).await;
    nothing_pending(&server, "s").await;
    supervisor.shutdown().await.unwrap();
    assert!(rescue.calls().iter().all(|call| call.attempt == 2));
    assert_eq!((server.xlen("s"), rescue.count()), (3, 3));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_left_pending_is_not_run_again_by_the_recovery_after_a_lost_read() {
    let server = Server::start(Version::Redis70);
    let proxy = server.proxy();
    let recorder = Recorder::answering(|call| match call.text() {
        "ack" => Ok(Outcome::Ack),
        _ => Ok(Outcome::LeavePending),
    });
    let tail = Subscription::tail("s").block(Duration::from_millis(100));
    let (supervisor, _) = start(&proxy.url(), [recorder.on(tail)]).await;
    for round in 1..=5 {
        let fault = proxy.drop_next_reply("XREADGROUP");
        server.xadd("s", &[("_payload", "leave")]);
        server.xadd("s", &[("_payload", "ack")]);
        recorder.reaches(2 * round).await;
        eventually(SOON, "the reply was lost", || fault.happened()).await;
    }
    eventually(SOON, "acknowledged", || {
        server.xpending_count("s", GROUP) == 5
    })
    .await;
    supervisor.shutdown().await.unwrap();
    assert_eq!((recorder.count(), recorder.distinct()), (10, 10));
}

// ---- counts that travel with the copies -------------------------------------------------------------------

#[tokio::test(flavor = "multi_thread")]
async fn a_retry_count_that_is_no_number_counts_as_none() {
    let server = Server::start(Version::Redis70);
    let recorder = Recorder::answering(|call| match call.attempt {
        1 => Ok(Outcome::Retry),
        _ => Ok(Outcome::Ack),
    });
    let (supervisor, _) = start(&server.url(), [recorder.on(Subscription::tail("s"))]).await;
    for count in ["many", "-3", "", "18446744073709551616", "1.5"] {
        server.xadd(
            "s",
            &[("_payload", "x"), ("h:retry-count", count), ("z", "last")],
        );
    }
    recorder.reaches(10).await;
    nothing_pending(&server, "s").await;
    supervisor.shutdown().await.unwrap();
    let mut attempts: Vec<u64> = recorder.calls().iter().map(|call| call.attempt).collect();
    attempts.sort_unstable();
    assert_eq!(attempts, [1, 1, 1, 1, 1, 2, 2, 2, 2, 2]);
    let expected = with(
        &Vec::new(),
        &[
            ("_payload", "x"),
            ("h:retry-count", "1"),
            ("z", "last"),
            ("h:retry-group", GROUP),
        ],
    );
    for index in 5..10 {
        assert_eq!(
            fields_at(&server, "s", index),
            expected,
            "the count is set where it stood"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_largest_retry_count_does_not_overflow() {
    let server = Server::start(Version::Redis70);
    let recorder = Recorder::answering(|call| match call.text() {
        "end" => Ok(Outcome::Ack),
        _ => Ok(Outcome::DeadLetter("enough".into())),
    });
    let tail = Subscription::tail("s").dead_letter("dead");
    let (supervisor, heard) = start(&server.url(), [recorder.on(tail)]).await;
    let largest = u64::MAX.to_string();
    server.xadd("s", &[("_payload", "x"), ("h:retry-count", &largest)]);
    server.xadd("s", &[("_payload", "end")]);
    recorder.reaches(2).await;
    nothing_pending(&server, "s").await;
    supervisor.shutdown().await.unwrap();
    assert_eq!(
        field(&fields_at(&server, "dead", 0), "h:dead-attempts"),
        Some(largest)
    );
    heard.assert_nobody_crashed();
}

#[tokio::test(flavor = "multi_thread")]
async fn ruststreams_retry_count_is_read_and_kept_up_to_date() {
    let server = Server::start(Version::Redis70);
    let recorder = Recorder::answering(|call| match call.attempt {
        ..6 => Ok(Outcome::Retry),
        _ => Ok(Outcome::Ack),
    });
    let (supervisor, _) = start(&server.url(), [recorder.on(Subscription::tail("s"))]).await;
    let theirs = "h:x-ruststream-retry-count";
    server.xadd(
        "s",
        &[
            ("_payload", "x"),
            (theirs, "3"),
            ("h:retry-count", "1"),
            ("z", "last"),
        ],
    );
    recorder.reaches(3).await;
    nothing_pending(&server, "s").await;
    supervisor.shutdown().await.unwrap();
    let attempts: Vec<u64> = recorder.calls().iter().map(|call| call.attempt).collect();
    assert_eq!(attempts, [4, 5, 6], "the larger of the two counts");
    for (index, count) in [(1, "4"), (2, "5")] {
        let expected = [
            ("_payload", "x"),
            (theirs, count),
            ("h:retry-count", count),
            ("z", "last"),
            ("h:retry-group", GROUP),
        ];
        assert_eq!(fields_at(&server, "s", index), with(&Vec::new(), &expected));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_remembers_the_starts_that_ended_in_a_crash() {
    let server = Server::start(Version::Redis70);
    server.add_numbers("s", 0..1);
    let ids = server.leave_behind("s", GROUP, "dead");
    // Started four times, each time the process died.
    server.give_to("s", GROUP, "dead", &ids[0], (AGES, 4));
    let recorder = Recorder::answering(|call| match call.mode {
        Mode::Reclaim => Ok(Outcome::Retry),
        _ => Ok(Outcome::Ack),
    });
    let (supervisor, _) = start(
        &server.url(),
        [
            recorder.on(Subscription::reclaim("s", LONG)),
            recorder.on(Subscription::tail("s")),
        ],
    )
    .await;
    recorder.reaches(2).await;
    nothing_pending(&server, "s").await;
    supervisor.shutdown().await.unwrap();
    let attempts: Vec<u64> = recorder.calls().iter().map(|call| call.attempt).collect();
    assert_eq!(attempts, [5, 6]);
    assert_eq!(
        field(&fields_at(&server, "s", 1), "h:retry-count").as_deref(),
        Some("5")
    );
}

// ---- failures ----------------------------------------------------------------------------------------------

#[tokio::test(flavor = "multi_thread")]
async fn an_error_is_retried_by_the_policy_with_its_text_and_ends_at_the_cap() {
    let server = Server::start(Version::Redis70);
    let recorder = Recorder::answering(|call| Err(format!("broken {} times", call.attempt).into()));
    let tail = capped(Subscription::tail("s"), 4);
    let (supervisor, heard) = start(&server.url(), [recorder.on(tail)]).await;
    server.xadd("s", &[("_payload", "x")]);
    heard
        .wait("the end", |event| is_dead_lettered(event).then_some(()))
        .await;
    nothing_pending(&server, "s").await;
    supervisor.shutdown().await.unwrap();
    let attempts: Vec<u64> = recorder.calls().iter().map(|call| call.attempt).collect();
    assert_eq!(attempts, [1, 2, 3, 4]);
    for (index, count) in [(1, "1"), (2, "2"), (3, "3")] {
        let fields = fields_at(&server, "s", index);
        assert_eq!(field(&fields, "h:retry-count").as_deref(), Some(count));
        assert_eq!(
            field(&fields, "h:retry-error"),
            Some(format!("broken {count} times"))
        );
    }
    assert_eq!((server.xlen("s"), server.xlen("dead")), (4, 1));
    let dead = fields_at(&server, "dead", 0);
    assert_eq!(
        field(&dead, "h:dead-error").as_deref(),
        Some("broken 4 times")
    );
    assert_eq!(field(&dead, "h:dead-attempts").as_deref(), Some("4"));
    let reason = field(&dead, "h:dead-reason").unwrap();
    assert!(reason.contains("4 attempts"), "{reason}");
    heard.assert_nobody_crashed();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cap_that_rejects_drops_the_entry_and_no_cap_tries_on() {
    let server = Server::start(Version::Redis70);
    let quick =
        RetryPolicy::exponential(Duration::from_millis(5)).max_delay(Duration::from_millis(5));
    let rejecting = Recorder::answering(|_| Err("no".into()));
    let trying = Recorder::answering(|call| match call.attempt {
        ..20 => Err("no".into()),
        _ => Ok(Outcome::Ack),
    });
    let reject = quick.clone().max_attempts(2).then_reject();
    let (supervisor, heard) = start(
        &server.url(),
        [
            rejecting.on(Subscription::tail("rejected").retry(reject)),
            trying.on(Subscription::tail("tried").retry(quick)),
        ],
    )
    .await;
    server.xadd("rejected", &[("_payload", "x")]);
    server.xadd("tried", &[("_payload", "x")]);
    rejecting.reaches(2).await;
    trying.reaches(20).await;
    nothing_pending(&server, "rejected").await;
    nothing_pending(&server, "tried").await;
    supervisor.shutdown().await.unwrap();
    assert_eq!((rejecting.count(), server.xlen("rejected")), (2, 2));
    assert_eq!((trying.count(), server.xlen("tried")), (20, 20));
    assert_eq!(heard.count(|event| left_pending(event).is_some()), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_errors_text_travels_with_its_causes_and_is_cut_at_a_kilobyte() {
    #[derive(Debug)]
    struct Outer(std::io::Error);
    impl std::fmt::Display for Outer {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("cannot book")
        }
    }
    impl std::error::Error for Outer {
        fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
            Some(&self.0)
        }
    }
    let server = Server::start(Version::Redis70);
    let long = "\u{fc}".repeat(5000);
    let answer = long.clone();
    let recorder = Recorder::answering(move |call| match (call.attempt, call.text()) {
        (1, "causes") => Err(Box::new(Outer(std::io::Error::other("disk full")))),
        (1, _) => Err(answer.clone().into()),
        _ => Ok(Outcome::Ack),
    });
    let tail = capped(Subscription::tail("s").workers(1), 9);
    let (supervisor, _) = start(&server.url(), [recorder.on(tail)]).await;
    server.xadd("s", &[("_payload", "causes")]);
    recorder.reaches(2).await;
    server.xadd("s", &[("_payload", "long")]);
    recorder.reaches(4).await;
    supervisor.shutdown().await.unwrap();
    let texts: Vec<String> = server
        .xrange("s")
        .iter()
        .filter_map(|(_, fields)| field(fields, "h:retry-error"))
        .collect();
    assert_eq!(texts[0], "cannot book: disk full");
    assert_eq!(texts[1].len(), 1024);
    assert!(long.starts_with(&texts[1]));
}

/// How an entry can fail.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Failing {
    Retry,
    RetryAfterInProcess,
    RetryAfterDurable,
    Error,
    ErrorDurable,
    Panic,
    PanicDurable,
    Timeout,
    LeavePending,
    PanicLeavesPending,
}

impl Failing {
    const ALL: [Failing; 10] = [
        Failing::Retry,
        Failing::RetryAfterInProcess,
        Failing::RetryAfterDurable,
        Failing::Error,
        Failing::ErrorDurable,
        Failing::Panic,
        Failing::PanicDurable,
        Failing::Timeout,
        Failing::LeavePending,
        Failing::PanicLeavesPending,
    ];

    async fn answer(self) -> Answer {
        match self {
            Failing::Retry => Ok(Outcome::Retry),
            Failing::RetryAfterInProcess | Failing::RetryAfterDurable => {
                Ok(Outcome::RetryAfter(Duration::from_millis(20)))
            }
            Failing::Error | Failing::ErrorDurable => Err("it failed".into()),
            Failing::Panic | Failing::PanicDurable | Failing::PanicLeavesPending => {
                panic!("it panicked, as it should")
            }
            Failing::Timeout => std::future::pending().await,
            Failing::LeavePending => Ok(Outcome::LeavePending),
        }
    }

    fn draft(self, draft: Draft) -> Draft {
        let draft = capped(draft, 3);
        match self {
            Failing::RetryAfterDurable | Failing::ErrorDurable | Failing::PanicDurable => {
                draft.delayed_retry(DelayedRetry::durable("later"))
            }
            Failing::Timeout => draft.handler_timeout(Duration::from_millis(150)),
            Failing::PanicLeavesPending => draft.on_crash(OnCrash::LeavePending),
            _ => draft,
        }
    }

    fn error(self) -> Option<&'static str> {
        match self {
            Failing::Error | Failing::ErrorDurable => Some("it failed"),
            Failing::Panic | Failing::PanicDurable => Some("it panicked, as it should"),
            Failing::Timeout => Some("deadline"),
            _ => None,
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn b65_every_way_to_fail_ends_in_the_dead_letter_after_the_same_number_of_attempts() {
    let cases = Failing::ALL.map(|failing| async move {
        let server = Server::start(Version::Redis70);
        let recorder = Recorder::running(move |_| failing.answer());
        let min_idle = Duration::from_millis(300);
        let subscriptions = [
            recorder.on(failing.draft(Subscription::tail("s").consumer("t"))),
            recorder.on(failing.draft(Subscription::reclaim("s", min_idle).block(SHORT))),
        ];
        let (supervisor, heard) = start(&server.url(), subscriptions).await;
        server.xadd("s", &strange());
        heard
            .wait(&format!("the end of {failing:?}"), |event| {
                is_dead_lettered(event).then_some(())
            })
            .await;
        nothing_pending(&server, "s").await;
        supervisor.shutdown().await.unwrap();

        let attempts: Vec<u64> = recorder.calls().iter().map(|call| call.attempt).collect();
        assert_eq!(attempts, [1, 2, 3], "{failing:?}");
        assert_eq!(server.xlen("dead"), 1, "{failing:?}");
        let dead = fields_at(&server, "dead", 0);
        assert_eq!(dead[..strange().len()], strange(), "{failing:?}");
        assert_eq!(
            field(&dead, "h:dead-attempts").as_deref(),
            Some("3"),
            "{failing:?}"
        );
        assert_eq!(field(&dead, "h:dead-stream").as_deref(), Some("s"));
        let last = server.xrange("s").last().unwrap().0.clone();
        assert_eq!(field(&dead, "h:dead-entry-id"), Some(last));
        let reason = field(&dead, "h:dead-reason").unwrap();
        assert!(reason.contains("3 attempts"), "{failing:?}: {reason}");
        if let Some(error) = failing.error() {
            let told = field(&dead, "h:dead-error").unwrap_or_default();
            assert!(told.contains(error), "{failing:?}: {told}");
        }
    });
    futures_util::future::join_all(cases).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn b17_one_failure_is_no_other_entrys_failure() {
    let server = Server::start(Version::Redis70);
    let recorder = Recorder::answering(|call| match (call.attempt, call.text()) {
        (1, "3") => Err("no".into()),
        (1, "5") => panic!("a panic, as it should be"),
        _ => Ok(Outcome::Ack),
    });
    let tail = capped(Subscription::tail("s").workers(1), 9);
    let (supervisor, heard) = start(&server.url(), [recorder.on(tail)]).await;
    server.add_numbers("s", 1..11);
    recorder.reaches(12).await;
    nothing_pending(&server, "s").await;
    server.add_numbers("s", 11..21);
    recorder.reaches(22).await;
    supervisor.shutdown().await.unwrap();
    let attempts = |number: &str| -> Vec<u64> {
        let calls = recorder.calls();
        let of_it = calls.iter().filter(|call| call.text() == number);
        of_it.map(|call| call.attempt).collect()
    };
    for number in 1..21 {
        let expected: &[u64] = if [3, 5].contains(&number) {
            &[1, 2]
        } else {
            &[1]
        };
        assert_eq!(attempts(&number.to_string()), expected, "{number}");
    }
    let crashes = heard.count(|event| matches!(event, Event::Crashed { .. }));
    assert_eq!(crashes, 1);
    assert_eq!(
        recorder.started().len(),
        2,
        "the worker's state was made anew, once"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_crash_is_a_dead_letter_at_once_where_the_subscription_says_so() {
    let server = Server::start(Version::Redis70);
    let recorder = Recorder::running(|call| async move {
        match call.text() {
            "0" => panic!("a panic, as it should be"),
            "1" => std::future::pending().await,
            _ => Ok(Outcome::Ack),
        }
    });
    let tail = Subscription::tail("s")
        .dead_letter("dead")
        .on_crash(OnCrash::DeadLetter)
        .handler_timeout(Duration::from_millis(150));
    let (supervisor, _) = start(&server.url(), [recorder.on(tail)]).await;
    server.add_numbers("s", 0..3);
    eventually(SOON, "both are dead", || server.xlen("dead") == 2).await;
    nothing_pending(&server, "s").await;
    supervisor.shutdown().await.unwrap();
    assert_eq!((recorder.count(), server.xlen("s")), (3, 3));
    for (_, fields) in server.xrange("dead") {
        let expected = match field(&fields, "_payload").as_deref() {
            Some("0") => "a panic, as it should be",
            _ => "deadline",
        };
        let error = field(&fields, "h:dead-error").unwrap();
        assert!(error.contains(expected), "{error}");
        assert_eq!(field(&fields, "h:dead-attempts").as_deref(), Some("1"));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_crash_that_leaves_the_entry_pending_leaves_it() {
    let server = Server::start(Version::Redis70);
    let recorder = Recorder::answering(|call| match call.text() {
        "0" => panic!("a panic, as it should be"),
        _ => Ok(Outcome::Ack),
    });
    let tail = Subscription::tail("s")
        .on_crash(OnCrash::LeavePending)
        .max_in_flight(1);
    let (supervisor, _) = start(&server.url(), [recorder.on(tail)]).await;
    let ids = server.add_numbers("s", 0..3);
    recorder.reaches(3).await;
    eventually(SOON, "acknowledged", || {
        server.xpending_count("s", GROUP) == 1
    })
    .await;
    supervisor.shutdown().await.unwrap();
    assert_eq!(server.xpending("s", GROUP)[0].0, ids[0]);
    assert_eq!((recorder.count(), server.xlen("s")), (3, 3));
}

// ---- entries that cannot be decoded ---------------------------------------------------------------------

/// Ten entries of which the third is no number and the seventh no UTF-8; the ids of these two.
fn add_undecodable(server: &Server) -> [String; 2] {
    let bodies: [&[u8]; 10] = [
        b"1",
        b"1",
        b"\"one\"",
        b"1",
        b"1",
        b"1",
        b"\xff\xfe{",
        b"1",
        b"1",
        b"1",
    ];
    let ids = server.xadd_many("s", bodies.map(|body| vec![(&b"_payload"[..], body)]));
    [ids[2].clone(), ids[6].clone()]
}

fn summing(draft: Draft) -> (Subscription, Arc<AtomicU64>) {
    let sum = Arc::new(AtomicU64::new(0));
    let add = Arc::clone(&sum);
    let subscription = draft.handle_fn(move |number: u64, _: Context| {
        add.fetch_add(number, Ordering::SeqCst);
        async { Ok(Outcome::Ack) }
    });
    (subscription, sum)
}

#[tokio::test(flavor = "multi_thread")]
async fn b64_undecodable_entries_go_to_the_dead_letter_and_what_is_behind_them_flows() {
    let server = Server::start(Version::Redis70);
    // Attempts do not matter: a codec does not change its mind.
    let (tail, sum) = summing(capped(Subscription::tail("s"), 5));
    let (supervisor, heard) = start(&server.url(), [tail]).await;
    let undecodable = add_undecodable(&server);
    server.xadd("s", &[("no", "body")]);
    server.xadd_many("s", (0..10).map(|_| vec![("_payload", "1")]));
    eventually(SOON, "all others handled", || {
        sum.load(Ordering::SeqCst) == 18
    })
    .await;
    nothing_pending(&server, "s").await;
    supervisor.shutdown().await.unwrap();
    assert_eq!((server.xlen("s"), server.xlen("dead")), (21, 3));
    for (index, id) in undecodable.iter().enumerate() {
        let fields = fields_at(&server, "dead", index);
        assert_eq!(field(&fields, "h:dead-entry-id").as_ref(), Some(id));
        assert!(!field(&fields, "h:dead-error").unwrap().is_empty());
        assert!(field(&fields, "h:dead-reason").unwrap().contains("decoded"));
    }
    assert_eq!(
        fields_at(&server, "dead", 1)[0],
        (b"_payload".to_vec(), b"\xff\xfe{".to_vec())
    );
    let error = field(&fields_at(&server, "dead", 2), "h:dead-error").unwrap();
    assert!(error.contains("_payload"), "{error}");
    heard.assert_nobody_crashed();
}

#[tokio::test(flavor = "multi_thread")]
async fn b64_undecodable_entries_stay_pending_and_are_told_where_there_is_no_dead_letter() {
    let server = Server::start(Version::Redis70);
    let (tail, sum) = summing(Subscription::tail("s").max_in_flight(1));
    let (supervisor, heard) = start(&server.url(), [tail]).await;
    let undecodable = add_undecodable(&server);
    server.xadd_many("s", (0..10).map(|_| vec![("_payload", "1")]));
    eventually(SOON, "all others handled", || {
        sum.load(Ordering::SeqCst) == 18
    })
    .await;
    eventually(SOON, "acknowledged", || {
        server.xpending_count("s", GROUP) == 2
    })
    .await;
    supervisor.shutdown().await.unwrap();
    let told: Vec<String> = heard
        .pick(left_pending)
        .iter()
        .map(|(id, _)| id.to_string())
        .collect();
    assert_eq!(told, undecodable);
    let left: Vec<String> = server
        .xpending("s", GROUP)
        .into_iter()
        .map(|(id, ..)| id)
        .collect();
    assert_eq!(left, undecodable);
    assert_eq!(server.xlen("s"), 20);
    heard.assert_nobody_crashed();
}

#[tokio::test(flavor = "multi_thread")]
async fn b64_a_codec_that_panics_is_not_the_handlers_fault() {
    #[derive(Clone)]
    struct Fragile;
    impl streamvisor::Codec<u64> for Fragile {
        fn decode(&self, entry: &streamvisor::Entry) -> Result<u64, streamvisor::CodecError> {
            assert!(
                entry.payload().is_some_and(|body| body == "1"),
                "a panic, as it should be"
            );
            Ok(1)
        }
    }
    let server = Server::start(Version::Redis70);
    let sum = Arc::new(AtomicU64::new(0));
    let add = Arc::clone(&sum);
    let tail = Subscription::tail("s")
        .dead_letter("dead")
        .codec(Fragile)
        .handle_fn(move |number: u64, _: Context| {
            add.fetch_add(number, Ordering::SeqCst);
            async { Ok(Outcome::Ack) }
        });
    let (supervisor, heard) = start(&server.url(), [tail]).await;
    add_undecodable(&server);
    eventually(SOON, "all others handled", || {
        sum.load(Ordering::SeqCst) == 8
    })
    .await;
    nothing_pending(&server, "s").await;
    supervisor.shutdown().await.unwrap();
    assert_eq!(server.xlen("dead"), 2);
    heard.assert_nobody_crashed();
}

// ---- delays in this process ---------------------------------------------------------------------------

#[tokio::test(flavor = "multi_thread")]
async fn a_delayed_entry_stays_pending_without_taking_up_room() {
    let server = Server::start(Version::Redis70);
    let recorder = Recorder::answering(|call| match (call.attempt, call.text()) {
        (1, "0") => Ok(Outcome::RetryAfter(HOUR)),
        _ => Ok(Outcome::Ack),
    });
    let tail = Subscription::tail("s").consumer("t").max_in_flight(1);
    let (supervisor, heard) = start(&server.url(), [recorder.on(tail)]).await;
    let ids = server.add_numbers("s", 0..20);
    recorder.reaches(20).await;
    eventually(SOON, "the others are acknowledged", || {
        server.xpending_count("s", GROUP) == 1
    })
    .await;
    let (id, owner, _, count) = server.xpending("s", GROUP).remove(0);
    assert_eq!((&id, owner.as_str(), count), (&ids[0], "t", 1));
    assert_eq!(server.xlen("s"), 20, "the copy is made when it is due");
    let full = heard.count(|event| matches!(event, Event::ParkedFull { .. }));
    // Stopping turns it into a retry: nobody is left to wait for it.
    supervisor.shutdown().await.unwrap();
    assert_eq!(
        (server.xlen("s"), server.xpending_count("s", GROUP)),
        (21, 0)
    );
    assert_eq!(
        field(&fields_at(&server, "s", 20), "h:retry-count").as_deref(),
        Some("1")
    );
    assert_eq!(full, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn beyond_max_parked_delayed_entries_keep_their_room_and_an_event_says_so_once() {
    let server = Server::start(Version::Redis70);
    let recorder = Recorder::answering(|_| Ok(Outcome::RetryAfter(HOUR)));
    let tail = Subscription::tail("s")
        .max_parked(2)
        .max_in_flight(3)
        .workers(1)
        .keep_alive(SHORT);
    let (supervisor, heard) = start(&server.url(), [recorder.on(tail)]).await;
    server.add_numbers("s", 0..10);
    recorder.reaches(5).await;
    heard
        .wait("it is told", |event| {
            matches!(event, Event::ParkedFull { .. }).then_some(())
        })
        .await;
    // Time enough for a read that there is no room for.
    let kept = server.commandstat("evalsha");
    eventually(SOON, "they are kept fresh", || {
        server.commandstat("evalsha") >= kept + 5
    })
    .await;
    assert_eq!(server.xpending_count("s", GROUP), 5);
    supervisor.shutdown().await.unwrap();
    assert_eq!(recorder.count(), 5, "two are parked, three fill the room");
    assert_eq!(
        heard.count(|event| matches!(event, Event::ParkedFull { .. })),
        1
    );
    assert_eq!(
        (server.xlen("s"), server.xpending_count("s", GROUP)),
        (15, 0)
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn beyond_max_parked_delayed_entries_come_back_all_the_same() {
    let server = Server::start(Version::Redis70);
    let recorder = at_first(|| Ok(Outcome::RetryAfter(Duration::from_millis(50))));
    let tail = Subscription::tail("s").max_parked(2).max_in_flight(3);
    let (supervisor, _) = start(&server.url(), [recorder.on(tail)]).await;
    server.add_numbers("s", 0..50);
    recorder.reaches(100).await;
    nothing_pending(&server, "s").await;
    supervisor.shutdown().await.unwrap();
    assert_eq!(
        (recorder.count(), recorder.distinct(), server.xlen("s")),
        (100, 100, 100)
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_parked_entry_is_kept_fresh_for_as_long_as_it_waits() {
    let server = Server::start(Version::Redis70);
    let min_idle = Duration::from_millis(500);
    let recorder = at_first(move || Ok(Outcome::RetryAfter(5 * min_idle)));
    let thief = Recorder::acking();
    let tail = Subscription::tail("s").keep_alive(min_idle / 5);
    let (supervisor, _) = start(&server.url(), [recorder.on(tail)]).await;
    let reclaim = Subscription::reclaim("s", min_idle).block(SHORT);
    let (other, _) = start(&server.url(), [thief.on(reclaim)]).await;
    server.add_numbers("s", 0..5);
    recorder.reaches(10).await;
    nothing_pending(&server, "s").await;
    supervisor.shutdown().await.unwrap();
    other.shutdown().await.unwrap();
    assert_eq!((recorder.count(), thief.count()), (10, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_entry_that_is_deleted_while_it_is_parked_is_gone_and_told() {
    let server = Server::start(Version::Redis70);
    let recorder = Recorder::answering(|_| Ok(Outcome::RetryAfter(Duration::from_secs(1))));
    let tail = Subscription::tail("s");
    let (supervisor, heard) = start(&server.url(), [recorder.on(tail)]).await;
    let ids = server.add_numbers("s", 0..1);
    recorder.reaches(1).await;
    server.xdel("s", &ids);
    let gone = heard
        .wait("it is told", |event| match event {
            Event::Gone { ids, .. } => Some(ids.clone()),
            _ => None,
        })
        .await;
    nothing_pending(&server, "s").await;
    supervisor.shutdown().await.unwrap();
    assert_eq!(gone.iter().map(EntryId::to_string).collect::<Vec<_>>(), ids);
    assert_eq!((recorder.count(), server.xlen("s")), (1, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_entry_that_is_deleted_while_it_runs_can_still_be_retried() {
    let server = Server::start(Version::Redis70);
    let gate = Gate::closed();
    let passes = gate.clone();
    let recorder = Recorder::running(move |call| {
        let gate = passes.clone();
        async move {
            gate.passed().await;
            match (call.attempt, call.text()) {
                (1, "0") => Ok(Outcome::Retry),
                _ => Ok(Outcome::Ack),
            }
        }
    });
    let (supervisor, heard) = start(&server.url(), [recorder.on(Subscription::tail("s"))]).await;
    let ids = server.add_numbers("s", 0..2);
    recorder.reaches(2).await;
    server.xdel("s", &ids);
    gate.open();
    recorder.reaches(3).await;
    nothing_pending(&server, "s").await;
    supervisor.shutdown().await.unwrap();
    assert_eq!((recorder.count(), server.xlen("s")), (3, 1));
    heard.assert_nobody_crashed();
}

// ---- delays on the server --------------------------------------------------------------------------------

#[tokio::test(flavor = "multi_thread")]
async fn a_durable_delay_is_a_member_with_the_servers_time_and_the_original_is_acknowledged() {
    for version in Version::ALL {
        let server = Server::start(version);
        let recorder = Recorder::answering(|_| Ok(Outcome::RetryAfter(HOUR)));
        let tail = Subscription::tail("s")
            .delayed_retry(DelayedRetry::durable("later"))
            .max_in_flight(1);
        let (supervisor, _) = start(&server.url(), [recorder.on(tail)]).await;
        let before = server_clock(&server);
        server.xadd("s", &strange());
        server.xadd("s", &strange());
        recorder.reaches(2).await;
        nothing_pending(&server, "s").await;
        supervisor.shutdown().await.unwrap();
        let after = server_clock(&server);
        let members = delayed(&server, "later");
        assert_eq!((members.len(), server.xlen("s")), (2, 2), "{version}");
        let copy = with(
            &strange(),
            &[("h:retry-count", "1"), ("h:retry-group", GROUP)],
        );
        for (member, due) in members {
            let hour = HOUR.as_millis() as u64;
            assert!(
                (before + hour..=after + hour).contains(&due),
                "{version}: {due}"
            );
            let (head, fields) = unpacked(&server, &member);
            assert_eq!(
                (head[0].as_int(), head[2].as_str(), head[3].as_int()),
                (1, GROUP, 1)
            );
            assert_eq!(fields, copy, "{version}");
        }
        assert_eq!(
            server.command(&["PTTL", "later"]).as_int(),
            -1,
            "nothing expires by default"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_durable_delay_outlives_the_process_that_asked_for_it() {
    let server = Server::start(Version::Redis70);
    let recorder = at_first(|| Ok(Outcome::RetryAfter(Duration::from_millis(300))));
    let tail = Subscription::tail("s").delayed_retry(DelayedRetry::durable("later"));
    let (supervisor, _) = start(&server.url(), [recorder.on(tail.clone())]).await;
    server.add_numbers("s", 0..20);
    recorder.reaches(20).await;
    nothing_pending(&server, "s").await;
    supervisor.shutdown().await.unwrap();
    let handled = recorder.count();
    let (supervisor, _) = start(&server.url(), [recorder.on(tail)]).await;
    recorder.reaches(40).await;
    nothing_pending(&server, "s").await;
    supervisor.shutdown().await.unwrap();
    assert_eq!(
        (recorder.count(), recorder.distinct(), server.xlen("s")),
        (40, 40, 40)
    );
    assert!(
        handled < 40,
        "the test was too slow to see the second process do it"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn b86_a_ttl_counts_from_the_latest_entry_and_is_pushed_by_writes_and_sweeps() {
    let server = Server::start(Version::Redis70);
    let recorder = Recorder::answering(|call| match call.attempt {
        1 => Ok(Outcome::RetryAfter(Duration::from_millis(
            call.text().parse()?,
        ))),
        _ => Ok(Outcome::Ack),
    });
    let ttl = Duration::from_secs(600);
    let tail = Subscription::tail("s").delayed_retry(DelayedRetry::durable("later").ttl(ttl));
    let (supervisor, _) = start(&server.url(), [recorder.on(tail)]).await;
    let expiry = || server.command(&["PEXPIRETIME", "later"]).as_int() as u64;
    let latest = || delayed(&server, "later").last().map(|(_, due)| *due);
    for (delay, members) in [("3600000", 1), ("7200000", 2), ("1800000", 3)] {
        server.xadd("s", &[("_payload", delay)]);
        eventually(SOON, "it is delayed", || {
            delayed(&server, "later").len() == members
        })
        .await;
        assert_eq!(expiry(), latest().unwrap() + 600_000);
    }
    // A sweep sets it too, whatever somebody did to it.
    server.command(&["PERSIST", "later"]);
    eventually(SOON, "a sweep has set it", || {
        expiry() == latest().unwrap() + 600_000
    })
    .await;
    server.xadd("s", &[("_payload", "50")]);
    recorder.reaches(5).await;
    assert_eq!(delayed(&server, "later").len(), 3);
    assert_eq!(expiry(), latest().unwrap() + 600_000);
    supervisor.shutdown().await.unwrap();
}

/// Puts a member into a delay set that the sweeper can read: a number as body, due at `due` ms.
fn put_delayed(
    server: &Server,
    set: &str,
    numbers: std::ops::Range<usize>,
    due: impl Fn(usize) -> u64,
) {
    let pack = "return redis.call('ZADD', KEYS[1], ARGV[1], \
                cmsgpack.pack({1, ARGV[2], 'g', 1, '_payload', ARGV[2], 'h:retry-count', '1'}))";
    let commands: Vec<Vec<String>> = numbers
        .map(|number| {
            let (number, due) = (number.to_string(), due(number).to_string());
            ["EVAL", pack, "1", set, &due, &number]
                .map(str::to_owned)
                .to_vec()
        })
        .collect();
    for reply in server.pipeline(&commands) {
        assert_eq!(reply.as_int(), 1);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn b84_thousands_that_are_due_at_once_are_moved_in_chunks_once_each_and_in_order() {
    let server = Server::start(Version::Redis70);
    put_delayed(&server, "later", 0..2000, |number| 1000 + number as u64);
    let recorder = Recorder::acking();
    let tail = recorder.on(Subscription::tail("s")
        .delayed_retry(DelayedRetry::durable("later"))
        .start(Start::Beginning));
    server.command(&["CONFIG", "RESETSTAT"]);
    // Any number of processes may sweep the same set.
    let (one, _) = start(&server.url(), [tail.clone()]).await;
    let (other, _) = start(&server.url(), [tail]).await;
    recorder.reaches(2000).await;
    nothing_pending(&server, "s").await;
    one.shutdown().await.unwrap();
    other.shutdown().await.unwrap();
    let bodies: Vec<String> = server
        .xrange("s")
        .iter()
        .map(|(_, fields)| field(fields, "_payload").unwrap())
        .collect();
    assert_eq!(
        bodies,
        (0..2000)
            .map(|number| number.to_string())
            .collect::<Vec<_>>()
    );
    assert_eq!((recorder.count(), recorder.distinct()), (2000, 2000));
    let sweeps = server.commandstat("zrem");
    assert!(sweeps >= 20, "2000 members were moved by {sweeps} calls");
}

#[tokio::test(flavor = "multi_thread")]
async fn b79_members_that_cannot_be_read_are_moved_aside_and_block_nothing() {
    let server = Server::start(Version::Redis70);
    let packed = |lua: &str| -> Vec<u8> {
        let script = format!("return cmsgpack.pack({lua})");
        server.command(&["EVAL", &script, "0"]).as_bytes().to_vec()
    };
    let unreadable: Vec<Vec<u8>> = vec![
        b"\xc1garbage\xff\x00".to_vec(),
        b"".to_vec(),
        b"plain text".to_vec(),
        b"7".to_vec(),
        packed("{2, 'id', 'g', 1, 'f', 'v'}"), // a future version
        packed("{1, 'id', 'g', 1, 'f'}"),      // a name without a value
        packed("{1, 'id', 'g', 1}"),           // no fields
        packed("{1, 'id', 'g', 1, 'f', {1}}"), // not a string
        packed("{1, 'id', 'g', 'one', 'f', 'v'}"), // no attempt
        [packed("{1, 'id', 'g', 1, 'f', 'v'}"), b"\x01".to_vec()].concat(), // more behind it
    ];
    for member in &unreadable {
        let add: [&[u8]; 4] = [b"ZADD", b"later", b"5", member];
        assert_eq!(server.command(&add).as_int(), 1);
    }
    put_delayed(&server, "later", 0..10, |_| 1000);
    let recorder = Recorder::acking();
    let tail = Subscription::tail("s").delayed_retry(DelayedRetry::durable("later"));
    let (supervisor, heard) = start(&server.url(), [recorder.on(tail)]).await;
    recorder.reaches(10).await;
    nothing_pending(&server, "s").await;
    eventually(SOON, "the set is empty", || {
        delayed(&server, "later").is_empty()
    })
    .await;
    supervisor.shutdown().await.unwrap();
    let kept: HashSet<Vec<u8>> = delayed(&server, "later:unreadable")
        .into_iter()
        .map(|(member, _)| member)
        .collect();
    assert_eq!(kept, unreadable.into_iter().collect());
    assert_eq!((recorder.count(), server.xlen("s")), (10, 10));
    heard.assert_nobody_crashed();
}

#[tokio::test(flavor = "multi_thread")]
async fn delayed_entries_of_another_process_are_found_without_being_told() {
    let server = Server::start(Version::Redis70);
    let recorder = Recorder::acking();
    let tail = Subscription::tail("s").delayed_retry(DelayedRetry::durable("later"));
    let (supervisor, _) = start(&server.url(), [recorder.on(tail)]).await;
    put_delayed(&server, "later", 0..1, |_| u64::from(u32::MAX) * 10_000);
    for round in 1..=3 {
        let due = server_clock(&server) + 100;
        put_delayed(&server, "later", round..round + 1, |_| due);
        recorder.reaches(round).await;
    }
    supervisor.shutdown().await.unwrap();
    assert_eq!((recorder.count(), delayed(&server, "later").len()), (3, 1));
}

/// B82: after a reconnection, or in a corner of the configuration, nobody moved what was due.
#[tokio::test(flavor = "multi_thread")]
async fn b82_what_is_due_moves_whatever_else_stands_still() {
    let server = Server::start(Version::Redis70);
    let recorder = Recorder::acking();
    // Nothing reads fresh entries here.
    let reclaim = Subscription::reclaim("s", LONG)
        .named("only")
        .delayed_retry(DelayedRetry::durable("later"));
    let (supervisor, heard) = start(&server.url(), [recorder.on(reclaim)]).await;
    let mut moved = 0;
    let mut moves = || {
        moved += 1;
        put_delayed(&server, "later", moved..moved + 1, |_| 1000);
        let (server, moved) = (&server, moved as i64);
        async move { eventually(SOON, "it is moved", || server.xlen("s") == moved).await }
    };
    moves().await;
    // The connection that sweeps, while it sleeps.
    let settler = server.client_list().into_iter().find_map(|line| {
        let id = line.split(' ').next()?.strip_prefix("id=")?.to_owned();
        line.contains("settler").then_some(id)
    });
    let killed = server.command(&["CLIENT", "KILL", "ID", &settler.unwrap()]);
    assert_eq!(killed.as_int(), 1);
    moves().await;
    supervisor.pause("only").await.unwrap();
    moves().await;
    supervisor.resume("only").await.unwrap();
    moves().await;
    supervisor.shutdown().await.unwrap();
    assert_eq!(delayed(&server, "later"), []);
    heard.assert_nobody_crashed();
}

// ---- deleting what is acknowledged ------------------------------------------------------------------------

#[tokio::test(flavor = "multi_thread")]
async fn b87_acknowledged_entries_are_deleted_with_every_verdict_that_acknowledges() {
    for version in Version::ALL {
        let server = Server::start(version);
        let recorder = Recorder::answering(|call| match (call.attempt, call.text()) {
            (1, "retry") => Ok(Outcome::Retry),
            (1, "durable") => Ok(Outcome::RetryAfter(Duration::from_millis(10))),
            (1, "dead") => Ok(Outcome::DeadLetter("no".into())),
            (1, "reject") => Ok(Outcome::Reject),
            (1, "leave") => Ok(Outcome::LeavePending),
            _ => Ok(Outcome::Ack),
        });
        let tail = Subscription::tail("s")
            .after_ack(AfterAck::Delete)
            .dead_letter("dead")
            .delayed_retry(DelayedRetry::durable("later"));
        let parking = Recorder::answering(|call| match call.attempt {
            1 => Ok(Outcome::RetryAfter(Duration::from_millis(10))),
            _ => Ok(Outcome::Ack),
        });
        let in_process = parking.on(Subscription::tail("parked").after_ack(AfterAck::Delete));
        let (supervisor, _) = start(&server.url(), [recorder.on(tail), in_process]).await;
        for body in ["ack", "retry", "durable", "dead", "reject", "leave"] {
            server.xadd("s", &[("_payload", body)]);
        }
        server.xadd("parked", &[("_payload", "x")]);
        recorder.reaches(8).await;
        parking.reaches(2).await;
        eventually(SOON, "acknowledged", || {
            server.xpending_count("s", GROUP) == 1
        })
        .await;
        nothing_pending(&server, "parked").await;
        eventually(SOON, "both are deleted", || {
            (server.xlen("s"), server.xlen("parked")) == (1, 0)
        })
        .await;
        supervisor.shutdown().await.unwrap();
        assert_eq!(
            field(&fields_at(&server, "s", 0), "_payload").as_deref(),
            Some("leave")
        );
        assert_eq!(server.xlen("dead"), 1, "{version}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_another_group_needs_is_not_deleted() {
    for version in Version::ALL {
        let server = Server::start(version);
        // Has read one of three, and not acknowledged it.
        server.xgroup_create("s", "slow", "0");
        let ids = server.add_numbers("s", 0..1);
        server.read_as("s", "slow", "c", 1);
        let recorder = Recorder::acking();
        let tail = Subscription::tail("s")
            .after_ack(AfterAck::Delete)
            .start(Start::Beginning);
        let (supervisor, _) = start(&server.url(), [recorder.on(tail)]).await;
        let more = server.add_numbers("s", 1..3);
        recorder.reaches(3).await;
        nothing_pending(&server, "s").await;
        assert_eq!(
            server.xlen("s"),
            3,
            "{version}: one is pending and two are unread elsewhere"
        );

        // The last to acknowledge deletes, if it uses it too.
        let slow = Recorder::acking();
        let draft = Subscription::tail("s")
            .group("slow")
            .consumer("c")
            .workers(1)
            .after_ack(AfterAck::Delete);
        let (other, _) = start(&server.url(), [slow.on(draft)]).await;
        slow.reaches(3).await;
        eventually(SOON, "all are deleted", || server.xlen("s") == 0).await;
        other.shutdown().await.unwrap();
        supervisor.shutdown().await.unwrap();
        assert_eq!(slow.ids(), [ids, more].concat(), "{version}");
        assert_eq!(recorder.count(), 3);
    }
}

// ---- replies that are lost -----------------------------------------------------------------------------------

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_reply_to_an_acknowledgement_costs_nothing() {
    let server = Server::start(Version::Redis70);
    let proxy = server.proxy();
    let recorder = Recorder::acking();
    // With room for few: an entry that is stuck would be noticed.
    let tail = Subscription::tail("s").max_in_flight(4);
    let (supervisor, heard) = start(&proxy.url(), [recorder.on(tail)]).await;
    for round in 0..10 {
        let fault = match round % 3 {
            0 => proxy.drop_next_reply("XACK"),
            1 => proxy.drop_next_request("XACK"),
            _ => proxy.tear_next_reply("XACK"),
        };
        server.add_numbers("s", 20 * round..20 * round + 20);
        recorder.reaches(20 * round + 20).await;
        eventually(SOON, "the reply was lost", || fault.happened()).await;
    }
    nothing_pending(&server, "s").await;
    supervisor.shutdown().await.unwrap();
    assert_eq!(
        (recorder.count(), recorder.distinct(), server.xlen("s")),
        (200, 200, 200)
    );
    heard.assert_nobody_crashed();
}

#[derive(Clone, Copy, Debug)]
enum Copied {
    Retry,
    Parked,
    Durable,
    Dead,
    DeletedAndRetried,
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_reply_to_a_step_that_copies_makes_no_second_copy() {
    let kinds = [
        Copied::Retry,
        Copied::Parked,
        Copied::Durable,
        Copied::Dead,
        Copied::DeletedAndRetried,
    ];
    for kind in kinds {
        let server = Server::start(Version::Redis70);
        let proxy = server.proxy();
        let recorder = at_first(move || {
            Ok(match kind {
                Copied::Retry | Copied::DeletedAndRetried => Outcome::Retry,
                Copied::Parked => Outcome::RetryAfter(Duration::from_millis(20)),
                Copied::Durable => Outcome::RetryAfter(HOUR),
                Copied::Dead => Outcome::DeadLetter("no".into()),
            })
        });
        let mut tail = Subscription::tail("s").max_in_flight(3).dead_letter("dead");
        match kind {
            Copied::Durable => tail = tail.delayed_retry(DelayedRetry::durable("later")),
            Copied::DeletedAndRetried => tail = tail.after_ack(AfterAck::Delete),
            _ => {}
        }
        let (supervisor, heard) = start(&proxy.url(), [recorder.on(tail)]).await;
        let copies = || match kind {
            Copied::Retry | Copied::Parked => server.xlen("s") / 2,
            Copied::Durable => delayed(&server, "later").len() as i64,
            Copied::Dead => server.xlen("dead"),
            Copied::DeletedAndRetried => 0,
        };
        let all = |rounds: usize| match kind {
            Copied::Durable | Copied::Dead => 5 * rounds,
            _ => 10 * rounds,
        };
        // From the first one the server has the script, and is asked by EVALSHA.
        server.add_numbers("s", 0..5);
        recorder.reaches(all(1)).await;
        nothing_pending(&server, "s").await;
        for round in 1..8 {
            let fault = match round % 2 {
                0 => proxy.tear_next_reply("EVALSHA"),
                _ => proxy.drop_next_reply("EVALSHA"),
            };
            server.add_numbers("s", 5 * round..5 * round + 5);
            recorder.reaches(all(round + 1)).await;
            nothing_pending(&server, "s").await;
            eventually(SOON, "the reply was lost", || fault.happened()).await;
        }
        supervisor.shutdown().await.unwrap();
        let copied = copies();
        match kind {
            Copied::DeletedAndRetried => assert_eq!(server.xlen("s"), 0),
            _ => assert_eq!(copied, 40, "{kind:?}"),
        }
        assert_eq!(
            (recorder.count(), recorder.distinct()),
            (all(8), all(8)),
            "{kind:?}"
        );
        heard.assert_nobody_crashed();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_reply_to_a_counted_start_counts_it_once() {
    let server = Server::start(Version::Redis70);
    let proxy = server.proxy();
    server.add_numbers("s", 0..20);
    server.leave_behind("s", GROUP, "dead");
    let gate = Gate::closed();
    let recorder = Recorder::behind(&gate);
    let reclaim = Subscription::reclaim("s", LONG).workers(20);
    let fault = proxy.drop_next_reply("EVALSHA keep");
    let (supervisor, _) = start(&proxy.url(), [recorder.on(reclaim)]).await;
    recorder.reaches(20).await;
    assert!(fault.happened());
    assert!(
        server
            .xpending("s", GROUP)
            .iter()
            .all(|(.., count)| *count == 2)
    );
    gate.open();
    nothing_pending(&server, "s").await;
    supervisor.shutdown().await.unwrap();
    assert_eq!((recorder.count(), recorder.distinct()), (20, 20));
    assert!(recorder.calls().iter().all(|call| call.delivery_count == 2));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_reply_to_a_sweep_moves_nothing_twice() {
    let server = Server::start(Version::Redis70);
    let proxy = server.proxy();
    let recorder = Recorder::acking();
    let tail = Subscription::tail("s").delayed_retry(DelayedRetry::durable("later"));
    let (supervisor, _) = start(&proxy.url(), [recorder.on(tail)]).await;
    for round in 0..6 {
        let fault = proxy.drop_next_reply("EVALSHA later");
        put_delayed(&server, "later", 10 * round..10 * round + 10, |_| 1000);
        recorder.reaches(10 * round + 10).await;
        eventually(SOON, "the reply was lost", || fault.happened()).await;
    }
    nothing_pending(&server, "s").await;
    supervisor.shutdown().await.unwrap();
    assert_eq!((recorder.count(), server.xlen("s")), (60, 60));
}

#[tokio::test(flavor = "multi_thread")]
async fn b71_connections_cut_at_random_lose_nothing_and_copy_nothing_twice() {
    let server = Server::start(Version::Redis70);
    let proxy = server.proxy();
    let recorder = Recorder::running(|call| async move {
        tokio::time::sleep(Duration::from_millis(2)).await;
        // Not by the attempt: what was fetched by a lost read counts one more.
        let copied = call.entry.field("h:retry-count").is_some();
        match (copied, call.text().len()) {
            (false, 1) => Ok(Outcome::Retry),
            (false, 2) => Ok(Outcome::RetryAfter(Duration::from_millis(5))),
            (false, _) => Err("no".into()),
            (true, _) => Ok(Outcome::Ack),
        }
    });
    let tail = capped(Subscription::tail("s").block(Duration::from_millis(200)), 9).batch(20);
    let (supervisor, heard) = start(&proxy.url(), [recorder.on(tail)]).await;
    // One, two and three digits: 1000 entries, of which each is retried once.
    for round in 0..40 {
        server.add_numbers("s", 25 * round..25 * round + 25);
        recorder.reaches(25 * round + 12).await;
        proxy.cut_all();
    }
    recorder.reaches(2000).await;
    nothing_pending(&server, "s").await;
    supervisor.shutdown().await.unwrap();
    assert_eq!(server.xlen("s"), 2000, "one copy of each");
    assert_eq!((recorder.count(), recorder.distinct()), (2000, 2000));
    heard.assert_nobody_crashed();
}

// ---- copies that the server refuses -----------------------------------------------------------------------

#[tokio::test(flavor = "multi_thread")]
async fn b73_with_memory_full_acknowledgements_flow_and_copies_wait() {
    for version in Version::ALL {
        let server = Server::start(version);
        server.xgroup_create("s", GROUP, "0");
        server.add_numbers("s", 0..100);
        let gate = Gate::closed();
        let passes = gate.clone();
        let recorder = Recorder::running(move |call| {
            let gate = passes.clone();
            async move {
                gate.passed().await;
                match (call.attempt, call.text()) {
                    (1, "3" | "33") => Ok(Outcome::Retry),
                    (1, "4" | "44") => Ok(Outcome::DeadLetter("no".into())),
                    (1, "5" | "55") => Ok(Outcome::RetryAfter(Duration::from_millis(10))),
                    _ => Ok(Outcome::Ack),
                }
            }
        });
        // Four copies wait and take up room; acknowledgements that waited for them would take for ever.
        let tail = Subscription::tail("s").dead_letter("dead").max_in_flight(6);
        // The same with a durable delay, in a group of its own.
        let later = Subscription::tail("s")
            .group("later")
            .start(Start::Beginning)
            .delayed_retry(DelayedRetry::durable("set"))
            .dead_letter("dead");
        let durable = recorder.clone();
        let (supervisor, heard) =
            start(&server.url(), [recorder.on(tail), durable.on(later)]).await;
        recorder.reaches(14).await;
        server.command(&["CONFIG", "SET", "maxmemory", "1"]);
        gate.open();
        recorder.reaches(200).await;
        for group in [GROUP, "later"] {
            eventually(SOON, "acknowledgements flow", || {
                server.xpending_count("s", group) == 6
            })
            .await;
        }
        heard
            .wait("the reason is told", |event| match event {
                Event::ServerAway { error, .. } => error.starts_with("OOM").then_some(()),
                _ => None,
            })
            .await;
        assert_eq!(
            (server.xlen("s"), server.xlen("dead")),
            (100, 0),
            "{version}"
        );
        assert_eq!(recorder.count(), 200, "nothing is run again because of it");

        // Tried again and again, and told once.
        let tries = server.commandstat("evalsha");
        eventually(SOON, "more tries", || {
            server.commandstat("evalsha") >= tries + 8
        })
        .await;
        let away = heard.count(|event| matches!(event, Event::ServerAway { .. }));
        assert_eq!(away, 2, "{version}: once for each subscription");

        server.command(&["CONFIG", "SET", "maxmemory", "0"]);
        recorder.reaches(208).await;
        eventually(SOON, "all dead letters are there", || {
            server.xlen("dead") == 4
        })
        .await;
        for group in [GROUP, "later"] {
            eventually(SOON, "all is settled", || {
                server.xpending_count("s", group) == 0
            })
            .await;
        }
        supervisor.shutdown().await.unwrap();
        assert_eq!(
            (recorder.count(), server.xlen("s")),
            (208, 108),
            "{version}"
        );
        assert_eq!(heard.count(|event| left_pending(event).is_some()), 0);
        heard.assert_nobody_crashed();
    }
}

/// Entries with these bodies: two whose copy is refused, and others around them. Waits until the two are
/// left pending, and all else is acknowledged.
async fn refused_for_good(server: &Server, recorder: &Recorder, heard: &Heard, word: &str) {
    let before = recorder.count();
    let bodies = ["ack", "refused", "ack", "refused", "ack", "ack", "ack"];
    let ids = server.xadd_many("s", bodies.map(|body| vec![("_payload", body)]));
    recorder.reaches(before + bodies.len()).await;
    eventually(SOON, "the others are acknowledged", || {
        server.xpending_count("s", GROUP) == 2
    })
    .await;
    eventually(SOON, "it is told", || heard.pick(left_pending).len() == 2).await;
    let told = heard.pick(left_pending);
    let mut told_ids: Vec<String> = told.iter().map(|(id, _)| id.to_string()).collect();
    told_ids.sort();
    assert_eq!(told_ids, [ids[1].clone(), ids[3].clone()]);
    assert!(
        told.iter().all(|(_, reason)| reason.contains(word)),
        "{told:?}"
    );
    let left: Vec<String> = server
        .xpending("s", GROUP)
        .into_iter()
        .map(|(id, ..)| id)
        .collect();
    assert_eq!(left, told_ids);
}

#[tokio::test(flavor = "multi_thread")]
async fn b92_an_entry_whose_target_has_another_type_is_left_pending_after_three_tries() {
    for target in ["dead", "later"] {
        let server = Server::start(Version::Redis70);
        let recorder = Recorder::answering(move |call| match (call.text(), target) {
            ("ack", _) => Ok(Outcome::Ack),
            (_, "dead") => Ok(Outcome::DeadLetter("no".into())),
            _ => Ok(Outcome::RetryAfter(HOUR)),
        });
        let tail = Subscription::tail("s")
            .max_in_flight(2)
            .dead_letter("dead")
            .delayed_retry(DelayedRetry::durable("later"));
        let (supervisor, heard) = start(&server.url(), [recorder.on(tail)]).await;
        server.command(&["SET", target, "something else"]);
        refused_for_good(&server, &recorder, &heard, "WRONGTYPE").await;
        supervisor.shutdown().await.unwrap();
        assert_eq!(server.command(&["GET", target]).as_str(), "something else");
        heard.assert_nobody_crashed();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn b71_b93_an_entry_whose_target_is_forbidden_is_left_pending_after_three_tries() {
    for version in Version::ALL {
        let server = Server::start(version);
        server.command(&[
            "ACL", "SETUSER", "app", "on", ">secret", "~*", "&*", "+@all",
        ]);
        let url = format!("redis://app:secret@127.0.0.1:{}", server.port());
        let recorder = Recorder::answering(|call| match (call.attempt, call.text()) {
            (_, "refused") => Ok(Outcome::DeadLetter("no".into())),
            (1, "retry") => Ok(Outcome::Retry),
            _ => Ok(Outcome::Ack),
        });
        let tail = Subscription::tail("s").max_in_flight(2).dead_letter("dead");
        let (supervisor, heard) = start(&url, [recorder.on(tail)]).await;
        server.command(&["ACL", "SETUSER", "app", "resetkeys", "~s"]);
        refused_for_good(&server, &recorder, &heard, "NOPERM").await;
        // Copies that are allowed do not wait behind those that are not.
        let before = recorder.count();
        server.xadd("s", &[("_payload", "retry")]);
        recorder.reaches(before + 2).await;
        supervisor.shutdown().await.unwrap();
        assert_eq!(server.xlen("dead"), 0, "{version}");
        heard.assert_nobody_crashed();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn b102_a_stream_at_its_largest_id_takes_no_copies_and_its_entries_are_left_pending_or_dead()
{
    let server = Server::start(Version::Redis70);
    let largest = "18446744073709551615-18446744073709551615";
    let recorder = Recorder::answering(|call| match (call.attempt, call.text()) {
        (1, "retry") => Ok(Outcome::Retry),
        (1, "later") => Ok(Outcome::RetryAfter(Duration::from_millis(20))),
        (1, "dead") => Ok(Outcome::DeadLetter("no".into())),
        _ => Ok(Outcome::Ack),
    });
    let tail = Subscription::tail("s").dead_letter("dead");
    let (supervisor, heard) = start(&server.url(), [recorder.on(tail)]).await;
    server.command(&["XADD", "s", "0-1", "_payload", "retry"]);
    recorder.reaches(2).await;
    nothing_pending(&server, "s").await;
    let last: EntryId = server.xrange("s")[1].0.parse().unwrap();
    let next = format!("{}-70000", last.ms + 1);
    server.command(&["XADD", "s", &next, "_payload", "later"]);
    recorder.reaches(4).await;
    nothing_pending(&server, "s").await;
    assert_eq!(heard.pick(left_pending), []);

    // At once, or the copy of one would take the id of the next.
    let before = "18446744073709551615-1";
    let between = "18446744073709551615-2";
    let add = |id, body| vec!["XADD", "s", id, "_payload", body];
    let added = server.pipeline(&[
        vec!["MULTI"],
        add(before, "retry"),
        add(between, "dead"),
        add(largest, "later"),
        vec!["EXEC"],
    ]);
    assert_eq!(added[4].as_array().len(), 3);
    recorder.reaches(7).await;
    eventually(SOON, "both are told", || {
        heard.pick(left_pending).len() == 2
    })
    .await;
    eventually(SOON, "the one that can be moved is", || {
        server.xlen("dead") == 1
    })
    .await;
    supervisor.shutdown().await.unwrap();
    let told = heard.pick(left_pending);
    let reason = |(_, reason): &(EntryId, String)| reason.contains("exhausted");
    assert!(told.iter().all(reason), "{told:?}");
    let mut told: Vec<String> = told.iter().map(|(id, _)| id.to_string()).collect();
    told.sort();
    let left: Vec<String> = server
        .xpending("s", GROUP)
        .into_iter()
        .map(|(id, ..)| id)
        .collect();
    assert_eq!(left, [before, largest]);
    assert_eq!(left, told);
    heard.assert_nobody_crashed();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_entry_with_more_fields_than_a_script_can_copy_is_left_pending_and_holds_up_nobody() {
    let server = Server::start(Version::Redis70);
    let recorder = Recorder::answering(|call| match (call.attempt, call.text()) {
        (1, "retry") => Ok(Outcome::Retry),
        (1, "later") => Ok(Outcome::RetryAfter(Duration::from_millis(20))),
        (1, "dead") => Ok(Outcome::DeadLetter("no".into())),
        _ => Ok(Outcome::Ack),
    });
    let tail = Subscription::tail("s").dead_letter("dead");
    let (supervisor, heard) = start(&server.url(), [recorder.on(tail)]).await;
    let entry = |body: &str, fields: usize| {
        let mut all = vec![("_payload".to_owned(), body.to_owned())];
        all.extend((1..fields).map(|n| ("f".to_owned(), n.to_string())));
        all
    };
    for body in ["retry", "later", "dead"] {
        server.xadd("s", &entry(body, 4100));
        server.xadd("s", &entry(body, 3980));
    }
    // Of the three that can be copied two come back.
    recorder.reaches(8).await;
    eventually(SOON, "three are told", || {
        heard.pick(left_pending).len() == 3
    })
    .await;
    eventually(SOON, "all else is settled", || {
        server.xpending_count("s", GROUP) == 3
    })
    .await;
    supervisor.shutdown().await.unwrap();
    let told = heard.pick(left_pending);
    assert!(
        told.iter().all(|(_, reason)| reason.contains("fields")),
        "{told:?}"
    );
    assert_eq!((server.xlen("s"), server.xlen("dead")), (8, 1));
    assert_eq!(recorder.count(), 8);
    heard.assert_nobody_crashed();
}

#[tokio::test(flavor = "multi_thread")]
async fn copies_larger_than_a_step_go_alone() {
    let server = Server::start(Version::Redis70);
    let recorder = at_first(|| Ok(Outcome::Retry));
    let (supervisor, _) = start(&server.url(), [recorder.on(Subscription::tail("s"))]).await;
    let body = "x".repeat(1 << 21);
    for _ in 0..5 {
        server.xadd("s", &[("_payload", &body)]);
    }
    recorder.reaches(10).await;
    nothing_pending(&server, "s").await;
    supervisor.shutdown().await.unwrap();
    assert_eq!((recorder.distinct(), server.xlen("s")), (10, 10));
}

#[tokio::test(flavor = "multi_thread")]
async fn b77_a_source_that_refuses_the_acknowledgement_blocks_the_subscription_until_it_does_not() {
    let server = Server::start(Version::Redis70);
    server.command(&[
        "ACL", "SETUSER", "app", "on", ">secret", "~*", "&*", "+@all",
    ]);
    let url = format!("redis://app:secret@127.0.0.1:{}", server.port());
    let recorder = Recorder::acking();
    let tail = Subscription::tail("s").max_in_flight(10);
    let (supervisor, heard) = start(&url, [recorder.on(tail)]).await;
    server.command(&["ACL", "SETUSER", "app", "-xack"]);
    server.add_numbers("s", 0..30);
    let error = heard
        .wait("it is told", |event| match event {
            Event::Blocked { error, .. } => Some(error.clone()),
            _ => None,
        })
        .await;
    assert!(
        error.contains("NOPERM") && error.contains("xack"),
        "{error}"
    );
    recorder.reaches(10).await;
    assert_eq!(
        server.xpending_count("s", GROUP),
        10,
        "no more is read than can be held"
    );
    server.command(&["ACL", "SETUSER", "app", "+xack"]);
    // It looks again every 30 s.
    let all = || recorder.count() == 30 && server.xpending_count("s", GROUP) == 0;
    eventually(Duration::from_secs(60), "all is settled", all).await;
    heard
        .wait("it is told", |event| {
            matches!(event, Event::Unblocked { .. }).then_some(())
        })
        .await;
    supervisor.shutdown().await.unwrap();
    assert_eq!((recorder.count(), recorder.distinct()), (30, 30));
    heard.assert_nobody_crashed();
}

// ---- entries that somebody else settled or took --------------------------------------------------------------

/// Handlers that wait for the gate, then answer with what the entry's body says.
fn told_by_body(gate: &Gate) -> Recorder {
    let gate = gate.clone();
    Recorder::running(move |call| {
        let gate = gate.clone();
        async move {
            gate.passed().await;
            Ok(match (call.attempt, call.text()) {
                (1, "retry") => Outcome::Retry,
                (1, "parked") => Outcome::RetryAfter(Duration::from_millis(10)),
                (1, "dead") => Outcome::DeadLetter("no".into()),
                (1, "reject") => Outcome::Reject,
                _ => Outcome::Ack,
            })
        }
    })
}

const BODIES: [&str; 5] = ["ack", "retry", "parked", "dead", "reject"];

#[tokio::test(flavor = "multi_thread")]
async fn b74_an_entry_that_was_acknowledged_by_hand_gets_no_copy_and_the_subscription_goes_on() {
    for version in Version::ALL {
        let server = Server::start(version);
        let gate = Gate::closed();
        let recorder = told_by_body(&gate);
        let tail = Subscription::tail("s").dead_letter("dead");
        let durable = Subscription::tail("d").delayed_retry(DelayedRetry::durable("later"));
        let later = Recorder::behind(&gate);
        let (supervisor, heard) =
            start(&server.url(), [recorder.on(tail), later.on(durable)]).await;
        let ids = server.xadd_many("s", BODIES.map(|body| vec![("_payload", body)]));
        recorder.reaches(BODIES.len()).await;
        for id in &ids {
            assert_eq!(server.command(&["XACK", "s", GROUP, id]).as_int(), 1);
        }
        gate.open();
        // What comes after them shows that they are through, and that room was given back.
        server.xadd_many("s", (0..1000).map(|_| vec![("_payload", "ack")]));
        recorder.reaches(1000 + BODIES.len()).await;
        nothing_pending(&server, "s").await;
        supervisor.shutdown().await.unwrap();
        assert_eq!(
            (server.xlen("s"), server.xlen("dead")),
            (1005, 0),
            "{version}"
        );
        assert_eq!(recorder.count(), 1005);
        assert_eq!(heard.gone(), []);
        heard.assert_nobody_crashed();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_entry_that_another_consumer_took_unnoticed_is_not_copied_either() {
    for version in Version::ALL {
        let server = Server::start(version);
        let gate = Gate::closed();
        let recorder = told_by_body(&gate);
        // Long before the keep-alive would notice.
        let tail = Subscription::tail("s").dead_letter("dead").workers(5);
        let durable = Subscription::tail("d")
            .delayed_retry(DelayedRetry::durable("later"))
            .workers(5);
        let subscriptions = [recorder.on(tail), recorder.on(durable)];
        let (supervisor, heard) = start(&server.url(), subscriptions).await;
        let mut taken = Vec::new();
        for stream in ["s", "d"] {
            let ids = server.xadd_many(stream, BODIES.map(|body| vec![("_payload", body)]));
            taken.push((stream, ids));
        }
        recorder.reaches(2 * BODIES.len()).await;
        for (stream, ids) in &taken {
            for id in ids {
                server.give_to(stream, GROUP, "thief", id, (Duration::ZERO, 1));
            }
        }
        gate.open();
        let lost = || heard.count(|event| matches!(event, Event::OwnershipLost { .. }));
        // `d` has no dead-letter stream: there that verdict asks nothing of the server.
        eventually(SOON, "it is told", || lost() == 5).await;
        for (stream, ids) in &taken {
            eventually(SOON, "what was done is acknowledged", || {
                server.xpending_count(stream, GROUP) == 3
            })
            .await;
            let left: Vec<(String, String)> = server
                .xpending(stream, GROUP)
                .into_iter()
                .map(|(id, owner, ..)| (id, owner))
                .collect();
            let stays: Vec<_> = ids[1..4]
                .iter()
                .map(|id| (id.clone(), "thief".to_owned()))
                .collect();
            assert_eq!(left, stays, "{version}");
        }
        supervisor.shutdown().await.unwrap();
        let lengths = (server.xlen("s"), server.xlen("d"), server.xlen("dead"));
        assert_eq!(lengths, (5, 5, 0), "{version}: no copies");
        assert_eq!(delayed(&server, "later"), []);
        assert_eq!(recorder.count(), 10);
        heard.assert_nobody_crashed();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_entry_that_another_consumer_took_is_not_copied_and_its_handler_is_told() {
    let server = Server::start(Version::Redis70);
    let told = Arc::new(AtomicU64::new(0));
    let count = Arc::clone(&told);
    let recorder = Recorder::running(move |call| {
        let count = Arc::clone(&count);
        async move {
            call.context.ownership_lost().await;
            count.fetch_add(1, Ordering::SeqCst);
            Ok(match call.text() {
                "retry" => Outcome::Retry,
                "parked" => Outcome::RetryAfter(Duration::from_millis(10)),
                "dead" => Outcome::DeadLetter("no".into()),
                "reject" => Outcome::Reject,
                _ => Outcome::Ack,
            })
        }
    });
    let tail = Subscription::tail("s")
        .dead_letter("dead")
        .workers(BODIES.len())
        .keep_alive(Duration::from_millis(50));
    let (supervisor, heard) = start(&server.url(), [recorder.on(tail)]).await;
    let ids = server.xadd_many("s", BODIES.map(|body| vec![("_payload", body)]));
    recorder.reaches(BODIES.len()).await;
    // Two more wait for a worker; they are taken away before they start.
    let waiting = server.xadd_many("s", ["waiting"; 2].map(|body| vec![("_payload", body)]));
    eventually(SOON, "all are read", || {
        server.xpending_count("s", GROUP) == 7
    })
    .await;
    let lost = || heard.count(|event| matches!(event, Event::OwnershipLost { .. }));
    // First what waits: the workers are busy until theirs are taken too.
    for (taken, told) in [(&waiting, 2), (&ids, 7)] {
        for id in taken {
            server.give_to("s", GROUP, "thief", id, (Duration::ZERO, 1));
        }
        eventually(SOON, "it is told", || lost() == told).await;
    }
    eventually(SOON, "all handlers are told", || {
        told.load(Ordering::SeqCst) == 5
    })
    .await;
    eventually(SOON, "what was done is acknowledged", || {
        server.xpending_count("s", GROUP) == 5
    })
    .await;
    supervisor.shutdown().await.unwrap();
    assert_eq!((server.xlen("s"), server.xlen("dead")), (7, 0), "no copies");
    let left: Vec<(String, String)> = server
        .xpending("s", GROUP)
        .into_iter()
        .map(|(id, owner, ..)| (id, owner))
        .collect();
    let stays = [&ids[1..4], &waiting[..]].concat();
    let expected: Vec<_> = stays
        .iter()
        .map(|id| (id.clone(), "thief".to_owned()))
        .collect();
    assert_eq!(left, expected);
    assert_eq!(recorder.count(), 5, "what waited was not started");
    assert_eq!(lost(), 7);
}

#[tokio::test(flavor = "multi_thread")]
async fn b75_with_nothing_to_settle_nothing_is_sent() {
    let server = Server::start(Version::Redis70);
    let recorder = Recorder::acking();
    let tail = Subscription::tail("s")
        .block(Duration::from_millis(100))
        .keep_alive(SHORT);
    let (supervisor, _) = start(&server.url(), [recorder.on(tail)]).await;
    server.add_numbers("s", 0..10);
    recorder.reaches(10).await;
    nothing_pending(&server, "s").await;
    let sent =
        || server.commandstat("xack") + server.commandstat("evalsha") + server.commandstat("eval");
    let (before, reads) = (sent(), server.commandstat("xreadgroup"));
    eventually(SOON, "five reads", || {
        server.commandstat("xreadgroup") >= reads + 5
    })
    .await;
    assert_eq!(sent(), before);
    supervisor.shutdown().await.unwrap();
    let failed: Vec<_> = server
        .info("commandstats")
        .into_iter()
        .filter(|(name, line)| name == "cmdstat_xack" && !line.contains("failed_calls=0"))
        .collect();
    assert_eq!(failed, []);
}

// ---- scripts that the server forgot ---------------------------------------------------------------------------

#[tokio::test(flavor = "multi_thread")]
async fn b91_scripts_that_are_flushed_under_load_are_loaded_again() {
    for version in Version::ALL {
        let server = Server::start(version);
        server.add_numbers("s", 0..100);
        server.leave_behind("s", GROUP, "dead");
        let recorder = Recorder::answering(|call| {
            let number: usize = call.text().parse()?;
            match (call.header("again"), call.attempt, number % 4) {
                (_, 1, 0) => Ok(Outcome::Retry),
                (_, 1, 1) => Ok(Outcome::RetryAfter(Duration::from_millis(20))),
                (_, 1, 2) => Err("no".into()),
                _ => Ok(Outcome::Ack),
            }
        });
        let tail = capped(Subscription::tail("s").block(SHORT), 9)
            .delayed_retry(DelayedRetry::durable("later"))
            .keep_alive(SHORT);
        let reclaim = capped(Subscription::reclaim("s", LONG).block(SHORT), 9).keep_alive(SHORT);
        let (flushing, done) = (server.connect(), Arc::new(AtomicBool::new(false)));
        let flusher = std::thread::spawn({
            let (mut flushing, done) = (flushing, Arc::clone(&done));
            move || {
                while !done.load(Ordering::Relaxed) {
                    flushing.command(&["SCRIPT", "FLUSH"]).unwrap();
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
        });
        let (supervisor, heard) =
            start(&server.url(), [recorder.on(tail), recorder.on(reclaim)]).await;
        server.add_numbers("s", 0..400);
        // The first hundred were started before and are at their second attempt.
        recorder.reaches(100 + 400 + 300).await;
        nothing_pending(&server, "s").await;
        supervisor.shutdown().await.unwrap();
        done.store(true, Ordering::Relaxed);
        flusher.join().unwrap();
        assert_eq!(
            (recorder.count(), recorder.distinct()),
            (800, 800),
            "{version}"
        );
        assert_eq!(server.xlen("s"), 800, "{version}");
        heard.assert_nobody_crashed();
    }
}

// ---- several groups ------------------------------------------------------------------------------------------

#[tokio::test(flavor = "multi_thread")]
async fn one_groups_retries_are_not_the_other_groups_business() {
    let server = Server::start(Version::Redis70);
    let (retrying, other) = (at_first(|| Ok(Outcome::Retry)), Recorder::acking());
    let delaying = at_first(|| Ok(Outcome::RetryAfter(Duration::from_millis(20))));
    let (supervisor, _) = start(
        &server.url(),
        [
            retrying.on(Subscription::tail("s").group("retrying")),
            delaying.on(Subscription::tail("s")
                .group("delaying")
                .delayed_retry(DelayedRetry::durable("later"))),
            other.on(Subscription::tail("s").group("other")),
        ],
    )
    .await;
    let ids = server.add_numbers("s", 0..200);
    retrying.reaches(400).await;
    delaying.reaches(400).await;
    for group in ["retrying", "delaying", "other"] {
        eventually(SOON, "nothing is pending", || {
            server.xpending_count("s", group) == 0
        })
        .await;
        let unread = server.read_as("s", group, "last", 1000);
        assert_eq!(unread, Vec::<String>::new(), "all copies were read");
    }
    supervisor.shutdown().await.unwrap();
    assert_eq!(server.xlen("s"), 600);
    let mut seen = other.ids();
    seen.sort_by_key(|id| id.parse::<EntryId>().unwrap());
    assert_eq!(seen, ids, "each entry once, and no copy");
    for recorder in [&retrying, &delaying] {
        assert_eq!((recorder.count(), recorder.distinct()), (400, 400));
    }
}

// ---- order -----------------------------------------------------------------------------------------------------

#[tokio::test(flavor = "multi_thread")]
async fn entries_of_one_key_run_one_after_the_other_in_order() {
    let server = Server::start(Version::Redis70);
    let running: Arc<Mutex<HashSet<String>>> = Arc::default();
    let recorder = Recorder::running(move |call| {
        let running = Arc::clone(&running);
        async move {
            let key = call.header("customer").unwrap_or_else(|| "none".into());
            assert!(
                running.lock().unwrap().insert(key.clone()),
                "{key} runs already"
            );
            // Different for each entry, so that workers that could overtake would.
            for _ in 0..call.id.seq % 7 {
                tokio::task::yield_now().await;
            }
            running.lock().unwrap().remove(&key);
            Ok(Outcome::Ack)
        }
    });
    let tail = Subscription::tail("s")
        .workers(8)
        .ordered_by("customer")
        .max_in_flight(300);
    let (supervisor, heard) = start(&server.url(), [recorder.on(tail)]).await;
    let ids = server.xadd_many(
        "s",
        (0..2000).map(|number| match (number * 7919) % 41 {
            0 => vec![("_payload".to_owned(), number.to_string())],
            key => vec![
                ("_payload".to_owned(), number.to_string()),
                ("h:customer".to_owned(), format!("c-{key}")),
            ],
        }),
    );
    recorder.reaches(2000).await;
    nothing_pending(&server, "s").await;
    supervisor.shutdown().await.unwrap();
    heard.assert_nobody_crashed();
    let mut of_key: HashMap<Option<String>, Vec<EntryId>> = HashMap::new();
    let mut worker_of: HashMap<Option<String>, HashSet<usize>> = HashMap::new();
    for call in recorder.calls() {
        of_key
            .entry(call.header("customer"))
            .or_default()
            .push(call.id);
        worker_of
            .entry(call.header("customer"))
            .or_default()
            .insert(call.worker);
    }
    assert_eq!(of_key.len(), 41);
    for (key, ids) in of_key {
        assert!(ids.is_sorted(), "{key:?}");
        assert_eq!(worker_of[&key].len(), 1);
    }
    let workers: HashSet<usize> = worker_of.values().flatten().copied().collect();
    assert!(
        workers.len() > 4,
        "41 keys should not share {} workers",
        workers.len()
    );
    assert_eq!((recorder.distinct(), ids.len()), (2000, 2000));
}

#[tokio::test(flavor = "multi_thread")]
async fn b70_a_failed_entry_holds_up_neither_its_key_nor_others() {
    let server = Server::start(Version::Redis70);
    let recorder = Recorder::answering(|call| match call.text() {
        "first" => Ok(Outcome::RetryAfter(HOUR)),
        _ => Ok(Outcome::Ack),
    });
    let tail = Subscription::tail("s")
        .workers(4)
        .ordered_by("key")
        .max_in_flight(5);
    let (supervisor, _) = start(&server.url(), [recorder.on(tail)]).await;
    server.xadd("s", &[("_payload", "first"), ("h:key", "K")]);
    for number in 0..110 {
        let key = if number % 11 == 0 {
            "K".to_owned()
        } else {
            format!("other {number}")
        };
        server.xadd("s", &[("_payload", number.to_string()), ("h:key", key)]);
    }
    recorder.reaches(111).await;
    eventually(SOON, "acknowledged", || {
        server.xpending_count("s", GROUP) == 1
    })
    .await;
    supervisor.shutdown().await.unwrap();
    let of_key: Vec<String> = recorder
        .calls()
        .iter()
        .filter(|call| call.header("key").as_deref() == Some("K"))
        .map(|call| call.text().to_owned())
        .collect();
    let expected = (0..110).step_by(11).map(|number| number.to_string());
    assert_eq!(
        of_key,
        std::iter::once("first".to_owned())
            .chain(expected)
            .collect::<Vec<_>>()
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_panics_does_not_disturb_the_order_of_what_follows() {
    let server = Server::start(Version::Redis70);
    let recorder = Recorder::answering(|call| match (call.attempt, call.text().ends_with('7')) {
        (1, true) => panic!("a panic, as it should be"),
        _ => Ok(Outcome::Ack),
    });
    let tail = capped(Subscription::tail("s").workers(3).ordered_by("key"), 9);
    let (supervisor, _) = start(&server.url(), [recorder.on(tail)]).await;
    server.xadd_many(
        "s",
        (0..300).map(|number: usize| {
            vec![
                ("_payload".to_owned(), number.to_string()),
                ("h:key".to_owned(), (number % 5).to_string()),
            ]
        }),
    );
    recorder.reaches(330).await;
    nothing_pending(&server, "s").await;
    supervisor.shutdown().await.unwrap();
    for key in 0..5 {
        let first: Vec<EntryId> = recorder
            .calls()
            .iter()
            .filter(|call| call.attempt == 1 && call.header("key") == Some(key.to_string()))
            .map(|call| call.id)
            .collect();
        assert!(first.is_sorted() && first.len() == 60, "{key}");
    }
    assert_eq!(recorder.count(), 330);
}
