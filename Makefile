# Every command of the project. `make train` and `make test` are all a newcomer needs: each makes its own environment.
# Options: EXTRA=cuda12|cuda13 for a GPU (in an environment of its own), ARGS="..." for the command that runs,
# PYTHON=/path/to/python for the interpreter of a new environment (searched for by default), WORKERS=2 test processes,
# MINUTES=5 of fuzzing, CASES=3 of each test that the gates leave out.
WORKERS ?= 2
MINUTES ?= 5
CASES ?= 3
VENV ?= .venv$(addprefix -,$(EXTRA))
NEWEST := .venv-newest
OLDEST := .venv-oldest
NEWEST_TORCH := .venv-newest-torch
NEWEST_COMPILE := .venv-newest-compile
TRAINERS := .venv-trainers
LEVANTER := .venv-levanter
EIGHT_DEVICES := XLA_FLAGS=--xla_force_host_platform_device_count=8
CONSTRAINTS := tools/constraints-jax-0.11.2.txt
OF_TORCH := tests/torch_bridge tests/experiments/test_bench_torch.py
WITHOUT_TORCH := pallas_ce flax_modules tests $(addprefix --ignore=,$(OF_TORCH))
PY = $(VENV)/bin/python
# A process that has run its share takes from the other's: the times of tests differ a hundredfold.
PYTEST = -m pytest -n $(WORKERS) --dist=worksteal
export PYTHON TAG

# Without a CUDA extra the environment can only compute on the CPU, and JAX need not look for a GPU.
ifeq (,$(findstring cuda,$(EXTRA)))
JAX_PLATFORMS ?= cpu
export JAX_PLATFORMS
endif

.DEFAULT_GOAL := help
.PHONY: help train test test-all setup environments format lint typecheck docs pytest wheel release \
	test-nightly test-newest test-levanter test-extras test-installs test-gpu bench-check fuzz mutants clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' Makefile

train: $(VENV)/.train  ## train the language model (EXTRA=cuda12 or cuda13 on a GPU, ARGS="--help" for its options)
	@$(PY) -m experiments.train_lm $(ARGS)

test: $(VENV)/.dev  ## run every quality gate (nine minutes on two processors)
	@$(MAKE) --no-print-directory --jobs=$(WORKERS) typecheck wheel docs lint
	@$(MAKE) --no-print-directory --jobs=2 pytest $(BESIDE)

# What is drawn, only with more examples. Beside the tests the network brings the environments of the others.
test-all: $(VENV)/.dev  ## run the gates and everything that they leave out (forty-five minutes)
	@$(MAKE) --no-print-directory test BESIDE=environments ARGS='-m "not gpu and not nightly and not drawn"'
	@$(MAKE) --no-print-directory test-nightly

setup: $(VENV)/.dev  ## make the development environment

# Those of other versions; the development environment's TPU compiler is no part, as it would change under running tests.
environments: $(NEWEST)/.dev $(NEWEST_TORCH)/.dev $(NEWEST_COMPILE)/.dev $(TRAINERS)/.keras-hub $(OLDEST)/.dev  ## make the environments of the newest and oldest versions

format: $(VENV)/.dev  ## format the code and apply the linter's safe fixes
	@$(PY) -m ruff check --fix-only --quiet .
	@$(PY) -m ruff format .

lint: $(VENV)/.dev  ## check format, lint, layers and words
	@$(PY) -m ruff format --check .
	@$(PY) -m ruff check .
	@$(VENV)/bin/lint-imports --no-logo --no-cache
	@$(PY) tools/check_words.py $$(git ls-files '*.py' '*.md')

typecheck: $(VENV)/.dev  ## check types
	@$(PY) -m mypy

docs: $(VENV)/.dev  ## make the documentation site in build/docs; a warning is an error
	@$(PY) -m sphinx --fail-on-warning --keep-going --quiet docs build/docs

pytest: $(VENV)/.dev  ## run the tests and doctests on the CPU (ARGS="-k name" to choose)
	@$(PY) $(PYTEST) $(ARGS)

wheel: $(VENV)/.dev  ## build the wheel and test it as a user would get it
	@$(PY) tools/check_wheel.py dist

release: wheel  ## build what a release publishes, where tag, version, changelog and results agree (TAG=v0.2.0)
	@$(PY) tools/check_release.py dist

# Of Triton's table, an architecture times a kind of call, a fifth: each kind on several architectures.
# With the oldest releases without the GPU interpreter, a third of the time: its jax is the one that `make pytest` interprets with.
test-nightly: $(VENV)/.dev environments $(if $(EXTRA),,$(VENV)/.tpu)  ## run what the gates leave out: more cases, more drawn examples
	@$(PY) $(PYTEST) -m "not gpu and (nightly or drawn)" --hypothesis-profile=thorough --cases=$(CASES) $(ARGS)
	@$(MAKE) --no-print-directory test-newest
	@$(EIGHT_DEVICES) $(TRAINERS)/bin/python $(PYTEST) -m nightly --cases=$(CASES) tests/flax_modules $(ARGS)
	@$(OLDEST)/bin/python -c 'import jax, numpy; print("jax", jax.__version__, "numpy", numpy.__version__)'
	@$(OLDEST)/bin/python $(PYTEST) -m "not gpu and not slow and not nightly" --in-all=1 $(WITHOUT_TORCH) --ignore=tests/mosaic_gpu $(ARGS)

