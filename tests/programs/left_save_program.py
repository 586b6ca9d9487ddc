"""Rank 1 ends by sys.exit() during a save in the background, and rank 0 afterwards: by itself, or after close()."""

import atexit
import sys
import time
from pathlib import Path

import torch

from lightrl.config import CheckpointConfig, StrategyOptions
from lightrl.strategy.ddp import DDPStrategy

if __name__ == "__main__":
    folder, end = Path(sys.argv[1]), sys.argv[2]
    options = StrategyOptions(exact_batches=True, checkpoint=CheckpointConfig(asynchronous=True))
    strategy = DDPStrategy(0, 0.0, 1, 1, options)
    strategy.setup_distributed()
    atexit.register((folder / f"rank{strategy.comm.rank}").touch)  # runs after the saver's own
    model = torch.nn.Linear(1, 1)
    strategy.register(model, torch.optim.SGD(model.parameters(), lr=1.0))
    strategy.set_global_step(7)
    strategy.save_ckpt(model, str(folder / "checkpoints"))
    if strategy.comm.rank == 1:
        sys.exit()
    deadline = time.monotonic() + 30
    while not (folder / "rank1").exists():
        assert time.monotonic() < deadline, "rank 1 waits for rank 0"
        time.sleep(0.05)
    if end == "close":
        strategy.close()
