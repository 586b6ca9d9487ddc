"""Trains by GRPO; $STALLED="RANK PLACE KIND" has a rank stop, sleep or fail at its second visit to a place.

PLACE: reward, generate, backward or save. KIND: stop, sleep, hold (the interpreter), raise or leave (by exit()).
"""

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

from lightrl.config import GRPOConfig, parse_config
from lightrl.engines.colocated import ColocatedEngine
from lightrl.rewards.reward_set import RewardSet
from lightrl.strategy.saving.saver import TrainingStateSaver
from lightrl.strategy.torch_native import TorchStrategy
from lightrl.trainers.fit import run_trainer
from lightrl.trainers.grpo import GRPOTrainer

RANK, PLACE, KIND = os.environ["STALLED"].split()


def stall_here() -> None:
    if KIND == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif KIND == "sleep":
        time.sleep(600)
    elif KIND == "hold":
        ctypes.PyDLL(None).sleep(600)  # PyDLL keeps the lock of the interpreter
    elif KIND == "leave":
        sys.exit(0)
    else:
        raise ZeroDivisionError("planted")


def patch(owner: type, name: str) -> None:
    original, visits = getattr(owner, name), [0]

    def stalled(*args, **kwargs):
        visits[0] += 1
        if visits[0] == 2:
            stall_here()
        return original(*args, **kwargs)

    setattr(owner, name, stalled)


PLACES = {
    "reward": (RewardSet, "run"),
    "generate": (ColocatedEngine, "generate"),
    "backward": (TorchStrategy, "run_backward"),
    "save": (TrainingStateSaver, "_write"),
}


def meet(folder: str) -> None:
    """Waits until all ranks have imported everything, since they have a few seconds to join the world."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    Path(f"{folder}.pid{rank}").write_text(str(os.getpid()))
    while not all(Path(f"{folder}.pid{other}").exists() for other in range(world)):
        time.sleep(0.05)


if __name__ == "__main__":
    config = parse_config(GRPOConfig, sys.argv[1:])
    meet(config.output_dir)
    if os.environ["RANK"] == RANK:
        patch(*PLACES[PLACE])
    run_trainer(GRPOTrainer, config)
