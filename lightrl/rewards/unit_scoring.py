"""Runs a plain reward over units of samples: one group at a time, or all samples at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, islice
from typing import Any

from lightrl.records import Sample
from lightrl.rewards.own_runner import left_in_order
from lightrl.rewards.scoring import (
    FailureBudget,
    Outcome,
    RewardRunner,
    failed,
    no_list,
    score_outcome,
    wrong_count,
)
from lightrl.rewards.time_limit import call_in_time


class UnitRunner(RewardRunner):
    """Calls a plain reward once for each unit of samples: for each group, or for all samples."""

    def run(self, samples: Sequence[Sample], budget: FailureBudget) -> list[Outcome]:
        """Returns an outcome for each sample; raises RewardError as soon as the budget is exceeded."""
        outcomes: list[Outcome] = []
        for unit in self.units(samples):
            with left_in_order(self.name):
                part = self._call(unit, budget)
            budget.record(part)
            outcomes += part
        return outcomes

    def units(self, samples: Sequence[Sample]) -> list[list[Sample]]:
        """Returns the samples of each call."""
        if self.kind.scope == "sample":
            return [[sample] for sample in samples]
        if self.kind.scope == "group":
            return [list(group) for _, group in groupby(samples, key=lambda sample: sample.position)]
        return [list(samples)] if samples else []

    def _call(self, unit: list[Sample], budget: FailureBudget) -> list[Outcome]:
        try:
            values = call_in_time(self.limits.timeout_s * len(unit), self._values_of, unit)
        except (Exception, SystemExit) as error:
            if self.goes_on_singly(unit, budget):
                return [outcome for sample in unit for outcome in self._call([sample], budget)]
            return [failed(self.name, unit, error)] * len(unit)
        return self.checked(unit, values)

    def _values_of(self, unit: list[Sample]) -> Any:
        return listed(self.reward([*unit]), len(unit))  # its own list, which it may sort or empty

    def goes_on_singly(self, unit: list[Sample], budget: FailureBudget) -> bool:
        """Returns whether a batch that failed is scored again sample by sample.

        If failures are allowed, a bad sample then costs only itself, however the ranks have split the batch.
        """
        return self.kind.scope == "batch" and len(unit) > 1 and budget.max_failures > 0

    def checked(self, unit: list[Sample], values: Any) -> list[Outcome]:
        """Returns the numbers of one call, with an error in place of each value that is not a finite number."""
        if not isinstance(values, list):
            return [no_list(self.name, unit, values)] * len(unit)
        if len(values) != len(unit):
            return [wrong_count(self.name, unit, len(values))] * len(unit)
        return [score_outcome(self.name, sample, value) for sample, value in zip(unit, values, strict=True)]


def listed(returned: Any, count: int) -> Any:
    """Returns the values of one call as a list, and what has none, such as None, as it is.

    A generator may have no end: one value too many is enough to refuse it.
    """
    if isinstance(returned, Iterator):
        return list(islice(returned, count + 1))
    return list(returned) if isinstance(returned, Iterable) else returned
