"""The loss itself, on records written by hand."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from torch.testing import assert_close

from lightrl.config import AlgorithmConfig
from lightrl.data.packing import dummy_batch
from lightrl.metrics import Statistics
from lightrl.records import PackedBatch, TokenScores
from lightrl.trainers.grpo import GRPOTrainer


def loss_of(batch: PackedBatch, logprobs: torch.Tensor, **algorithm: object) -> tuple[torch.Tensor, Statistics]:
    trainer = SimpleNamespace(
        config=SimpleNamespace(algorithm=AlgorithmConfig(**algorithm)),  # type: ignore[arg-type]
        statistics=Statistics(),
    )
    scores = TokenScores(logprobs=logprobs, entropy=torch.zeros_like(logprobs))
    return GRPOTrainer.loss(trainer, scores, batch), trainer.statistics  # type: ignore[arg-type]


def batch_of(advantages: list[float], mask: list[bool], **values: torch.Tensor) -> PackedBatch:
    count = len(advantages)
    return dataclasses.replace(
        dummy_batch(temperature=1.0),
        loss_mask=torch.tensor(mask),
        advantages=torch.tensor(advantages),
        sampler_logprobs=torch.zeros(count),
        **{"old_logprobs": None, "ref_logprobs": None, **values},  # type: ignore[arg-type]
    )


def test_one_update_is_the_plain_policy_gradient() -> None:
    logprobs = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    loss, _ = loss_of(batch_of([2.0, -1.0, 9.0], [True, True, False]), logprobs)
    loss.backward()
    # ratio 1: -(2 - 1) / 2; its gradient by the logprobs: -advantage / 2
    assert_close(loss.detach(), torch.tensor(-0.5), atol=1e-6, rtol=0)
    assert_close(logprobs.grad, torch.tensor([-1.0, 0.5, 0.0]), atol=1e-6, rtol=0)


def test_the_kl_penalty_adds_its_mean() -> None:
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    batch = batch_of([0.0, 0.0], [True, True], ref_logprobs=torch.tensor([-1.5, -2.0]))
    loss, statistics = loss_of(batch, logprobs, kl_coef=0.1, kl_estimator="k2")
    # 0.5 x 0.5^2 = 0.125 and 0; the mean 0.0625, times 0.1
    assert_close(loss.detach(), torch.tensor(0.00625), atol=1e-6, rtol=0)
    assert statistics.reduce(SimpleNamespace(all_gather_object=lambda item: [item]))["kl"] == 0.0625


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_a_batch_that_trains_nothing_gives_a_gradient_of_zero(kind: str) -> None:
    """Also where its one token is so unlikely that exp(reference - policy) overflows."""
    logprobs = torch.tensor([-200.0], requires_grad=True)
    loss, _ = loss_of(dummy_batch(temperature=1.0), logprobs, kl_coef=0.1, kl_estimator=kind)
    loss.backward()
    assert loss == 0
    assert_close(logprobs.grad, torch.zeros(1), atol=0, rtol=0)
