# Targets make the virtual environment that they need, so that a fresh machine needs nothing but Python and make.

VENV ?= .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
CONSTRAINTS ?= constraints.txt
OUT ?= runs/tiny
SECONDS_EACH ?= 1050
# One thread a process: the tests run in several, and the models are small.
# What is compiled is kept: processes that tests start would else read each source anew.
TEST_ENV := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 PYTHONDONTWRITEBYTECODE=
WORKERS ?= auto
# glibc keeps what was freed: else the kernel clears pages anew in one run and not in the next.
STEADY := MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=2000000000 MALLOC_TOP_PAD_=67108864
# Options of `make bench`: BENCH='-k clustering --write "why it changed"'.
BENCH ?=
# Options of `make serve`.
SERVE ?=
# The worlds of `make demo`: so many, of seeds from this one on.
WORLDS ?= 20
SEED ?= 100
SOURCE ?= $(notdir $(STOCK:/=))
STOCK_OUT ?= runs/stock.jsonl

.PHONY: install serve demo test test-shard test-seconds test-page test-numeric test-oldest test-stock check lint types house house-write docs train pictures bench clean

install: $(STAMP)

$(PY):
	@set -e; for python in python3 python3.11 python3.12 python3.13; do \
		if $$python -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
			echo "making $(VENV) with $$($$python --version)"; exec $$python -m venv $(VENV); \
		fi; \
	done; echo "error: no Python 3.11 or newer with venv was found; install one and run make again." >&2; exit 1

# torch first, by itself: the build that pip finds for this machine is the one everything else must accept.
# An environment whose making was broken off may lack pip; it is mended here.
$(STAMP): pyproject.toml lab/pyproject.toml $(CONSTRAINTS) | $(PY)
	@$(PY) -m pip --version >/dev/null 2>&1 || $(PY) -m ensurepip --default-pip >/dev/null
	$(PY) -m pip install --quiet $$(grep '^torch==' $(CONSTRAINTS))
	$(PY) -m pip install --quiet -c $(CONSTRAINTS) -e '.[dev,serve]' -e lab
	@touch $@

# The server and its page at http://127.0.0.1:8000; SERVE='--model NAME --recipe mosaic'.
serve: $(STAMP)
	$(VENV)/bin/mmaccel serve $(SERVE)

demo: $(STAMP)
	$(VENV)/bin/mmaccel-lab demo --worlds $(WORLDS) --seed0 $(SEED)

test: $(STAMP)
	$(TEST_ENV) $(PY) -m pytest -n $(WORKERS)

# One shard of the slow tests, picked by the count of commits; in a shallow clone by the clock, outside git the first. SHARDS=1
# runs all, in hours.
SHARDS ?= 12
SHARD ?= $(shell s=$$(git rev-parse --is-shallow-repository 2>/dev/null); if [ "$$s" = false ]; then git rev-list --count HEAD; \
	elif [ "$$s" = true ]; then date +%s; else echo 0; fi)
test-shard: $(STAMP)
	$(TEST_ENV) $(PY) -m pytest -n $(WORKERS) -m 'slow and not gpu and not page' --shard $(SHARD)/$(SHARDS)

# Empties tests/seconds.json, runs all tests but gpu and page, then all cases of the kernels in Triton's interpreter, and writes
# what took more than 0.2 s: tests/selection.py reads it.
test-seconds: $(STAMP)
	echo '{}' > tests/seconds.json
	$(TEST_ENV) $(PY) -m pytest -n $(WORKERS) -m 'not gpu and not page' --write-seconds
	TRITON_INTERPRET=1 $(TEST_ENV) $(PY) -m pytest -n $(WORKERS) tests/backends/*_cases.py tests/models/together_cases.py -m '' --write-seconds

# What hangs on the products of a CPU, by the kernels of several processors.
test-numeric: $(STAMP)
	$(TEST_ENV) $(PY) -m tests.numeric -n $(WORKERS)

# The lower bound of every dependency, in an environment of its own.
test-oldest:
	$(MAKE) test VENV=.venv-oldest CONSTRAINTS=constraints-oldest.txt

# transformers' own model and generation tests, of the checkout STOCK, on accelerated models; SOURCE says which version it is.
test-stock: $(STAMP)
	@test -n "$(STOCK)" || { echo "error: give STOCK=<a checkout of transformers with its tests>." >&2; exit 2; }
	$(PY) -m pip install --quiet -c constraints.txt -e '.[stock]'
	$(TEST_ENV) $(PY) bench/stock.py run "$(STOCK)" --source "$(SOURCE)" --out "$(STOCK_OUT)"

# The page of `make serve` in a browser, which is found, or installed where apt-get may.
test-page: $(STAMP)
	@command -v chromium chromium-browser google-chrome >/dev/null || apt-get install -y -qq --no-install-recommends chromium \
		|| { echo "error: no chromium is here and none could be installed; page tests did not run." >&2; exit 2; }
	$(TEST_ENV) $(PY) -m pytest tests/serve/test_page.py -m page

# Layouts of lmms-eval, and replicas on Ray Serve; an environment of its own, for lmms-eval wants an older PyAV.
.PHONY: test-many
test-many:
	$(MAKE) install VENV=.venv-many
	grep -v '^av==' constraints.txt > .venv-many/constraints.txt
	.venv-many/bin/python -m pip install --quiet -c .venv-many/constraints.txt -e '.[eval,ray]'
	$(TEST_ENV) .venv-many/bin/python -m pytest tests/lmms tests/serve/test_replicas.py tests/serve/test_placement.py -m 'slow or not slow'

lint: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: $(STAMP)
	$(PY) -m mypy

# The counts of the house beside their marks, and its walls; house-write lowers the ceilings and writes the page's arrows.
house house-write: $(STAMP)
	$(TEST_ENV) $(PY) -m tests.house $(if $(filter house-write,$@),--write)

# The site, from the pages in docs/ and the docstrings; a warning is an error. It reads no network once its packages are there.
docs: $(STAMP)
	$(PY) -m pip install --quiet -c $(CONSTRAINTS) -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet

check: lint types house test

train: $(STAMP)
	$(PY) -m mmaccel_lab.train all --out $(OUT) --seconds $(SECONDS_EACH)
	$(PY) -m mmaccel_lab.train install $(OUT)

# Every picture of docs/pictures, from rows of bench/results.
pictures: $(STAMP)
	$(PY) bench/pictures.py

# Each part beside its twin, its ratio beside the committed one: bench/test_ratios.py.
bench: $(STAMP)
	$(TEST_ENV) $(STEADY) $(PY) -m pytest bench -o addopts='' -q --benchmark-only $(BENCH)

clean:
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .benchmarks
