"""Logits: every operation a loss uses equals that on full logits, value and gradient, and no chunk is large."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.testing import assert_close

from lightrl.models import lazy_logits
from lightrl.models.lazy_logits import Head, Logits, gather_logprobs, gather_logprobs_entropy

T, V, H = 7, 11, 5
LABELS = torch.tensor([3, 0, 10, 4, 4, 9, 1])
COLUMN = torch.linspace(0.5, 2.0, T)[:, None]


def _logprob(logits: Any) -> Any:
    return torch.log_softmax(logits, dim=-1).gather(dim=-1, index=LABELS.unsqueeze(-1)).squeeze(-1)


def _entropy(logits: Any) -> Any:
    logp = F.log_softmax(logits.float(), dim=-1)
    return -(logp.exp() * logp).sum(-1)


CHUNKED: dict[str, Callable[[Any], Any]] = {
    "log_softmax and gather": _logprob,
    "as a method, at a temperature": lambda x: (x / 0.7).log_softmax(-1).gather(1, LABELS[:, None])[:, 0],
    "a temperature for each row": lambda x: _logprob(x / COLUMN),
    "a tensor to the left": lambda x: _logprob(COLUMN * x) + (1.0 - x).logsumexp(1) + (COLUMN - x).sum(-1),
    "entropy": _entropy,
    "softmax": lambda x: (torch.softmax(x, -1) ** 2).sum(dim=-1),
    "cross_entropy": lambda x: F.cross_entropy(x, LABELS, reduction="none"),
    "cross_entropy, mean over labels that count": lambda x: F.cross_entropy(x, LABELS, ignore_index=4),
    "cross_entropy, sum": lambda x: F.cross_entropy(x, LABELS, reduction="sum", label_smoothing=0.1),
    "rows": lambda x: x[LABELS > 3].logsumexp(-1),
    "max": lambda x: x.max(dim=-1).values,
    "gather_logprobs": lambda x: gather_logprobs(x, LABELS, 0.7),
    "gather_logprobs after a change": lambda x: gather_logprobs(-x, LABELS),
    "gather_logprobs_entropy": lambda x: torch.cat(gather_logprobs_entropy(x, LABELS, 1.3)),
}
AT_ONCE: dict[str, Callable[[Any], Any]] = {
    "over tokens": lambda x: x.softmax(0).sum(1),
    "an index of columns": lambda x: x[:, 2],
    "weighted cross_entropy": lambda x: F.cross_entropy(x, LABELS, torch.arange(1.0, V + 1)),
    "a value for each column": lambda x: (x + torch.arange(float(V))).sum(-1),
    "second argument": lambda x: torch.where(COLUMN > 1, 0.0, x).sum(-1),
    "view": lambda x: x.view(-1)[:3],
    "the larger of two": lambda x: x.max(torch.zeros(T, V)).sum(-1) + torch.max(x, torch.ones(V)).sum(-1),
    "over everything": lambda x: (x.sum() + x.mean() + x.max()).reshape(1),
}


def _run(function: Callable[[Any], Any], *, lazy: bool, softcap: float | None = None) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    inputs = [torch.randn(*size, generator=draw, requires_grad=True) for size in ((T, H), (V, H), (V,))]
    hidden, weight, bias = inputs
    head = Head(weight=weight, bias=bias, softcap=softcap, scale=1.5)
    logits: Any = Logits(hidden=hidden, head=head) if lazy else head.logits(hidden, weight, bias)
    result = function(logits)
    factors = torch.arange(1.0, result.numel() + 1)
    (result.flatten() * factors).sum().backward()
    return [result.detach(), *[item.grad for item in inputs if item.grad is not None]]


@pytest.mark.parametrize("name", CHUNKED)
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_operations_over_rows_run_in_chunks(name: str, softcap: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lazy_logits, "_CPU_CHUNK", 2 * V)
    sizes: list[int] = []
    honest = Head.logits

    def noting(self: Head, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        sizes.append(len(hidden))
        return honest(self, hidden, weight, bias)

    wanted = _run(CHUNKED[name], lazy=False, softcap=softcap)
    monkeypatch.setattr(Head, "logits", noting)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = _run(CHUNKED[name], lazy=True, softcap=softcap)
    assert max(sizes, default=0) <= 2, sizes  # two of the seven rows
    for one, other in zip(found, wanted, strict=True):
        assert_close(one, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", AT_ONCE)
def test_other_operations_are_right_and_say_that_they_hold_all_logits(name: str) -> None:
    wanted = _run(AT_ONCE[name], lazy=False)
    with pytest.warns(UserWarning, match=r"computes all 7 x 11 of them at once. Use gather_logprobs"):
        found = _run(AT_ONCE[name], lazy=True)
    for one, other in zip(found, wanted, strict=True):
        assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_logits_look_like_a_tensor() -> None:
    head = Head(weight=torch.ones(V, H), bias=None, softcap=None, scale=1.0)
    logits = Logits(hidden=torch.ones(T, H, dtype=torch.bfloat16), head=head)
    assert logits.shape == (T, V) == logits.size()
    assert (logits.size(-1), logits.dim(), logits.ndim, len(logits), logits.dtype) == (V, 2, 2, T, torch.float32)
    assert logits.detach()[:2].shape == (2, V)
    with pytest.raises(AttributeError, match="no attribute 'log_sofmax'"):
        logits.log_sofmax(-1)
    empty = Logits(hidden=torch.ones(0, H), head=head)
    assert empty.logsumexp(-1).shape == (0,)
