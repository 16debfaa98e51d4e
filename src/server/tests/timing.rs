//! How long the scripts hold the server, by its own account, with 150,000 entries pending. The figures:
//! `cargo test --release timing -- --nocapture --test-threads 1`. What is asserted is far above them, and
//! far below what a step costs whose time grows with what is pending (100 ms and more).

use super::*;
use crate::message::Destination;
use crate::message::StreamKey;
use crate::server::delay::sweep;
use crate::server::keep_alive::keep_alive;
use crate::server::read::{own_pending, take_own};
use crate::server::reclaim::reclaim;
use crate::server::settle::*;

const MANY: u64 = 150_000;
const BODY: &str = "{\"id\":123456789,\"kind\":\"order.created\",\"amount\":4299,\"note\":\"some text to make it of a usual length\"}";

impl Stage {
    async fn crowded(version: Version) -> Stage {
        let stage = Stage::on(version).await;
        let entry = |ms: u64| {
            [
                "XADD",
                STREAM,
                &format!("{ms}-1"),
                "h:a",
                "1",
                "h:b",
                "2",
                "_payload",
                BODY,
            ]
            .map(str::to_owned)
            .to_vec()
        };
        for first in (1..=MANY).step_by(10_000) {
            stage
                .server
                .pipeline(&(first..first + 10_000).map(entry).collect::<Vec<_>>());
        }
        for _ in 0..MANY / 10_000 {
            stage.ok(&[
                "XREADGROUP",
                "GROUP",
                "g",
                "c",
                "COUNT",
                "10000",
                "STREAMS",
                STREAM,
                ">",
            ]);
        }
        stage.ok(&["CONFIG", "SET", "slowlog-log-slower-than", "0"]);
        stage.ok(&["CONFIG", "SET", "slowlog-max-len", "100000"]);
        stage
    }

    /// The mean and the longest time of a command since last asked, in microseconds. The median has to be
    /// under 20 ms.
    fn took(&self, what: &str, command: &str, items: u64) {
        let log = self.ok(&["SLOWLOG", "GET", "100000"]);
        let mut times: Vec<_> = log
            .as_array()
            .iter()
            .map(|line| line.as_array())
            .filter(|line| line[3].as_array()[0].as_str().eq_ignore_ascii_case(command))
            .map(|line| line[2].as_int())
            .collect();
        times.sort_unstable();
        let (count, longest) = (times.len().max(1), times.last().copied().unwrap_or(0));
        let mean = times.iter().sum::<i64>() as f64 / count as f64;
        println!(
            "{:9} {what:46} {count:5} calls, mean {mean:7.0} us, longest {longest:6} us, {:6.2} us an item",
            self.server.version().name(),
            mean / items as f64
        );
        self.ok(&["SLOWLOG", "RESET"]);
        let median = times
            .get(times.len() / 2)
            .copied()
            .expect("the command should have been called");
        assert!(median < 20_000, "{what}: {median} us");
    }
}

