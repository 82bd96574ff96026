# One environment in .venv; stamps remember what was installed, so that a second run needs no network.
#   make demo    needs only the package itself
#   make example NAME=fastapi    installs what the examples use
#   make test    installs the test and lint tools as well, into the same environment
# Variables: PYTHON (interpreter for the environment), NAME (for example), FILES and PAGE (for demo), ARGS (for test, retest, smoke, simulate, crash-matrix, matrix, soak and bench), PYTHONS (interpreters for matrix), SEEDS (for simulate and crash-matrix), JOBS (for soak).

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
BASE := $(VENV)/.base-stamp
SHOWN := $(VENV)/.examples-stamp
FULL := $(VENV)/.stamp
EXAMPLES := $(sort $(filter-out demo,$(patsubst examples/%/run.py,%,$(wildcard examples/*/run.py))))

.DEFAULT_GOAL := help
.PHONY: setup audit audit-offline demo example test retest smoke matrix simulate crash-matrix soak lint bench bench-long docs up down clean help

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  make \1\t\2/p' Makefile

setup: $(FULL) ## create .venv with the package and all development tools

demo: $(BASE) ## run the demo (FILES="..." are passed on; PAGE=report.html writes its report as a page)
	$(BIN)/python examples/demo/run.py $(if $(PAGE),--page '$(PAGE)') $(FILES)

example: $(SHOWN) ## run one of the examples (NAME=fastapi, django, pipeline, fallback, provider or readme)
	@test -f 'examples/$(NAME)/run.py' || { echo "make example NAME=one of: $(EXAMPLES)" >&2; exit 2; }
	$(BIN)/python -m 'examples.$(NAME).run'

test: $(FULL) ## run the tests (ARGS="-k name -x" are passed on; -n 0 for one process)
	$(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder $(ARGS)

# With real servers on a busy machine a test may fail by its timing alone. It has to pass by itself then, and
# is named, to be looked into; where more than three failed nothing is run again.
retest: $(FULL) ## run again, one after another, what failed in the last run: three tests at most
	@$(BIN)/python -c 'import json; failed = json.load(open(".pytest_cache/v/cache/lastfailed")); \
	  print("to be run again:", *failed, sep="\n  "); raise SystemExit(not 0 < len(failed) <= 3)'
	$(BIN)/python -m pytest -n 0 --last-failed --last-failed-no-failures none $(ARGS)

smoke: $(FULL) ## run the smoke tests alone: in containers where a Docker engine answers, in processes elsewhere (BUDGET_SMOKE=processes)
	$(BIN)/python -m pytest -n 0 tests/smoke $(ARGS)

simulate: $(FULL) ## run the simulator of concurrent clients (SEEDS=7, SEEDS=1..1000)
	SEEDS="$(or $(SEEDS),1..100)" $(BIN)/python -m pytest tests/simulation $(ARGS)

crash-matrix: $(FULL) ## kill each process and restart each server at each step (SEEDS=1..3 ARGS="--match claim --jobs 2"); an hour or two
	$(BIN)/python -m tests.crash --seeds "$(or $(SEEDS),1)" $(ARGS)

matrix: $(FULL) ## test over each Python here, the oldest and newest dependencies, and each PostgreSQL (ARGS="--python 3.10 --deps oldest")
	$(BIN)/python -m tests.matrix $(ARGS)

soak: $(FULL) ## noisy work of several tenants under kills, with a verdict (JOBS=2000 ARGS="--seed 7 --broker rabbitmq")
	$(BIN)/python -m tests.soak --jobs "$(or $(JOBS),2000)" $(ARGS)

lint: $(FULL) ## check style, format, types and the import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

audit-offline: $(FULL) ## check dependencies without a network: they fit, are declared and imported, and their licences go together
	$(BIN)/python -m pip check
	$(BIN)/python -m pytest -q -n 0 tests/unit/test_dependencies.py

# In an environment of its own: pip-audit brings many packages, of which none is ours. Its service may be
# out of reach; then it is said, and nothing is known. Known vulnerabilities fail.
audit: audit-offline ## the same, and whether anything installed has a known vulnerability, where pip-audit's service answers
	@BIN=$(BIN) VENV=.venv-audit .ci/audit

bench: $(FULL) ## run the benchmarks, under ten minutes; fails where a target is missed (ARGS="--only caller")
	$(BIN)/python -m benchmarks $(ARGS)

bench-long: $(FULL) ## run those with long histories and backlogs (ARGS="..." are passed on)
	$(BIN)/python -m benchmarks --long $(ARGS)

docs: $(FULL) ## build the pages of docs/ into build/docs, warnings being errors; check all links between pages
	$(BIN)/python docs/check_links.py
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs build/docs

up: ## start docker-compose.yml and wait until all of it is well; needs Docker with its compose plugin
	docker compose up --build --detach --wait

down: ## stop it; what it has stored stays (docker compose down --volumes removes it)
	docker compose down

clean: ## remove .venv, caches and builds
	rm -rf $(VENV) .venv-peers .venv-audit build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || \
	  { echo "$(PYTHON) was not found. Install Python 3.10 or later, or run: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "celery_budget needs Python 3.10 or later, $(PYTHON) is $$($(PYTHON) -V 2>&1). Run: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
	  { rm -rf $(VENV); echo "No environment could be made. On Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }

# The interpreter is order-only: its time stamp is older than pyproject.toml and says nothing.
$(BASE): pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable .
	@touch $(BASE)

$(SHOWN): pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[examples]'
	@touch $(BASE) $(SHOWN)

$(FULL): pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $(BASE) $(SHOWN) $(FULL)
