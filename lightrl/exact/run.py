"""The trainer of a run with `--exact`, made from an ordinary trainer class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightrl.config import RolloutConfig
from lightrl.exact.environment import fix_arithmetic
from lightrl.exact.step_statistics import ExactStatistics
from lightrl.exact.strategy import exact_strategy
from lightrl.exact.targets import ExactTokenAdvantages
from lightrl.exact.tiles import TiledUpdates
from lightrl.trainers.fit import Trainer
from lightrl.trainers.objective import PolicyLoss, PolicyObjective
from lightrl.trainers.run import RunContext, open_run
from lightrl.trainers.token_advantages import TokenAdvantages
from lightrl.trainers.variants import variant


def exact(trainer_class: type[Trainer]) -> Callable[[RolloutConfig], Trainer]:
    """Returns the builder of an exact run's trainer, made from an ordinary trainer class."""

    def build(config: RolloutConfig) -> Trainer:
        fix_arithmetic()
        made = variant(trainer_class, ExactTrainer, name="Exact", option="--exact")
        run = open_run(config, kind=trainer_class.kind, strategy=exact_strategy(config))
        check_run(run)
        trainer: Trainer = made(run)
        return trainer

    return build


class ExactTrainer(Trainer):
    """Mixin for a trainer's class that makes all results independent of how the run is spread over ranks."""

    made_by = "lightrl.exact.run:exact"
    collector: Any
    updates: Any
    token_advantages: Any = None  # of PPO

    def __init__(self, run: RunContext, **parts: Any) -> None:
        super().__init__(run, **parts)
        check_functions(self.config.algorithm, getattr(self, "objective", None))
        self.collector.make_statistics = ExactStatistics
        self.updates = TiledUpdates(self.run, self.statistics)
        if isinstance(self.token_advantages, TokenAdvantages):
            state = self.token_advantages.state_dict()
            self.token_advantages = self.saved["moments"] = ExactTokenAdvantages(self.config.algorithm)
            self.token_advantages.load_state_dict(state)


def check_run(run: RunContext) -> None:
    """Raises ValueError for a device or a model that cannot be exact."""
    device = run.strategy.device
    if device.type != "cpu":
        raise ValueError(
            f"--exact True does not go with device {device}, whose kernels compute a row in another way beside other "
            "rows. Give --distributed.device cpu, or leave --exact out."
        )
    if run.media is not None:
        raise ValueError(
            "--exact True does not go with a model that takes images: its vision tower mixes the images of a "
            "micro-batch. Use a model of text alone, or leave --exact out."
        )


def check_functions(options: Any, objective: PolicyLoss | None) -> None:
    """Raises ValueError for a user's estimator or loss whose traits ask for sums per rank."""
    name = ""
    if isinstance(objective, PolicyObjective) and objective.traits.whiten:
        name = "advantage"
    elif objective is not None and objective.selects_tokens:
        name = "loss"
    if name:
        raise ValueError(
            f"--exact True does not go with --algorithm.{name} {getattr(options, name)}, which compares the tokens of "
            "an update by sums of each rank. Choose another, or leave --exact out."
        )
