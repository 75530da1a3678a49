# quire. `make help` lists what there is.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Client libraries that the server is tried with.
CLIENTS := .venv-clients
FILE ?= examples/demo.yaml
PORT ?= 8000
# A smaller or other torch, e.g. TORCH_SPEC=/path/to/torch-2.13.0+cpu-….whl (README, "A smaller torch").
TORCH_SPEC ?=
# What `make bench-autoscaling` replays (a slice of a production trace unless given) and where its rows go.
TRACE ?=
JSON ?= out/bench/autoscaling.json
# Random examples of each property under `make soak`.
SOAK ?= 4000
# `make kernels-aot TRITON=3.6` compiles with that Triton, kept in a folder of its own, rather than with the one in .venv.
TRITON ?=
CACHE := $(if $(XDG_CACHE_HOME),$(XDG_CACHE_HOME),$(HOME)/.cache)/quire
# `make images`: what they stand on (empty: made of Debian's packages), and what a GPU's first use of a kernel needs
# (empty: for CPUs; with a base of Debian's packages COMPILER='gcc libc6-dev python3-dev').
BASE_IMAGE ?=
COMPILER ?=
# Such as sm_90; empty is all.
AOT_TARGETS ?=
# More for pytest under `make e2e`, such as -k drain.
ARGS ?=
OTHER_TRITON := $(if $(TRITON),$(CACHE)/triton-$(TRITON))
DISTRIBUTIONS := common kernels engine gateway operator
ENGINE_FLAGS := operator/src/quire_operator/domain/engine_flags.json
EDITABLE := $(foreach d,$(DISTRIBUTIONS),-e ./$(d))

.DEFAULT_GOAL := help
.PHONY: help setup setup-dev up test e2e kernels-interpreted kernels-aot kernels-aot-bounds gpu-bundle lint bench bench-autoscaling guard-update peers soak generate cluster-binaries cluster-up cluster-down cluster-status images engine-flags chart-docs chart-snapshots lock clean

help: ## Show this list
	@grep -hE '^[a-z0-9-]+:.*?## ' $(MAKEFILE_LIST) | awk 'BEGIN {FS = ":.*?## "} {printf "  \033[1m%-18s\033[0m %s\n", $$1, $$2}'

setup: $(VENV)/.runtime ## Install what `make up` needs into .venv

setup-dev: $(VENV)/.dev $(CLIENTS)/.done ## Install what the tests and checks need as well

$(BIN)/uv: requirements/bootstrap.lock
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v < (3, 14) else "quire needs Python 3.11 to 3.13; found %d.%d. Choose another with: make PYTHON=python3.12 …" % v)'
	@echo "==> creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -q --disable-pip-version-check --require-hashes -r requirements/bootstrap.lock
	@touch $@

$(VENV)/.runtime: $(BIN)/uv requirements/runtime.lock $(foreach d,$(DISTRIBUTIONS),$(d)/pyproject.toml)
	@PYTHON=$(BIN)/python TORCH_SPEC="$(TORCH_SPEC)" requirements/install.sh requirements/runtime.lock
	@$(BIN)/uv pip install -q --python $(BIN)/python --no-deps --no-build-isolation $(EDITABLE)
	@touch $@

$(VENV)/.dev: $(BIN)/uv requirements/dev.lock $(foreach d,$(DISTRIBUTIONS),$(d)/pyproject.toml)
	@PYTHON=$(BIN)/python TORCH_SPEC="$(TORCH_SPEC)" requirements/install.sh requirements/dev.lock
	@$(BIN)/uv pip install -q --python $(BIN)/python --no-deps --no-build-isolation $(EDITABLE)
	@touch $@ $(VENV)/.runtime

$(CLIENTS)/.done: $(BIN)/uv requirements/clients.lock
	@echo "==> creating $(CLIENTS)"
	@$(BIN)/uv venv -q --clear --python $(BIN)/python $(CLIENTS)
	@PYTHON=$(CLIENTS)/bin/python UV=$(BIN)/uv requirements/install.sh requirements/clients.lock
	@touch $@

up: $(VENV)/.runtime ## Start FILE (examples/demo.yaml) locally on PORT; Ctrl-C drains
	@exec $(BIN)/quire up -f $(FILE) --port $(PORT)

