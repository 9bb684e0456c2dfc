# `make demo` and `make test` do all the set-up on a fresh machine: a virtual environment in .venv, with the versions of constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO := runs/demo

.PHONY: demo test test-fast test-lowest lint clean
.DEFAULT_GOAL := test

$(VENV)/train: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[train]'
	touch $@

$(VENV)/test: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test]'
	touch $@

# Trains on the embedded corpus, then translates the printed examples in a fresh process and compares, byte for byte.
demo: $(VENV)/train
	rm -rf $(DEMO)
	$(BIN)/accelerate launch --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no \
		-m training.train --config training/configs/demo.yaml --output_dir $(DEMO) $(DEMO_FLAGS)
	$(BIN)/python -m training.translate --model $(DEMO)/best --input $(DEMO)/examples.source.txt --output $(DEMO)/examples.reloaded.txt
	cmp $(DEMO)/examples.translation.txt $(DEMO)/examples.reloaded.txt
	@paste $(DEMO)/examples.source.txt $(DEMO)/examples.reloaded.txt
	@echo "A fresh process that loaded $(DEMO)/best through the Auto classes gave the same translations."

lint: $(VENV)/test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# transformers' own tests of its models come with its source archive, downloaded once into .cache, and the page is tested
# in Debian's Chromium, installed where it can be.
test: lint
	$(BIN)/python -m tests.conformance.archive
	$(BIN)/python -m tests.browser
	$(BIN)/python -m pytest -n auto

test-fast: lint
	$(BIN)/python -m pytest -n auto -m "not slow"

# The fast tests with the lowest version of everything that pyproject.toml declares.
test-lowest:
	$(PYTHON) -m venv $(VENV)-lowest
	sed -n 's/^    "\([A-Za-z0-9-]*\)>=\([0-9.]*\).*/\1==\2/p' pyproject.toml > $(VENV)-lowest/constraints.txt
	$(VENV)-lowest/bin/python -m pip install --quiet --constraint $(VENV)-lowest/constraints.txt --editable '.[test]'
	$(VENV)-lowest/bin/python -m pytest -n auto -m "not slow"

clean:
	rm -rf $(VENV) $(VENV)-lowest .cache build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache
