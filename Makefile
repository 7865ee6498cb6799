# Every target makes the virtual environment it needs; nothing but Python 3.11+ has to be there.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Versions of everything that is installed, so that a new release upstream fails nobody's run.
PINNED := .ci/constraints.txt

# Tests start hundreds of processes: each would compile what it imports again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help demo test test-all test-hard conformance lint constraints bench bench-quick bench-figures clean

help:
	@echo "make demo         fill a store, kill it in the middle, resume, replay (INPUT=file.parquet for your own messages)"
	@echo "make test         run the tests, the same examples each time; some minutes (ARGS='-k name' for some of them)"
	@echo "make test-all     run the slow ones too, with random examples; about a quarter of an hour"
	@echo "make test-hard    run all of them on busy cores, on one core, in random order, with other Pythons …; hours"
	@echo "make conformance  run the conformance suite for every backend and layout that is installed"
	@echo "make lint         ruff, mypy --strict, import-linter"
	@echo "make bench-quick  compare layouts, other stores and bare engines on a small matrix, with a report; under 5 minutes"
	@echo "make bench        the same on the whole matrix, some hours; goes on where it was interrupted"
	@echo "make bench-figures  the figures that we hold ourselves to, ten minutes (JSON=file writes all of them)"
	@echo "make constraints  renew the versions that are installed, within what pyproject.toml allows"
	@echo "make clean        remove the virtual environment and what tests and demos left"

$(READY): pyproject.toml $(PINNED)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "topicstore needs Python 3.11 or later; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade --constraint $(PINNED) pip
	$(BIN)/python -m pip install --quiet --constraint $(PINNED) --editable '.[all]' --group dev
	@touch $@

demo: $(READY)
	@$(BIN)/python -m topicstore.cli demo $(if $(INPUT),--input "$(INPUT)")

# The suites that `make conformance` runs fully are run quickly here. A file's tests stay in one process,
# and files in their order, because some make what takes long once for all of their tests.
RUN_TESTS = TOPICSTORE_CONFORMANCE=$${TOPICSTORE_CONFORMANCE:-quick} $(BIN)/python .ci/second_chance.py -n auto --dist loadfile --no-loadscope-reorder

test: $(READY)
	PYTHONHASHSEED=0 $(RUN_TESTS) -m "not slow" $(ARGS)

test-all: $(READY)
	TOPICSTORE_HYPOTHESIS=random $(RUN_TESTS) --timeout 1800 $(ARGS)

# Each run is a fresh clone of what is committed; RUNS="busy one-core" chooses some.
test-hard:
	@$(PYTHON) .ci/hard.py $(RUNS)

conformance: $(READY)
	@$(BIN)/python -m topicstore.cli conformance --all

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo --no-cache

constraints:
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[all]' --group dev
	$(BIN)/python -m pip freeze --all --exclude-editable >$(PINNED)
	@touch $(READY)

RESULTS := bench-results

# Measures anew each time; the whole run goes on with what is missing.
bench-quick: $(READY)
	@rm -rf $(RESULTS)/quick
	$(BIN)/python -m topicstore.cli bench run --quick $(RESULTS)/quick

bench: $(READY)
	$(BIN)/python -m topicstore.cli bench run $(RESULTS)/full

bench-figures: $(READY)
	$(BIN)/python -m topicstore.cli bench figures $(if $(JSON),--json "$(JSON)")

clean:
	rm -rf $(VENV) demo-data test-hard .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks dist build
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
