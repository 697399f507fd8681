# Only Python (3.11 or newer) and make have to be there; the rest is installed into .venv and
# .venv-engine from the lock files in requirements/.

PYTHON ?= python3
UV ?= uv

.DEFAULT_GOAL := help
.PHONY: help serve test bench bench-tiers lint lock clean

help:
	@echo "make serve   install what is missing, start ENGINES vLLM engines and the gateway"
	@echo "             PORT=8080  ENGINES=2  MODEL=folder or hub id  TIERS=ram,ssd"
	@echo "             (all optional; TIERS= for engines without a cache server)"
	@echo "make test    install what is missing, run every test, the ones with real engines too"
	@echo "make bench   multi-turn conversations through the gateway, against round-robin;"
	@echo "             then bench-tiers: the same prefix from each tier, and what tiers cost"
	@echo "make lint    ruff and mypy"
	@echo "make lock    resolve requirements/*.in again (needs uv)"
	@echo "make clean   remove both environments, the converted model, sockets and logs"

# exec: make's shell gives way to the command, so Ctrl-C and SIGTERM reach it and nothing else.
serve:
	@$(PYTHON) -m engine_workers.bootstrap --model "$(or $(MODEL),$(RADIXGATE_MODEL))" \
		--host "$(or $(RADIXGATE_HOST),127.0.0.1)" --port "$(or $(PORT),$(RADIXGATE_PORT),8080)"
	@exec .venv/bin/python -m engine_workers.until_parent_ends .venv/bin/radixgate serve \
		$(if $(PORT),--port "$(PORT)") \
		$(if $(ENGINES),--engines "$(ENGINES)") $(if $(MODEL),--model "$(MODEL)") \
		$(if $(filter-out undefined,$(origin TIERS)),--tiers "$(TIERS)")

test:
	@$(PYTHON) -m engine_workers.bootstrap --tests
	@exec .venv/bin/python -m pytest $(ARGS)

bench:
	@$(PYTHON) -m engine_workers.bootstrap
	@.venv/bin/python -m benchmarks $(ARGS)
	@$(MAKE) --no-print-directory bench-tiers

bench-tiers:
	@$(PYTHON) -m engine_workers.bootstrap --tests
	@exec .venv/bin/python -m benchmarks.tiers $(TIER_ARGS)

lint:
	@$(PYTHON) -m engine_workers.bootstrap --tests --without-engine
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

# Pins that still satisfy the .in files stay; delete a .txt file first to get the newest of all.
COMPILE = $(UV) pip compile --quiet --universal --python-version 3.11 --no-annotate --no-header
EXCLUDED = torch torchaudio torchcodec torchvision triton

lock:
	$(COMPILE) pyproject.toml requirements/gateway.in --extra gateway --extra tiers \
		--output-file requirements/gateway.txt
	$(COMPILE) pyproject.toml requirements/dev.in --extra gateway --extra tiers --group dev \
		--constraint requirements/gateway.txt --output-file requirements/dev.txt
	$(COMPILE) requirements/engine-cpu.in --override requirements/engine-cpu-excluded.txt \
		$(addprefix --no-emit-package ,$(EXCLUDED)) --output-file requirements/engine-cpu.txt

clean:
	rm -rf .venv .venv-engine .radixgate
