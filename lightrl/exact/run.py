"""The trainer of a run with `--exact`, from the class of an ordinary one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightrl.config import RolloutConfig
from lightrl.exact.environment import fix_arithmetic
from lightrl.trainers.fit import Trainer


def exact(trainer_class: type[Trainer]) -> Callable[[RolloutConfig], Trainer]:
    """Returns what builds the trainer of an exact run, from the class of an ordinary one."""

    def build(config: RolloutConfig) -> Trainer:
        fix_arithmetic()
        made: Any = type(f"Exact{trainer_class.__name__}", (ExactTrainer, trainer_class), {})
        trainer: Trainer = made(config)
        return trainer

    return build


class ExactTrainer(Trainer):
    """Goes in front of a trainer's class: nothing that it computes depends on how the run is spread."""

    made_by = "lightrl.exact.run:exact"
