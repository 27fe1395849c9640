# Everything the course is asked to do, as one command each. Needs only make, git and
# Python >= 3.11 with venv; `make` alone lists the commands.

PYTHON ?= python3
LAB_ARGS ?=
PYTEST_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# How long each test took, as pytest's JUnit reports.
REPORTS := .reports

# Bytecode is kept, whatever the environment says: without it, every process that imports PyTorch
# compiles PyTorch again.
export PYTHONDONTWRITEBYTECODE :=

# Two processes share the tests, file by file; within one, more threads would make them slower.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help setup lab test lint doctor notebooks readme compiled

help:  ## list these commands
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 20

setup: $(STAMP)  ## install everything into .venv (again only when pyproject.toml changes)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "$(PYTHON) is missing or older than Python 3.11. Name a newer one:" \
	         "make setup PYTHON=python3.12" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { \
	    rm -rf $(VENV); echo "$(PYTHON) has no venv. On Debian and Ubuntu:" \
	         "sudo apt install python3-venv" >&2; exit 1; }
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python --editable '.[test]'
	@touch $@

lab: setup  ## open the first lesson in JupyterLab (LAB_ARGS=--no-browser: print its address)
	@JUPYTER_CONFIG_PATH="$(CURDIR)/.jupyter$${JUPYTER_CONFIG_PATH:+:$$JUPYTER_CONFIG_PATH}" \
	    $(BIN)/jupyter lab $(LAB_ARGS)

test: setup lint  ## run every test and every notebook
	$(PYTEST) -p no:nbval --junitxml $(REPORTS)/tests.xml tests $(PYTEST_ARGS)
	$(PYTEST) --nbval-lax --junitxml $(REPORTS)/notebooks.xml notebooks/*.ipynb
	COURSE_LIB_STRICT=1 $(PYTEST) --nbval-lax --junitxml $(REPORTS)/solutions.xml \
	    notebooks/solutions/*.ipynb

lint: setup  ## check the style of the code
	$(BIN)/ruff check .

doctor: setup  ## say what is here, and what is wrong with it
	@$(BIN)/python -m course_lib doctor

notebooks: setup  ## build the notebooks from notebooks/src
	$(BIN)/python notebooks/build.py

compiled: setup  ## compile kernels that changed, and write down what they became
	$(BIN)/python tests/compile_gate.py

readme: setup  ## write README, RESULTS and docs again from the records
	$(BIN)/python -m course_lib readme
