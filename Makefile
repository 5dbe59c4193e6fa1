# TurtleMQ: everything a developer or a newcomer runs. `make` alone lists the targets.
#
#   PYTHON=python3.12 make setup     choose the interpreter (3.11 or newer)
#   make run ARGS="--port 8080"      pass arguments on (run, cluster, test, bench, bench-quick, lock, release)

SHELL := /bin/sh
MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-done
KERNEL_STAMP := $(VENV)/.kernel-done
RUN_STAMP := $(VENV)/.run-done
SPARK_STAMP := $(VENV)/.spark-done
BENCH_STAMP := $(VENV)/.bench-done
LOG := $(VENV)/setup.log
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
COMPILE := $(BIN)/uv pip compile --quiet --universal --generate-hashes --no-emit-index-url --no-header --no-emit-package turtlemq-client
ARGS ?=
# Another port for HTTP, or a configuration file, says where gRPC listens, if at all.
GRPC := $(if $(or $(TURTLEMQ_GRPC_PORT),$(TURTLEMQ_CONFIG),$(findstring --port,$(ARGS)),$(findstring --config,$(ARGS))),,--grpc-port 8879)
SPARK_TESTS := tests/test_spark.py tests/test_report.py
# Tests that run at once: half as many again as there are cores, since tests of servers wait half of their time.
WORKERS ?= $(shell echo $$((($$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2) * 3 + 1) / 2)))

.PHONY: help setup spark run cluster test trust soak check lint format lock bench bench-quick bench-setup bench-spark release clean distclean browser etcd tools

help: ## list the targets
	@echo "TurtleMQ. Usage: make TARGET [ARGS=\"...\"]"
	@echo
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)$$/\1|\2/p' $(firstword $(MAKEFILE_LIST)) \
	  | while IFS='|' read -r name text; do printf '  %-12s %s\n' "$$name" "$$text"; done

setup: $(STAMP) $(KERNEL_STAMP) ## make .venv with the locked packages and the turtlemq command (quick when nothing changed)
	@:

spark: $(SPARK_STAMP) ## add Spark, and a Java for it (about half a gigabyte; part of `make test`)
	@:

# Only what the server itself needs, if nothing is there yet: a newcomer should not wait for test tools.
run: $(if $(wildcard $(STAMP)),setup,$(RUN_STAMP)) $(KERNEL_STAMP) ## start the server, with gRPC on port 8879 (ARGS="--data DIR --port P --grpc-port G")
	@exec $(BIN)/python -m turtlemq serve $(if $(findstring --grpc-port,$(ARGS)),,$(GRPC)) $(ARGS)

cluster: $(if $(wildcard $(STAMP)),setup,$(RUN_STAMP)) $(KERNEL_STAMP) etcd ## start etcd and three nodes on this machine, to try them out (ARGS="--port P")
	@exec $(BIN)/python deploy/local_cluster.py $(ARGS)

test: spark browser etcd tools bench-setup ## run the whole test suite (ARGS="-k name" WORKERS=2)
	@status=0; $(BIN)/pytest -n $(WORKERS) --dist loadgroup $(SPARK_TESTS:%=--ignore=%) $(ARGS) || [ $$? -eq 5 ] || status=1; \
	for file in $(SPARK_TESTS); do echo "── $$file, on its own: Spark takes both cores"; $(BIN)/pytest $$file $(ARGS) || [ $$? -eq 5 ] || status=1; done; \
	exit $$status

trust: setup ## try to break what is promised, at length: an hour or two (ARGS="damage --cases 500")
	@exec $(BIN)/python -m tests.trust --write $(ARGS)

soak: setup ## a steady mixed load with restarts, and a picture of it (ARGS="--minutes 240")
	@exec $(BIN)/python -m tests.trust.soak --picture docs/soak.svg $(ARGS)

browser: ## install Chromium for the tests of the pages, where that is allowed
	@sh tests/get_package.sh chromium

etcd: ## install etcd for clusters and their tests, where that is allowed
	@sh tests/get_package.sh etcd-server

tools: setup ## install Go, Java, TypeScript, Redocly, Helm and promtool for the tests that use them, where that is allowed
	@sh tests/get_tools.sh

check: lint ## lint, types and the fast tests: run before every commit
	@echo "── fast tests"
	@exec $(BIN)/pytest -q -n auto -m "not slow" $(ARGS)

lint: setup ## ruff check, ruff format --check and mypy
	@echo "── ruff check"
	@$(BIN)/ruff check --quiet .
	@echo "── ruff format --check"
	@$(BIN)/ruff format --check --quiet . || { echo "These files are not formatted: run 'make format'."; $(BIN)/ruff format --check . ; exit 1; }
	@echo "── mypy"
	@$(BIN)/mypy

format: setup ## format the code and repair what ruff can
	@$(BIN)/ruff check --fix --quiet . || true
	@$(BIN)/ruff format .

bench: bench-setup etcd ## run the benchmarks: TurtleMQ, the peers and the machine's limits, with a report
	@exec $(BIN)/python -m benchmarks $(ARGS)

bench-quick: bench-setup etcd ## the same, small: in a few minutes
	@exec $(BIN)/python -m benchmarks --quick --minutes 4 $(ARGS)

bench-setup: $(BENCH_STAMP) ## install the peers that the benchmarks compare with, where that is allowed
	@sh benchmarks/peers/setup.sh

bench-spark: spark ## measure the Spark source against Spark's own readers (ARGS=--quick)
	@exec $(BIN)/python -m benchmarks.spark $(ARGS)

