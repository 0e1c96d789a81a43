# Commands for users and developers; `make` lists them. All outputs go to .venv and build/.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
NATIVE := $(shell find ffi cmake -type f ! -name '*.cu')
PIP := $(BIN)/uv pip install -q --python $(BIN)/python
# Runs test files in parallel. More than four at a time would compete for processors with their own ranks. The processes
# share bytecode: uv installs none, and some environments forbid to write it. A process that compiles JAX's sources takes
# three seconds longer to start.
PYTEST := env -u PYTHONDONTWRITEBYTECODE PYTHONPYCACHEPREFIX=$(abspath build/pycache) $(BIN)/python -m pytest \
  --numprocesses auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder
# Native tests at once where nothing else runs: their threads and processes wait for each other half of the time.
NATIVE_TESTS_AT_ONCE := $(shell expr 2 \* $$(getconf _NPROCESSORS_ONLN))
SHARD ?=

.PHONY: help setup train test test-all test-python test-native test-jax test-asan test-tsan mutants cuda gpu-smoke gpu-kernels gpu-timings gpu-jax gpu-ranks gpu-status stress soak bench lint format size wheel wheel-cuda clean docs

help:
	@echo "make train      set up, then train models/moe on this machine; MODEL=tp, zero, cp, pp or mesh: another"
	@echo "                (TRAIN_ARGS=... for options)"
	@echo "make test       set up, then run all tests of the default size: ten minutes on two cores"
	@echo "make test-all   run all tests of the full size; SHARD=2/4: the second quarter of the tests that make test omits"
	@echo "make test-jax   run the tests that depend on the version of JAX"
	@echo "make mutants    run the tests on sources with one deliberate mistake each: hours (MUTANTS_ARGS=... for options)"
	@echo "make gpu-smoke  tests on a GPU, without downloads; then gpu-kernels, gpu-timings, gpu-jax, gpu-ranks. OUT=folder"
	@echo "                for records; NCCL=folder of NCCL 2.30.7 or later"
	@echo "make stress     repeat the tests of concurrency and failures: hours"
	@echo "make soak       run 200,000 random collectives between processes, with random stops (SOAK_ARGS=... for options)"
	@echo "make test-asan  run the native tests under AddressSanitizer; test-tsan: under ThreadSanitizer"
	@echo "make bench      compare the collectives with jax.lax (BENCH_ARGS=... for options)"
	@echo "make cuda       build the module for NVIDIA GPUs with the compiler from PyPI; needs no GPU and no driver"
	@echo "make lint       check format, lint and types; make format: apply the formatters"
	@echo "make docs       build the documentation as a site: build/site/index.html"
	@echo "make size       print the lines of code per folder"
	@echo "make wheel      build the wheel into dist/; wheel-cuda: the wheel of the CUDA module"
	@echo "make clean      remove all outputs of make"
	@echo "PYTHON=python3.12 selects the interpreter, VENV=.venv312 the folder of its environment"

# Build tools and dependencies come first. The package is then built without isolation, so that a change of the native
# code recompiles only the files that depend on it. The build uses the installed jaxlib instead of the oldest one: the
# module runs only in this environment.
BUILD_PACKAGES = import tomllib; requires = tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"]; \
  print(*(requirement for requirement in requires if not requirement.startswith("jaxlib")))

$(VENV)/deps: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip --disable-pip-version-check -q install uv
	$(PIP) cmake ninja $$($(BIN)/python -c '$(BUILD_PACKAGES)') -r pyproject.toml --extra models
	touch $@

# The tests of docs/guide/clusters.md use the wheels of Open MPI and MPICH. Both install bin/mpirun, so MPICH gets a prefix.
$(VENV)/test-deps: $(VENV)/deps
	$(PIP) -r pyproject.toml --extra hosts --group test
	$(PIP) --prefix $(abspath $(VENV))/mpich mpich
	touch $@

