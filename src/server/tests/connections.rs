use crate::message::Destination;
use std::time::Instant;

use super::*;
use crate::server::ServerError;
use crate::server::connect::Script;
use crate::server::publish::add;
use crate::server::read::read_fresh;
use crate::server::settle::{Copy, Settled, acknowledge, copy_and_acknowledge};
use crate::support::{eventually, eventually_some};

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

async fn open(url: &str, within: Duration) -> Result<Connection, ServerError> {
    Connection::open(&Redis::url(url).unwrap(), Role::Settler, "tested", within).await
}

/// A call that the server answers.
async fn ping(conn: &Connection) -> Result<u64, ServerError> {
    crate::server::group::length(conn, &STREAM.into()).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_not_there_is_named_and_waited_for() {
    let server = Server::start(Version::Redis70);
    server.kill();
    let url = format!("redis://user:hunter2@127.0.0.1:{}", server.port());
    let started = Instant::now();
    let error = open(&url, ms(400)).await.unwrap_err();
    assert!(
        started.elapsed() >= ms(200) && started.elapsed() < ms(1500),
        "{:?}",
        started.elapsed()
    );
    let text = error.to_string();
    assert!(matches!(error, ServerError::Away(_)), "{error:?}");
    assert!(
        text.contains(&server.port().to_string()) && text.contains("refused"),
        "{text}"
    );
    assert!(
        !text.contains("hunter2") && !text.contains("user"),
        "{text}"
    );

    let url = server.url();
    let waiting = tokio::spawn(async move { open(&url, WITHIN).await });
    tokio::time::sleep(ms(200)).await;
    server.restart();
    assert_eq!(ping(&waiting.await.unwrap().unwrap()).await, Ok(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_says_nothing_is_given_up_in_time() {
    let server = Server::start(Version::Redis70);
    server.freeze();
    let started = Instant::now();
    let error = open(&server.url(), ms(300)).await.unwrap_err();
    assert!(
        matches!(error, ServerError::Away(_)) && started.elapsed() < ms(1500),
        "{error:?}"
    );
    server.thaw();
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_credentials_fail_at_once() {
    for version in Version::ALL {
        let server = Server::start_with(version, &[("requirepass", "right")]);
        for user in ["", ":hunter2@", "nobody:hunter2@"] {
            let url = format!("redis://{user}127.0.0.1:{}", server.port());
            let started = Instant::now();
            let error = open(&url, WITHIN).await.unwrap_err();
            assert!(matches!(error, ServerError::Blocked(_)), "{user} {error:?}");
            assert!(
                started.elapsed() < ms(1000) && !error.to_string().contains("hunter2"),
                "{error}"
            );
        }
        assert!(open(&server.url(), WITHIN).await.is_ok());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_has_its_name_after_a_reconnect_too() {
    let stage = Stage::on(Version::Redis70).await;
    let named = || {
        stage
            .server
            .client_list()
            .iter()
            .filter(|line| line.contains(" name=tested "))
            .count()
            == 1
    };
    eventually(WITHIN, "it has a name", named).await;
    let first = stage.conn.server_ids();
    stage.conn.reconnect().await;
    eventually(WITHIN, "it has a name again", || {
        named() && stage.conn.server_ids() != first
    })
    .await;
    let other = connect(&stage.server.url(), Role::Settler).await;
    let second = stage.conn.server_ids();
    other.kill(&second).await;
    eventually(WITHIN, "it comes back by itself", || {
        stage.conn.is_connected() && stage.conn.server_ids() != second
    })
    .await;
    assert_eq!(ping(&stage.conn).await, Ok(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_script_that_the_server_forgot_is_sent_again() {
    for stage in stages(&Version::ALL).await {
        stage.said();
        static ADD: Script = Script::new("return redis.call('INCR', KEYS[1]) + ARGV[1]");
        for expected in 11..14 {
            let reply = stage
                .conn
                .script(&ADD, vec!["n".into()], vec![10.into()])
                .await
                .unwrap();
            assert_eq!(crate::server::frame::integer(reply), Ok(expected));
            stage.ok(&["SCRIPT", "FLUSH"]);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_reply_to_a_copy_makes_no_second_copy() {
    for stage in stages(&Version::ALL).await {
        stage.said();
        let proxy = stage.server.proxy();
        let conn = connect(&proxy.url(), Role::Settler).await;
        let id = stage.deliver("c", 1)[0];
        let item = Copy {
            id,
            consumer: owner("c"),
            fields: fields(&[b"f", b"v"]),
            delay: Duration::ZERO,
            attempt: 1,
            copied: false,
        };
        let lost = proxy.drop_next_reply("EVAL");
        let to = Destination::DeadLetter {
            stream: OTHER.into(),
        };
        // The script is not known: the first reply that is lost is NOSCRIPT or the copy's.
        for _ in 0..2 {
            let settled =
                copy_and_acknowledge(&conn, &stage.group, &to, std::slice::from_ref(&item), None)
                    .await
                    .unwrap();
            assert!(
                matches!(settled[0], Settled::Done | Settled::NotPending),
                "{settled:?}"
            );
            let _ = proxy.drop_next_reply("EVALSHA");
        }
        assert!(lost.happened());
        assert_eq!((stage.server.xlen(OTHER), stage.pending().len()), (1, 0));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn readers_and_publishers_never_send_twice() {
    let stage = Stage::on(Version::Redis70).await;
    stage.ok(&["XADD", STREAM, "1-1", "f", "v"]);
    let proxy = stage.server.proxy();
    let publisher = connect(&proxy.url(), Role::Publisher).await;
    proxy.drop_next_reply("XADD");
    let unknown = add(&publisher, &OTHER.into(), fields(&[b"f", b"v"])).await;
    assert!(matches!(unknown, Err(ServerError::Away(_))), "{unknown:?}");
    assert!(
        add(&publisher, &OTHER.into(), fields(&[b"f", b"v"]))
            .await
            .is_ok()
    );
    assert_eq!(stage.server.xlen(OTHER), 2);

    let reader = connect(&proxy.url(), Role::Reader).await;
    let read = |block| read_fresh(reader.clone(), stage.group.clone(), owner("c"), 10, block);
    proxy.drop_next_reply("XREADGROUP");
    let unknown = read(None).await;
    assert!(matches!(unknown, Err(ServerError::Away(_))), "{unknown:?}");
    assert_eq!(read(None).await.unwrap().entries.len(), 0);
    // A blocked one neither: after a reconnect it would wait for entries that nobody wants.
    let before = stage.server.commandstat("xreadgroup");
    let pending = tokio::spawn(read(Some(ms(20_000))));
    eventually(WITHIN, "the read blocks", || {
        stage.server.info("clients")["blocked_clients"] == "1"
    })
    .await;
    proxy.cut_all();
    assert!(matches!(pending.await.unwrap(), Err(ServerError::Away(_))));
    assert_eq!(ping(&reader).await, Ok(1));
    assert_eq!(stage.server.commandstat("xreadgroup"), before + 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_link_under_a_blocked_read_is_replaced() {
    let stage = Stage::on(Version::Redis70).await;
    let proxy = stage.server.proxy();
    let reader = connect(&proxy.url(), Role::Reader).await;
    let read = |block| read_fresh(reader.clone(), stage.group.clone(), owner("c"), 10, block);
    proxy.black_hole();
    let accepted = proxy.accepted();
    let started = Instant::now();
    let lost = read(Some(ms(200))).await;
    assert!(matches!(lost, Err(ServerError::Away(_))), "{lost:?}");
    assert!(started.elapsed() < ms(3000));
    // Nothing told the client that the link is dead.
    eventually(WITHIN, "a new connection", || proxy.accepted() > accepted).await;
    proxy.release();
    stage.ok(&["XADD", STREAM, "1-1", "f", "v"]);
    assert_eq!(read(Some(ms(2000))).await.unwrap().entries.len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_frozen_server_costs_time_and_nothing_else() {
    let stage = Stage::on(Version::Redis70).await;
    let ids = stage.deliver("c", 2);
    stage.server.freeze();
    let started = Instant::now();
    let lost = acknowledge(&stage.conn, &stage.group, &ids[..1], None).await;
    assert!(matches!(lost, Err(ServerError::Away(_))), "{lost:?}");
    assert!(started.elapsed() < ms(4000));
    stage.server.thaw();
    assert!(
        acknowledge(&stage.conn, &stage.group, &ids, None)
            .await
            .is_ok()
    );
    assert!(stage.pending().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_comes_back_is_found_again() {
    let stage = Stage::on(Version::Redis70).await;
    stage.server.kill();
    eventually(WITHIN, "the end of the connection is noticed", || {
        !stage.conn.is_connected()
    })
    .await;
    let error = ping(&stage.conn).await.unwrap_err();
    assert!(
        matches!(&error, ServerError::Away(text) if text.contains("refused")),
        "{error:?}"
    );
    stage.server.restart();
    let started = Instant::now();
    assert_eq!(ping(&stage.conn).await, Ok(0));
    assert!(started.elapsed() < ms(2500));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_password_that_changed_meanwhile_blocks() {
    let stage = Stage::on(Version::Redis70).await;
    stage.ok(&["CONFIG", "SET", "requirepass", "new"]);
    stage.ok(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]);
    let error = eventually_some(ms(15_000), "it says why", || {
        let error = tokio::task::block_in_place(|| {
            tokio::runtime::Handle::current()
                .block_on(ping(&stage.conn))
                .unwrap_err()
        });
        matches!(error, ServerError::Blocked(_)).then_some(error)
    })
    .await;
    assert!(error.to_string().contains("NOAUTH"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_busy_server_is_away() {
    for version in Version::ALL {
        let stage = Stage::with(version, &[("lua-time-limit", "50")]).await;
        stage.said();
        let ids = stage.deliver("c", 1);
        let mut busy = stage.server.connect();
        busy.send(&["EVAL", "while true do end", "0"]).unwrap();
        eventually(WITHIN, "the server is busy", || {
            stage
                .server
                .command(&["PING"])
                .as_error()
                .is_some_and(|text| text.starts_with("BUSY"))
        })
        .await;
        let error = acknowledge(&stage.conn, &stage.group, &ids, None)
            .await
            .unwrap_err();
        assert!(
            matches!(&error, ServerError::Away(text) if text.starts_with("BUSY")),
            "{error:?}"
        );
        assert!(
            open(&stage.server.url(), ms(200))
                .await
                .unwrap_err()
                .is_passing()
        );
        stage.ok(&["SCRIPT", "KILL"]);
        // It ends a moment after it was told to.
        eventually(WITHIN, "the script ends", || {
            stage.server.command(&["PING"]).as_error().is_none()
        })
        .await;
        assert_eq!(
            acknowledge(&stage.conn, &stage.group, &ids, None).await,
            Ok(1)
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replica_is_not_written_to_and_the_connection_goes_on_looking() {
    for version in Version::ALL {
        let stage = Stage::on(version).await;
        stage.said();
        let ids = stage.deliver("c", 1);
        let primary = Server::start(version);
        primary.xgroup_create(STREAM, "g", "0");
        let port = primary.port().to_string();
        stage.ok(&["REPLICAOF", "127.0.0.1", &port]);
        let item = Copy {
            id: ids[0],
            consumer: owner("c"),
            fields: fields(&[b"f", b"v"]),
            delay: Duration::ZERO,
            attempt: 1,
            copied: true,
        };
        let to = Destination::DeadLetter {
            stream: OTHER.into(),
        };
        let refused = copy_and_acknowledge(&stage.conn, &stage.group, &to, &[item], None).await;
        assert!(
            matches!(&refused, Ok(settled) if matches!(&settled[0], Settled::Copied(ServerError::NotPrimary(_))))
                || matches!(
                    &refused,
                    Err(ServerError::NotPrimary(_) | ServerError::Away(_))
                ),
            "{refused:?}"
        );
        let refused = acknowledge(&stage.conn, &stage.group, &ids, None).await;
        assert!(
            matches!(&refused, Err(ServerError::NotPrimary(_))),
            "{refused:?}"
        );
        stage.ok(&["REPLICAOF", "NO", "ONE"]);
        assert!(
            acknowledge(&stage.conn, &stage.group, &ids, None)
                .await
                .is_ok()
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_closed_connection_is_gone_from_the_server_and_answers_at_once() {
    for abort in [true, false] {
        let stage = Stage::on(Version::Redis70).await;
        let pending = tokio::spawn(read_fresh(
            stage.conn.clone(),
            stage.group.clone(),
            owner("c"),
            10,
            Some(ms(20_000)),
        ));
        eventually(WITHIN, "the read blocks", || {
            stage.server.info("clients")["blocked_clients"] == "1"
        })
        .await;
        let started = Instant::now();
        if abort {
            stage.conn.abort();
        } else {
            stage.conn.close().await;
        }
        assert!(matches!(pending.await.unwrap(), Err(ServerError::Away(_))));
        assert!(matches!(ping(&stage.conn).await, Err(ServerError::Away(_))));
        assert!(started.elapsed() < ms(1500));
        eventually(WITHIN, "no connection is left", || {
            stage.server.client_list().is_empty()
        })
        .await;
        // What is added now is delivered to nobody.
        stage.ok(&["XADD", STREAM, "1-1", "f", "v"]);
        assert!(stage.pending().is_empty());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_that_is_dropped_is_closed() {
    let server = Server::start(Version::Redis70);
    let conn = open(&server.url(), WITHIN).await.unwrap();
    assert_eq!(ping(&conn).await, Ok(0));
    drop(conn);
    eventually(WITHIN, "no connection is left", || {
        server.client_list().is_empty()
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_came_to_an_end_is_made_again() {
    let stage = Stage::on(Version::Redis70).await;
    // As after an ASK redirection: the task ends, and the client does not know.
    stage.conn.end_client();
    eventually(WITHIN, "the task ends", || !stage.conn.is_connected()).await;
    let started = Instant::now();
    assert_eq!(ping(&stage.conn).await, Ok(0));
    assert!(started.elapsed() < ms(1000));
}
