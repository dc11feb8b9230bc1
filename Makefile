# The verbs of this repository, the same here and in CI: serve, test, test-long, vllm, chaos, soak,
# lint, check, bench, docs, clean. `make serve` and `make test` install what they need into .venv first;
# stamp files there make that instant while pyproject.toml, constraints.txt, native/ and the names of
# the Python files stay as they are.
#
#   make serve PORT=8000 HOST=127.0.0.1 MODEL=/path/to/model ARGS="--log-level=debug"
#   make serve PYTHON=python3.12      the interpreter .venv is created from
#   make serve PDSERVE_PURE=1         no compiler: the pure-Python twins
#   make test PYTEST="-k hashing -x"  arguments for pytest
#   make chaos SECONDS=600 ARGS="--engine torch"  faults under load, an hour unless told otherwise
#   make vllm                         an environment with vLLM for CPUs (3.5 GB): `make test` then runs
#                                     its tests, too
#   make gptq                         gptqmodel (1.5 GB), and tests with checkpoints that it writes
#   make soak                         memory over a million requests: an hour and more
#   make lint check PATHS=pdserve/kv  some files only

SHELL  := /bin/bash
PYTHON ?= python3
VENV   ?= .venv
PATHS  ?=
PYTEST ?=
SUITE  ?=
SECONDS ?= 3600
REPORT ?= bench/results/chaos_hour.md

BIN := $(abspath $(VENV))/bin
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check
SAY := printf '==> %s\n'
# An editable install remembers which files there were: it is made anew when that changes.
LISTED := $(VENV)/.files-$(shell find pdserve engines -name '*.py' | LC_ALL=C sort | cksum | cut -d' ' -f1)
BUILT := $(VENV)/.built$(if $(PDSERVE_PURE),-pure)
SERVE_FLAGS := $(if $(HOST),--host $(HOST)) $(if $(PORT),--port $(PORT)) $(if $(MODEL),--model $(MODEL))

# The slice of the long suites that a run takes follows the commit, so that a failure can be repeated
# from its commit alone. Most long tests have one chance in ten; `make test-long` runs all of them.
export PDSERVE_TEST_SEED ?= $(or $(shell git rev-parse --short=8 HEAD 2>/dev/null),0)

# Tests start some thousand processes; each would compile every module anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help serve test checks test-here test-long vllm test-vllm gptq chaos soak lint check rewritten format bench docs clean
.DEFAULT_GOAL := help

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

# ------------------------------------------------------------------------- what people run

serve: $(VENV)/.deps-serve $(BUILT)
	@exec $(BIN)/pdserve $(SERVE_FLAGS) $(ARGS)

# WAIT_FOR=PID: tests begin when that process has ended, such as one that installs what they need. They
# do not wait for ever: those that miss something say what.
test: checks
	@$(if $(WAIT_FOR),timeout --foreground 1800 tail --pid=$(WAIT_FOR) -f /dev/null || \
	  $(SAY) "process $(WAIT_FOR) has not ended within half an hour: the tests begin")
	@if [ -e .venv-vllm ] || [ -n "$(PDSERVE_REQUIRE_VLLM)" ]; then \
	  $(MAKE) --no-print-directory test-here SUITE=all; \
	else $(MAKE) --no-print-directory test-here && \
	  $(SAY) "tests with vLLM are left out: make vllm makes their environment"; fi

# mypy takes the core that the rewriting leaves idle.
checks: $(VENV)/.deps-dev $(BUILT)
	@$(MAKE) --no-print-directory -j2 lint docs rewritten check

# SUITE=all: with the tests of vLLM beside the others.
test-here: $(VENV)/.deps-dev $(BUILT)
	@$(SAY) "pytest, seed $(PDSERVE_TEST_SEED)"
	@PYTHON=$(PYTHON) $(BIN)/python .ci/pytest.py $(SUITE) -q \
	  --hypothesis-seed=$(PDSERVE_TEST_SEED) $(PYTEST)

vllm:
	@PYTHON=$(PYTHON) bash .ci/vllm.sh

test-vllm: vllm
	@$(SAY) "pytest with vLLM, seed $(PDSERVE_TEST_SEED)"
	@.venv-vllm/bin/python .ci/pytest.py vllm -q \
	  --hypothesis-seed=$(PDSERVE_TEST_SEED) $(PYTEST)

gptq: $(VENV)/.deps-dev $(BUILT)
	@python=$$(PYTHON=$(PYTHON) bash .ci/gptq.sh) && $(SAY) "pytest with gptqmodel" && \
	  PDSERVE_GPTQ_PYTHON=$$python $(BIN)/python -m pytest -q -n 0 \
	  tests/engines/torch/model_loader/weight_formats/test_gptq.py $(PYTEST)

test-long: $(VENV)/.deps-dev $(BUILT)
	@$(SAY) "pytest, every long suite, seed $(PDSERVE_TEST_SEED)"
	@PDSERVE_TEST_LONG=1 $(BIN)/python -m pytest -q --hypothesis-seed=$(PDSERVE_TEST_SEED) $(PYTEST)

