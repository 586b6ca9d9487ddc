"""The options of an evaluation without training."""

from __future__ import annotations

from dataclasses import dataclass

from lightrl.config.options import option, without
from lightrl.config.runs import RolloutConfig
from lightrl.config.strategy import CriticTrainingConfig


@dataclass(kw_only=True, slots=True)
@without(CriticTrainingConfig)
class EvaluateConfig(RolloutConfig):
    """Evaluate a language model on sampled responses. Options of training do nothing."""

    micro_batch_size: int = option(1, at_least=1, resume="free")
    """Does nothing in an evaluation."""

    def check(self) -> None:
        """Takes the data to evaluate on for those that are read first; refuses settings of training's responses."""
        if self.is_truncated:
            raise ValueError("--top_p and --top_k are of training: an evaluation takes --eval.top_p and --eval.top_k.")
        self.train_data = self.eval_data or self.train_data
