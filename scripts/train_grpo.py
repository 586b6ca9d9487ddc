"""Train by GRPO: python scripts/train_grpo.py --help, or torchrun --nproc_per_node N scripts/train_grpo.py ..."""

from lightrl.config import GRPOConfig, parse_config

if __name__ == "__main__":
    config = parse_config(GRPOConfig)  # before torch is loaded: a mistake in a flag is reported at once

    from lightrl.trainers.fit import run_trainer
    from lightrl.trainers.grpo import GRPOTrainer

    run_trainer(GRPOTrainer, config)
