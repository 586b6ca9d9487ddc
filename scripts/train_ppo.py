"""Train by PPO: python scripts/train_ppo.py --help, or torchrun --nproc_per_node N scripts/train_ppo.py ..."""

from lightrl.programs import start

if __name__ == "__main__":
    start("ppo")
