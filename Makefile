# `make train` and `make test` each work on a fresh machine with Python 3.12; nothing is installed again while it is up to date.

# Interpreters to make the virtual environment with: the first that runs and is new enough.
PYTHON ?= python3.12 python3
VENV ?= .venv
PYTEST_ARGS ?= -n 2

BIN = $(VENV)/bin
SUPPORTED = 'import sys; sys.exit(sys.version_info < (3, 12))'

.PHONY: train test lint format

train: $(VENV)/.installed
	$(BIN)/python -m dsv4_fusions train configs/tiny.yaml

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

format: $(VENV)/.installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(VENV)/.installed-dev: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $(VENV)/.installed $@

# A python3.12 on PATH may be a shim that does not run, hence the trial.
$(BIN)/python:
	@for python in $(PYTHON); do \
	    if $$python -c $(SUPPORTED) 2>/dev/null; then exec $$python -m venv $(VENV); fi; \
	done; \
	echo "error: Python 3.12 or newer is needed, and none of these is one: $(PYTHON)" >&2; exit 1
