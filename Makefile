# The verbs of this repository. They use .venv when it exists, else what is on PATH.
SHELL := /bin/bash
PYTHON := $(if $(wildcard .venv/bin/python),.venv/bin/python,python3)
NPROC := 2

.PHONY: setup format check test test-gpu wheel smoke

setup:  ## .venv with everything that checks and tests need
	bash scripts/setup_env.sh dev

format:  ## what can be mended by machine
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

check:  ## formatter, linter, types, layers
	bash scripts/check.sh

test:  ## the whole CPU suite
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest -m "not gpu and not sglang" -n 2 --dist loadscope --no-loadscope-reorder

test-gpu:  ## what needs a CUDA device
	$(PYTHON) -m pytest -m gpu

wheel:  ## build, then prove that every sub-package is in it
	rm -rf build dist
	$(PYTHON) -m build --wheel
	$(PYTHON) scripts/check_wheel.py dist/*.whl

smoke:  ## a few GRPO steps on two ranks
	OMP_NUM_THREADS=1 $(PYTHON) -m torch.distributed.run --standalone --nproc_per_node $(NPROC) \
		scripts/train_grpo.py --strategy fsdp --max_steps 4 --eval.every 0 --checkpoint.every 0
