"""Train by PPO: python scripts/train_ppo.py --help, or torchrun --nproc_per_node N scripts/train_ppo.py ..."""

from lightrl.config import PPOConfig, parse_config

if __name__ == "__main__":
    config = parse_config(PPOConfig)  # before torch is loaded: a mistake in a flag is reported at once

    from lightrl.trainers.fit import run_trainer
    from lightrl.trainers.ppo import PPOTrainer

    run_trainer(PPOTrainer, config)
