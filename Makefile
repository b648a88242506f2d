# Everything a newcomer needs is `make run` and `make test`; `make` alone lists the rest.
# Each target does its own set-up first. A set-up step leaves a stamp in .venv, so it is done once,
# and again when its list changes.

SHELL := /bin/sh
MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# Any Python that the pinned packages have wheels for; override with make PYTHON=…
PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13 python3.14; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 15))' 2>/dev/null \
	&& { command -v $$p; exit; }; done; echo python3)

BIN := .venv/bin
BUILD := .venv/.stamp-build
LIBRARIES := .venv/.stamp-libraries
TOOLS := .venv/.stamp-tools
ENGINE_STAMP := .venv/.stamp-engine
PROJECT := .venv/.stamp-project
NODE_CLIENT := .venv/.stamp-node
PROTOS := $(wildcard protos/nightshift/v1/*.proto)
STUBS := $(PROTOS:.proto=_pb2.py) $(PROTOS:.proto=_pb2.pyi) \
	$(PROTOS:.proto=_pb2_grpc.py) $(PROTOS:.proto=_pb2_grpc.pyi)

# --- set-up --------------------------------------------------------------------------------------

.PHONY: help
help: ## This list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: setup
setup: setup-run setup-fast ## Install all in .venv: nightshift, vLLM, and what tests them
	@:

# Enough for `make run`: the services, without an engine that of `up` with the simulated one.
.PHONY: setup-run setup-services
setup-run: setup-services $(ENGINE_STAMP)
	@:
setup-services: $(LIBRARIES) $(PROJECT) proto
	@:

# Without an engine: enough for test-fast and lint.
.PHONY: setup-fast
setup-fast: setup-services $(TOOLS) $(NODE_CLIENT)
	@:

$(BUILD): requirements/build.txt
	@$(PYTHON) tools/setup.py build
	@touch $@

$(LIBRARIES): requirements/base.txt $(BUILD)
	@$(BIN)/python tools/setup.py libraries
	@touch $@

$(ENGINE_STAMP): requirements/cpu.txt requirements/cuda.txt requirements/models.txt \
		requirements/torch-cpu.txt | $(LIBRARIES)
	@$(BIN)/python tools/setup.py engine
	@touch $@

# The command's entry point stands in pyproject.toml.
$(PROJECT): pyproject.toml $(BUILD)
	@$(BIN)/python tools/setup.py project
	@touch $@

$(TOOLS): requirements/dev.txt $(LIBRARIES)
	@$(BIN)/python tools/setup.py tools
	@touch $@

# The tests hold the official Node client against the contract, too.
$(NODE_CLIENT): tests/contract/node/package.json tests/contract/node/package-lock.json | $(TOOLS)
	@$(BIN)/python tools/setup.py node
	@touch $@

.PHONY: proto
proto: $(STUBS) ## Generate Python code from protos/, where a .proto is newer
	@:

# protoc makes all of them in one go.
$(STUBS) &: $(PROTOS) tools/proto.py | $(BUILD)
	@$(BIN)/python tools/proto.py

# --- use -----------------------------------------------------------------------------------------

.PHONY: model
model: setup-run ## Prepare the small model, once; the last line is its folder (use make -s with -C)
	@$(BIN)/python -m services.executor.small_model

.PHONY: run
run: setup-run ## Show it all: a batch through every service and a real model (MODEL=path or name)
	@$(BIN)/python -m services.cli.commands.demo $(if $(MODEL),--model '$(MODEL)')

# ENGINE=simulated needs no model and no vLLM.
.PHONY: up
ifeq ($(ENGINE),simulated)
up: setup-services ## Start all services and leave them running (MODEL=name=path, ENGINE=simulated)
	@exec $(BIN)/nightshift up --engine simulated $(ARGS)
else
up: setup-run
	@model='$(MODEL)'; \
	if [ -z "$$model" ]; then \
		folder=$$($(BIN)/python -m services.executor.small_model) || exit 1; \
		folder=$$(printf '%s\n' "$$folder" | tail -n 1); \
		model="smollm2-135m-instruct=$$folder"; \
	fi; \
	exec $(BIN)/nightshift up --model "$$model" $(ARGS)
endif

# --- checks --------------------------------------------------------------------------------------

# A file's tests stay in one process, so that they share what they start. Files are begun in the
# order of tests/conftest.py, not by their number of tests: long ones have few.
BESIDE := -n 4 --dist loadfile --no-loadscope-reorder
# One for each folder: chaos waits most of its time, and an engine wants a core and a half.
TWO_LANES := -n 2 --dist loadgroup

.PHONY: test
test: setup ## All tests, vLLM included
	@$(BIN)/python -m services.executor.small_model >/dev/null
	@$(BIN)/python -m pytest --ignore=tests/chaos --ignore=tests/e2e $(BESIDE) $(ARGS)
	@# After them: faults beside work that goes on, and one engine at a time.
	@$(BIN)/python -m pytest tests/chaos tests/e2e $(TWO_LANES) $(ARGS)

.PHONY: test-fast
test-fast: setup-fast ## The quick tests: no vLLM, no kills, no long waits
	@$(BIN)/python -m pytest --ignore=tests/e2e -m 'not e2e and not slow' $(BESIDE) $(ARGS)

MINUTES ?= 10
.PHONY: fuzz
fuzz: setup-fast ## Hold every route against its description for MINUTES=10, with made-up requests
	@$(BIN)/python -m tests.kit.fuzz --minutes '$(MINUTES)' $(ARGS)

.PHONY: chaos
chaos: setup-fast ## Kill, freeze and part processes for MINUTES=10 while batches run (SEED=… repeats)
	@$(BIN)/python -m tests.chaos --minutes '$(MINUTES)' $(if $(SEED),--seed '$(SEED)') $(ARGS)

.PHONY: lint
lint: setup-fast ## Style, types, import rules, wire, the contract's numbers, places to die at
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/buf lint
	$(BIN)/python tools/contract_numbers.py
	$(BIN)/python tools/failpoints.py

.PHONY: bench
bench: setup ## Measure; prints one table
	@$(BIN)/python -m benchmarks $(ARGS)

.PHONY: clean
clean: ## Remove generated code and caches (not .venv, models or data)
	@rm -f $(STUBS)
	@rm -rf .build .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	@find services protos tests benchmarks tools -name __pycache__ -type d -prune \
		-exec rm -rf {} + 2>/dev/null || true
