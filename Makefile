# One command for each habit. `make demo` and `make test` need nothing but Python 3.11 to 3.13.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
UV ?= uv
INSTALL = $(PYTHON) -m venv $(VENV) && $(BIN)/python -m pip install --quiet --upgrade "pip>=25.1" && $(BIN)/python -m pip install --quiet
# One thread in each of the processes that tests run in, whose byte code is kept: each of them would compile everything.
# pytest-xdist says `auto` for one process per core.
PYTEST = OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --dist worksteal --numprocesses
INSTALLED := $(VENV)/.installed$(if $(CI),-ci)

.PHONY: setup lock audit sbom demo quick test test-slow check bench clean

# With CI=true also what only continuous integration needs.
setup: $(INSTALLED)

# In the versions of the last `make lock`, which are those that were tested.
$(INSTALLED): pyproject.toml clients_sdk/pyproject.toml benchmarks/pyproject.toml .ci/constraints.txt
	$(INSTALL) --constraint .ci/constraints.txt --editable ".[serve,cpu,embedded]" --editable "./clients_sdk[images]" --editable ./benchmarks --group test --group check $(if $(CI),--group ci)
	touch $@

# Versions and hashes of what the images are made of, and versions of what `make setup` installs, from whichever index uv is told of; none is
# named in the files. UV_CONSTRAINT names a file of versions that are not to be exceeded.
LOCK = $(UV) pip compile --universal --python-version 3.11 --no-annotate --no-emit-index-url --no-emit-find-links --custom-compile-command "make lock" \
    --upgrade --quiet
lock:
	for runtime in cpu gpu; do $(LOCK) pyproject.toml --extra serve --extra otel --extra $$runtime --generate-hashes \
	    --output-file deploy/requirements-$$runtime.txt || exit 1; done
	$(LOCK) pyproject.toml clients_sdk/pyproject.toml benchmarks/pyproject.toml --extra serve --extra cpu --extra embedded --extra images \
	    --group test --group check --group ci --no-emit-package acclimate --no-emit-package acclimate-client --output-file .ci/constraints.txt

# Known defects in what the images are made of: asks services of the internet for them, which continuous integration does not reach.
audit:
	$(PYTHON) -m venv $(VENV)-audit && $(VENV)-audit/bin/python -m pip install --quiet "pip-audit>=2.7"
	for runtime in cpu gpu; do $(VENV)-audit/bin/pip-audit --disable-pip --require-hashes --requirement deploy/requirements-$$runtime.txt || exit 1; done

# What the images are made of, for those who watch over known defects (CycloneDX). Wants CI=true.
sbom: setup
	mkdir -p dist
	for runtime in cpu gpu; do $(BIN)/cyclonedx-py requirements deploy/requirements-$$runtime.txt --pyproject pyproject.toml --of JSON \
	    --output-file dist/sbom-$$runtime.json || exit 1; done

$(VENV)/.demo: pyproject.toml
	$(INSTALL) --editable ".[serve,cpu,embedded]"
	touch $@

demo: $(firstword $(wildcard $(INSTALLED)) $(VENV)/.demo)
	$(BIN)/acclimate demo

# What starts no service, no Redis and no process, and learns nothing.
NO_QUICK := benchmarks deploy e2e golden gpu learning test_architecture.py test_how_tos.py test_readme.py
quick: setup
	$(PYTEST) auto -m "not integration and not slow and not gpu" $(NO_QUICK:%=--ignore=tests/%)

# One process more than there are cores: a quarter of the time is spent on waiting for services to start and to end.
test: setup
	$(PYTEST) $$($(PYTHON) -c "import os; print(os.cpu_count() + 1)") -m "not slow and not gpu"

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
	$(BIN)/acclimate-bench budget
	$(BIN)/acclimate-bench budget --network resnet18 --threads 2 --keep .data/bench-models
	$(BIN)/acclimate-bench accuracy
	$(BIN)/acclimate-bench guard --seeds 5

clean:
	rm -rf $(VENV) $(VENV)-audit .data
