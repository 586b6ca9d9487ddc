"""ReplayBuffer: this rank's finished groups, which wait until a step takes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

from lightrl.comm import Comm
from lightrl.records import Prompt, ScoredGroup
from lightrl.rollout.saved_groups import group_from_state, group_state
from lightrl.rollout.scheduler import Rules, forced_first

Order = Literal["forced_first", "fifo", "stalest"]


class ReplayBuffer:
    """Finished groups by ticket; groups are put in and taken out as a whole."""

    def __init__(self) -> None:
        self._groups: dict[int, ScoredGroup] = {}  # in the order in which they were put in

    def __len__(self) -> int:
        return len(self._groups)

    def __contains__(self, ticket: int) -> bool:
        return ticket in self._groups

    def __getitem__(self, ticket: int) -> ScoredGroup:
        return self._groups[ticket]

    @property
    def tickets(self) -> list[int]:
        """Tickets of the groups, in the order in which they were put in."""
        return list(self._groups)

    def put(self, group: ScoredGroup) -> None:
        """Adds a group; raises ValueError if it has no ticket, or one that is in the buffer already."""
        if group.ticket < 0 or group.ticket in self._groups:
            raise ValueError(f"A group of ticket {group.ticket} cannot be added: tickets count from 0, each once.")
        self._groups[group.ticket] = group

    def choose(self, count: int, order: Order = "forced_first", *, step: int = 0, max_staleness: int = 0) -> list[int]:
        """Returns the tickets of a batch of `count` groups; empty while there is no batch that may be taken.

        Args:
            count: Groups in a batch.
            order: forced_first: the lowest tickets, provided that the rest can still be trained on in time. fifo: in
                the order in which they came in. stalest: those with the oldest token first.
            step: The number of the step, for forced_first.
            max_staleness: The bound on the age of a group, for forced_first.
        """
        if len(self) < count:
            return []
        if order == "fifo":
            return self.tickets[:count]
        if order == "stalest":
            return sorted(self._groups, key=lambda ticket: (self._groups[ticket].oldest_version, ticket))[:count]
        started = {ticket: group.start_version for ticket, group in self._groups.items()}
        rules = Rules(batch_size=count, max_staleness=max_staleness)
        return list(forced_first(started, started, step=step, rules=rules) or ())

    def take(self, tickets: Collection[int]) -> list[ScoredGroup]:
        """Removes and returns those groups with these tickets that this rank has, in the order of the tickets."""
        return [self._groups.pop(ticket) for ticket in sorted(tickets) if ticket in self._groups]

    def counts(self) -> dict[str, int]:
        """Returns the number of groups by status."""
        return dict(Counter(group.status.value for group in self._groups.values()))

    # ---- Checkpoints -------------------------------------------------------------------------------------------

    def state_dict(self, comm: Comm) -> list[dict[str, Any]]:
        """Returns the groups of all ranks as plain values and tensors; every rank calls it."""
        parts = comm.all_gather_object(list(self._groups.values()))
        everything = sorted((group for part in parts for group in part), key=lambda group: group.ticket)
        return [group_state(group) for group in everything]

    def load_state_dict(
        self, state: Sequence[Mapping[str, Any]], prompts: Sequence[Prompt], is_mine: Callable[[int], bool]
    ) -> None:
        """Loads the saved groups whose tickets belong to this rank; prompts is the whole data set, in its order."""
        groups = [group_from_state(item, prompts) for item in state]
        self._groups = {group.ticket: group for group in groups if is_mine(group.ticket)}