# As XLA compiles for users, where the gates take its quicker emitters (tests/conftest.py).
test-newest: $(NEWEST)/.dev $(NEWEST_TORCH)/.dev $(NEWEST_COMPILE)/.dev  ## run tests on the newest jax and the newest PyTorch
	@XLA_FLAGS=--xla_backend_optimization_level=0 $(NEWEST)/bin/python $(PYTEST) -m "not gpu and not slow" --in-all=1 $(WITHOUT_TORCH) $(ARGS)
	@$(NEWEST_COMPILE)/bin/python $(PYTEST) -m "not gpu" tests/mosaic_gpu/test_compiled.py -k "test_kernels[ or test_products" $(ARGS)
	@$(NEWEST_TORCH)/bin/python -c 'import torch; print("torch", torch.__version__)'
	@$(NEWEST_TORCH)/bin/python $(PYTEST) -m "not gpu and not slow and not nightly" --in-all=2 torch_bridge $(OF_TORCH) $(ARGS)

# Apart from the other trainers: it asks for an older optax, and is 1.8 GB.
test-levanter: $(LEVANTER)/.dev  ## compare the loss with Levanter's own
	@$(EIGHT_DEVICES) $(LEVANTER)/bin/python -m pytest -m nightly tests/flax_modules -k test_levanter $(ARGS)

test-extras: wheel  ## show that every extra resolves (two minutes, needs the network)
	@$(PY) tools/check_extras.py dist

test-installs: wheel  ## follow the quick starts in fresh environments (eight minutes, needs the network)
	@$(PY) tools/check_installs.py dist

test-gpu: $(VENV)/.dev  ## run the tests that need a GPU (with EXTRA=cuda12 or cuda13)
	@$(PY) -m pytest -m gpu $(ARGS)

bench-check: $(VENV)/.dev  ## compare the head's time and memory on a GPU with the shipped results (with EXTRA=cuda12 or cuda13)
	@$(PY) -m experiments.bench check

fuzz: $(VENV)/.dev  ## try new examples of what tests draw for MINUTES=5, and keep those that fail
	@$(PY) -m pytest -p tests.fuzzing -n $(WORKERS) -m "drawn and not gpu" --hypothesis-profile=fuzz --minutes=$(MINUTES) $(ARGS)

mutants: $(VENV)/.dev  ## plant faults one by one and show which test finds each (hours; ARGS="tiles rows" to choose)
	@$(PY) tools/mutants.py $(ARGS)

clean:  ## remove environments, builds and caches
	rm -rf .venv .venv-* build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp says which extras the environment holds; installing runs again when what it depends on changes. The second file
# has the version, which an environment keeps as it was when installed.
DECLARED := pyproject.toml pallas_ce/__init__.py

$(VENV)/.train: $(DECLARED) $(CONSTRAINTS)
	@tools/setup-environment $(VENV) experiments$(addprefix $(comma),$(EXTRA)) -c $(CONSTRAINTS)
	@touch $@

$(VENV)/.dev: $(DECLARED) $(CONSTRAINTS)
	@tools/setup-environment $(VENV) dev,docs,experiments,qlora,$(or $(EXTRA),gpu-compile) -c $(CONSTRAINTS)
	@touch $@ $(VENV)/.train

# In the environment without a GPU's libraries: beside them JAX would look for a TPU first.
$(VENV)/.tpu: $(VENV)/.dev
	@tools/setup-environment $(VENV) tpu-compile -c $(CONSTRAINTS)
	@touch $@

# Those that compile for a GPU, with the newest jax's assembler, and PyTorch, 6 GB, have one each of their own.
OPTIONS_newest := dev,experiments --upgrade
OPTIONS_newest-compile := dev,flax,gpu-compile --upgrade
OPTIONS_newest-torch := dev,experiments,trl --upgrade
OPTIONS_trainers := dev,trainers -c $(CONSTRAINTS)
OPTIONS_levanter := dev,flax marin-levanter -c $(CONSTRAINTS)
OPTIONS_oldest := dev,experiments -c tools/constraints-oldest.txt
$(TRAINERS)/.dev $(LEVANTER)/.dev: $(CONSTRAINTS)
$(OLDEST)/.dev: tools/constraints-oldest.txt
$(NEWEST)/.dev $(NEWEST_TORCH)/.dev $(NEWEST_COMPILE)/.dev $(TRAINERS)/.dev $(LEVANTER)/.dev $(OLDEST)/.dev: .venv-%/.dev: $(DECLARED)
	@tools/setup-environment .venv-$* $(OPTIONS_$*)
	@touch $@

# Without what it asks for: TensorFlow, which its preprocessors alone need.
$(TRAINERS)/.keras-hub: $(TRAINERS)/.dev
	@$(TRAINERS)/bin/python -m pip install -qq --no-compile --disable-pip-version-check --no-deps keras-hub -c $(CONSTRAINTS)
	@touch $@

comma := ,
