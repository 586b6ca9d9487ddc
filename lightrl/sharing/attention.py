"""Attention over the tree of a pack: a segment sees itself causally, and every segment above it in full.

The parts are computed separately and joined by their log-sum-exps, as flash-attention joins blocks of keys. The
backward gives each part the joined output and log-sum-exp, with which its gradients are those of the whole. If trees
are so small that calls cost more than their work, all of them are computed in one call with a mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightrl.models.packed_attention import (
    PackedLayout,
    Scoring,
    eager_attention,
    grouped_attention,
    runs_of,
    stack_sequences,
    visible,
)
from lightrl.sharing.tree import Branch, PrefixTree

# The kernels of scaled_dot_product_attention on a CPU, which return the log-sum-exp that the public function drops.
# They can go once it returns it: https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/native_functions.yaml
_flash: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_PAIRS_OF_A_CALL = 8192  # pairs of tokens that take about as long as a call for a few, forward and backward


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """The small trees of a pack, one per row, padded to the largest."""

    count: int
    width: int
    places: Tensor  # [count * width] int64 in [0, U): the token, or for padding the first of the row
    inverse: Tensor  # [U] int64 in [0, count * width)
    mask: Tensor  # [count, 1, width, width] float32: 0 where a query sees a key, else -inf

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Computes attention in one call: [1, heads, U, dim]. Padding has gradients of 0, as only padding sees it."""
        queries, keys, values = (
            stack_sequences(part.index_select(2, self.places), self.count, self.width) for part in (query, key, value)
        )
        output = grouped_attention(queries, keys, values, self.mask.to(query.dtype), scale)
        return _flat(output).index_select(2, self.inverse)


@dataclass(frozen=True, kw_only=True)
class TreeLayout(PackedLayout):
    """The segments of a tree; runs of equal length are those of the sorted segments."""

    branches: tuple[Branch, ...]
    grid: Grid | None  # None: trees too large for one
    copying: list[Scoring] = field(default_factory=list)  # kinds of attention that had to copy keys

    @cached_property
    def order(self) -> Tensor:
        """The tokens of the segments sorted by length, [U] int64."""
        lengths = np.diff(self.cu_seqlens)
        return torch.from_numpy(np.repeat(lengths, lengths).argsort(kind="stable"))

    @cached_property
    def inverse(self) -> Tensor:
        """The inverse of the order, [U] int64."""
        return self.order.argsort()

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """Computes attention along the paths of the tree: [1, U, heads, dim]."""
        is_plain = scoring.window is None and scoring.softcap is None and scoring.sinks is None
        if not is_plain or query.device.type != "cpu" or query.shape[-1] != value.shape[-1]:
            self.copying.append(scoring)
            return attend_by_paths(query, key, value, self, scoring)
        if torch.is_autocast_enabled("cpu"):
            query, key, value = (part.to(torch.get_autocast_dtype("cpu")) for part in (query, key, value))
        if self.grid is not None:
            return self.grid.attend(query, key, value, scoring.scale).transpose(1, 2).contiguous()
        output: Tensor = _TreeAttention.apply(query, key, value, self, scoring.scale)  # type: ignore[no-untyped-call]
        return output.transpose(1, 2).contiguous()  # as some models view it in another shape


def tree_layout(tree: PrefixTree) -> TreeLayout:
    """Returns the layout of a tree."""
    lengths = sorted(stop - start for start, stop in pairwise(tree.cu_seqlens))
    runs = tuple((len(list(same)), length) for length, same in groupby(lengths))
    is_on_cpu = tree.kept.device.type == "cpu"
    return TreeLayout(
        cu_seqlens=tree.cu_seqlens,
        runs=runs,
        boundaries=None,
        branches=tree.branches,
        grid=_grid(tree, _PAIRS_OF_A_CALL * (len(runs) + len(tree.branches))) if is_on_cpu else None,
    )


def _grid(tree: PrefixTree, most_pairs: int) -> Grid | None:
    """Returns the trees of a pack in rows; None if they have too many pairs of tokens."""
    ends = {branch.start: branch.end for branch in tree.branches}
    spans = [(start, ends.get(start, stop)) for start, stop in pairwise(tree.cu_seqlens)]
    rows: list[tuple[int, int]] = []
    for span in spans:
        rows += [span] if not rows or span[0] == rows[-1][1] else []
    count, width = len(rows), max(end - start for start, end in rows)
    if count * width**2 > most_pairs:
        return None
    starts, stops = np.asarray(rows).T[..., None]
    is_token = starts + np.arange(width) < stops
    places = np.where(is_token, starts + np.arange(width), starts)
    # A token is seen by later ones, up to the end of the subtree of its segment.
    seen_until = np.repeat([end for _, end in spans], np.diff(tree.cu_seqlens))
    query, key = places[:, :, None], places[:, None]
    sees = (key <= query) & (query < seen_until[key]) & is_token[:, :, None] & is_token[:, None]
    sees |= np.eye(width, dtype=np.bool_)  # padding sees only itself, so that it is not NaN and no token sees it
    return Grid(
        count=count,
        width=width,
        places=torch.from_numpy(places.ravel()),
        inverse=torch.from_numpy(np.flatnonzero(is_token)),
        mask=torch.from_numpy(np.where(sees, np.float32(0), np.float32("-inf"))[:, None]),
    )


