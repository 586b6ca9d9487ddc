"""Attention in blocks equals attention at once, and never builds a matrix of all pairs of tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from lightrl.models import packed_attention
from lightrl.models.attention_blocks import in_turn, in_windows
from lightrl.models.packed_attention import Scoring, _attend_by_runs, _sdpa_of_window, eager_attention, packed_layout

CPU = torch.device("cpu")
PLAIN = Scoring(scale=0.3, window=None, softcap=None, sinks=None)


def parts(length: int, num_sequences: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(num_sequences, heads, length, 8) for heads in (4, 2, 2)]
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def outcome(attend: Any, given: list[Tensor], scoring: Scoring) -> list[Tensor]:
    """Returns the output and the gradients."""
    leaves = [part.detach().clone().requires_grad_() for part in given]
    output = attend(*leaves, scoring)
    weights = torch.linspace(-1, 1, output.numel()).view(output.shape)
    return [output, *torch.autograd.grad((output * weights).sum(), leaves)]


def test_a_token_of_a_window_sees_the_mean_of_its_values() -> None:
    query, key = torch.zeros(1, 1, 300, 8), torch.zeros(1, 1, 300, 8)
    value = torch.arange(300.0).view(1, 1, 300, 1).expand(1, 1, 300, 8)
    output = in_windows(_sdpa_of_window, query, key, value, replace(PLAIN, window=3))[0, 0, :, 0]
    # Token 0 sees 0, token 1 the mean of 0 and 1, and token t the mean of t - 2, t - 1 and t.
    assert_close(output[:3], torch.tensor([0.0, 0.5, 1.0]), atol=1e-6, rtol=0)
    assert_close(output[2:], torch.arange(1.0, 299.0), atol=1e-4, rtol=0)


@pytest.mark.parametrize("window", [3, 128, 150])
@pytest.mark.parametrize("length", [257, 384, 701])
def test_windows_in_blocks_equal_one_mask(length: int, window: int) -> None:
    given, scoring = parts(length), replace(PLAIN, window=window)
    for found, wanted in zip(
        outcome(_in_windows, given, scoring), outcome(_sdpa_of_window, given, scoring), strict=True
    ):
        assert_close(found, wanted, atol=2e-6, rtol=1e-5)


def _in_windows(*inputs: Any) -> Tensor:
    return in_windows(_sdpa_of_window, *inputs)


@pytest.mark.parametrize("window", [None, 5, 700])
def test_scores_in_turn_equal_all_at_once(window: int | None) -> None:
    scoring = replace(PLAIN, window=window, softcap=2.0, sinks=torch.tensor([0.5, -1.0, 0.0, 2.0]))
    given = parts(1300, num_sequences=1)

    def attend(*inputs: Any) -> Tensor:
        return in_turn(eager_attention, *inputs)

    for found, wanted in zip(outcome(attend, given, scoring), outcome(eager_attention, given, scoring), strict=True):
        assert_close(found, wanted, atol=2e-6, rtol=1e-5)
    with torch.no_grad():
        assert_close(attend(*given, scoring), eager_attention(*given, scoring), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_no_mask_of_a_long_sequence_is_square(softcap: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    visible = packed_attention.visible

    def watched(num_queries: int, num_keys: int, *rest: Any) -> Tensor:
        sizes.append(num_queries * num_keys)
        return visible(num_queries, num_keys, *rest)

    monkeypatch.setattr(packed_attention, "visible", watched)
    query, key, value = (part.detach().transpose(0, 1).flatten(1, 2)[None] for part in parts(1500))
    scoring = replace(PLAIN, window=100, softcap=softcap)
    output = _attend_by_runs(query, key, value, packed_layout((0, 1500, 3000), CPU), scoring)
    assert output.shape == (1, 3000, 4, 8)
    assert sizes
    assert max(sizes) <= 512 * 1024 < 1500 * 1500
