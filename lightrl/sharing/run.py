"""The trainer of a run with --share_prompts True, made from an ordinary trainer class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from lightrl.config import RolloutConfig
from lightrl.sharing.model import MODELS, attach_sharing
from lightrl.sharing.updates import SharedUpdates
from lightrl.trainers.fit import Trainer
from lightrl.trainers.policy_step import PolicyUpdates
from lightrl.trainers.run import RunContext
from lightrl.trainers.variants import variant


def sharing(trainer_class: Callable[[Any], Trainer]) -> type[Trainer]:
    """Returns a trainer class that shares prompts, made from an ordinary one."""
    return variant(trainer_class, SharingTrainer, name="Sharing", option="--share_prompts")


class SharingTrainer(Trainer):
    """Mixin for a trainer's class whose models compute a prompt once for the samples of a micro-batch."""

    sharing = ("auto", True)

    def __init__(self, run: RunContext | RolloutConfig, **parts: Any) -> None:
        super().__init__(run, **parts)
        for name in MODELS:
            model: nn.Module | None = getattr(self, name, None)
            if model is not None:
                attach_sharing(model, self.strategy)

    @property
    def updates(self) -> PolicyUpdates:
        """The object that packs samples; the one that is set gets replaced by one that shares prompts."""
        return self._updates

    @updates.setter
    def updates(self, made: PolicyUpdates) -> None:
        kind: Any = type(f"Shared{type(made).__name__}", (SharedUpdates, type(made)), {})
        self._updates: PolicyUpdates = kind(self.run, self.statistics)
