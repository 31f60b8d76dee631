# Drafthorse. `make help` lists the targets; all of them can be repeated at will.
SHELL := /bin/bash
CARGO ?= cargo
# A libtorch of your own wins: make run LIBTORCH=/opt/libtorch
LIBTORCH ?= $(CURDIR)/libtorch
export LIBTORCH
MODEL ?= models/SmolLM2-135M-Instruct
# The head that `make run` drafts with. For another MODEL name its own, or none: make run MODEL=... SPECULATION=
SPECULATION ?= --speculative-algorithm EAGLE+NGRAM --speculative-draft-model-path models/SmolLM2-135M-Instruct-EAGLE \
  --speculative-token-map models/SmolLM2-135M-Instruct-EAGLE/token_map.json \
  --speculative-num-steps 3 --speculative-eagle-topk 4 --speculative-num-draft-tokens 8
BIN := $(or $(CARGO_TARGET_DIR),target)/release
ARGS ?=
CHAOS_FAULTS ?= 200
CHAOS_SEED ?= 1

.DEFAULT_GOAL := help
.PHONY: help run build test chaos bench bench-peers lint fmt model libtorch prerequisites clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

run: build model ## serve SmolLM2 with its EAGLE head; more flags: make run ARGS="--port 8000"
	@$(BIN)/launcher --model $(MODEL) $(SPECULATION) --enable-metrics --sample-chat $(ARGS)

build: libtorch ## build every binary in release mode
	$(CARGO) build --release --workspace --bins

test: build model ## unit, golden and end-to-end tests
	$(CARGO) test --release --workspace

chaos: build model ## 200 faults under load, with a table at the end; others: make chaos CHAOS_FAULTS=1000 CHAOS_SEED=7
	CHAOS_FAULTS=$(CHAOS_FAULTS) CHAOS_SEED=$(CHAOS_SEED) $(CARGO) test --release --package tests --test it -- \
	  faults::chaos --nocapture --test-threads 1

bench: build model ## speed of the default model with and without speculation, and of every draft worker's steps
	$(CARGO) bench --package tests --bench serve --bench speculation --bench adaptive
	$(CARGO) bench --package scheduler-proc --bench workers

bench-peers: build model ## speed beside other servers: installs llama.cpp's (built from source, 20 minutes, once)
	scripts/peers.sh .cache/peers
	$(CARGO) bench --package tests --bench peers -- .cache/peers

lint: libtorch ## formatting, clippy without warnings, file sizes
	$(CARGO) fmt --all --check
	$(CARGO) clippy --release --workspace --all-targets -- -D warnings
	@scripts/tidy.sh

fmt: ## format the code
	$(CARGO) fmt --all

model: prerequisites ## fetch the default model (92 MB, once)
	@scripts/model.sh models/SmolLM2-135M-Instruct

libtorch: prerequisites ## fetch libtorch 2.11.0 (530 MB, once), unless LIBTORCH names one
	@if [ "$(LIBTORCH)" = "$(CURDIR)/libtorch" ]; then scripts/libtorch.sh "$(LIBTORCH)"; \
	 elif [ ! -d "$(LIBTORCH)/lib" ]; then echo "LIBTORCH=$(LIBTORCH) has no lib folder" >&2; exit 1; fi

prerequisites:
	@scripts/prerequisites.sh

clean: ## remove what was built (the downloads stay)
	$(CARGO) clean
