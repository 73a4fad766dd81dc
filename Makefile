# One command for each habit. `make demo` and `make test` need nothing but Python 3.11 or newer.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin

.PHONY: setup demo test test-slow check bench clean

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml clients_sdk/pyproject.toml benchmarks/pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet --editable ".[serve,cpu,embedded]" --editable "./clients_sdk[images]" --editable ./benchmarks --group test --group check
	touch $@

demo: setup
	$(BIN)/python examples/demo.py

test: setup
	$(BIN)/python -m pytest -m "not slow and not gpu"

test-slow: setup
	$(BIN)/python -m pytest -m "slow and not gpu"

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	PATH="$(BIN):$$PATH" $(BIN)/lint-imports

bench: setup
	$(BIN)/acclimate-bench speed
	$(BIN)/acclimate-bench serve
	$(BIN)/acclimate-bench state
	$(BIN)/acclimate-bench scale
	$(BIN)/acclimate-bench diet
	$(BIN)/acclimate-bench diet --network resnet18 --threads 2 --keep .data/bench-models
	$(BIN)/acclimate-bench accuracy
	$(BIN)/acclimate-bench guard --seeds 5

clean:
	rm -rf $(VENV) .data
