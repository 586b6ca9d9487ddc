"""Tiled log-probabilities and entropies against hand-worked values, the full log-softmax, and finite differences."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from lightrl.models import logprobs as module
from lightrl.models.logprobs import LogitTransform, chosen_logprobs, logprobs_of_logits


@pytest.fixture(params=[(1024, 4096), (3, 4)], ids=["one_tile", "many_tiles"])
def _tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles that hold everything, and tiles that divide neither rows nor vocabulary."""
    monkeypatch.setattr(module, "_CPU_TILE", request.param)


def full(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    logits = torch.nn.functional.linear(hidden, weight, bias) * logit_scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logprobs = (logits / temperature).log_softmax(-1)
    return logprobs.gather(1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


def inputs(num: int = 7, hidden_size: int = 5, vocab_size: int = 11) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    targets = torch.randint(vocab_size, (num,), generator=generator)
    return random(num, hidden_size), random(vocab_size, hidden_size), random(vocab_size), targets


def backpropagate(
    scores: tuple[Tensor, Tensor], from_logprobs: Tensor | None, from_entropy: Tensor | None, to: list[Tensor]
) -> tuple[Tensor, ...]:
    """The gradients that these gradients of log-probabilities and entropies give; None does not arrive at all."""
    outputs = [(s, g) for s, g in zip(scores, (from_logprobs, from_entropy), strict=True) if g is not None]
    return torch.autograd.grad([s for s, _ in outputs], to, [g for _, g in outputs], retain_graph=True)


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "softcap": {"softcap": 1.5, "temperature": 1.3, "logit_scale": 0.8},
    "scale": {"logit_scale": 2.5},
}


@pytest.mark.usefixtures("_tiles")
def test_values_by_hand() -> None:
    # Logits (0, log 3): p = (1/4, 3/4). Entropy = 1/4 log 4 + 3/4 log 4/3 = 2 log 2 - 3/4 log 3 = 0.5623351.
    weight = torch.tensor([[0.0], [math.log(3.0)]])
    logprobs, entropy = chosen_logprobs(torch.ones(2, 1), weight, torch.tensor([0, 1]))
    assert_close(logprobs, torch.tensor([-1.3862944, -0.2876821]), atol=1e-6, rtol=0)
    assert_close(entropy, torch.tensor([0.5623351, 0.5623351]), atol=1e-6, rtol=0)


@pytest.mark.usefixtures("_tiles")
def test_transforms_by_hand() -> None:
    # Times 2, capped at 4 (tanh 0.5 = 0.4621172: 4 x that = 1.8484686), over temperature 2: logits (0, 0.9242343).
    # e^0.9242343 = 2.5199382, so log p = -log 3.5199382 = -1.2584435, and 0.9242343 - 1.2584435 = -0.3342092.
    weight = torch.tensor([[0.0], [1.0]])
    options: dict[str, Any] = {"temperature": 2.0, "softcap": 4.0, "logit_scale": 2.0}
    logprobs, _ = chosen_logprobs(torch.ones(2, 1), weight, torch.tensor([0, 1]), LogitTransform(**options))
    assert_close(logprobs, torch.tensor([-1.2584435, -0.3342092]), atol=1e-6, rtol=0)


@pytest.mark.usefixtures("_tiles")
def test_gradients_by_hand() -> None:
    # p = (1/4, 3/4) again. d log p_0 / dz = (3/4, -3/4); the hidden state is 1, so that is the weight's gradient.
    weight = torch.tensor([[0.0], [math.log(3.0)]], requires_grad=True)
    logprobs, entropy = chosen_logprobs(torch.ones(1, 1), weight, torch.tensor([0]))
    (gradient,) = torch.autograd.grad(logprobs.sum(), weight, retain_graph=True)
    assert_close(gradient, torch.tensor([[0.75], [-0.75]]), atol=1e-6, rtol=0)
    # dH/dz = -p (log p + H): -1/4 (-1.3862944 + 0.5623351) = 0.2059898, and its negative for the other.
    (gradient,) = torch.autograd.grad(entropy.sum(), weight)
    assert_close(gradient, torch.tensor([[0.2059898], [-0.2059898]]), atol=1e-6, rtol=0)


@pytest.mark.usefixtures("_tiles")
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_equals_full_log_softmax(variant: str, with_bias: bool) -> None:
    hidden, weight, bias, targets = inputs()
    options, given = VARIANTS[variant], bias if with_bias else None
    wanted = [hidden, weight, bias] if with_bias else [hidden, weight]
    expected = full(hidden, weight, targets, bias=given, **options)
    actual = chosen_logprobs(hidden, weight, targets, LogitTransform(**options), bias=given)
    assert_close(actual, expected, atol=1e-12, rtol=0)
    mixture = torch.linspace(-1, 2, len(targets), dtype=torch.float64)
    for from_logprobs, from_entropy in ((mixture, None), (None, mixture), (mixture, -mixture)):
        expected_gradients = backpropagate(expected, from_logprobs, from_entropy, wanted)
        actual_gradients = backpropagate(actual, from_logprobs, from_entropy, wanted)
        assert_close(actual_gradients, expected_gradients, atol=1e-12, rtol=0)


@pytest.mark.usefixtures("_tiles")
@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_gradcheck(variant: str) -> None:
    hidden, weight, bias, targets = inputs(num=4, hidden_size=3, vocab_size=9)

    def run(hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return chosen_logprobs(hidden, weight, targets, LogitTransform(**VARIANTS[variant]), bias=bias)

    assert torch.autograd.gradcheck(run, (hidden, weight, bias))


@pytest.mark.usefixtures("_tiles")
@pytest.mark.parametrize("excluding", [-math.inf, torch.finfo(torch.float64).min])
@pytest.mark.parametrize("variant", ["plain", "temperature"])
def test_tokens_excluded_by_their_bias(variant: str, excluding: float) -> None:
    """Scores and gradients are those of a vocabulary without them; the first tile of four has no other token."""
    hidden, weight, bias, targets = inputs()
    is_kept = torch.tensor([False] * 4 + [True] * 5 + [False] + [True])
    targets = torch.tensor([4, 8, 10, 5, 6, 7, 10])
    with torch.no_grad():
        bias[~is_kept] = excluding
    to = [hidden, weight, bias]
    place = is_kept.cumsum(0) - 1  # of a kept token among the kept
    found = chosen_logprobs(hidden, weight, targets, LogitTransform(**VARIANTS[variant]), bias=bias)
    wanted = full(hidden, weight[is_kept], place[targets], bias=bias[is_kept], **VARIANTS[variant])
    assert_close(found, wanted, atol=1e-9, rtol=0)
    slopes = torch.linspace(-1, 2, 7, dtype=torch.float64), torch.linspace(1, 3, 7, dtype=torch.float64)
    for given in (slopes, (slopes[0], None), (None, slopes[1])):
        assert_close(backpropagate(found, *given, to), backpropagate(wanted, *given, to), atol=1e-9, rtol=0)


@pytest.mark.usefixtures("_tiles")
def test_an_excluded_token_that_was_chosen_is_minus_infinity() -> None:
    hidden, weight, bias, _ = inputs(num=2)
    with torch.no_grad():
        bias[3] = -math.inf
    logprobs, entropy = chosen_logprobs(hidden, weight, torch.tensor([3, 4]), bias=bias)
    assert logprobs.isneginf().tolist() == [True, False]
    assert entropy.isfinite().all()
    for grad in torch.autograd.grad(logprobs.sum() + entropy.sum(), (hidden, weight, bias)):
        assert grad.isfinite().all()


@pytest.mark.usefixtures("_tiles")
def test_a_capped_logit_excludes_no_token() -> None:
    # Logits -inf and 0 capped at 2 are -2 and 0: ln(e^-2 / (1 + e^-2)) = -2.126928.
    bias = torch.tensor([-math.inf, 0.0])
    logprobs, _ = chosen_logprobs(
        torch.zeros(1, 1), torch.zeros(2, 1), torch.tensor([0]), LogitTransform(softcap=2.0), bias=bias
    )
    assert_close(logprobs, torch.tensor([-2.126928]), atol=1e-6, rtol=0)


@pytest.mark.parametrize("sums", [(256, 1, 1), (257, 257, 257)])
def test_gradients_of_bfloat16_are_added_up_in_float32(sums: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16, 256 + 1 is 256, and 257 does not exist. Two tokens are equally likely: d logprob / d bias = 1/2."""
    monkeypatch.setattr("lightrl.models.logprobs._CPU_TILE", (2, 2))
    hidden, weight = torch.ones(6, 1, dtype=torch.bfloat16), torch.zeros(2, 1, dtype=torch.bfloat16).requires_grad_()
    bias = torch.zeros(2, dtype=torch.bfloat16).requires_grad_()
    logprobs, _ = chosen_logprobs(hidden, weight, torch.zeros(6, dtype=torch.int64), bias=bias)
    of_rows = [2.0 * part for total in sums for part in (total - 1, 1)]  # two rows of a tile
    logprobs.backward(torch.tensor(of_rows))
    wanted = torch.tensor([sum(sums), -sum(sums)]).bfloat16()
    assert_close(bias.grad, wanted, atol=0, rtol=0)
    if sums[0] == 256:  # the product of a tile is rounded itself
        assert_close(weight.grad, wanted[:, None], atol=0, rtol=0)


@pytest.mark.usefixtures("_tiles")
def test_large_logits_do_not_overflow() -> None:
    # Logits (1000, 0, ..., 0) and (-1000, ...): the softmax is one-hot, the entropy 0.
    weight = torch.zeros(9, 1)
    weight[0] = 1000.0
    logprobs, entropy = chosen_logprobs(torch.tensor([[1.0], [1.0]]), weight, torch.tensor([0, 5]))
    assert_close(logprobs, torch.tensor([0.0, -1000.0]), atol=1e-6, rtol=0)
    assert_close(entropy, torch.zeros(2), atol=1e-6, rtol=0)


@pytest.mark.usefixtures("_tiles")
def test_bfloat16_inputs_give_float32_scores() -> None:
    hidden, weight, _, targets = (part.detach() for part in inputs())
    low = [part.bfloat16().requires_grad_() for part in (hidden, weight)]
    logprobs, entropy = chosen_logprobs(low[0], low[1], targets)
    assert logprobs.dtype == entropy.dtype == torch.float32
    exact = [part.detach().float().requires_grad_() for part in low]
    expected = full(exact[0], exact[1], targets)
    assert_close(logprobs, expected[0], atol=0.05, rtol=0)
    assert_close(entropy, expected[1], atol=0.05, rtol=0)
    gradients = torch.autograd.grad(logprobs.sum(), low)
    expected_gradients = torch.autograd.grad(expected[0].sum(), exact)
    for actual, wanted in zip(gradients, expected_gradients, strict=True):
        assert actual.dtype == torch.bfloat16
        assert_close(actual.float(), wanted, atol=0.05, rtol=0)


@pytest.mark.usefixtures("_tiles")
def test_no_rows() -> None:
    hidden, weight, bias, targets = inputs()
    logprobs, entropy = chosen_logprobs(hidden[:0], weight, targets[:0], bias=bias)
    assert logprobs.shape == entropy.shape == (0,)
    (logprobs.sum() + entropy.sum()).backward()
    for part in (hidden, weight, bias):
        assert part.grad is not None
        assert not part.grad.any()


def test_no_gradient_where_none_is_wanted() -> None:
    hidden, weight, bias, targets = inputs()
    hidden = hidden.detach().requires_grad_()
    logprobs, _ = chosen_logprobs(hidden, weight.detach(), targets, bias=bias.detach())
    logprobs.sum().backward()
    assert hidden.grad is not None
    with torch.no_grad():
        assert not chosen_logprobs(hidden, weight, targets)[0].requires_grad


def test_without_entropy() -> None:
    hidden, weight, _, targets = inputs()
    logprobs, entropy = chosen_logprobs(hidden, weight, targets, LogitTransform(with_entropy=False))
    assert entropy.isnan().all()
    assert not entropy.requires_grad
    expected, _ = full(hidden, weight, targets)
    assert_close(torch.autograd.grad(logprobs.sum(), hidden), torch.autograd.grad(expected.sum(), hidden))


def test_autocast_decides_the_precision_of_the_products() -> None:
    hidden, weight, _, targets = inputs()
    hidden, weight = hidden.detach().float(), weight.detach().float().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under_autocast, _ = chosen_logprobs(hidden, weight, targets)
    in_bfloat16, _ = chosen_logprobs(hidden.bfloat16(), weight.bfloat16(), targets)
    assert_close(under_autocast, in_bfloat16, atol=0, rtol=0)
    under_autocast.sum().backward()
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32


def test_bad_options_are_errors() -> None:
    with pytest.raises(ValueError, match="temperature is 0: log-probabilities need one above 0"):
        LogitTransform(temperature=0)
    with pytest.raises(ValueError, match="softcap is -1"):
        LogitTransform(softcap=-1)


@pytest.mark.usefixtures("_tiles")
def test_a_first_tile_without_a_token_to_draw_is_no_nan() -> None:
    # Of the weights 1 and 3 behind it the target has 3/4: ln 0.75 = -0.287682.
    logits = torch.tensor([[-math.inf] * 4 + [0.0, math.log(3.0)]])
    assert_close(logprobs_of_logits(logits, torch.tensor([5])), torch.tensor([-0.287682]), atol=1e-6, rtol=0)
