# Build, test and development tasks of quire. `make help` lists the targets.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Environment of the client libraries that the tests run against the server.
CLIENTS := .venv-clients
FILE ?= examples/demo.yaml
PORT ?= 8000
# Another torch wheel, for example TORCH_SPEC=/path/to/torch-2.13.0+cpu-….whl (README, "A smaller torch").
TORCH_SPEC ?=
# Trace for `make bench-autoscaling` (default: a slice of a production trace) and output file for its rows.
TRACE ?=
JSON ?= out/bench/autoscaling.json
# Random examples per property of the scheduler and the autoscaler in `make soak`; other properties have a tenth.
SOAK ?= 4000
# `make kernels-aot TRITON=3.6` compiles with this Triton from a separate folder instead of the one in .venv.
TRITON ?=
CACHE := $(if $(XDG_CACHE_HOME),$(XDG_CACHE_HOME),$(HOME)/.cache)/quire
# `make images`: the base image (empty: built from Debian's packages), and the packages with which Triton compiles on a GPU
# (empty: CPUs only; with a base of Debian's packages COMPILER='gcc libc6-dev python3-dev').
BASE_IMAGE ?=
COMPILER ?=
# GPU architectures such as sm_90 or gfx942; empty means all.
AOT_TARGETS ?=
# Additional pytest arguments for `make e2e`, such as -k drain.
ARGS ?=
OTHER_TRITON := $(if $(TRITON),$(CACHE)/triton-$(TRITON))
DISTRIBUTIONS := common kernels engine gateway operator cli
ENGINE_FLAGS := operator/src/quire_operator/api/engine_flags.json
EDITABLE := $(foreach d,$(DISTRIBUTIONS),-e ./$(d))

# Folders of `make test-fast`: pure logic that imports no torch and starts no server.
FAST := tests/common tests/engine/core tests/engine/text tests/gateway/test_parts.py tests/gateway/test_routing.py \
  $(addprefix tests/operator/,admission api autoscaling capacity deployment kube/lease) \
  tests/cli/inspection
