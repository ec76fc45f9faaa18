# make fit    fulgurite fit examples/digits.yaml     make test   run the tests
# make lint   ruff and mypy                          make bench  the step benchmark, ten minutes
# make docs   the site of docs/, in site/
# make compiled   the tests of numbers again, compiled: a night; ARGS="--sample 80" for one in 80
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.installed
WORKERS ?= 2

.PHONY: fit test compiled lint bench docs clean

fit: $(READY)
	$(BIN)/fulgurite fit examples/digits.yaml $(ARGS)

test: $(READY)
	$(BIN)/python -m pytest -n $(WORKERS) $(ARGS)

compiled: $(READY)
	$(BIN)/python tests/tools/compiled.py --workers $(WORKERS) $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tests/tools/check_types.py

bench: $(READY)
	$(BIN)/python -m pip install -q -c .ci/constraints.txt -e ".[bench]"
	$(BIN)/python tests/benchmarks/step.py $(ARGS)

docs: $(READY)
	$(BIN)/python -m pip install -q -c .ci/constraints.txt -e ".[docs]"
	$(BIN)/python tests/tools/build_docs.py

# torch first and alone: its plain wheel is gigabytes of CUDA, and .ci/constraints.txt names the
# build that is wanted
$(READY): pyproject.toml .ci/constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c .ci/constraints.txt torch
	$(BIN)/python -m pip install -q -c .ci/constraints.txt -e ".[dev]"
	touch $(READY)

clean:
	rm -rf $(VENV) build dist runs site *.egg-info
