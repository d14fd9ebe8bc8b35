# One command per habit. `make help` lists them.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CLUSTER := .cluster
# Tests, demo and benchmarks delete things: they see the cluster of `make up` only, whatever KUBECONFIG a shell has set.
# `make install` alone goes to the cluster that KUBECONFIG names, if it names one.
GIVEN_KUBECONFIG := $(KUBECONFIG)
override export KUBECONFIG := $(CURDIR)/$(CLUSTER)/kubeconfig
HELM_ARGS ?=
STAMP := $(VENV)/.requirements
SOURCES := operator engine_image tests examples docs

.PHONY: help
help: ## List the commands
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# --- Python environment ------------------------------------------------------------------------------------------
$(STAMP): requirements.lock pyproject.toml
	@echo "==> Python environment in $(VENV) (pinned versions, checked hashes)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed; set PYTHON=…"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { echo "venv failed; on Debian: apt-get install python3-venv"; exit 1; }
	@$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps -e .
	@touch $@

.PHONY: lock
lock: $(STAMP) ## Pin the newest allowed versions anew, with hashes
	@for part in "engine_image/requirements.lock --extra=engine" "operator/requirements.lock --extra=operator" \
	    "requirements.lock --extra=operator --extra=engine --extra=dev"; do set -- $$part; out=$$1; shift; \
	  echo "==> $$out"; $(BIN)/pip-compile -q --generate-hashes --no-emit-index-url --no-emit-find-links \
	    --no-emit-trusted-host --allow-unsafe --strip-extras --no-header --annotation-style=line "$$@" -o $$out pyproject.toml; done

# --- Checks without a cluster --------------------------------------------------------------------------------------
.PHONY: lint
lint: $(STAMP) ## Formatting, lint, types, layers
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/mypy tests/cluster
	$(BIN)/lint-imports

.PHONY: unit
unit: $(STAMP) ## Fast tests: pure code, no cluster
	$(BIN)/pytest -q -n 2 tests/unit

HISTORIES ?= 20000
.PHONY: simulation
simulation: $(STAMP) ## 20,000 histories of faults on a virtual clock, on all cores
	SIMULATION_HISTORIES=$(HISTORIES) $(BIN)/pytest -q tests/simulation

.PHONY: component
component: $(STAMP) ## Real sockets and processes on loopback and in own network namespaces
	$(BIN)/pytest -q tests/component

.PHONY: golden
golden: $(STAMP) ## Write the generated files anew: CRD, docs/api.md, golden test data, transcripts
	$(BIN)/python -m dp_operator.crd crds/dataparallel.io_dataparalleldeployments.yaml charts/dp-operator/files/dataparallel.io_dataparalleldeployments.yaml
	PYTHONPATH=operator $(BIN)/python docs/generate_api.py
	$(BIN)/pytest -q tests/unit/operator --golden
	UPDATE_GOLDEN=1 $(BIN)/pytest -q tests/unit/handshake/test_protocol_transcripts.py

# --- Cluster -----------------------------------------------------------------------------------------------------------
.PHONY: up
up: ## Start a three-node Kubernetes (kind if a container engine runs, else the embedded one)
	@$(PYTHON) -m tests.cluster up

.PHONY: down
down: ## Stop exactly what `make up` started
	@$(PYTHON) -m tests.cluster down

.PHONY: images
images: ## Build both images and load them on every node
	@$(PYTHON) -m tests.cluster images

# $(1): kubeconfig
define install_with
	@export KUBECONFIG="$(1)" PATH="$(CURDIR)/$(CLUSTER)/bin:$$PATH"; \
	for tool in helm kubectl; do command -v $$tool >/dev/null || { echo "$$tool is missing: install it, or run make up"; exit 1; }; done; \
	server=$$(kubectl config view --minify -o 'jsonpath={.clusters[0].cluster.server}'); \
	test -n "$$server" || { echo "no cluster in $(1): run make up, or set KUBECONFIG"; exit 1; }; \
	echo "==> installing the operator in $$server (KUBECONFIG=$(1))"; \
	helm upgrade --install dp-operator charts/dp-operator --namespace dp-system --create-namespace \
	  --set-string podAnnotations.sources="$$(find operator -name '*.py' -o -name '*.lock' -o -name Dockerfile | LC_ALL=C sort | xargs cat | sha256sum | cut -c1-12)" \
	  --wait --timeout 120s $(HELM_ARGS) >/dev/null; \
	echo "==> operator installed in namespace dp-system: $$(kubectl -n dp-system get pods -o name | tr '\n' ' ')"
endef

.PHONY: install
install: ## Install or upgrade the operator in the cluster of KUBECONFIG, else in that of `make up`; HELM_ARGS for more
	$(call install_with,$(or $(GIVEN_KUBECONFIG),$(KUBECONFIG)))

.PHONY: install-here
install-here: up
	$(call install_with,$(KUBECONFIG))

.PHONY: demo
demo: up images install-here ## The whole story: cluster, operator, 8 ranks from pending to ready, completions
	@$(PYTHON) examples/demo.py

.PHONY: chart
chart: $(STAMP) up ## Chart tests
	$(BIN)/pytest -q tests/chart

.PHONY: e2e
e2e: $(STAMP) up images install-here ## End-to-end tests on the cluster
	$(BIN)/pytest -q tests/apiserver tests/e2e

.PHONY: survival
survival: $(STAMP) up images install-here ## Faults of groups, operator, nodes and cluster, after which all must be well
	$(BIN)/pytest -q tests/bed

# `up` is early, because it installs what the component tests need: ip and iptables.
.PHONY: test
test: lint unit simulation up chart component e2e survival ## Everything

.PHONY: bench
bench: $(STAMP) up images install-here ## The numbers of docs/performance.md
	$(BIN)/python -m tests.bench.operator_bench
	$(BIN)/python tests/bench/handshake_bench.py

# --- Beside real vLLM ------------------------------------------------------------------------------------------------
.PHONY: conformance
conformance: $(STAMP) ## Our engine and relay beside real vLLM on CPU, which is installed once into a cache
	@begun=$$(date +%s); $(PYTHON) -m tests.conformance.environment || exit; installed=$$(date +%s); \
	CONFORMANCE_WRITE=1 $(BIN)/pytest -q -n 2 --dist loadgroup tests/conformance; status=$$?; ended=$$(date +%s); \
	echo "==> install $$((installed - begun)) s + tests $$((ended - installed)) s = $$((ended - begun)) s"; exit $$status

.PHONY: e2e-vllm
e2e-vllm: $(STAMP) up images install-here ## Real vLLM on CPU as the engine of three groups on the cluster
	@$(PYTHON) -m tests.conformance.environment
	$(BIN)/pytest -q tests/e2e_vllm

.PHONY: bench-engine
bench-engine: $(STAMP) ## Our front end and handshake beside vLLM's, with the same stand-in ranks
	@$(PYTHON) -m tests.conformance.environment
	$(BIN)/python tests/bench/engine_bench.py --write
