# The verbs of this repository. They use .venv when it exists, otherwise what is on PATH.
SHELL := /bin/bash
PYTHON := $(if $(wildcard .venv/bin/python),.venv/bin/python,python3)
NPROC := 2
N := 100

.PHONY: setup format check test test-gpu wheel smoke exact docs house bench gpu-report soak stalls resumes chaos recipes records

setup:  ## create .venv with everything that checks, tests and docs need
	bash scripts/setup_env.sh dev

format:  ## fix what a tool can fix
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

check:  ## run formatter, linter, type checker and layer checker
	bash scripts/check.sh

test:  ## run the CPU suite, except the tests marked engine and long
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest -m "not gpu and not sglang and not engine and not long" -n 2 \
		--dist loadscope --no-loadscope-reorder

test-gpu:  ## run the tests that need a CUDA device
	$(PYTHON) -m pytest -m gpu

wheel:  ## build the wheel and prove that it contains the whole package
	rm -rf build dist
	$(PYTHON) -m build --wheel
	$(PYTHON) scripts/check_wheel.py dist/*.whl

smoke:  ## run a few GRPO steps on two ranks
	OMP_NUM_THREADS=1 $(PYTHON) -m torch.distributed.run --standalone --nproc_per_node $(NPROC) \
		scripts/train_grpo.py --strategy fsdp --max_steps 4 --eval.every 0 --checkpoint.every 0

exact:  ## print the hashes of exact runs over ranks, strategies and micro-batches; it takes about 25 minutes
	OMP_NUM_THREADS=1 $(PYTHON) benchmarks/exact_grid.py

docs:  ## build the documentation into site/; a broken link is an error
	$(PYTHON) -m mkdocs build --strict --quiet

house:  ## measure the shape of the package and write it into docs/architecture.md
	OMP_NUM_THREADS=1 $(PYTHON) benchmarks/house.py

bench:  ## run the benchmarks in short form and say what got slower than benchmarks/baselines.json
	OMP_NUM_THREADS=1 $(PYTHON) benchmarks/bench.py

gpu-report:  ## run what needs a GPU, and write docs/gpu_results.md
	bash scripts/gpu_report.sh

soak:  ## train for 500 steps and say how memory grew
	OMP_NUM_THREADS=1 $(PYTHON) benchmarks/soak.py

stalls:  ## stop, hold, delay or fail one rank of two in each phase, and read what the run says of it
	OMP_NUM_THREADS=1 $(PYTHON) benchmarks/stalls.py

resumes:  ## continue runs on the same and on other layouts of ranks, and compare them with undisturbed ones
	OMP_NUM_THREADS=1 $(PYTHON) benchmarks/resumes.py

recipes:  ## run every recipe of configs/ and compare it with the result that its file expects; about an hour
	OMP_NUM_THREADS=1 $(PYTHON) benchmarks/recipes.py

records:  ## time how long tasks take to a given accuracy, with TRL beside it (pip install trl==1.16.0)
	OMP_NUM_THREADS=1 $(PYTHON) benchmarks/records.py --write

chaos:  ## kill runs N times at random points; each must end as the undisturbed one
	OMP_NUM_THREADS=1 $(PYTHON) benchmarks/chaos.py --kills $(N) --agents
