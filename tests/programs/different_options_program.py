"""A run whose ranks are started with different options: argv[1] is its folder."""

import os
import sys

from lightrl.config import EvalConfig, GRPOConfig
from lightrl.trainers.fit import run_trainer
from lightrl.trainers.grpo import GRPOTrainer

if __name__ == "__main__":
    rank = int(os.environ["RANK"])
    run_trainer(GRPOTrainer, GRPOConfig(max_steps=2 + rank, eval=EvalConfig(n=1 + rank), output_dir=sys.argv[1]))
