//! The test support itself: a fault that does not happen as described would make every test that
//! relies on it worthless.

mod support;

use std::time::{Duration, Instant};

use fred::prelude::*;
use support::resp::{Frames, request_args};
use support::{Client, FaultProxy, Reply, Server, Version, eventually, eventually_some, unique};

const SOON: Duration = Duration::from_secs(5);

fn through(proxy: &FaultProxy) -> Client {
    Client::connect(proxy.port(), None).expect("the proxy should accept connections")
}

#[test]
fn messages_are_found_however_the_bytes_are_split() {
    let messages: [&[u8]; 9] = [
        b"+OK\r\n",
        b"*2\r\n*1\r\n$3\r\na\r\n\r\n:7\r\n",
        b"$-1\r\n",
        b"$0\r\n\r\n",
        b"*-1\r\n",
        b"*0\r\n",
        b"%1\r\n+key\r\n~2\r\n:1\r\n_\r\n",
        b"|1\r\n+ttl\r\n:1\r\n>2\r\n+a\r\n+b\r\n",
        b"-ERR no\r\n",
    ];
    let stream = messages.concat();
    for size in 1..=stream.len() {
        let mut frames = Frames::default();
        let mut found = Vec::new();
        for chunk in stream.chunks(size) {
            frames.feed(chunk, |frame| found.push(frame.to_vec()));
        }
        assert_eq!(found, messages, "in chunks of {size}");
    }
}

#[test]
fn a_request_gives_its_arguments_back() {
    let request = b"*3\r\n$4\r\nXADD\r\n$8\r\na\r\n$3\r\nx\r\n$0\r\n\r\n";
    assert_eq!(
        request_args(request),
        [b"XADD".to_vec(), b"a\r\n$3\r\nx".to_vec(), b"".to_vec()]
    );
    assert_eq!(
        request_args(b"PING x\r\n"),
        [b"PING".to_vec(), b"x".to_vec()]
    );
}

#[test]
fn every_version_is_what_it_is_called() {
    for version in Version::ALL {
        let number = Server::start(version).version_number();
        match version {
            Version::Redis62 => assert_eq!((number.0, number.1), (6, 2)),
            Version::Redis70 => assert!(number >= (7, 0, 0)),
            Version::Redis8 => assert!(number >= (8, 4, 0)),
            Version::Valkey => assert!(number >= (9, 0, 0)),
        }
    }
}

#[test]
fn streams_are_seen_as_they_are() {
    for version in Version::ALL {
        let server = Server::start(version);
        let stream = unique("stream");
        server.xgroup_create(&stream, "g", "0");
        let binary: &[u8] = &[0, 255, b'\r', b'\n'];
        let id = server.xadd(&stream, &[(b"f".as_slice(), binary), (b"f", b"")]);
        assert_eq!(
            server.xrange(&stream),
            [(
                id.clone(),
                vec![(b"f".to_vec(), binary.to_vec()), (b"f".to_vec(), vec![])]
            )]
        );
        let ids = server.xadd_many(&stream, (0..1000).map(|n| vec![("n", n.to_string())]));
        assert_eq!((ids.len(), server.xlen(&stream)), (1000, 1001));
        assert_eq!(server.xpending_count(&stream, "g"), 0);
        let read = server.command(&[
            "XREADGROUP",
            "GROUP",
            "g",
            "c",
            "COUNT",
            "2",
            "STREAMS",
            &stream,
            ">",
        ]);
        assert_eq!(read.as_array()[0].as_array()[1].as_array().len(), 2);
        assert_eq!(server.xpending_count(&stream, "g"), 2);
        let pending = server.xpending(&stream, "g");
        assert_eq!(pending.len(), 2);
        let (first, consumer, idle, deliveries) = &pending[0];
        assert_eq!((first, consumer.as_str(), *deliveries), (&id, "c", 1));
        assert!(*idle < SOON);
        assert_eq!(server.commandstat("XADD"), 1001);
        assert_eq!(server.commandstat("xack"), 0);
        let wrong = server.command(&["XPENDING", &stream, "nobody"]);
        assert!(
            wrong.as_error().is_some_and(|e| e.starts_with("NOGROUP")),
            "{wrong:?}"
        );
        assert!(server.command(&["GET", "nothing"]).is_nil());
        assert_eq!(server.command(&["PING"]), Reply::Status("PONG".into()));
        assert!(server.client_list().is_empty());
        let mut other = server.connect();
        other
            .command(&["CLIENT", "SETNAME", "other"])
            .expect("CLIENT SETNAME should be answered");
        assert_eq!(server.client_list().len(), 1);
        assert_eq!(
            server.info("server")["process_id"],
            server.pid().to_string()
        );
    }
}

