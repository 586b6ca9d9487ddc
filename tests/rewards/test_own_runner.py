"""What a reward of the user's leaves behind; tests/programs/forked_program.py has its children."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from reward_samples import answered

from lightrl.records import Sample
from lightrl.rewards import batch_reward, group_reward
from lightrl.rewards.own_runner import OwnRunner, left_in_order
from lightrl.rewards.reward_set import load_reward, make_runner
from lightrl.rewards.scoring import FailureBudget, RewardRunner


def without_gradients(_: Any) -> Any:
    torch.set_grad_enabled(False)
    return 1.0


async def later_without_gradients(sample: Sample) -> float:
    return float(without_gradients(sample))


@pytest.mark.parametrize(
    "reward",
    [
        without_gradients,
        later_without_gradients,
        group_reward(lambda samples: [without_gradients(item) for item in samples]),
        batch_reward(lambda samples: [without_gradients(item) for item in samples]),
    ],
)
def test_a_reward_that_leaves_torch_changed_is_refused(reward: Callable[..., Any]) -> None:
    runner = make_runner(reward, name="mine")
    try:
        with pytest.raises(RuntimeError, match=r"The reward 'mine' has changed settings of torch.*is_grad_enabled\(\)"):
            runner.run([answered("1"), answered("2")], FailureBudget())
    finally:
        torch.set_grad_enabled(True)
        runner.close()


def test_a_built_in_reward_is_trusted() -> None:
    assert type(make_runner(load_reward("exact_match"))) is RewardRunner
    assert type(make_runner(lambda sample: 1.0)) is OwnRunner


def test_a_child_ends_where_the_body_does() -> None:
    child = 0
    process = os.getpid()
    with left_in_order("mine"):
        child = os.fork()
    assert os.getpid() == process
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
