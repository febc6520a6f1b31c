# Every target sets itself up: it needs python3 (>= 3.11) with pip, and nothing else.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: help demo test test-all lint bench bench-quick clean
QUICK := step work_precision growth first_call smoothing
BENCHMARKS := $(QUICK) corrections nonstiff stiff_classics calibration grids stiff implicit regions spatial members which explicit_part compiler

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

demo: $(READY)  ## solve the FitzHugh–Nagumo PDE with 125 000 unknowns, and draw its mean and standard deviation
	$(BIN)/millipode reproduce showcase --quick --out out

# Tests compile far more than they compute, so most do without LLVM's optimisations: half the time.
PYTEST := $(BIN)/python -m pytest -n 2
PLAIN := XLA_FLAGS=--xla_backend_optimization_level=0

test: $(READY)  ## run the quick tests of every module, and the docs' examples; five minutes
	$(PLAIN) $(PYTEST) -m 'not optimised and not thorough'
	$(PYTEST) -m 'optimised and not thorough'

test-all: $(READY)  ## run all tests; a quarter of an hour
	$(PLAIN) $(PYTEST) -m 'not optimised'
	$(PYTEST) -m optimised

lint: $(READY)  ## style, types, and which module may import which
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(READY)-bench  ## measure everything; results in benchmarks/results; takes two hours
	set -e; for name in $(BENCHMARKS) summary; do $(BIN)/python benchmarks/$$name.py; done

bench-quick: $(READY)-bench  ## a selection, in five minutes; results in benchmarks/results/quick
	set -e; for name in $(QUICK) summary; do $(BIN)/python benchmarks/$$name.py --quick; done

$(READY)-bench: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev,bench]'
	touch $@

$(READY): pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@

clean:  ## remove the virtual environment and everything that was made
	rm -rf .venv out .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
