# The commands of this project. Everything goes into .venv; nothing else on the machine is touched.
#
#   make serve    install, build, start a cluster on this host and print how to send it a request
#   make test     install with the tools, run all tests       make test ARGS="tests/store -k lease"
#   make quick    lint and the tests of the cores, in less than a minute
#   make check    lint, format, types                         make bench   the benchmarks
#   make coverage the lines that tests run
#   make clean    remove .venv and everything that was built
#
# PYTHON=python3.12, CXX=g++-12 and VENV=/big/disk/venv choose others than the usual ones.

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
export PYTHON VENV

BUILT_FROM := pyproject.toml constraints-tools.txt CMakeLists.txt scripts/install $(wildcard native/*.cpp native/*.h)

.PHONY: serve test quick check bench coverage clean
.DEFAULT_GOAL := serve

serve: $(VENV)/.installed-serve
	@exec $(VENV)/bin/mooncake up $(ARGS)

test: $(VENV)/.installed-dev
	@scripts/test $(ARGS)

quick: $(VENV)/.installed-dev
	@scripts/quick $(ARGS)

check: $(VENV)/.installed-dev
	@scripts/check

bench: $(VENV)/.installed-dev
	@scripts/bench $(ARGS)

coverage: $(VENV)/.installed-dev
	@scripts/coverage $(ARGS)

# Python files are used as they are, so only these sources require another installation.
$(VENV)/.installed-serve: $(BUILT_FROM)
	@scripts/install serve

$(VENV)/.installed-dev: $(BUILT_FROM)
	@scripts/install dev

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
