# Everything runs in .venv, which is made when it is needed and again when the versions change.
PYTHON ?= python3.11
TORCH ?= 2.13.0
# More arguments for installing torch, such as --index-url of a CPU or CUDA build.
TORCH_ARGS ?=

# The ends of the supported range. A torch that is not a CPU build downloads gigabytes.
OLDEST_PYTHON ?= python3.11
OLDEST_TORCH ?= 2.8.0
NEWEST_PYTHON ?= python3.12
# A Python for which there is no DGL.
NODGL_PYTHON ?= python3.13
NEWEST_TORCH ?= $(TORCH)

BIN := .venv/bin
export OMP_NUM_THREADS ?= 1

# Processes that run tests at the same time: make JOBS=4 test.
JOBS ?= 2

# $(call marked,MARK): the files that have a test with a mark. To find that a file has none it is imported,
# which takes a minute for all.
marked = $$(grep -rl "mark\.$(1)\b" tests --include="test_*.py")

# $(call tests,ENVIRONMENT,MARKS,FILES): most tests, a file to each process; then those that need the machine
# for themselves, also when one of the first fails. MARKS is empty, or ends in "and"; without FILES all.
# Compiled modules are kept, whatever the environment says: the tests start hundreds of processes.
define tests
	@unset PYTHONDONTWRITEBYTECODE; status=0; \
	$(1)/bin/python -m pytest -n $(JOBS) --dist loadfile -m "$(2) not alone" --durations=20 $(3) || status=1; \
	$(1)/bin/python -m pytest -m "$(2) alone" --durations=10 $(call marked,alone) || status=1; \
	exit $$status
endef
SHORT := not slow and not system and
FAST := $(SHORT) not long and
SYSTEM := not slow and system and

# Tests whose outcome depends on a processor's arithmetic, and the names that ATen, oneDNN and MKL have
# for the instructions of older ones.
ARITHMETIC := tests/models tests/sampling tests/tasks $(addprefix tests/worker/test_,$(addsuffix .py,\
    numerics averaging reduction edge_tasks graph_tasks embeddings sharding mixed_dtypes multitask))
define test_instructions
	ATEN_CPU_CAPABILITY=$(1) ONEDNN_MAX_CPU_ISA=$(2) MKL_ENABLE_INSTRUCTIONS=$(3) \
	    $(BIN)/python -m pytest -n $(JOBS) --dist loadfile -m "$(SHORT) not alone" $(ARITHMETIC)
endef

# Those that need no DGL, where there is none; what they need could come to need it unnoticed. All with
# the Python that has none; beside the fast tests those of the modules that import it where it is there. Of
# the tests of tables two files are enough, since the others read them by the same code.
OF_TABLES := $(addprefix tests/graph/test_,$(addsuffix .py,hostile_tables malformed_tables databases texts \
    transforms queries reading_memory proposal vocabulary keys))
WITHOUT_DGL := tests/test_cli.py $(addprefix tests/,config preflight) $(addprefix tests/worker/test_,\
    $(addsuffix .py,events relations graph_tasks)) tests/prediction/test_new_graphs.py \
    $(filter-out $(OF_TABLES),$(wildcard tests/graph/test_*.py))
define test_without_dgl
	$(1)/bin/python -m pytest -n $(JOBS) --dist loadfile -m "$(SHORT) not alone" --durations=20 $(2)
endef

.DEFAULT_GOAL := help
.PHONY: help setup train test test-long test-system test-plain test-all test-nodgl mutants lint wheel docs bench data gpu gpu-parcel test-matrix test-oldest test-newest test-python313 test-instructions clean

help:
	@echo "make setup        install into .venv"
	@echo "make train        train on a generated graph of 100,000 nodes with 2 workers"
	@echo "make test         the fast tests"
	@echo "make test-long    trainings on several ranks, exports, databases"
	@echo "make test-system  those of whole commands and clusters"
	@echo "make test-plain   those with public names of Ray, Lightning and torch only"
	@echo "make test-nodgl   fast tests of what works without DGL, in an environment without it"
	@echo "make test-all     all tests"
	@echo "make mutants      plants mistakes, and sees that the tests find each"
	@echo "make lint         ruff and mypy"
	@echo "make wheel        a wheel of the package: dist"
	@echo "make docs         the documentation as a site: python3 -m http.server -d build/site"
	@echo "make bench        the benchmarks"
	@echo "make gpu          the engine on a GPU beside the CPU, as one JSON (build/gpu.json), and tests there"
	@echo "make gpu-parcel   what a GPU's machine without a network needs for that: build/parcel"
	@echo "make test-oldest  all but the slow tests on the oldest supported versions, in .venv-oldest"
	@echo "make test-newest  the same on the newest, in .venv-newest (NEWEST_PYTHON, NEWEST_TORCH)"
	@echo "make test-matrix  both, the fast tests on Python 3.13, which has no DGL, and those of arithmetic"
	@echo "                  with the instructions of older processors"

setup: .venv/.done

# $(call install,ENVIRONMENT,PYTHON,TORCH,PIP ARGUMENTS)
define install
	@$(2) -c "" || { echo "no $(2) here; name another, such as make PYTHON=python3"; exit 2; }
	$(2) -m venv $(1)
	rm -rf $(1)/lib/python3*/site-packages/raygnn  # pip leaves compiled kernels of an earlier installation
	$(1)/bin/python -m pip install --quiet $(TORCH_ARGS) torch==$(3)
	$(1)/bin/python -m pip install --quiet torch==$(3) -e ".[dev]" $(4)
	@touch $(1)/.done
endef

.venv/.done: pyproject.toml constraints.txt
	$(call install,.venv,$(PYTHON),$(TORCH),-c constraints.txt)

