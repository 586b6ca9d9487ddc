"""Scores on ranks of which the last forks children that come back; prints DONE once the ranks agree without them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from datetime import timedelta

import torch
from reward_samples import answered

from lightrl.comm import Comm, connect
from lightrl.process_group import _leave
from lightrl.records import Sample
from lightrl.rewards import batch_reward
from lightrl.rewards.reward_set import RewardSet
from lightrl.rollout.collector import Scorer
from lightrl.trainers.lifetime import end_failed

SAMPLES = [answered("a" * length, position=length) for length in range(4)]


def leave(way: str) -> None:
    if way == "exit":
        sys.exit(0)
    if way == "error":
        raise ValueError("of the child")


def run_child(act: Callable[[], object]) -> bool:
    """Returns True in a child that has done it; in the parent False, once the child has ended with code 1."""
    child = os.fork()
    if child == 0:
        act()
        return True
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    return False


def check_reward(comm: Comm, way: str) -> None:
    def forks(sample: Sample) -> float:
        is_child = comm.rank == 1 and run_child(lambda: leave(way))
        return -1.0 if is_child else float(len(sample.text))

    def forks_once(samples: list[Sample]) -> list[float]:
        return [forks(samples[0]), *(float(len(sample.text)) for sample in samples[1:])]

    async def forks_later(sample: Sample) -> float:
        return forks(sample)

    for reward in (forks, forks_later, batch_reward(forks_once)):
        rewards = Scorer(comm, RewardSet.of(reward)).score(SAMPLES)
        assert comm.all_gather_object(rewards) == [[0.0, 1.0, 2.0, 3.0]] * 2


def fail_in_a_phase(comm: Comm) -> None:
    with comm.phase("of a user's own"):
        raise ValueError("of the child")


def main() -> None:
    comm = connect(torch.device("cpu"), timedelta(minutes=5))
    for way in ("return", "exit", "error"):
        check_reward(comm, way)
    acts: list[Callable[[], object]] = [
        comm.barrier,
        lambda: comm.span("learn"),
        lambda: fail_in_a_phase(comm),
        lambda: end_failed(KeyboardInterrupt(), None),
        lambda: _leave(comm.process),  # at the exit of a user's own program
    ]
    for act in acts:
        assert comm.rank == 0 or not run_child(act)
        assert comm.all_reduce(1) == 1
    comm.close()
    print(f"rank {comm.rank} DONE")


if __name__ == "__main__":
    main()
