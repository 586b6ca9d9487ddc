"""Attention along the paths of a tree is that of whole sequences, in outputs and gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from lightrl.models.packed_attention import Scoring, packed_layout
from lightrl.sharing.attention import TreeLayout, attend_by_paths, tree_layout
from lightrl.sharing.tree import PrefixTree, prefix_tree

# A system prompt of all, two prompts, responses of equal and of other lengths, two of them the same, one alone.
SEQUENCES = [
    [*range(40), *range(100, 120), 1],
    [*range(40), *range(100, 120), 2],
    [*range(40), *range(100, 120), 3, 4, 5],
    [*range(40), *range(100, 120), 3, 4, 5],
    [*range(40), *range(200, 221), 6, 7],
    [*range(40), *range(200, 221), 8, 9],
    [300, 301, 302],
]
SCORINGS = {
    "plain": Scoring(scale=0.3, window=None, softcap=None, sinks=None),
    "window": Scoring(scale=0.3, window=7, softcap=None, sinks=None),
    "softcap": Scoring(scale=0.3, window=9, softcap=2.0, sinks=None),
    "sinks": Scoring(scale=0.3, window=None, softcap=None, sinks=torch.linspace(-1, 1, 4, dtype=torch.float64)),
}


def pack() -> tuple[tuple[int, ...], PrefixTree]:
    bounds = tuple(np.cumsum([0, *(len(ids) for ids in SEQUENCES)]).tolist())
    return bounds, prefix_tree(np.concatenate(SEQUENCES), bounds)


def results(scoring: Scoring, dtype: torch.dtype, *, by_paths: bool = False) -> list[list[torch.Tensor]]:
    """Returns the outputs of all tokens and the gradients of the computed ones, whole and by the tree."""
    bounds, tree = pack()
    draw = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, heads, len(tree.kept), 8, generator=draw, dtype=torch.float64).to(dtype).requires_grad_()
        for heads in (4, 2, 2)
    )
    weight = torch.randn(1, bounds[-1], 4, 8, generator=draw, dtype=torch.float64).to(dtype)
    found = []
    for layout in (packed_layout(bounds, torch.device("cpu")), tree_layout(tree)):
        parts = [query, key, value]
        if isinstance(layout, TreeLayout):
            some = attend_by_paths(*parts, layout, scoring) if by_paths else layout.attend(*parts, scoring)
            output = some.index_select(1, tree.source)
        else:
            output = layout.attend(*(part.index_select(2, tree.source) for part in parts), scoring)
        found.append([output, *torch.autograd.grad((output * weight).sum(), parts)])
    return found


@pytest.mark.parametrize("by_paths", [False, True])
@pytest.mark.parametrize("name", sorted(SCORINGS))
def test_every_kind_of_attention_is_that_of_whole_sequences(name: str, by_paths: bool) -> None:
    whole, shared = results(SCORINGS[name], torch.float64, by_paths=by_paths)
    for one, other in zip(whole, shared, strict=True):
        assert_close(other, one, atol=1e-12, rtol=0)


def test_in_float32_it_differs_by_rounding_alone() -> None:
    whole, shared = results(SCORINGS["plain"], torch.float32)
    for one, other in zip(whole, shared, strict=True):
        assert_close(other, one, atol=2e-6 * one.abs().max().item(), rtol=0)


def test_autocast_computes_in_bfloat16() -> None:
    tree = pack()[1]
    parts = [torch.randn(1, 2, len(tree.kept), 8, requires_grad=True) for _ in range(3)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = tree_layout(tree).attend(*parts, SCORINGS["plain"])
    assert output.dtype == torch.bfloat16
    output.float().sum().backward()
    assert_close(output.float(), tree_layout(tree).attend(*parts, SCORINGS["plain"]), atol=3e-2, rtol=0)
