"""Train by GRPO: python scripts/train_grpo.py --help, or torchrun --nproc_per_node N scripts/train_grpo.py ..."""

from lightrl.programs import start

if __name__ == "__main__":
    start("grpo")
