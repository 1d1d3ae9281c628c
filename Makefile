# Each target sets up what it needs: a virtual environment that is refreshed when pyproject.toml or
# constraints.txt changed.  Nothing outside this folder is written.
#
#   make demo    makes a graph, refreshes it and shows the result
#   make test    runs every test
#   make check   linters, type checkers, direction of imports, size of modules
#   make bench   measures against the peers and writes bench-results/
#
# Variables: PYTHON=python3.12 (3.11 or newer), PYTEST_ARGS="-k volume", BENCH_ARGS=...

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PEERS := .venv-peers
PIP_FLAGS := --quiet --disable-pip-version-check --constraint constraints.txt
PYTEST_ARGS ?=
BENCH_ARGS ?=
INPUTS := pyproject.toml constraints.txt Makefile

# common/jit.py makes a folder per state of the kernel sources in here.
export NUMBA_CACHE_DIR := $(CURDIR)/.numba_cache

.PHONY: help demo test check format bench clean

help:
	@sed -n 's/^#   //p' Makefile

$(VENV)/pyvenv.cfg:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "hyades: $(PYTHON) is older than 3.11: run make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV) || { \
	  echo "hyades: no virtual environment: run deploy/scripts/install-debian.sh test" >&2; exit 1; }

$(VENV)/.stamp-base: $(VENV)/pyvenv.cfg $(INPUTS)
	$(BIN)/python -m pip install $(PIP_FLAGS) --editable .
	@touch $@

$(VENV)/.stamp-dev: $(VENV)/pyvenv.cfg $(INPUTS)
	$(BIN)/python -m pip install $(PIP_FLAGS) --editable '.[test,check,ptx,bench]'
	@touch $@ $(VENV)/.stamp-base

$(VENV)/.stamp-bench: $(VENV)/pyvenv.cfg $(INPUTS)
	$(BIN)/python -m pip install $(PIP_FLAGS) --editable '.[bench]'
	@touch $@ $(VENV)/.stamp-base

demo: $(VENV)/.stamp-base
	$(BIN)/hyades demo

test: $(VENV)/.stamp-dev
	$(BIN)/python -m pytest $(PYTEST_ARGS)

check: $(VENV)/.stamp-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports
	$(BIN)/mypy
	$(BIN)/pyright
	deploy/scripts/check-module-size.sh 400

format: $(VENV)/.stamp-dev
	$(BIN)/ruff check --fix-only
	$(BIN)/ruff format

bench: $(VENV)/.stamp-bench
	$(BIN)/hyades bench $(or $(BENCH_ARGS),all)

clean:
	rm -rf $(VENV) $(PEERS) .vm .numba_cache .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
