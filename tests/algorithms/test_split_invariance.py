"""One update has one loss and one gradient, however its sequences are packed, split into micro-batches and ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from lightrl.algorithms.corrections import OffPolicyTokens, corrected
from lightrl.algorithms.kl import kl_terms
from lightrl.algorithms.registry import BUILTIN, load
from lightrl.testing.loss_check import SPLITS, WHOLE, MadeTokens, Split, loss_and_gradient

NARROW = {"reject": {"low": 0.9, "high": 1.1}}  # so that it rejects some of these sequences


def update(split: Split, loss: str, aggregation: str, correction: str | None) -> tuple[Tensor, Tensor]:
    """The loss with a KL, and the gradient by the policy's parameters."""
    policy_loss = load("loss", loss)
    aggregate = load("aggregation", aggregation, {"length": 8} if aggregation.endswith("_norm") else None)

    def terms(made: MadeTokens) -> Tensor:
        tokens = made.policy
        result = policy_loss(tokens)
        if correction is not None:
            off_policy = OffPolicyTokens(
                logprobs=tokens.old_logprobs,
                sampler_logprobs=made.sampler_logprobs,
                mask=tokens.mask,
                sequence_index=tokens.sequence_index,
                num_sequences=tokens.num_sequences,
            )
            result = corrected(result, load("correction", correction, NARROW.get(correction))(off_policy).weights)
        kl = kl_terms(policy=tokens.logprobs, reference=made.ref_logprobs, mask=tokens.mask, kind="k3")
        return result.terms + 0.1 * kl

    return loss_and_gradient(split, terms, aggregate)


@pytest.mark.parametrize("aggregation", BUILTIN["aggregation"])
@pytest.mark.parametrize("loss", BUILTIN["loss"])
def test_every_loss_under_every_aggregation(loss: str, aggregation: str) -> None:
    whole, gradient = update(WHOLE, loss, aggregation, None)
    assert gradient.abs().min() > 0
    for split in SPLITS:
        found, found_gradient = update(split, loss, aggregation, None)
        assert_close(found, whole, atol=1e-6, rtol=0)
        assert_close(found_gradient, gradient, atol=1e-6, rtol=0)


@pytest.mark.parametrize("aggregation", BUILTIN["aggregation"])
@pytest.mark.parametrize("correction", BUILTIN["correction"])
def test_every_correction_under_every_aggregation(correction: str, aggregation: str) -> None:
    whole, gradient = update(WHOLE, "ppo_clip", aggregation, correction)
    assert not torch.equal(whole, update(WHOLE, "ppo_clip", aggregation, None)[0])
    for split in SPLITS:
        found, found_gradient = update(split, "ppo_clip", aggregation, correction)
        assert_close(found, whole, atol=1e-6, rtol=0)
        assert_close(found_gradient, gradient, atol=1e-6, rtol=0)
