//! What `Supervisor::start` refuses, how it says so, and that nothing of it remains.

mod support;

use std::io::{Read, Write};
use std::net::TcpListener;
use std::time::{Duration, Instant};

use streamvisor::prelude::*;
use streamvisor::{Draft, StartError};
use support::record::*;
use support::*;

const PASSWORD: &str = "hunter2";

/// Any handler: none of these is ever called.
fn handled(draft: Draft) -> Subscription {
    Recorder::acking().on(draft)
}

/// Starts, which must fail, and returns the error's text. It never shows a password, in whatever form,
/// and leaves no connection open.
#[track_caller]
fn refused(topology: Topology, server: Option<&Server>) -> impl Future<Output = String> {
    let caller = std::panic::Location::caller();
    async move {
        let error = match Supervisor::start(topology).await {
            Ok(_) => panic!("it started (at {caller})"),
            Err(error) => error,
        };
        let text = error.to_string();
        for shown in [text.clone(), format!("{error:?}"), format!("{error:#?}")] {
            assert!(!shown.contains(PASSWORD), "{shown} (at {caller})");
        }
        if let Some(server) = server {
            let closed = || server.client_list().is_empty();
            eventually(SOON, "no connection stays open", closed).await;
        }
        text
    }
}

/// Whether the text contains all of these.
#[track_caller]
fn assert_names(text: &str, words: &[&str]) {
    for word in words {
        assert!(text.contains(word), "`{word}` is missing in: {text}");
    }
}

// ---- the way to the server -----------------------------------------------------------------------------

