# make setup      .venv with everything in it; the others make it too
# make fit        fulgurite fit examples/digits.yaml
# make test       what needs nothing, the core, and a part of the rest drawn by the day: ten minutes
# make test-all   everything, the tests of numbers compiled too: a night; it can be interrupted
# make compiled   the tests of numbers, compiled; ARGS="--sample 80" for one in 80
# make oracle BEFORE=HEAD~1   what fits do to the bit, at that commit and here
# make lint       ruff and mypy
# make bench      the step benchmark, ten minutes
# make docs       the site of docs/, in site/
# make zoo        examples/zoo beside stock Lightning, and compiled, in an environment with its packages
# make smoke      the package in empty environments, with the lowest and the newest dependencies
# TORCH=2.15.0 with any of them: with that torch, in an environment of its own (5 GB, with CUDA)
# PYTHON=python3.12 VENV=.venv-3.12 with any of them: with that Python, in that environment
# python3 where pyproject.toml supports its version, else the newest such one that is there
PYTHONS := python3 python3.14 python3.13 python3.12 python3.11
SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))
PYTHON ?= $(or $(shell for one in $(PYTHONS); do $$one -c '$(SUPPORTED)' 2>/dev/null && echo $$one && exit; done),\
	$(error Python 3.11 to 3.14 is needed, and no $(PYTHONS) is one of them: make PYTHON=...))
VENV := .venv$(addprefix -,$(TORCH))
BIN := $(VENV)/bin
READY := $(VENV)/.installed
ZOO := .venv-zoo
CONSTRAINTS := $(if $(TORCH),$(VENV),.ci)/constraints.txt
WORKERS ?= 2
DAY ?= $(shell date +%F)
ONE_IN ?= 40

BEFORE ?= HEAD

.PHONY: setup fit test test-all compiled oracle lint bench docs smoke zoo clean

setup: $(READY)

fit: $(READY)
	$(BIN)/fulgurite fit examples/digits.yaml $(ARGS)

test: $(READY)
	$(BIN)/python -m pytest -n $(WORKERS) --core --sample $(ONE_IN) --draw $(DAY) $(ARGS)

test-all: $(READY)
	$(BIN)/python tests/tools/everything.py --workers $(WORKERS) $(ARGS)

compiled: $(READY)
	$(BIN)/python tests/tools/compiled.py --workers $(WORKERS) $(ARGS)

zoo: $(ZOO)/.installed
	PYTHONPATH=tests/support $(ZOO)/bin/python -m pytest -p torchvision_operators -n $(WORKERS) -k trains $(ARGS) tests/test_zoo.py
	PYTHONPATH=tests/support $(ZOO)/bin/python -m pytest -p torchvision_operators -n $(WORKERS) --compiled -k trains $(ARGS) tests/test_zoo.py

oracle: $(READY)
	$(BIN)/python tests/tools/oracle.py $(BEFORE) $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tests/tools/check_types.py

bench: $(READY)
	$(BIN)/python -m pip install -q -c $(CONSTRAINTS) -e ".[bench]"
	$(BIN)/python tests/benchmarks/step.py $(ARGS)

docs: $(READY)
	$(BIN)/python -m pip install -q -c $(CONSTRAINTS) -e ".[docs]"
	$(BIN)/python tests/tools/build_docs.py

smoke: $(READY)
	$(addprefix PIP_EXTRA_INDEX_URL=,$(TORCH_INDEX)) $(BIN)/python tests/tools/smoke.py $(ARGS)

# torch first and alone: its plain wheel brings gigabytes of CUDA. Where there is no GPU pip prefers the
# build for CPUs, X+cpu, of PyTorch's own index; where that is not reached it takes what else it finds
CPU_BUILDS := https://download.pytorch.org/whl/cpu
REACHED := import urllib.request; urllib.request.urlopen("$(CPU_BUILDS)/torch/", timeout=5)
TORCH_INDEX = $(shell command -v nvidia-smi >/dev/null || { $(PYTHON) -c '$(REACHED)' 2>/dev/null && echo $(CPU_BUILDS); })

$(READY): pyproject.toml .ci/constraints.txt
	@echo "1 of 3: $(VENV), an environment of its own, with $(PYTHON); the first time all this takes minutes"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(if $(TORCH),sed 's/^torch==.*/torch==$(TORCH)/' .ci/constraints.txt > $(CONSTRAINTS))
	@echo "2 of 3: torch, the largest part of it: 0.2 GB, or 3 GB where it brings CUDA"
	$(BIN)/python -m pip install -q -c $(CONSTRAINTS) $(addprefix --extra-index-url=,$(TORCH_INDEX)) torch
	@echo "3 of 3: lightning, scikit-learn, matplotlib, this package, and what its tests need: some 100 packages"
	$(BIN)/python -m pip install -q -c $(CONSTRAINTS) -e ".[dev]"
	touch $(READY)

clean:
	rm -rf .venv .venv-* build dist runs site *.egg-info

$(ZOO)/.installed: pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(ZOO)
	$(ZOO)/bin/python -m pip install -q -c $(CONSTRAINTS) $(addprefix --extra-index-url=,$(TORCH_INDEX)) torch
	$(ZOO)/bin/python -m pip install -q -c $(CONSTRAINTS) -e ".[dev,zoo]"
	touch $@
