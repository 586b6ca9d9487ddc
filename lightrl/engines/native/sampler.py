"""Draws one token per row by inverting the cumulative distribution, and returns the token's logprob.

The uniform numbers are an argument, so the draw itself has no state. torch.multinomial would take ten times as long
with a vocabulary of 32,000, and its generator's state depends on what else was drawn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SAMPLING = np.dtype([("temperature", np.float32), ("top_p", np.float32), ("top_k", np.int64)])  # of a row
_UNCHANGED = np.array((1, 1, 0), SAMPLING)  # settings that draw from the model's own distribution
_BLOCK = 256  # the search finds the block, then the token: only one block per row is accumulated
_PART = 1 << 18  # logits that a CPU processes at a time, to stay in a core's second cache
_LEAST_ROWS = 4  # rows of a part: with fewer, more operations cost more than the cache saves


class Filters(NamedTuple):
    """The rows with a top-k or a top-p."""

    rows: Tensor  # [m] int64
    top_k: Tensor  # [m, 1] int64, the vocabulary's size where off
    top_p: Tensor  # [m, 1] float32


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingPlan:
    """How each of n rows is sampled; a field is None if no row needs it, so that the common case skips the work."""

    temperature: Tensor | None  # [n, 1] float32, 1 where greedy
    is_greedy: Tensor | None  # [n] bool
    all_greedy: bool
    filters: Filters | None


PLAIN = SamplingPlan(temperature=None, is_greedy=None, all_greedy=False, filters=None)


def plan_sampling(asked: NDArray[np.void], vocab_size: int, device: torch.device) -> SamplingPlan:
    """Makes the plan for rows that ask for these settings, [n] of SAMPLING."""
    return PLAIN if (asked == _UNCHANGED).all() else _plan_rows(asked, vocab_size, device)


def _plan_rows(asked: NDArray[np.void], vocab_size: int, device: torch.device) -> SamplingPlan:
    temperature, top_p, top_k = asked["temperature"], asked["top_p"], asked["top_k"]
    greedy = temperature == 0
    scale = np.where(greedy, np.float32(1), temperature)
    (filtered,) = np.nonzero(~greedy & ((top_p < 1) | (top_k > 0)))
    kept = np.where(top_k > 0, top_k, vocab_size)[filtered, None]

    def put(array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(device)

    return SamplingPlan(
        temperature=put(scale[:, None]) if (scale != 1).any() else None,
        is_greedy=put(greedy) if greedy.any() else None,
        all_greedy=bool(greedy.all()),
        filters=Filters(put(filtered), put(kept), put(top_p[filtered, None])) if filtered.size else None,
    )


def sample(logits: Tensor, uniforms: Tensor, plan: SamplingPlan) -> tuple[Tensor, Tensor]:
    """Returns tokens [n] int64 and logprobs [n] float32, from logits [n, vocab] and uniforms [n] float64 in [0, 1).

    The logprob is that of the distribution from which the token was drawn: after temperature, top-k and top-p; for a
    greedy row, that of the temperature-1 distribution.
    """
    if plan is not PLAIN:
        return _sample_rows(logits.float(), uniforms, plan)
    rows = max(_LEAST_ROWS, _PART // logits.shape[1])
    if len(logits) <= rows or logits.device.type != "cpu":
        return _sample_plainly(logits, uniforms)
    parts = [_sample_plainly(*part) for part in zip(logits.split(rows), uniforms.split(rows), strict=True)]
    return torch.cat([tokens for tokens, _ in parts]), torch.cat([logprobs for _, logprobs in parts])


def _sample_plainly(logits: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    probabilities = logits.softmax(-1, dtype=torch.float32)
    tokens = _invert(probabilities, uniforms)
    return tokens, probabilities.gather(1, tokens[:, None]).squeeze(1).log_()


def _sample_rows(scores: Tensor, uniforms: Tensor, plan: SamplingPlan) -> tuple[Tensor, Tensor]:
    """Samples rows, some of which have their own settings."""
    if plan.temperature is not None:
        scores = scores / plan.temperature
    if plan.filters is not None:
        scores = keep_allowed(scores, plan.filters)
    probabilities = scores.softmax(-1)
    if plan.all_greedy:
        tokens = scores.argmax(-1)
    else:
        tokens = _invert(probabilities, uniforms)
        if plan.is_greedy is not None:
            tokens = torch.where(plan.is_greedy, scores.argmax(-1), tokens)
    return tokens, probabilities.gather(1, tokens[:, None]).squeeze(1).log_()


def keep_allowed(scores: Tensor, filters: Filters) -> Tensor:
    """Returns the scores [n, vocab] with -inf for tokens that the filters exclude."""
    rows, top_k, top_p = filters
    return scores.index_copy(0, rows, keep_top(scores[rows], top_k, top_p))


def keep_top(scores: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Returns the scores [m, vocab] with -inf outside the top k and, of these, outside the nucleus of mass p."""
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(scores.shape[1], device=scores.device)
    ordered = ordered.masked_fill(rank >= top_k, float("-inf"))
    probabilities = ordered.softmax(-1, dtype=torch.float64)
    # A token stays if the mass before it is below p, and the first one always: a p below 1e-45 is 0 in float32.
    mass_before = _running_sums(probabilities) - probabilities
    ordered = ordered.masked_fill((mass_before >= top_p) & (rank > 0), float("-inf"))
    return torch.empty_like(scores).scatter_(1, order, ordered)


