"""Tokens chosen over a whole update: by covariance, by entropy or at random; and the losses that treat them apart.

A loss marked `@loss(selects_tokens=fn)` gets the choice of `fn(tokens: UpdateTokens, **parameters) -> Tensor`, [N]
bool. The choice is made over all tokens of an update before it is split, because a choice per micro-batch would depend
on the split. `sum_over_ranks` and `gather_over_ranks` bring in other ranks; all ranks must call them equally often.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lightrl.algorithms.losses import (
    PolicyTokens,
    TokenLoss,
    clipped_terms,
    k3,
    require_bool_mask,
    require_same_shape,
    token_loss,
)
from lightrl.algorithms.ranges import NotNegative
from lightrl.algorithms.registry import loss


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateTokens:
    """This rank's response tokens of one update, sample after sample, scored by the policy before the update."""

    logprobs: Tensor  # [N] float32
    entropy: Tensor  # [N] float32
    advantages: Tensor  # [N] float32
    mask: Tensor  # [N] bool, True = trained
    sequence_ids: Tensor  # [N] int64, independent of the rank that holds the sample
    positions: Tensor  # [N] int64, in the response
    seed: int  # of the run and the step
    sum_over_ranks: Callable[[Tensor], Tensor]
    gather_over_ranks: Callable[[Tensor], Tensor]

    def covariances(self) -> Tensor:
        """The covariances of log probability and advantage, [N], about the means over all ranks."""
        sums = self.sum_over_ranks(covariance_sums(self.logprobs, self.advantages, self.mask))
        return covariances(self.logprobs, self.advantages, self.mask, sums)

    def top(self, values: Tensor, fraction: float) -> Tensor:
        """Selects the largest `fraction` of the values of all ranks' trained tokens, [N] bool; NaN is the smallest.

        Ties are broken by a draw that depends on the token's name alone, so the choice does not depend on the split.
        """
        values = torch.where(values.isnan(), -torch.inf, values)
        draws = token_uniforms(self.sequence_ids, self.positions, seed=self.seed)
        everywhere = self.gather_over_ranks(torch.stack([values.double(), draws], dim=1)[self.mask])
        return select_top(values, draws, self.mask, top_cut(everywhere, fraction))


def random_of_large_covariance(
    tokens: UpdateTokens, *, fraction: float = 2e-4, low: float = 1.0, high: float = 5.0
) -> Tensor:
    """Selects at random among the tokens whose covariance is in [low, high] (Clip-Cov, arXiv:2505.22617)."""
    _require_fraction(fraction)
    candidates = clip_cov_candidates(tokens.covariances(), tokens.mask, low=low, high=high)
    counts = tokens.sum_over_ranks(torch.stack([candidates.sum(), tokens.mask.sum()]))
    return select_clip_cov(
        candidates,
        token_uniforms(tokens.sequence_ids, tokens.positions, seed=tokens.seed),
        num_candidates=int(counts[0]),
        num_tokens=int(counts[1]),
        fraction=fraction,
    )


def largest_covariance(tokens: UpdateTokens, *, fraction: float = 2e-3) -> Tensor:
    """Selects the tokens with the largest covariances (KL-Cov, arXiv:2505.22617)."""
    return tokens.top(tokens.covariances(), fraction)