fn ids(from: u64, count: u64) -> Vec<EntryId> {
    (from..from + count).map(|ms| EntryId::new(ms, 1)).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn scripts_hold_the_server_for_a_millisecond_or_two() {
    for version in Version::ALL {
        let stage = Stage::crowded(version).await;
        let (conn, group) = (&stage.conn, &stage.group);
        stage.ok(&["SLOWLOG", "RESET"]);

        for (what, idle, count) in [
            ("reclaim, nothing due", 1 << 40, 100),
            ("reclaim, all due, 100 at a time", 0, 100),
            ("reclaim, all due, 16 at a time", 0, 16),
        ] {
            let mut cursor = EntryId::MIN;
            for _ in 0..300 {
                cursor = reclaim(
                    conn,
                    group,
                    "d",
                    Duration::from_millis(idle),
                    cursor,
                    count,
                    &[],
                )
                .await
                .unwrap()
                .next;
            }
            stage.took(what, "evalsha", count as u64);
        }
        for page in 0..100 {
            own_pending(conn, group, "c", EntryId::new(100_000 + page * 100, 1), 500)
                .await
                .unwrap();
        }
        stage.took("own pending, 500 at a time", "evalsha", 500);
        for page in 0..100 {
            let wanted: Vec<_> = ids(100_000 + page * 100, 100)
                .into_iter()
                .map(|id| (id, 1))
                .collect();
            take_own(conn, group, "c", &wanted).await.unwrap();
        }
        stage.took("take own, 100 at a time", "evalsha", 100);

        for page in 0..100 {
            let items: Vec<_> = ids(60_000 + page * 150, 150)
                .into_iter()
                .map(|id| (id, owner("c")))
                .collect();
            keep_alive(conn, group, &items).await.unwrap();
        }
        stage.took("keep alive, 150 at a time", "evalsha", 150);
        for page in 0..100 {
            let items: Vec<_> = ids(80_000 + page * 150, 150)
                .into_iter()
                .map(|id| (id, owner("c"), 2))
                .collect();
            count_starts(conn, group, &items).await.unwrap();
        }
        stage.took("count starts, 150 at a time", "evalsha", 150);
        for page in 0..100 {
            let items: Vec<_> = ids(120_000 + page * 150, 150)
                .into_iter()
                .map(|id| (id, owner("c"), 1))
                .collect();
            give_back(conn, group, &items).await.unwrap();
        }
        stage.took("give back, 150 at a time", "evalsha", 150);

        for page in 0..20 {
            acknowledge(conn, group, &ids(30_000 + page * 500, 500), None)
                .await
                .unwrap();
        }
        stage.took("acknowledge, 500 at a time", "xack", 500);
        for name in ["h1", "h2"] {
            stage.server.xgroup_create(STREAM, name, "0");
        }
        for page in 0..20 {
            let delete = Some(DeleteAcked::Script);
            acknowledge(conn, group, &ids(40_000 + page * 100, 100), delete)
                .await
                .unwrap();
        }
        stage.took("acknowledge and delete, 3 groups, 100", "evalsha", 100);

        let body: &[&[u8]] = &[
            b"h:a",
            b"1",
            b"h:b",
            b"2",
            b"h:retry-count",
            b"1",
            b"_payload",
            BODY.as_bytes(),
        ];
        let set = StreamKey::from("z{t}");
        for (what, from, to) in [
            ("retries, 100 at a time", 45_000, Destination::Stream),
            (
                "delays, 100 at a time",
                50_000,
                Destination::Delay {
                    set: set.clone(),
                    ttl: None,
                },
            ),
        ] {
            for page in 0..30 {
                let items: Vec<_> = ids(from + page * 100, 100)
                    .into_iter()
                    .map(|id| Copy {
                        id,
                        consumer: owner("c"),
                        fields: fields(body),
                        delay: Duration::ZERO,
                        attempt: 1,
                        copied: false,
                    })
                    .collect();
                let settled = copy_and_acknowledge(conn, group, &to, &items, None)
                    .await
                    .unwrap();
                assert!(settled.iter().all(|outcome| *outcome == Settled::Done));
            }
            stage.took(what, "evalsha", 100);
        }
        for _ in 0..30 {
            assert_eq!(
                sweep(conn, &set, &group.stream, 100, None)
                    .await
                    .unwrap()
                    .moved,
                100
            );
        }
        stage.took("sweep, 100 at a time", "evalsha", 100);
        for page in 0..30 {
            let items: Vec<_> = ids(55_000 + page * 100, 100)
                .into_iter()
                .map(|id| Parked {
                    id,
                    consumer: owner("c"),
                    headers: vec![
                        ("h:retry-count".into(), "1".into()),
                        ("h:retry-group".into(), "g".into()),
                    ],
                })
                .collect();
            copy_parked(conn, group, &items, None).await.unwrap();
        }
        stage.took("parked retries, 100 at a time", "evalsha", 100);
    }
}