class _TreeAttention(torch.autograd.Function):
    """Attention with CPU kernels; saves no more for the backward than one call for the computed tokens would."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, layout: TreeLayout, scale: float) -> Tensor:
        parts = [part.index_select(2, layout.order) for part in (query, key, value)]
        outputs, sums = zip(*(_flash(*run, 0.0, True, scale=scale) for run in runs_of(layout, *parts)), strict=True)
        output = torch.cat([_flat(run) for run in outputs], dim=2).index_select(2, layout.inverse)
        logsumexp = torch.cat([_flat(run[..., None]) for run in sums], dim=2).index_select(2, layout.inverse)
        for start, stop, end in layout.branches:
            seen, later = slice(start, stop), slice(stop, end)
            more, total = _flash(query[:, :, later], key[:, :, seen], value[:, :, seen], 0.0, False, scale=scale)
            _join(output[:, :, later], logsumexp[:, :, later], more, total[..., None])
        ctx.save_for_backward(query, key, value, output, logsumexp)
        ctx.layout, ctx.scale = layout, scale
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        layout: TreeLayout = ctx.layout
        parts = [grad, *ctx.saved_tensors]
        sorted_parts = [part.index_select(2, layout.order) for part in parts]
        of_runs = [_gradients(run, ctx.scale, is_causal=True) for run in runs_of(layout, *sorted_parts)]
        grads = [
            torch.cat([_flat(run) for run in same], dim=2).index_select(2, layout.inverse)
            for same in zip(*of_runs, strict=True)
        ]
        for start, stop, end in layout.branches:
            seen, later = slice(start, stop), slice(stop, end)
            places = (later, later, seen, seen, later, later)  # of grad, query, key, value, output, logsumexp
            run = [part[:, :, place] for part, place in zip(parts, places, strict=True)]
            added = _gradients(run, ctx.scale, is_causal=False)
            for total, more, place in zip(grads, added, (later, seen, seen), strict=True):
                total[:, :, place] += more
        return (*grads, None, None)


def _flat(run: Tensor) -> Tensor:
    """Turns [count, heads, length, dim] into [1, heads, count * length, dim]."""
    return run.transpose(0, 1).reshape(1, run.shape[1], -1, run.shape[3])


def _gradients(run: list[Tensor], scale: float, *, is_causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    grad, query, key, value, output, logsumexp = run
    grads: tuple[Tensor, Tensor, Tensor] = _flash_backward(
        grad, query, key, value, output, logsumexp[..., 0], 0.0, is_causal, scale=scale
    )
    return grads


def _join(output: Tensor, logsumexp: Tensor, more: Tensor, total: Tensor) -> None:
    """Merges the attention to other keys into output and logsumexp, in place."""
    joined = torch.logaddexp(logsumexp, total)
    output.mul_((logsumexp - joined).exp()).add_(more * (total - joined).exp())
    logsumexp.copy_(joined)


def attend_by_paths(query: Tensor, key: Tensor, value: Tensor, layout: TreeLayout, scoring: Scoring) -> Tensor:
    """Computes any kind of attention with one call for each run of sibling segments of equal length.

    The keys of a call, those of the segments above and of each segment itself, are copied.
    """
    outputs = []
    for (first, last, length), above in _siblings(layout):
        count = (last - first) // length
        own = [stack_sequences(part[:, :, first:last], count, length) for part in (query, key, value)]
        keys, values = (
            torch.cat([*(part[:, :, a:b].expand(count, -1, -1, -1) for a, b in above), mine], dim=2)
            for part, mine in zip((key, value), own[1:], strict=True)
        )
        output = _attend(own[0], keys, values, scoring)
        outputs.append(output.transpose(1, 2).reshape(1, last - first, query.shape[1], value.shape[-1]))
    return torch.cat(outputs, dim=1)


def _siblings(layout: TreeLayout) -> Iterator[tuple[tuple[int, int, int], list[tuple[int, int]]]]:
    """Yields (first, last, length) of segments of equal length with the same parents, and the parents' spans."""
    spans = list(pairwise(layout.cu_seqlens))
    parents = {
        start: [(branch.start, branch.stop) for branch in layout.branches if branch.stop <= start < branch.end]
        for start, _ in spans
    }
    for (length, above), same in groupby(spans, key=lambda span: (span[1] - span[0], tuple(parents[span[0]]))):
        segments = list(same)
        yield (segments[0][0], segments[-1][1], length), list(above)


def _attend(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
    if scoring.softcap is not None or scoring.sinks is not None:
        return eager_attention(query, key, value, scoring)
    mask = visible(query.shape[2], key.shape[2], scoring.window, query.device)
    return grouped_attention(query, key, value, mask, scoring.scale)
