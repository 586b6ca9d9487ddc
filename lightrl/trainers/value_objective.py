"""The objective of a critic: the loss of its values over a micro-batch."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from lightrl.algorithms.losses import TokenWeights, mean_loss
from lightrl.algorithms.value_loss import value_loss
from lightrl.config import CriticConfig
from lightrl.metrics import Statistics
from lightrl.records import PackedBatch, ScoresAndValues, StateValues


class ValueObjective:
    """The value loss, averaged over tokens and sequences like the policy's loss, so that the two can be added."""

    def __init__(self, config: CriticConfig, token_weights: Callable[[PackedBatch], TokenWeights]) -> None:
        self._config = config
        self._token_weights = token_weights

    def loss(self, scores: StateValues | ScoresAndValues, batch: PackedBatch, statistics: Statistics) -> Tensor:
        """Returns the mean over the micro-batch times the coefficient; the metrics leave out the coefficient."""
        assert batch.old_values is not None
        assert batch.returns is not None
        mask, weights = batch.loss_mask, self._token_weights(batch)
        value = value_loss(scores.values, batch.old_values, batch.returns, mask, clip=self._config.value_clip or None)
        loss = mean_loss(value.terms, weights)
        total = float(weights.total)
        statistics.mean("critic/loss", float(loss.detach()) * total, total)
        statistics.mean("critic/clip_fraction", float(value.is_clipped.sum()), int(mask.sum()))
        return self._config.value_coef * loss
