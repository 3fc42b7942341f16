# Each target installs what it needs first; `make help` lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
KUBE := .cache/kubernetes/kube
VLLM := .cache/vllm

.DEFAULT_GOAL := help
.PHONY: help install demo check test gate drills mutants lint bench vllm crds e2e release-check clean

help: ## List the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv==0.13.9
	$(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python --constraints constraints.txt --editable '.[operator,worker,dev]'
	touch $(STAMP)

install: $(STAMP) ## Create a virtual environment in .venv with everything needed for development

demo: install ## Start the whole pipeline on this machine and query it with an image, a video and an audio clip
	$(BIN)/mmd demo

test: install ## Run all tests that need neither a cluster nor the machine for themselves (the first run may build the API server with Go)
	$(BIN)/python -m ci.run $(or $(LEGS),test)

check: install ## Run lint and the tests that start no worker, gateway or operator as a process: what to run while you work
	$(BIN)/python -m ci.run check

gate: install ## Run what CI runs: lint, vllm, test, demo and the drills chosen for the commit, all of them whatever fails
	$(BIN)/python -m ci.run gate

drills: install vllm ## Run the long proofs of ci/drills.toml, one at a time; `make drill-NAME` runs one
	$(BIN)/python -m ci.run drills

drill-%: install vllm
	$(BIN)/python -m ci.run $@

mutants: install ## Run mutation tests of the pure modules; at most one mutant in ten may survive (half an hour)
	$(BIN)/python -m bench.mutants $(MUTANTS)

lint: install ## Check style, types, import boundaries, the rules of the house, and that generated pages are up to date
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m ci.house
	$(BIN)/python docs/make_metrics_page.py --check
	$(BIN)/python docs/make_messages_page.py --check
	$(BIN)/python docs/make_api_page.py --check

bench: install ## Benchmark the role layouts against transformers; writes the report to bench/reports
	$(BIN)/python -m bench.layouts

vllm: install ## Install vLLM (its CPU build) in .cache/vllm, for spec.engine.type VLLM
	$(BIN)/python images/install_vllm.py $(VLLM)

crds: install ## Generate the CRD, the reference, the pages of metrics and messages, the fields of the API, and the dashboards from the code
	$(BIN)/python -m mmd_api.generate
	$(BIN)/python docs/make_metrics_page.py
	$(BIN)/python docs/make_messages_page.py
	$(BIN)/python docs/make_api_page.py
	$(BIN)/python -m mmd_dashboards.grafana

e2e: install ## Create a cluster and images, install the chart, query a deployment, remove everything (E2E=--help lists options)
	$(BIN)/python -m e2e.run $(E2E)

release-check: install ## Check what can be checked of a release without publishing it (RELEASE=--layers builds images twice)
	$(BIN)/python -m release.check $(RELEASE)

clean: ## Remove the outputs of the other targets
	rm -rf $(VENV) .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis build *.egg-info
