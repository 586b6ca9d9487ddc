"""Log-probabilities under the part of the vocabulary that top-p and top-k left."""

from __future__ import annotations

import math

import pytest
import torch
from torch.testing import assert_close

from lightrl.models import logprobs as module
from lightrl.models.allowed_tokens import AllowedTokens
from lightrl.models.logprobs import LogitSteps, LogitTransform, chosen_logprobs


def test_a_row_is_normalised_over_its_allowed_tokens() -> None:
    # Probabilities 0.1 0.2 0.3 0.4. Of tokens 2 and 3 alone: 3/7 and 4/7. ln(3/7) = -0.847298, entropy
    # 3/7 * 0.847298 + 4/7 * 0.559616 = 0.682908. The second row may draw any token: ln 0.3 = -1.203973.
    weight = torch.tensor([1.0, 2.0, 3.0, 4.0]).log()[:, None]
    allowed = AllowedTokens(torch.tensor([[0, 2], [0, 3]], dtype=torch.int32), 2)
    logprobs, entropy = chosen_logprobs(torch.ones(2, 1), weight, torch.tensor([2, 2]), LogitTransform(support=allowed))
    assert_close(logprobs, torch.tensor([-0.847298, -1.203973]), atol=1e-6, rtol=0)
    assert_close(entropy[0], torch.tensor(0.682908), atol=1e-6, rtol=0)


def test_a_token_that_was_the_only_one_has_probability_one_and_no_gradient() -> None:
    hidden = torch.ones(1, 1, requires_grad=True)
    weight = torch.tensor([1.0, 2.0, 3.0]).log()[:, None]
    allowed = AllowedTokens(torch.tensor([[0, 1]]), 1)
    logprobs, entropy = chosen_logprobs(hidden, weight, torch.tensor([1]), LogitTransform(support=allowed))
    (logprobs.sum() + entropy.sum()).backward()
    assert (logprobs.item(), entropy.item(), hidden.grad.item()) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("in_steps", [False, True])
@pytest.mark.parametrize("tile", [(1024, 4096), (3, 4)])
def test_values_and_gradients_are_those_of_a_masked_softmax(
    tile: tuple[int, int], in_steps: bool, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CPU_TILE", tile)
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in ((7, 5), (11, 5), (11,))
    )
    is_allowed = torch.rand(7, 11, generator=generator) < 0.4
    is_allowed[:, 0] = False  # so that with tiles of 4 some hold no allowed token of a row at first
    is_allowed[2, :8] = False
    is_allowed[:, 9] = True
    targets = torch.full((7,), 9)
    pairs = is_allowed[:6].nonzero()  # the last row may draw any
    is_allowed[6] = True
    kind = LogitSteps if in_steps else LogitTransform
    transform = kind(temperature=0.7, softcap=softcap, support=AllowedTokens(pairs, 7))
    ours = chosen_logprobs(hidden, weight, targets, transform, bias=bias)
    logits = torch.nn.functional.linear(hidden, weight, bias)
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    theirs = (logits / 0.7).masked_fill(~is_allowed, -math.inf).log_softmax(-1)
    held = theirs.masked_fill(~is_allowed, 0.0)
    expected = (theirs[torch.arange(7), targets], -(held.exp() * held * is_allowed).sum(-1))
    for mine, other in zip(ours, expected, strict=True):
        assert_close(mine, other, atol=1e-12, rtol=0)
    rates = torch.arange(1.0, 8.0, dtype=torch.float64)
    gradients = [
        torch.autograd.grad((values[0] * rates).sum() - (values[1] * rates).sum(), (hidden, weight, bias))
        for values in (ours, expected)
    ]
    for mine, other in zip(*gradients, strict=True):
        assert_close(mine, other, atol=1e-12, rtol=0)
