PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: setup demo test test-slow test-pairs test-s3 soak lint docs clean

setup: $(VENV)/.ready

# torch first and by its pin: a plain resolve could pull another build.
$(VENV)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "phalanx needs Python 3.11 or newer; name one: make PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: setup
	$(BIN)/phalanx train

test: setup lint
	$(BIN)/python -m pytest

test-slow: setup
	$(BIN)/python -m pytest -m slow

test-pairs: setup
	$(BIN)/python -m pytest tests/train/pairs.py

# Against Ceph's gateway, on loopback: apt install radosgw ceph-mon ceph-osd ceph-common
test-s3: setup
	PHALANX_TEST_S3=radosgw $(BIN)/python -m pytest tests/data/test_s3.py

# The control plane in a hundred thousand simulated worlds, each with faults of its own.
soak: setup
	$(BIN)/python -m tests.control.sim --seeds 0:100000 --jobs 2

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

docs: setup
	$(BIN)/python -m phalanx.spec.docs

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache
