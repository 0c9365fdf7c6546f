# Two commands do everything on a fresh machine, set-up included: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin

APT := apt-get --quiet --yes --no-install-recommends -o Acquire::Retries=0 -o Acquire::http::Timeout=10

.PHONY: setup demo test docs browser screenshot lint clean

demo: setup
	$(BIN)/gradsieve demo --out runs/demo

test: setup lint browser
	$(BIN)/pytest -q

# The documentation site, into site/: open site/index.html.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The tests of the report open it in Chromium; where apt cannot bring that, they are skipped.
browser:
	@command -v chromedriver >/dev/null || { test "$$(id -u)" = 0 && $(APT) update && $(APT) install chromium chromium-driver; } \
	  >/dev/null 2>&1 || echo "There is no Chromium here: its tests will be skipped."

# The picture in the README: the top of the demo's report.
screenshot: demo
	chromium --headless --no-sandbox --hide-scrollbars --force-device-scale-factor=2 --window-size=1168,616 \
	  --virtual-time-budget=20000 --screenshot=docs/report.png file://$(CURDIR)/runs/demo/report.html

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

setup: .venv/.done

.venv/.done: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt "pip>=25.1"
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[images,translation,report,tensorboard,bench,hf,lightning]" --group dev --group docs
	@touch $@

clean:
	rm -rf .venv runs site
