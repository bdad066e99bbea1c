# Every target sets up what it needs in .venv, once: the stamps in .venv/stamps record what was
# done, and a step runs again when a file that it depends on is newer. `make help` lists the targets.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= $(or $(shell command -v python3.11),python3)
export PYTHON CXX

VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/stamps

DEMO_CONFIG ?= configs/movielens_linear_ftrl.yaml
DEMO_RANKS ?= 2
PYTEST_ARGS ?=
BENCH_ARGS ?=

CXX_FILES := $(sort $(foreach kind,cpp h cu cuh,$(wildcard csrc/*.$(kind) csrc/*/*.$(kind))))

.PHONY: help setup demo test lint format bench clean distclean

help: ## list the targets
	@sed -nE 's/^([a-z]+):.* ## (.*)/  make \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 20

demo: setup ## train FTRL on MovieLens-100k, on two ranks
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node $(DEMO_RANKS) \
	  -m torchrec_ext.train $(DEMO_CONFIG)

test: setup ## run the tests (PYTEST_ARGS="-k ftrl" for some)
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

bench: setup ## measure against FBGEMM and torch (BENCH_ARGS for its options)
	$(BIN)/python -m benchmarks $(BENCH_ARGS)

lint: $(STAMPS)/packages ## check style, formats and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)
	$(BIN)/mypy

format: $(STAMPS)/packages ## rewrite all files in the project's format
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_FILES)

setup: $(STAMPS)/extension ## prepare .venv, with the extension built

clean: ## remove what was built
	rm -rf build dist *.egg-info torchrec_ext/*.so $(STAMPS)/extension

distclean: clean ## remove .venv too
	rm -rf $(VENV)

$(STAMPS)/environment:
	@tools/setup.sh environment
	@mkdir -p $(@D) && touch $@

$(STAMPS)/packages: $(wildcard requirements/*.txt) | $(STAMPS)/environment
	@tools/setup.sh packages
	@touch $@

# The folders are listed too, so that a removed source counts as a change.
$(STAMPS)/extension: setup.py pyproject.toml csrc $(wildcard csrc/*/) $(CXX_FILES) $(STAMPS)/packages
	@tools/setup.sh extension
	@touch $@
