# Everything runs in .venv, which the first target that needs it makes: Python 3.11 or newer, pip and make are
# all that has to be there. `make PYTHON=/path/to/python test` picks the interpreter.

PYTHON ?=
# In the order of how well they are tested; the first that is there, new enough and able to make a venv wins.
PYTHONS = python3.11 python3 python3.12 python3.13 python3.14 python

BIN = .venv/bin
PIP = $(BIN)/python -m pip --disable-pip-version-check
# What is installed has a stamp each: all that development needs, or only what the demo does, which is half of it.
STAMP = .venv/.installed
BENCH_STAMP = .venv/.installed-bench
DEMO = demo$(if $(S3),-s3)
DEMO_STAMP = .venv/.installed-$(DEMO)

# One more than the two cores, because tests wait for a third of their time; each worker takes ten seconds of a
# core to start. A file stays on one worker; tests/support/shards.py has the order of files.
WORKERS ?= -n 3 --dist loadfile --no-loadscope-reorder
PYTEST_ARGS ?=
# SHARD=2/4 runs the second quarter of the files, for four machines
SHARD ?=
PYTEST = $(BIN)/python -m pytest $(WORKERS) $(if $(SHARD),--shard=$(SHARD))
PACKAGES_ARGS ?=

.PHONY: help demo test test-all test-torch test-trainer mutants browser check lint types contracts english bench packages sbom format pictures client reference docs generated clean

help:
	@echo "make demo      train, kill in a save, resume on other ranks, flip a bit, serve; checks every claim"
	@echo "make demo S3=1 the same on an S3 server, which it starts"
	@echo "make demo SERVE=1  keeps the catalog up at the end, to look at it in a browser"
	@echo "make test      tries every promise, in some minutes on two cores"
	@echo "make test-all  all tests: also every combination, world size 8 and long runs"
	@echo "make test-all SHARD=1/4  a quarter of them, as of make test; for four machines"
	@echo "make test-torch TORCH=2.10.0  what depends on torch, with that version, in an environment of its own"
	@echo "make test-trainer TRAINER=ray  or torchtitan, megatron: with that package, in an environment of its own"
	@echo "make mutants   seeds each fault of tests/mutants, and says which test finds it; MUTANTS=area chooses"
	@echo "make check     ruff, mypy, contracts, English, docs; alone: make lint, types, contracts, english, docs"
	@echo "make docs      the site, in site/"
	@echo "make bench     ours, stock torch and others in turn, on the same data"
	@echo "make packages  a wheel and an sdist, installed with each extra on each Python, and tried"
	@echo "make sbom      wheel, sdist and SBOM (CycloneDX) of the extra all, in dist/; checks licences"
	@echo "make format    what ruff can repair by itself"
	@echo "make pictures  the pictures of docs/: pages of the demo, and a plan"
	@echo "make client    write the generated parts of the typed client"
	@echo "make reference write docs/reference/generated: command line, REST API, settings, metrics, errors"
	@echo "make clean     remove .venv and the caches"

demo: $(DEMO_STAMP)
	@$(BIN)/python -m dcp.demo $(if $(S3),--s3) $(if $(SERVE),--serve)

# Tests start hundreds of processes: what they import is compiled once, whatever the environment says of that.
test test-all: export PYTHONDONTWRITEBYTECODE =

# Large arrays get pages of 2 MiB, where the system offers them: tests of reading and of stores take a twelfth less.
test test-all: export GLIBC_TUNABLES = glibc.malloc.hugetlb=1

test test-all: browser

test: $(STAMP)
	$(PYTEST) -m "not exhaustive" $(PYTEST_ARGS)

test-all: $(STAMP)
	$(PYTEST) $(PYTEST_ARGS)

MUTANTS ?=

mutants: $(STAMP)
	$(BIN)/python -m tests.support.mutants $(MUTANTS)

# With another torch: what depends on it. An index without NVIDIA's libraries (PIP_EXTRA_INDEX_URL) saves some GB.
TORCH ?= 2.13.0
TORCH_ENV ?= .venv-torch/$(TORCH)
TORCH_TESTS ?= tests/project/test_torch_names.py tests/project/test_api_names.py tests/planning tests/staging \
	tests/save_load tests/asynchronous tests/compatibility tests/conformance tests/reading tests/formats \
	tests/object_store/test_fsspec_storage.py

test-torch: export PYTHONDONTWRITEBYTECODE =

test-torch: $(TORCH_ENV)/.installed
	$(TORCH_ENV)/bin/python -m pytest $(WORKERS) -m "not exhaustive" $(TORCH_TESTS) $(PYTEST_ARGS)

# setuptools as well is that version's to choose
$(TORCH_ENV)/.installed: $(STAMP)
	$(BIN)/python -m venv --without-pip $(TORCH_ENV)
	grep -vE '^(torch|setuptools)==' constraints.txt > $(TORCH_ENV)/constraints.txt
	$(BIN)/python -m pip --disable-pip-version-check --python $(TORCH_ENV)/bin/python install \
		torch==$(TORCH) --editable '.[dev]' --constraint $(TORCH_ENV)/constraints.txt
	touch $@

# Trainers that are too large to be beside the others, or cannot. The first call makes the environment.
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

# Tests of the web pages need a browser, which is no package of Python: Debian's, where it may be installed. Without
# it they fail, and say why.
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

# On top of all that development needs, with the same torch.
$(BENCH_STAMP): $(STAMP)
	@echo "Installing what [bench] of pyproject.toml lists."
	$(PIP) install --editable '.[bench]' --constraint constraints.txt
	@touch $@

$(STAMP): EXTRA = dev
$(DEMO_STAMP): EXTRA = $(DEMO)

# Where the interpreter comes without ensurepip (Debian splits it off), its own pip installs into the venv.
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
		echo "Install one, or name it: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; \
		exit 1; \
	fi; \
	if ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
		echo "Making .venv with $$("$$python" --version)."; \
		"$$python" -m venv --clear .venv >/dev/null 2>&1 || { \
			"$$python" -m venv --clear --without-pip .venv; \
			"$$python" -m pip --python $(BIN)/python install --quiet pip; \
		}; \
	fi; \
	echo "Installing what [$(EXTRA)] of pyproject.toml lists; this is done once, and takes some minutes."; \
	$(PIP) install --editable '.[$(EXTRA)]' --constraint constraints.txt; \
	touch $@
