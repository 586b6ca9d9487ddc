"""Train on responses: python scripts/train_sft.py --help, or torchrun --nproc_per_node N scripts/train_sft.py ..."""

from lightrl.config import SFTConfig, parse_config

if __name__ == "__main__":
    config = parse_config(SFTConfig)  # before torch is loaded: a mistake in a flag is reported at once

    from lightrl.trainers.fit import run_trainer
    from lightrl.trainers.sft import SFTTrainer

    run_trainer(SFTTrainer, config)