# The module's build folder. The builds of the CUDA module and of the native tests use its libraries too.
MODULE_BUILD := build/module$(patsubst .venv%,%,$(VENV))
# Such a folder of another environment, whose libraries the module uses: they depend neither on Python nor on jaxlib.
LIBRARIES ?=
# Host code of the CUDA module in that environment's build of the native tests, if there is one.
CUDA_LIBRARIES := $(patsubst %/cuda_host.cmake,%,$(wildcard $(LIBRARIES:build/module%=build/native%)/cuda_host.cmake))
CMAKE_LIBRARIES := -DJAXCOMM_LIBRARIES=$(abspath $(MODULE_BUILD))
$(VENV)/installed: $(VENV)/deps CMakeLists.txt pyproject.toml $(NATIVE)
	PATH=$(abspath $(BIN)):$$PATH $(PIP) --no-build-isolation --no-deps -C build-dir=$(MODULE_BUILD) \
	  -C cmake.define.JAXCOMM_WERROR=$(if $(CI),ON,OFF) -C cmake.define.JAXCOMM_LIBRARIES=$(abspath $(LIBRARIES)) -e .
	cp -r "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("platlib"))')/jaxcomm/_core" jaxcomm/  # for mypy
	touch $@

setup: $(VENV)/installed

# Compiles changed files of the libraries without a new installation of the module.
.PHONY: libraries
$(MODULE_BUILD)/libraries.cmake:
	rm -f $(VENV)/installed
	$(MAKE) --no-print-directory setup
libraries: $(MODULE_BUILD)/libraries.cmake
	MAKEFLAGS= $(BIN)/cmake --build $(or $(LIBRARIES),$(MODULE_BUILD)) --target jaxcomm_native
	MAKEFLAGS= $(BIN)/cmake --build $(MODULE_BUILD) --target jaxcomm_handlers jaxcomm_attributes
	$(if $(CUDA_LIBRARIES),MAKEFLAGS= $(BIN)/cmake --build $(CUDA_LIBRARIES) --target jaxcomm_cuda_objects)
# nvcc reads a variable of this name from the environment.
unexport LIBRARIES

# The compiler and NCCL's headers are in a separate folder: the environment of the tests has no NVIDIA package.
CUDA_WHEELS := build/cuda/wheels
# Value of CMAKE_CUDA_ARCHITECTURES; by default all generations of GPUs.
CUDA_ARCHITECTURES ?=
# PTX of one generation of GPUs. The full size also runs ptxas, for all generations, which takes twenty times as long.
TEST_ARCHITECTURES := 90-virtual
# One build folder per flavour of the native tests and per environment: they are built with its jaxlib. That of no
# sanitizer also has the CUDA module that the tests import, because both link the same host code.
NATIVE_BUILD := build/native$(patsubst .venv%,%,$(VENV))
ifeq ($(CUDA_ARCHITECTURES),$(TEST_ARCHITECTURES))
CUDA_BUILD := $(NATIVE_BUILD)
CUDA_CONFIGURED := $(NATIVE_BUILD)/build.ninja
else
CUDA_BUILD := build/cuda/$(notdir $(VENV))$(CUDA_ARCHITECTURES:%=-%)
CUDA_CONFIGURED := $(CUDA_BUILD)/configured
endif
CUDA_PACKAGES = import tomllib; settings = tomllib.load(open("pyproject.toml", "rb"))["tool"]["scikit-build"]; \
  print(*settings["overrides"][0]["build"]["requires"])

# The tests need cuobjdump and nvdisasm, which PyPI has from 13.2 on.
$(CUDA_WHEELS)/installed: pyproject.toml | $(VENV)/deps
	rm -rf $(CUDA_WHEELS)
	$(PIP) --no-deps --target $(CUDA_WHEELS) "nvidia-cuda-cuobjdump==13.2.*" "nvidia-cuda-nvdisasm==13.2.*" \
	  $$($(BIN)/python -c '$(CUDA_PACKAGES)')
	touch $@

CMAKE_CUDA := -DJAXCOMM_CUDA=ON -DCMAKE_CUDA_COMPILER=$(abspath $(CUDA_WHEELS))/nvidia/cu13/bin/nvcc \
  -DJAXCOMM_NCCL_INCLUDE_DIR=$(abspath $(CUDA_WHEELS))/nvidia/nccl/include $(CMAKE_LIBRARIES)
