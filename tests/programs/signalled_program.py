"""Trains by GRPO; after step STEP, rank RANK of $SIGNALLED="RANK STEP SIGNAL SECONDS" gets a signal and sleeps."""

import os
import signal
import sys
import time
from pathlib import Path

from lightrl.config import GRPOConfig, parse_config
from lightrl.trainers.fit import StepReport, run_trainer
from lightrl.trainers.grpo import GRPOTrainer


class Signalled(GRPOTrainer):
    def step(self) -> StepReport:
        report = super().step()
        rank, step, name, seconds = os.environ.get("SIGNALLED", "-1 0 SIGTERM 0").split()
        if (int(rank), int(step)) == (self.strategy.comm.rank, self.step_index + 1):
            os.kill(os.getpid(), signal.Signals[name])
            time.sleep(float(seconds))
        return report


if __name__ == "__main__":
    config = parse_config(GRPOConfig, sys.argv[1:])
    Path(f"{config.output_dir}.pid{os.environ.get('RANK', '0')}").write_text(str(os.getpid()))
    run_trainer(Signalled, config)
