#!/usr/bin/env bash
#
# Compares this crate's consumer with those of other libraries, side by side on one machine.
#
#   scripts/peers.sh HARNESS SERVER [REPEATS]
#
# HARNESS is the folder of the comparison harness (its README.md says what is measured), SERVER a
# redis-server or valkey-server binary. ONLY=ceiling,raw-fred,ours picks consumers; by default the two
# references and ours. WORKLOAD=latency measures lateness instead of throughput. The harness is copied
# to target/peers, built there, and left there for the next run.

set -euo pipefail

harness=${1:?the folder of the comparison harness}
server=${2:?a redis-server or valkey-server binary}
repeats=${3:-5}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
server=$(realpath "$server")
build=$root/target/peers
only=${ONLY:-ceiling,raw-fred,raw-fred-deep,ours,ours-default}

if [[ ! -f $harness/consumers.txt ]]; then
    echo "$harness is not the comparison harness: it has no consumers.txt" >&2
    exit 1
fi
mkdir -p "$build/harness"
cp -R "$harness/." "$build/harness/"
chmod -R u+w "$build/harness"

export CARGO_TARGET_DIR=$build/target
# The same profile as the harness gives all others.
profile=(--config 'profile.release.lto="thin"' --config 'profile.release.codegen-units=1')
(cd "$root" && cargo build --release --quiet --example bench_consumer "${profile[@]}")
cp "$build/target/release/examples/bench_consumer" "$build/target/release/ours"
cd "$build/harness"
# Each on its own, so that none gets a feature that only another one asks for.
crates=(bench ceiling raw-fred)
for name in ruststream seastreamer apalis raw-redisrs; do
    if [[ $only == *"$name"* ]]; then crates+=("$name"); fi
done
for crate in "${crates[@]}"; do
    cargo build --release --quiet -p "peers-$crate"
done

cat >>consumers.txt <<'LIST'
ours : MAX_IN_FLIGHT=4000 ours
ours-default : ours
ours-batch : FORM=batch ours
ours-actors : FORM=actors ours
ours-claiming : FORM=claiming ours
ours-mixed : FORMAT=own FORM=mixed ours
LIST
cat >>latency.txt <<'LIST'
ours : ours
LIST
bench=$build/target/release/bench
if [[ ${WORKLOAD:-drain} == latency ]]; then
    "$bench" --server "$server" --repeats "$repeats" --workload latency --file latency.txt --only "$only"
else
    "$bench" --server "$server" --repeats "$repeats" --pin --only "$only"
fi
