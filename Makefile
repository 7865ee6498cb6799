# Every target makes the virtual environment it needs; nothing but Python 3.11+ has to be there.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# One of these files is left by each installation: what the demo needs, all that the other targets need, and what the
# documentation site and a release need beside it.
DEMO := $(VENV)/.demo-installed
ALL := $(VENV)/.all-installed
DOCS := $(VENV)/.docs-installed
RELEASE := $(VENV)/.release-installed
# Versions of everything that is installed, so that a new release upstream fails nobody's run.
PINNED := .ci/constraints.txt

SIZE = echo "$(VENV) has $$(du -sm $(VENV) | cut -f1) MB."

# Tests start hundreds of processes: each would compile what it imports again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help demo test test-all test-hard test-lowest test-http test-replication conformance mutations lint docs release-check constraints bench bench-quick bench-figures clean

help:
	@echo "make demo         fill a store, kill it in the middle, resume, replay; the same with an MQTT server (INPUT=file.parquet for your own messages)"
	@echo "make test         run the tests, the same examples each time; some minutes (ARGS='-k name' for some of them)"
	@echo "make test-all     run the slow ones too, with random examples; about 20 minutes"
	@echo "make test-hard    run all of them on busy cores, on one core, in random order, with other Pythons …; hours"
	@echo "make test-lowest  install the lowest versions that pyproject.toml allows into $(VENV)-lowest, and try them; minutes"
	@echo "make test-http    try every route of the HTTP interface with many made-up requests (EXAMPLES=1000 for each)"
	@echo "make test-replication  walk every interleaving of some sites that share a shard, in larger scopes; minutes"
	@echo "make conformance  run the conformance suite for every backend and layout that is installed; 10 minutes on two cores"
	@echo "make mutations    change lines of ours by chance, and print which of them the suites find (COUNT=60 SEED=0 FOLDERS=…); 10 s of CPU each"
	@echo "make lint         ruff, mypy --strict, import-linter"
	@echo "make docs         build the documentation site into the folder site"
	@echo "make release-check  build wheel and sdist into dist, install each into an empty environment, and try it"
	@echo "make bench-quick  compare layouts, other stores and bare engines on a small matrix, with a report; what 5 minutes allow"
	@echo "make bench        the same on the whole matrix, some hours; goes on where it was interrupted"
	@echo "make bench-figures  the figures that we hold ourselves to, half an hour (JSON=file writes all of them)"
	@echo "make constraints  renew the versions that are installed, within what pyproject.toml allows"
	@echo "make clean        remove the virtual environment and what tests and demos left"

$(DEMO): pyproject.toml $(PINNED)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "topicstore needs Python 3.11 or later; set PYTHON=")'
	@echo "Installing what the demo needs into $(VENV): about 440 MB."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade --constraint $(PINNED) pip
	$(BIN)/python -m pip install --quiet --constraint $(PINNED) --editable '.[demo]'
	@touch $@ && $(SIZE)

$(ALL): pyproject.toml $(PINNED) $(DEMO)
	@echo "Installing what tests, benchmarks and checks need into $(VENV): Spark, Java, servers and more, about 1,400 MB."
	$(BIN)/python -m pip install --quiet --constraint $(PINNED) --editable '.[all]' --group dev
	@touch $@ && $(SIZE)

$(DOCS): pyproject.toml $(PINNED) $(DEMO)
	$(BIN)/python -m pip install --quiet --constraint $(PINNED) --group docs
	@touch $@

$(RELEASE): pyproject.toml $(PINNED) $(ALL)
	$(BIN)/python -m pip install --quiet --constraint $(PINNED) --group release
	@touch $@

demo: $(DEMO)
	@$(BIN)/python -m topicstore.cli demo $(if $(INPUT),--input "$(INPUT)")

# The suites that `make conformance` runs fully are run quickly here. A file's tests stay in one process,
# and files in their order, because some make what takes long once for all of their tests.
RUN_TESTS = TOPICSTORE_CONFORMANCE=$${TOPICSTORE_CONFORMANCE:-quick} $(BIN)/python .ci/second_chance.py -n auto --dist loadfile --no-loadscope-reorder

test: $(ALL)
	PYTHONHASHSEED=0 $(RUN_TESTS) -m "not slow" $(ARGS)

test-all: $(ALL)
	TOPICSTORE_HYPOTHESIS=random $(RUN_TESTS) --timeout 1800 $(ARGS)

# Each run is a fresh clone of what is committed; RUNS="busy one-core" chooses some.
test-hard:
	@$(PYTHON) .ci/hard.py $(RUNS)

test-lowest:
	@$(PYTHON) .ci/lowest.py $(VENV)-lowest

test-http: $(ALL)
	HTTP_EXAMPLES=$(or $(EXAMPLES),1000) $(BIN)/python -m pytest --timeout 0 framework/tests/server/http/test_every_route.py

test-replication: $(ALL)
	TOPICSTORE_CONFORMANCE=thorough $(BIN)/python -m pytest -v --timeout 0 framework/tests/replication/test_model.py framework/tests/replication/test_program.py

conformance: $(ALL)
	@$(BIN)/python -m topicstore.cli conformance --all

mutations: $(ALL)
	@$(BIN)/python conformance/tests/mutations/generated.py $(or $(COUNT),60) $(or $(SEED),0) $(FOLDERS)

lint: $(ALL)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo --no-cache

docs: $(DOCS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --config-file framework/docs/mkdocs.yml

release-check: $(RELEASE)
	@$(BIN)/python .ci/release.py $(VENV)-release dist

constraints:
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[all]' --group dev --group docs --group release
	$(BIN)/python -m pip freeze --all --exclude-editable >$(PINNED)
	@touch $(DEMO) $(ALL) $(DOCS) $(RELEASE)

RESULTS := bench-results

# Measures anew each time; the whole run goes on with what is missing.
bench-quick: $(ALL)
	@rm -rf $(RESULTS)/quick
	$(BIN)/python -m topicstore.cli bench run --preset quick $(RESULTS)/quick

bench: $(ALL)
	$(BIN)/python -m topicstore.cli bench run $(RESULTS)/full

bench-figures: $(ALL)
	$(BIN)/python -m topicstore.cli bench figures $(if $(JSON),--json "$(JSON)")

clean:
	rm -rf $(VENV) $(VENV)-lowest $(VENV)-release demo-data test-hard site .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks dist build
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
