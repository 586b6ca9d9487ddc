"""Attention along the paths of a tree is that of whole sequences, in outputs and gradients."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from lightrl.models.packed_attention import Scoring, packed_layout
from lightrl.sharing.attention import TreeLayout, attend_by_paths, tree_layout
from lightrl.sharing.tree import Branch, PrefixTree, prefix_tree

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


def results(scoring: Scoring, dtype: torch.dtype, *, way: str = "grid") -> list[list[torch.Tensor]]:
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
            assert layout.grid is not None
            layout = layout if way == "grid" else replace(layout, grid=None)
            some = attend_by_paths(*parts, layout, scoring) if way == "paths" else layout.attend(*parts, scoring)
            assert some.is_contiguous(), "models such as AFMoE view it in another shape"
            output = some.index_select(1, tree.source)
        else:
            output = layout.attend(*(part.index_select(2, tree.source) for part in parts), scoring)
        found.append([output, *torch.autograd.grad((output * weight).sum(), parts)])
    return found


@pytest.mark.parametrize("way", ["grid", "branches", "paths"])
@pytest.mark.parametrize("name", sorted(SCORINGS))
def test_every_kind_of_attention_is_that_of_whole_sequences(name: str, way: str) -> None:
    whole, shared = results(SCORINGS[name], torch.float64, way=way)
    for one, other in zip(whole, shared, strict=True):
        assert_close(other, one, atol=1e-12, rtol=0)


@pytest.mark.parametrize("way", ["grid", "branches"])
def test_in_float32_it_differs_by_rounding_alone(way: str) -> None:
    whole, shared = results(SCORINGS["plain"], torch.float32, way=way)
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


def test_a_row_of_the_grid_is_a_tree_and_padding_is_apart() -> None:
    """Tokens 0 0 | 1, 2 and 3 4: the first three are a tree of a beginning and two ends, the last two another."""
    tree = PrefixTree(
        kept=torch.arange(6),
        source=torch.arange(6),
        cu_seqlens=(0, 2, 3, 4, 6),
        branches=(Branch(0, 2, 4),),
        last=(2, 3, 5),
    )
    grid = tree_layout(tree).grid
    assert grid is not None
    assert (grid.count, grid.width) == (2, 4)
    assert grid.places.tolist() == [0, 1, 2, 3, 4, 5, 4, 4]
    assert grid.inverse.tolist() == [0, 1, 2, 3, 4, 5]
    sees = (grid.mask[:, 0] == 0).int().tolist()
    assert sees[0] == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 0, 1]]  # the ends do not see each other
    assert sees[1] == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]


def test_a_tree_that_would_compute_much_for_nothing_has_no_grid() -> None:
    """100 ends of 20 tokens: a row of 2,020 is 4 million pairs, and two runs and a branch are 3 calls."""
    ends = [np.array([*range(20), *range(20 * end, 20 * end + 20)]) for end in range(1, 101)]
    tree = prefix_tree(np.concatenate(ends), tuple(range(0, 4001, 40)))
    assert tree is not None
    assert tree_layout(tree).grid is None