test: $(VENV)/.dev $(CLIENTS)/.done lint kernels-interpreted kernels-aot ## Run every check and test
	$(MAKE) --no-print-directory kernels-aot TRITON=3.6 AOT_TARGETS=sm_90
	$(BIN)/pytest

kernels-interpreted: $(VENV)/.dev ## Test the Triton kernels and the runner over them without a GPU, in Triton's interpreter
	TRITON_INTERPRET=1 $(BIN)/pytest tests/kernels/triton tests/engine/triton

kernels-aot: $(VENV)/.dev $(if $(TRITON),$(OTHER_TRITON)/.done) ## Compile the Triton kernels for GPUs that are not here (TRITON=3.6: with that one)
	PYTHONPATH=$(OTHER_TRITON) $(BIN)/python benchmarks/kernels/aot.py --json out/bench/kernels_aot$(TRITON).json $(if $(AOT_TARGETS),--target $(AOT_TARGETS))

kernels-aot-bounds: $(VENV)/.dev ## Set benchmarks/kernels/aot_bounds.json to what the kernels take now, with either Triton
	$(BIN)/python benchmarks/kernels/aot.py --update
	$(MAKE) --no-print-directory $(CACHE)/triton-3.6/.done
	PYTHONPATH=$(CACHE)/triton-3.6 $(BIN)/python benchmarks/kernels/aot.py --widen

gpu-bundle: $(VENV)/.dev ## Pack what a GPU machine without a network needs: benchmarks/on_gpu.sh there runs tests and benchmarks
	BIN=$(BIN) benchmarks/gpu_bundle.sh

$(CACHE)/triton-%/.done: requirements/triton-%.lock $(BIN)/uv
	UV_SYSTEM_CERTS=$${UV_SYSTEM_CERTS:-1} $(BIN)/uv pip install -q --python $(BIN)/python --no-deps --require-hashes --target $(@D) -r $<
	@touch $@

e2e: $(VENV)/.dev ## Run the end-to-end scenarios on a cluster of this machine, or on that of KUBECONFIG (ARGS="-k drain", KEEP=1)
	$(BIN)/pytest tests/e2e --tb=short $(ARGS)

lint: $(VENV)/.dev ## Format check, lint, types, import contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

bench: $(VENV)/.runtime ## Run every benchmark briefly on the demo model (docs/benchmarks.md has the long ones)
	@mkdir -p out/bench
	$(BIN)/python benchmarks/kv/waste.py --json out/bench/waste.json
	$(BIN)/python benchmarks/kv/host_cost.py --steps 50 --json out/bench/host_cost.json
	$(BIN)/python benchmarks/kv/continuous_vs_static.py --runs 1 --json out/bench/continuous_vs_static.json
	$(BIN)/python benchmarks/kv/prefix_ttft.py --model demo --runs 1 --json out/bench/prefix_ttft.json
	$(BIN)/python benchmarks/kv/prefix_cost.py --runs 1 --json out/bench/prefix_cost.json
	$(BIN)/python benchmarks/kv/prefix_chat.py --conversations 8 --runs 1 --json out/bench/prefix_chat.json
	$(BIN)/python benchmarks/kv/preemption.py --requests 8 --runs 1 --json out/bench/preemption.json
	$(BIN)/python benchmarks/kv/fairness.py --json out/bench/fairness.json
	$(BIN)/python benchmarks/serving/busy_neighbour.py --json out/bench/busy_neighbour.json
	$(BIN)/python benchmarks/serving/gateway_overhead.py --requests 500 --json out/bench/gateway_overhead.json
	$(BIN)/python benchmarks/serving/generation_stall.py --json out/bench/generation_stall.json
	$(BIN)/python benchmarks/serving/compare.py --quick --json out/bench/compare.json
	$(BIN)/python benchmarks/serving/fair_sharing.py --queued 100 --requests 3 --json out/bench/fair_sharing.json
	$(BIN)/python benchmarks/kernels/run.py --quick --json out/bench/kernels.json
	$(BIN)/python benchmarks/serving/on_device.py --concurrency 1 4 --prompt 64 --output 16 --rounds 1 --steps 16 --json out/bench/on_device.json
	$(BIN)/python benchmarks/serving/step_breakdown.py --model demo --sequences 1 16 --rounds 2 --seconds 1 --json out/bench/step_breakdown.json
	$(BIN)/python benchmarks/serving/growth.py --quick --json out/bench/growth.json
	$(BIN)/python benchmarks/autoscaling/run.py --seeds 1 --delay 30 --fault none --json out/bench/autoscaling.json

