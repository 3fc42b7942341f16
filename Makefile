# Each target installs what it needs first; `make help` lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
KUBE := .cache/kubernetes/kube

.DEFAULT_GOAL := help
.PHONY: help install demo test mutants lint bench vllm crds e2e clean

help: ## List the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv==0.13.9
	$(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python --constraints constraints.txt --editable '.[operator,worker,dev]'
	touch $(STAMP)

install: $(STAMP) ## Make a virtual environment in .venv with everything that development needs

demo: install ## Start the whole pipeline on this machine and ask it about an image, a video and a sound
	$(BIN)/mmd demo

test: install ## Run every test that needs no cluster (the first time, Go builds the API server for it: minutes)
	test -n "$$KUBEBUILDER_ASSETS" || test -x $(KUBE) || sh e2e/kubernetes/build.sh $(KUBE) || echo "tests with an API server are skipped"
	$(BIN)/python -m pytest -n 2 --dist loadgroup

mutants: install ## Change the pure modules one operator at a time; at most one change in ten may pass their tests (half an hour)
	$(BIN)/python -m bench.mutants $(MUTANTS)

lint: install ## Style, types and the walls between packages
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: install ## Measure the role layouts beside transformers; the report goes to bench/reports
	$(BIN)/python -m bench.layouts

vllm: install ## Install vLLM (its CPU build) in .cache/vllm, for `python -m bench.versus_vllm`
	$(BIN)/python images/install_vllm.py .cache/vllm

crds: install ## Generate the CRD, the reference, the pages of metrics and messages, and the dashboards from the code
	$(BIN)/python -m mmd_api.generate
	$(BIN)/python docs/make_metrics_page.py
	$(BIN)/python docs/make_messages_page.py
	$(BIN)/python -m mmd_dashboards.grafana

e2e: install ## Make a cluster and images, install the chart, ask a deployment questions, remove it all (E2E=--help: options)
	$(BIN)/python -m e2e.run $(E2E)

clean: ## Remove what the other targets made
	rm -rf $(VENV) .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis build *.egg-info
