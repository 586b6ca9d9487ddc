"""Calls a plain reward of the user's, and sees to it that its code leaves the rank as it was."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from lightrl.forked import end_child
from lightrl.records import Sample
from lightrl.rewards.scoring import FailureBudget, Outcome, RewardRunner
from lightrl.torch_settings import settings_kept


@contextmanager
def left_in_order(reward: str) -> Iterator[None]:
    """Raises RuntimeError if the body changes settings of torch, and ends a child that it has forked and let return."""
    process = os.getpid()
    try:
        with settings_kept(f"The reward {reward!r}"):
            yield
    finally:
        if os.getpid() != process:
            end_child(process)


class OwnRunner(RewardRunner):
    """Calls a reward for one sample after another, as RewardRunner does."""

    def run(self, samples: Sequence[Sample], budget: FailureBudget) -> list[Outcome]:
        """Returns an outcome for each sample; raises RewardError as soon as the budget is exceeded."""
        with left_in_order(self.name):
            return super().run(samples, budget)

    def _call_for(self, sample: Sample) -> Outcome:
        process = os.getpid()
        outcome = super()._call_for(sample)
        if os.getpid() != process:  # before the next sample, for which a child that went on would fork one, too
            end_child(process)
        return outcome
