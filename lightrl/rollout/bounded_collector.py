"""The trainer's side of a production that never stops: decides which finished groups make up the batch of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from lightrl.comm import Comm
from lightrl.config import RolloutConfig
from lightrl.data.sampler import Draws
from lightrl.engines.link import Link
from lightrl.records import Prompt, Sample, ScoredGroup, Status
from lightrl.rewards.scoring import RewardError
from lightrl.rollout.collector import Prompts
from lightrl.rollout.fresh_share import bounded_rules, num_steps_started
from lightrl.rollout.production import CLAIMS, CONTINUED, FINISHED, TicketOrder
from lightrl.rollout.recorded_schedule import Calls, ScheduleLog
from lightrl.rollout.remote_collector import RemoteCollector
from lightrl.rollout.sample_messages import from_bytes, to_bytes
from lightrl.rollout.saved_groups import group_from_state
from lightrl.rollout.scheduler import forced_first


class Tickets:
    """The tickets that steps have used, and those that are unfinished; only rank 0 knows them.

    A checkpoint holds them together with everything that was generated.
    """

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self.first = 0  # all tickets below it are used
        self.beyond: set[int] = set()  # used tickets above it
        self.finished: list[dict[str, Any]] = []  # finished groups of the checkpoint that no step has taken
        self.running: list[dict[str, Any]] = []  # unfinished groups of the checkpoint
        self.under_way: Callable[[], Mapping[str, Any]] | None = None  # returns the groups finished and running now

    def add(self, tickets: Sequence[int]) -> None:
        """Records that a step has used these tickets."""
        self.beyond.update(tickets)
        while self.first in self.beyond:
            self.beyond.remove(self.first)
            self.first += 1

    @property
    def begun(self) -> list[tuple[int, int]]:
        """The tickets of the checkpoint's groups, finished ones first, each with the version at its start."""
        return [(int(item["ticket"]), int(item["version"])) for item in (*self.finished, *self.running)]

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of rank 0 as plain values and tensors; every rank calls it."""
        state: dict[str, Any] = {"first": self.first, "beyond": sorted(self.beyond)}
        with self._comm.phase("saving what is under way", local=True):
            if self.under_way is not None:
                state |= self.under_way()
        return self._comm.broadcast_object(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a saved state."""
        self.first, self.beyond = int(state["first"]), set(state["beyond"])
        self.finished = list(state.get("finished", ()))  # this and the next are missing in older checkpoints
        self.running = list(state.get("running", ()))


