"""Coefficients of KL and entropy that adapt to a target from step to step; they are equal on all ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping

from lightrl.algorithms.entropy import active_entropy_coef, next_entropy_coef
from lightrl.algorithms.kl import next_kl_coef
from lightrl.config import AlgorithmConfig


class Coefficients:
    """The coefficients of the current step."""

    def __init__(self, config: AlgorithmConfig) -> None:
        self._config = config
        self.kl = config.kl_coef
        self.entropy = config.entropy_coef
        self._entropy_kept = config.entropy_coef  # remembered while entropy is above its target and the bonus off

    def follow(self, *, kl: float, entropy: float, num_samples: int) -> None:
        """Sets the coefficients of the next step from this step's measurements over all ranks.

        A coefficient does not change if its measurement is not finite, because such an update was not made.
        """
        config = self._config
        if not (math.isfinite(kl) and math.isfinite(entropy)):
            return
        if config.kl_target:
            self.kl = next_kl_coef(
                self.kl, kl=kl, target=config.kl_target, num_samples=num_samples, horizon=config.kl_horizon
            )
        if config.entropy_target:
            target = config.entropy_target
            self._entropy_kept = next_entropy_coef(
                self._entropy_kept, entropy=entropy, target=target, step=config.entropy_step
            )
            self.entropy = active_entropy_coef(self._entropy_kept, entropy=entropy, target=target)

    def state_dict(self) -> dict[str, float]:
        """Returns the coefficients, for a checkpoint."""
        return {"kl": self.kl, "entropy": self.entropy, "entropy_kept": self._entropy_kept}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restores coefficients that follow a target; fixed ones come from this run's config."""
        if self._config.kl_target and state["kl"]:  # a run without a penalty had 0, which could never grow
            self.kl = state["kl"]
        if self._config.entropy_target:
            self.entropy, self._entropy_kept = state["entropy"], state["entropy_kept"]