#[test]
fn directives_reach_the_server() {
    for version in Version::ALL {
        let server = Server::start_with(
            version,
            &[
                ("requirepass", "secret"),
                ("rename-command", "XAUTOCLAIM \"\""),
                ("maxmemory", "50mb"),
                ("appendonly", "yes"),
            ],
        );
        assert_eq!(
            server.url(),
            format!("redis://:secret@127.0.0.1:{}", server.port())
        );
        assert!(server.command(&["XAUTOCLAIM", "a"]).as_error().is_some());
        assert_eq!(
            server.command(&["CONFIG", "GET", "maxmemory"]).as_array()[1].as_int(),
            52_428_800
        );
        server.xadd("kept", &[("a", "b")]);
        let (port, pid) = (server.port(), server.pid());
        server.command(&["CONFIG", "SET", "appendfsync", "always"]);
        server.xadd("kept", &[("a", "b")]);
        server.restart();
        assert_eq!(port, server.port());
        assert_ne!(pid, server.pid());
        assert_eq!(server.xlen("kept"), 2);
    }
    let hidden = Server::start_with(
        Version::Redis70,
        &[
            ("rename-command", "INFO \"\""),
            ("rename-command", "CLIENT \"\""),
        ],
    );
    assert_eq!(hidden.command(&["PING"]).as_str(), "PONG");
}

#[test]
fn a_frozen_server_is_silent_and_a_killed_one_gone() {
    for version in Version::ALL {
        let server = Server::start(version);
        server.command(&["PING"]);
        let mut client = server.connect();
        client
            .set_read_timeout(Duration::from_millis(200))
            .expect("a socket should take a timeout");
        server.freeze();
        assert!(client.command(&["PING"]).is_err());
        server.thaw();
        assert_eq!(
            client
                .receive()
                .expect("the answer should come now")
                .as_str(),
            "PONG"
        );
        server.freeze();
        server.kill();
        assert!(!server.is_running());
        assert!(server.try_command(&["PING"]).is_err());
        assert!(client.receive().is_err());
        server.restart();
        assert_eq!(server.command(&["PING"]).as_str(), "PONG");
        // What a test does to the clients it tests may hit this one too.
        let mut killer = server.connect();
        killer
            .command(&["CLIENT", "KILL", "TYPE", "normal"])
            .expect("CLIENT KILL should be answered");
        assert_eq!(server.command(&["PING"]).as_str(), "PONG");
    }
}

#[test]
#[should_panic(expected = "did not start")]
fn a_wrong_directive_is_told() {
    Server::start_with(Version::Redis70, &[("no-such-directive", "1")]);
}

#[test]
fn many_servers_start_at_once() {
    let threads: Vec<_> = (0..16)
        .map(|n| {
            std::thread::spawn(move || {
                let server = Server::start(Version::ALL[n % 4]);
                assert_eq!(
                    server.info("server")["process_id"],
                    server.pid().to_string()
                );
            })
        })
        .collect();
    for thread in threads {
        thread.join().expect("the server should start");
    }
}

