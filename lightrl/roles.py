"""Roles: within one torchrun launch some ranks train and others generate, each role in a world of its own.

The last ranks generate. Rank, world size and store are rewritten before a rank joins, so a strategy, an engine or a
library never sees the other role. LOCAL_RANK stays as it is because it names the GPU.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

from lightrl.process_group import check_environment, take_role

RoleName = Literal["trainer", "rollout"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """The role of this rank, and the number of ranks of each role."""

    name: RoleName
    rank: int  # within the role
    num_trainers: int
    num_rollout: int

    @property
    def is_trainer(self) -> bool:
        """Whether this rank trains."""
        return self.name == "trainer"

    @property
    def other(self) -> RoleName:
        """The name of the other role."""
        return "rollout" if self.is_trainer else "trainer"

    @property
    def place(self) -> int:
        """The number that torchrun gave this rank; trainers come first."""
        return self.rank if self.is_trainer else self.num_trainers + self.rank

    def name_of(self, place: int) -> str:
        """Returns the name of the rank that has this number under torchrun."""
        is_trainer = place < self.num_trainers
        return f"trainer rank {place}" if is_trainer else f"rollout rank {place - self.num_trainers}"


def split(num_rollout: int, *, engine_tp_size: int = 1) -> Role:
    """Makes this process a rank of its role's world. Call it on every rank before any rank joins.

    Args:
        num_rollout: number of ranks that generate; they are the last ones.
        engine_tp_size: number of generating ranks that share an engine.
    """
    world = _described_world()
    if not 0 < num_rollout < world:
        raise ValueError(_describe_bad_count(num_rollout, world))
    if num_rollout % engine_tp_size:
        raise ValueError(
            f"--engine_tp_size {engine_tp_size} does not divide --rollout_ranks {num_rollout}: only these ranks have "
            "engines. Change one of the two."
        )
    rank, num_trainers = int(os.environ["RANK"]), world - num_rollout
    is_trainer = rank < num_trainers
    role = Role(
        name="trainer" if is_trainer else "rollout",
        rank=rank if is_trainer else rank - num_trainers,
        num_trainers=num_trainers,
        num_rollout=num_rollout,
    )
    os.environ["RANK"] = str(role.rank)
    os.environ["WORLD_SIZE"] = str(num_trainers if is_trainer else num_rollout)
    take_role(role.name)
    return role


def _described_world() -> int:
    """Returns the number of ranks that torchrun started; raises ValueError if there is no store for all of them."""
    if "RANK" not in os.environ:
        return 1
    check_environment()
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        raise ValueError(
            "--rollout_ranks needs torchrun, which keeps the store at which the ranks of both roles meet. Start the "
            "ranks with it, without TORCH_DISABLE_SHARE_RDZV_TCP_STORE."
        )
    return int(os.environ["WORLD_SIZE"])


def _describe_bad_count(num_rollout: int, world: int) -> str:
    if num_rollout < 1:
        return f"--rollout_ranks is {num_rollout}: it must be 0 (every rank trains and generates) or above."
    ranks = "1 rank" if world == 1 else f"{world} ranks"
    return (
        f"--rollout_ranks {num_rollout} of {ranks} leaves none to train. Start more ranks (torchrun --nproc_per_node "
        f"{num_rollout + 1} or more)" + (f", or give at most {world - 1}." if world > 1 else ".")
    )
