"""Calls a plain reward of the user's, and sees to it that its code leaves the settings of torch as they were."""

from __future__ import annotations

from collections.abc import Sequence

from lightrl.records import Sample
from lightrl.rewards.scoring import FailureBudget, Outcome, RewardRunner
from lightrl.torch_settings import settings_kept


class OwnRunner(RewardRunner):
    """Calls a reward for one sample after another, as RewardRunner does."""

    def run(self, samples: Sequence[Sample], budget: FailureBudget) -> list[Outcome]:
        """Returns an outcome for each sample; raises RewardError as soon as the budget is exceeded."""
        with settings_kept(f"The reward {self.name!r}"):
            return super().run(samples, budget)
