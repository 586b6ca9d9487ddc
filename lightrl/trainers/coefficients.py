"""The weights of KL and entropy: fixed, or following a target from step to step. The same numbers on every rank."""

from __future__ import annotations

from collections.abc import Mapping

from lightrl.algorithms.controllers import active_entropy_coef, next_entropy_coef, next_kl_coef
from lightrl.config import AlgorithmConfig


class Coefficients:
    """What acts in the step that is under way."""

    def __init__(self, config: AlgorithmConfig) -> None:
        self._config = config
        self.kl = config.kl_coef
        self.entropy = config.entropy_coef
        self._entropy_kept = config.entropy_coef  # above its target a bonus does not act, but is not forgotten

    def follow(self, *, kl: float, entropy: float, num_samples: int) -> None:
        """Sets those of the next step from what this one measured over all ranks."""
        config = self._config
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
        return {"kl": self.kl, "entropy": self.entropy, "entropy_kept": self._entropy_kept}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Those that follow a target go on; the others are as this run's config says."""
        if self._config.kl_target:
            self.kl = state["kl"]
        if self._config.entropy_target:
            self.entropy, self._entropy_kept = state["entropy"], state["entropy_kept"]
