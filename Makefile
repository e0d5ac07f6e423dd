# Two commands do everything on a machine with Python 3.11 or later:
#   make test   all that CI checks: lint, format, types, tests, spec drift
#   make check  the fast part of it: lint, types, and the tests that take no long
#   make demo   the main job on a real model
# Override the interpreter with `make PYTHON=python3.12 test`.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
OLD    := .venv-mlx-lm-0.31
comma  := ,
EXTRAS := $(if $(filter Linux,$(shell uname -s)),cpu$(comma)dev$(comma)docs,dev$(comma)docs)

# On Linux MLX multiplies float32 matrices four times faster with OpenBLAS, if it is there.
BLAS := $(firstword $(wildcard /usr/lib/*-linux-gnu/openblas-pthread/libopenblas.so.0 /usr/lib/*-linux-gnu/libopenblas.so.0))
RUN  := $(if $(BLAS),env LD_PRELOAD=$(BLAS) OPENBLAS_NUM_THREADS=1)

.PHONY: viewer screenshots bench bench-gpu check docs matrix test test-gpu lint types tests tests-old demo spec format clean

test: lint types docs tests tests-old

# The fast part: no model, no fuzzing, nothing that takes seconds.
check: lint types
	$(RUN) $(BIN)/python -m pytest -q -n 2 -m "not model and not slow and not hostile"

$(VENV)/.done: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[$(EXTRAS)]"
	touch $@

$(OLD)/.done: pyproject.toml
	test -x $(OLD)/bin/python || $(PYTHON) -m venv $(OLD)
	$(OLD)/bin/python -m pip install --quiet --disable-pip-version-check --editable ".[$(EXTRAS)]" "mlx-lm==0.31.3"
	touch $@

lint: $(VENV)/.done
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/typos

types: $(VENV)/.done
	$(BIN)/mypy

# The site, in build/site. A link or a name that leads nowhere is an error; no network is needed.
docs: $(VENV)/.done
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

tests: $(VENV)/.done
	$(RUN) $(BIN)/python -m pytest -q -n 2

# mlx-lm 0.31 has other cache classes; the tests that touch live caches run against both.
tests-old: $(OLD)/.done
	$(RUN) $(OLD)/bin/python -m pytest -q -n 2 -m "not model and not slow and not hostile" \
		tests/caches tests/contracts tests/store tests/serve tests/cli tests/identity tests/tools

# Save, load, resume, trim and refuse over every architecture that mlx-lm's own tests have a
# configuration of; its source distribution has them. Takes some minutes.
matrix: $(VENV)/.done
	mkdir -p build/matrix
	$(BIN)/python -m pip download --quiet --no-deps --no-binary :all: --dest build/matrix mlx-lm
	tar xzf build/matrix/mlx_lm-*.tar.gz -C build/matrix
	$(RUN) $(BIN)/python -m tests.matrix build/matrix
	$(RUN) $(BIN)/python -m tests.matrix.prompt_cache build/matrix

demo: $(VENV)/.done
	$(RUN) $(BIN)/vkv demo

# Times the hot paths; compare lines of one run only.
bench: $(VENV)/.done
	$(BIN)/python -m pytest -q benchmarks --benchmark-enable --benchmark-sort=name --benchmark-columns=median,iqr,rounds

# On a machine with a GPU: $(PYTHON) has MLX with its backend, mlx-lm, vkv's needs, pytest; no network.
# Kernels against plain operations and golden files against the reference, then the times.
GPU_TESTS = tests/codecs/test_kernels.py tests/caches/attention tests/arrays tests/test_fixtures.py

test-gpu:
	$(PYTHON) -m pytest -q $(GPU_TESTS)

bench-gpu: test-gpu
	$(PYTHON) -m benchmarks.gpu -o spec/bench

# Rewrites what a test compares with the code.
spec: $(VENV)/.done
	$(BIN)/python -m spec

# Builds the page of `vkv view` and of the docs from viewer/; needs node and npm.
viewer:
	cd viewer && npm ci --no-audit --no-fund --silent && npm run --silent build

# Makes the pictures of the page in docs/images anew, in Chromium.
screenshots: $(VENV)/.done
	mkdir -p docs/images
	VKV_UPDATE_SCREENSHOTS=1 $(BIN)/python -m pytest -q tests/cli/test_view_browser.py -k light_and_dark

format: $(VENV)/.done
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(OLD) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
