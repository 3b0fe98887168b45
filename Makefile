# `make serve` on a machine with Python 3.11, gcc and make is all it takes; `make help` lists the rest.
SHELL := /bin/bash
PYTHON ?= python3
BIN := .venv/bin
# What serving takes, and what everything takes.
SERVES := .venv/.serves
STAMP := .venv/.installed
# MODEL=folder, hub id or .gguf file (empty: the built-in default); ARGS='--port 9000 ...' adds flags of `octavo serve`.
MODEL ?=
ARGS ?=
PYTEST_ARGS ?=
# Test files run beside each other: one process per core and one for when others wait for services; more than four gain nothing.
JOBS ?= $(shell n=$$(nproc); echo $$((n < 3 ? n + 1 : 4)))
PROTO := shared/octavo_shared/proto

.DEFAULT_GOAL := help
.PHONY: help install model serve test test-slow lint audit format bench bench-scheduler bench-host-tier chaos kernels-aot proto clean distclean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## /\1\t/' | awk -F'\t' '{printf "  %-15s %s\n", $$1, $$2}'

# One recipe so that a half-made environment is made again: the stamp comes last.
$(SERVES): pyproject.toml constraints.txt tools/make_venv.sh
	@tools/make_venv.sh $(PYTHON)
	@echo "Installing into .venv what constraints.txt lists (once; torch is most of it, and takes minutes)"
	@$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -e '.[all,client]'
	@touch $@

$(STAMP): $(SERVES)
	@echo "Installing into .venv what developing and testing takes (once)"
	@$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -e '.[dev]'
	@touch $@

install: $(STAMP) ## Make .venv with everything pinned

model: $(SERVES) ## Fetch and convert the default model (once)
	@$(BIN)/octavo pull $(MODEL) >/dev/null

serve: $(SERVES) ## Serve MODEL (default: SmolLM2-135M-Instruct) on http://127.0.0.1:8000
	@exec $(BIN)/octavo serve $(MODEL) $(ARGS)

lint: $(STAMP) ## Style, types and the import rules between rooms
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Apart from lint, which must work without a network. Builds with a local version (+cpu) are no one's to look up.
audit: $(STAMP) ## Look the pinned dependencies up in a list of known faults
	$(BIN)/pip-audit --disable-pip --no-deps -r constraints.txt

format: $(STAMP) ## Rewrite the code in the house style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: lint model ## Lint, then every test
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

test-slow: $(STAMP) model ## The tests that take minutes each: every case where 'make test' has a sample
	$(BIN)/python -m pytest -m slow -s $(PYTEST_ARGS)

bench: $(SERVES) model ## Serve the model and measure it at concurrency 1, 8 and 32; figures go to bench/results/
	$(BIN)/python bench/serving.py $(MODEL)

bench-scheduler: $(STAMP) ## What the scheduler's core costs per step, beside what it is to cost
	$(BIN)/python bench/scheduler $(ARGS)

bench-host-tier: $(STAMP) ## What the host tier is worth under constant preemption
	$(BIN)/python bench/host_tier.py $(ARGS)

# About an hour. ARGS='--faults 40 --requests 160 --seed 1 --only kill' for less.
chaos: $(STAMP) ## Kill, stop, cut off and restart everything while clients read; nothing may be lost, repeated or different
	$(BIN)/python bench/chaos $(ARGS)

# Without a GPU; some minutes. ARGS='--targets sm_90 --only decodes' for less.
kernels-aot: $(STAMP) ## Compile the GPU kernels for four architectures and read what they need; fills in docs/kernels.md
	$(BIN)/python -m octavo_kernels.triton.aot $(if $(ARGS),$(ARGS),--write docs/kernels.md)

proto: $(STAMP) ## Generate the wire contract's code anew
	$(BIN)/python -m grpc_tools.protoc -I shared --plugin=protoc-gen-mypy=$(BIN)/protoc-gen-mypy \
	  --python_out=shared --mypy_out=quiet:shared $(wildcard $(PROTO)/*.proto)
	$(BIN)/python -m grpc_tools.protoc -I shared --grpc_python_out=shared $(PROTO)/executor.proto

clean: ## Remove caches and build output (not .venv, not converted models)
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache bench/results
	find . -path ./.venv -prune -o -name __pycache__ -type d -exec rm -rf {} +

distclean: clean ## ... and .venv
	rm -rf .venv
