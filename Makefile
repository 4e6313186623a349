# Every target makes the environment it needs, quietly; a second run does no work. `make help` lists them.

PYTHON ?= python3
TORCH  ?= torch==2.13.0
# Test processes; each computes with one thread, so results do not depend on the number of cores.
JOBS   ?= 2
SEED   ?= 0
ARGS   ?=

VENV      := .venv
BIN       := $(VENV)/bin
LOCK      := requirements/lock.txt
# What a run on the built-in model uses.
EXTRAS    := cpu,gguf
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
OFFLINE   := HF_HUB_OFFLINE=1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help quickstart install test test-all test-peers test-trl test-verl bench performance docs lint format clean

help:  ## show this list
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# --- environments -----------------------------------------------------------------------------------------
# $(call venv,folder): a virtual environment from $(PYTHON), refused clearly where Python is too old.
define venv
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "tepo needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>/dev/null || echo not there)."; \
	  echo "Name another one: make $(or $(MAKECMDGOALS),quickstart) PYTHON=/path/to/python3.11"; exit 1; }
	@test -x $(1)/bin/python || { echo "creating $(1)"; $(PYTHON) -m venv $(1); }
endef

# $(call pip,folder,arguments): a quiet pip, whose whole log is shown when it fails.
pip = $(1)/bin/python -m pip install --disable-pip-version-check $(2) >> $(1)/pip.log 2>&1 || { \
	  cat $(1)/pip.log; echo "installation failed; the log is also in $(1)/pip.log"; exit 1; }

# torch goes first, so that the build chosen for this machine is kept by everything that follows.
$(VENV)/.stamp-run: $(LOCK) pyproject.toml
	$(call venv,$(VENV))
	@echo "installing tepo and what it runs on into $(VENV)"; : > $(VENV)/pip.log
	@$(call pip,$(VENV),'$(TORCH)')
	@$(call pip,$(VENV),-c $(LOCK) -e '.[$(EXTRAS)]')
	@touch $@

$(VENV)/.stamp-dev: $(VENV)/.stamp-run
	@echo "installing the test tools into $(VENV)"
	@$(call pip,$(VENV),-c $(LOCK) -e '.[dev]')
	@touch $@

.venv-%/.stamp: requirements/%.txt pyproject.toml
	$(call venv,.venv-$*)
	@echo "installing the $* environment into .venv-$*"; : > .venv-$*/pip.log
	@$(call pip,.venv-$*,'$(TORCH)')
	@$(call pip,.venv-$*,-r requirements/$*.txt)
	@$(call pip,.venv-$*,--no-deps -e .)
	@touch $@

install: $(VENV)/.stamp-run  ## make .venv with tepo in it

# --- what people type -------------------------------------------------------------------------------------
quickstart: $(VENV)/.stamp-run  ## train a real small model with TEPO on this machine; SEED=1 for another seed
	@run=runs/quickstart-seed$(SEED); if [ -e $$run/config.toml ]; then \
	  echo "$$run exists: continuing it, or showing its result; for a new run remove it or choose a SEED"; \
	  $(BIN)/tepo train --resume $$run; \
	else \
	  $(BIN)/tepo train examples/quickstart.toml --name quickstart-seed$(SEED) train.seed=$(SEED) $(ARGS); \
	fi

test: $(VENV)/.stamp-dev  ## the fast test suite; ARGS='-k name' to choose
	@$(ONE_THREAD) $(OFFLINE) $(BIN)/python -m pytest -q -n $(JOBS) -m "not slow and not peer" $(ARGS)

test-all: $(VENV)/.stamp-dev  ## every test: fast, slow, and against TRL and verl
	@$(ONE_THREAD) $(OFFLINE) $(BIN)/python -m pytest -q -n $(JOBS) -m "not peer" $(ARGS)
	@$(MAKE) --no-print-directory test-peers

test-peers: test-trl test-verl  ## our objectives against TRL's and verl's own functions

test-trl test-verl: test-%: .venv-%/.stamp
	@$(ONE_THREAD) $(OFFLINE) TEPO_PEER=$* .venv-$*/bin/python -m pytest -q -p no:cacheprovider -m peer tests/peers/test_$*.py tests/peers/test_$*_*.py

# Both sides of every comparison run in one environment, TRL's; verl's functions in their own.
.venv-trl/.stamp-bench: .venv-trl/.stamp requirements/bench.txt
	@$(call pip,.venv-trl,--no-deps -r requirements/bench.txt)
	@touch $@

bench: .venv-trl/.stamp-bench .venv-verl/.stamp  ## speed and memory beside the peers'; BENCH=step for one, ARGS='--pairs 3'
	@for name in $(or $(BENCH),cli objectives scoring update sampling step scaling); do \
	  echo "== $$name"; .venv-trl/bin/python benchmarks/bench_$$name.py $(ARGS) || exit 1; done

performance: .venv-trl/.stamp  ## put the results of `make bench` into docs/performance.md
	@.venv-trl/bin/python benchmarks/write_performance.py benchmarks/results/*.json

docs: $(VENV)/.stamp-run  ## write docs/objectives.md anew from the catalogue
	@$(BIN)/tepo objectives --markdown > docs/.objectives.md && mv docs/.objectives.md docs/objectives.md

lint: $(VENV)/.stamp-dev  ## style and types
	@$(BIN)/ruff check src tests examples benchmarks
	@$(BIN)/ruff format --check src tests examples benchmarks
	@$(BIN)/mypy

format: $(VENV)/.stamp-dev  ## rewrite the sources in the project's style
	@$(BIN)/ruff check --fix src tests examples benchmarks
	@$(BIN)/ruff format src tests examples benchmarks

clean:  ## remove the environments and caches; runs/ stays
	rm -rf .venv .venv-trl .venv-verl .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist src/tepo.egg-info
	find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
