# Every target sets up what it needs: `make test` and `make demo` work on a fresh machine.
#
# PYTHON is used as it is when it has torch >= 2.11; otherwise a .venv is made with the pinned torch. Set OWN_TORCH=
# (empty) to have the .venv in any case.

PYTHON ?= python3
TORCH_IS_NEW_ENOUGH = from importlib.metadata import version as v; print(tuple(map(int, v("torch").split(".")[:2])) >= (2, 11))
OWN_TORCH := $(shell $(PYTHON) -c '$(TORCH_IS_NEW_ENOUGH)' 2>/dev/null)
CPP_FILES = $(shell find csrc tests -name '*.h' -o -name '*.cuh' -o -name '*.cu' -o -name '*.cpp')

ifeq ($(OWN_TORCH),True)
PY := $(PYTHON)
STAMPS := build/stamps/$(subst /,_,$(PYTHON))
else
PY := .venv/bin/python
STAMPS := .venv/stamps
endif

# The repository itself is importable, also where the package cannot be installed.
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
# Some virtual machines report AMX and do not allow it: bf16 products on the CPU then end in an illegal instruction.
export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE
SANITIZER = $(or $(shell command -v compute-sanitizer),/usr/local/cuda/bin/compute-sanitizer)

.PHONY: build demo test test-gpu bench stale tables docs sanitize soak lint format wheel wheel-check clean

build: $(STAMPS)/package

demo: build
	$(PY) examples/train.py
	$(PY) examples/generate.py
	$(PY) examples/demo.py
	$(PY) examples/video.py

# First the tests that need the machine for themselves, then the others in as many processes as there are cores, at most 8.
CORES := $(shell n=$$(nproc 2>/dev/null || echo 1); echo $$((n < 8 ? n : 8)))
test: lint
	$(PY) -m pytest -m "timing or gpu_memory"
	OMP_NUM_THREADS=1 $(PY) -m pytest -m "not timing and not gpu_memory" --numprocesses $(CORES) --maxschedchunk 1

# The tests that need a Hopper GPU, in several processes. Those that measure times or need much memory come last, alone.
PROCESSES ?= 8
test-gpu: build
	OMP_NUM_THREADS=2 $(PY) -m pytest -m "gpu and not timing and not gpu_memory" --numprocesses $(PROCESSES) --maxschedchunk 1
	$(PY) -m pytest -m "timing or gpu_memory"

bench: build
	for bench in $(filter-out %/bench_distributed.py, $(wildcard bench/*/bench_*.py)); do $(PY) -m $$(echo $${bench%.py} | tr / .) || exit 1; done

# Which results were measured with other kernels than today's; fails if there are any.
stale:
	@$(PYTHON) bench/stale.py

tables: build
	$(PY) bench/tables.py

# The documentation site in build/site; a broken link or reference is an error. Its packages go into .venv in any case.
docs: .venv/stamps/docs
	NO_MKDOCS_2_WARNING=1 .venv/bin/python -m mkdocs build --strict

.venv/stamps/docs: requirements-docs.txt
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --requirement requirements-docs.txt
	@mkdir -p $(@D) && touch $@

# compute-sanitizer over small calls of every operator, a part at a time: all parts, or `make sanitize-sparse_mla_bwd`.
sanitize: build
	$(PY) tests/sanitize.py --sanitizer $(SANITIZER)

sanitize-%: build
	$(PY) tests/sanitize.py --sanitizer $(SANITIZER) --only $*

# Random calls of everything against the reference: `make soak MINUTES=10`.
MINUTES ?= 3
soak: build
	$(PY) tests/soak.py --minutes $(MINUTES)

lint: build
	@$(PY) tools/run_if_installed.py ruff check .
	@$(PY) tools/run_if_installed.py ruff format --check .
	@$(PY) tools/run_if_installed.py mypy
	@$(PY) tools/run_if_installed.py clang-format --dry-run --Werror $(CPP_FILES)

format: build
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	$(PY) tools/run_if_installed.py clang-format -i $(CPP_FILES)

# A wheel with the kernels in dist/, compiled by the installed CUDA toolkit or that of packages: `make wheel CUDA=13.0`.
wheel: $(STAMPS)/tools
	$(PY) tools/install_requirements.py requirements-wheel.txt
	$(PY) tools/build_wheel.py --cuda "$(CUDA)"

# The newest wheel in dist/, in fresh environments with the oldest and the newest torch.
wheel-check:
	$(PYTHON) tools/check_wheel.py

clean:
	rm -rf build dist *.egg-info dsa_ext/_C*.so

$(STAMPS)/tools: requirements-dev.txt requirements-build.txt tools/install_requirements.py
ifneq ($(OWN_TORCH),True)
	test -x $(PY) || $(PYTHON) -m venv .venv
endif
	$(PY) tools/install_requirements.py
	@mkdir -p $(@D) && touch $@

# A library that is there is used as it is on a machine that cannot compile another.
$(STAMPS)/package: $(STAMPS)/tools setup.py pyproject.toml tools/find_cuda.py tools/nvcc_with_report.sh \
  $(shell find csrc -type f)
	@if [ -f dsa_ext/_C.abi3.so ] && ! DSA_EXT_CUDA=1 $(PY) setup.py --name >/dev/null 2>&1; then \
	  echo "No CUDA toolkit or no CUTLASS headers: dsa_ext/_C.abi3.so is used as it is."; \
	else \
	  echo "Compiling what changed in the kernels; all of it takes several minutes."; \
	  $(PY) -m pip install --quiet --no-build-isolation --no-deps --editable .; \
	fi
	@touch $@
