# On a machine with Python 3.11+ and make:
#
#   make run     set up, solve the example through the service, train by the schedule (ARGS=--once: then end)
#   make test    set up, run every test that pip alone can provide for (PYTEST_ARGS=... is passed on)
#   make lint types contracts     what .ci/run checks besides
#   make docs                     the documentation as HTML, in build/docs
#   make constraints              renew the pins
#   make bench                    the benchmark set against its peers: hours, resumable
#   make bench-smoke              five small problems of it, a minute
#   make frontier                 how small a bubble a memory limit allows, drawn (ARGS=... is passed on)
#
# Each command installs only what it needs into .venv, once; a changed pyproject.toml or
# constraints.txt installs again.

PYTHON ?= python3
BIN := .venv/bin
# Test files that run at the same time.
JOBS ?= 2

EXTRAS_run := server,runtime
EXTRAS_test := $(EXTRAS_run),postgres,plot,ray,dev
EXTRAS_ci := $(EXTRAS_test),docs,ci

.PHONY: help run test lint format types contracts docs setup-ci constraints clean
.PHONY: bench bench-smoke frontier
.DELETE_ON_ERROR:

help:
	@sed -n 's/^#   //p' Makefile

run: .venv/.installed-run
	$(BIN)/python examples/quickstart.py $(ARGS)

# Kernels are compiled before any test's clock runs: minutes, once for each change of them.
test: .venv/.installed-test
	$(BIN)/python -c 'import optpipe_solver; optpipe_solver.warm_up()'
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

lint: .venv/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: .venv/.installed-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: .venv/.installed-test
	$(BIN)/mypy

contracts: .venv/.installed-test
	$(BIN)/lint-imports --no-logo

docs: .venv/.installed-ci
	$(BIN)/python -m sphinx --fail-on-warning --keep-going -q -b html docs build/docs

bench: .venv/.installed-test
	$(BIN)/python -m benchmarks.bench $(ARGS)
	$(BIN)/python -m benchmarks.report

bench-smoke: .venv/.installed-test
	$(BIN)/python -m benchmarks.bench --smoke

frontier: .venv/.installed-test
	$(BIN)/python -m benchmarks.frontier $(ARGS)

setup-ci: .venv/.installed-ci

# The pins keep the machines of two people, CI and the image alike. torch stands among them: an
# open range would take the newest build, with several GB of CUDA packages.
.venv/.installed-%: pyproject.toml constraints.txt | $(BIN)/python
	@echo "optpipe: installing '.[$(EXTRAS_$*)]' into .venv (minutes the first time)"
	$(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt --editable '.[$(EXTRAS_$*)]'
	$(BIN)/python -c 'import optpipe_solver; optpipe_solver.warm_up()'
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "OptPipe needs Python 3.11 or newer, but this is " + sys.version.split()[0] + ": say which to use, e.g. make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv

# A complete install without pins, written down. torch by version, and without the +cpu that a CPU
# build adds, which only some indexes have.
constraints:
	rm -rf .venv-constraints
	$(PYTHON) -m venv .venv-constraints
	.venv-constraints/bin/python -m pip install -qq torch==2.13.0
	.venv-constraints/bin/python -m pip install -qq '.[$(EXTRAS_ci)]'
	{ sed -n '/^#/p' constraints.txt; echo torch==2.13.0; \
	  .venv-constraints/bin/python -m pip freeze --exclude optpipe --exclude torch; } > constraints.new
	mv constraints.new constraints.txt
	rm -rf .venv-constraints

clean:
	rm -rf .venv .venv-constraints build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
