use super::*;
use crate::message::Destination;
use crate::message::StreamKey;
use crate::server::ServerError;
use crate::server::delay::{Swept, sweep, unreadable};
use crate::server::settle::*;

const SET: &str = "z{t}";

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

impl Stage {
    async fn delay(&self, delays: &[(EntryId, u64)], ttl: Option<Duration>) -> Vec<Settled> {
        let item = |(id, delay): &(EntryId, u64)| Copy {
            id: *id,
            consumer: owner("c"),
            fields: fields(&[b"same", b"\xff\x00", b"", b"", b"same", b"2"]),
            delay: ms(*delay),
            attempt: 3,
            copied: false,
        };
        let items: Vec<_> = delays.iter().map(item).collect();
        let to = Destination::Delay {
            set: StreamKey::from(SET),
            ttl,
        };
        copy_and_acknowledge(&self.conn, &self.group, &to, &items, None)
            .await
            .unwrap()
    }

    async fn sweep(&self, limit: usize, ttl: Option<Duration>) -> Swept {
        sweep(&self.conn, &SET.into(), &STREAM.into(), limit, ttl)
            .await
            .unwrap()
    }

    fn delayed(&self) -> i64 {
        self.ok(&["ZCARD", SET]).as_int()
    }

    fn time_to_live(&self) -> i64 {
        self.ok(&["PTTL", SET]).as_int()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_delayed_entry_waits_for_the_servers_clock_and_comes_back_as_it_was() {
    for stage in stages(&Version::ALL).await {
        stage.said();
        let ids = stage.deliver("c", 3);
        let delays = [(ids[0], 0), (ids[1], 300), (ids[2], 60_000)];
        assert_eq!(stage.delay(&delays, None).await, vec![Settled::Done; 3]);
        assert_eq!(
            stage.delay(&delays, None).await,
            vec![Settled::NotPending; 3]
        );
        assert_eq!((stage.delayed(), stage.pending().len()), (3, 0));

        let swept = stage.sweep(100, None).await;
        assert_eq!(
            (swept.moved, swept.unreadable, &swept.refused),
            (1, 0, &None)
        );
        let next = swept.next_due.unwrap();
        assert!(next > ms(50) && next <= ms(300), "{next:?}");
        let again = stage.sweep(100, None).await;
        assert_eq!((again.moved, again.oldest_late), (0, Duration::ZERO));

        tokio::time::sleep(next + ms(50)).await;
        let swept = stage.sweep(100, None).await;
        assert_eq!(swept.moved, 1);
        assert!(
            swept.oldest_late >= ms(40) && swept.oldest_late < ms(5000),
            "{:?}",
            swept.oldest_late
        );
        assert!(swept.next_due.unwrap() > ms(50_000));
        let copies = &stage.entries(STREAM)[3..];
        assert_eq!(
            copies,
            vec![pairs(&[b"same", b"\xff\x00", b"", b"", b"same", b"2"]); 2]
        );
        assert_eq!(stage.time_to_live(), -1);
        // Entries with equal fields stay two, and an empty set has nothing due.
        stage.ok(&["DEL", SET]);
        assert_eq!(stage.sweep(100, None).await.next_due, None);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_that_is_in_the_set_already_stays_one() {
    for stage in stages(&[Version::Redis62, Version::Redis70, Version::Redis8]).await {
        stage.said();
        let ids = stage.deliver("c", 1);
        let conn = stage.as_user(&["-xack"]).await;
        let limited = Stage {
            conn,
            group: stage.group.clone(),
            server: Server::start(Version::Redis70),
        };
        let mut due = Vec::new();
        for delay in [60_000, 90_000] {
            // As after a reply that was lost: the caller does not know that the copy stands.
            let settled = limited.delay(&[(ids[0], delay)], None).await;
            assert!(matches!(settled[0], Settled::Copied(_)), "{settled:?}");
            due.push(stage.ok(&["ZRANGE", SET, "0", "-1", "WITHSCORES"]));
        }
        assert_eq!(due[0], due[1]);
        assert_eq!(stage.delayed(), 1);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_member_that_cannot_be_read_blocks_nothing() {
    for stage in stages(&Version::ALL).await {
        stage.said();
        let ids = stage.deliver("c", 1);
        stage.delay(&[(ids[0], 0)], None).await;
        // MessagePack: [1], [2, "u", "g", 1, "f", "v"], [1, "u", "g", 1, "f"], the same with three, [1, "u", "g", 1,
        // "f", 5], [1, "u", "g", 1], two values, a map, a truncated string; and what is none.
        let garbage: [&[u8]; 12] = [
            b"\x91\x01",
            b"\x96\x02\xa1u\xa1g\x01\xa1f\xa1v",
            b"\x95\x01\xa1u\xa1g\x01\xa1f",
            b"\x97\x01\xa1u\xa1g\x01\xa1f\xa1v\xa1w",
            b"\x96\x01\xa1u\xa1g\x01\xa1f\x05",
            b"\x94\x01\xa1u\xa1g\x01",
            b"\x96\x01\xa1u\xa1g\x01\xa1f\xa1v\x01",
            b"\x81\x01\x02",
            b"\xa5ab",
            b"",
            b"not packed at all",
            b"\xc1\xff\xff",
        ];
        for member in garbage {
            stage.ok(&[b"ZADD".as_slice(), SET.as_bytes(), b"1", member]);
        }
        let mut swept = stage.sweep(5, None).await;
        assert_eq!((swept.moved, swept.unreadable), (0, 5));
        swept = stage.sweep(100, None).await;
        assert_eq!((swept.moved, swept.unreadable, swept.refused), (1, 7, None));
        assert_eq!((stage.delayed(), stage.server.xlen(STREAM)), (0, 2));
        let unreadable = unreadable(&SET.into());
        let kept = stage.ok(&[b"ZRANGE".as_slice(), unreadable.as_bytes(), b"0", b"-1"]);
        let kept: Vec<_> = kept
            .as_array()
            .iter()
            .map(|member| member.as_bytes().to_vec())
            .collect();
        assert!(kept.len() == 12 && garbage.iter().all(|member| kept.contains(&member.to_vec())));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_stream_refuses_stays_in_the_set() {
    for stage in stages(&Version::ALL).await {
        stage.said();
        let ids = stage.deliver("c", 2);
        stage.delay(&[(ids[0], 0), (ids[1], 0)], None).await;
        let refused = |swept: Swept| {
            assert_eq!((swept.moved, swept.unreadable), (0, 0), "{swept:?}");
            assert_eq!(swept.next_due, Some(Duration::ZERO));
            swept.refused.expect("a reason")
        };
        stage.fill_memory();
        assert!(refused(stage.sweep(100, None).await).is_memory());
        stage.free_memory();

        let strict = stage.as_user(&["-zrem"]).await;
        let swept = sweep(&strict, &SET.into(), &STREAM.into(), 100, None)
            .await
            .unwrap();
        assert!(refused(swept).is_denied());

        stage.ok(&["RENAME", STREAM, OTHER]);
        stage.ok(&["SET", STREAM, "x"]);
        assert!(
            matches!(refused(stage.sweep(100, None).await), ServerError::Blocked(text) if text.starts_with("WRONGTYPE"))
        );
        assert_eq!((stage.delayed(), stage.server.xlen(OTHER)), (2, 2));
        stage.ok(&["DEL", STREAM]);
        assert_eq!(stage.sweep(100, None).await.moved, 2);
        assert_eq!(stage.sweep(100, None).await.moved, 0);

        stage.ok(&["SET", SET, "x"]);
        let blocked = sweep(&stage.conn, &SET.into(), &STREAM.into(), 100, None).await;
        assert!(
            matches!(blocked, Err(ServerError::Blocked(_))),
            "{blocked:?}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_set_expires_only_where_that_is_asked_and_after_its_latest_entry_is_due() {
    for stage in stages(&Version::ALL).await {
        stage.said();
        let ids = stage.deliver("c", 4);
        let ttl = Some(ms(10_000));
        stage.delay(&[(ids[0], 60_000), (ids[1], 0)], ttl).await;
        let near = |expected: i64| {
            let left = stage.time_to_live();
            assert!(
                left > expected - 5000 && left <= expected,
                "{left}, not {expected}"
            );
        };
        near(70_000);
        // A sooner one does not draw it in, a sweep pushes it out.
        stage.delay(&[(ids[2], 1000)], ttl).await;
        near(70_000);
        stage.ok(&["PEXPIRE", SET, "15000"]);
        stage.sweep(100, ttl).await;
        near(70_000);
        stage.delay(&[(ids[3], 60_000)], None).await;
        assert_eq!(stage.time_to_live(), -1);
    }
}
