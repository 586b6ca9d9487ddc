"""An estimator of the user's that returns something else in a run than in its trial on two samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from made_samples import made_sample

from lightrl.algorithms.advantages import ScoredSamples
from lightrl.algorithms.registry import AdvantageTraits, advantage, parameters_of, traits_of
from lightrl.comm import Comm
from lightrl.config import AlgorithmConfig
from lightrl.records import Experience
from lightrl.trainers.objective import PolicyObjective

RETURNED: list[Any] = []  # by the next call with three samples


@advantage(min_group="draws", whiten=False)
def own(samples: ScoredSamples, *, draws: int = 2) -> Any:
    if len(samples.rewards) != 3:
        return samples.rewards
    return RETURNED[-1]() if callable(RETURNED[-1]) else RETURNED[-1]


def objective() -> PolicyObjective:
    return PolicyObjective(AlgorithmConfig(advantage=f"{__name__}:own", advantage_args=("draws=3",)), group_size=3)


def advantages_of(returned: Any) -> list[float]:
    RETURNED[:] = [returned]
    sample = made_sample(response_ids=(5,), sampler_logprobs=(-1.0,))
    scored = [Experience(sample=sample, reward=float(index), advantage=0.0) for index in range(3)]
    return [item.advantage for item in objective().advantages(scored, Comm())]


def test_traits_and_parameters_are_those_of_the_function() -> None:
    estimate = objective()._estimate
    assert traits_of(estimate, AdvantageTraits).min_group == "draws"
    assert parameters_of(estimate)["draws"] == 3


def test_a_number_for_each_sample_is_taken_in_any_type() -> None:
    assert advantages_of(torch.tensor([1, 0, 2])) == [1.0, 0.0, 2.0]
    assert advantages_of(torch.tensor([True, False, True])) == [1.0, 0.0, 1.0]
    assert advantages_of(torch.ones(3).half().requires_grad_()) == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        (None, "returned None for 3 samples"),
        ([1.0, 2.0, 3.0], "returned a list for 3 samples"),
        (torch.ones(2), r"returned a tensor of shape \[2\] and type float32 for 3 samples"),
        (torch.ones(3, 1), r"returned a tensor of shape \[3, 1\]"),
        (torch.ones(()), r"returned a tensor of shape \[\]"),
        (torch.ones(3, dtype=torch.complex64), r"returned a tensor of shape \[3\] and type complex64"),
    ],
)
def test_a_wrong_result_is_named(returned: Any, text: str) -> None:
    with pytest.raises(TypeError, match=rf"--algorithm.advantage {__name__}:own {text}.*must return a tensor of shape"):
        advantages_of(returned)


def test_settings_of_torch_that_it_leaves_changed_are_named() -> None:
    try:
        with pytest.raises(RuntimeError, match=rf"--algorithm.advantage {__name__}:own has changed settings of torch"):
            advantages_of(lambda: torch.set_grad_enabled(False) and torch.ones(3))
    finally:
        torch.set_grad_enabled(True)
