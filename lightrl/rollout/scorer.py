"""Scores samples on all ranks together. Failures are counted over all of them, and stop all ranks or none."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from lightrl.comm import Comm
from lightrl.metrics import Statistics
from lightrl.records import Sample
from lightrl.rewards.reward_set import RewardSet, Scores, is_collective
from lightrl.rewards.scoring import FailureBudget, Outcome, RewardError, with_traceback

logger = logging.getLogger(__name__)

_MAX_SHOWN = 3  # failures of a run that are printed with their traceback; the metrics count them all


class Scorer:
    """Applies the rewards of the run to this rank's samples. Every rank calls it, even with no sample."""

    def __init__(self, comm: Comm, rewards: RewardSet) -> None:
        self._comm = comm
        self._rewards = rewards
        self._num_shown = 0

    def score(
        self, samples: Sequence[Sample], statistics: Statistics | None = None, *, prefix: str = ""
    ) -> list[float]:
        """Returns the weighted sum of the rewards of each sample, NO_REWARD where one failed.

        statistics receives the mean of each reward and the number of failures, under names that begin with prefix.
        """
        budget = FailureBudget(self._rewards.policy.max_failures)
        outcomes = {item.label: self._run(item.label, item.reward, samples, budget) for item in self._rewards.rewards}
        counts = self._comm.all_reduce({"failures": len(budget.failures), "unsure": len(budget.no_verdicts)}, "sum")
        if counts["failures"] or counts["unsure"]:
            self._report_failures(budget, counts["failures"])
        scores = self._rewards.combine(outcomes, len(samples))
        if statistics is not None:
            _describe(scores, budget, statistics, prefix)
        return scores.rewards

    def _run(self, label: str, reward: object, samples: Sequence[Sample], budget: FailureBudget) -> list[Outcome]:
        if not is_collective(reward):
            with self._comm.phase(f"reward {label}", local=True):
                return self._rewards.run(label, samples, budget)
        with self._comm.phase(f"reward {label}"):
            outcomes: list[Outcome] = reward(samples)  # type: ignore[operator]
        with self._comm.phase(f"reward {label}", local=True):
            budget.record(outcomes)
        return outcomes

    def _report_failures(self, budget: FailureBudget, num_failures: int) -> None:
        """Prints the first failures of all ranks; raises on every rank if there are too many."""
        mine = [*_distinct(budget.failures), *_distinct(budget.no_verdicts)]
        shown = [(error.is_no_verdict, error.key, str(error), with_traceback(error)) for error in mine]
        everyones = sorted(item for part in self._comm.all_gather_object(shown) for item in part)
        if num_failures > budget.max_failures:
            raise budget.exceeded(RewardError(everyones[0][2]), num_failures)
        for *_, text in everyones[: _MAX_SHOWN - self._num_shown] if self._comm.is_main else []:
            logger.warning("%s", text)
            self._num_shown += 1


def _distinct(errors: Sequence[RewardError]) -> list[RewardError]:
    """The first few errors; one that stands for many samples is listed once."""
    return list(dict.fromkeys(errors))[:_MAX_SHOWN]


def _describe(scores: Scores, budget: FailureBudget, statistics: Statistics, prefix: str) -> None:
    for label, values in scores.components.items():
        if values:
            statistics.mean(f"{prefix}reward/{label}", sum(values), len(values))
    statistics.add(f"{prefix}reward/failures", len(budget.failures))
    statistics.add(f"{prefix}reward/no_verdict", len(budget.no_verdicts))
