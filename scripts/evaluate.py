"""Evaluate a model: python scripts/evaluate.py --help, or torchrun --nproc_per_node N scripts/evaluate.py ..."""

from lightrl.programs import start

if __name__ == "__main__":
    start("evaluate")
