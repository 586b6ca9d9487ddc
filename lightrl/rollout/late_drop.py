"""Drops groups that have become too old (--rollout.late drop) instead of having a step wait for them."""

from __future__ import annotations

from lightrl.records import Sample
from lightrl.rollout.collector import Prompts
from lightrl.rollout.fresh_share import oldest_with_fresh
from lightrl.rollout.scheduled_collector import ScheduledCollector
from lightrl.rollout.scheduler import AsyncScheduler


class DroppingScheduler(AsyncScheduler):
    """Takes the oldest finished groups for a step without waiting for any particular group, and drops late groups."""

    def drop_late(self, step: int) -> list[int]:
        """Drops the groups that are too old for this step, finished or not, and returns their tickets.

        They count as never started, so others take their places.
        """
        late = [ticket for ticket, version in self.started.items() if step - version > self.rules.max_staleness]
        for ticket in late:
            del self.started[ticket]
            self.finished.discard(ticket)
        self.num_started -= len(late)
        return late

    def _choose(self, step: int) -> tuple[int, ...] | None:
        chosen = oldest_with_fresh(self.started, self.finished, step=step, rules=self.rules)
        return None if chosen is None else tuple(sorted(chosen))


class LateDropCollector(ScheduledCollector):
    """Begins each step by dropping the groups that are too old for it. Every rank calls each method."""

    def sample(self, prompts: Prompts, *, step: int, group_size: int, temperature: float) -> list[Sample]:
        """Returns this rank's samples of the step's batch, all from groups that are young enough."""
        self._drop_late(step)
        return super().sample(prompts, step=step, group_size=group_size, temperature=temperature)

    def _drop_late(self, step: int) -> None:
        """Ends the episodes of groups that are too old, and deletes their journals and finished samples."""
        scheduler = self.schedule.scheduler
        assert isinstance(scheduler, DroppingScheduler), "the two are made together"
        late = scheduler.drop_late(step)
        with self._comm.phase("dropping late groups", local=True):
            keys = [key for key in self.schedule.journals if key[0] in late]
            if self._driver is not None:
                self._driver.end(keys)
            for key in keys:
                self._ended.pop(key, None)
            self.schedule.close(late)
            self.schedule.buffer.take(late)
        self._statistics.maximum("rollout/dropped", len(late))
