# On a machine with Python 3.11+ and make:
#
#   make run     set up, solve the example through the service, train by the schedule (ARGS=--once: then end)
#   make test    set up, run the tests that pip alone can provide for (PYTEST_ARGS=... is passed on)
#   make test-long                those and the long ones, with a thousand random examples: hours
#   make test PYTHON=python3.13   the tests with another Python, in an environment of its own
#   make test-torch TORCH=2.15.0  the runtime's tests with another torch, in an environment of its own
#   make lint types contracts     what .ci/run checks besides
#   make screenshots              every state of the page, as pictures in build/screenshots
#   make kernels                  compile what the solver is made of, as the commands above do first
#   make docs                     the documentation as HTML, in build/docs
#   make client                   the client for plain code, anew from the one for async code
#   make constraints              renew the pins
#   make bench                    the benchmark set against its peers: hours, resumable
#   make bench-smoke              five small problems of it, a minute
#   make frontier                 how small a bubble a memory limit allows, drawn (ARGS=... is passed on)
#
# Each command installs only what it needs into .venv, once; a changed pyproject.toml or
# constraints.txt installs again.

PYTHON ?= python3
# PYTHON=python3.13 on the command line gets an environment of its own, .venv-python3.13.
VENV := .venv$(if $(findstring command,$(origin PYTHON)),-$(notdir $(PYTHON)))
BIN := $(VENV)/bin
# What `make frontier` draws: a problem, and shares of its memory.
FRONTIER ?= benchmarks/instances/6.2b-p4-m8-8.0a.json
MEMORY ?= 1,0.875,0.75,0.625,0.5,0.4375,0.375,0.3125,0.25,0.1875,0.125
# Test files that run at the same time.
JOBS ?= 2

EXTRAS_run := server,runtime
EXTRAS_test := $(EXTRAS_run),trainers,postgres,plot,ray,otel,dev
EXTRAS_ci := $(EXTRAS_test),docs,ci
EXTRAS_solver := solver
# What is installed already, if it is more, will do.
TEST_INSTALL := $(firstword $(wildcard $(VENV)/.installed-ci) $(VENV)/.installed-test)
RUN_INSTALL := $(firstword $(wildcard $(VENV)/.installed-ci $(VENV)/.installed-test) $(VENV)/.installed-run)

# Kernels are compiled before any clock runs, once for each change of them.
WARM_UP = $(BIN)/python -c 'import optpipe_solver; optpipe_solver.warm_up()'
# Files side by side, the longest first; the time of each test is kept in build/tests.
PYTEST = $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --durations 10

# Bytecode is written where it is first imported, not at the install: half of the install's time.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help run test test-long test-torch screenshots kernels lint format types contracts client docs setup-ci constraints clean
.PHONY: bench bench-smoke frontier
.DELETE_ON_ERROR:

help:
	@sed -n 's/^#   //p' Makefile

run: $(RUN_INSTALL)
	$(WARM_UP)
	$(BIN)/python examples/quickstart.py $(ARGS)

test: $(TEST_INSTALL)
	$(WARM_UP)
	$(PYTEST) --junit-xml build/tests/test.xml $(PYTEST_ARGS)

screenshots: $(TEST_INSTALL)
	$(WARM_UP)
	OPTPIPE_SCREENSHOTS=build/screenshots $(BIN)/python -m pytest -q -m browser tests/browser/test_states.py

kernels: $(TEST_INSTALL)
	$(WARM_UP)

# With those of PostgreSQL too, where OPTPIPE_TEST_POSTGRES_URL names a server; .ci/run has the
# browser's. What fails in a random example is tried again first, from .hypothesis/examples.
# Kernels are compiled so that a place outside its array is an error (optpipe_solver/jit.py).
test-long: export NUMBA_BOUNDSCHECK := 1
test-long: export NUMBA_CACHE_DIR := $(CURDIR)/build/checked-kernels
test-long: $(TEST_INSTALL)
	$(WARM_UP)
	HYPOTHESIS_PROFILE=long $(PYTEST) --timeout 3600 --junit-xml build/tests/test-long.xml \
	  -m 'not browser$(if $(OPTPIPE_TEST_POSTGRES_URL),, and not postgres)' $(PYTEST_ARGS)

# Builds newer than the pinned one are for CUDA, about 5 GB; they run on the CPU too. What torch pins
# itself (triton) is left to it.
TORCH_BIN = .venv-torch-$(TORCH)/bin
test-torch: .venv-torch-$(TORCH)/.installed
	$(TORCH_BIN)/python -c 'import optpipe_solver; optpipe_solver.warm_up()'
	$(TORCH_BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder tests/runtime $(PYTEST_ARGS)

.venv-torch-%/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-torch-$*
	sed -e '/^torch==/d' -e '/^triton==/d' constraints.txt > .venv-torch-$*/constraints.txt
	PIP_CONSTRAINT=/dev/null .venv-torch-$*/bin/python -m pip install -qq --no-compile \
	  --constraint .venv-torch-$*/constraints.txt --editable '.[$(EXTRAS_run),trainers,dev]' torch==$*
	@touch $@

lint: $(TEST_INSTALL)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(TEST_INSTALL)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(TEST_INSTALL)
	$(BIN)/mypy

contracts: $(TEST_INSTALL)
	$(BIN)/lint-imports --no-logo

# optpipe/client/client.py from async_client.py, after a change of the latter.
client: $(VENV)/.installed-test
	$(BIN)/python -m tests.test_client_twin

docs: $(VENV)/.installed-ci
	$(BIN)/python -m sphinx --fail-on-warning --keep-going -q -b html docs build/docs

bench: $(TEST_INSTALL)
	$(WARM_UP)
	$(BIN)/python -m benchmarks.bench $(ARGS)
	$(BIN)/python -m benchmarks.ledger

bench-smoke: $(TEST_INSTALL)
	$(WARM_UP)
	$(BIN)/python -m benchmarks.bench --smoke

frontier: $(TEST_INSTALL)
	$(WARM_UP)
	mkdir -p build
	$(BIN)/optpipe sweep $(FRONTIER) --axis memory_scale=$(MEMORY) \
	  -o build/frontier.csv --frontier build/frontier.svg $(ARGS)

setup-ci: $(VENV)/.installed-ci

# The pins keep the machines of two people, CI and the image alike. torch stands among them: an
# open range would take the newest build, with several GB of CUDA packages.
$(VENV)/.installed-%: pyproject.toml constraints.txt | $(BIN)/python
	@echo "optpipe: installing '.[$(EXTRAS_$*)]' into $(VENV) (minutes the first time)"
	$(BIN)/python -m pip install -qq --no-compile --disable-pip-version-check --constraint constraints.txt --editable '.[$(EXTRAS_$*)]'
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "OptPipe needs Python 3.11 or newer, but this is " + sys.version.split()[0] + ": say which to use, e.g. make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)

# A complete install without pins, written down. torch by version, and without the +cpu that a CPU
# build adds, which only some indexes have.
constraints:
	rm -rf .venv-constraints
	$(PYTHON) -m venv .venv-constraints
	.venv-constraints/bin/python -m pip install -qq torch==2.13.0 triton==3.7.1
	.venv-constraints/bin/python -m pip install -qq '.[$(EXTRAS_ci)]'
	{ sed -n '/^#/p' constraints.txt; echo torch==2.13.0; \
	  .venv-constraints/bin/python -m pip freeze --exclude optpipe --exclude torch; } > constraints.new
	mv constraints.new constraints.txt
	rm -rf .venv-constraints

clean:
	rm -rf .venv .venv-* build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
