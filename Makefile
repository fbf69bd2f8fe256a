# Two commands do everything on a machine that has only Python and pip:  make demo   and   make test
PYTHON ?= python3
VENV   ?= .venv
PY     := $(VENV)/bin/python
STAMP  := $(VENV)/.installed
# Without .pyc files every start pays for compiling torch and diffusers again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-slow test-core docs mutants lint types format install clean

help: ## Show this help
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

install: $(STAMP) ## Virtual environment with pinned versions and an editable install

$(STAMP): pyproject.toml constraints.txt
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@echo "Installing (about two minutes the first time) ..."
	@$(PY) -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e '.[dev,server,wandb,ray,parquet]'
	@touch $@

demo: install ## Train the miniature video model on the CPU and show what changed
	@$(PY) -m sage_grpo demo

PYTEST := OMP_NUM_THREADS=1 $(PY) -m pytest -q -n 2 --dist loadscope --no-loadscope-reorder $(PYTEST_OPTIONS)

test: install lint ## Lint and the quick tests of every part
	@$(PYTEST) -m "not slow"

test-slow: install ## Types, the tests that start many processes, browsers, builds and whole runs, and those of research/
	@$(PYTEST) -m slow
	@$(PYTEST) research/tests

test-core: install ## Only the mathematics (seconds)
	@$(PY) -m pytest -q tests/samplers tests/objectives tests/test_known_errors.py tests/test_house.py

docs: install ## The documentation as a site, in build/site; a warning is an error
	@$(PY) scripts/docs_site.py

mutants: install ## Plant the listed errors, and drawn ones in every room; fails when the tests miss one
	@OMP_NUM_THREADS=1 $(PY) tests/mutants/plant.py --draw 5

lint: install
	@$(VENV)/bin/ruff check src tests research
	@$(VENV)/bin/ruff format --check --quiet src tests research

types: install
	@$(VENV)/bin/mypy

format: install ## Format and fix what can be fixed
	@$(VENV)/bin/ruff check --fix --quiet src tests research
	@$(VENV)/bin/ruff format --quiet src tests research

clean: ## Remove the environment and caches (never runs/)
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
