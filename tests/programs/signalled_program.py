"""Trains by GRPO; $SIGNALLED="RANK STEP SIGNAL SECONDS" sends a rank a signal (or a full disk) after a step."""

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
            if name == "FULL":  # from now on the disk takes no line of metrics.jsonl
                (self.folder.root / "metrics.jsonl").unlink()
                (self.folder.root / "metrics.jsonl").symlink_to("/dev/full")
            else:
                os.kill(os.getpid(), signal.Signals[name])
            time.sleep(float(seconds))
        return report


if __name__ == "__main__":
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored in whatever nohup has started
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in whatever a shell runs in the background
    config = parse_config(GRPOConfig, sys.argv[1:])
    Path(f"{config.output_dir}.pid{os.environ.get('RANK', '0')}").write_text(str(os.getpid()))
    run_trainer(Signalled, config)
