# The developer's interface. Every target sets itself up: it makes .venv from requirements.lock when that changed, and
# installs the project into it when pyproject.toml changed.
#
#   make demo PYTHON=python3.12     use another interpreter (3.11 or newer)
#   make test ARGS="-k scheduler"   pass more arguments to pytest

PYTHON ?= python3
UV ?= uv
ARGS ?=
# The tests that `test` runs, by their marks; one in so many of the examples and seeds that they draw; options of XLA.
MARKS ?= not long and not slow
DRAW ?= 1
COMPILER ?=

VENV := .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.project

# Tests that start no processes of the runtime share the cores, so they may take longer; the others run one after the other.
WORKERS := 2
PURE = env PATHWAYS_TESTS_DRAW=$(DRAW) $(if $(COMPILER),XLA_FLAGS="$(COMPILER) $$XLA_FLAGS") $(PY) -m pytest -q -m "$(MARKS)" -o timeout=280 --numprocesses $(WORKERS) --dist worksteal tests/unit tests/simulation $(ARGS)
CLUSTER = env PATHWAYS_TESTS_DRAW=$(DRAW) $(PY) -m pytest -q -m "$(MARKS)" tests/integration tests/deploy $(ARGS)
# What pytest returns when ARGS leave no test of one kind.
NONE := 5

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo lint check test test-all test-pure test-cluster test-long test-gpu bench-smoke peers lock clean

# The environment is the lock file's and nothing else's.
unexport PYTHONHOME PYTHONPATH PIP_USER PIP_TARGET PIP_PREFIX PIP_REQUIRE_VIRTUALENV
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export RAY_USAGE_STATS_ENABLED ?= 0

help:  ## list the targets
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1|\2/p' $(firstword $(MAKEFILE_LIST)) | awk -F'|' '{ printf "%-20s %s\n", $$1, $$2 }'

demo: $(READY)  ## start a small cluster on this machine and run a program on it
	@$(VENV)/bin/pathways demo

lint: $(READY)  ## format, lint and types
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy

# What tests without clusters compile runs once or twice: without XLA's optimisations, and with its older emitters,
# that takes half the time. CI compiles as users do, and draws all.
QUICK := --xla_cpu_use_fusion_emitters=false --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true
check test: DRAW = 5
check test: COMPILER = $(QUICK)

check: lint  ## lint, then those of `test` that need no cluster (about five minutes)
	$(PURE)

# Tests with clusters wait for much of their time. The others fill the gaps: with a lower priority, so
# that they delay nothing whose time is measured. Their output comes when they are through.
test: $(READY)  ## all tests but those marked slow or long, with a fifth of what they draw, compiled quickly
	@$(MAKE) --no-print-directory --jobs=2 --keep-going MARKS="$(MARKS)" DRAW=$(DRAW) COMPILER="$(COMPILER)" test-pure test-cluster

test-all: $(READY)  ## those marked slow as well, with all that they draw, as CI does
	@$(MAKE) --no-print-directory test MARKS="not long" DRAW=1 COMPILER=

test-pure: WORKERS := 2
test-pure: $(READY)
	@nice -n 10 $(PURE) >$(VENV)/test-pure.log 2>&1; status=$$?; cat $(VENV)/test-pure.log; \
	[ $$status -eq 0 ] || [ $$status -eq $(NONE) ]

test-cluster: $(READY)
	$(CLUSTER) || [ $$? -eq $(NONE) ]

test-long: $(READY)  ## the tests marked long
	$(PY) -m pytest -q -m long -o faulthandler_timeout=7200 $(ARGS)

test-gpu: $(READY)  ## tests on a GPU of this machine, with 'jax[cuda13]' beside the lock file (a minute)
	$(PY) -m pytest -q tests/gpu $(ARGS)

bench-smoke: $(READY)  ## every benchmark at its smallest size: that they run, not how fast
	$(PY) -m benchmarks --smoke

peers:  ## the environments of the systems that benchmarks compare with, about 4 GiB (make peers ARGS="tf1 dask": these)
	@$(PYTHON) -m benchmarks.peers.environments $(ARGS)

lock:  ## bring requirements.lock in line with pyproject.toml (needs uv)
	$(UV) pip compile pyproject.toml --extra dev --universal --python-version 3.11 --custom-compile-command "make lock" \
		--quiet --output-file requirements.lock

clean:  ## remove the environment, caches and outputs
	rm -rf $(VENV) .peers .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist results
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Two steps, each with a stamp written last: a step that was interrupted is done again.
$(VENV)/.locked: requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed, and \
	$(PYTHON) is %d.%d: make PYTHON=python3.12 ..." % sys.version_info[:2])'
	@echo "Making $(VENV) (once, about a minute) ..."
	@$(PYTHON) -m venv --clear $(VENV)
	@$(PY) -m pip install --quiet --no-input --no-deps --requirement requirements.lock
	@touch $@

$(READY): $(VENV)/.locked pyproject.toml
	@$(PY) -m pip install --quiet --no-input --no-deps --no-build-isolation --editable .
	@touch $@
