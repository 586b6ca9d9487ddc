"""A driver whose engine waits for episodes between two turns (--rollout.turn_wait_s), so that no clock decides a batch.

Without it, the engine steps for other episodes while a tool runs or an agent's request is under way, so that the time
which these take decides how many steps an episode needs, and which groups are finished first.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from lightrl.config import WorkflowConfig
from lightrl.engines.base import EngineGroup
from lightrl.engines.colocated import ColocatedEngine
from lightrl.rollout.phases import PhasedDriver

logger = logging.getLogger(__name__)


def driver_of(options: WorkflowConfig) -> Callable[[ColocatedEngine, EngineGroup], PhasedDriver]:
    """Returns a function that makes the driver of a schedule's episodes."""
    return partial(PatientDriver, wait_s=options.turn_wait_s) if options.turn_wait_s else PhasedDriver


class PatientDriver(PhasedDriver):
    """Steps the engine only when each episode has asked it for a turn, has ended, or has been too long about it.

    An episode that waits for its siblings is not waited for, because these may need the engine.
    """

    def __init__(self, engine: ColocatedEngine, group: EngineGroup, *, wait_s: float) -> None:
        super().__init__(engine, group)
        self._wait_s = wait_s
        self._since: dict[tuple[int, int], float] = {}  # when an episode that is between two turns was first seen so
        self._has_warned = False

    async def _let_episodes_go_on(self) -> None:
        await super()._let_episodes_go_on()
        while awaited := self._between_turns():
            await self._wait_for_a_wish(awaited)
            await super()._let_episodes_go_on()
        self._wishes.sort(key=lambda wish: (wish.ticket, wish.params.first_sample))  # not in the order of arrival

    def _between_turns(self) -> list[asyncio.Task[Any]]:
        """Returns the tasks of the episodes that the engine still waits for."""
        asking = {journal.key for answer, (journal, _) in self._journals.items() if not answer.done()}
        tasks = {
            key: task
            for key, task in self._tasks.items()
            if not (task.done() or key in asking or self._begun[key].is_among_siblings)
        }
        now = time.monotonic()
        self._since = {key: self._since.get(key, now) for key in tasks}
        awaited = [task for key, task in tasks.items() if now - self._since[key] < self._wait_s]
        if len(awaited) < len(tasks) and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "An episode has been between two turns for more than %g s (--rollout.turn_wait_s). The engine goes on "
                "without it, so that the batches of this run depend on time.",
                self._wait_s,
            )
        return awaited
