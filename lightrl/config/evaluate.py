"""The options of an evaluation without training."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter

from lightrl.config.options import option, without
from lightrl.config.runs import RolloutConfig
from lightrl.config.strategy import CriticTrainingConfig

OF_STEPS = (  # options that change how a trainer's steps come about, by their fields
    "exact",
    "rollout_ranks",
    "rollout.record",
    "rollout.from_",
    "data.curriculum",
    "rollout.over_issue",
    "rollout.max_staleness",
    "rollout.filter",
)


@dataclass(kw_only=True, slots=True)
@without(CriticTrainingConfig)
class EvaluateConfig(RolloutConfig):
    """Evaluate a language model on sampled responses. Options that only training uses do nothing or are refused."""

    micro_batch_size: int = option(1, at_least=1, resume="free")
    """Does nothing in an evaluation."""

    def check(self) -> None:
        """Takes the data to evaluate on for those that are read first; refuses settings of training's responses."""
        if self.is_truncated:
            raise ValueError("--top_p and --top_k apply to training. Give --eval.top_p and --eval.top_k.")
        for name in filter(lambda name: attrgetter(name)(self), OF_STEPS):
            raise ValueError(f"--{name.rstrip('_')} applies to training: an evaluation takes no steps. Leave it out.")
        self.train_data = self.eval_data or self.train_data
