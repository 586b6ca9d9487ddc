"""A world of one rank for code that works alone inside a process of a larger world."""

from __future__ import annotations

from lightrl.comm import Comm


class Alone(Comm):
    """A world of one rank: its collectives return at once, whatever the other ranks of the process group are doing."""

    def __init__(self) -> None:
        super().__init__()
        self.rank, self.world = 0, 1