build/cuda/%/configured: $(VENV)/deps $(CUDA_WHEELS)/installed | $(MODULE_BUILD)/libraries.cmake
	$(BIN)/cmake -S . -B $(@D) -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja \
	  -DPython_EXECUTABLE=$(abspath $(BIN))/python -DJAXCOMM_WERROR=$(if $(CI),ON,OFF) $(CMAKE_CUDA) \
	  $(CUDA_ARCHITECTURES:%=-DCMAKE_CUDA_ARCHITECTURES=%)
	touch $@

# Installs the module next to jaxcomm._core. It is not part of pip's records, so a new build of jaxcomm keeps it.
cuda: $(VENV)/installed
	$(MAKE) --no-print-directory $(CUDA_CONFIGURED)  # not beside the installation, which builds in the same folder
	MAKEFLAGS= $(BIN)/cmake --build $(CUDA_BUILD) --target _cuda
	$(BIN)/cmake --install $(CUDA_BUILD) --component cuda \
	  --prefix "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("platlib"))')"

MODEL ?= moe
train: setup
	$(BIN)/python -m models.$(MODEL).train $(TRAIN_ARGS)

# All builds come first. Native and Python tests then run in parallel.
test:
	$(MAKE) --no-print-directory -j3 setup $(VENV)/test-deps $(CUDA_WHEELS)/installed
	$(MAKE) --no-print-directory build-tests
	$(MAKE) --no-print-directory cuda CUDA_ARCHITECTURES=$(TEST_ARCHITECTURES)
	$(MAKE) --no-print-directory -j2 run-native run-python

# Runs tests of concurrency and failures 20 times in a row, and all op tests between processes. Takes hours.
stress: setup $(VENV)/test-deps
	$(MAKE) --no-print-directory build-native
	$(BIN)/ctest --test-dir $(NATIVE_BUILD) --repeat until-fail:20 --output-on-failure -R 'rendezvous|node|inter_process|network'
	$(PYTEST) --size stress tests/test_stress.py tests/multiprocess \
	  tests/hosts/test_host_failures.py tests/transfer/test_chaos.py $(PYTEST_ARGS)

soak: setup $(VENV)/test-deps
	$(BIN)/python -m jaxcomm.run -n 2 --devices 4 tests/soak.py --collectives 200000 --stops 2 $(SOAK_ARGS)
	$(BIN)/python -m jaxcomm.run -n 4 --nodes 2 --devices 2 tests/soak.py --collectives 20000 --stops 2 $(SOAK_ARGS)

test-python: setup $(VENV)/test-deps
	$(if $(findstring --ignore=tests/cuda,$(PYTEST_ARGS)),,$(MAKE) --no-print-directory cuda CUDA_ARCHITECTURES=$(TEST_ARCHITECTURES))
	$(MAKE) --no-print-directory run-python
run-python:
	$(PYTEST) --junit-xml=build/pytest.xml $(PYTEST_ARGS)

# All tests except the size stress. SHARD=i/n selects the i-th of n parts of the tests that `make test` leaves out. The
# first part tests the machine code of all generations of GPUs (tests/shards.py). The others build PTX only, as `make
# test` does: machine code takes five minutes.
shard_number = $(firstword $(subst /, ,$(SHARD)))
shard_count = $(lastword $(subst /, ,$(SHARD)))
test-all: setup $(VENV)/test-deps
	$(MAKE) --no-print-directory cuda CUDA_ARCHITECTURES=$(if $(filter-out 1,$(shard_number)),$(TEST_ARCHITECTURES))
	$(MAKE) --no-print-directory build-native
	$(BIN)/cmake --build $(NATIVE_BUILD) --target full_tests
	$(BIN)/ctest --test-dir $(NATIVE_BUILD) --parallel $(NATIVE_TESTS_AT_ONCE) --output-on-failure \
	  --output-junit $(abspath build/ctest-all.xml) $(if $(SHARD),-L full -I $(shard_number)$(comma)$(comma)$(shard_count))
	$(PYTEST) --size full $(if $(SHARD),--shard $(SHARD)) --junit-xml=build/pytest-all.xml --durations 20 \
	  $(PYTEST_ARGS)
