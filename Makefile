# SPDX-License-Identifier: AGPL-3.0-only
# Each target makes the virtual environment that it needs; a later call installs again only after a change of pyproject.toml.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
PYTEST_ARGS ?= -n auto --dist worksteal
HAS_COMPILER = $(BIN)/python -c 'from spark_py.emulator.compiler import find_compiler; find_compiler()' 2>/dev/null
MUTANTS := tests/kernels/test_mutants.py
GPU_OUTPUT ?= docs/gpu

.DELETE_ON_ERROR:
.PHONY: help demo test emulated deep lint types check format gpu clean

help:
	@echo 'make demo    run the demo (installs the base package)'
	@echo 'make test    run the tests without a GPU (installs the cuda12 and test extras)'
	@echo 'make emulated   the kernel tests alone, with the .cu files compiled for the CPU (needs g++ 12 or newer; in make test)'
	@echo 'make deep    what make test leaves out: the kernels in the checked build, each deliberate fault in a .cu file run'
	@echo '             and noticed, several orders of threads, every architecture, many more parameters (needs g++ 12 or newer)'
	@echo 'make lint    ruff: rules and format        make types   mypy --strict'
	@echo 'make check   lint, types and test          make format  let ruff rewrite'
	@echo 'make gpu     run tests, compute-sanitizer and benchmark on a GPU, results in $(GPU_OUTPUT)'
	@echo 'PYTHON=python3.12 make ... names the interpreter of a new environment'

demo: $(VENV)/.base
	$(BIN)/spark-py demo

test: $(VENV)/.dev
	$(BIN)/python -m pytest $(PYTEST_ARGS) -m "not deep"
	@if $(HAS_COMPILER); then $(MAKE) --no-print-directory emulated; \
	  else echo 'no C++ compiler: the .cu files were not run on the CPU; spark-py doctor has the cure'; fi

emulated: $(VENV)/.dev
	$(BIN)/python -m pytest $(PYTEST_ARGS) --backend emulated --deselect $(MUTANTS) -m "not deep" tests/kernels

deep: $(VENV)/.dev
	$(BIN)/python -m pytest $(PYTEST_ARGS) -m deep
	$(BIN)/python -m pytest $(PYTEST_ARGS) --backend emulated-checked tests/kernels

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy --strict spark_py

check: lint types test

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

gpu: $(VENV)/.dev
	$(BIN)/python tools/gpu_suite.py --output $(GPU_OUTPUT)

clean:
	rm -rf $(VENV)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "spark_py needs Python 3.11 or newer; '$(PYTHON)' is missing or older. Try: make PYTHON=python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.base: pyproject.toml | $(BIN)/python
	@echo 'installing spark_py into $(VENV)'
	$(PIP) -e .
	@touch $@

$(VENV)/.dev: pyproject.toml | $(BIN)/python
	@echo 'installing spark_py with CuPy, NVRTC and the test tools into $(VENV) (about 1 GB)'
	$(PIP) -e '.[cuda12,test]'
	@touch $(VENV)/.base $@
