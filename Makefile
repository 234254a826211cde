# Everything runs in .venv; nothing outside this folder is touched.
.DEFAULT_GOAL := help
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MODEL := models/smollm2-135m-w8a8
DEMO_PORT ?= 50071
QUESTION ?= What is the capital of France?
DEVICE ?= cuda
OUT ?= build/gpu-check
OPS := $(wildcard graphs/ops/*.cc graphs/ops/*.h graphs/ops/*.inl) graphs/ops/CMakeLists.txt
# A process for each core, up to four, with about 2 GB each; neighbouring tests share what they build.
PYTEST := $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal
PROTO := $(shell find proto -name '*.proto')

.PHONY: help demo setup proto lint type test test-slow gpu-check bench lock clean

help: ## Show the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

setup: $(VENV)/installed ## Virtual environment, locked dependencies, built op library, generated gRPC code

$(VENV)/locked: requirements.lock
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	@touch $@

$(VENV)/installed: $(VENV)/locked pyproject.toml $(OPS) $(PROTO)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps --editable .
	@touch $@

proto: ## Generate chairlift.inference.v1 from proto/ again
	@rm -f $(VENV)/installed
	@$(MAKE) --no-print-directory setup

$(MODEL)/manifest.json: $(VENV)/installed $(wildcard graphs/*.py)
	$(BIN)/chairlift pull smollm2-135m
	$(BIN)/chairlift export models/SmolLM2-135M-Instruct.Q4_1.gguf --out $(MODEL) --overwrite
	@touch $@

export QUESTION
demo: $(MODEL)/manifest.json ## Serve a real model, stream an answer to a question, stop the server
	@BIN=$(BIN) MODEL=$(MODEL) PORT=$(DEMO_PORT) bash tests/demo.sh

lint: setup ## Style of every file
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

type: setup ## Static types, strict
	$(BIN)/mypy

test: setup ## Every test that needs no GPU
	$(PYTEST) -m "not slow"

test-slow: setup ## The tests that take minutes
	$(PYTEST) -m slow

gpu-check: setup ## Kernels on this machine's GPU: PART=1 right? PART=2 fast? DEVICE=sim for the simulator
	$(BIN)/python -m tests.cuda.gpu_check --device $(DEVICE) $(if $(PART),--part $(PART)) --out $(OUT)

bench: $(MODEL)/manifest.json ## Step costs of the demo model
	$(BIN)/chairlift bench step --model $(MODEL)

lock: $(VENV)/locked ## Resolve the newest dependencies into requirements.lock
	$(BIN)/uv pip compile --quiet --universal --generate-hashes --no-emit-index-url --no-annotate --python-version 3.11 \
		--group dev --no-header --output-file requirements.lock pyproject.toml

clean: ## Remove what was built; keeps models/
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
