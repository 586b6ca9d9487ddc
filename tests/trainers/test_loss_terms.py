"""The metrics of the loss's optional terms; tests/trainers/test_objective.py has what the terms add to the loss."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from lightrl.config import AlgorithmConfig
from lightrl.data.packing import dummy_batch
from lightrl.metrics import Statistics
from lightrl.records import PackedBatch, TokenScores
from lightrl.trainers.objective import PolicyLoss


def batch_of(ratios: list[float], mask: list[bool]) -> PackedBatch:
    """One sequence of tokens with an advantage of -1 and these ratios of the trainer to the engine."""
    count = len(ratios)
    return dataclasses.replace(
        dummy_batch(temperature=1.0),
        loss_mask=torch.tensor(mask),
        advantages=-torch.ones(count),
        sampler_logprobs=torch.full((count,), -1.0),
        old_logprobs=-1 + torch.tensor(ratios).log(),
        sequence_index=torch.zeros(count, dtype=torch.int64),
    )


def test_metrics_of_terms_are_means_over_the_trained_tokens_of_all_micro_batches() -> None:
    objective = PolicyLoss(AlgorithmConfig(correction="tis", off_policy_mask=0.4))
    statistics = Statistics()
    # The mean of log(sampler / policy) over the trained tokens is 0.5 and 0.3, of which 0.4 leaves the second.
    for ratios, mask, logprob in (([4.0, 1.0, 9.0], [True, True, False], -1.5), ([0.5, 9.0], [True, False], -1.3)):
        logprobs = torch.where(torch.tensor(mask), logprob, -9.0)
        scores = TokenScores(logprobs=logprobs, entropy=torch.zeros_like(logprobs))
        objective.loss(scores, batch_of(ratios, mask), statistics)
    found = statistics.reduce(SimpleNamespace(all_gather_object=lambda item: [item]))
    assert found["off_policy_masked"] == pytest.approx(2 / 3)
    # Ratios 4, 1 and 0.5, of which tis holds the first at 2.
    assert found["correction/ratio"] == pytest.approx(5.5 / 3, abs=1e-6)
    assert found["correction/outside"] == pytest.approx(1 / 3)
    assert found["correction/ratio_max"] == pytest.approx(4.0, abs=1e-5)
