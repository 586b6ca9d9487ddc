"""Train a reward model: python scripts/train_rm.py --help, or torchrun --nproc_per_node N scripts/train_rm.py ..."""

from lightrl.config import RMConfig, parse_config

if __name__ == "__main__":
    config = parse_config(RMConfig)  # before torch is loaded: a mistake in a flag is reported at once

    from lightrl.trainers.fit import run_trainer
    from lightrl.trainers.reward_model import RMTrainer

    run_trainer(RMTrainer, config)
