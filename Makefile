# Tuskline. `make` alone lists what there is. Everything runs from .venv, which `make venv` makes from
# Python 3.11+, pip and the package registries.
.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
# Tests start thousands of Python processes: without bytecode, each would compile the project's modules again.
unexport PYTHONDONTWRITEBYTECODE

# The first Python that is new enough; `make PYTHON=python3.13 venv` chooses another.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
  command -v $$p >/dev/null 2>&1 && $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
  && { echo $$p; break; }; done)
READY := .venv/.ready
CLASSES := .cache/spark-classes.jsa
BIN := .venv/bin
# Tests wait for servers about half of the time, so four processes keep two cores busy; each takes up to 3 GiB.
WORKERS ?= $(shell awk -v cores="$$(getconf _NPROCESSORS_ONLN)" '/^MemAvailable/ {gib = $$2 / 1048576} \
  END {n = cores * 2; if (gib > 0 && n > gib / 3) n = int(gib / 3); print (n > 1 ? n : 1)}' /proc/meminfo 2>/dev/null || echo 2)
# Tests make and remove very many files: `make test` has its folders in memory where that suffices for its servers and lakes.
TEST_TMPDIR ?= $(shell awk '/^MemAvailable/ {exit $$2 < 16 * 1048576}' /proc/meminfo 2>/dev/null \
  && [ "$$(df --output=avail /dev/shm 2>/dev/null | tail -n 1)" -gt 12582912 ] && echo /dev/shm || echo "$${TMPDIR:-/tmp}")
MINUTES ?= 10
SEED ?= 1
SECONDS ?= 45
ARGS ?=
PG_CONFIG ?= pg_config
GOAL ?= all
TESTS ?= tests
BENCH ?= capture decode snapshot

.PHONY: help
help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: venv
venv: $(READY)  ## .venv with the locked dependencies, the project itself and Spark's jars

$(READY): requirements.lock requirements-connect.lock pyproject.toml
	@PYTHON="$(PYTHON)" bash tests/support/make_venv.sh .venv
	@touch $@

# The classes of Spark's JVM, ready to be mapped: a driver in a test starts in two thirds of the time.
$(CLASSES): requirements.lock tests/support/spark_jvm.py | $(READY)
	@echo "archiving the classes of Spark's JVM for the tests, once: about a minute"
	@$(BIN)/python -m tests.support.spark_jvm $@

.PHONY: demo
demo: $(READY)  ## a real PostgreSQL, clients, the log, Spark, and the proof (SECONDS=45, ARGS=--kill)
	@$(BIN)/tuskline demo --seconds $(SECONDS) $(ARGS)

.PHONY: lint
lint: $(READY)  ## style, types, imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

.PHONY: check
check: lint  ## style, types, imports, unit tests and a short simulation (under 3 minutes)
	$(BIN)/pytest -n $(WORKERS) --dist loadfile -m 'not long and not exhaustive' tests/test_tidy.py tests/unit tests/simulation

.PHONY: test
test: $(READY) $(CLASSES)  ## every test but the long ones, on real servers (TESTS=tests/unit narrows it)
	TMPDIR=$(TEST_TMPDIR) $(BIN)/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations=15 -m 'not long' $(TESTS) $(ARGS)

.PHONY: test-all
test-all: $(READY) $(CLASSES)  ## every test on every major that can be had; stopped and started again, it goes on (SEED=1)
	TUSKLINE_POSTGRES=$${TUSKLINE_POSTGRES:-$$(bash tests/support/other_majors.sh)} \
	  TUSKLINE_PG_CONFIG=$${TUSKLINE_PG_CONFIG:-$$(bash tests/support/server_headers.sh)} \
	  $(BIN)/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations=15 --delta --resume .cache/test-all --seed $(SEED) $(TESTS) $(ARGS)

.PHONY: extension
extension:  ## the extension for PG_CONFIG=pg_config, below build/extension (GOAL=install installs it)
	@folder="build/extension/$$($(PG_CONFIG) --version | awk '{print $$2}')"; mkdir -p "$$folder"; \
	  $(MAKE) -C "$$folder" -f "$(CURDIR)/extension/Makefile" PG_CONFIG="$(PG_CONFIG)" $(GOAL)

.PHONY: soak
soak: $(READY)  ## the demo with three safekeepers and seeded kills (MINUTES=10 SEED=1)
	$(BIN)/tuskline demo --seconds $$(( $(MINUTES) * 60 )) --kill --safekeepers 3 --seed $(SEED) --json $(ARGS)

.PHONY: bench
bench: $(READY)  ## figures against real peers: capture, decode, snapshot (BENCH=decode ARGS="--scale 0.1")
	@for name in $(BENCH); do $(BIN)/python -m benchmarks $$name --json $(ARGS); done

.PHONY: fmt
fmt: $(READY)  ## format, and mend what a tool can mend
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

.PHONY: lock
lock:  ## resolve the dependencies again into requirements.lock
	$(BIN)/uv pip compile pyproject.toml --all-extras --group dev --universal --python-version 3.11 \
	  --generate-hashes --no-emit-index-url --no-header --no-annotate --upgrade --quiet -o requirements.lock
	sed -n 's/^pyspark==\([^ ]*\).*/pyspark[connect]==\1/p' requirements.lock | $(BIN)/uv pip compile - -c requirements.lock --universal \
	  --python-version 3.11 --generate-hashes --no-emit-index-url --no-header --no-annotate --quiet -o requirements-connect.lock \
	  $(foreach name,numpy py4j pyarrow pyspark zstandard,--no-emit-package $(name))

.PHONY: clean
clean:  ## remove what was built and every cache here, but not .venv
	rm -rf build dist .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache spark-warehouse
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +
