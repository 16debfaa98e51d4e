use super::*;
use crate::message::StreamKey;
use crate::server::ServerError;
use crate::server::group::*;
use crate::server::publish::add;

fn id(ms: u64) -> EntryId {
    EntryId::new(ms, 1)
}

#[tokio::test(flavor = "multi_thread")]
async fn attaching_makes_the_group_once_and_reads_where_it_stands() {
    for stage in stages(&Version::ALL).await {
        stage.said();
        stage.deliver("c", 3);
        let conn = &stage.conn;
        let attached = |group: &Group, origin| {
            let group = group.clone();
            async move { attach(conn, &group, origin).await }
        };
        let found = |ms, created| {
            Ok(Attached {
                last_delivered: if ms == 0 { EntryId::MIN } else { id(ms) },
                created,
            })
        };
        assert_eq!(
            attached(&stage.group, Some(Origin::Last)).await,
            found(3, false)
        );
        assert_eq!(attached(&stage.group, None).await, found(3, false));
        for (name, origin, ms) in [
            ("last", Origin::Last, 3),
            ("begin", Origin::After(EntryId::MIN), 0),
            ("after", Origin::After(id(2)), 2),
        ] {
            let group = Group::new(STREAM, name);
            let missing = attached(&group, None).await;
            assert!(
                matches!(missing, Err(ServerError::GroupGone(_))),
                "{missing:?}"
            );
            assert_eq!(
                attached(&group, Some(origin)).await,
                found(ms, true),
                "{name}"
            );
            assert_eq!(
                attached(&group, Some(origin)).await,
                found(ms, false),
                "{name}"
            );
        }
        let nowhere = Group::new("nowhere", "g");
        assert!(matches!(
            attached(&nowhere, None).await,
            Err(ServerError::GroupGone(_))
        ));
        assert_eq!(attached(&nowhere, Some(Origin::Last)).await, found(0, true));
        let binary = Group::new(&b"\xff"[..], "g\u{e9}");
        assert_eq!(attached(&binary, Some(Origin::Last)).await, found(0, true));
        stage.ok(&["SET", "text", "x"]);
        for origin in [None, Some(Origin::Last)] {
            match attached(&Group::new("text", "g"), origin).await {
                Err(ServerError::Blocked(text)) => {
                    assert!(text.starts_with("WRONGTYPE") && text.contains("`text`"))
                }
                other => panic!("{other:?}"),
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_group_that_disappeared_is_made_again_as_the_table_says() {
    for stage in stages(&Version::ALL).await {
        stage.said();
        let conn = &stage.conn;
        let remade = |mark, saw_missing| async move {
            let in_hand = [(id(2), "c", 5), (id(4), "d", 1), (id(7), "c", 1)];
            let remade = remake(conn, &Group::new(STREAM, "g"), mark, saw_missing, &in_hand)
                .await
                .unwrap();
            (remade.action, remade.last_delivered)
        };
        let fresh = |last: u64| {
            stage.ok(&["DEL", STREAM]);
            for ms in 1..=last {
                stage.ok(&["XADD", STREAM, &id(ms).to_string(), "f", "v"]);
            }
        };
        let pending = |expected: &[(u64, &str, i64)]| {
            let expected: Vec<_> = expected
                .iter()
                .map(|(ms, owner, n)| (id(*ms), (*owner).to_owned(), *n))
                .collect();
            assert_eq!(stage.pending(), expected);
        };

        // It exists: it is the truth, down too. What is in hand is pending there.
        fresh(6);
        stage.server.xgroup_create(STREAM, "g", "3-1");
        assert_eq!(remade(id(5), false).await, (Remaking::Followed, id(3)));
        pending(&[(2, "c", 5), (4, "d", 1)]);

        // Missing, the stream reaches the mark: the highest of the mark and what is in hand, and no
        // further than the stream does. What is in hand and exists is pending again.
        fresh(9);
        assert_eq!(remade(id(5), true).await, (Remaking::Made, id(7)));
        pending(&[(2, "c", 5), (4, "d", 1), (7, "c", 1)]);
        assert_eq!(remade(id(5), true).await, (Remaking::Followed, id(7)));
        pending(&[(2, "c", 5), (4, "d", 1), (7, "c", 1)]);
        fresh(6);
        stage.delete(id(4));
        assert_eq!(remade(id(5), false).await, (Remaking::Made, id(6)));
        pending(&[(2, "c", 5)]);

        // Missing, the stream ends below the mark, or there is none: another stream.
        fresh(4);
        assert_eq!(
            remade(id(5), true).await,
            (Remaking::Restarted, EntryId::MIN)
        );
        pending(&[(2, "c", 5), (4, "d", 1)]);
        stage.ok(&["DEL", STREAM]);
        assert_eq!(
            remade(id(5), true).await,
            (Remaking::Restarted, EntryId::MIN)
        );
        pending(&[]);

        // Made anew by somebody, and seen missing: raised to the mark.
        fresh(9);
        stage.server.xgroup_create(STREAM, "g", "1-1");
        stage.ok(&[
            "XREADGROUP",
            "GROUP",
            "g",
            "x",
            "COUNT",
            "1",
            "STREAMS",
            STREAM,
            ">",
        ]);
        assert_eq!(remade(id(5), true).await, (Remaking::Raised, id(5)));
        pending(&[(2, "x", 1), (4, "d", 1), (7, "c", 1)]);
        // Not seen missing, or in another stream: followed.
        stage.ok(&["XGROUP", "SETID", STREAM, "g", "1-1"]);
        assert_eq!(remade(id(5), false).await, (Remaking::Followed, id(1)));
        assert_eq!(remade(id(20), true).await, (Remaking::Followed, id(1)));

        stage.ok(&["SET", "text", "x"]);
        let blocked = remake(conn, &Group::new("text", "g"), id(1), true, &[]).await;
        assert!(
            matches!(&blocked, Err(ServerError::Blocked(text)) if text.contains("`text`")),
            "{blocked:?}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_consumer_is_removed_only_with_nothing_pending() {
    for stage in stages(&Version::ALL).await {
        stage.said();
        stage.deliver("busy", 1);
        for name in ["free", "kept", "own"] {
            stage.ok(&["XGROUP", "CREATECONSUMER", STREAM, "g", name]);
        }
        let (conn, group) = (&stage.conn, &stage.group);
        let names = || async {
            let mut names: Vec<_> = consumers(conn, group)
                .await
                .unwrap()
                .into_iter()
                .map(|c| c.name)
                .collect();
            names.sort();
            names
        };
        assert_eq!(remove_consumer(conn, group, "busy").await, Ok(false));
        assert_eq!(remove_consumer(conn, group, "unknown").await, Ok(false));
        assert_eq!(remove_consumer(conn, group, "own").await, Ok(true));
        assert_eq!(names().await, ["busy", "free", "kept"]);
        assert_eq!(
            tidy_consumers(conn, group, Duration::from_secs(3600), &[]).await,
            Ok(0)
        );
        tokio::time::sleep(Duration::from_millis(30)).await;
        assert_eq!(
            tidy_consumers(conn, group, Duration::from_millis(20), &[owner("kept")]).await,
            Ok(1)
        );
        assert_eq!(names().await, ["busy", "kept"]);
        assert_eq!(stage.pending().len(), 1);
        let nowhere = Group::new(STREAM, "nowhere");
        assert!(matches!(
            remove_consumer(conn, &nowhere, "x").await,
            Err(ServerError::GroupGone(_))
        ));
        let gone = consumers(conn, &nowhere).await;
        assert!(matches!(gone, Err(ServerError::GroupGone(_))), "{gone:?}");
        let gone = consumers(conn, &Group::new("nowhere", "g")).await;
        assert!(matches!(gone, Err(ServerError::GroupGone(_))), "{gone:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn groups_are_described_with_their_lag_where_it_is_known() {
    for stage in stages(&Version::ALL).await {
        let version = stage.said();
        stage.deliver("c", 3);
        stage.ok(&["XADD", STREAM, "4-1", "f", "v"]);
        stage.server.xgroup_create(STREAM, "middle", "2-1");
        let found = groups(&stage.conn, &stage.group.stream).await.unwrap();
        let lag = (version != Version::Redis62).then_some(1);
        let g = found.iter().find(|group| group.name == "g").unwrap();
        assert_eq!(
            (g.consumers, g.pending, g.last_delivered, g.lag),
            (1, 3, id(3), lag)
        );
        let middle = found.iter().find(|group| group.name == "middle").unwrap();
        assert_eq!((middle.last_delivered, middle.lag), (id(2), None));
        assert_eq!(length(&stage.conn, &stage.group.stream).await, Ok(4));
        let nowhere = StreamKey::from("nowhere");
        assert_eq!(groups(&stage.conn, &nowhere).await, Ok(vec![]));
        assert_eq!(length(&stage.conn, &nowhere).await, Ok(0));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn publishing_adds_any_bytes_and_says_why_not() {
    for stage in stages(&Version::ALL).await {
        stage.said();
        let conn = connect(&stage.server.url(), Role::Publisher).await;
        let added = add(
            &conn,
            &stage.group.stream,
            fields(&[b"\xff", b"", b"a", b"\x00"]),
        )
        .await
        .unwrap();
        let found = stage.server.xrange(STREAM);
        assert_eq!(
            found,
            [(added.to_string(), pairs(&[b"\xff", b"", b"a", b"\x00"]))]
        );
        stage.ok(&["SET", "text", "x"]);
        let refused = add(&conn, &"text".into(), fields(&[b"a", b"b"])).await;
        assert!(
            matches!(refused, Err(ServerError::Blocked(_))),
            "{refused:?}"
        );
        stage.fill_memory();
        let refused = add(&conn, &stage.group.stream, fields(&[b"a", b"b"])).await;
        assert!(
            refused.as_ref().is_err_and(ServerError::is_memory),
            "{refused:?}"
        );
        stage.free_memory();
    }
}
