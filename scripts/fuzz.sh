#!/usr/bin/env bash
# Fuzzes each target of the library (the tests in modules named `fuzz`) with libFuzzer, on stable Rust:
# the compiler's coverage counters need no nightly, and the fuzzer itself comes with the crate `bolero`.
#
#   scripts/fuzz.sh [seconds for each target] [part of a target's name]
#
# What was learned stays in target/fuzz-corpus, and is where the next run begins. An input that fails is
# printed, and kept in target/fuzz-found. JOBS is how many targets run side by side (1).

set -euo pipefail
cd "$(dirname "$0")/.."

seconds="${1:-600}"
only="${2:-fuzz::}"
host="$(rustc -vV | sed -n 's/^host: //p')"

# With a target named, the flags reach neither build scripts nor procedural macros. They are kept away from
# the other tests by building the library alone.
export RUSTFLAGS="--cfg fuzzing --cfg fuzzing_libfuzzer -Cpasses=sancov-module \
-Cllvm-args=-sanitizer-coverage-level=4 -Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
-Cllvm-args=-sanitizer-coverage-pc-table -Cllvm-args=-sanitizer-coverage-trace-compares"
build=(cargo test --lib --all-features --profile fuzz --target "$host" --target-dir target/fuzz)
"${build[@]}" --no-run
binary="$("${build[@]}" --no-run --message-format json 2>/dev/null |
    sed -n 's/.*"executable":"\([^"]*\)".*/\1/p' | tail -n 1)"

fuzz() {
    local target="$1" name="${1//::/-}"
    local corpus="target/fuzz-corpus/$name" found="target/fuzz-found/$name"
    mkdir -p "$corpus" "$found"
    echo "fuzz: $target, for $seconds s"
    BOLERO_TEST_NAME="$target" BOLERO_LIBTEST_HARNESS=1 \
        BOLERO_LIBFUZZER_ARGS="$corpus -artifact_prefix=$found/ -timeout=10 -max_total_time=$seconds" \
        "$binary" --exact "$target" --nocapture --test-threads 1 >"target/fuzz-found/$name.log" 2>&1 ||
        { tail -n 60 "target/fuzz-found/$name.log"; return 1; }
    # The last line with figures, and how many runs there were.
    grep -a -E '^(#[0-9]+|Done)' "target/fuzz-found/$name.log" | tail -n 2
}
export -f fuzz
export binary seconds

"$binary" --list 2>/dev/null | sed -n 's/: test$//p' | grep 'fuzz::' | grep -- "$only" |
    xargs -P "${JOBS:-1}" -I{} bash -c 'fuzz {}'
