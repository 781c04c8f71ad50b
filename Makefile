# `make demo` and `make test` need Python, make and a C++ compiler; everything else is installed into .venv.
PYTHON ?= python3
BIN := .venv/bin
# Two workers with two threads each: waiting threads must sleep, not spin, on a machine with two cores.
PYTEST := OMP_WAIT_POLICY=passive $(BIN)/pytest -n 2 --dist worksteal
PIP := $(BIN)/pip --disable-pip-version-check install --quiet --constraint constraints.txt

.PHONY: demo test test-integration test-all test-gpu test-gpu-shared test-gpu-alone sanitize sanitize-gpu stress power lint format docs bench clean

demo: .venv/installed
	$(BIN)/opwright build opwright_ops.bias_gelu
	$(BIN)/opwright verify opwright_ops.bias_gelu::bias_gelu --out reports
	$(BIN)/opwright bench opwright_ops.bias_gelu::bias_gelu --out reports
	$(BIN)/opwright report reports --out reports/bias_gelu.html

# What to run for each change.
test: .venv/tests
	$(PYTEST) -m "not slow" tests/unit tests/build tests/process

# The operators of opwright_ops, wheels, Triton, extensions, the documentation, faults of all kinds.
INTEGRATION ?= tests/integration tests/power ops/src
test-integration: .venv/tests
	$(PYTEST) -m "not slow" $(INTEGRATION)

test-all: .venv/tests
	$(PYTEST)

# On a machine that has torch with CUDA and nvcc: nothing is installed, $(PYTHON) runs the tests as it is. They take
# turns on one GPU; those that measure it, or end work on it, run alone.
GPU_PYTEST = OMP_WAIT_POLICY=passive PYTHONPATH=$(CURDIR)/src:$(CURDIR)/ops/src$${PYTHONPATH:+:$$PYTHONPATH} \
  $(PYTHON) -m pytest -v
GPU_TESTS := tests/gpu tests/process/test_verify_cuda.py tests/integration/examples \
  $(addprefix ops/src/opwright_ops/,adamw cross_entropy norm rope softmax transducer)
GPU_WORKERS ?= 8

test-gpu: test-gpu-shared test-gpu-alone

test-gpu-shared:
	$(GPU_PYTEST) -n $(GPU_WORKERS) --dist worksteal -m "gpu and not alone and not sanitizer" $(GPU_TESTS)

test-gpu-alone:
	$(GPU_PYTEST) -m "gpu and alone" $(GPU_TESTS)

# 100,000 calls with drawn arguments, Opwright's C and C++ under the address sanitizer and UBSan; then swaps, forks and
# first calls from four threads under the thread sanitizer. Needs g++.
CALLS ?= 100000
sanitize: .venv/tests
	$(BIN)/pytest tests/integration/sanitize
	$(BIN)/python tests/integration/sanitize/fuzz.py --calls $(CALLS)
	$(BIN)/python tests/integration/sanitize/threads.py tests/integration/stress/stress.py swap --swaps 2500 --forks 50 --threads 4

# Swaps, forks, starts, kills and edits at moments all over calls and builds; half an hour on two cores.
STRESS := $(BIN)/python tests/integration/stress/stress.py
stress: .venv/tests
	$(STRESS) swap --swaps 1000 --forks 50 --threads 4
	$(STRESS) start --processes 64
	$(STRESS) kill --kills 50
	$(STRESS) edit --edits 50

# Every kernel with inputs and outputs of many layouts, under the tools of compute-sanitizer.
sanitize-gpu:
	$(GPU_PYTEST) -n $(GPU_WORKERS) --dist worksteal -m sanitizer tests/gpu

# Makes the operators of opwright_ops wrong in every known way, and publishes which check of verify sees it; ten minutes.
power: .venv/tests
	$(BIN)/python tests/power/mutants.py opwright_ops --publish

# Names, types, layers, format, spelling and wording; `make format` writes the format.
CPP = $$(git ls-files '*.c' '*.cpp' '*.cu' '*.cuh' '*.h')
lint: .venv/lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(CPP)
	$(BIN)/codespell $$(git ls-files)
	$(BIN)/python tests/prose.py
	$(BIN)/lint-imports
	$(BIN)/basedpyright --pythonpath $(BIN)/python

format: .venv/lint
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP)

# The site, in the folder site; needs Python 3.11 or newer. docs/generate.py writes its pages to build/docs.
docs: .venv/docs
	$(BIN)/python docs/generate.py
	$(BIN)/zensical build --clean --strict

bench: .venv/tests
	$(BIN)/python benchmarks/toolkit.py
	$(BIN)/python benchmarks/bias_gelu.py

clean:
	rm -rf .venv reports site build/docs

.venv/installed: pyproject.toml ops/pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) torch numpy  # torch warns at every start without numpy
	$(PIP) hatchling editables
	$(PIP) --no-build-isolation --editable .
	$(PIP) --no-build-isolation --editable ops  # its build hook is the line above
	touch $@

# The Tritons whose launches are compared with those from C++; without one its tests skip.
TRITONS := 3.6.0 3.9.0
.venv/tritons: .venv/installed
	@for version in $(TRITONS); do \
	  folder=.venv/triton-$$version; \
	  test -x $$folder/bin/python || { $(PYTHON) -m venv --without-pip $$folder && \
	    $(BIN)/pip --disable-pip-version-check --python $$folder/bin/python install --quiet triton==$$version; } || \
	    { rm -rf $$folder; echo "Triton $$version could not be installed; its tests skip"; }; \
	done
	touch $@

.venv/tests: .venv/installed .venv/tritons
	$(PIP) --no-build-isolation --editable ".[test]"
	touch $@

# With the extra `test`, for the types of pytest and Hypothesis.
.venv/lint: .venv/installed
	$(PIP) --no-build-isolation --editable ".[test,lint]"
	touch $@

.venv/docs: .venv/installed
	$(PIP) --no-build-isolation --editable ".[docs]"
	touch $@
