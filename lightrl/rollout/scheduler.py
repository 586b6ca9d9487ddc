"""Decides which prompts are rolled out when, and which groups make up a batch; with integers, without torch or ranks.

A ticket is the index of a prompt in the run's one order, and tickets are started in that order. A group's age at a step
is the number of the step minus the version of the weights under which its ticket was started. Every rank keeps an equal
scheduler and tells it the same facts, so all ranks decide alike.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The rules of a schedule. All counts are groups over all ranks."""

    batch_size: int  # groups of a step
    max_staleness: int = 0  # largest age of a group: how many steps old its starting weights may be
    over_issue: float = 0.0  # share of a batch that is started in addition to it
    max_groups: int = 0  # largest number of groups that run at once; 0: no limit
    tail_batch: int = -1  # -1: none; 0: slow groups go first; N: N slow groups make a step without over-issue
    tail_after: int = 3  # a group is slow once it was carried over this many steps
    on_policy_min_ratio: float = 0.0  # share of a batch started under the step's weights, if late groups are dropped
    max_rounds: int = 5  # a step that has lost this many batches of groups ends with the groups that it has

    @property
    def max_unused(self) -> int:
        """Largest number of groups that may run or wait for a batch at once."""
        return math.ceil(self.batch_size * (1 + self.over_issue))


def admissible(rules: Rules, *, version: int, started: int, running: int) -> int:
    """Returns how many groups may be started under a version of the weights, by AReaL's formula (arXiv:2505.24298).

    Args:
        version: The number of the weights, which is that of the next step.
        started: Number of groups started in the whole run, without those that were lost.
        running: Number of groups that are not finished.
    """
    by_age = (rules.max_staleness + version + 1) * rules.batch_size - started
    return max(0, by_age if not rules.max_groups else min(rules.max_groups - running, by_age))


def forced_first(
    started: Mapping[int, int], finished: Collection[int], *, step: int, rules: Rules
) -> tuple[int, ...] | None:
    """Returns the tickets of the step's batch; None while it has to wait for other groups.

    The batch consists of the finished groups that started first, provided that all others can still be trained on in
    time: of the groups that are due within k more steps, at most k batches may remain. Without this check, young groups
    would take places that older groups need later, and these would become too old.

    Args:
        started: The version under which each ticket was started, for all that run or are finished.
    """
    size = rules.batch_size
    chosen = tuple(sorted(finished, key=lambda ticket: (started[ticket], ticket))[:size])
    if len(chosen) < size:
        return None
    for num_left in range(rules.max_staleness):  # number of steps after this one within which groups are due
        newest = step + num_left - rules.max_staleness
        due = sum(version <= newest for version in started.values())
        if due - sum(started[ticket] <= newest for ticket in chosen) > num_left * size:
            return None
    return chosen


