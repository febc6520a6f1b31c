# Every target sets itself up: it needs python3 (>= 3.11) with pip, and nothing else.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: demo test lint clean

demo: $(READY)  ## solve the FitzHugh–Nagumo PDE and draw its mean and standard deviation
	$(BIN)/python examples/fitzhugh_nagumo.py

test: $(READY)  ## run the tests, the docs' examples included
	$(BIN)/python -m pytest -n 2

lint: $(READY)  ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(READY): pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@

clean:
	rm -rf .venv out .pytest_cache .mypy_cache .ruff_cache .hypothesis