#[test]
fn a_url_that_is_none_says_what_is_wrong_with_it() {
    for (url, words) in [
        ("127.0.0.1:6379", &["redis://"][..]),
        ("http://:hunter2@127.0.0.1", &["http", "scheme", "redis://"]),
        (
            "rediss://:hunter2@127.0.0.1",
            &["rediss", "TLS", "plain text"],
        ),
        ("redis://:hunter2@127.0.0.1:port", &["cannot be used"]),
        ("redis://:hunter2@", &["host"]),
        ("redis://:hunter2@127.0.0.1/database", &["cannot be used"]),
    ] {
        let error = match Redis::url(url) {
            Ok(redis) => panic!("{url} was taken for {redis:?}"),
            Err(error) => error,
        };
        assert_names(&error.to_string(), words);
        assert!(
            !format!("{error} {error:?}").contains(PASSWORD),
            "{error:?}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_cannot_be_reached_is_tried_for_the_connect_timeout_and_named() {
    let port = TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port();
    let within = Duration::from_millis(700);
    let topology = topology(&format!("redis://:{PASSWORD}@127.0.0.1:{port}"))
        .connect_timeout(within)
        .subscribe(handled(Subscription::tail("s")));
    let began = Instant::now();
    let text = refused(topology, None).await;
    assert_names(
        &text,
        &["cannot connect", &format!("127.0.0.1:{port}"), "refused"],
    );
    assert!(began.elapsed() < SOON, "it took {:?}", began.elapsed());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_does_not_exist_is_named() {
    let topology = topology("redis://no-such-host.invalid:6379")
        .connect_timeout(Duration::from_millis(700))
        .subscribe(handled(Subscription::tail("s")));
    let text = refused(topology, None).await;
    assert_names(&text, &["cannot connect", "no-such-host.invalid"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_does_not_answer_is_given_up_after_the_connect_timeout() {
    let server = Server::start(Version::Redis70);
    let proxy = server.proxy();
    proxy.black_hole();
    let topology = topology(&proxy.url())
        .connect_timeout(Duration::from_millis(700))
        .subscribe(handled(Subscription::tail("s")));
    let began = Instant::now();
    let text = refused(topology, Some(&server)).await;
    assert_names(
        &text,
        &["cannot connect", &format!("127.0.0.1:{}", proxy.port())],
    );
    assert!(began.elapsed() < SOON, "it took {:?}", began.elapsed());
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_no_redis_is_refused() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { return };
            let _ = stream.read(&mut [0; 1024]);
            let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n");
        }
    });
    let topology = topology(&format!("redis://127.0.0.1:{port}"))
        .connect_timeout(Duration::from_secs(2))
        .subscribe(handled(Subscription::tail("s")));
    let text = refused(topology, None).await;
    assert_names(&text, &["cannot connect", &format!("127.0.0.1:{port}")]);
}

#[tokio::test(flavor = "multi_thread")]
async fn b109_a_server_that_comes_up_within_the_connect_timeout_is_waited_for() {
    let server = Server::start(Version::Redis70);
    // It takes connections and cuts them off, as long as there is no server behind it.
    let proxy = server.proxy();
    server.kill();
    let recorder = Recorder::acking();
    let tail = Subscription::tail("s").named("orders").consumer("me");
    let impatient = topology(&proxy.url()).subscribe(recorder.on(tail));
    // Each of these fails, and leaves nothing behind that stands in the way of the next.
    for _ in 0..10 {
        let topology = impatient
            .clone()
            .connect_timeout(Duration::from_millis(100));
        refused(topology, None).await;
    }
    let before = proxy.accepted();
    let patient = impatient.connect_timeout(Duration::from_secs(60));
    let starting = tokio::spawn(Supervisor::start(patient));
    eventually(SOON, "it has tried several times", || {
        proxy.accepted() >= before + 5
    })
    .await;
    server.restart();
    let supervisor = starting.await.unwrap().unwrap();
    server.add_numbers("s", 0..5);
    recorder.reaches(5).await;
    supervisor.shutdown().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_credentials_fail_at_once_and_are_not_shown() {
    for version in Version::ALL {
        let server = Server::start_with(version, &[("requirepass", "right")]);
        let at = format!("127.0.0.1:{}", server.port());
        for (url, word) in [
            (format!("redis://:{PASSWORD}@{at}"), "WRONGPASS"),
            (format!("redis://default:{PASSWORD}@{at}"), "WRONGPASS"),
            (format!("redis://nobody:{PASSWORD}@{at}"), "WRONGPASS"),
            (format!("redis://{at}"), "NOAUTH"),
        ] {
            let topology = topology(&url)
                .connect_timeout(Duration::from_secs(60))
                .subscribe(handled(Subscription::tail("s")));
            let began = Instant::now();
            let text = refused(topology, Some(&server)).await;
            assert_names(&text, &["cannot connect", &at, word]);
            assert!(
                began.elapsed() < SOON,
                "{version}: it was tried again for nothing"
            );
        }
    }
}

// ---- what the topology itself says -----------------------------------------------------------------------

#[tokio::test(flavor = "multi_thread")]
async fn a_topology_that_contradicts_itself_is_refused_before_anything_is_connected_to() {
    let server = Server::start(Version::Redis70);
    let proxy = server.proxy();
    let bare = || Topology::new(Redis::url(&proxy.url()).unwrap());
    let grouped = || bare().default_group(GROUP);
    let tail = || Subscription::tail("s");
    let second = Duration::from_secs(1);
    let capped = || RetryPolicy::default().max_attempts(3);
    let cases: Vec<(Topology, &[&str])> = vec![
        (bare(), &["no subscription", "Topology::subscribe"]),
        (
            bare().subscribe(handled(tail())),
            &["`s`", "no consumer group", ".group(", "default_group"],
        ),
        (
            grouped().subscribe(handled(tail().workers(0))),
            &["s/g/tail", "workers", "0", "at least 1"],
        ),
        (
            grouped().subscribe(handled(tail().batch(0))),
            &["batch", "at least 1"],
        ),
        (
            grouped().subscribe(handled(tail().max_in_flight(0))),
            &["max_in_flight", "at least 1"],
        ),
        (
            grouped().subscribe(handled(tail().max_bytes_in_flight(0))),
            &["max_bytes_in_flight", "at least 1"],
        ),
        (
            grouped().subscribe(handled(tail().block(Duration::ZERO))),
            &["block", "millisecond"],
        ),
        (
            grouped().subscribe(handled(tail().handler_timeout(Duration::ZERO))),
            &["handler_timeout", "millisecond"],
        ),
        (
            grouped().subscribe(handled(Subscription::tail(""))),
            &["stream", "empty"],
        ),
        (
            grouped()
                .subscribe(handled(tail().keep_alive(second)))
                .subscribe(handled(Subscription::reclaim("s", 2 * second))),
            &[
                "s/g/reclaim",
                "min_idle of 2s",
                "three keep-alives of 1s",
                ".keep_alive(",
            ],
        ),
        (
            grouped()
                .subscribe(handled(tail()))
                .subscribe(handled(tail())),
            &["two subscriptions", "`s/g/tail`", ".named("],
        ),
        (
            grouped()
                .subscribe(handled(tail().named("a").consumer("c")))
                .subscribe(handled(tail().named("b").consumer("c"))),
            &["`a`", "`b`", "consumer name `c`"],
        ),
        (
            grouped()
                .subscribe(handled(tail().named("a").start(Start::New)))
                .subscribe(handled(tail().named("b").start(Start::Beginning))),
            &["`a`", "`b`", "different places to start", ".start("],
        ),
        (
            grouped()
                .subscribe(handled(
                    tail().delayed_retry(DelayedRetry::durable("later")),
                ))
                .subscribe(handled(
                    Subscription::tail("t").delayed_retry(DelayedRetry::durable("later")),
                )),
            &["delay set `later`", "`s`", "`t`", "its own set"],
        ),
        (
            grouped().subscribe(handled(tail().retry(capped()))),
            &[
                "max_attempts",
                "no end",
                "then_dead_letter()",
                "then_reject()",
            ],
        ),
        (
            grouped().subscribe(handled(tail().retry(capped().then_dead_letter()))),
            &["then_dead_letter()", "dead-letter stream", ".dead_letter("],
        ),
        (
            grouped().subscribe(handled(tail().on_crash(OnCrash::DeadLetter))),
            &["OnCrash::DeadLetter", "dead-letter stream", ".dead_letter("],
        ),
        (
            grouped().subscribe(handled(
                tail().retry(RetryPolicy::default().max_attempts(0)),
            )),
            &["max_attempts", "at least 1"],
        ),
        (
            grouped().subscribe(handled(tail().dead_letter("s"))),
            &["`s`", "dead-letter stream", "another key"],
        ),
        (
            grouped().subscribe(handled(tail().delayed_retry(DelayedRetry::durable("s")))),
            &["`s`", "delay set", "another key"],
        ),
    ];
    for (topology, words) in cases {
        assert!(matches!(
            Supervisor::start(topology.clone()).await,
            Err(StartError::Invalid(_))
        ));
        assert_names(&refused(topology, None).await, words);
    }
    assert_eq!(proxy.accepted(), 0);
}

// ---- what the server holds -----------------------------------------------------------------------------------

#[tokio::test(flavor = "multi_thread")]
async fn b92_a_key_of_another_type_is_named_with_what_it_holds_and_should_hold() {
    for version in Version::ALL {
        let server = Server::start(version);
        server.command(&["RPUSH", "a-list", "x"]);
        server.command(&["SET", "a-string", "x"]);
        server.command(&["HSET", "a-hash", "f", "v"]);
        server.xadd("a-stream", &[("f", "v")]);
        let durable = |set: &str| DelayedRetry::durable(set);
        for (draft, words) in [
            (Subscription::tail("a-list"), ["`a-list`", "list", "stream"]),
            (
                Subscription::tail("s").dead_letter("a-hash"),
                ["`a-hash`", "hash", "stream"],
            ),
            (
                Subscription::tail("s").delayed_retry(durable("a-string")),
                ["`a-string`", "string", "zset"],
            ),
            (
                Subscription::tail("s").delayed_retry(durable("a-stream")),
                ["`a-stream`", "stream", "zset"],
            ),
            (
                Subscription::reclaim("a-string", Duration::from_secs(60)),
                ["`a-string`", "string", "stream"],
            ),
        ] {
            // A subscription that is all right does not help.
            let topology = topology(&server.url())
                .subscribe(handled(Subscription::tail("fine").named("fine")))
                .subscribe(handled(draft.named("wrong")));
            let text = refused(topology, Some(&server)).await;
            assert_names(&text, &words);
            assert_names(&text, &["`wrong`", "another key"]);
        }
        for (key, kind) in [
            ("a-list", "list"),
            ("a-string", "string"),
            ("a-hash", "hash"),
        ] {
            assert_eq!(server.command(&["TYPE", key]).as_str(), kind, "{version}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_group_that_is_not_to_be_made_is_named_and_not_made() {
    for version in Version::ALL {
        let server = Server::start(version);
        server.xgroup_create("there", "another", "0");
        for stream in ["missing", "there"] {
            let topology = topology(&server.url()).subscribe(handled(
                Subscription::tail(stream)
                    .named("orders")
                    .create_group(false),
            ));
            let text = refused(topology, Some(&server)).await;
            assert_names(
                &text,
                &[
                    "`orders`",
                    &format!("`{stream}`"),
                    "`g`",
                    "XGROUP CREATE",
                    ".create_group(false)",
                ],
            );
        }
        assert_eq!(
            server.command(&["EXISTS", "missing"]).as_int(),
            0,
            "{version}"
        );
        let groups = server.command(&["XINFO", "GROUPS", "there"]);
        assert_eq!(groups.as_array().len(), 1, "{version}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_without_a_command_that_is_needed_is_refused_with_its_version() {
    for version in Version::ALL {
        let server = Server::start_with(version, &[("rename-command", "XAUTOCLAIM \"\"")]);
        let number = server.version_number();
        let number = format!("{}.{}.{}", number.0, number.1, number.2);
        for draft in [
            Subscription::tail("s"),
            Subscription::reclaim("s", Duration::from_secs(60)),
        ] {
            let topology = topology(&server.url()).subscribe(handled(draft));
            let text = refused(topology, Some(&server)).await;
            assert_names(&text, &["XAUTOCLAIM", &number, "6.2", "Valkey"]);
        }
        assert_eq!(
            server.command(&["EXISTS", "s"]).as_int(),
            0,
            "{version}: nothing was made"
        );
    }
}

// ---- what the user may not do ---------------------------------------------------------------------------------

/// A user with all rights, but for these.
fn user_without(server: &Server, without: &[&str]) -> String {
    let password = format!(">{PASSWORD}");
    let mut args = vec![
        "ACL", "SETUSER", "app", "reset", "on", &password, "~*", "&*", "+@all",
    ];
    args.extend(without);
    let reply = server.command(&args);
    assert_eq!(reply, Reply::Status("OK".into()), "{without:?}");
    format!("redis://app:{PASSWORD}@127.0.0.1:{}", server.port())
}

#[tokio::test(flavor = "multi_thread")]
async fn b93_each_right_that_is_needed_is_named_when_it_is_missing() {
    let all = |draft: Draft| {
        draft
            .dead_letter("dead")
            .delayed_retry(DelayedRetry::durable("later").ttl(Duration::from_secs(60)))
            .after_ack(AfterAck::Delete)
    };
    for version in Version::ALL {
        let server = Server::start(version);
        let mut needed = vec![
            "XREADGROUP",
            "XACK",
            "XPENDING",
            "XCLAIM",
            "XRANGE",
            "XINFO",
            "XGROUP",
            "XADD",
            "EVALSHA",
            "EVAL",
            "TIME",
            "ZADD",
            "ZREM",
            "ZRANGEBYSCORE",
            "ZRANGE",
            "PEXPIREAT",
        ];
        needed.push("XDEL");
        let mut unnamed = Vec::new();
        for command in needed {
            let mut without = vec![format!("-{}", command.to_lowercase())];
            if command == "XDEL" && version == Version::Redis8 {
                // Either of the two will do.
                without.push("-xackdel".to_owned());
            }
            let without: Vec<&str> = without.iter().map(String::as_str).collect();
            let url = user_without(&server, &without);
            let topology =
                topology(&url).subscribe(handled(all(Subscription::tail("s").named("orders"))));
            match Supervisor::start(topology.clone()).await {
                Ok(supervisor) => {
                    unnamed.push(command);
                    supervisor.shutdown().await.unwrap();
                }
                Err(_) => {
                    let text = refused(topology, Some(&server)).await;
                    assert_names(&text, &["`orders`", command, "NOPERM", "ACL SETUSER"]);
                }
            }
        }
        assert_eq!(
            unnamed,
            Vec::<&str>::new(),
            "{version}: it started without these"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn b93_a_key_that_the_user_may_not_touch_is_refused_at_start() {
    for version in Version::ALL {
        let server = Server::start(version);
        for (patterns, command) in [
            (&["resetkeys", "~dead", "~later*"][..], "XREADGROUP"),
            (&["resetkeys", "~s", "~later*"], "XADD on `dead`"),
            (&["resetkeys", "~s", "~dead"], "ZADD on `later`"),
            // What cannot be read goes to `later:unreadable`.
            (
                &["resetkeys", "~s", "~dead", "~later"],
                "ZADD on `later:unreadable`",
            ),
        ] {
            let url = user_without(&server, patterns);
            let topology = topology(&url).subscribe(handled(
                Subscription::tail("s")
                    .named("orders")
                    .dead_letter("dead")
                    .delayed_retry(DelayedRetry::durable("later")),
            ));
            let text = refused(topology, Some(&server)).await;
            assert_names(&text, &["`orders`", "NOPERM", "ACL SETUSER", command]);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn b93_rights_that_are_not_needed_are_not_asked_for() {
    for version in Version::ALL {
        let server = Server::start(version);
        // Neither a delay set nor a dead letter is used, and no administration.
        let without = [
            "-client",
            "-info",
            "-config",
            "-command",
            "-script",
            "-type",
            "-zadd",
            "-zrem",
            "-zrange",
            "-zrangebyscore",
            "-xdel",
            "-del",
            "-xread",
            "-xtrim",
            "-@dangerous",
            "resetkeys",
            "~s",
        ];
        let url = user_without(&server, &without);
        let recorder = Recorder::answering(|call| match call.attempt {
            1 => Ok(Outcome::Retry),
            _ => Ok(Outcome::Ack),
        });
        let block = Duration::from_millis(200);
        let topology = topology(&url)
            .subscribe(recorder.on(Subscription::tail("s").block(block)))
            .subscribe(
                recorder.on(Subscription::reclaim("s", Duration::from_secs(60)).block(block)),
            );
        let supervisor = Supervisor::start(topology).await.unwrap();
        let heard = Heard::of(&supervisor);
        server.add_numbers("s", 0..50);
        recorder.reaches(100).await;
        eventually(SOON, "nothing is pending", || {
            server.xpending_count("s", GROUP) == 0
        })
        .await;
        supervisor.shutdown().await.unwrap();
        assert_eq!(recorder.count(), 100, "{version}");
        heard.assert_nobody_crashed();
        let closed = || server.client_list().is_empty();
        eventually(SOON, "no connection stays open", closed).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_user_who_is_disabled_or_unknown_cannot_start() {
    let server = Server::start(Version::Redis70);
    let url = user_without(&server, &["off"]);
    let topology = topology(&url).subscribe(handled(Subscription::tail("s")));
    let text = refused(topology, Some(&server)).await;
    assert_names(&text, &["WRONGPASS", "disabled"]);
}
