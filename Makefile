# What a developer runs. `make` alone lists it.

SHELL := /bin/bash
.DEFAULT_GOAL := help

servers := $(CURDIR)/target/servers

.PHONY: help bench demo fuzz soak test lint servers clean-servers need-cargo

help: ## list the targets
	@echo "streamvisor: supervised consumers of Redis and Valkey streams"
	@echo
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@echo
	@echo "REDIS_URL=redis://host:port      make demo uses that server instead of starting one"
	@echo "REDIS_SERVER=/path/redis-server  the demo and the tests start this one instead of Redis 7.0"

bench: need-cargo ## measure an entry's way through this library without a server, whole and in parts
	cargo bench --features bench --bench way $(if $(ONCE),-- --test)

demo: need-cargo ## run examples/earthquakes against a Redis of its own (or REDIS_URL)
	@set -e; if [[ -z "$${REDIS_URL:-}" ]]; then \
	    if [[ -n "$${REDIS_SERVER:-}" ]]; then \
	        server="$$REDIS_SERVER"; \
	    elif [[ -x "$(servers)/redis-7.0/redis-server" ]]; then \
	        server="$(servers)/redis-7.0/redis-server"; \
	    elif ! server="$$(command -v redis-server)"; then \
	        scripts/servers.sh redis-7.0; \
	        server="$(servers)/redis-7.0/redis-server"; \
	    fi; \
	    export REDIS_SERVER="$$server"; \
	    echo "demo: starting $$server"; \
	else \
	    echo "demo: using the server at REDIS_URL"; \
	fi; \
	cargo run --release --example earthquakes

fuzz: need-cargo ## fuzz what decodes replies and entries, ten minutes each (JOBS=n side by side)
	scripts/fuzz.sh

soak: need-cargo ## two minutes of faults, then every entry is accounted for (SEED=n repeats a run)
	@set -e; [[ -x "$(servers)/redis-8/redis-server" ]] || scripts/servers.sh redis-8; \
	set -x; \
	cargo run --release --features fail_points --example soak -- --minutes 2 $(if $(SEED),--seed $(SEED)) \
	    --server "$(servers)/redis-8/redis-server"

test: need-cargo servers ## run all tests, against every server version
	@set -e; if cargo nextest --version >/dev/null 2>&1; then \
	    set -x; \
	    cargo nextest run --all-features; \
	    cargo test --doc --all-features; \
	    cargo test --doc; \
	else \
	    set -x; \
	    cargo test --all-features; \
	    cargo test --doc; \
	fi

lint: need-cargo ## check format, lints and documentation
	cargo fmt --check
	cargo clippy --all-targets --all-features -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --no-deps --all-features

servers: ## fetch the servers that the tests start (nothing to do when they are there)
	@scripts/servers.sh

clean-servers: ## delete the fetched servers and their downloads
	rm -rf "$(servers)"

need-cargo:
	@command -v cargo >/dev/null || { \
	    echo "cargo is missing: install Rust (rustup, or your system's package) and put cargo on PATH" >&2; \
	    exit 1; \
	}
