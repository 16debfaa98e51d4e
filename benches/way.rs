//! The way of 200 entries from the server's reply to the acknowledgements that are to be sent, whole and in
//! its parts, on one thread and without a server: `make bench`.

use bytes::Bytes;
use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use serde::Deserialize;
use streamvisor::bench::{Batch, Reply, Way};
use streamvisor::{Codec, Json};

const ENTRIES: u64 = 200;
const BODY: &[u8] =
    br#"{"id":184467,"item":"a thing that somebody ordered","quantity":3,"price":19.95}"#;

#[derive(Deserialize)]
#[allow(dead_code)] // they are there to be decoded
struct Order {
    id: u64,
    item: String,
    quantity: u32,
    price: f64,
}

fn reply() -> Reply {
    Reply::of(ENTRIES, &Bytes::from_static(BODY))
}

fn way(ordered: bool) -> Way {
    Way::new(ordered).expect("there is a worker")
}

fn batch(way: &Way) -> Batch {
    way.receive(reply().decode().expect("the reply is well-formed"))
}

fn the_way(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("200 entries");
    group.throughput(Throughput::Elements(ENTRIES));

    group.bench_function("decode", |bencher| {
        let reply = reply();
        bencher.iter_batched(
            || reply.clone(),
            |reply| reply.decode().expect("the reply is well-formed").len(),
            BatchSize::SmallInput,
        );
    });

    group.bench_function("in flight", |bencher| {
        let way = way(false);
        bencher.iter_batched(
            || batch(&way),
            |batch| {
                let batch = way.register(batch);
                way.forget(&batch);
                batch
            },
            BatchSize::SmallInput,
        );
    });

    for (name, ordered) in [("hand over", false), ("hand over, ordered", true)] {
        let way = way(ordered);
        group.bench_function(name, |bencher| {
            bencher.iter_batched(
                || {
                    way.settle();
                    batch(&way)
                },
                |batch| way.hand_over(batch, |_| ()),
                BatchSize::PerIteration,
            );
        });
    }

    group.bench_function("settle", |bencher| {
        let way = way(false);
        let batch = batch(&way);
        bencher.iter(|| {
            way.acknowledge(&batch);
            assert_eq!(way.settle() as u64, ENTRIES);
        });
    });

    group.bench_function("whole", |bencher| {
        let (way, reply) = (way(false), reply());
        bencher.iter_batched(
            || reply.clone(),
            |reply| {
                let entries = reply.decode().expect("the reply is well-formed");
                let batch = way.register(way.receive(entries));
                let handled = way.hand_over(batch, |entry| {
                    let order: Order = Json.decode(entry).expect("the body is an order");
                    std::hint::black_box(order);
                });
                assert_eq!((handled as u64, way.settle() as u64), (ENTRIES, ENTRIES));
            },
            BatchSize::SmallInput,
        );
    });
    group.finish();
}

criterion_group!(benches, the_way);
criterion_main!(benches);