def covariance_sums(logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Returns the number of trained tokens and the sums of their log probabilities and advantages, [3] float64."""
    require_same_shape(logprobs=logprobs, advantages=advantages, mask=mask)
    require_bool_mask(mask)
    columns = [torch.where(mask, values.detach().double(), 0.0).sum() for values in (logprobs, advantages)]
    return torch.stack([mask.sum().double(), *columns])


def covariances(logprobs: Tensor, advantages: Tensor, mask: Tensor, sums: Tensor) -> Tensor:
    """Returns (log probability - its mean) (advantage - its mean) of each token; 0 for untrained tokens.

    Args:
        logprobs: Log probabilities of the tokens, [N].
        advantages: Advantages of the tokens, [N].
        mask: True = trained, [N].
        sums: The result of covariance_sums() for the whole batch, summed over ranks.
    """
    count = sums[0].clamp(min=1)
    logprob_mean, advantage_mean = (sums[1] / count).to(logprobs.dtype), (sums[2] / count).to(advantages.dtype)
    product = (logprobs.detach() - logprob_mean) * (advantages.detach() - advantage_mean)
    return torch.where(mask, product, 0.0)


def top_cut(ranked: Tensor, fraction: float) -> tuple[float, float]:
    """Returns the value and the draw of the last token among the largest `fraction`, which is at least one token.

    Args:
        ranked: The values and draws of all trained tokens of the batch, [M, 2] float64, the same on every rank.
        fraction: A fraction of the tokens, in (0, 1].
    """
    _require_fraction(fraction)
    if not len(ranked):
        return float("inf"), 0.0
    values, draws = ranked.unbind(1)
    count = max(1, int(fraction * len(values)))
    lowest = values.topk(count).values[-1]
    num_ties = count - int((values > lowest).sum())
    return float(lowest), float(draws[values == lowest].kthvalue(num_ties).values)


def select_top(values: Tensor, draws: Tensor, mask: Tensor, cut: tuple[float, float]) -> Tensor:
    """Selects the trained tokens above the cut, and those at its value with the lowest draws, [N] bool.

    Applied to covariances this is KL-Cov's choice (arXiv:2505.22617; fraction 0.002). Applied to entropies it selects
    the tokens where a response forks (arXiv:2506.01939; fraction 0.2), whose loss alone then counts.
    """
    value, draw = cut
    return ((values > value) | ((values == value) & (draws <= draw))) & mask


def clip_cov_candidates(covariance: Tensor, mask: Tensor, *, low: float = 1.0, high: float = 5.0) -> Tensor:
    """Selects the trained tokens whose covariance is in [low, high], [N] bool."""
    return (covariance >= low) & (covariance <= high) & mask


def select_clip_cov(
    candidates: Tensor, uniforms: Tensor, *, num_candidates: int, num_tokens: int, fraction: float = 2e-4
) -> Tensor:
    """Selects each candidate with the probability that makes `fraction` of all tokens the expected number, [N] bool.

    Args:
        candidates: The tokens to choose from, [N] bool.
        uniforms: The result of token_uniforms(), [N]. It depends on the tokens' names, so the split does not matter.
        num_candidates: Candidates of the whole batch, over all ranks.
        num_tokens: Trained tokens of the whole batch, over all ranks.
        fraction: The expected fraction of all tokens.
    """
    chance = fraction * num_tokens / max(1, num_candidates)
    return candidates & (uniforms < chance)


def token_uniforms(sequence_ids: Tensor, positions: Tensor, *, seed: int) -> Tensor:
    """Draws a number in [0, 1) for each token, [N] float64, from the sequence's id, the position and the seed alone.

    Args:
        sequence_ids: The id of each token's sequence, [N] int64, independent of rank and micro-batch.
        positions: The index of each token in its sequence, [N] int64.
        seed: Of the run and the step.
    """
    state = _mix(_mix(_mix(torch.full_like(positions, seed)) + sequence_ids) + positions)
    return _shifted(state, 11).double() / 2.0**53


def _require_fraction(fraction: float) -> None:
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction is {fraction}: it must be more than 0 and at most 1.")


def _mix(state: Tensor) -> Tensor:
    """Applies one step of splitmix64; int64 arithmetic wraps around as the algorithm wants it."""
    state = state - 0x61C8864680B583EB  # = + 0x9E3779B97F4A7C15 modulo 2^64
    state = (state ^ _shifted(state, 30)) * -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9
    state = (state ^ _shifted(state, 27)) * -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB
    return state ^ _shifted(state, 31)


def _shifted(state: Tensor, bits: int) -> Tensor:
    """Shifts right logically; torch's own shift would fill with the sign bit."""
    return (state >> bits) & ((1 << (64 - bits)) - 1)


# ---- Losses that treat the selected tokens apart ---------------------------------------------------------------------


@loss(selects_tokens=random_of_large_covariance)
def clip_cov(tokens: PolicyTokens, *, clip_low: float = 0.2, clip_high: float = 0.2) -> TokenLoss:
    """Computes ppo_clip with 0 for the selected tokens (Clip-Cov, arXiv:2505.22617).

    The paper's formula does not clip the ratio, but its code does. A few tokens are selected at random among those
    whose log probability and advantage have a large covariance.
    """
    selected, log_ratio = _selected(tokens, "clip_cov"), tokens.log_ratio
    terms, is_clipped = clipped_terms(log_ratio, tokens.masked_advantages, clip_low=clip_low, clip_high=clip_high)
    return token_loss(torch.where(selected, 0.0, terms), log_ratio, is_clipped | selected, tokens.mask)


@loss(selects_tokens=largest_covariance)
def kl_cov(tokens: PolicyTokens, *, kl_coef: NotNegative = 1.0) -> TokenLoss:
    """Computes -r A, plus kl_coef (r - 1 - log r) for the selected tokens (KL-Cov, arXiv:2505.22617).

    The tokens with the largest covariance between log probability and advantage are selected. The penalty is k3 for
    KL(old policy || policy).
    """
    selected, log_ratio = _selected(tokens, "kl_cov"), tokens.log_ratio
    penalty = torch.where(selected, k3(log_ratio), 0.0)
    terms = -torch.exp(log_ratio) * tokens.masked_advantages + kl_coef * penalty
    return token_loss(terms, log_ratio, selected, tokens.mask)


def _selected(tokens: PolicyTokens, name: str) -> Tensor:
    if tokens.selected is None:
        raise ValueError(f"{name} needs to know which tokens are selected: give PolicyTokens(selected=...), [N] bool.")
    return tokens.selected
