# `make demo` runs the main job on a fresh machine, `make test` the tests; both install what they need.
PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
EXTRAS ?= test,integrations,lint

# Spinning OpenMP threads make every step slower as soon as anything else runs on the machine.
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: demo test conformance lint

demo: $(VENV)/installed
	$(VENV)/bin/asymloop demo $(DEMO)

test: $(VENV)/installed
	$(VENV)/bin/python -m pytest --numprocesses 2 --dist worksteal $(TESTS)

conformance: $(VENV)/installed
	$(VENV)/bin/python tests/conformance/run.py --numprocesses 2

lint: $(VENV)/installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

$(VENV)/installed: setup.cfg pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable '.[$(EXTRAS)]'
	touch $@
