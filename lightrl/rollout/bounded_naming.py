"""Chooses the prompts of groups that replace rejected ones (--rollout.filter) in a run with a curriculum.

A step rejects groups on trainer rank 0 alone. That rank names the prompts of their replacements at once, and the other
ranks make the same choices before the step ends: until then no result comes in that would change the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightrl.records import Sample
from lightrl.rollout.bounded_filter import FilteringCollector
from lightrl.rollout.collector import Prompts


class NamingCollector(FilteringCollector):
    """Filters as the base does, and names the prompts of the replacements."""

    def sample(self, prompts: Prompts, *, step: int, **settings: Any) -> list[Sample]:
        """Returns this rank's samples of the step; then all ranks have chosen the same prompts."""
        samples = super().sample(prompts, step=step, **settings)
        self._choose_prompts(self._comm.broadcast_object(self._num_named))
        return samples

    def _reject(self, numbers: Sequence[int], *, may_replace: bool) -> None:
        super()._reject(numbers, may_replace=may_replace)
        if not may_replace:
            return
        assert self._link is not None, "rank 0 alone chooses"
        self._num_dropped += len(numbers)
        self._link.post({"do": "name", "prompts": self._choose_prompts(self._num_named + len(numbers))})
