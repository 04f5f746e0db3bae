# One target for each task of development. `make` alone lists them.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo rules classic test test-peers test-cluster test-torch-versions advisories lint map bench instructions fuzz mutants soak chaos gpu image clean tools-peers tools-cluster tools-lint tools-fuzz tools-mutants

include tests/tools.env
TOOLS := target/tools
PYTHON_TOOLS := $(CURDIR)/$(TOOLS)/python-tools-$(MYPY_VERSION)-$(RUFF_VERSION)-$(SETUPTOOLS_VERSION)/bin/python
# Lints and counted instructions depend on the compiler; everything else takes the user's.
PINNED_CARGO = cargo$(shell rustup run $(RUST_VERSION) rustc --version >/dev/null 2>&1 && echo " +$(RUST_VERSION)")
CHECK_PINNED = @$(PINNED_CARGO) --version | grep -qF " $(RUST_VERSION) " || echo "$@: made for Rust $(RUST_VERSION) (rustup toolchain install $(RUST_VERSION)); others have other warnings and numbers" >&2
# Tests wait more than they compute, so more of them run at a time than there are processors.
STORIES ?= $(shell n=$$((2 * $$(nproc))); echo $$((n < 16 ? n : 16)))
IMAGE ?= highwater
CONTAINER_TOOL ?= $(notdir $(firstword $(shell command -v docker podman buildah)))

help: ## Print this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

demo: ## Run a simulated 4-GPU node with two training jobs; prints what to open
	cargo run --locked --profile demo -- demo

