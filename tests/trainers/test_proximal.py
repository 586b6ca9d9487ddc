"""Decoupled PPO: the clip compares with a proximal policy, the correction with the one that sampled."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from made_samples import made_sample
from torch import Tensor
from torch.testing import assert_close

from lightrl.config import AlgorithmConfig, GRPOConfig, WorkflowConfig
from lightrl.metrics import Statistics
from lightrl.records import Experience, PackedBatch, TokenScores
from lightrl.trainers.objective import PolicyLoss
from lightrl.trainers.policy_step import Batch
from lightrl.trainers.proximal import with_other_policy


def packed(advantages: list[float], sampler: Tensor, **columns: Tensor) -> PackedBatch:
    count = len(advantages)
    return PackedBatch(
        input_ids=torch.zeros(count + 1).long(),
        position_ids=torch.arange(count + 1),
        cu_seqlens=(0, count + 1),
        score_index=torch.arange(count),
        targets=torch.zeros(count).long(),
        sequence_index=torch.zeros(count).long(),
        loss_mask=torch.ones(count).bool(),
        advantages=torch.tensor(advantages),
        sampler_logprobs=sampler,
        keys=((0, 0),),
        **columns,
    )


def loss_and_slope(config: AlgorithmConfig, logprobs: Tensor, batch: PackedBatch) -> tuple[Tensor, Tensor]:
    logprobs = logprobs.clone().requires_grad_()
    scores = TokenScores(logprobs=logprobs, entropy=torch.zeros_like(logprobs))
    loss = PolicyLoss(config).loss(scores, batch, Statistics())
    return loss.detach(), torch.autograd.grad(loss, logprobs)[0]


def older(versions: tuple[int, ...]) -> Batch:
    sample = made_sample(response_ids=(5,) * len(versions), sampler_logprobs=(-1.0,) * len(versions), versions=versions)
    batch = Batch([[Experience(sample=sample, reward=0.0, advantage=1.0)]], {}, {})
    return batch.with_columns(old_logprobs={(0, 0): [-2.0] * len(versions)})


def test_interpolation_by_hand() -> None:
    """The tokens are of version 0, the step's weights of 1, and the update makes 2: half of the way.

    Sampled at -1 and now at -1.5, the proximal logprob is -1.25, so that ratio and weight are both e^-0.25 = 0.7788008,
    below the clip's 0.8. Advantage 2 is not clipped there: -2 x 0.7788008^2 = -1.2130613. Advantage -1 is:
    0.8 x 0.7788008 = 0.6230406, without a slope. The mean is -0.2950104, the slope of the first -1.2130613 / 2.
    """
    batch = packed([2.0, -1.0], torch.tensor([-1.0, -1.0]), proximal_share=torch.tensor([0.5, 0.5]))
    loss, slope = loss_and_slope(AlgorithmConfig(proximal="interpolate"), torch.tensor([-1.5, -1.5]), batch)
    assert float(loss) == pytest.approx(-0.2950104, abs=1e-6)
    assert_close(slope, torch.tensor([-0.6065307, 0.0]), atol=1e-6, rtol=0)


def test_the_share_grows_with_the_age() -> None:
    """At step 3: (3 - v) / (4 - v) for tokens of 0, 1 and 2, and none of it for the step's own weights."""
    found = with_other_policy(older((0, 1, 2, 3)), AlgorithmConfig(proximal="interpolate"), 3, {(0, 0)})
    assert found.columns["proximal_share"][0, 0] == pytest.approx([3 / 4, 2 / 3, 1 / 2, 0.0], abs=1e-6)


def test_recomputed_weighs_every_token_by_the_proximal_policy_over_the_sampler() -> None:
    """ratio e^0.1 = 1.1051709, weight e^0.5 = 1.6487213, advantage 1: -1.8221188; the slope is the same."""
    batch = packed([1.0], torch.tensor([-1.5]), old_logprobs=torch.tensor([-1.0]))
    loss, slope = loss_and_slope(AlgorithmConfig(proximal="recompute"), torch.tensor([-0.9]), batch)
    assert float(loss) == pytest.approx(-1.8221188, abs=1e-6)
    assert float(slope[0]) == pytest.approx(-1.8221188, abs=1e-6)


@pytest.mark.parametrize("proximal", ["recompute", "interpolate"])
def test_it_is_ppo_where_the_proximal_policy_is_the_one_that_sampled(proximal: Any) -> None:
    torch.manual_seed(0)
    sampler = -2 * torch.rand(50)
    logprobs, advantages = sampler + 0.3 * torch.randn(50), torch.randn(50).tolist()
    batch = packed(advantages, sampler, old_logprobs=sampler, proximal_share=torch.zeros(50))
    found = loss_and_slope(AlgorithmConfig(proximal=proximal), logprobs, batch)
    assert_close(found, loss_and_slope(AlgorithmConfig(), logprobs, batch), atol=1e-7, rtol=0)


def test_without_decoupling_older_samples_are_compared_with_the_sampler() -> None:
    batch = older((0, 1))
    assert with_other_policy(batch, AlgorithmConfig(), 1, {(0, 0)}).columns["old_logprobs"][0, 0] == (-1.0, -1.0)
    assert with_other_policy(batch, AlgorithmConfig(), 1, set()).columns == batch.columns
    decoupled = AlgorithmConfig(proximal="recompute")
    assert with_other_policy(batch, decoupled, 1, {(0, 0)}).columns == batch.columns
    sampler = AlgorithmConfig(proximal="sampler")
    assert with_other_policy(batch, sampler, 1, set()).columns["old_logprobs"][0, 0] == (-1.0, -1.0)


def test_what_contradicts_is_told() -> None:
    with pytest.raises(ValueError, match="--algorithm.proximal recompute compares with another policy"):
        GRPOConfig(algorithm=AlgorithmConfig(proximal="recompute", old_logprobs="engine"))
    with pytest.raises(ValueError, match="--algorithm.proximal sampler puts into the ratio already"):
        PolicyLoss(AlgorithmConfig(proximal="sampler", correction="tis"))


def test_auto_is_recompute_where_samples_can_be_older() -> None:
    assert GRPOConfig().algorithm.proximal == "auto"
    older = WorkflowConfig(max_staleness=1)
    config = GRPOConfig(rollout=older)
    assert (config.algorithm.proximal, config.algorithm.used_correction) == ("recompute", "tis")
    assert GRPOConfig(rollout=older, algorithm=AlgorithmConfig(proximal="sampler")).algorithm.ratio_to == "engine"
    assert dataclasses.replace(config).algorithm == config.algorithm


def test_the_truncated_weight_is_the_default() -> None:
    """e^2 is cut to 2."""
    batch = packed([1.0], torch.tensor([-3.0]), old_logprobs=torch.tensor([-1.0]))
    loss, _ = loss_and_slope(AlgorithmConfig(proximal="recompute"), torch.tensor([-1.0]), batch)
    assert float(loss) == pytest.approx(-2.0, abs=1e-6)
    assert math.exp(2) > 2
