use super::*;
use crate::message::Destination;
use crate::message::StreamKey;
use crate::server::ServerError;
use crate::server::keep_alive::keep_alive;
use crate::server::lease::{self, Renewal};
use crate::server::settle::*;

fn copy(id: EntryId, parts: &[&[u8]]) -> Copy {
    Copy {
        id,
        consumer: owner("c"),
        fields: fields(parts),
        delay: Duration::ZERO,
        attempt: 1,
        copied: false,
    }
}

fn to_other() -> Destination {
    Destination::DeadLetter {
        stream: StreamKey::from(OTHER),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_acknowledgement_takes_what_is_pending_whoever_has_it() {
    for stage in stages(&Version::ALL).await {
        stage.said();
        let ids = stage.deliver("c", 600);
        stage.steal(ids[1], "thief");
        assert_eq!(
            acknowledge(&stage.conn, &stage.group, &ids[..500], None).await,
            Ok(500)
        );
        assert_eq!(
            acknowledge(&stage.conn, &stage.group, &ids[..500], None).await,
            Ok(0)
        );
        assert_eq!(
            acknowledge(&stage.conn, &stage.group, &[], None).await,
            Ok(0)
        );
        assert_eq!(stage.pending().len(), 100);
        let nowhere = Group::new(STREAM, "nowhere");
        assert_eq!(acknowledge(&stage.conn, &nowhere, &ids, None).await, Ok(0));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn deleting_leaves_what_another_group_needs() {
    for stage in stages(&Version::ALL).await {
        let mut ways = vec![DeleteAcked::Script];
        if stage.said() == Version::Redis8 {
            ways.push(DeleteAcked::Command);
        }
        for way in ways {
            stage.ok(&["FLUSHALL"]);
            stage.server.xgroup_create(STREAM, "g", "0");
            stage.server.xgroup_create(STREAM, "h\u{e9}", "0");
            let ids = stage.deliver("c", 5);
            // The other group has had three, and has acknowledged the first two of them.
            stage.ok(&[
                "XREADGROUP",
                "GROUP",
                "h\u{e9}",
                "x",
                "COUNT",
                "3",
                "STREAMS",
                STREAM,
                ">",
            ]);
            stage.ok(&["XACK", STREAM, "h\u{e9}", "1-1", "2-1"]);
            let taken = acknowledge(&stage.conn, &stage.group, &ids[1..], Some(way)).await;
            assert_eq!(taken, Ok(4), "{way:?}");
            let left: Vec<_> = stage
                .server
                .xrange(STREAM)
                .into_iter()
                .map(|(id, _)| id)
                .collect();
            assert_eq!(left, ["1-1", "3-1", "4-1", "5-1"], "{way:?}");
            let again = acknowledge(&stage.conn, &stage.group, &ids[1..], Some(way)).await;
            assert_eq!((again, stage.server.xlen(STREAM)), (Ok(0), 4), "{way:?}");
            // The first is still pending for the group that deletes: not taken, not deleted.
            assert_eq!(stage.pending(), [(ids[0], "c".to_owned(), 1)]);
        }
        let nowhere = Group::new(STREAM, "nowhere");
        let missing = acknowledge(
            &stage.conn,
            &nowhere,
            &[EntryId::MAX],
            Some(DeleteAcked::Script),
        )
        .await;
        assert!(
            matches!(missing, Err(ServerError::GroupGone(_))),
            "{missing:?}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn ids_are_compared_as_64_bit_numbers_before_deleting() {
    let stage = Stage::on(Version::Redis70).await;
    // As floating point numbers these two are equal.
    let (first, second) = (
        EntryId::new(9_007_199_254_740_992, 1),
        EntryId::new(9_007_199_254_740_993, 1),
    );
    for id in [first, second] {
        stage.ok(&["XADD", STREAM, &id.to_string(), "f", "v"]);
    }
    stage.read("c");
    stage.server.xgroup_create(STREAM, "h", &first.to_string());
    let taken = acknowledge(
        &stage.conn,
        &stage.group,
        &[first, second],
        Some(DeleteAcked::Script),
    )
    .await;
    assert_eq!(taken, Ok(2));
    let left: Vec<_> = stage
        .server
        .xrange(STREAM)
        .into_iter()
        .map(|(id, _)| id)
        .collect();
    assert_eq!(left, [second.to_string()]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_and_its_acknowledgement_are_one_step_that_can_be_sent_again() {
    for stage in stages(&Version::ALL).await {
        stage.said();
        let ids = stage.deliver("c", 4);
        stage.steal(ids[1], "thief");
        stage.ok(&["XACK", STREAM, "g", "3-1"]);
        let bytes: &[&[u8]] = &[b"\xff\x00", b"", b"f", b"1", b"f", b"2"];
        let items: Vec<_> = ids.iter().map(|id| copy(*id, bytes)).collect();
        let settled = copy_and_acknowledge(&stage.conn, &stage.group, &to_other(), &items, None)
            .await
            .unwrap();
        assert_eq!(
            settled,
            [
                Settled::Done,
                Settled::Anothers,
                Settled::NotPending,
                Settled::Done
            ]
        );
        assert_eq!(stage.entries(OTHER), [pairs(bytes), pairs(bytes)]);
        assert_eq!(stage.pending(), [(ids[1], "thief".to_owned(), 1)]);

        let again = copy_and_acknowledge(&stage.conn, &stage.group, &to_other(), &items, None)
            .await
            .unwrap();
        assert_eq!(again[0], Settled::NotPending);
        assert_eq!(stage.server.xlen(OTHER), 2);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_retry_goes_to_the_end_of_its_stream_and_its_original_can_be_deleted() {
    for stage in stages(&[Version::Redis62, Version::Redis70, Version::Redis8]).await {
        let version = stage.said();
        let way = if version == Version::Redis8 {
            DeleteAcked::Command
        } else {
            DeleteAcked::Script
        };
        let ids = stage.deliver("c", 2);
        let items = [copy(ids[0], &[b"again", b"1"])];
        let settled = copy_and_acknowledge(
            &stage.conn,
            &stage.group,
            &Destination::Stream,
            &items,
            Some(way),
        )
        .await;
        assert_eq!(settled, Ok(vec![Settled::Done]));
        assert_eq!(
            stage.entries(STREAM),
            [pairs(&[b"f", b"v2"]), pairs(&[b"again", b"1"])]
        );
        assert_eq!(stage.pending().len(), 1);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_copy_leaves_its_original_and_the_others_alone() {
    for stage in stages(&Version::ALL).await {
        stage.said();
        let ids = stage.deliver("c", 3);
        stage.ok(&["SET", OTHER, "a string"]);
        let many: Vec<&[u8]> = vec![b"x"; MOST_FIELDS + 2];
        let items = [
            copy(ids[0], &many),
            copy(ids[1], &[b"f"]),
            copy(ids[2], &[b"f", b"v"]),
        ];
        let settled = copy_and_acknowledge(&stage.conn, &stage.group, &to_other(), &items, None)
            .await
            .unwrap();
        for outcome in &settled[..2] {
            assert!(
                matches!(outcome, Settled::Refused(ServerError::Refused(_))),
                "{outcome:?}"
            );
        }
        assert!(
            matches!(&settled[2], Settled::Refused(ServerError::Blocked(text)) if text.starts_with("WRONGTYPE"))
        );
        assert_eq!(stage.pending().len(), 3);

        stage.ok(&["DEL", OTHER]);
        let most: Vec<&[u8]> = vec![b"x"; MOST_FIELDS];
        let items = [
            copy(ids[0], &most),
            copy(ids[1], &many),
            copy(ids[2], &[b"f", b"v"]),
        ];
        let settled = copy_and_acknowledge(&stage.conn, &stage.group, &to_other(), &items, None)
            .await
            .unwrap();
        assert_eq!((&settled[0], &settled[2]), (&Settled::Done, &Settled::Done));
        assert!(matches!(settled[1], Settled::Refused(_)));
        assert_eq!(stage.pending(), [(ids[1], "c".to_owned(), 1)]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn full_memory_holds_copies_back_and_lets_acknowledgements_through() {
    for stage in stages(&Version::ALL).await {
        stage.said();
        let ids = stage.deliver("c", 3);
        stage.fill_memory();
        let delay = Destination::Delay {
            set: StreamKey::from("z{t}"),
            ttl: None,
        };
        for to in [to_other(), delay] {
            let items = [copy(ids[0], &[b"f", b"v"]), copy(ids[1], &[b"f", b"v"])];
            let settled = copy_and_acknowledge(&stage.conn, &stage.group, &to, &items, None)
                .await
                .unwrap();
            for outcome in settled {
                assert!(
                    matches!(&outcome, Settled::Refused(error) if error.is_memory()),
                    "{outcome:?}"
                );
            }
        }
        let parked = Parked {
            id: ids[0],
            consumer: owner("c"),
            headers: vec![],
        };
        let settled = copy_parked(&stage.conn, &stage.group, &[parked], None)
            .await
            .unwrap();
        assert!(
            matches!(&settled[0], Settled::Refused(error) if error.is_memory()),
            "{settled:?}"
        );
        assert_eq!(stage.pending().len(), 3);
        assert_eq!(
            acknowledge(&stage.conn, &stage.group, &ids[2..], None).await,
            Ok(1)
        );
        let kept = keep_alive(&stage.conn, &stage.group, &[(ids[0], owner("c"))]).await;
        assert_eq!(kept, Ok(Default::default()));
        assert_eq!(
            give_back(&stage.conn, &stage.group, &[(ids[0], owner("c"), 0)]).await,
            Ok(1)
        );
        stage.free_memory();
        assert_eq!(stage.server.xlen(STREAM), 3);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_whose_original_cannot_be_acknowledged_is_not_made_again() {
    for stage in stages(&Version::ALL).await {
        stage.said();
        let ids = stage.deliver("c", 2);
        let conn = stage.as_user(&["-xack"]).await;
        let mut item = copy(ids[0], &[b"f", b"v"]);
        let settled =
            copy_and_acknowledge(&conn, &stage.group, &to_other(), &[item.clone()], None).await;
        let settled = settled.unwrap();
        assert!(
            matches!(&settled[0], Settled::Copied(error) if error.is_denied()),
            "{settled:?}"
        );

        item.copied = true;
        let settled =
            copy_and_acknowledge(&conn, &stage.group, &to_other(), &[item.clone()], None).await;
        assert!(matches!(&settled.unwrap()[0], Settled::Copied(_)));
        // Somebody claimed it meanwhile: the copy stands, so the original goes all the same.
        stage.steal(ids[0], "thief");
        for _ in 0..2 {
            let settled = copy_and_acknowledge(
                &stage.conn,
                &stage.group,
                &to_other(),
                &[item.clone()],
                None,
            )
            .await;
            assert_eq!(settled, Ok(vec![Settled::Done]));
        }
        assert_eq!(stage.server.xlen(OTHER), 1);
        assert_eq!(stage.pending(), [(ids[1], "c".to_owned(), 1)]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_entry_deleted_meanwhile_is_still_copied_from_memory() {
    for stage in stages(&Version::ALL).await {
        stage.said();
        let ids = stage.deliver("c", 1);
        stage.delete(ids[0]);
        let items = [copy(ids[0], &[b"f", b"v"])];
        let settled =
            copy_and_acknowledge(&stage.conn, &stage.group, &to_other(), &items, None).await;
        assert_eq!(settled, Ok(vec![Settled::Done]));
        assert!(stage.pending().is_empty());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_step_says_so_when_the_group_is_gone() {
    for stage in stages(&Version::ALL).await {
        stage.said();
        let ids = stage.deliver("c", 1);
        let one = [(ids[0], owner("c"), 1)];
        let (conn, binary) = (&stage.conn, Group::new(&b"\xff\xfe{t}"[..], "g"));
        stage.ok(&["XGROUP", "DESTROY", STREAM, "g"]);
        for group in [&*stage.group, &binary] {
            let gone = |error: Option<ServerError>| {
                assert!(
                    matches!(error, Some(ServerError::GroupGone(_))),
                    "{group}: {error:?}"
                );
            };
            let items = [copy(ids[0], &[b"f", b"v"])];
            gone(
                copy_and_acknowledge(conn, group, &to_other(), &items, None)
                    .await
                    .err(),
            );
            let parked = Parked {
                id: ids[0],
                consumer: owner("c"),
                headers: vec![],
            };
            gone(copy_parked(conn, group, &[parked], None).await.err());
            gone(count_starts(conn, group, &one).await.err());
            gone(give_back(conn, group, &one).await.err());
            gone(keep_alive(conn, group, &[(ids[0], owner("c"))]).await.err());
        }
        assert_eq!(stage.server.xlen(OTHER), 0);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_parked_entry_is_copied_from_the_stream_with_its_headers_changed_in_place() {
    for stage in stages(&Version::ALL).await {
        stage.said();
        let entry: &[&[u8]] = &[
            b"XADD",
            b"s{t}",
            b"1-1",
            b"a",
            b"1",
            b"h:retry-count",
            b"1",
            b"a",
            b"\xff",
            b"pmessage",
            b"",
        ];
        stage.ok(entry);
        for id in ["2-1", "3-1", "4-1"] {
            stage.ok(&["XADD", STREAM, id, "f", "v"]);
        }
        stage.read("c");
        let ids: Vec<_> = (1..=5).map(|ms| EntryId::new(ms, 1)).collect();
        stage.delete(ids[1]);
        stage.steal(ids[2], "thief");
        let header =
            |name: &'static str, value: &'static str| (Bytes::from(name), Bytes::from(value));
        let parked = |id: &EntryId| Parked {
            id: *id,
            consumer: owner("c"),
            headers: vec![header("h:retry-count", "2"), header("h:retry-error", "no")],
        };
        let items: Vec<_> = ids.iter().map(parked).collect();
        let settled = copy_parked(&stage.conn, &stage.group, &items, None)
            .await
            .unwrap();
        use Settled::*;
        assert_eq!(settled, [Done, Gone, Anothers, Done, NotPending]);
        let copies = &stage.entries(STREAM)[3..];
        let first: &[&[u8]] = &[
            b"a",
            b"1",
            b"h:retry-count",
            b"2",
            b"a",
            b"\xff",
            b"pmessage",
            b"",
            b"h:retry-error",
            b"no",
        ];
        let second: &[&[u8]] = &[b"f", b"v", b"h:retry-count", b"2", b"h:retry-error", b"no"];
        assert_eq!(copies, [pairs(first), pairs(second)]);
        assert_eq!(stage.pending(), [(ids[2], "thief".to_owned(), 1)]);

        let again = copy_parked(&stage.conn, &stage.group, &items, None)
            .await
            .unwrap();
        assert_eq!(
            again,
            [NotPending, NotPending, Anothers, NotPending, NotPending]
        );
        assert_eq!(stage.server.xlen(STREAM), 5);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_parked_entry_with_too_many_fields_is_refused_and_stays() {
    for stage in stages(&Version::ALL).await {
        stage.said();
        let mut entry = vec!["XADD", STREAM, "1-1"];
        entry.extend(vec!["x"; MOST_FIELDS]);
        stage.ok(&entry);
        stage.read("c");
        let id = EntryId::new(1, 1);
        let parked = |headers| Parked {
            id,
            consumer: owner("c"),
            headers,
        };
        let header = (Bytes::from("h:new"), Bytes::from("1"));
        let settled = copy_parked(&stage.conn, &stage.group, &[parked(vec![header])], None)
            .await
            .unwrap();
        assert!(
            matches!(&settled[0], Settled::Refused(ServerError::Refused(_))),
            "{settled:?}"
        );
        assert_eq!(stage.pending().len(), 1);
        let settled = copy_parked(&stage.conn, &stage.group, &[parked(vec![])], None).await;
        assert_eq!(settled, Ok(vec![Settled::Done]));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_start_is_counted_only_for_the_owner() {
    for stage in stages(&Version::ALL).await {
        stage.said();
        let ids = stage.deliver("c", 4);
        stage.steal(ids[1], "thief");
        stage.delete(ids[2]);
        let mut items: Vec<_> = ids.iter().map(|id| (*id, owner("c"), 7)).collect();
        items.push((EntryId::new(9, 9), owner("c"), 7));
        use Started::*;
        let started = count_starts(&stage.conn, &stage.group, &items).await;
        assert_eq!(started, Ok(vec![Done, Anothers, Gone, Done, NotPending]));
        let expected = [
            (ids[0], "c".to_owned(), 7),
            (ids[1], "thief".to_owned(), 1),
            (ids[3], "c".to_owned(), 7),
        ];
        assert_eq!(stage.pending(), expected);
        let again = count_starts(&stage.conn, &stage.group, &items).await;
        assert_eq!(
            again,
            Ok(vec![Done, Anothers, NotPending, Done, NotPending])
        );
        assert_eq!(stage.pending(), expected);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_given_back_can_be_claimed_at_once_with_its_count_as_it_was() {
    for stage in stages(&Version::ALL).await {
        stage.said();
        let ids = stage.deliver("c", 400);
        stage.steal(ids[0], "thief");
        let items: Vec<_> = ids.iter().map(|id| (*id, owner("c"), id.ms % 3)).collect();
        assert_eq!(give_back(&stage.conn, &stage.group, &items).await, Ok(399));
        assert_eq!(
            give_back(&stage.conn, &stage.group, &items[200..]).await,
            Ok(200)
        );
        let a_year = Duration::from_secs(365 * 24 * 3600);
        assert!(stage.idle(ids[0]) < Duration::from_secs(60));
        assert!(
            ids[1..]
                .iter()
                .step_by(50)
                .all(|id| stage.idle(*id) > a_year)
        );
        for (id, owner, count) in &stage.pending()[1..] {
            assert_eq!((owner.as_str(), *count), ("c", (id.ms % 3) as i64));
        }
        let claim = stage.ok(&[
            "XAUTOCLAIM",
            STREAM,
            "g",
            "d",
            "31536000000",
            "0-0",
            "COUNT",
            "1000",
            "JUSTID",
        ]);
        assert_eq!(claim.as_array()[1].as_array().len(), 399);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_kept_alive_is_fresh_and_nothing_is_stolen_or_dropped() {
    for stage in stages(&Version::ALL).await {
        stage.said();
        let ids = stage.deliver("c", 5);
        for id in &ids {
            stage.age(*id, if id.ms == 4 { "d" } else { "c" }, 100_000, 3);
        }
        stage.age(ids[1], "thief", 100_000, 3);
        stage.delete(ids[2]);
        let mut items: Vec<_> = ids.iter().map(|id| (*id, owner("c"))).collect();
        items[3].1 = owner("d");
        items.push((EntryId::new(9, 9), owner("c")));
        let kept = keep_alive(&stage.conn, &stage.group, &items).await.unwrap();
        assert_eq!(
            (kept.anothers, kept.gone, kept.settled),
            (vec![ids[1]], vec![ids[2]], vec![EntryId::new(9, 9)])
        );
        for (id, fresh) in ids.iter().zip([true, false, false, true, true]) {
            assert_eq!(stage.idle(*id) < Duration::from_secs(50), fresh, "{id}");
        }
        let owners = ["c", "thief", "c", "d", "c"];
        let expected: Vec<_> = ids
            .iter()
            .zip(owners)
            .map(|(id, owner)| (*id, owner.to_owned(), 3))
            .collect();
        assert_eq!(stage.pending(), expected);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lease_belongs_to_one_token() {
    for stage in stages(&Version::ALL).await {
        stage.said();
        let (conn, key) = (&stage.conn, lease::key(&stage.group, "c"));
        let (short, long) = (Duration::from_secs(4), Duration::from_secs(60));
        let renewed = lease::renew(conn, &key, "a", long).await;
        assert_eq!(renewed, Ok(Renewal::Vanished));
        assert_eq!(lease::take(conn, &key, "a", short).await, Ok(true));
        assert_eq!(lease::take(conn, &key, "a", short).await, Ok(true));
        assert_eq!(lease::take(conn, &key, "b", long).await, Ok(false));
        stage.fill_memory();
        let renewed = lease::renew(conn, &key, "b", long).await;
        assert_eq!(renewed, Ok(Renewal::Anothers));
        assert!(lease::time_left(conn, &key).await.unwrap() <= Some(short));
        let renewed = lease::renew(conn, &key, "a", long).await;
        assert_eq!(renewed, Ok(Renewal::Renewed));
        assert!(lease::time_left(conn, &key).await.unwrap() > Some(short));
        stage.free_memory();
        lease::release(conn, &key, "b").await.unwrap();
        assert_eq!(lease::take(conn, &key, "b", long).await, Ok(false));
        lease::release(conn, &key, "a").await.unwrap();
        assert_eq!(lease::time_left(conn, &key).await, Ok(None));
    }
}
