"""One update has one loss and one gradient, however its sequences are packed, split into micro-batches and ranks.

Combined as `StrategyBase.train_batch` does: sum(loss x weight) / sum(weight) over all micro-batches of all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from packed_tokens import sequence_index_of
from torch import Tensor
from torch.testing import assert_close

from lightrl.algorithms.corrections import OffPolicyTokens, corrected
from lightrl.algorithms.kl import kl_terms
from lightrl.algorithms.losses import PolicyTokens, mean_loss
from lightrl.algorithms.registry import BUILTIN, load

LENGTHS = [3, 1, 7, 4, 2, 5]
FEATURES = 4
NARROW = {"reject": {"low": 0.9, "high": 1.1}}  # so that it rejects some of these sequences
# Each entry is a micro-batch of sequences in the order they are packed; None is a rank's dummy.
SPLITS: list[list[list[int] | None]] = [
    [[0], [1], [2], [3], [4], [5]],
    [[0, 1, 2], [3, 4, 5]],
    [[5, 3], [2], [4, 0, 1]],
    [[4, 2, 1, 5, 0], [3], None, None],
]


def sequence(index: int) -> dict[str, Tensor]:
    """Sequence 1 trains nothing, sequence 3 has a masked middle; what is masked is NaN."""
    generator = torch.Generator().manual_seed(index)
    length = LENGTHS[index]
    mask = torch.ones(length, dtype=torch.bool)
    if index == 1:
        mask[:] = False
    if index == 3:
        mask[1:3] = False
    old = -torch.rand(length, generator=generator, dtype=torch.float64) - 0.2
    fields = {
        "features": torch.randn(length, FEATURES, generator=generator, dtype=torch.float64),
        "base": old + 0.5 * torch.randn(length, generator=generator, dtype=torch.float64),
        "old": old,
        "sampler": old + 0.5 * torch.randn(length, generator=generator, dtype=torch.float64),
        "ref": old + 0.5 * torch.randn(length, generator=generator, dtype=torch.float64),
        "advantages": torch.randn(length, generator=generator, dtype=torch.float64),
        "selected": torch.rand(length, generator=generator) < 0.3,
        "mask": mask,
    }
    for name in ("old", "sampler", "ref", "advantages"):
        fields[name] = torch.where(mask, fields[name], torch.nan)
    return fields


DUMMY = {
    "features": torch.zeros(1, FEATURES, dtype=torch.float64),
    **{name: torch.zeros(1, dtype=torch.float64) for name in ("base", "old", "sampler", "ref", "advantages")},
    **{name: torch.zeros(1, dtype=torch.bool) for name in ("selected", "mask")},
}


def update(
    split: Sequence[list[int] | None], loss: str, aggregation: str, correction: str | None
) -> tuple[Tensor, Tensor]:
    """The loss and the gradient by the policy's parameters."""
    policy_loss = load("loss", loss)
    aggregate = load("aggregation", aggregation, {"length": 8} if aggregation.endswith("_norm") else None)
    theta = torch.full((FEATURES,), 0.1, dtype=torch.float64, requires_grad=True)
    parts = []
    for places in split:
        members = [DUMMY] if places is None else [sequence(place) for place in places]
        joined = {name: torch.cat([member[name] for member in members]) for name in DUMMY}
        logprobs = joined["base"] + joined["features"] @ theta
        owner = {
            "sequence_index": sequence_index_of([len(member["mask"]) for member in members]),
            "num_sequences": len(members),
            "mask": joined["mask"],
        }
        tokens = PolicyTokens(
            logprobs=logprobs,
            old_logprobs=joined["old"],
            advantages=joined["advantages"],
            selected=joined["selected"],
            **owner,  # type: ignore[arg-type]
        )
        result = policy_loss(tokens)
        if correction is not None:
            off_policy = OffPolicyTokens(logprobs=joined["old"], sampler_logprobs=joined["sampler"], **owner)  # type: ignore[arg-type]
            result = corrected(result, load("correction", correction, NARROW.get(correction))(off_policy).weights)
        kl = kl_terms(policy=logprobs, reference=joined["ref"], mask=joined["mask"], kind="k3")
        weights = aggregate(owner["mask"], owner["sequence_index"], len(members))  # type: ignore[arg-type]
        parts.append((mean_loss(result.terms + 0.1 * kl, weights), weights.total))
    total = sum(weight for _, weight in parts)
    whole = sum((part * (weight / total) for part, weight in parts), torch.zeros(()))
    whole.backward()
    assert theta.grad is not None
    return whole.detach(), theta.grad


@pytest.mark.parametrize("aggregation", BUILTIN["aggregation"])
@pytest.mark.parametrize("loss", BUILTIN["loss"])
def test_every_loss_under_every_aggregation(loss: str, aggregation: str) -> None:
    whole, gradient = update([[0, 1, 2, 3, 4, 5]], loss, aggregation, None)
    assert gradient.abs().min() > 0
    for split in SPLITS:
        found, found_gradient = update(split, loss, aggregation, None)
        assert_close(found, whole, atol=1e-6, rtol=0)
        assert_close(found_gradient, gradient, atol=1e-6, rtol=0)


@pytest.mark.parametrize("aggregation", BUILTIN["aggregation"])
@pytest.mark.parametrize("correction", BUILTIN["correction"])
def test_every_correction_under_every_aggregation(correction: str, aggregation: str) -> None:
    whole, gradient = update([[0, 1, 2, 3, 4, 5]], "ppo_clip", aggregation, correction)
    assert not torch.equal(whole, update([[0, 1, 2, 3, 4, 5]], "ppo_clip", aggregation, None)[0])
    for split in SPLITS:
        found, found_gradient = update(split, "ppo_clip", aggregation, correction)
        assert_close(found, whole, atol=1e-6, rtol=0)
        assert_close(found_gradient, gradient, atol=1e-6, rtol=0)
