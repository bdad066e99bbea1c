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
# Of check-cuda-build, with the packages of requirements/cuda-build.txt.
CUDA_VENV := .venv-cuda
VENVS := $(VENV) $(CUDA_VENV)

DEMO_CONFIG ?= configs/movielens_linear_ftrl.yaml
DEMO_RANKS ?= 2
PYTEST_ARGS ?=
# Threads that spin while they wait make tests several times slower on cores that others use too.
WAITING := OMP_WAIT_POLICY=passive
BENCH_ARGS ?=

CXX_FILES := $(sort $(foreach kind,cpp h cu cuh,$(wildcard csrc/*.$(kind) csrc/*/*.$(kind))))

.PHONY: help setup demo test lint format bench check-cuda check-cuda-build clean distclean

help: ## list the targets
	@sed -nE 's/^([a-z-]+):.* ## (.*)/  make \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 26

demo: setup ## train FTRL on MovieLens-100k, on two ranks
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node $(DEMO_RANKS) \
	  -m torchrec_ext.train $(DEMO_CONFIG)

test: setup ## run the tests (PYTEST_ARGS="-k ftrl" for some)
	@$(WAITING) $(BIN)/python -m pytest $(PYTEST_ARGS)

bench: setup ## measure against FBGEMM and torch (BENCH_ARGS for its options)
	$(BIN)/python -m benchmarks $(BENCH_ARGS)

check-cuda: $(STAMPS)/packages ## check the compiled CUDA code; needs nvcc, but no GPU
	$(BIN)/python -m tools.check_cuda

lint: $(STAMPS)/packages ## check style, formats and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)
	$(BIN)/mypy

format: $(STAMPS)/packages ## rewrite all files in the project's format
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_FILES)

# The extension is built every time, and for .venv again by the next target: it lies in the source
# tree, once for both. USE_CUDA=0 leaves our CUDA kernels out.
check-cuda-build: $(CUDA_VENV)/stamps/packages ## build with CUDA kernels and test (needs nvcc and 6 GB, no GPU)
	@rm -f $(STAMPS)/extension
	@USE_CUDA=$(or $(USE_CUDA),1) tools/setup.sh extension $(CUDA_VENV)
	$(if $(filter 0,$(USE_CUDA)),,$(CUDA_VENV)/bin/python tools/check_cuda_kernels.py)
	@$(WAITING) $(CUDA_VENV)/bin/python -m pytest $(PYTEST_ARGS)

setup: $(STAMPS)/extension ## prepare .venv, with the extension built

clean: ## remove what was built
	rm -rf build dist *.egg-info torchrec_ext/*.so $(STAMPS)/extension

distclean: clean ## remove .venv and .venv-cuda too
	rm -rf $(VENV) $(CUDA_VENV)

$(VENVS:%=%/stamps/environment): %/stamps/environment:
	@tools/setup.sh environment $*
	@mkdir -p $(@D) && touch $@

$(VENVS:%=%/stamps/packages): %/stamps/packages: $(wildcard requirements/*.txt) | %/stamps/environment
	@tools/setup.sh packages $*
	@touch $@

# The folders are listed too, so that a removed source counts as a change.
$(STAMPS)/extension: setup.py pyproject.toml csrc $(wildcard csrc/*/) $(CXX_FILES) $(STAMPS)/packages
	@tools/setup.sh extension
	@touch $@
