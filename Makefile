PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# Install Debian packages, if one of these programs is missing: $(call debian,programs,packages)
debian = @PATH=$$PATH:/usr/sbin; for each in $(1); do command -v $$each > /dev/null || missing="$$missing $$each"; done; \
	if [ -n "$$missing" ]; then echo "not found:$$missing; installing $(2)"; apt-get update --quiet && \
	DEBIAN_FRONTEND=noninteractive apt-get install --yes --quiet --no-install-recommends $(2); fi

.PHONY: setup demo test test-ranks test-others test-slow test-hosts test-browser test-trackers test-slurm test-ray test-postgres test-kubernetes test-pairs test-s3 test-schedule soak lint docs clean

setup: $(VENV)/.ready

# torch first and by its pin: a plain resolve could pull another build.
$(VENV)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "phalanx needs Python 3.11 or newer; name one: make PYTHON=/path/to/python3.11")'
	@echo 'setting up $(VENV), which takes a minute or two: 1 of 3, an empty environment'
	@$(PYTHON) -m venv $(VENV)
	@echo '2 of 3, PyTorch: the largest download'
	@$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	@echo '3 of 3, phalanx and what it and its tests need'
	@$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@
	@echo 'ready: $(BIN)/phalanx --help' 

demo: setup
	$(BIN)/phalanx demo --set train.steps=100

# Tests that start ranks need a core and wait a lot; the others run beside them, dry runs (test_d*) among them.
test: setup
	$(MAKE) --jobs 3 --output-sync=target lint test-ranks test-others
	@echo 'not run here, because they take long: make test-slow, test-hosts, test-slurm, test-ray, test-postgres, test-kubernetes, test-s3, test-browser, test-trackers'

test-ranks: setup
	$(BIN)/python -m pytest -o cache_dir=.pytest_cache/ranks tests/system
	$(BIN)/python -m pytest -o cache_dir=.pytest_cache/ranks --ignore-glob='tests/train/test_d*' tests/train

test-others: setup
	$(BIN)/python -m pytest --ignore=tests/system --ignore-glob='tests/train/test_[!d]*'

test-slow: setup
	$(call debian,prometheus,prometheus)
	$(BIN)/python -m pytest -m slow
	$(BIN)/python -m pytest -m "hypothesis and not slow" --hypothesis-profile=explore

# Hosts made of namespaces: root.
test-hosts: setup
	$(call debian,ip unshare nsenter sshd ssh ssh-keygen nft,iproute2 util-linux openssh-server openssh-client nftables)
	$(BIN)/python -m pytest -m hosts tests/hosts

# A real Slurm with 16 virtual nodes on this machine: root.
test-slurm: setup
	$(call debian,slurmctld slurmd srun munged,slurm-wlm munge)
	$(BIN)/python -m pytest -m slurm tests/engines

# A real Ray cluster of four nodes on this machine.
test-ray: setup
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[ray]'
	$(BIN)/python -m pytest -m ray tests/engines

# In a real browser.
test-browser: setup
	$(call debian,chromium,chromium)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[browser]'
	$(BIN)/python -m pytest -m browser tests/browser

# What MLflow, Weights & Biases, TensorBoard and OpenTelemetry read of a run, by their own readers.
test-trackers: setup
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[trackers]' tensorboard opentelemetry-proto sqlalchemy alembic
	$(BIN)/python -m pytest -m trackers tests/observe

# Debian's PostgreSQL, on loopback, with controllers that stand by for each other.
test-postgres: setup
	$(call debian,/usr/lib/postgresql/*/bin/initdb,postgresql)
	$(BIN)/python -m pytest -m postgres tests/postgres

# What Kubernetes is asked for, against all that the package kubernetes-validate knows of it.
test-kubernetes: setup
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt kubernetes-validate
	$(BIN)/python -m pytest tests/engines/test_kubernetes.py tests/engines/test_kubernetes_schemas.py

test-pairs: setup
	$(BIN)/python -m pytest tests/train/pairs.py

# Against Ceph's gateway, on loopback.
test-s3: setup
	$(call debian,radosgw ceph-mon ceph-osd ceph radosgw-admin,radosgw ceph-mon ceph-osd ceph-common)
	PHALANX_TEST_S3=radosgw $(BIN)/python -m pytest tests/data/test_s3.py

# The gang scheduler in ten thousand small worlds with faults.
test-schedule: setup
	$(BIN)/python -m tests.control.schedule.world --seeds 0:10000 --jobs 2

# Two hundred faults to the real processes of one run, some while it starts, restores and saves for the last time; then
# the control plane in a hundred thousand simulated worlds, and in ten thousand small fleets of the twin.
soak: setup
	$(BIN)/phalanx chaos run --seed 1 --faults 200 --phases start,restore,save --set train.steps=3000 --set model.dim=16 --set model.num_layers=1 \
		--set model.num_heads=2 --set model.num_kv_heads=2 --set model.ffn_dim=32 --set train.seq_len=32 --set train.global_batch=4 \
		--set train.micro_batch=2 --set data.max_mb=0.1 --set run.hang_timeout_s=2 --set recovery.restart_s=1 \
		--set checkpoint.memory_every_steps=20 --set recovery.beat_s=1 --set recovery.wait_s=60
	$(BIN)/python -m tests.control.sim --seeds 0:100000 --jobs 2
	$(BIN)/python -m tests.twin.soak --seeds 0:10000

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

docs: setup
	$(BIN)/python -m phalanx.spec.docs

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache
