"""A world of one, in a process of a larger one."""

from __future__ import annotations

from lightrl.comm import Comm


class Alone(Comm):
    """A world of one: its collectives wait for nobody, while other ranks do something else."""

    def __init__(self) -> None:
        super().__init__()
        self.rank, self.world = 0, 1