# The parts of `make test`, two of which run at the same time, and the markers of the tests that it leaves out.
LOCAL := not cluster and not slow
BUNDLE_TEST := tests/kernels/test_gpu_bundle.py
MODEL_TESTS := tests/engine/model tests/engine/parity
OTHER_TESTS := $(filter-out tests/engine tests/e2e tests/support,$(patsubst %/,%,$(wildcard tests/*/)))

.DEFAULT_GOAL := help
.PHONY: help setup setup-dev up test test-engine test-models test-others test-fast test-cluster test-slow e2e kernels-interpreted kernels-aot kernels-aot-bounds gpu-bundle lint bench bench-autoscaling guard-update peers soak generate cluster-binaries cluster-up cluster-down cluster-status images engine-flags vllm-flags chart-docs lock clean

help: ## List all targets
	@grep -hE '^[a-z0-9-]+:.*?## ' $(MAKEFILE_LIST) | awk 'BEGIN {FS = ":.*?## "} {printf "  \033[1m%-19s\033[0m %s\n", $$1, $$2}'

setup: $(VENV)/.runtime ## Install the dependencies of `make up` into .venv

setup-dev: $(VENV)/.dev $(CLIENTS)/.done ## Also install the dependencies of tests and checks

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

up: $(VENV)/.runtime ## Serve FILE (default examples/demo.yaml) locally on PORT; Ctrl-C drains and stops
	@exec $(BIN)/quire up -f $(FILE) --port $(PORT)

test: $(VENV)/.dev $(CLIENTS)/.done ## Run the checks and all tests that need neither an API server nor Go nor root (12 minutes on two cores)
	$(MAKE) --no-print-directory -j2 lint test-engine test-others test-models

test-engine: $(VENV)/.dev $(CLIENTS)/.done ## Run the part of `make test` that tests the engine without its models
	@set -o pipefail; $(BIN)/pytest -m '$(LOCAL)' tests/engine $(addprefix --ignore ,$(MODEL_TESTS)) | sed -u 's/^/engine | /'

test-models: $(VENV)/.dev ## Run the part of `make test` that loads models and compares them with transformers
	@set -o pipefail; $(BIN)/pytest -m '$(LOCAL)' $(MODEL_TESTS) | sed -u 's/^/models | /'

test-others: $(VENV)/.dev ## Run the part of `make test` that tests all other distributions
	@set -o pipefail; $(BIN)/pytest -m '$(LOCAL)' $(OTHER_TESTS) --ignore $(BUNDLE_TEST) | sed -u 's/^/others | /'

test-cluster: $(VENV)/.dev ## Run the tests that need a real API server, helm or Prometheus, which are built and fetched the first time
	@set -o pipefail; $(BIN)/pytest -m cluster $(OTHER_TESTS) | sed -u 's/^/cluster | /'

test-slow: $(VENV)/.dev $(CLIENTS)/.done ## Run what takes many seconds for one fault: other client libraries, real vocabularies, shipped kernels
	$(BIN)/pytest -m slow tests

test-fast: $(VENV)/.dev ## Run the tests of pure logic, without torch, servers and Kubernetes (under two minutes)
	$(BIN)/pytest -q -m 'not slow' -p no:cacheprovider $(FAST)

kernels-interpreted: $(VENV)/.dev ## Test the Triton kernels and the GPU runner in Triton's interpreter, without a GPU
	TRITON_INTERPRET=1 $(BIN)/pytest tests/kernels/ops tests/kernels/triton tests/engine/triton

kernels-aot: $(VENV)/.dev $(if $(TRITON),$(OTHER_TRITON)/.done) ## Compile the Triton kernels ahead of time, without a GPU (TRITON=3.6 selects the Triton version)
	PYTHONPATH=$(OTHER_TRITON) $(BIN)/python -m benchmarks.kernels.aot --json out/bench/kernels_aot$(TRITON).json $(if $(AOT_TARGETS),--target $(AOT_TARGETS))

kernels-aot-bounds: $(VENV)/.dev ## Update benchmarks/kernels/aot_bounds.json to the current resource use of the kernels with both Triton versions
	$(BIN)/python -m benchmarks.kernels.aot --update
	$(MAKE) --no-print-directory $(CACHE)/triton-3.6/.done
	PYTHONPATH=$(CACHE)/triton-3.6 $(BIN)/python -m benchmarks.kernels.aot --widen --target sm_80 sm_90 sm_100 sm_120

gpu-bundle: $(VENV)/.dev ## Pack and rehearse tests and benchmarks for a GPU machine without a network; run benchmarks/on_gpu.sh there
	$(BIN)/pytest $(BUNDLE_TEST)
	BIN=$(BIN) benchmarks/gpu_bundle.sh

$(CACHE)/triton-%/.done: requirements/triton-%.lock $(BIN)/uv
	UV_SYSTEM_CERTS=$${UV_SYSTEM_CERTS:-1} $(BIN)/uv pip install -q --python $(BIN)/python --no-deps --require-hashes --target $(@D) -r $<
	@touch $@

e2e: $(VENV)/.dev ## Run the end-to-end scenarios on a local cluster, or on the cluster of KUBECONFIG (ARGS="-k drain", KEEP=1)
	$(BIN)/pytest tests/e2e --tb=short $(ARGS)

lint: $(VENV)/.dev ## Check formatting, lint, types, import contracts and wording
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python tools/check_words.py

bench: $(VENV)/.runtime ## Run short versions of all benchmarks on the demo model (docs/benchmarks.md lists the long ones)
	@mkdir -p out/bench
	$(BIN)/python -m benchmarks.serving.host_cost --steps 50 --json out/bench/host_cost.json
	$(BIN)/python -m benchmarks.serving.gateway_overhead --requests 500 --json out/bench/gateway_overhead.json
	$(BIN)/python -m benchmarks.serving.generation_stall --json out/bench/generation_stall.json
	$(BIN)/python -m benchmarks.serving.speculation --shape 5M --sequences 1 8 --answer 64 --runs 2 --json out/bench/speculation.json
	$(BIN)/python -m benchmarks.serving.compare --quick --json out/bench/compare.json
	$(BIN)/python -m benchmarks.serving.step_breakdown --model demo --sequences 1 16 --rounds 2 --json out/bench/step_breakdown.json
	$(BIN)/python -m benchmarks.serving.on_device --concurrency 1 4 --prompt 64 --output 16 --rounds 1 --steps 16 --json out/bench/on_device.json
	$(BIN)/python -m benchmarks.kernels.run --quick --json out/bench/kernels.json
	$(BIN)/python -m benchmarks.autoscaling.run --delay 30 --fault none --json out/bench/autoscaling.json

bench-autoscaling: $(VENV)/.runtime ## Compare the autoscaler with others on TRACE and write JSON (a one-hour trace takes minutes)
	$(BIN)/python -m benchmarks.autoscaling.run $(if $(TRACE),--trace '$(TRACE)') --json '$(JSON)'

guard-update: $(VENV)/.dev ## Update tests/engine/guard/bounds.json to the current cost of a step and of a streamed token
	PYTHONPATH=tests/support $(BIN)/python -m quire_guard --update

peers: $(VENV)/.runtime ## Install the other servers for benchmarks/serving/compare.py (takes many minutes; compiles one of them)
	$(BIN)/python -m benchmarks.peers.install_vllm
	$(BIN)/python -m benchmarks.peers.install_llama_cpp

soak: $(VENV)/.dev ## Run long property tests (SOAK examples), every CPU level and family, and outage tests with realistic durations
	QUIRE_HYPOTHESIS_EXAMPLES=$(SOAK) $(BIN)/pytest --timeout 0 tests/engine/core tests/operator/autoscaling
	QUIRE_HYPOTHESIS_EXAMPLES=$$(($(SOAK) / 10)) $(BIN)/pytest --timeout 0 -m 'hypothesis and not cluster' tests
	QUIRE_HYPOTHESIS_EXAMPLES=$(SOAK) $(BIN)/pytest --timeout 0 tests/engine/robustness/test_raw_http.py tests/engine/parity/test_tensor_parallel.py
	QUIRE_EVERY_CPU_LEVEL=1 $(BIN)/pytest --timeout 0 tests/engine/cpu/test_each_level.py tests/kernels/test_levels.py
	QUIRE_OUTAGE_SECONDS=60 $(BIN)/pytest --timeout 0 -s tests/operator/kube/test_outages.py
	$(BIN)/python -m benchmarks.serving.same_answers --requests 1000
	PYTHONPATH=tests/support $(BIN)/python -m quire_parity.differential

generate: ## Generate the CRD's spec, the chart's copy of the CRD and docs/crd.md
	@test -x $(BIN)/python || $(MAKE) setup
	@$(BIN)/python crds/generate.py

chart-docs: $(VENV)/.dev ## Generate the chart's value table and schema descriptions from values.yaml
	@$(BIN)/python charts/document.py

cluster-binaries: $(VENV)/.dev ## Build etcd, Kubernetes, CoreDNS, helm, kwok and kube-score for the tests (about 13 minutes the first time)
	@$(BIN)/python tests/cluster/cluster.py binaries

cluster-up: $(VENV)/.dev ## Start a two-node Kubernetes cluster on this machine as root; restart components that have exited
	@$(BIN)/python tests/cluster/cluster.py up --tier nodes

cluster-down: $(VENV)/.dev ## Stop the local cluster and remove everything except its images (PURGE=1 removes them too)
	@$(BIN)/python tests/cluster/cluster.py down $(if $(PURGE),--purge)

images: $(VENV)/.dev ## Build the three images with buildah, push them to REGISTRY (default: the test cluster's), list their layers
	@BASE_IMAGE='$(BASE_IMAGE)' COMPILER='$(COMPILER)' TORCH_SPEC='$(TORCH_SPEC)' \
	  $(BIN)/python tests/cluster/cluster.py images $(if $(REGISTRY),--registry '$(REGISTRY)') $(if $(TAG),--tag '$(TAG)')

cluster-status: $(VENV)/.dev ## Show the state of the local cluster
	@$(BIN)/python tests/cluster/cluster.py status

vllm-flags: ## Generate docs/vllm-flags.md, the flags of vLLM and what quire-engine makes of them
	@$(BIN)/python -m tools.vllm_flags > docs/vllm-flags.md.new && mv docs/vllm-flags.md.new docs/vllm-flags.md

engine-flags: $(VENV)/.runtime ## Update the operator's copy of the engine's flags
	@$(BIN)/quire-engine --flag-schema > $(ENGINE_FLAGS).new && mv $(ENGINE_FLAGS).new $(ENGINE_FLAGS)

lock: $(BIN)/uv ## Resolve requirements/*.in into hash-locked *.lock files
	BIN=$(BIN) requirements/lock.sh

clean: ## Remove tool caches and outputs (keeps .venv and .venv-clients)
	rm -rf out .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +
