# One command per habit. `make help` lists them.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CLUSTER := .cluster
export KUBECONFIG ?= $(CURDIR)/$(CLUSTER)/kubeconfig
KUBECTL := $(CLUSTER)/bin/kubectl
HELM := $(CLUSTER)/bin/helm
STAMP := $(VENV)/.requirements
SOURCES := operator engine_image tests examples docs

.PHONY: help
help: ## List the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

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

.PHONY: simulation
simulation: $(STAMP) ## 20,000 histories of faults on a virtual clock, both cores
	SIMULATION_HISTORIES=20000 $(BIN)/pytest -q tests/simulation

.PHONY: component
component: $(STAMP) ## Real sockets and processes on loopback and in own network namespaces
	$(BIN)/pytest -q tests/component

.PHONY: golden
golden: $(STAMP) ## Write the generated files anew: CRD and golden test data
	$(BIN)/python -m dp_operator.crd crds/dataparallel.io_dataparalleldeployments.yaml charts/dp-operator/files/dataparallel.io_dataparalleldeployments.yaml
	PYTHONPATH=operator $(BIN)/python docs/generate_api.py
	$(BIN)/pytest -q tests/unit/operator --golden

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

.PHONY: install
install: ## Install or upgrade the operator in the current cluster, by Helm
	@$(HELM) upgrade --install dp-operator charts/dp-operator --namespace dp-system --create-namespace \
	  --set-string podAnnotations.sources="$$(find operator -name '*.py' -o -name '*.lock' -o -name Dockerfile | LC_ALL=C sort | xargs cat | sha256sum | cut -c1-12)" \
	  --wait --timeout 120s >/dev/null
	@echo "==> operator installed in namespace dp-system: $$($(KUBECTL) -n dp-system get pods -o name | tr '\n' ' ')"

.PHONY: demo
demo: up images install ## The whole story: cluster, operator, 8 ranks from pending to ready, completions
	@$(PYTHON) examples/demo.py

.PHONY: chart
chart: $(STAMP) up ## Chart tests
	$(BIN)/pytest -q tests/chart

.PHONY: e2e
e2e: $(STAMP) up images install ## End-to-end tests on the cluster
	$(BIN)/pytest -q tests/apiserver tests/e2e

.PHONY: test
test: lint unit simulation component chart e2e ## Everything

.PHONY: bench
bench: $(STAMP) up images install ## The numbers of docs/performance.md
	$(BIN)/python -m tests.bench
