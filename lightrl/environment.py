"""Checks the environment variables by which torchrun tells a process its place."""

from __future__ import annotations

import os

_TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class WrongEnvironmentError(ValueError, RuntimeError):
    """A wrong variable: a mistake of the user's, and a RuntimeError for code that expects one."""


def check_environment() -> None:
    """Raises WrongEnvironmentError unless the variables that torchrun sets describe a rank of a world."""
    missing = [name for name in _TORCHRUN_VARIABLES if name not in os.environ]
    if missing:
        raise WrongEnvironmentError(
            f"Environment variables missing for a distributed run: {', '.join(missing)}. Start it with torchrun "
            "or set them all; without any of them lightrl runs as one process."
        )
    for name in (*(name for name in _TORCHRUN_VARIABLES if name != "MASTER_ADDR"), "LOCAL_RANK"):
        if not os.environ.get(name, "0").isdecimal():
            raise WrongEnvironmentError(
                f"The environment variable {name} is {os.environ[name]!r}: it must be a whole number."
            )
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if rank >= world:
        raise WrongEnvironmentError(
            f"The environment variable RANK is {rank}: with WORLD_SIZE {world} it must be 0 to {world - 1}."
        )
