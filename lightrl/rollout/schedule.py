"""The state that an asynchronous run carries from step to step: tickets, finished groups, and unfinished episodes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from lightrl.comm import Comm
from lightrl.records import Prompt
from lightrl.rollout.journal import Journal
from lightrl.rollout.replay import ReplayBuffer
from lightrl.rollout.scheduler import Scheduler


class Schedule:
    """The state of a schedule on this rank: its own groups and episodes, and a scheduler that is equal on all ranks."""

    def __init__(
        self,
        scheduler: Scheduler,
        comm: Comm,
        prompts: Sequence[Prompt],
        index_at: Callable[[int], int],
        *,
        engine_size: int = 1,
    ) -> None:
        """Begins a run.

        Args:
            scheduler: Decides which groups start when, and which make up a batch.
            index_at: Returns the data index of a ticket's prompt.
            engine_size: Number of ranks that drive an engine together; the first of them has the tickets of all.
        """
        self.scheduler = scheduler
        self.buffer = ReplayBuffer()
        self.journals: dict[tuple[int, int], Journal] = {}  # of this rank's unfinished groups, by ticket and sample
        self._comm = comm
        self._prompts = prompts
        self._index_at = index_at
        self._engine_size = engine_size

    def prompt(self, ticket: int) -> Prompt:
        """Returns the prompt of a ticket."""
        return self._prompts[self._index_at(ticket)]

    def is_mine(self, ticket: int) -> bool:
        """Returns whether a ticket belongs to this rank: tickets are dealt out to the engines in turn."""
        engines = self._comm.world // self._engine_size
        return self._comm.rank == ticket % engines * self._engine_size

    def open(self, tickets: Iterable[int], group_size: int, version: int) -> None:
        """Opens a journal for each sample of those tickets that belong to this rank."""
        for ticket in tickets:
            self._index_at(ticket)  # on every rank, so that a curriculum makes the same choice on all
            for index in range(group_size if self.is_mine(ticket) else 0):
                self.journals[ticket, index] = Journal(ticket, index, version)

    def close(self, tickets: Iterable[int]) -> None:
        """Forgets the journals of groups that are finished or lost."""
        gone = set(tickets)
        self.journals = {key: item for key, item in self.journals.items() if key[0] not in gone}

    # ---- Checkpoints -------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of all ranks as plain values and tensors; every rank calls it, between two steps.

        A checkpoint does not hold the engine's memory of unfinished samples. It is freed here as well, so that this run
        and a run resumed from the checkpoint compute the same tokens again.
        """
        for journal in self.journals.values():
            journal.let_go()
        parts = self._comm.all_gather_object([item.state_dict() for item in self.journals.values()])
        journals = sorted((item for part in parts for item in part), key=lambda item: (item["ticket"], item["sample"]))
        return {
            "scheduler": self.scheduler.state_dict(),
            "groups": self.buffer.state_dict(self._comm),
            "journals": journals,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues a saved schedule, on any number of ranks."""
        self.scheduler.load_state_dict(state["scheduler"])
        self.buffer.load_state_dict(state["groups"], self._prompts, self.is_mine)
        journals = [Journal.from_state(item) for item in state["journals"]]
        self.journals = {item.key: item for item in journals if self.is_mine(item.ticket)}
