"""Replaces groups that --rollout.filter rejects, in a run with ranks that only generate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightrl.engines.link import Link
from lightrl.metrics import Statistics
from lightrl.records import Sample, ScoredGroup, Status
from lightrl.rollout.bounded_collector import BoundedCollector
from lightrl.rollout.collector import Prompts
from lightrl.rollout.sample_messages import from_bytes
from lightrl.rollout.saved_groups import group_from_state
from lightrl.rollout.scheduled_collector import Filter


def filtering(
    kind: type[BoundedCollector], keep: Filter, by: type[FilteringCollector] | None = None
) -> type[BoundedCollector]:
    """Returns the kind of collector whose steps take only groups that the filter keeps; `by` replaces the others."""
    return type(f"Filtering{kind.__name__}", (by or FilteringCollector, kind), {"keep": staticmethod(keep)})


class FilteringCollector(BoundedCollector):
    """Asks the filter about the groups of a batch before a step takes them, and has others started for rejected ones.

    A step that has rejected max_rounds batches of groups replaces no more: what it rejects then leaves its batch short.
    """

    keep: Filter  # what --rollout.filter names; filtering() sets it

    def __init__(self, *parts: Any, **settings: Any) -> None:
        """Takes the arguments of BoundedCollector."""
        super().__init__(*parts, **settings)
        self._kept: set[int] = set()  # numbers of finished groups that the filter keeps
        self._num_rejected = 0  # groups of the step

    def take(self, link: Link, step: int, first: int, count: int) -> list[ScoredGroup]:
        """Waits until the step has a batch that the filter keeps, and returns its groups."""
        self._num_rejected = 0
        groups = super().take(link, step, first, count)
        self._kept &= self._finished
        statistics = Statistics()
        statistics.add("rollout/filtered", self._num_rejected)
        self._statistics.append(statistics.take())
        return groups

    def choose(self, step: int) -> tuple[int, ...] | None:
        """Returns the claim numbers of the step's batch; None while it has to wait, also for what replaces others."""
        while (chosen := super().choose(step)) is not None:
            rejected = [number for number in chosen if not self._is_kept(number)]
            if not rejected:
                return chosen
            may_replace = self._num_rejected < self._rules.max_rounds * self._rules.batch_size
            self._reject(rejected, may_replace=may_replace)
            if not may_replace:
                return tuple(number for number in chosen if number not in rejected)
        return None

    def _is_kept(self, number: int) -> bool:
        """Asks the filter once about a finished group. It does not judge failures, which no step trains."""
        if number not in self._kept:
            assert self._link is not None, "rank 0 alone chooses"
            answer = from_bytes(self._link.peek(f"group/{number}"))
            groups = [group_from_state(state, self._prompts) for state in answer["groups"]]
            if all(self.keep(group) for group in groups if _has_completed(group)):
                self._kept.add(number)
        return number in self._kept

    def _reject(self, numbers: Sequence[int], *, may_replace: bool) -> None:
        """Drops finished groups, and has others started in their places if it may."""
        assert self._link is not None, "rank 0 alone chooses"
        for number in numbers:
            self._statistics.append(from_bytes(self._link.take(f"group/{number}"))["statistics"])
            del self._started[number]
            self._finished.remove(number)
        self._tickets.add([self._order[number] for number in numbers])
        self._num_rejected += len(numbers)
        if may_replace:
            self._link.post({"do": "drop", "numbers": [*numbers]})


class NamingCollector(FilteringCollector):
    """Chooses the prompts of the replacements too, in a run with a curriculum.

    A step rejects groups on trainer rank 0 alone. That rank names the prompts at once, and the other ranks make the
    same choices before the step ends: until then no result comes in that would change the weights.
    """

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


def _has_completed(group: ScoredGroup) -> bool:
    return any(sample.status is Status.COMPLETED for sample in group.samples)