# The repository has no address of its own, so the rules name the page of each runbook, and this makes links of the names.
LINKED = @[[ "$(RUNBOOKS)" =~ ^https?:// ]] || { echo "$@: set RUNBOOKS to the address of this repository or of a copy of it" >&2; exit 1; }
LINK = sed -i 's|^\( *\)runbook: docs/|\1runbook_url: $(RUNBOOKS:/=)/docs/|'
rules: ## Write the alert rules to target/alerts with links to runbooks below RUNBOOKS=https://git.example/highwater
	$(LINKED)
	@mkdir -p target/alerts && cp dashboards/alerts/*.yaml target/alerts && $(LINK) target/alerts/*.yaml

classic: ## The same for engines without native histograms, such as VictoriaMetrics, with dashboards: to target/classic
	$(LINKED)
	@python3 -B dashboards/generate.py --classic target/classic && $(LINK) target/classic/alerts/*.yaml

# The dev profile (opt-level 1) is the one that `cargo build` and editors use, so nothing is compiled twice.
# Each part runs whatever became of those before it; the target fails if one did.
test: ## Run all tests that need no peer programs
	@mkdir -p target/loom
	failed=; part() { echo "$$*"; "$$@" || failed="$$failed"$$'\n'"  $$*"; }; \
	part env RUST_TEST_THREADS=$(STORIES) cargo test --workspace --locked --no-fail-fast; \
	part env HIGHWATER=$(abspath $(or $(CARGO_TARGET_DIR),target))/debug/highwater python3 python/tests/alone.py; \
	part python3 -m unittest discover -q benches/gpu; \
	part python3 -m unittest discover -q benches/soak; \
	part python3 -m unittest discover -q benches/chaos; \
	part tests/models; \
	[ -z "$$failed" ] || { echo "failed:$$failed" >&2; exit 1; }

test-peers: tools-peers ## Install real peers and run the tests with them; tests without their peer are skipped loudly
	RUST_TEST_THREADS=$(STORIES) cargo test --workspace --locked --test it -- --ignored --skip crowd::the_client --skip panels --skip cluster::
	@# It compares times, with 64 daemons: nothing runs beside it.
	cargo test --workspace --locked --test it -- --ignored panels

test-cluster: tools-cluster ## Run the chart and the attribution of pods in a real Kubernetes cluster of one node; needs root
	cargo test --workspace --locked --test it -- --ignored --nocapture cluster::

test-torch-versions: ## Run the client's tests within each supported PyTorch, or VERSIONS="2.1.2 2.3.1"; an hour; needs the network, 5 GB each
	tests/torch-versions $(VERSIONS)

advisories: tools-lint ## Check the dependencies for known vulnerabilities, by the newest database of RustSec; needs the network
	$(TOOLS)/cargo-deny-$(CARGO_DENY_VERSION)/bin/cargo-deny --workspace check --hide-inclusion-graph advisories

# No advisories: their database is a git repository, which not every builder can reach.
lint: tools-lint ## Check format, clippy, rustdoc, language, dependencies and the Python client; every warning is an error
	tests/words
	$(CHECK_PINNED)
	$(PINNED_CARGO) fmt --all --check
	$(PINNED_CARGO) clippy --workspace --all-targets --all-features --locked -- -D warnings
	$(PINNED_CARGO) fmt --manifest-path fuzz/Cargo.toml --check
	RUSTDOCFLAGS="-D warnings" $(PINNED_CARGO) doc --workspace --no-deps --document-private-items --locked
	$(TOOLS)/cargo-deny-$(CARGO_DENY_VERSION)/bin/cargo-deny --workspace check --hide-inclusion-graph bans licenses sources
	cd python && $(PYTHON_TOOLS) -m mypy && $(PYTHON_TOOLS) -m ruff check --quiet .

map: ## Print the modules and the modules that each imports
	@cargo test --workspace --locked -q --test it -- house::no_modules --nocapture

bench: ## Run the benchmarks, each compared with its bound
	cargo bench --locked --bench core --bench otlp

instructions: ## Count the instructions of what runs all the time; fails on 3 % more than committed; MOVE=1 commits to new numbers
	$(CHECK_PINNED)
	$(PINNED_CARGO) bench --locked --bench instructions $(if $(MOVE),-- --move)

soak: MINUTES ?= 60
soak: ## Run a daemon with everything on for MINUTES=60; its memory, files and threads must not grow
	cargo build --release --locked
	HIGHWATER=target/release/highwater python3 benches/soak/soak.py --minutes $(MINUTES) --out target/soak.csv

chaos: MINUTES ?= 60
chaos: ## Break everything around a daemon for MINUTES=60; its books must balance
	cargo build --release --locked
	cargo build --release --locked --package nvml-fake
	python3 benches/chaos/chaos.py --minutes $(MINUTES)

fuzz: MINUTES ?= 1
fuzz: tools-fuzz ## Run each fuzz target for a minute; MINUTES=10 or RUNS=10000000 for more
	MINUTES="$(MINUTES)" RUNS="$(RUNS)" fuzz/run

mutants: ## Mutation tests of core/, and of a quarter of engine/ and analysis/ each day; nine of ten must be caught; SHARD=0/8 for a part
mutants: tools-mutants
	PATH="$(CURDIR)/$(TOOLS)/cargo-mutants-$(CARGO_MUTANTS_VERSION)/bin:$$PATH" tests/mutants/run $(if $(SHARD),--shard $(SHARD))

gpu: ## Explain how to measure on real GPUs
	@echo "On a machine with NVIDIA GPUs, a C compiler and the driver:"
	@echo "  cargo build --release"
	@echo "  HIGHWATER=target/release/highwater python3 benches/gpu/bench.py --out results/"
	@echo "benches/gpu/README.md describes the measurements, docs/performance.md has the figures."

image: ## Build the container image with docker, podman or buildah; IMAGE names it
	$(CONTAINER_TOOL) build --build-arg VERSION=$$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1) \
		--build-arg REVISION=$$(git rev-parse HEAD) -t $(IMAGE) .

clean: ## Remove everything that was built, including tools
	cargo clean

tools-peers:
	tests/install-tools.sh peers

tools-cluster:
	tests/install-tools.sh cluster

tools-lint:
	tests/install-tools.sh lint

tools-fuzz:
	tests/install-tools.sh fuzz

tools-mutants:
	tests/install-tools.sh mutants