lock: $(BIN)/python ## make the locks again from pyproject.toml (ARGS=--upgrade for newer versions)
	@[ -x $(BIN)/uv ] || { echo "Installing uv into $(VENV)"; $(PIP) install --quiet uv; }
	@echo "Locking: requirements.lock"
	@$(COMPILE) $(ARGS) --extra dev pyproject.toml -o requirements.lock >/dev/null
	@echo "Locking: requirements-run.lock"
	@$(COMPILE) $(ARGS) -c requirements.lock --extra grpc pyproject.toml -o requirements-run.lock >/dev/null
	@echo "Locking: requirements-spark.lock"
	@$(COMPILE) $(ARGS) --extra dev --extra spark pyproject.toml -o requirements-spark.lock >/dev/null
	@echo "Locking: requirements-bench.lock"
	@$(COMPILE) $(ARGS) -c requirements.lock --extra dev --extra bench pyproject.toml -o requirements-bench.lock >/dev/null
	@! grep -nE '://|--(extra-)?index-url|--find-links' requirements.lock requirements-run.lock requirements-spark.lock requirements-bench.lock \
	  || { echo "A lock names a host: see the lines above."; exit 1; }

release: setup ## build sdists, wheels and their papers into dist/, twice, and try them with each Python from 3.11 on
	@exec $(BIN)/python -m packages.release $(ARGS)

clean: ## remove caches and build leftovers (never data/)
	@rm -rf .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist *.egg-info
	@rm -f turtlemq/segment/_kernel.abi3.so $(KERNEL_STAMP)
	@find turtlemq tests benchmarks spark -type d -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

distclean: clean ## clean, and remove .venv too
	@rm -rf $(VENV)

# ── how set-up works ─────────────────────────────────────────────────────────────────────────────────────
# The stamp is newer than the lock and pyproject.toml when the environment is up to date. Everything is
# installed from the lock by hash, the build backend included, so building the project itself downloads nothing.

$(STAMP): requirements.lock pyproject.toml packages/client/pyproject.toml | $(BIN)/python
	@echo "Installing the locked packages into $(VENV) (a minute or so the first time)"
	@$(PIP) install --require-hashes -r requirements.lock >$(LOG) 2>&1 || { $(call explain,the packages of requirements.lock); }
	@echo "Installing turtlemq itself (editable)"
	@$(PIP) install --no-deps --no-build-isolation -e packages/client -e . >>$(LOG) 2>&1 || { $(call explain,turtlemq itself); }
	@touch $@
	@echo "Ready: $(BIN)/turtlemq"

$(SPARK_STAMP): requirements-spark.lock $(STAMP)
	@echo "Installing Spark into $(VENV) (a few minutes the first time)"
	@$(PIP) install --require-hashes -r requirements-spark.lock >$(LOG) 2>&1 || { $(call explain,the packages of requirements-spark.lock); }
	@echo "Java for Spark: $$($(BIN)/python -m pyspark_turtlemq.java)"
	@touch $@

$(BENCH_STAMP): requirements-bench.lock $(STAMP)
	@echo "Installing what the benchmarks need into $(VENV)"
	@$(PIP) install --require-hashes -r requirements-bench.lock >$(LOG) 2>&1 || { $(call explain,the packages of requirements-bench.lock); }
	@touch $@

$(RUN_STAMP): requirements-run.lock | $(BIN)/python
	@echo "Installing what the server needs into $(VENV) (half a minute the first time)"
	@$(PIP) install --require-hashes -r requirements-run.lock >$(LOG) 2>&1 || { $(call explain,the packages of requirements-run.lock); }
	@$(BIN)/python -c 'import sysconfig as s; open(s.get_path("purelib") + "/turtlemq-clone.pth", "w").write("$(CURDIR)\n")'
	@printf '#!%s\nfrom turtlemq.cli import main\n\nmain()\n' "$(CURDIR)/$(BIN)/python" >$(BIN)/turtlemq && chmod +x $(BIN)/turtlemq
	@touch $@

# Optional: without a C compiler the same work is done with numpy.
$(KERNEL_STAMP): turtlemq/segment/kernel.c packages/build_kernel.py | $(BIN)/python
	@$(BIN)/python packages/build_kernel.py
	@touch $@

$(BIN)/python:
	@$(find_python); \
	echo "Making $(VENV) with $$found ($$($$found -c 'import platform; print(platform.python_version())'))"; \
	"$$found" -m venv --clear $(VENV)

# Says what failed, shows the end of pip's log, and stops.
define explain
echo; echo "Set-up failed: pip could not install $(1)."; grep -v '^WARNING: Location' $(LOG) | tail -n 12 | sed 's/^/  | /'; \
echo "The whole log is in $(LOG). Is the Python package index reachable (network, proxy, pip's own settings)?"; \
echo "After that is repaired, run 'make setup' again: it goes on where it stopped."; exit 1
endef

# Sets $found to the first interpreter that is new enough and can make environments: PYTHON if given, else a few names.
define find_python
found=; for python in $(or $(PYTHON),python3.11 python3 python3.12 python3.13 python3.14); do \
  if "$$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then found="$$python"; break; fi; \
done; \
if [ -z "$$found" ]; then \
  echo "Set-up failed: no Python 3.11 or newer with the venv module was found (tried: $(or $(PYTHON),python3.11 python3 python3.12 python3.13 python3.14))."; \
  echo "Install one (on Debian or Ubuntu: python3 and python3-venv), or name it: make setup PYTHON=/path/to/python3.11"; exit 1; \
fi
endef