class BoundedCollector(RemoteCollector):
    """Takes finished groups in such an order that none exceeds --rollout.max_staleness and none is dropped.

    With a curriculum it also chooses the prompts to start next, because the choice depends on the results.
    """

    def __init__(
        self,
        comm: Comm,
        link: Link | None,
        prompts: Sequence[Prompt],
        sampler: Draws,
        *,
        config: RolloutConfig,
        tickets: Tickets,
        log: ScheduleLog,
        first_step: int = 0,
    ) -> None:
        """Begins at the first step or at the one after a checkpoint, whose content every rank knows."""
        super().__init__(comm, link, prompts, sampler)
        self._first_step = first_step
        self._num_steps = config.max_steps
        self._num_dropped = 0  # groups that were started but never trained on
        self._num_named = -1 if not config.data.curriculum else 0  # groups with a chosen prompt; -1: no curriculum
        self._rules = bounded_rules(config)
        self._max_failures = config.max_reward_failures
        self._tickets = tickets
        self._log = log
        self._order = TicketOrder(tickets.first, sorted(tickets.beyond), [ticket for ticket, _ in tickets.begun])
        self._started: dict[int, int] = {}  # version at the start, by the number of the claim
        self._num_seen = 0  # number of claims read so far
        self._num_finished = 0  # number of finished groups read so far
        self._finished: set[int] = set()
        if link is not None:
            tickets.under_way = partial(self._under_way, link)
            _begin(link, tickets)

    def sample(self, prompts: Prompts, *, step: int, **settings: Any) -> list[Sample]:
        """Returns this rank's samples of the step, which are already scored; every rank calls it."""
        with self._comm.phase("late groups", local=True):
            if self._link is not None:
                self.drop_late(self._link, step)
        if self._num_named >= 0:
            self._name_prompts(step)
        return super().sample(prompts, step=step, **settings)

    def drop_late(self, link: Link, step: int) -> None:
        """Does nothing, because no group becomes too old."""

    def choose(self, step: int) -> tuple[int, ...] | None:
        """Returns the claim numbers of the groups in the step's batch; None while the step has to wait."""
        return forced_first(self._started, self._finished, step=step, rules=self._rules)

    def take(self, link: Link, step: int, first: int, count: int) -> list[ScoredGroup]:
        """Waits until the step has a batch, and returns its groups; whatever the trainer drew does not matter."""
        chosen: tuple[int, ...] = ()

        def has_batch() -> bool:
            nonlocal chosen
            if not self._learn_news(link):
                return False
            found = self.choose(step)
            chosen = found or ()
            return found is not None

        link.wait(has_batch, "finished groups")
        groups: list[ScoredGroup] = []
        calls: list[Calls] = []
        failures: list[str] = []
        for number in chosen:
            answer = from_bytes(link.take(f"group/{number}"))
            groups += [group_from_state(state, self._prompts) for state in answer["groups"]]
            calls.append(answer["calls"])
            failures.append(answer["failure"])
            self._statistics.append(answer["statistics"])
            del self._started[number]
            self._finished.remove(number)
        self._check_failures()
        _require_some(groups, failures)
        self._require_young(groups, step)
        self._tickets.add([self._order[number] for number in chosen])
        self._log.append(step, groups, calls)
        return groups

    def _name_prompts(self, step: int) -> None:
        """Chooses the prompts of all groups that may start under this step's weights, identically on every rank."""
        num_steps = num_steps_started(self._rules, step, self._num_steps) - self._first_step
        num_dropped: int = self._comm.broadcast_object(self._num_dropped)  # known on rank 0 alone
        end = num_steps * self._rules.batch_size + num_dropped
        chosen = self._choose_prompts(end)
        if self._link is not None:
            self._link.post({"do": "name", "prompts": chosen})

    def _choose_prompts(self, end: int) -> list[int]:
        """Chooses the prompts of all groups up to a number that have none yet; returns their data indices."""
        chosen = [self._sampler.index_at(self._order[number]) for number in range(self._num_named, end)]
        self._num_named += len(chosen)
        return chosen

    def _require_young(self, groups: Sequence[ScoredGroup], step: int) -> None:
        """Checks every token against the bound, since groups were chosen by the version at their start."""
        oldest = min((sample.oldest_version for group in groups for sample in group.samples), default=step)
        if step - oldest > self._rules.max_staleness:
            raise RuntimeError(
                f"Step {step + 1} has tokens of weights {oldest}, which are {step - oldest} steps behind; "
                f"--rollout.max_staleness allows {self._rules.max_staleness}. This is a defect of lightrl: report it."
            )

    def _under_way(self, link: Link) -> dict[str, Any]:
        """Returns the groups that no step has taken yet, for a checkpoint."""
        link.post({"do": "save"})
        running = [state for content in link.answers() for state in from_bytes(content)]
        link.wait(lambda: self._learn_news(link), "what was started")
        finished = [
            {
                "ticket": self._order[number],
                "version": self._started[number],
                "message": from_bytes(link.peek(f"group/{number}")),
            }
            for number in sorted(self._finished, key=self._order.__getitem__)
        ]
        saved = self._tickets
        waiting = [  # of the checkpoint that the run continues, if the rollout ranks have had no room for them yet
            item for number, item in enumerate(saved.running, len(saved.finished)) if number in self._started
        ]
        known = {item["ticket"] for item in finished}  # some may have been finished a moment ago
        by_ticket = {item["ticket"]: item for item in (*waiting, *running) if item["ticket"] not in known}
        return {"finished": finished, "running": [by_ticket[ticket] for ticket in sorted(by_ticket)]}

    def _learn_news(self, link: Link) -> bool:
        """Reads which groups were finished and started; returns whether all started groups are known.

        The order matters: a group that starts and finishes meanwhile is then unknown, and never known as finished only.
        """
        while self._num_finished < link.count(FINISHED) and link.has(f"finish/{self._num_finished}"):
            self._finished.add(int(link.take(f"finish/{self._num_finished}")))
            self._num_finished += 1
        while self._num_seen < link.claimed(CLAIMS):
            if not link.has(f"start/{self._num_seen}"):
                return False  # claimed a moment ago
            self._started[self._num_seen] = int(link.take(f"start/{self._num_seen}"))
            self._num_seen += 1
        return True

    def _check_failures(self) -> None:
        """Raises RewardError if more rewards of the step's samples failed than the run tolerates."""
        counts = [values["reward/failures"][1] for values in self._statistics if "reward/failures" in values]
        if sum(counts) > self._max_failures:
            raise RewardError(
                f"{sum(counts):.0f} rewards have failed, more than --max_reward_failures {self._max_failures}. The "
                "rollout ranks have shown the first ones."
            )


def _begin(link: Link, tickets: Tickets) -> None:
    """Stores the groups of a checkpoint where the rollout ranks and the first steps look for them."""
    num_finished, num_begun = len(tickets.finished), len(tickets.begun)
    link.put(CLAIMS, str(num_begun).encode())
    link.put(CONTINUED, str(num_finished).encode())
    for number, (_, version) in enumerate(tickets.begun):
        link.put(f"start/{number}", str(version).encode())
    for number, item in enumerate(tickets.finished):
        link.put(f"group/{number}", to_bytes(item["message"]))
        link.put(f"finish/{number}", str(number).encode())
    for number, item in enumerate(tickets.running, start=num_finished):
        link.put(f"begun/{number}", to_bytes(item))
    link.count(FINISHED, num_finished)


def _require_some(groups: Sequence[ScoredGroup], failures: Sequence[str]) -> None:
    """Raises RuntimeError if every episode of the step failed, most likely because of a mistake in the workflow."""
    samples = [sample for group in groups for sample in group.samples]
    if samples and all(sample.status is Status.FAILED for sample in samples):
        raise RuntimeError(f"Every episode of the step has failed. The first:\n{failures[0]}")
