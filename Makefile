# Every target makes what it needs: an environment in .venv, the compiled library where there is a
# GPU (or where FLASH_ATTN_CUDA_ARCHS asks for one). `make` lists them.

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
JOBS ?= $(shell n=$$(nproc); echo $$((n < 8 ? n : 8)))
ARGS ?=
FILTER ?=
TOOLS ?=

PY := $(VENV)/bin/python
# One thread per test process: the processes are the parallelism.
PYTEST := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(PY) -m pytest -n $(JOBS) --dist worksteal

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help demo test newest unit coverage bench tune figures pictures build spills sass sanitize docs lint format hooks wheel wheel3 sdist clean

help:  ## this list
	@sed -n 's/^\([a-z0-9]*\):.*## \(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 12

demo: $(VENV)/.env-demo build  ## train a small GPT, generate from it, plot attention's time and memory
	$(PY) -m examples.train_gpt $(ARGS)

test: $(VENV)/.env-test build  ## the whole suite; ARGS="-k rotary" for some of it
	$(PY) -m tests.kernels.build
	$(PYTEST) $(ARGS)

newest:  ## torch's own attention, with the newest torch that pip finds
	$(PYTHON) -m build_tools.newest_torch $(ARGS)

unit: $(VENV)/.env-test  ## the tests of csrc/core, compiled for the host
	$(PYTEST) tests/unit $(ARGS)

# Without the kernels that are compiled for the host: they run the same Python.
coverage: $(VENV)/.env-test  ## which lines of the Python code the tests run, and whether they are enough
	$(PYTEST) --cov --ignore=tests/kernels --ignore=tests/unit -k "not host and not import_is_quick" $(ARGS)

bench: $(VENV)/.env-demo build  ## benchmarks, to build/bench; ARGS="--help" for what there is
	$(PY) -m benchmarks $(ARGS)

tune: $(VENV)/.env-demo build  ## fit the cost model to this GPU: csrc/plan/machines/, ten minutes; ARGS="--help"
	$(PY) -m benchmarks tune $(ARGS)

figures: $(VENV)/.env-demo build  ## the figures that the documents quote, and their pictures; ARGS="fwd,bwd"
	$(PY) -m benchmarks --record $(ARGS)
	$(PY) -m benchmarks.pictures

pictures: $(VENV)/.env-demo  ## the documents' pictures, from the committed figures
	$(PY) -m benchmarks.pictures

build: $(VENV)/.env-base  ## compile the kernels in place: this GPU's, or FLASH_ATTN_CUDA_ARCHS="80;90a"
	@$(PY) -m build_tools.build

spills: $(VENV)/.env-base  ## registers, spills, shared memory and compile time of every kernel
	@$(PY) -m build_tools.report

sass: $(VENV)/.env-base  ## machine code to build/sass; FILTER=bf16_d128 for some of it
	@$(PY) -m build_tools.sass $(FILTER)

sanitize: $(VENV)/.env-test build  ## small GPU calls under compute-sanitizer; TOOLS="memcheck racecheck"
	@$(PY) -m build_tools.sanitize $(TOOLS)

docs: $(VENV)/.env-docs  ## the documentation's site, to build/site, with links checked
	$(PY) -m build_tools.make_site

lint: $(VENV)/.env-dev  ## ruff, clang-format, file sizes
	$(PY) -m build_tools.lint

format: $(VENV)/.env-dev  ## rewrite the sources as lint wants them
	$(PY) -m build_tools.lint --fix

hooks: $(VENV)/.env-dev  ## lint before every commit
	$(VENV)/bin/pre-commit install

# Every GPU that the kernels run on has machine code of its own (docs/install.md): Jetsons have Arm CPUs.
RELEASE_ARCHS := 80;86;90a;100;120$(if $(filter aarch64,$(shell uname -m)),;87;110)

wheel: export FLASH_ATTN_CUDA_ARCHS := $(or $(FLASH_ATTN_CUDA_ARCHS),$(RELEASE_ARCHS))
wheel: $(VENV)/.env-dev  ## one wheel for every Python >= 3.10 and torch >= 2.10, to dist/
	rm -rf build/lib* build/bdist* dist/*.whl
	$(PY) -m build --wheel --no-isolation
	$(PY) -m build_tools.manylinux dist/*.whl
	$(PY) -m build_tools.check_wheel dist/*.whl
	$(if $(filter none,$(FLASH_ATTN_CUDA_ARCHS)),,$(VENV)/bin/abi3audit --strict --assume-minimum-abi3 3.10 dist/*.whl)
	$(PY) -m build_tools.try_wheel dist/*.whl

wheel3: $(VENV)/.env-dev  ## FlashAttention-3's names on this library: one pure wheel, to dist/
	rm -rf dist/flash_attn_3-*.whl flash-attn-3/build
	$(PY) -m build --wheel --no-isolation --skip-dependency-check --outdir dist flash-attn-3
	$(PY) -m build_tools.check_wheel dist/flash_attn_3-*.whl

sdist: $(VENV)/.env-dev  ## a source distribution that builds offline, to dist/
	rm -f dist/*.tar.gz
	$(PY) -m build --sdist --no-isolation

clean:  ## remove what was built; the environment, headers and ccache stay
	rm -rf build dist *.egg-info flash-attn-3/build flash-attn-3/*.egg-info flash_attn/*.so .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

# A stamp per set of extras, so that a second run starts at once.
$(VENV)/.env-base $(VENV)/.env-demo $(VENV)/.env-test $(VENV)/.env-docs $(VENV)/.env-dev: $(VENV)/.env-%: pyproject.toml build_tools/make_env.py
	$(PYTHON) build_tools/make_env.py $(VENV) $(filter-out base,$*) --torch '$(TORCH)'
	@touch $@ $(VENV)/.env-base
