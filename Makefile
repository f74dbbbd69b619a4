# The commands people type. On a machine with only Python 3.12 and make, `make quickstart` and `make test` do everything.
# PYTHON=/path/to/python chooses the interpreter; ARGS='...' goes on to the command behind a target.

PYTHON ?=
ARGS ?=
INTERPRETERS := $(or $(PYTHON),python3.12 python3.13 python3.14 python3 python)
PY := .venv/bin/python
NEWEST := .venv-newest/bin/python
CONFIGURED := setup.py pyproject.toml constraints.txt

.DEFAULT_GOAL := help
.PHONY: help quickstart cuda test test-slow test-newest lint typecheck bench clean
.NOTPARALLEL:

help: ## this list
	@echo "usage: make TARGET [PYTHON=python3.12] [ARGS='options of the command behind the target']"
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1 \2/p' $(MAKEFILE_LIST) | awk '{ name = $$1; $$1 = ""; printf "  %-12s%s\n", name, $$0 }'

quickstart: .venv/.installed ## trains a small byte-level language model on the text that Python ships, and shows the results
	$(PY) -m experiments.quickstart --workdir=runs/quickstart $(ARGS)

cuda: .venv/.installed-cuda ## adds what an NVIDIA GPU needs to .venv; quickstart and bench then run on it

test: .venv/.installed-test ## the tests, without the slow ones; ARGS='tests/test_house.py -k direction' runs some
	$(PY) -m pytest -q -n 2 --dist loadfile $(ARGS)

test-slow: .venv/.installed-test ## the slow tests, of programs optimised as users have them
	XLA_FLAGS= $(PY) -m pytest -q -m slow $(ARGS)

test-newest: .venv-newest/.installed-test ## imports and identities against the newest jax that pyproject.toml allows
	@$(NEWEST) -c "from importlib.metadata import version; print('jax', version('jax'))"
	$(NEWEST) -m pytest -q -m identity $(ARGS)

lint: .venv/.installed-test ## ruff and the house rules, import direction among them
	$(PY) -m ruff check .
	$(PY) -m pytest -q tests/test_house.py

typecheck: .venv/.installed-test ## mypy on efla_jax
	$(PY) -m mypy

bench: .venv/.installed ## measures speed and memory of the operators on this machine
	$(PY) -m experiments.benchmark $(ARGS)

clean: ## removes environments, caches and built packages; keeps runs/
	rm -rf .venv .venv-newest .cache .pytest_cache .ruff_cache .mypy_cache build dist *.egg-info
	find efla_jax kernels experiments configs tests -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

# Environments. An interpreter is run before it is chosen: a pyenv shim may stand in PATH and still fail.

ENVIRONMENT = $(firstword $(subst /, ,$@))

define create_environment
	@for python in $(INTERPRETERS); do \
	  $$python -c 'import sys; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1 && { found=$$python; break; }; \
	done; \
	if [ -z "$$found" ]; then \
	  echo "make: no Python 3.12 or newer among: $(INTERPRETERS)." >&2; \
	  echo "      Install one, or name it: make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)" >&2; exit 1; \
	fi; \
	if ! $$found -c 'import ensurepip, venv' >/dev/null 2>&1; then \
	  echo "make: $$found has no venv module, which makes the environment $(ENVIRONMENT)." >&2; \
	  echo "      On Debian and Ubuntu it is a package of its own: apt install python3-venv" >&2; exit 1; \
	fi; \
	$$found -m venv $(ENVIRONMENT) || { \
	  echo "make: $$found could not create $(ENVIRONMENT); its own message stands above." >&2; exit 1; }
endef

define installation_failed
{ echo "make: the installation into $(ENVIRONMENT) failed; the message of pip stands above." >&2; \
  echo "      It needs a network, or PIP_INDEX_URL / PIP_FIND_LINKS pointing to a mirror. Then type the same again." >&2; \
  echo "      A broken environment goes away with: make clean" >&2; exit 1; }
endef

.venv/bin/python .venv-newest/bin/python:
	$(create_environment)

.venv/.installed: $(CONFIGURED) | .venv/bin/python
	@echo "installing efla_jax into .venv (some minutes the first time)"
	@$(PY) -m pip install -qq -c constraints.txt -e . || $(installation_failed)
	@touch $@

.venv/.installed-%: $(CONFIGURED) | .venv/bin/python
	@echo "installing efla_jax[$*] into .venv (some minutes the first time)"
	@$(PY) -m pip install -qq -c constraints.txt -e '.[$*]' || $(installation_failed)
	@touch $@

# The pinned set but for jax and jaxlib, which are the newest allowed.
.venv-newest/.installed-test: $(CONFIGURED) | .venv-newest/bin/python
	@echo "installing efla_jax[test] with the newest jax allowed into .venv-newest (some minutes the first time)"
	@grep -vE '^(jax|jaxlib)==' constraints.txt > .venv-newest/constraints.txt
	@$(NEWEST) -m pip install -qq --upgrade -c .venv-newest/constraints.txt -e '.[test]' jax jaxlib || $(installation_failed)
	@touch $@