.venv-oldest/.done: pyproject.toml tests/constraints-oldest.txt
	$(call install,.venv-oldest,$(OLDEST_PYTHON),$(OLDEST_TORCH),-c tests/constraints-oldest.txt)

.venv-newest/.done: pyproject.toml
	$(call install,.venv-newest,$(NEWEST_PYTHON),$(NEWEST_TORCH),--upgrade --upgrade-strategy eager torch==$(NEWEST_TORCH))

.venv-3.13/.done: pyproject.toml
	$(call install,.venv-3.13,$(NODGL_PYTHON),$(NEWEST_TORCH))

# The same as .venv but for DGL, made of links.
.venv-nodgl/.done: .venv/.done
	rm -rf .venv-nodgl
	$(BIN)/python -m venv --without-pip .venv-nodgl
	find $(CURDIR)/.venv/lib/python3*/site-packages -mindepth 1 -maxdepth 1 ! -name "dgl*" \
	    -exec ln -s -t .venv-nodgl/lib/python3*/site-packages {} +
	sed '1s|.*|#!$(CURDIR)/.venv-nodgl/bin/python|' $(BIN)/raygnn > .venv-nodgl/bin/raygnn
	chmod +x .venv-nodgl/bin/raygnn
	@touch $@

train: setup
	$(BIN)/raygnn train jobs/products-100k.yaml --overwrite

test: setup
	$(call tests,.venv,$(FAST))

test-long: setup
	@unset PYTHONDONTWRITEBYTECODE; $(BIN)/python -m pytest -n $(JOBS) --dist loadfile -m "$(SHORT) long" --durations=20 $(call marked,long)

test-system: setup
	$(call tests,.venv,$(SYSTEM),$(call marked,system))

# With public names of Ray, Lightning and torch only.
test-plain: export RAYGNN_PLAIN = 1
test-plain: setup
	$(call tests,.venv,$(SYSTEM) not comfort and,$(call marked,system))

test-all: setup
	$(call tests,.venv)

test-nodgl: .venv-nodgl/.done
	$(call test_without_dgl,.venv-nodgl,$(WITHOUT_DGL))

# ONLY=sampler takes those whose name or file has that in it.
mutants: setup
	$(BIN)/python -m tests.mutants.run --jobs $(JOBS) --only "$(ONLY)"

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

wheel: setup
	rm -rf build/lib build/bdist.* dist
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .

# The variable silences an advertisement of the theme's.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# SCALE=small takes minutes instead of half an hour. All are run, also when one misses a limit.
SCALE ?= full
BENCHMARKS = engine partition product $(if $(filter full,$(SCALE)),scaling job evaluation tables inference start frozen resume accuracy guard monitoring)
bench: setup
	status=0; for name in $(BENCHMARKS); do \
	    SCALE=$(SCALE) $(BIN)/python benchmarks/bench_$$name.py || status=1; done; exit $$status

# On a machine with a GPU, and without a network: with the packages that are there and those that
# `make gpu-parcel` has put into build/parcel, to be taken there. Tests train on the GPU.
GPU_PYTHON ?= python3
GPU_VERSION ?= 3.12
GPU_JOBS ?= 8
GPU_ARGS ?=
GPU_TESTS := tests/sampling/test_devices.py tests/tasks/test_learned_rows.py $(addprefix tests/worker/test_,\
    $(addsuffix .py,averaging sharding mixed_dtypes reduction edge_tasks graph_tasks embeddings numerics \
    multitask recommenders timed_jobs training_tables relations input_kinds gradients labels pyg own_steps \
    listed_negatives edge_inputs pair_history positive_class))
gpu: export PYTHONPATH = build/parcel:.
gpu:
	mkdir -p build
	$(GPU_PYTHON) benchmarks/gpu.py --out build/gpu.json $(GPU_ARGS)
	RAYGNN_TEST_DEVICE=cuda:0 $(GPU_PYTHON) -m pytest -n $(GPU_JOBS) --dist worksteal -m "not slow" $(GPU_TESTS)

# The datasets of $RAYGNN_DATA as PyG lays them out, for jobs/ where there is no network to download. An
# existing .venv stays as it is.
data: $(if $(wildcard $(BIN)/python),,setup)
	$(BIN)/python -m tests.support.datasets $${RAYGNN_DATA:-../shared/data} data

# All but what a torch for GPUs comes with, and what neither training nor the tests load of Ray.
gpu-parcel: setup
	rm -rf build/parcel
	$(BIN)/python -m pip install --quiet --target build/parcel --only-binary=:all: --python-version $(GPU_VERSION) \
	    $(foreach glibc,_2_28 _2_27 _2_24 _2_17 2014 1,--platform manylinux$(glibc)_x86_64) \
	    -c constraints.txt "ray[default,serve,train]" duckdb pydantic tensorboardX plotly pymetis pathspec \
	    hypothesis pytest-timeout pytest-xdist
	cd build/parcel && rm -rf numpy* pandas* pyarrow* scipy* grpc grpcio-* cryptography* ray/jars ray/rllib ray/llm \
	    ray/dashboard/client

test-matrix: test-oldest test-newest test-python313 test-instructions

test-oldest: .venv-oldest/.done
	$(call tests,.venv-oldest,not slow and)

test-newest: .venv-newest/.done
	$(call tests,.venv-newest,not slow and)

test-python313: .venv-3.13/.done
	$(call test_without_dgl,.venv-3.13)

test-instructions: setup
	$(call test_instructions,avx2,AVX2,AVX2)
	$(call test_instructions,default,SSE41,SSE4_2)

clean:
	rm -rf dist .venv .venv-oldest .venv-newest .venv-3.13 .venv-nodgl build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
