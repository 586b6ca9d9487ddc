"""A run whose ranks are started with different options: argv[1] is the folder, for later ranks the beginning of it."""

import os
import sys

from lightrl.config import EvalConfig, GRPOConfig
from lightrl.trainers.fit import run_trainer
from lightrl.trainers.grpo import GRPOTrainer

if __name__ == "__main__":
    rank = int(os.environ["RANK"])
    folder = sys.argv[1] + "-other" * rank
    run_trainer(GRPOTrainer, GRPOConfig(max_steps=2 + rank, eval=EvalConfig(n=1 + rank), output_dir=folder))
