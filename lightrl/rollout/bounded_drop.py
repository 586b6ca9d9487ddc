"""Drops groups that have become too old (--rollout.late drop) in a run with ranks that only generate."""

from __future__ import annotations

from typing import Any

from lightrl.engines.link import Link
from lightrl.metrics import Statistics
from lightrl.rollout.bounded_collector import BoundedCollector
from lightrl.rollout.fresh_share import oldest_with_fresh


class DroppingCollector(BoundedCollector):
    """Takes the oldest finished groups for a step without waiting for any particular group, and drops late groups."""

    def __init__(self, *parts: Any, **settings: Any) -> None:
        """Takes the arguments of BoundedCollector."""
        super().__init__(*parts, **settings)
        self._may_come: set[int] = set()  # dropped groups that a rank may have finished meanwhile

    def drop_late(self, link: Link, step: int) -> None:
        """Drops the groups that are too old for this step, finished or not, and has others started instead."""
        link.wait(lambda: self._learn_news(link), "what was started")
        late = [number for number, version in self._started.items() if step - version > self._rules.max_staleness]
        if late:
            link.post({"do": "drop", "numbers": late})
        for number in late:
            del self._started[number]
            self._may_come.add(number)
        self._discard(link)
        self._num_dropped += len(late)
        self._tickets.add([self._order[number] for number in late])
        statistics = Statistics()
        statistics.maximum("rollout/dropped", len(late))
        self._statistics.append(statistics.take())

    def choose(self, step: int) -> tuple[int, ...] | None:
        """Returns the finished groups that started first; None while there are too few."""
        return oldest_with_fresh(self._started, self._finished, step=step, rules=self._rules)

    def _learn_news(self, link: Link) -> bool:
        is_all_known = super()._learn_news(link)
        self._discard(link)
        return is_all_known

    def _discard(self, link: Link) -> None:
        """Deletes the results of dropped groups."""
        for number in self._finished & self._may_come:
            link.take(f"group/{number}")
            self._finished.remove(number)
            self._may_come.remove(number)
