"""The trainer's end of a production that never stops: which of the finished groups make the batch of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightrl.comm import Comm
from lightrl.config import RolloutConfig
from lightrl.data.sampler import PromptSampler
from lightrl.engines.link import Link
from lightrl.records import Prompt, ScoredGroup
from lightrl.rewards.scoring import RewardError
from lightrl.rollout.production import CLAIMS, FINISHED, TicketOrder
from lightrl.rollout.recorded_schedule import ScheduleLog
from lightrl.rollout.remote_collector import RemoteCollector
from lightrl.rollout.sample_messages import from_bytes
from lightrl.rollout.saved_groups import group_from_state
from lightrl.rollout.scheduler import Rules, forced_first


class UsedTickets:
    """The tickets that steps have learned from; rank 0 knows them, and a checkpoint holds them."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self.first = 0  # every ticket below it was used
        self.beyond: set[int] = set()  # used ones above it

    def add(self, tickets: Sequence[int]) -> None:
        """Notes the tickets of a step."""
        self.beyond.update(tickets)
        while self.first in self.beyond:
            self.beyond.remove(self.first)
            self.first += 1

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of rank 0 as plain numbers; every rank calls it."""
        return self._comm.broadcast_object({"first": self.first, "beyond": sorted(self.beyond)})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where state_dict() was taken."""
        self.first, self.beyond = int(state["first"]), set(state["beyond"])


class BoundedCollector(RemoteCollector):
    """Takes finished groups so that none becomes older than --rollout.max_staleness, and none is dropped."""

    def __init__(
        self,
        comm: Comm,
        link: Link | None,
        prompts: Sequence[Prompt],
        sampler: PromptSampler,
        *,
        config: RolloutConfig,
        used: UsedTickets,
        log: ScheduleLog,
    ) -> None:
        super().__init__(comm, link, prompts, sampler)
        self._rules = Rules(batch_size=config.num_prompts, max_staleness=config.rollout.max_staleness)
        self._max_failures = config.max_reward_failures
        self._used = used
        self._log = log
        self._order = TicketOrder(used.first, sorted(used.beyond))
        self._started: dict[int, int] = {}  # version at the start, by the number of the claim
        self._num_seen = 0  # claims that are known here
        self._num_finished = 0  # finished ones that are known here
        self._finished: set[int] = set()

    def take(self, link: Link, step: int) -> list[ScoredGroup]:
        """Waits until the step has a batch; returns it by ticket."""
        chosen: tuple[int, ...] = ()

        def has_batch() -> bool:
            nonlocal chosen
            if not self._learn_news(link):
                return False
            found = forced_first(self._started, self._finished, step=step, rules=self._rules)
            chosen = found or ()
            return found is not None

        link.wait(has_batch, "finished groups")
        groups: list[ScoredGroup] = []
        for number in chosen:
            answer = from_bytes(link.take(f"group/{number}"))
            groups += [group_from_state(state, self._prompts) for state in answer["groups"]]
            self._statistics.append(answer["statistics"])
            del self._started[number]
            self._finished.remove(number)
        self._check_failures()
        self._used.add([self._order[number] for number in chosen])
        self._log.append(step, groups)
        return groups

    def _learn_news(self, link: Link) -> bool:
        """Reads what was started and finished; returns whether everything that was started is known."""
        while self._num_seen < link.claimed(CLAIMS):
            if not link.has(f"start/{self._num_seen}"):
                return False  # claimed a moment ago
            self._started[self._num_seen] = int(link.take(f"start/{self._num_seen}"))
            self._num_seen += 1
        while self._num_finished < link.count(FINISHED) and link.has(f"finish/{self._num_finished}"):
            self._finished.add(int(link.take(f"finish/{self._num_finished}")))
            self._num_finished += 1
        return True

    def _check_failures(self) -> None:
        """Raises RewardError if more rewards of the step's samples failed than the run tolerates."""
        counts = [values["reward/failures"][1] for values in self._statistics if "reward/failures" in values]
        if sum(counts) > self._max_failures:
            raise RewardError(
                f"{sum(counts):.0f} rewards have failed, more than --max_reward_failures {self._max_failures}. The "
                "rollout ranks have shown the first ones."
            )
