# All targets run in .venv; the first target that needs .venv creates it. Required: Python 3.11 or newer, pip, make.
# `make PYTHON=/path/to/python test` chooses the interpreter.

PYTHON ?=
# Best tested first; the first interpreter that is new enough and can create a venv is used.
PYTHONS = python3.11 python3 python3.12 python3.13 python3.14 python

BIN = .venv/bin
PIP = $(BIN)/python -m pip --disable-pip-version-check
# Stamps of installed extras: dev for development, or only the half that the demo needs.
STAMP = .venv/.installed
BENCH_STAMP = .venv/.installed-bench
DEMO = demo$(if $(S3),-s3)
DEMO_STAMP = .venv/.installed-$(DEMO)

# Three workers for two cores, because tests wait for a third of their time. Starting a worker takes ten seconds of a
# core. A file stays on one worker; tests/support/shards.py orders the files.
WORKERS ?= -n 3 --dist loadfile --no-loadscope-reorder
PYTEST_ARGS ?=
# SHARD=2/4 runs the second quarter of the test files
SHARD ?=
PYTEST = $(BIN)/python -m pytest $(WORKERS) $(if $(SHARD),--shard=$(SHARD))
PACKAGES_ARGS ?=

.PHONY: help demo test test-all test-torch test-trainer mutants browser check lint types contracts english bench packages sbom format pictures client reference docs generated clean

help:
	@echo "make demo      train, kill during a save, resume on another number of ranks, flip a bit, serve; check each result"
	@echo "make demo S3=1 the same on an S3 server that the demo starts"
	@echo "make demo SERVE=1  keep the catalog running at the end, for a look in a browser"
	@echo "make test      all tests but the exhaustive ones, some minutes on two cores"
	@echo "make test-all  all tests, with all combinations, 8 ranks and long runs"
	@echo "make test-all SHARD=1/4  a quarter of the test files (also for make test)"
	@echo "make test-torch TORCH=2.10.0  tests that depend on torch, with this version in a separate environment"
	@echo "make test-trainer TRAINER=ray  tests with ray, torchtitan or megatron in a separate environment"
	@echo "make mutants   insert each fault of tests/mutants and check that its test fails; MUTANTS=area limits"
	@echo "make check     ruff, mypy, contracts, English, docs; alone: make lint, types, contracts, english, docs"
	@echo "make docs      build the documentation site in site/"
	@echo "make bench     time dcphub, stock torch and other libraries on the same data"
	@echo "make packages  build wheel and sdist, install each extra on each Python, and try them"
	@echo "make sbom      write wheel, sdist and SBOM (CycloneDX) of the extra all to dist/; check licences"
	@echo "make format    apply the fixes and the format of ruff"
	@echo "make pictures  render the pictures of docs/: pages of the demo, a load plan"
	@echo "make client    write the generated parts of the typed client"
	@echo "make reference write docs/reference/generated: command line, REST API, settings, metrics, errors"
	@echo "make clean     remove .venv and the caches"

demo: $(DEMO_STAMP)
	@$(BIN)/python -m dcp.demo $(if $(S3),--s3) $(if $(SERVE),--serve)

# Tests start hundreds of processes: write .pyc files even where the environment disables them.
test test-all: export PYTHONDONTWRITEBYTECODE =

# Allocate large arrays in 2 MiB pages where the system offers them: tests of reading and stores take 8 % less time.
test test-all: export GLIBC_TUNABLES = glibc.malloc.hugetlb=1

test test-all: browser

test: $(STAMP)
	$(PYTEST) -m "not exhaustive" $(PYTEST_ARGS)

test-all: $(STAMP)
	$(PYTEST) $(PYTEST_ARGS)

MUTANTS ?=

mutants: $(STAMP)
	$(BIN)/python -m tests.support.mutants $(MUTANTS)

# Tests that depend on torch, with another version. A package index without NVIDIA's libraries (PIP_EXTRA_INDEX_URL)
# saves gigabytes.
TORCH ?= 2.13.0
TORCH_ENV ?= .venv-torch/$(TORCH)
TORCH_TESTS ?= tests/project/test_torch_names.py tests/project/test_api_names.py tests/planning tests/staging \
	tests/save_load tests/asynchronous tests/compatibility tests/conformance tests/reading tests/formats \
	tests/object_store/test_fsspec_storage.py

test-torch: export PYTHONDONTWRITEBYTECODE =

test-torch: $(TORCH_ENV)/.installed
	$(TORCH_ENV)/bin/python -m pytest $(WORKERS) -m "not exhaustive" $(TORCH_TESTS) $(PYTEST_ARGS)

# torch chooses its own version of setuptools
$(TORCH_ENV)/.installed: $(STAMP)
	$(BIN)/python -m venv --without-pip $(TORCH_ENV)
	grep -vE '^(torch|setuptools)==' constraints.txt > $(TORCH_ENV)/constraints.txt
	$(BIN)/python -m pip --disable-pip-version-check --python $(TORCH_ENV)/bin/python install \
		torch==$(TORCH) --editable '.[dev]' --constraint $(TORCH_ENV)/constraints.txt
	touch $@