comma := ,

NATIVE_BUILDS := $(NATIVE_BUILD) build/address build/thread
$(NATIVE_BUILDS:=/build.ninja): $(VENV)/test-deps $(CUDA_WHEELS)/installed CMakeLists.txt
	$(BIN)/cmake -S . -B $(@D) -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja -DJAXCOMM_NATIVE_TESTS=ON \
	  -DPython_EXECUTABLE=$(abspath $(BIN))/python -DJAXCOMM_CUDA_WHEELS=$(abspath $(CUDA_WHEELS)) \
	  -DJAXCOMM_SANITIZE=$(filter address thread,$(notdir $(@D))) -DJAXCOMM_WERROR=$(if $(CI),ON,OFF) \
	  $(if $(filter address thread,$(notdir $(@D))),,$(CMAKE_CUDA) -DCMAKE_CUDA_ARCHITECTURES=$(TEST_ARCHITECTURES) \
	    -DJAXCOMM_CUDA_LIBRARIES=$(abspath $(CUDA_LIBRARIES)))
	touch $@
$(NATIVE_BUILD)/build.ninja: | libraries

.PHONY: build-native build-tests run-native run-python
build-native: libraries $(NATIVE_BUILD)/build.ninja
	MAKEFLAGS= $(BIN)/cmake --build $(NATIVE_BUILD) --target native_tests

# Also compiles the CUDA module, in parallel.
build-tests: libraries $(NATIVE_BUILD)/build.ninja
	MAKEFLAGS= $(BIN)/cmake --build $(NATIVE_BUILD)

test-native: build-native
	$(MAKE) --no-print-directory run-native
run-native:
	$(BIN)/ctest --test-dir $(NATIVE_BUILD) -LE full --output-on-failure --output-junit ctest.xml $(CTEST_ARGS)

# Tests that depend on the version of JAX, which `.ci/run` runs on the newest one: the native tests of code compiled with
# jaxlib's headers, and the Python tests without those of
# - native code that sees no JAX: plans, the executor, the simulator, hosts, GPUs, calibration;
# - what other tests show as well, with more processes, more time or larger models. Of tests/models, the files that build
#   and train every model remain.
WITHOUT_JAX := plan cpu simulate hosts cuda test_calibrate.py test_bench.py test_bench_report.py \
  test_run.py test_headers.py test_includes.py test_contract.py test_layout.py test_mutation.py test_shards.py \
  multiprocess/test_launchers.py
EVERY_MODEL := test_scripts.py test_moe_step.py test_moe_command.py test_moe_options.py
SHOWN_BY_OTHERS := test_late.py test_soak.py test_stress.py multiprocess/test_ops.py multiprocess/test_leaks.py \
  multiprocess/test_bench_processes.py multiprocess/test_strangers.py \
  $(filter-out $(EVERY_MODEL:%=models/%),$(patsubst tests/%,%,$(wildcard tests/models/test_*.py)))
test-jax: setup $(VENV)/test-deps
	$(MAKE) --no-print-directory $(NATIVE_BUILD)/build.ninja
	$(BIN)/cmake --build $(NATIVE_BUILD) --target jaxlib_tests
	$(BIN)/ctest --test-dir $(NATIVE_BUILD) -L jaxlib --output-on-failure
	$(PYTEST) $(WITHOUT_JAX:%=--ignore=tests/%) $(SHOWN_BY_OTHERS:%=--ignore=tests/%) $(PYTEST_ARGS)

test-asan: build/address/build.ninja
	$(BIN)/cmake --build build/address
	$(BIN)/ctest --test-dir build/address --parallel $(NATIVE_TESTS_AT_ONCE) -LE full --output-on-failure

test-tsan: build/thread/build.ninja
	$(BIN)/cmake --build build/thread
	$(BIN)/ctest --test-dir build/thread --parallel $(NATIVE_TESTS_AT_ONCE) -LE full --output-on-failure --output-junit ctest.xml

