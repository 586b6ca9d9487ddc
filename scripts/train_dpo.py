"""Train by DPO: python scripts/train_dpo.py --help, or torchrun --nproc_per_node N scripts/train_dpo.py ..."""

from lightrl.config import DPOConfig, parse_config

if __name__ == "__main__":
    config = parse_config(DPOConfig)  # before torch is loaded: a mistake in a flag is reported at once

    from lightrl.trainers.dpo import DPOTrainer
    from lightrl.trainers.fit import run_trainer

    run_trainer(DPOTrainer, config)
