# One word for each thing that people do here. `make` alone lists them.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo test test-peers lint map bench fuzz mutants soak gpu image clean tools-peers tools-lint tools-fuzz tools-mutants

include tests/tools.env
TOOLS := target/tools
# Stories wait more than they compute, so that more run at a time than there are processors.
STORIES ?= $(shell n=$$((2 * $$(nproc))); echo $$((n < 16 ? n : 16)))
IMAGE ?= highwater
CONTAINER_TOOL ?= $(notdir $(firstword $(shell command -v docker podman buildah)))

help: ## This list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

demo: ## A simulated 4-GPU node with two training jobs; it prints what to open
	cargo run --release -- demo

# The dev profile (opt-level 1) is the one that `cargo build` and editors keep warm, so nothing is compiled twice.
# The models of the ring have a cfg of their own: plain `--cfg loom` takes tokio's `net` away, and axum with it. A filter
# that finds no test passes, so that some model ran is looked for.
test: ## All tests that need no peer
	RUST_TEST_THREADS=$(STORIES) cargo test --workspace --locked
	python3 -m unittest discover -q benches/gpu
	python3 -m unittest discover -q benches/soak
	@mkdir -p target/loom
	RUSTFLAGS="--cfg highwater_loom" CARGO_PROFILE_RELEASE_LTO=off CARGO_PROFILE_RELEASE_CODEGEN_UNITS=16 \
		cargo test --release --locked -p highwater-core --lib --target-dir target/loom ring::tests::interleavings | tee target/loom/models.log
	@grep -q '^test ring::tests::interleavings::.* ok$$' target/loom/models.log || { echo "no model of the ring ran" >&2; exit 1; }

test-peers: tools-peers ## The stories with real peers, which are installed first; one whose peer cannot be had skips loudly
	RUST_TEST_THREADS=$(STORIES) cargo test --workspace --locked --test it -- --ignored --skip crowd::the_client

# No advisories: their database is a git repository, which not every builder can reach. Where it can be:
# `cargo deny check advisories`.
lint: tools-lint ## Format, clippy, rustdoc and dependencies, with every warning denied
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --all-features --locked -- -D warnings
	cargo fmt --manifest-path fuzz/Cargo.toml --check
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --document-private-items --locked
	$(TOOLS)/cargo-deny-$(CARGO_DENY_VERSION)/bin/cargo-deny --workspace check --hide-inclusion-graph bans licenses sources

map: ## What imports what: each module with those that it uses, in one direction
	@cargo test --workspace --locked -q --test it -- house::no_modules --nocapture

bench: ## Benchmarks, each beside the figure that it has to hold
	cargo bench --locked

soak: MINUTES ?= 60
soak: ## A daemon with everything on for MINUTES=60, whose memory, files and threads must stand still
	cargo build --release --locked
	HIGHWATER=target/release/highwater python3 benches/soak/soak.py --minutes $(MINUTES) --out target/soak.csv

fuzz: MINUTES ?= 1
fuzz: tools-fuzz ## A minute of each fuzz target; MINUTES=10 or RUNS=10000000 for more
	MINUTES="$(MINUTES)" RUNS="$(RUNS)" fuzz/run

mutants: ## Small faults in core/ and src/place/, one at a time, nine of ten of which a test must catch; SHARD=0/8 for a part
mutants: tools-mutants
	PATH="$(CURDIR)/$(TOOLS)/cargo-mutants-$(CARGO_MUTANTS_VERSION)/bin:$$PATH" tests/mutants/run $(if $(SHARD),--shard $(SHARD))

gpu: ## How to measure on real GPUs
	@echo "On a machine with NVIDIA GPUs, a C compiler and the driver:"
	@echo "  cargo build --release"
	@echo "  HIGHWATER=target/release/highwater python3 benches/gpu/bench.py --out results/"
	@echo "benches/gpu/README.md says what it measures, docs/performance.md has the figures."

image: ## The container image, with docker, podman or buildah, whichever is here; IMAGE names it
	$(CONTAINER_TOOL) build -t $(IMAGE) .

clean: ## Everything that was built, tools included
	cargo clean

tools-peers:
	tests/install-tools.sh peers

tools-lint:
	tests/install-tools.sh lint

tools-fuzz:
	tests/install-tools.sh fuzz

tools-mutants:
	tests/install-tools.sh mutants
