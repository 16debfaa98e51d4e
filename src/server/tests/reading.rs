use std::time::Instant;

use super::*;
use crate::server::ServerError;
use crate::server::capabilities::{self, Uses};
use crate::server::read::*;
use crate::server::reclaim::reclaim;
use crate::support::eventually;

const HOUR: u64 = 3_600_000;

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

async fn reader(stage: &Stage) -> Arc<Connection> {
    connect(&stage.server.url(), Role::Reader).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_read_brings_any_bytes_and_an_empty_one_nothing() {
    for stage in stages(&Version::ALL).await {
        stage.said();
        let conn = reader(&stage).await;
        let read = |block| read_fresh(conn.clone(), stage.group.clone(), owner("c"), 10, block);
        assert_eq!(read(None).await, Ok(Read::default()));
        assert_eq!(read(Some(ms(20))).await, Ok(Read::default()));
        let strange: [&[&[u8]]; 4] = [
            &[b"\xff\x00\r\n", b""],
            &[b"", b"x", b"", b"y"],
            // What the client takes for messages of a channel.
            &[b"pmessage", b"a", b"b", b"c"],
            &[b"message", b"a"],
        ];
        for (parts, id) in strange.iter().zip([
            "1-1",
            "1-2",
            "1-3",
            "18446744073709551615-18446744073709551615",
        ]) {
            let mut args: Vec<&[u8]> = vec![b"XADD", STREAM.as_bytes(), id.as_bytes()];
            args.extend(*parts);
            stage.ok(&args);
        }
        let found = read(None).await.unwrap().entries;
        assert_eq!(found.len(), 4);
        for (entry, parts) in found.iter().zip(strange) {
            assert_eq!(entry.fields, parts);
        }
        assert_eq!(found[3].id(), EntryId::MAX);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_may_be_called_as_a_message_of_a_channel() {
    let stage = Stage::on(Version::Redis70).await;
    let conn = reader(&stage).await;
    for name in ["message", "pmessage", "smessage", "subscribe"] {
        stage.server.xgroup_create(name, name, "0");
        stage.ok(&["XADD", name, "1-1", name, name, name, name]);
        let group = Arc::new(Group::new(name, name));
        let read = read_fresh(conn.clone(), group.clone(), owner(name), 10, None)
            .await
            .unwrap();
        assert_eq!(read.entries.len(), 1, "{name}");
        let again = reclaim(
            &stage.conn,
            &group,
            name,
            Duration::ZERO,
            EntryId::MIN,
            10,
            &[],
        )
        .await
        .unwrap();
        assert_eq!(again.entries.len(), 1, "{name}");
        assert_eq!(
            own_pending(&stage.conn, &group, name, EntryId::MIN, 10)
                .await
                .unwrap()
                .len(),
            1
        );
    }
}

/// The server would crash, were it asked to end a read that has not begun.
#[tokio::test(flavor = "multi_thread")]
async fn a_read_that_waits_for_the_end_of_a_pause_is_ended_after_it() {
    for stage in stages(&Version::ALL).await {
        stage.said();
        let conn = reader(&stage).await;
        stage.ok(&["CLIENT", "PAUSE", "60000", "WRITE"]);
        let pending = tokio::spawn(read_fresh(
            conn.clone(),
            stage.group.clone(),
            owner("c"),
            10,
            Some(ms(60_000)),
        ));
        let waits = || stage.server.info("clients")["blocked_clients"] == "1";
        eventually(WITHIN, "the read waits", waits).await;
        let (reading, through, group) = (conn.clone(), stage.conn.clone(), stage.group.clone());
        let ending = tokio::spawn(async move {
            loop {
                end_blocked(&reading, &through, &group).await;
            }
        });
        let both_wait = || stage.server.info("clients")["blocked_clients"] == "2";
        eventually(WITHIN, "its end waits too", both_wait).await;
        assert!(!pending.is_finished());
        stage.ok(&["CLIENT", "UNPAUSE"]);
        assert_eq!(pending.await.unwrap(), Ok(Read::default()));
        ending.abort();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_blocked_read_wakes_for_an_entry_and_can_be_ended() {
    for stage in stages(&Version::ALL).await {
        stage.said();
        let conn = reader(&stage).await;
        let read = || {
            tokio::spawn(read_fresh(
                conn.clone(),
                stage.group.clone(),
                owner("c"),
                10,
                Some(ms(20_000)),
            ))
        };
        let blocked = || stage.server.info("clients")["blocked_clients"] == "1";

        let pending = read();
        eventually(WITHIN, "the read blocks", blocked).await;
        stage.ok(&["XADD", STREAM, "1-1", "f", "v"]);
        assert_eq!(pending.await.unwrap().unwrap().entries.len(), 1);

        let pending = read();
        let started = Instant::now();
        while !pending.is_finished() {
            end_blocked(&conn, &stage.conn, &stage.group).await;
            tokio::time::sleep(ms(5)).await;
        }
        assert_eq!(pending.await.unwrap(), Ok(Read::default()));
        assert!(started.elapsed() < ms(2000));

        // By somebody else, with an error: nothing to read.
        let pending = read();
        eventually(WITHIN, "the read blocks", blocked).await;
        let id = conn.server_ids()[0].to_string();
        stage.ok(&["CLIENT", "UNBLOCK", &id, "ERROR"]);
        assert_eq!(pending.await.unwrap(), Ok(Read::default()));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_read_says_so_when_the_group_is_or_goes_away() {
    for stage in stages(&Version::ALL).await {
        let version = stage.said();
        let conn = reader(&stage).await;
        let read = |group: &Arc<Group>, block| {
            read_fresh(conn.clone(), group.clone(), owner("c"), 10, block)
        };
        for way in [
            ["XGROUP", "DESTROY", STREAM, "g"].as_slice(),
            &["DEL", STREAM],
            &["FLUSHALL"],
        ] {
            stage.ok(&["DEL", STREAM]);
            stage.server.xgroup_create(STREAM, "g", "0");
            // 6.2 wakes no reader for a key that is deleted: its block must end by itself.
            let wakes = version != Version::Redis62 || way[0] == "XGROUP";
            let block = if wakes { 20_000 } else { 1000 };
            let pending = tokio::spawn(read(&stage.group, Some(ms(block))));
            eventually(WITHIN, "the read blocks", || {
                stage.server.info("clients")["blocked_clients"] == "1"
            })
            .await;
            stage.ok(way);
            let gone = pending.await.unwrap();
            assert_eq!(
                matches!(gone, Err(ServerError::GroupGone(_))),
                wakes,
                "{way:?}: {gone:?}"
            );
            let gone = read(&stage.group, None).await;
            assert!(
                matches!(gone, Err(ServerError::GroupGone(_))),
                "{way:?}: {gone:?}"
            );
        }
        // The server repeats the key in its error, and the client takes errors for text.
        let binary = Arc::new(Group::new(&b"\xff{t}"[..], "g"));
        let gone = read(&binary, None).await;
        assert!(matches!(gone, Err(ServerError::GroupGone(_))), "{gone:?}");
        stage.ok(&["SET", STREAM, "a string"]);
        let blocked = read(&stage.group, None).await;
        assert!(
            matches!(blocked, Err(ServerError::Blocked(_))),
            "{blocked:?}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn own_pending_entries_are_listed_and_taken_up_without_counting() {
    for stage in stages(&Version::ALL).await {
        stage.said();
        let ids = stage.deliver("c", 5);
        stage.age(ids[0], "c", HOUR, 4);
        stage.steal(ids[1], "thief");
        stage.delete(ids[3]);
        let listed = |after, limit| own_pending(&stage.conn, &stage.group, "c", after, limit);
        let all = listed(EntryId::MIN, 10).await.unwrap();
        assert_eq!(
            all.iter().map(|entry| entry.id.ms).collect::<Vec<_>>(),
            [1, 3, 4, 5]
        );
        assert_eq!(all[0].count, 4);
        assert!(all[0].idle >= ms(HOUR) && all[1].idle < ms(HOUR));
        let some = listed(ids[0], 2).await.unwrap();
        assert_eq!(
            some.iter().map(|entry| entry.id.ms).collect::<Vec<_>>(),
            [3, 4]
        );
        assert!(listed(EntryId::MAX, 2).await.unwrap().is_empty());

        let mut wanted: Vec<_> = ids.iter().map(|id| (*id, 1)).collect();
        wanted[0].1 = 4;
        for first in [true, false] {
            let taken = take_own(&stage.conn, &stage.group, "c", &wanted)
                .await
                .unwrap();
            let found: Vec<_> = taken
                .entries
                .iter()
                .map(|(entry, count, _)| (entry.id(), *count))
                .collect();
            assert_eq!(found, [(ids[0], 4), (ids[2], 1), (ids[4], 1)]);
            assert_eq!(taken.entries[0].0.fields, ["f", "v1"]);
            assert_eq!(taken.entries[0].2 >= ms(HOUR), first);
            assert_eq!(taken.gone, if first { vec![ids[3]] } else { vec![] });
        }
        let expected = [(1, "c", 4), (2, "thief", 1), (3, "c", 1), (5, "c", 1)];
        let expected: Vec<_> = expected
            .map(|(ms, owner, count)| (EntryId::new(ms, 1), owner.to_owned(), count))
            .into();
        assert_eq!(stage.pending(), expected);

        stage.ok(&["XGROUP", "DESTROY", STREAM, "g"]);
        let gone = take_own(&stage.conn, &stage.group, "c", &wanted).await;
        assert!(matches!(gone, Err(ServerError::GroupGone(_))), "{gone:?}");
        let gone = listed(EntryId::MIN, 10).await;
        assert!(matches!(gone, Err(ServerError::GroupGone(_))), "{gone:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn reclaiming_takes_what_is_due_with_its_count_and_idle_time() {
    for stage in stages(&Version::ALL).await {
        stage.said();
        let ids = stage.deliver("c", 7);
        stage.age(ids[0], "c", HOUR, 4);
        stage.age(ids[1], "d", HOUR, 1);
        stage.age(ids[2], "e", 2 * HOUR, 0);
        stage.age(ids[3], "c", HOUR, 1);
        stage.delete(ids[3]);
        stage.delete(ids[4]);
        stage.age(ids[5], "c", HOUR, 4);
        let taken = reclaim(
            &stage.conn,
            &stage.group,
            "e",
            ms(HOUR),
            EntryId::MIN,
            100,
            &[],
        )
        .await
        .unwrap();
        let found: Vec<_> = taken
            .entries
            .iter()
            .map(|(entry, count, _)| (entry.id(), *count))
            .collect();
        assert_eq!(found, [(ids[0], 4), (ids[1], 1), (ids[2], 0), (ids[5], 4)]);
        assert_eq!(taken.entries[1].0.fields, ["f", "v2"]);
        assert!(taken.entries.iter().all(|(_, _, idle)| *idle >= ms(HOUR)));
        assert!(taken.entries[2].2 >= ms(2 * HOUR));
        // The fifth is deleted too, and waits for its turn.
        assert_eq!((taken.gone, taken.next), (vec![ids[3]], EntryId::MIN));
        let expected = [
            (1, "e", 4),
            (2, "e", 1),
            (3, "e", 0),
            (5, "c", 1),
            (6, "e", 4),
            (7, "c", 1),
        ];
        let expected: Vec<_> = expected
            .map(|(ms, owner, count)| (EntryId::new(ms, 1), owner.to_owned(), count))
            .into();
        assert_eq!(stage.pending(), expected);
        assert!(stage.idle(ids[0]) < ms(HOUR));

        let again = reclaim(
            &stage.conn,
            &stage.group,
            "x",
            ms(HOUR),
            EntryId::MIN,
            100,
            &[],
        )
        .await
        .unwrap();
        assert!(again.entries.is_empty() && again.gone.is_empty());
        stage.ok(&["XGROUP", "DESTROY", STREAM, "g"]);
        let gone = reclaim(
            &stage.conn,
            &stage.group,
            "e",
            ms(HOUR),
            EntryId::MIN,
            1,
            &[],
        )
        .await;
        assert!(matches!(gone, Err(ServerError::GroupGone(_))), "{gone:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reclaim_pass_visits_everything_once_however_little_is_due() {
    for stage in stages(&Version::ALL).await {
        stage.said();
        let ids = stage.deliver("c", 3500);
        let due: Vec<_> = ids
            .iter()
            .copied()
            .filter(|id| id.ms % 700 == 1 || id.ms > 3400)
            .collect();
        for id in &due {
            stage.age(*id, "c", HOUR, 1);
        }
        for count in [1, 7, 50, 1000] {
            let (mut found, mut cursor, mut calls) = (Vec::new(), EntryId::MIN, 0);
            loop {
                let taken = reclaim(&stage.conn, &stage.group, "d", ms(HOUR), cursor, count, &[])
                    .await
                    .unwrap();
                assert!(taken.entries.len() <= count);
                found.extend(taken.entries.iter().map(|(entry, ..)| entry.id()));
                cursor = taken.next;
                calls += 1;
                if cursor == EntryId::MIN {
                    break;
                }
            }
            assert_eq!(found, due, "{count} at a time");
            assert!(calls <= 5 + due.len() / count.min(100), "{calls}");
            for id in &due {
                stage.age(*id, "c", HOUR, 1);
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn claiming_reads_what_is_idle_and_then_what_is_fresh() {
    let stage = Stage::on(Version::Redis8).await;
    let ids = stage.deliver("c", 3);
    stage.age(ids[0], "c", HOUR, 4);
    stage.age(ids[1], "c", HOUR, 1);
    stage.delete(ids[1]);
    stage.ok(&["XADD", STREAM, "9-1", "pmessage", "a", "b", "c"]);
    let conn = reader(&stage).await;
    let read = |block| {
        read_claiming(
            conn.clone(),
            stage.group.clone(),
            owner("d"),
            10,
            block,
            ms(HOUR),
        )
    };
    let found = read(None).await.unwrap();
    let entries: Vec<_> = found
        .entries
        .iter()
        .map(|(entry, count, _)| (entry.id(), *count))
        .collect();
    assert_eq!(entries, [(ids[0], 4), (EntryId::new(9, 1), 0)]);
    assert!(found.entries[0].2 >= ms(HOUR));
    assert_eq!(found.entries[1].0.fields, ["pmessage", "a", "b", "c"]);
    let empty = read(Some(ms(20))).await.unwrap();
    assert!(empty.entries.is_empty() && empty.gone.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn capabilities_are_found_by_trying() {
    for stage in stages(&Version::ALL).await {
        let version = stage.said();
        let found = capabilities::ask(&stage.conn, &stage.group.stream)
            .await
            .unwrap();
        let new = version == Version::Redis8;
        assert_eq!(
            (found.autoclaim, found.claim_read, found.ack_delete),
            (true, new, new)
        );
        let name = if version == Version::Valkey {
            "Valkey 9"
        } else {
            "Redis "
        };
        assert!(found.version.starts_with(name), "{}", found.version);
        assert_eq!(
            capabilities::eviction_policy(&stage.conn).await.as_deref(),
            Some("noeviction")
        );
        // Nothing was made by asking.
        assert_eq!(stage.ok(&["XINFO", "GROUPS", STREAM]).as_array().len(), 1);
        let limited = stage
            .as_user(&["-info", "-config", "-command", "-xautoclaim"])
            .await;
        let found = capabilities::ask(&limited, &stage.group.stream)
            .await
            .unwrap();
        assert_eq!((found.autoclaim, found.claim_read), (false, new));
        assert_eq!(capabilities::eviction_policy(&limited).await, None);
    }
    let stage = Stage::with(Version::Redis70, &[("rename-command", "XAUTOCLAIM \"\"")]).await;
    let found = capabilities::ask(&stage.conn, &stage.group.stream)
        .await
        .unwrap();
    assert!(!found.autoclaim);
}

#[tokio::test(flavor = "multi_thread")]
async fn rights_that_are_missing_are_named_and_asking_changes_nothing() {
    for stage in stages(&Version::ALL).await {
        stage.said();
        let (set, dead) = ("z{t}".into(), OTHER.into());
        let lease = crate::server::lease::key(&stage.group, "c");
        let ask = async |conn: &Connection| {
            let uses = Uses {
                stream: &stage.group.stream,
                delay_set: Some(&set),
                expires: true,
                dead_letter: Some(&dead),
                lease: Some(&lease),
                deletes: true,
            };
            capabilities::denied(conn, &uses).await.unwrap()
        };
        assert!(ask(&stage.conn).await.is_empty());
        let conn = stage
            .as_user(&["-zrem", "-xclaim", "-xadd", "-evalsha"])
            .await;
        let denied = ask(&conn).await;
        let names: Vec<_> = denied
            .iter()
            .map(|text| text.split([':', ' ']).next().unwrap())
            .collect();
        assert_eq!(names, ["XCLAIM", "XADD", "EVALSHA", "ZREM", "XADD"]);
        assert_eq!(stage.ok(&["DBSIZE"]).as_int(), 1);
    }
}
