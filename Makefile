# The front door: `make help`. Everything here is a thin call of CMake or of a script in tools/.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:
# tools/setup.sh leaves it to the first import to compile torch's modules. Where that may not be kept, each of the
# hundreds of processes that tests start parses torch again: 6 s of processor time, not 2.
unexport PYTHONDONTWRITEBYTECODE

PRESET ?= release
DEMO_CONFIG ?= examples/python-source.json
DEMO_ARGS ?=
TEST_ARGS ?=
PYTEST_ARGS ?=
BENCH ?= compare phases phases_python host_cost growth transport tensor_parallel checkpoint startup script_startup
BENCH_ARGS ?=

BUILD := build/$(PRESET)
PYTHON = "$$(cat build/setup/python)"
PYTEST = tools/pytest.sh $(BUILD) $(PYTEST_SECONDS)
PYTEST_SECONDS ?= 4800
parity: PYTEST_SECONDS = 14400
CTEST = tools/ctest.sh $(BUILD)

.PHONY: help setup build program demo test parity long nightly bench dial-bench check docs format stub clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "  PRESET=release|dev|asan|tsan chooses the build, DEMO_ARGS, TEST_ARGS, PYTEST_ARGS and BENCH_ARGS are passed on"

setup:  ## install what is missing; make the Python environment (done once, by every target that needs it)
	@tools/setup.sh --dev

program:
	@[ -f $(BUILD)/build.ninja ] || echo "first time: set-up (packages, torch), then a build of minutes; each says how long it takes"
	@tools/setup.sh
	@tools/build.sh $(PRESET) cli/tesserae

build: setup  ## build the library, the program, the tests and the benchmarks
	@tools/build.sh $(PRESET) all

demo: program  ## train a small transformer on 4 ranks on the source of Python's standard library
	@$(BUILD)/cli/tesserae train $(DEMO_CONFIG) $(DEMO_ARGS)

# Through the environment: no quote in the arguments is the shell's to read.
test: export RUN_PYTEST = $(PYTEST) -m "not parity_full and not long" $(PYTEST_ARGS)
test: export RUN_CTEST = $(CTEST) -LE parity_full $(TEST_ARGS)
test: build  ## all tests, except the full parity product; Python's and C++'s side by side
	@TEST_LOG=$(BUILD)/ctest.log tools/test.sh "$$RUN_PYTEST" "$$RUN_CTEST"

parity: build  ## every layout, lifetime and option against one process, every option of FSDP against FSDP1 (long)
	@$(CTEST) -L parity_full $(TEST_ARGS)
	@$(PYTEST) -m parity_full $(PYTEST_ARGS)

long: build  ## the long forms of tests: 1,000 kills of a save, 100 of jobs on shared memory
	@$(PYTEST) -m long $(PYTEST_ARGS)
	@$(CTEST) -C long -L long $(TEST_ARGS)

nightly: build  ## parity in full, long, sanitizers, the fuzzer, another torch, one after the other; build/nightly.md (hours)
	@tools/nightly.sh

bench: build  ## FSDP1, FSDP2, DDP and Tesserae, interleaved; tables and plots in docs/ (3 hours; BENCH=compare: a part)
	@failed=; \
	for part in $(BENCH); do $(PYTHON) bench/$$part.py --update-docs $(BENCH_ARGS) || failed+=" $$part"; done; \
	$(PYTHON) bench/compare.py --report-only --update-docs || failed+=" report"; \
	$(PYTHON) bench/plot.py || failed+=" plot"; \
	[ -z "$$failed" ] || { echo "bench: failed:$$failed" >&2; exit 1; }

dial-bench: build  ## changes of the sharding degree beside restarts, and "auto" beside all layouts (1 hour)
	@$(PYTHON) bench/dial.py --update-docs $(BENCH_ARGS)
	@$(PYTHON) bench/dial.py --links gloo,1gbit --update-docs $(BENCH_ARGS)
	@$(PYTHON) bench/dial.py --timeline $(BENCH_ARGS)
	@$(PYTHON) bench/auto_sweep.py --update-docs
	@$(PYTHON) bench/plot.py

check:  ## what needs no build: order of the layers, commands of figures, links, blocks of code, format
	@tools/check_layers.py
	@tools/check_figures.py
	@tools/check_links.py
	@tools/check_examples.py
	@tools/check_format.sh
	@tools/check_python.sh

docs: build  ## the site of docs/, with the references of Python and C++: build/docs/html (2 minutes)
	@tools/docs.sh $(BUILD)

format:  ## rewrite the C++ files as .clang-format says, the Python files as ruff does
	@tools/check_format.sh --fix
	@tools/check_python.sh --fix

stub: build  ## write python/tesserae/_C.pyi again, after a change of python/bindings
	@PYTHON=$(PYTHON) PYTHONPATH="$(CURDIR)/$(BUILD)/python" tools/stub.sh --fix

clean:  ## remove the builds, keep the Python environment
	@rm -rf build/release build/dev build/asan build/tsan build/*.log
