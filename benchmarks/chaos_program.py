"""A run of GRPO or PPO that is killed at a given point of its work; chaos.py starts it.

$CHAOS="POINT STEP VICTIM": at the first POINT after STEP finished steps, SIGKILL ends VICTIM, which is the number of a
rank, `all` ranks, or the `agent` (torchrun). $CHAOS_PIDS is a folder for the pids of the ranks. Without $CHAOS, nothing
is killed.
"""

import os
import shutil
import signal
import sys
from pathlib import Path

import torch

from lightrl import checkpoint
from lightrl.checkpoint import CheckpointDirectory
from lightrl.config import GRPOConfig, PPOConfig, parse_config
from lightrl.rollout.collector import Collector
from lightrl.strategy.base import StrategyBase
from lightrl.strategy.saving import state_files
from lightrl.trainers import fit
from lightrl.trainers.grpo import GRPOTrainer
from lightrl.trainers.ppo import PPOTrainer
from lightrl.trainers.run_folder import RunFolder

TRAINERS = {"grpo": (GRPOTrainer, GRPOConfig), "ppo": (PPOTrainer, PPOConfig)}
RANK = os.environ.get("RANK", "0")


class Killer:
    """Ends the victim when this rank comes to the point."""

    def __init__(self, point: str, step: int, victim: str) -> None:
        self.point, self.step, self.victim = point, step, victim
        self.trainer: fit.Trainer | None = None

    @property
    def is_due(self) -> bool:
        """Whether this rank is to kill at the point now."""
        steps_done = self.trainer.step_index if self.trainer is not None else -1
        is_first_start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        return is_first_start and steps_done >= self.step and self.victim in (RANK, "all", "agent")

    def kill(self) -> None:
        """Ends the victim if it is time, and says so before."""
        if not self.is_due:
            return
        sys.stdout.write(f"[rank {RANK}] killed: {self.victim} at {self.point}\n")
        sys.stdout.flush()
        if self.victim == "agent":
            os.kill(os.getppid(), signal.SIGKILL)
            return
        if self.victim == "all":
            others = [int(path.name) for path in Path(os.environ["CHAOS_PIDS"]).iterdir()]
            for pid in set(others) - {os.getpid()}:
                os.kill(pid, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    def before(self, owner: object, name: str) -> None:
        """Kills before each call of the function."""
        original = getattr(owner, name)

        def killing(*args, **kwargs):
            self.kill()
            return original(*args, **kwargs)

        setattr(owner, name, killing)

    def instead(self, owner: object, name: str, half: object) -> None:
        """Does half of the function's work, and kills; without a kill, all of it."""
        original = getattr(owner, name)

        def killing(*args, **kwargs):
            if self.is_due:
                half(*args, **kwargs)
                self.kill()
            return original(*args, **kwargs)

        setattr(owner, name, killing)


def half_of_a_file(path, tensors):
    path.write_bytes(b"half of a file")


def half_of_a_folder(path, *_, **__):
    for file in sorted(Path(path).rglob("*"))[:2]:
        if file.is_file():
            file.unlink()


def half_of_a_line(folder, *_):
    with (folder.root / "metrics.jsonl").open("a") as file:
        file.write('{"step": ')


def arm(killer: Killer) -> None:
    """Puts the kill where the point is."""
    {
        "rollout": lambda: killer.before(Collector, "sample"),
        "reward": lambda: killer.before(Collector, "score"),
        "backward": lambda: killer.before(torch.Tensor, "backward"),
        "sync": lambda: killer.before(StrategyBase, "sync_weights"),
        "metrics": lambda: killer.instead(RunFolder, "append_metrics", half_of_a_line),
        "writing": lambda: killer.instead(state_files, "save_tensors", half_of_a_file),
        "marking": lambda: killer.before(checkpoint, "save_json"),
        "renaming": lambda: killer.before(checkpoint.os, "rename"),
        "pruning": lambda: killer.before(CheckpointDirectory, "_superfluous"),
        "deleting": lambda: killer.instead(shutil, "rmtree", half_of_a_folder),
        "final": lambda: killer.before(fit.Trainer, "save_models"),
    }[killer.point]()


def main() -> None:
    kind, *flags = sys.argv[1:]
    trainer_class, config_class = TRAINERS[kind]
    (Path(os.environ["CHAOS_PIDS"]) / str(os.getpid())).touch()
    config = parse_config(config_class, flags)
    killer = None
    if "CHAOS" in os.environ:
        point, step, victim = os.environ["CHAOS"].split()
        killer = Killer(point, int(step), victim)
        arm(killer)

    class Killed(trainer_class):
        def resume(self):
            if killer is not None:
                killer.trainer = self
            super().resume()

        def save(self):
            super().save()
            if self.strategy.comm.is_main and not self.config.checkpoint.asynchronous:
                with Path(f"{self.folder.root}.saved").open("a") as file:  # what is complete and must not be lost
                    file.write(f"{self.step_index}\n")

    fit.run_trainer(Killed, config)


if __name__ == "__main__":
    main()