chaos: $(VENV)/.deps-dev $(BUILT)
	@$(SAY) "a storm of $(SECONDS) s, seed $(PDSERVE_TEST_SEED)"
	@$(BIN)/python -m tests.chaos.storm --seconds $(SECONDS) --seed $(PDSERVE_TEST_SEED) \
	  --report $(REPORT) $(ARGS)

soak: $(VENV)/.deps-dev $(BUILT)
	@for scene in requests members streams handoffs; do $(SAY) "$$scene"; \
	  $(BIN)/python bench/soak.py $$scene $(ARGS) || exit 1; done

lint: $(VENV)/.deps-dev
	@$(SAY) "ruff"
	@$(BIN)/ruff format --check --quiet $(or $(PATHS),.) || \
	  { $(BIN)/ruff format --check $(or $(PATHS),.); exit 1; }
	@$(BIN)/ruff check --quiet $(or $(PATHS),.)

check: $(VENV)/.deps-dev $(BUILT)
	@$(SAY) "mypy"
	@$(BIN)/mypy --no-error-summary $(PATHS)
	@$(SAY) "import-linter"
	@$(BIN)/lint-imports --no-cache > $(VENV)/imports.log || { cat $(VENV)/imports.log; exit 1; }

format: $(VENV)/.deps-dev
	@$(BIN)/ruff format $(or $(PATHS),.)
	@$(BIN)/ruff check --fix $(or $(PATHS),.)

bench: $(VENV)/.deps-dev $(BUILT)
	@for script in bench/micro/*.py; do $(SAY) "$$script"; $(BIN)/python $$script || exit 1; done

# pytest rewrites each test file's asserts at its first import. Done here, beside mypy, it is done once
# and not by each of the processes that run tests. What goes wrong here shows itself there.
rewritten: $(VENV)/.deps-dev $(BUILT)
	@$(BIN)/python -m pytest --collect-only -q -p no:cacheprovider >/dev/null 2>&1 || true

docs: $(VENV)/.deps-serve $(BUILT)
	@$(SAY) "links and flags in the documents"
	@$(BIN)/python .ci/docs.py

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find pdserve engines tests bench -name __pycache__ -type d -prune -exec rm -rf {} +

# ------------------------------------------------------------------------- the environment

$(VENV)/.created:
	@command -v $(PYTHON) >/dev/null || \
	  { echo "no $(PYTHON) here: pass an interpreter, make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) .ci/interpreter.py
	@$(SAY) "creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

# The build tools live in .venv and not in pip's throw-away environment: constraints.txt holds for
# them too, and a rebuild needs no network. cmake comes along only where the system has none; where
# it cannot be had either, the build below falls back to the pure twins.
$(VENV)/.tools: $(VENV)/.created constraints.txt
	@$(SAY) "installing the build tools"
	@$(PIP) install -c constraints.txt scikit-build-core nanobind
	@[ -n "$(PDSERVE_PURE)" ] || command -v cmake >/dev/null || \
	  $(PIP) install -c constraints.txt cmake ninja || true
	@touch $@

$(VENV)/.deps-serve: $(VENV)/.tools pyproject.toml constraints.txt
	@$(SAY) "installing dependencies and torch (a large download the first time)"
	@$(PIP) install -c constraints.txt $$($(BIN)/python .ci/requirements.py torch)
	@touch $@

# Byte code comes with the first import: most of these files are never imported.
$(VENV)/.deps-dev: $(VENV)/.deps-serve pyproject.toml constraints.txt
	@$(SAY) "installing the development tools"
	@$(PIP) install --no-compile -c constraints.txt $$($(BIN)/python .ci/requirements.py dev)
	@$(BIN)/python -c 'import importlib.util as u, sys; sys.exit(not u.find_spec("triton"))' || \
	  $(PIP) install --no-compile -c constraints.txt $$($(BIN)/python .ci/requirements.py triton)
	@touch $@

# A compiler that fails makes the back end fall back to the pure twins (pyproject.toml); a machine
# without any cmake is told so here. PDSERVE_REQUIRE_NATIVE=1 shows the compiler's message instead.
$(LISTED): $(VENV)/.tools
	@rm -f $(VENV)/.files-*
	@touch $@

$(VENV)/.built: $(VENV)/.tools $(LISTED) pyproject.toml $(shell find native -type f)
	@$(SAY) "building pdserve (without a compiler it stays pure Python)"
	@export PATH="$$PATH:$(BIN)"; \
	  command -v cmake >/dev/null || [ -n "$(PDSERVE_REQUIRE_NATIVE)" ] || export PDSERVE_PURE=1; \
	  $(PIP) install --no-build-isolation --no-deps --editable .
	@$(BIN)/python -c 'from pdserve import accel; print("==>", accel.describe())'
	@touch $@

# PDSERVE_PURE=1 also holds at run time, so a native build already there serves it as well.
$(VENV)/.built-pure: $(VENV)/.tools $(LISTED) pyproject.toml
	@[ $(VENV)/.built -nt $(LISTED) ] || { $(SAY) "building pdserve, pure Python"; \
	  $(PIP) install --no-build-isolation --no-deps --editable .; }
	@touch $@
