"""Evaluate a model: python scripts/evaluate.py --help, or torchrun --nproc_per_node N scripts/evaluate.py ..."""

from lightrl.config import EvaluateConfig, parse_config

if __name__ == "__main__":
    config = parse_config(EvaluateConfig)  # before torch is loaded: a mistake in a flag is reported at once

    from lightrl.trainers.evaluation import Evaluator
    from lightrl.trainers.fit import run_trainer

    run_trainer(Evaluator, config)
