# Two commands do everything on a fresh machine, set-up included: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: setup demo test lint clean

demo: setup
	$(BIN)/gradsieve demo --out runs/demo

test: setup lint
	$(BIN)/pytest -q

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

setup: .venv/.done

.venv/.done: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt "pip>=25.1"
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[images,translation,report]" --group dev
	@touch $@

clean:
	rm -rf .venv runs