#[test]
fn a_reply_is_lost_after_the_server_acted() {
    for version in Version::ALL {
        let server = Server::start(version);
        let proxy = server.proxy();
        let mut client = through(&proxy);
        let fault = proxy.drop_next_reply("xadd two");
        // In one go: the reply before the lost one must pass, the request after it may be served.
        let commands = ["one", "two", "three"].map(|stream| vec!["XADD", stream, "*", "f", "v"]);
        assert!(!fault.happened());
        for command in &commands {
            client
                .send(command)
                .expect("the proxy should take requests");
        }
        assert!(
            client
                .receive()
                .expect("the first reply should pass")
                .as_str()
                .contains('-')
        );
        assert!(client.receive().is_err());
        assert!(fault.happened());
        assert_eq!(proxy.connections(), 0);
        assert_eq!(server.xlen("two"), 1);

        let mut client = through(&proxy);
        let fault = proxy.drop_next_request("* two");
        assert!(client.command(&["XADD", "two", "*", "f", "v"]).is_err());
        assert!(fault.happened());
        assert_eq!(server.xlen("two"), 1);

        let mut client = through(&proxy);
        let fault = proxy.tear_next_reply("ECHO");
        client
            .send(&["ECHO", "abcdefgh"])
            .expect("the proxy should take requests");
        assert!(client.receive().is_err());
        assert!(fault.happened());
        assert_eq!(proxy.accepted(), 3);
    }
}

#[test]
fn replies_are_held_and_released() {
    for version in Version::ALL {
        let server = Server::start(version);
        let proxy = server.proxy();
        let mut client = through(&proxy);
        client
            .set_read_timeout(Duration::from_millis(100))
            .expect("a socket should take a timeout");
        proxy.hold_replies();
        assert!(client.command(&["INCR", "n"]).is_err());
        assert_eq!(server.command(&["GET", "n"]).as_int(), 1);
        proxy.release();
        client
            .set_read_timeout(SOON)
            .expect("a socket should take a timeout");
        assert_eq!(
            client
                .receive()
                .expect("the held reply should come")
                .as_int(),
            1
        );

        proxy.hold_replies();
        client
            .send(&["INCR", "n"])
            .expect("the proxy should take requests");
        while server.command(&["GET", "n"]).as_int() < 2 {}
        proxy.cut_all();
        assert!(client.receive().is_err());
        proxy.release();
        assert_eq!(
            through(&proxy)
                .command(&["INCR", "n"])
                .expect("a reply")
                .as_int(),
            3
        );
    }
}

#[test]
fn a_half_open_connection_is_silent_and_new_ones_work() {
    let server = Server::start(Server::default_version());
    let proxy = server.proxy();
    let mut client = through(&proxy);
    assert_eq!(client.command(&["PING"]).unwrap().as_str(), "PONG");
    proxy.half_open();
    client
        .set_read_timeout(Duration::from_millis(100))
        .expect("a socket should take a timeout");
    assert!(client.command(&["INCR", "n"]).is_err());
    let mut other = through(&proxy);
    assert!(other.command(&["GET", "n"]).unwrap().is_nil());
    // The server does not hear of its end, either.
    drop(client);
    assert_eq!(other.command(&["PING"]).unwrap().as_str(), "PONG");
    let lines = server.command(&["CLIENT", "LIST"]).as_str().lines().count();
    assert_eq!(lines, 3);
}

