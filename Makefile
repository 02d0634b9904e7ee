# `make demo` and `make test` need Python 3.10 or newer and nothing else: they make .venv first.
VENV := .venv
PYTHON := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
# DeepSpeed compiles C++ when it is first used; the tests find it compiled, here, where `make clean` leaves it.
export TORCH_EXTENSIONS_DIR := $(CURDIR)/$(VENV)/torch_extensions
OPS := $(VENV)/torch_extensions/.built
FIND_PYTHON := for name in python3.11 python3 python; do \
    $$name -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && echo $$name && break; done

.DEFAULT_GOAL := help
.PHONY: help demo demo-dp test test-all lint benchmarks clean

help:
	@echo "make demo        train a small GPT on eight processes over all three axes and report on it (under five minutes)"
	@echo "make demo-dp     the same on two data-parallel processes, for longer (about three minutes)"
	@echo "make test        lint, then the fast tests"
	@echo "make test-all    lint, then all tests: the full parity cross and the soak runs"
	@echo "make lint        ruff and mypy"
	@echo "make benchmarks  measure, and write benchmarks/results"
	@echo "make clean       remove what was built and what runs wrote, but not .venv"

$(INSTALLED): pyproject.toml constraints.txt
	@python=$$($(FIND_PYTHON)); \
	if [ -z "$$python" ]; then echo "No Python of at least 3.10 was found." >&2; exit 1; fi; \
	[ -x $(PYTHON) ] || { echo "Making $(VENV) with $$($$python --version) ..."; $$python -m venv $(VENV); }
	@echo "Installing into $(VENV): torch and what else is needed, once, a few minutes ..."
	@$(PYTHON) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@
	@echo "Installed."

$(OPS): $(INSTALLED)
	@if command -v "$${CXX:-c++}" >/dev/null; then \
	    echo "Building the C++ parts of DeepSpeed, once, a minute or so ..."; \
	    $(PYTHON) -m lightning_partrain.cli doctor --build-deepspeed && mkdir -p $(@D) && touch $@; \
	else \
	    echo "*** No C++ compiler was found: the tests of DeepSpeed are skipped. Install one (apt-get install g++). ***" >&2; \
	fi

demo: $(INSTALLED)
	$(PYTHON) -m examples.demo

demo-dp: $(INSTALLED)
	$(PYTHON) -m examples.demo --layout dp

test: lint $(OPS)
	$(PYTHON) -m pytest

test-all: lint $(OPS)
	$(PYTHON) -m pytest -m 'slow or not slow'

lint: $(INSTALLED)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy

benchmarks: $(INSTALLED) $(OPS)
	$(PYTHON) -m benchmarks.overhead
	$(PYTHON) -m benchmarks.shared_batches
	$(PYTHON) -m benchmarks.checkpoint
	$(PYTHON) -m benchmarks.zero_memory
	$(PYTHON) -m benchmarks.zero_speed

clean:
	rm -rf build dist runs wandb lightning_logs .mypy_cache .ruff_cache .pytest_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