# Trainers too large for .venv, or in conflict with its packages. The first call creates the environment.
TRAINER_ENV ?= .venv-trainers/$(TRAINER)
TRAINER_PYTHON ?= $(if $(filter megatron,$(TRAINER)),python3.12,$(BIN)/python)
TRAINER_EXTRAS = $(TRAINER)$(if $(filter ray,$(TRAINER)),$(comma)demo-s3)
TRAINER_TOOLS = hypothesis psutil pytest pytest-timeout pytest-xdist
comma = ,

test-trainer: export PYTHONDONTWRITEBYTECODE =

test-trainer: $(TRAINER_ENV)/.installed
	$(TRAINER_ENV)/bin/python -m pytest tests/trainers/test_$(TRAINER).py $(PYTEST_ARGS)

$(TRAINER_ENV)/.installed: $(STAMP)
	@test -n "$(TRAINER)" || { echo "make test-trainer TRAINER=ray, torchtitan or megatron" >&2; exit 1; }
	$(TRAINER_PYTHON) -m venv --without-pip $(TRAINER_ENV)
	$(BIN)/python -m pip --disable-pip-version-check --python $(TRAINER_ENV)/bin/python install \
		torch==$(TORCH) --editable '.[$(TRAINER_EXTRAS)]' $(TRAINER_TOOLS)
	touch $@

# Tests of the web pages need Chromium: install Debian's package where allowed. Without Chromium these tests fail with
# the reason.
browser:
	@if ! command -v chromium >/dev/null && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "Installing Chromium for the tests of the web pages."; \
		apt-get update -q >/dev/null; apt-get install -y -q chromium >/dev/null || true; \
	fi

check: lint types contracts generated english docs

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

contracts: $(STAMP)
	$(BIN)/lint-imports

# Fails if a page of `make reference` or a module of `make client` is stale.
generated: $(STAMP)
	$(BIN)/python -m tools.client --check
	$(BIN)/python -m tools.reference --check

# Fails for a link or an anchor without a target.
docs: $(STAMP)
	NO_COLOR=1 $(BIN)/zensical build --strict --clean

english: $(STAMP)
	$(BIN)/python -m tests.support.english

bench: $(BENCH_STAMP)
	$(BIN)/python -m benchmarks

packages: $(STAMP)
	$(BIN)/python -m tests.support.packages $(PACKAGES_ARGS)

SBOM_EXTRA ?= all

sbom: $(STAMP)
	$(BIN)/python -m tests.support.packages --dist dist --python $(BIN)/python --extra $(SBOM_EXTRA) $(PACKAGES_ARGS)

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

pictures: $(STAMP) browser
	$(BIN)/python -m tests.support.pictures
	$(BIN)/python -m tests.support.plan_picture

client: $(STAMP)
	$(BIN)/python -m tools.client

reference: $(STAMP)
	$(BIN)/python -m tools.reference

clean:
	rm -rf .venv .venv-torch .venv-trainers build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

# The extra bench, added to dev with the same torch.
$(BENCH_STAMP): $(STAMP)
	@echo "Installing what [bench] of pyproject.toml lists."
	$(PIP) install --editable '.[bench]' --constraint constraints.txt
	@touch $@

$(STAMP): EXTRA = dev
$(DEMO_STAMP): EXTRA = $(DEMO)

# An interpreter without ensurepip (a separate package on Debian) installs into the venv with its own pip.
# The extra dev contains those of the demo.
$(STAMP) $(DEMO_STAMP): pyproject.toml constraints.txt
	@set -e; \
	if [ $(STAMP) -nt pyproject.toml ] && [ $(STAMP) -nt constraints.txt ]; then touch $@; exit 0; fi; \
	usable='import sys, venv; from importlib.util import find_spec; \
	sys.exit(sys.version_info < (3, 11) or not (find_spec("ensurepip") or find_spec("pip")))'; \
	python=; \
	for candidate in $(or $(PYTHON),$(PYTHONS)); do \
		if "$$candidate" -c "$$usable" >/dev/null 2>&1; then python=$$candidate; break; fi; \
	done; \
	if [ -z "$$python" ]; then \
		echo "dcphub needs Python 3.11 or newer with venv and pip; tried: $(or $(PYTHON),$(PYTHONS))." >&2; \
		echo "Install Python, or give its path: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; \
		exit 1; \
	fi; \
	if ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
		echo "Creating .venv with $$("$$python" --version)."; \
		"$$python" -m venv --clear .venv >/dev/null 2>&1 || { \
			"$$python" -m venv --clear --without-pip .venv; \
			"$$python" -m pip --python $(BIN)/python install --quiet pip; \
		}; \
	fi; \
	echo "Installing what [$(EXTRA)] of pyproject.toml lists; this is done once, and takes some minutes."; \
	$(PIP) install --editable '.[$(EXTRA)]' --constraint constraints.txt; \
	touch $@
