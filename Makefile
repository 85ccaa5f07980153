# Every target sets up what it needs and is quick if nothing changed. `make` alone lists them.
SHELL := bash
PYTHON_BIN := .venv/bin/python
GPU_PYTHON ?= $(PYTHON_BIN)
ARGS ?=
TEST_JOBS ?= 2
# A file's tests share servers, so they stay together.
SIDE_BY_SIDE = -n $(TEST_JOBS) --dist loadfile
# ARGS may select tests of one half only. Then pytest's status 5 (nothing collected) is no failure of the other half.
MAY_BE_EMPTY = $(if $(ARGS),5,0)

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all check bench gpu-check

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 20

setup: ## .venv with vLLM, the tools and this project (DEVICE=cpu|cuda to choose)
	@deploy/setup.sh

demo: setup ## a real model answers over 7K tokens: stock vLLM, then hybrid_sparse
	@.venv/bin/hybrid-sparse demo $(ARGS)

test: setup ## unit tests, then system tests, TEST_JOBS=2 files at a time
	@echo "test: unit tests"; \
	$(PYTHON_BIN) -m pytest -m "not system and not gpu and not slow" $(SIDE_BY_SIDE) $(ARGS); unit=$$?; \
	((unit == 0 || unit == $(MAY_BE_EMPTY))) || exit $$unit; \
	echo "test: system tests"; \
	$(PYTHON_BIN) -m pytest -m "system and not gpu and not slow" $(SIDE_BY_SIDE) --durations=20 --durations-min=20 $(ARGS); \
	system=$$?; \
	((unit == 0 && system == $(MAY_BE_EMPTY))) || exit $$system

test-all: test ## make test, then the tests marked slow, one file at a time (hours)
	@echo "test-all: slow tests"; \
	$(PYTHON_BIN) -m pytest -m "slow and not gpu" --durations=20 --durations-min=20 $(ARGS); slow=$$?; \
	((slow == 0 || slow == $(MAY_BE_EMPTY))) || exit $$slow

check: setup ## ruff, formatting, types, import contracts
	@echo "check: ruff"
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@echo "check: mypy"
	@.venv/bin/mypy
	@echo "check: import contracts"
	@.venv/bin/lint-imports --no-logo

bench: setup ## time per output token of both backends in turns (ARGS="--help" for its options)
	@$(PYTHON_BIN) -m benchmarks.serving.tpot $(ARGS)

gpu-check: ## all that needs an NVIDIA GPU, a table last (GPU_PYTHON=python3 where nothing can be installed)
	@nvidia-smi -L 2>/dev/null | grep -q '^GPU' || \
	  { echo "gpu-check: needs an NVIDIA GPU, and nvidia-smi lists none on this machine" >&2; exit 1; }
	@[[ '$(GPU_PYTHON)' != '$(PYTHON_BIN)' ]] || $(MAKE) --no-print-directory setup
	@$(GPU_PYTHON) -m benchmarks.gpu_check $(ARGS)