class Scheduler:
    """Base of the schedulers: the tickets that run or are finished, and counts of the whole run.

    In each step, call `start` until `batch` returns the step's tickets, and `finish` and `lose` when groups end; then
    call `take`.
    """

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.next_ticket = 0
        self.started: dict[int, int] = {}  # version at the start, by ticket, ascending: all that run or are finished
        self.finished: set[int] = set()
        self.num_started = 0  # in the whole run, without those that were lost
        self._num_lost_in_step = 0

    @property
    def running(self) -> list[int]:
        """The tickets that are not finished, ascending."""
        return [ticket for ticket in self.started if ticket not in self.finished]

    def start(self, version: int) -> list[int]:
        """Returns the tickets to start now under a version of the weights, and counts them as running."""
        count = max(0, self._num_wanted(version))
        tickets = list(range(self.next_ticket, self.next_ticket + count))
        self.next_ticket += count
        self.num_started += count
        self.started |= dict.fromkeys(tickets, version)
        return tickets

    def _num_wanted(self, version: int) -> int:
        raise NotImplementedError

    def finish(self, tickets: Iterable[int]) -> None:
        """Records that groups are complete and can be trained on."""
        for ticket in tickets:
            if ticket not in self.started or ticket in self.finished:
                raise _not_running(ticket)
            self.finished.add(ticket)

    def lose(self, tickets: Iterable[int]) -> None:
        """Records that groups failed or were rejected: they are never trained on, and others take their places."""
        for ticket in tickets:
            if ticket not in self.started:
                raise _not_running(ticket)
            del self.started[ticket]
            self.finished.discard(ticket)
            self.num_started -= 1
            self._num_lost_in_step += 1

    def batch(self, step: int) -> tuple[int, ...] | None:
        """Returns the tickets of the step's batch, ascending; None while the step has to wait."""
        if self._is_exhausted:
            return None if self.may_run(step) else tuple(sorted(self.finished)[: self.rules.batch_size])
        return self._choose(step)

    def _choose(self, step: int) -> tuple[int, ...] | None:
        raise NotImplementedError

    def take(self, tickets: Collection[int]) -> None:
        """Ends the step with this batch."""
        for ticket in tickets:
            self.finished.remove(ticket)
            del self.started[ticket]
        self.num_started += self.rules.batch_size - len(tickets)  # a short batch still counts as a whole one
        self._num_lost_in_step = 0

    @property
    def _is_exhausted(self) -> bool:
        """Whether the step has lost so many groups that it starts no more groups."""
        return self._num_lost_in_step >= self.rules.max_rounds * self.rules.batch_size

    def may_run(self, step: int) -> Collection[int]:
        """Returns the running tickets that the engine works on in this step; the others wait for a later one."""
        return self.running

    def is_tail(self, step: int) -> bool:
        """Returns whether the step is a tail batch."""
        return False

    # ---- Checkpoints -------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns the state as plain numbers; call it between two steps."""
        return {
            "next_ticket": self.next_ticket,
            "num_started": self.num_started,
            "started": [[ticket, version] for ticket, version in self.started.items()],
            "finished": sorted(self.finished),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a saved state."""
        self.next_ticket, self.num_started = int(state["next_ticket"]), int(state["num_started"])
        self.started = {int(ticket): int(version) for ticket, version in state["started"]}
        self.finished = set(state["finished"])
        self._num_lost_in_step = 0


class SyncScheduler(Scheduler):
    """Starts a batch and waits for all of it. Lost groups are replaced in rounds."""

    def _num_wanted(self, version: int) -> int:
        if self.running or self._is_exhausted:
            return 0
        return self.rules.batch_size - len(self.finished)

    def _choose(self, step: int) -> tuple[int, ...] | None:
        return tuple(sorted(self.finished)) if len(self.finished) == self.rules.batch_size else None


class AsyncScheduler(Scheduler):
    """Starts more than a batch; unfinished groups continue in the next step, within the bound on their age."""

    def __init__(self, rules: Rules) -> None:
        super().__init__(rules)
        self._tail_step = -1  # the step that is a tail batch
        self._ready_step = -1  # the newest step for which this was decided

    def start(self, version: int) -> list[int]:
        """Returns the tickets to start now under a version of the weights, which is also the number of the step."""
        self._decide_tail(version)
        return super().start(version)

    def _num_wanted(self, version: int) -> int:
        if self._is_exhausted:
            return 0
        running = len(self.running)
        allowed = admissible(self.rules, version=version, started=self.num_started, running=running)
        unused = self.rules.batch_size if self._tail_step == version else self.rules.max_unused
        return min(allowed, unused - len(self.started))

    def _choose(self, step: int) -> tuple[int, ...] | None:
        if self._tail_step == step:
            members = self._tail_members()
            return members if self.finished.issuperset(members) and len(members) == self.rules.batch_size else None
        chosen = forced_first(self.started, self.finished, step=step, rules=self.rules)
        if chosen is not None and self.rules.tail_batch == 0:
            first = self.slow(step)[: self.rules.batch_size]
            return chosen if set(chosen).issuperset(first) else None
        return chosen

    # ---- Slow groups -------------------------------------------------------------------------------------------

    def slow(self, step: int) -> list[int]:
        """Returns the groups that were carried over at least tail_after steps without being trained on."""
        return [ticket for ticket, version in self.started.items() if step - version >= self.rules.tail_after]

    def is_tail(self, step: int) -> bool:
        """Returns whether the step is a tail batch."""
        return self._tail_step == step

    def _decide_tail(self, step: int) -> None:
        if self._ready_step == step:
            return
        self._ready_step = step
        slow = [ticket for ticket in self.slow(step) if ticket not in self.finished]
        if self.rules.tail_batch > 0 and len(slow) >= self.rules.tail_batch:
            self._tail_step = step

    def _tail_members(self) -> tuple[int, ...]:
        """Returns the oldest groups, as many as fit in a batch; the slow ones are among them."""
        return tuple(self.started)[: self.rules.batch_size]

    def may_run(self, step: int) -> Collection[int]:
        """Returns the running tickets that the engine works on in this step: in a tail batch only its members."""
        if self._tail_step != step:
            return self.running
        return [ticket for ticket in self._tail_members() if ticket not in self.finished]


def _not_running(ticket: int) -> ValueError:
    return ValueError(f"Ticket {ticket} is not running: it was never started, or it is finished or taken already.")
