SHELL       := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON   ?= python3
VENV     ?= .venv
WORKERS  ?= 2#      test processes; 0 runs the tests in one, as a debugger needs
ARGS     ?=#        passed on to pytest, the demo or the benchmark
PIP_ARGS ?=#        passed on to pip: another index, --no-index, ...

BIN   := $(VENV)/bin
PIP   := $(BIN)/python -m pip --disable-pip-version-check --quiet
READY := $(VENV)/.ready

BENCH_VENV  := .venv-bench
BENCH_READY := $(BENCH_VENV)/.ready
BENCH_PIP   := $(BENCH_VENV)/bin/python -m pip --disable-pip-version-check --quiet

.PHONY: help setup demo test lint fmt bench clean

help: ## show this list
	@sed -nE 's/^([a-z]+):.*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

setup: $(READY) ## create or refresh the virtual environment

# The stamp is written last, so an interrupted install is repeated, not trusted.
$(READY): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install $(PIP_ARGS) --upgrade 'pip>=25.1' # --group is younger than many machines' pip
	$(PIP) install $(PIP_ARGS) --constraint constraints.txt --group dev --editable '.[all]'
	@touch $@

demo: $(READY) ## train a tiny model and ship its checkpoints to an S3 server on this machine
	$(BIN)/python examples/quickstart/demo.py $(ARGS)

test: $(READY) ## run the tests: make test ARGS='-k commit' WORKERS=0
	$(BIN)/python -m pytest -n $(WORKERS) $(ARGS)

lint: $(READY) ## ruff, mypy --strict, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

fmt: $(READY) ## let ruff repair what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(BENCH_READY) ## measure ours and the rivals: see benchmarks/
	$(BENCH_VENV)/bin/python -m benchmarks.run $(ARGS)

# One of the rivals pins an older boto3 than ours is tested with: all of them get their own place.
$(BENCH_READY): pyproject.toml constraints.txt benchmarks/constraints.txt
	@test -x $(BENCH_VENV)/bin/python || $(PYTHON) -m venv $(BENCH_VENV)
	$(BENCH_PIP) install $(PIP_ARGS) --upgrade 'pip>=25.1'
	grep -vE '^(awscrt|boto3|botocore)==' constraints.txt > $(BENCH_VENV)/constraints.txt
	$(BENCH_PIP) install $(PIP_ARGS) --constraint $(BENCH_VENV)/constraints.txt \
	  --constraint benchmarks/constraints.txt --group bench --editable '.[dcp,lightning,plots]'
	@touch $@

clean: ## remove caches and build output; the virtual environment stays
	rm -rf build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +
