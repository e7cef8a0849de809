# The front door: `make help`. Everything here is a thin call of CMake or of a script in tools/.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:

PRESET ?= release
DEMO_CONFIG ?= examples/python-source.json
DEMO_ARGS ?=
TEST_ARGS ?=
BENCH_ARGS ?=

BUILD := build/$(PRESET)
PYTHON = "$$(cat build/setup/python)"
# Two tests at a time: many of them start four processes each.
CTEST = ctest --test-dir $(BUILD) --output-on-failure --no-tests=error --parallel 2

.PHONY: help setup build program demo test parity bench check format clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "  PRESET=release|dev|asan|tsan chooses the build, DEMO_ARGS, TEST_ARGS and BENCH_ARGS are passed on"

setup:  ## install what is missing; make the Python environment (done once, by every target that needs it)
	@tools/setup.sh

program: setup
	@tools/build.sh $(PRESET) cli/tesserae

build: setup  ## build the library, the program, the tests and the benchmarks
	@tools/build.sh $(PRESET) all

demo: program  ## train a small transformer on 4 ranks on the source of Python's standard library
	@$(BUILD)/cli/tesserae train $(DEMO_CONFIG) $(DEMO_ARGS)

test: build  ## all tests, except the full parity product
	@$(PYTHON) -m unittest $(sort $(wildcard tests/*/*_test.py))
	@$(CTEST) -LE parity_full $(TEST_ARGS)

parity: build  ## every layout, lifetime and option against one process (long)
	@$(CTEST) -L parity_full $(TEST_ARGS)

bench: build  ## the same model under FSDP1, FSDP2, DDP and Tesserae, interleaved
	@$(PYTHON) bench/compare.py $(BENCH_ARGS)

check:  ## what needs no build: the order of the layers, the format
	@tools/check_layers.py
	@tools/check_format.sh

format:  ## rewrite the C++ files as .clang-format says
	@tools/check_format.sh --fix

clean:  ## remove the builds, keep the Python environment
	@rm -rf build/release build/dev build/asan build/tsan build/*.log