# Mutation testing: puts mistakes into the sources, one at a time, and runs the tests (tests/mutation/README.md).
mutants: setup $(VENV)/test-deps $(CUDA_WHEELS)/installed
	$(BIN)/python tests/mutation/run.py $(MUTANTS_ARGS)

# These need a machine with a GPU, CUDA 13 and jax 0.11.2 or later, and download nothing (docs/development/gpu-tests.md).
# Each ends within 4 minutes. Records go to OUT. NCCL is a folder with a newer NCCL than JAX's.
OUT ?= build/gpu/records
gpu-smoke gpu-kernels gpu-timings gpu-jax gpu-ranks:
	$(PYTHON) tests/cuda/tools/on_gpu.py $(@:gpu-%=%) build/gpu $(OUT) $(if $(NCCL),--nccl $(NCCL)) $(GPU_ARGS)

# Writes docs/development/gpu-status.md from the records in benchmarks/results/gpu.
gpu-status:
	$(BIN)/python tests/cuda/tools/status.py

bench: setup
	$(BIN)/python -m jaxcomm.bench $(BENCH_ARGS)

$(VENV)/dev: $(VENV)/installed $(VENV)/test-deps
	$(PIP) --group lint
	touch $@

lint: $(VENV)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $$(git ls-files '*.cc' '*.cu' '*.cuh' '*.h')

format: $(VENV)/dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $$(git ls-files '*.cc' '*.cu' '*.cuh' '*.h')

# Counts tracked files only, with the interpreter of the system.
size:
	@$(PYTHON) tools/size.py

$(VENV)/docs-deps: pyproject.toml | $(VENV)/deps
	$(PIP) --group docs
	touch $@

# Warnings, broken links among them, are errors. Sphinx repeats the warnings of a page only when it reads the page anew.
docs: setup $(VENV)/docs-deps
	rm -rf build/site
	$(BIN)/python -m sphinx -q --fail-on-warning --keep-going --fresh-env -c docs -d build/docs -b html . build/site

$(VENV)/wheel-deps: $(VENV)/deps
	$(PIP) --group wheel
	touch $@

# Wheels for users without a compiler, in dist/. They are built in isolation with the oldest supported jaxlib. auditwheel
# determines the oldest glibc that they run on, which is that of this machine or an older one.
wheel: $(VENV)/wheel-deps
	$(call build_wheel,.)

# Kernels with GIN need a libnccl of the version of their headers. The wheel has them for these versions too.
NCCL_VERSIONS ?= 2.30.7 2.29.7
NCCL_FOLDERS := $(NCCL_VERSIONS:%=build/cuda/nccl-%)
$(NCCL_FOLDERS): build/cuda/nccl-%: | $(VENV)/deps
	$(PIP) --no-deps --target $@ nvidia-nccl-cu13==$*

# The wheel jaxcomm-cuda13, built with the compiler of `make cuda`.
empty :=
wheel-cuda: $(VENV)/wheel-deps $(CUDA_WHEELS)/installed $(NCCL_FOLDERS)
	$(call build_wheel,cuda13,-C cmake.define.CMAKE_CUDA_COMPILER=$(abspath $(CUDA_WHEELS))/nvidia/cu13/bin/nvcc \
	  -C "cmake.define.JAXCOMM_NCCL_INCLUDE_DIR=$(subst $(empty) $(empty),;,$(patsubst %,%/nvidia/nccl/include, \
	    $(abspath $(CUDA_WHEELS) $(NCCL_FOLDERS))))" \
	  $(CUDA_ARCHITECTURES:%=-C cmake.define.CMAKE_CUDA_ARCHITECTURES=%))

WHEEL_DIR ?= dist
# build_wheel: folder of a pyproject.toml, options of uv
define build_wheel
rm -rf build/wheel
$(BIN)/uv build -q --wheel --python $(BIN)/python --out-dir build/wheel $(2) $(1)
PATH=$(abspath $(BIN)):$$PATH $(BIN)/auditwheel repair --wheel-dir $(WHEEL_DIR) build/wheel/*.whl
endef

clean:
	rm -rf $(VENV) build dist runs jaxcomm/_core