#[tokio::test]
async fn nothing_comes_out_of_a_black_hole() {
    for version in Version::ALL {
        let server = Server::start(version);
        let proxy = server.proxy();
        let mut client = through(&proxy);
        let idle = through(&proxy);
        client
            .set_read_timeout(Duration::from_millis(100))
            .expect("a socket should take a timeout");
        proxy.black_hole();
        assert!(client.command(&["INCR", "n"]).is_err());
        assert!(server.command(&["GET", "n"]).is_nil());
        drop(client);
        let stranded = std::thread::spawn({
            let port = proxy.port();
            move || Client::connect(port, None).is_err()
        });
        tokio::time::sleep(Duration::from_millis(100)).await;
        assert_eq!(server.client_list().len(), 0, "all are the harness's own");
        assert_eq!(
            server.command(&["CLIENT", "LIST"]).as_str().lines().count(),
            3
        );
        proxy.release();
        assert!(stranded.join().expect("the thread should not panic"));
        eventually(SOON, "the server loses the one that lost something", || {
            server.command(&["CLIENT", "LIST"]).as_str().lines().count() == 2
        })
        .await;
        drop(idle);
        eventually(SOON, "the proxy notices a client that left", || {
            proxy.connections() == 0
        })
        .await;
    }
}

#[tokio::test]
async fn delay_refuse_and_accept() {
    for version in Version::ALL {
        let server = Server::start(version);
        let proxy = server.proxy();
        let mut client = through(&proxy);
        proxy.delay(Duration::from_millis(150));
        let started = Instant::now();
        client.command(&["PING"]).expect("a delayed reply");
        assert!(started.elapsed() >= Duration::from_millis(150));
        proxy.delay(Duration::ZERO);
        let started = Instant::now();
        client.command(&["PING"]).expect("a reply");
        assert!(started.elapsed() < Duration::from_millis(100));

        proxy.refuse();
        assert!(Client::connect(proxy.port(), None).is_err());
        assert_eq!(
            client.command(&["PING"]).expect("open ones stay").as_str(),
            "PONG"
        );
        proxy.cut_all();
        assert!(client.command(&["PING"]).is_err());
        for _ in 0..20 {
            proxy.accept();
            assert_eq!(
                through(&proxy)
                    .command(&["PING"])
                    .expect("a reply")
                    .as_str(),
                "PONG"
            );
            proxy.refuse();
        }
        proxy.accept();
        server.kill();
        assert!(Client::connect(proxy.port(), None).is_err());
        server.restart();
        assert_eq!(
            through(&proxy)
                .command(&["PING"])
                .expect("a reply")
                .as_str(),
            "PONG"
        );
        let port = proxy.port();
        drop(proxy);
        assert!(Client::connect(port, None).is_err());
    }
}

#[tokio::test]
async fn fred_lives_through_it() {
    for version in Version::ALL {
        for resp3 in [false, true] {
            let server = Server::start(version);
            let proxy = server.proxy();
            let mut config = Config::from_url(&proxy.url()).expect("the URL should be one");
            if resp3 {
                config.version = fred::types::RespVersion::RESP3;
            }
            let client = Builder::from_config(config)
                .set_policy(ReconnectPolicy::new_constant(0, 20))
                .build()
                .expect("fred should take the configuration");
            client.init().await.expect("fred should connect");
            let big = "x".repeat(300_000);
            let () = client
                .set("big", &big, None, None, false)
                .await
                .expect("SET");
            let got: String = client.get("big").await.expect("GET");
            assert_eq!(got, big);
            let before = proxy.accepted();
            proxy.cut_all();
            eventually(SOON, "fred reconnects", || {
                proxy.accepted() > before && proxy.connections() > 0
            })
            .await;
            let got: String = client.get("big").await.expect("GET");
            assert_eq!(got.len(), 300_000);
            let fault = proxy.drop_next_reply("INCR");
            let _: Result<i64, _> = client.incr("n").await;
            let n = eventually_some(SOON, "INCR was served", || {
                let n = server.command(&["GET", "n"]);
                (fault.happened() && !n.is_nil()).then(|| n.as_int())
            })
            .await;
            assert!(n >= 1);
            client.quit().await.ok();
        }
    }
}

#[tokio::test]
#[should_panic(expected = "in vain for: the moon (at tests/harness.rs")]
async fn eventually_gives_up() {
    eventually(Duration::from_millis(30), "the moon", || false).await;
}

#[test]
fn unique_is() {
    assert_ne!(unique("a"), unique("a"));
}
