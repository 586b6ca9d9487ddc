"""Train by DPO: python scripts/train_dpo.py --help, or torchrun --nproc_per_node N scripts/train_dpo.py ..."""

from lightrl.programs import start

if __name__ == "__main__":
    start("dpo")