def _invert(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Returns the first token whose cumulative weight exceeds uniform * total, never a token of weight 0.

    A uniform is at most 1 - 2^-53, so its product with the total rounds to less than the total.
    """
    if weights.shape[1] > 4 * _BLOCK:
        return _invert_by_blocks(weights, uniforms)
    cumulative = _running_sums(weights)
    return _first_above(cumulative, uniforms[:, None] * cumulative[:, -1:]).squeeze(1)


def _invert_by_blocks(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Inverts the distribution of a large vocabulary block by block."""
    cumulative = _running_sums(_block_sums(weights))
    target = uniforms[:, None] * cumulative[:, -1:]
    block = _first_above(cumulative, target)
    before = cumulative.gather(1, (block - 1).clamp_min_(0)) * (block > 0)
    first = block * _BLOCK
    tokens = first + torch.arange(_BLOCK, device=weights.device)
    past_end = tokens >= weights.shape[1]
    inside = weights.gather(1, tokens.clamp_max_(weights.shape[1] - 1)).masked_fill_(past_end, 0)
    inside_cumulative = _running_sums(inside)
    # A block's sum and the last of its cumulative weights may round differently. Past the last positive weight there is
    # only rounding, so the target is kept below the latter.
    total = inside_cumulative[:, -1:]
    target = torch.minimum(target - before, torch.nextafter(total, torch.zeros_like(total)))
    return (first + _first_above(inside_cumulative, target)).squeeze(1)


def _running_sums(weights: Tensor) -> Tensor:
    """Returns the cumulative weights of each row in float64, from weights that sum to at most 1."""
    if weights.is_cuda and torch.are_deterministic_algorithms_enabled():
        return exact_running_sums(weights)  # torch refuses a cumsum of floats there
    return weights.cumsum(-1, dtype=torch.float64)


def exact_running_sums(weights: Tensor) -> Tensor:
    """Returns the cumulative weights as sums of integers, multiples of 2^-62, exact in any order."""
    return (weights.double() * 2.0**62).long().cumsum(-1).double() / 2.0**62


def _block_sums(weights: Tensor) -> Tensor:
    """Returns sums of blocks of the last dimension, [n, blocks]."""
    rows, vocab = weights.shape
    whole = vocab // _BLOCK * _BLOCK
    sums = weights[:, :whole].view(rows, -1, _BLOCK).sum(-1)
    if whole == vocab:
        return sums
    return torch.cat((sums, weights[:, whole:].sum(-1, keepdim=True)), dim=1)


def _first_above(cumulative: Tensor, target: Tensor) -> Tensor:
    """Returns the first index whose cumulative weight exceeds the target, [n, 1]; inside the row even for NaN."""
    return torch.searchsorted(cumulative, target.contiguous(), right=True).clamp_max_(cumulative.shape[1] - 1)
