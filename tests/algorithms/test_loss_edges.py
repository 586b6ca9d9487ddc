"""What every policy loss has in common, whatever it does away from the sampling policy."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from packed_tokens import gradient_of, tokens_at
from torch.testing import assert_close

from lightrl.algorithms.registry import BUILTIN, load, parameters_of

LOSSES = list(BUILTIN["loss"])


@pytest.mark.parametrize("name", LOSSES)
def test_on_policy_the_gradient_is_that_of_the_policy_gradient(name: str) -> None:
    # Sequences of one token at ratio 1: -A. Nothing is clipped yet.
    tokens = tokens_at([1.0, 1.0, 1.0], [2.0, -0.5, 0.0], lengths=[1, 1, 1], selected=[False] * 3)
    loss = load("loss", name)
    assert_close(gradient_of(loss, tokens), torch.tensor([-2.0, 0.5, 0.0], dtype=torch.float64), atol=1e-6, rtol=0)
    assert not loss(tokens).is_clipped.any()


@pytest.mark.parametrize("name", LOSSES)
def test_a_ratio_exactly_at_the_bound_is_not_clipped(name: str) -> None:
    # All bounds at 0, so that the ratio 1, which is exact, lies on them.
    known = parameters_of(load("loss", name).func)  # type: ignore[attr-defined]
    bounds = {key: 0.0 for key in known if key.startswith(("clip_", "limit_"))}
    tokens = tokens_at([1.0, 1.0], [2.0, -0.5], lengths=[1, 1], selected=[False] * 2)
    loss = load("loss", name, bounds)
    assert not loss(tokens).is_clipped.any()
    assert_close(gradient_of(loss, tokens), torch.tensor([-2.0, 0.5], dtype=torch.float64), atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", LOSSES)
def test_nothing_trained_is_zero_over_garbage(name: str) -> None:
    nan = math.nan
    tokens = tokens_at([nan, math.inf], [nan, math.inf], mask=[False, False], selected=[True, False])
    loss = load("loss", name)
    found = loss(tokens)
    nothing = torch.zeros(2, dtype=torch.float64)
    assert_close(found.terms, nothing, atol=0, rtol=0)
    assert_close(found.ratio, nothing, atol=0, rtol=0)
    assert not found.is_clipped.any()
    assert_close(gradient_of(loss, tokens), nothing, atol=0, rtol=0)


@pytest.mark.parametrize("name", LOSSES)
def test_no_token_at_all_still_runs_backward(name: str) -> None:
    tokens = tokens_at([], [], lengths=[], selected=[])
    assert gradient_of(load("loss", name), tokens).shape == (0,)


@pytest.mark.parametrize("name", LOSSES)
def test_a_ratio_beyond_any_number_stays_finite(name: str) -> None:
    tokens = tokens_at([1.0, 1.0], [1.0, -1.0], lengths=[1, 1], selected=[False, True])
    tokens = dataclasses.replace(tokens, old_logprobs=torch.full_like(tokens.logprobs, -1000.0))
    loss = load("loss", name)
    assert loss(tokens).terms.isfinite().all()
    assert gradient_of(loss, tokens).isfinite().all()


@pytest.mark.parametrize("entry", ["logprobs", "old_logprobs", "advantages"])
@pytest.mark.parametrize("name", LOSSES)
def test_what_is_not_finite_shows_in_the_loss(name: str, entry: str) -> None:
    """A clip would make a number of it again: the update would be made of nonsense, without a word."""
    tokens = tokens_at([1.1, 0.9], [1.0, -1.0], selected=[False, False])
    for place in (0, 1):
        for value in (math.nan, math.inf, -math.inf):
            values = getattr(tokens, entry).clone()
            values[place] = value
            terms = load("loss", name)(dataclasses.replace(tokens, **{entry: values})).terms
            is_read = name != "policy_gradient" or entry != "old_logprobs"
            is_left_out = name.startswith("dppo") and math.isinf(value)  # the probability moved from or to 0: too far
            assert (not math.isfinite(terms.sum())) == is_read or is_left_out, (place, value)


@pytest.mark.parametrize("name", LOSSES)
def test_only_the_policy_gets_a_gradient(name: str) -> None:
    tokens = tokens_at([1.1, 0.9], [1.0, -1.0], selected=[False, True])
    leaves = {key: getattr(tokens, key).clone().requires_grad_() for key in ("logprobs", "old_logprobs", "advantages")}
    found = load("loss", name)(dataclasses.replace(tokens, **leaves))
    found.terms.sum().backward()
    assert {key: leaf.grad is not None for key, leaf in leaves.items()} == {
        "logprobs": True,
        "old_logprobs": False,
        "advantages": False,
    }
    assert not found.ratio.requires_grad
