# make setup    the active virtual environment, or a new .venv, with torch, hf_lowbit in editable mode, and what tests need
# make test     the test suite, after setup and the download of the models it reads
# make check    ruff and the architecture tests: seconds
# make slow     the tests that take minutes
# make triton   the GPU kernels without a GPU: interpreted, and compiled ahead; installs triton in .venv-triton
# make compat   the quantizer tests on the oldest supported transformers
# make wheel    build the wheel and prove it in fresh virtual environments
# make bench    the benchmarks of benchmarks/, then the tables and plots of docs/
# make tables   the tables and plots alone, from benchmarks/results/
# make cards    run the examples and write the cards of the models they make to model_cards/
# make format   let ruff rewrite the code
#
# PYTHON chooses the interpreter for .venv, TORCH the torch build (TORCH='torch==2.13.0 --index-url ...'), PYTEST_FLAGS
# adds to pytest's command line. A torch that is already there is left alone. Tests run in up to four processes of one
# thread each; WORKERS=0 runs them in one process, which a debugger needs.

PYTHON ?= python3
TORCH ?= torch==2.13.0
PYTEST_FLAGS ?=
WORKERS ?= auto
PYTEST = OMP_NUM_THREADS=1 $(PY) -m pytest -n $(WORKERS) --maxprocesses 4 --dist loadfile $(PYTEST_FLAGS)

VENV := $(or $(VIRTUAL_ENV),.venv)
PY := $(VENV)/bin/python
# named after this checkout, so that two checkouts that share an environment both install themselves
STAMP := $(VENV)/hf_lowbit$(subst /,-,$(CURDIR)).stamp

.PHONY: setup assets test check slow triton compat wheel bench tables cards format

setup: $(STAMP)

# torch comes first and alone, so that no later requirement chooses a build of it
$(STAMP): pyproject.toml hatch_build.py _hf_lowbit_autoload.py hf_lowbit_autoload.pth $(wildcard hf_lowbit/csrc/*)
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -c "import importlib.util as u, sys; sys.exit(u.find_spec('torch') is None)" || $(PY) -m pip install $(TORCH)
	$(PY) -m pip install -e '.[test,dev]'
	@touch $@

# without a network the tests that need a model are skipped, and say so
assets: $(STAMP)
	-@$(PY) scripts/fetch_assets.py

test: assets
	@$(PYTEST)

slow: assets
	@$(PYTEST) -m slow

check: $(STAMP)
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m pytest -q tests/house/test_architecture.py

triton: assets
	bash scripts/triton.sh $(PY) $(PYTEST_FLAGS)

compat: assets
	bash scripts/compat.sh $(PY)

wheel: $(STAMP)
	bash scripts/check_wheel.sh $(PY)

bench: assets
	$(PY) -m benchmarks

tables: $(STAMP)
	$(PY) -m benchmarks --tables

cards: assets
	$(PY) scripts/make_cards.py

format: $(STAMP)
	$(PY) -m ruff check --fix
	$(PY) -m ruff format