bench-autoscaling: $(VENV)/.runtime ## Compare the autoscaler with others on TRACE, into JSON (minutes for an hour's trace)
	$(BIN)/python benchmarks/autoscaling/run.py $(if $(TRACE),--trace '$(TRACE)') --json '$(JSON)'

guard-update: $(VENV)/.dev ## Set tests/engine/guard/bounds.json to what a step and a streamed token cost now
	PYTHONPATH=tests/engine/guard/support:benchmarks/serving $(BIN)/python -m quire_guard --update

peers: $(VENV)/.runtime ## Install the peers that benchmarks/serving/compare.py measures beside quire (many minutes: it compiles one)
	$(BIN)/python benchmarks/peers/install_vllm.py
	$(BIN)/python benchmarks/peers/install_transformers.py
	$(BIN)/python benchmarks/peers/install_llama_cpp.py

soak: $(VENV)/.dev ## Run the property tests for long (SOAK examples each), and outages as long as real ones
	QUIRE_HYPOTHESIS_EXAMPLES=$(SOAK) $(BIN)/pytest --timeout 0 tests/engine/core tests/operator/autoscaler
	QUIRE_OUTAGE_SECONDS=60 $(BIN)/pytest --timeout 0 -s tests/operator/kube/test_outages.py

generate: charts/quire/templates/crds/llmdeployments.yaml docs/crd.md ## Make what is made from the CRD: the chart's copy, docs/crd.md

charts/quire/templates/crds/llmdeployments.yaml: crds/llmdeployments.yaml Makefile
	@mkdir -p $(@D)
	@{ echo '{{- /* Made from crds/llmdeployments.yaml by `make generate`; change it there. */ -}}'; \
	   echo '{{- if .Values.crds.create }}'; \
	   sed 's|^  name: llmdeployments.quire.dev$$|&\n  annotations:\n    helm.sh/resource-policy: keep|' $<; \
	   echo '{{- end }}'; } > $@

docs/crd.md: crds/llmdeployments.yaml crds/document.py
	@test -x $(BIN)/python || $(MAKE) setup
	@$(BIN)/python crds/document.py > $@.new && mv $@.new $@

chart-docs: $(VENV)/.dev ## Make the chart's table of values and its schema's descriptions from values.yaml
	@$(BIN)/python charts/document.py

chart-snapshots: $(VENV)/.dev ## Render the chart into the snapshots that the tests compare it with
	@$(BIN)/python tests/charts/support/chart_support/snapshots.py

cluster-binaries: $(VENV)/.dev ## Build etcd, Kubernetes, CoreDNS, helm and kwok for the tests (first time: about 13 minutes)
	@$(BIN)/python tests/cluster/cluster.py binaries

cluster-up: $(VENV)/.dev ## Start a Kubernetes with two nodes on this machine (as root; again: start what died)
	@$(BIN)/python tests/cluster/cluster.py up --tier nodes

cluster-down: $(VENV)/.dev ## Stop it, and remove all of it but images (PURGE=1: these too)
	@$(BIN)/python tests/cluster/cluster.py down $(if $(PURGE),--purge)

images: $(VENV)/.dev ## Build the three images by buildah, push them to REGISTRY (default: the test cluster's), list their layers
	@BASE_IMAGE='$(BASE_IMAGE)' COMPILER='$(COMPILER)' TORCH_SPEC='$(TORCH_SPEC)' \
	  $(BIN)/python tests/cluster/cluster.py images $(if $(REGISTRY),--registry '$(REGISTRY)') $(if $(TAG),--tag '$(TAG)')

cluster-status: $(VENV)/.dev ## Say what of it runs
	@$(BIN)/python tests/cluster/cluster.py status

engine-flags: $(VENV)/.runtime ## Renew the operator's copy of the engine's flags
	@$(BIN)/quire-engine --flag-schema > $(ENGINE_FLAGS).new && mv $(ENGINE_FLAGS).new $(ENGINE_FLAGS)

lock: $(BIN)/uv ## Resolve requirements/*.in into the hash-locked *.lock
	BIN=$(BIN) requirements/lock.sh

clean: ## Remove what the tools left behind (keeps .venv and .venv-clients)
	rm -rf out .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +
