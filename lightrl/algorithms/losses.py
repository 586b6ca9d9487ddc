"""Policy losses (one term per token), and the aggregations that turn the terms into a micro-batch's loss.

A policy loss is `fn(tokens: PolicyTokens, **parameters) -> TokenLoss`. Parameters are keyword-only and have defaults.
Formulas write r = policy / old policy, A for the advantage and sg for "no gradient". A correction may weight the terms
further (corrections.py), and kl.add_kl adds the KL to a reference.

An aggregation is `fn(mask, sequence_index, num_sequences, **parameters) -> TokenWeights`. It decides which mean is
taken; the denominator is global in all of them. With `weights` per token and `total` per micro-batch, the loss of an
update is sum(weights * terms) / sum(total), both sums over all micro-batches and ranks. So a micro-batch's loss is
`mean_loss(terms, weights)`, its weight in train_batch is `total`, and the gradient does not depend on the micro-batch
size, the packing or the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightrl.algorithms.ranges import NotNegative, Positive

# ---- What a loss reads and returns -----------------------------------------------------------------------------------

MAX_LOG_RATIO = 20.0
"""Largest log ratio of a token or a sequence: ratios beyond e^20 = 4.9e8 are too large to train on, so they are held
there, without a gradient."""

MAX_K3_LOG_RATIO = 30.0
"""Largest log ratio in k3, which grows with the ratio itself: beyond e^30 = 1.1e13 it is held, without a gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTokens:
    """The tokens of one micro-batch; entries where the mask is False are never read and may be NaN."""

    logprobs: Tensor  # [N] of the policy being trained: the only entry that gets a gradient
    old_logprobs: Tensor  # [N] of the policy that the ratio is taken to
    advantages: Tensor  # [N]
    mask: Tensor  # [N] bool, True = trained
    sequence_index: Tensor  # [N] int64 in [0, num_sequences): the sequence of each token
    num_sequences: int
    selected: Tensor | None = None  # [N] bool, for losses that select tokens (see selection.py)

    def __post_init__(self) -> None:
        require_same_shape(
            logprobs=self.logprobs, old_logprobs=self.old_logprobs, advantages=self.advantages, mask=self.mask
        )
        require_sequence_index(self.sequence_index, self.mask, self.num_sequences)
        if self.selected is not None:
            require_same_shape(selected=self.selected, mask=self.mask)
            require_bool_mask(self.selected, name="selected")

    @property
    def log_ratio(self) -> Tensor:
        """The log of policy / old policy, [N], at most MAX_LOG_RATIO; 0 for untrained tokens."""
        return masked_log_ratio(self.logprobs, self.old_logprobs, self.mask)

    @property
    def full_log_ratio(self) -> Tensor:
        """The log of policy / old policy, [N], without a limit; 0 for untrained tokens."""
        return masked_difference(self.logprobs, self.old_logprobs, self.mask)

    @property
    def masked_advantages(self) -> Tensor:
        """The advantages, [N], detached; 0 for untrained tokens."""
        return torch.where(self.mask, self.advantages.detach(), 0.0)

    def per_sequence(self, values: Tensor) -> Tensor:
        """Returns for each token, [N], the mean of the values over the trained tokens of its sequence."""
        return sequence_means(values, self.mask, self.sequence_index, self.num_sequences)[self.sequence_index]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """One loss term per token, to be weighted and summed by an aggregation; only `terms` carries a gradient."""

    terms: Tensor  # [N] 0 where nothing is trained
    ratio: Tensor  # [N] before any clip, 0 where nothing is trained
    is_clipped: Tensor  # [N] bool, the tokens that the loss's own rule clipped or left out
    metrics: Mapping[str, Tensor] = field(default_factory=dict)  # [N] each; their means are logged


def masked_log_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Returns log(new / old), at most MAX_LOG_RATIO; 0 where the mask is False."""
    return masked_difference(logprobs, old_logprobs, mask).clamp(max=MAX_LOG_RATIO)


def masked_difference(logprobs: Tensor, others: Tensor, mask: Tensor) -> Tensor:
    """Returns logprobs - others, or 0 where the mask is False; `others` gets no gradient.

    The mask is applied before any exp or product, since 0 * NaN in a backward is NaN.
    """
    return nan_unless_finite(torch.where(mask, logprobs - others.detach(), 0.0))


def nan_unless_finite(values: Tensor) -> Tensor:
    """Replaces infinities by NaN: a clip would make them finite and so hide them from the loss."""
    return values + 0 * values.detach()


def k3(log_ratio: Tensor) -> Tensor:
    """Returns r - 1 - log r, never negative: the k3 estimate of KL(p || q) for samples of p, with r = q / p.

    The log is held at MAX_K3_LOG_RATIO, without a gradient.
    """
    held = log_ratio.clamp(max=MAX_K3_LOG_RATIO)
    # expm1, since exp(x) - 1 in float32 keeps no correct digit of x^2 / 2 for |x| below 3e-4.
    return torch.expm1(held) - held


def token_loss(terms: Tensor, log_ratio: Tensor, is_clipped: Tensor, mask: Tensor, **metrics: Tensor) -> TokenLoss:
    """Builds a TokenLoss and sets untrained tokens to 0; the mean of each metric, [N], is logged as loss/NAME."""
    if any(values.shape != mask.shape for values in (terms, is_clipped, *metrics.values())):
        raise _not_one_per_token(mask, terms=terms, is_clipped=is_clipped, **metrics)
    ratio = torch.where(mask, torch.exp(log_ratio.detach()), 0.0)
    logged = {f"loss/{name}": torch.where(mask, values.detach(), 0.0) for name, values in metrics.items()}
    return TokenLoss(terms=torch.where(mask, terms, 0.0), ratio=ratio, is_clipped=is_clipped & mask, metrics=logged)


def _not_one_per_token(mask: Tensor, **given: Tensor) -> ValueError:
    shapes = " and ".join(f"{name} of shape {[*values.shape]}" for name, values in given.items())
    return ValueError(
        f"token_loss() got {shapes} for {len(mask)} tokens. Give one entry for each token; lightrl takes the means, "
        "of the terms by --algorithm.aggregation and of a metric over the trained tokens."
    )


def sequence_sums(values: Tensor, sequence_index: Tensor, num_sequences: int) -> Tensor:
    """Adds up the values, [N], of each sequence: [num_sequences]."""
    return values.new_zeros(num_sequences).index_add(0, sequence_index, values)


def sequence_means(values: Tensor, mask: Tensor, sequence_index: Tensor, num_sequences: int) -> Tensor:
    """Averages each sequence's values where the mask is True, [num_sequences]; 0 for a sequence without any."""
    total = sequence_sums(torch.where(mask, values, 0.0), sequence_index, num_sequences)
    return total / sequence_sums(mask.to(total.dtype), sequence_index, num_sequences).clamp(min=1)


# ---- One token at a time ---------------------------------------------------------------------------------------------


def policy_gradient(tokens: PolicyTokens) -> TokenLoss:
    """Computes -A log policy (REINFORCE); without a ratio it is right only for the first update after sampling."""
    logprobs = torch.where(tokens.mask, tokens.logprobs, 0.0)
    terms = -tokens.masked_advantages * logprobs
    return token_loss(terms, tokens.log_ratio, torch.zeros_like(tokens.mask), tokens.mask)


def ppo_clip(
    tokens: PolicyTokens, *, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float | None = None
) -> TokenLoss:
    """Computes -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) (PPO, arXiv:1707.06347, eq. 7).

    Two different bounds give DAPO's clip-higher (arXiv:2503.14476). A dual_clip of c limits the term of a token with
    A < 0 to -c A where r > c (arXiv:1912.09729); 3 is usual.
    """
    log_ratio, advantages = tokens.log_ratio, tokens.masked_advantages
    terms, is_clipped = clipped_terms(log_ratio, advantages, clip_low=clip_low, clip_high=clip_high)
    if dual_clip is not None:
        _require_dual_clip(dual_clip, clip_high)
        terms, is_clipped = _clipped_again(terms, is_clipped, tokens, dual_clip)
    return token_loss(terms, log_ratio, is_clipped, tokens.mask)


def _clipped_again(terms: Tensor, is_clipped: Tensor, tokens: PolicyTokens, dual_clip: float) -> tuple[Tensor, Tensor]:
    """Limits the terms of tokens with a negative advantage (dual clip)."""
    advantages, ratio = tokens.masked_advantages, torch.exp(tokens.log_ratio.detach())
    is_beyond = (ratio > dual_clip) & (advantages < 0)
    return torch.where(is_beyond, -dual_clip * advantages, terms), is_clipped | is_beyond


def cispo(tokens: PolicyTokens, *, clip_low: float = 1.0, clip_high: float = 4.0) -> TokenLoss:
    """Computes -sg(clip(r, 1 - clip_low, 1 + clip_high)) A log policy (CISPO: MiniMax-M1, arXiv:2506.13585).

    Only the weight is clipped, so no token loses its gradient. A clip_low of 1 means no lower bound.
    """
    require_clip_range(clip_low, clip_high)
    log_ratio = tokens.log_ratio
    ratio = torch.exp(log_ratio.detach())
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    terms = -weight * tokens.masked_advantages * torch.where(tokens.mask, tokens.logprobs, 0.0)
    return token_loss(terms, log_ratio, weight != ratio, tokens.mask)


def sapo(tokens: PolicyTokens, *, tau_pos: float = 1.0, tau_neg: float = 1.05) -> TokenLoss:
    """Computes -(4 / tau) sigmoid(tau (r - 1)) A, tau by the sign of A (SAPO, arXiv:2511.20347).

    The sigmoid is a soft gate instead of a clip. At r = 1 the gradient is that of -r A; the further r is from 1, the
    more the gate closes, and the faster for a larger tau.
    """
    if tau_pos <= 0 or tau_neg <= 0:
        raise ValueError(f"tau_pos is {tau_pos} and tau_neg {tau_neg}: both must be more than 0.")
    log_ratio, advantages = tokens.log_ratio, tokens.masked_advantages
    tau = torch.where(advantages > 0, torch.full_like(advantages, tau_pos), tau_neg)
    gate = 4 / tau * torch.sigmoid(tau * (torch.exp(log_ratio) - 1))
    return token_loss(-gate * advantages, log_ratio, torch.zeros_like(tokens.mask), tokens.mask)


def cpgd(
    tokens: PolicyTokens,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    drift_coef: NotNegative = 0.01,
    drift_clip: NotNegative = 0.2,
) -> TokenLoss:
    """Computes -min(l A, clip(l) A) + drift_coef sg(min(r - 1, drift_clip)) log policy (arXiv:2505.12504, eq. 2).

    Here l is log r, which the clip holds in [log(1 - clip_low), log(1 + clip_high)]. The last term has the gradient of
    k3 for KL(old policy || policy), clipped from above, so it always pulls back a ratio that is too large.
    """
    require_clip_range(clip_low, clip_high)
    log_ratio, advantages = tokens.log_ratio, tokens.masked_advantages
    lowest = math.log1p(-clip_low) if clip_low < 1 else -math.inf
    highest = math.log1p(clip_high)
    fixed = log_ratio.detach()
    is_clipped = ((fixed < lowest) & (advantages < 0)) | ((fixed > highest) & (advantages > 0))
    improvement = torch.where(is_clipped, fixed.clamp(lowest, highest), log_ratio) * advantages
    pull = torch.expm1(fixed).clamp(max=drift_clip)
    drift = pull * torch.where(tokens.mask, tokens.logprobs, 0.0)
    return token_loss(-improvement + drift_coef * drift, log_ratio, is_clipped, tokens.mask)


# ---- Some tokens without a gradient, or with a penalty ---------------------------------------------------------------


def dppo_tv(
    tokens: PolicyTokens, *, limit_low: NotNegative = 0.15, limit_high: NotNegative = 0.15, ratio_cap: Positive = 20.0
) -> TokenLoss:
    """Computes -sg(min(r, ratio_cap)) A log policy, but 0 where the probability moved too far in A's direction.

    Too far is policy - old > limit_high for A > 0 and old - policy > limit_low for A < 0: the total variation between
    the two outcomes "this token" and "another" (DPPO, arXiv:2602.04879). Take the sampler's logprobs as the old ones.
    """
    change = _probability(tokens.logprobs, tokens.mask) - _probability(tokens.old_logprobs, tokens.mask)
    return _outside_region(tokens, change > limit_high, change < -limit_low, ratio_cap)


def dppo_kl(
    tokens: PolicyTokens, *, limit_low: NotNegative = 0.05, limit_high: NotNegative = 0.05, ratio_cap: Positive = 20.0
) -> TokenLoss:
    """Computes dppo_tv, but with KL(old || policy) of the two outcomes instead of their total variation."""
    new, old = _probability(tokens.logprobs, tokens.mask), _probability(tokens.old_logprobs, tokens.mask)
    rest_new, rest_old = (1 - new).clamp(min=1e-8), (1 - old).clamp(min=1e-8)
    divergence = -old * tokens.log_ratio.detach() + rest_old * (rest_old / rest_new).log()
    return _outside_region(
        tokens, (divergence > limit_high) & (new > old), (divergence > limit_low) & (new < old), ratio_cap
    )


def _outside_region(tokens: PolicyTokens, too_high: Tensor, too_low: Tensor, ratio_cap: float) -> TokenLoss:
    log_ratio, advantages = tokens.log_ratio, tokens.masked_advantages
    is_outside = (too_high & (advantages > 0)) | (too_low & (advantages < 0))
    weight = torch.exp(log_ratio.detach()).clamp(max=ratio_cap)
    terms = -weight * advantages * torch.where(tokens.mask, tokens.logprobs, 0.0)
    return token_loss(torch.where(is_outside, 0.0, terms), log_ratio, is_outside, tokens.mask)


def _probability(logprobs: Tensor, mask: Tensor) -> Tensor:
    return torch.exp(torch.where(mask, logprobs.detach(), 0.0))


# ---- Clipping --------------------------------------------------------------------------------------------------------


def clipped_terms(log_ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    """Returns -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) of each token, and which tokens get no gradient."""
    require_clip_range(clip_low, clip_high)
    ratio = torch.exp(log_ratio)
    fixed = ratio.detach()
    is_clipped = ((fixed < 1 - clip_low) & (advantages < 0)) | ((fixed > 1 + clip_high) & (advantages > 0))
    # Not minimum(): on the bound, where both are equal, its gradient and that of clamp() depend on torch's version.
    held = torch.where(is_clipped, fixed.clamp(1 - clip_low, 1 + clip_high), ratio)
    return -held * advantages, is_clipped


def _require_dual_clip(dual_clip: float, clip_high: float) -> None:
    if dual_clip <= 1 + clip_high:
        raise ValueError(
            f"dual_clip is {dual_clip} and clip_high {clip_high}: dual_clip bounds the ratio of tokens with a negative "
            "advantage from above, so it must be more than 1 + clip_high."
        )


def require_clip_range(clip_low: float, clip_high: float) -> None:
    """Raises ValueError unless [1 - clip_low, 1 + clip_high] is a range of ratios around 1."""
    if not 0 <= clip_low <= 1 or clip_high < 0:
        raise _wrong_clip_range(clip_low, clip_high)


def _wrong_clip_range(clip_low: float, clip_high: float) -> ValueError:
    return ValueError(
        f"clip_low is {clip_low} and clip_high {clip_high}: the ratio is kept in [1 - clip_low, 1 + clip_high], so "
        "clip_low must be in [0, 1] and clip_high at least 0."
    )


# ---- Aggregation: the mean over tokens and sequences -----------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenWeights:
    """The weights of one micro-batch's tokens, and its part of the denominator."""

    weights: Tensor  # [N] float32, 0 where nothing is trained
    total: Tensor  # [] float32, this micro-batch's part of the denominator


def token_mean(mask: Tensor, sequence_index: Tensor, num_sequences: int) -> TokenWeights:
    """Gives every trained token the same weight (DAPO, arXiv:2503.14476, eq. 8)."""
    require_sequence_index(sequence_index, mask, num_sequences)
    weights = mask.float()
    return TokenWeights(weights=weights, total=weights.sum())


def sequence_mean(mask: Tensor, sequence_index: Tensor, num_sequences: int) -> TokenWeights:
    """Takes the mean over sequences of their means over tokens (GRPO, arXiv:2402.03300, eq. 3).

    A sequence without a trained token does not count.
    """
    counts = _trained_tokens(mask, sequence_index, num_sequences)
    weights = mask.float() / counts.clamp(min=1)[sequence_index]
    return TokenWeights(weights=weights, total=(counts > 0).float().sum())


def sequence_mean_token_sum(mask: Tensor, sequence_index: Tensor, num_sequences: int) -> TokenWeights:
    """Takes the mean over sequences of their sums over tokens: the policy gradient of a whole response."""
    return sequence_mean_token_sum_norm(mask, sequence_index, num_sequences, length=1)


def sequence_mean_token_sum_norm(
    mask: Tensor, sequence_index: Tensor, num_sequences: int, *, length: float
) -> TokenWeights:
    """Takes the mean over sequences of their sums over tokens / a constant length (Dr. GRPO, arXiv:2503.20783).

    Args:
        mask: True = trained, [N].
        sequence_index: The sequence of each token, [N].
        num_sequences: Sequences of the micro-batch.
        length: The same for a whole run, such as the longest response allowed.
    """
    if length <= 0:
        raise ValueError(f"length is {length}: it is a number of tokens, such as the longest response allowed.")
    counts = _trained_tokens(mask, sequence_index, num_sequences)
    return TokenWeights(weights=mask.float() / length, total=(counts > 0).float().sum())


def mean_loss(terms: Tensor, token_weights: TokenWeights) -> Tensor:
    """Returns the micro-batch's loss: the weighted sum of the terms, divided by `total`.

    If nothing is trained, it is 0 but still part of the graph, with a gradient of 0. To combine several losses (policy,
    KL, entropy), add their terms first.
    """
    require_same_shape(terms=terms, weights=token_weights.weights)
    weights, total = token_weights.weights, token_weights.total
    # Where the weight is 0 the term is not read: 0 * inf would be NaN.
    weighed = torch.where(weights > 0, terms, 0.0) * weights
    return weighed.sum() / torch.where(total > 0, total, 1.0)


def _trained_tokens(mask: Tensor, sequence_index: Tensor, num_sequences: int) -> Tensor:
    require_sequence_index(sequence_index, mask, num_sequences)
    return sequence_sums(mask.float(), sequence_index, num_sequences)


# ---- Engine and trainer ----------------------------------------------------------------------------------------------


@torch.no_grad()
def mismatch_statistics(trainer: Tensor, sampler: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Measures how far the engine's log probabilities are from the trainer's, for the same tokens and weights.

    Reduce the scalars over micro-batches and ranks: max_abs by maximum, the others by sum. max_abs and sum_abs describe
    the difference of log probabilities, sum_k3 the k3 estimate of KL(sampler || trainer) (the sampler drew the tokens),
    and count is the number of tokens where the mask is True. Without such tokens, all are 0.
    """
    require_same_shape(trainer=trainer, sampler=sampler, mask=mask)
    require_bool_mask(mask)
    trainer, sampler = (torch.where(mask, logprobs.float(), 0.0) for logprobs in (trainer, sampler))
    difference = (trainer - sampler).abs()
    return {
        "max_abs": difference.max() if difference.numel() else difference.sum(),
        "sum_abs": difference.sum(),
        "sum_k3": k3(trainer - sampler).sum(),
        "count": mask.sum(),
    }


# ---- Checks against silent broadcasting: [N] with [N, 1] would be an [N, N] loss that still trains -------------------


def require_same_shape(**tensors: Tensor) -> None:
    """Raises ValueError naming every shape unless all are equal."""
    if len({tensor.shape for tensor in tensors.values()}) > 1:
        raise _wrong_shapes("have one shape, an entry per token", tensors)


def require_bool_mask(mask: Tensor, name: str = "mask") -> None:
    """Raises ValueError unless the mask is a bool tensor."""
    if mask.dtype != torch.bool:
        raise ValueError(f"{name} is of {mask.dtype}: give torch.bool, True where a token counts. Use {name}.bool().")


def require_sequence_index(sequence_index: Tensor, mask: Tensor, num_sequences: int) -> None:
    """Raises ValueError unless mask and index are [N], the mask is bool, and the index is int64 and in range."""
    require_bool_mask(mask)
    if mask.dim() != 1 or sequence_index.shape != mask.shape or sequence_index.dtype != torch.int64:
        raise _wrong_index(sequence_index, mask)
    if num_sequences < 1 and sequence_index.numel():
        raise ValueError(f"num_sequences is {num_sequences}, but there are {sequence_index.numel()} tokens.")


def require_flat(**tensors: Tensor | None) -> None:
    """Raises ValueError naming every shape unless all given tensors are [B] with the same B."""
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    if any(tensor.dim() != 1 for tensor in given.values()) or len({len(tensor) for tensor in given.values()}) > 1:
        raise _wrong_shapes("be flat and of one length", given)


def _wrong_shapes(wanted: str, tensors: Mapping[str, Tensor]) -> ValueError:
    shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())
    return ValueError(f"These tensors must {wanted}: {shapes}.")


def _wrong_index(sequence_index: Tensor, mask: Tensor) -> ValueError:
    return ValueError(
        f"sequence_index is {list(sequence_index.shape)} of {sequence_index.dtype}, the mask {list(mask.shape)}: both "
        "must be [N], an entry per response token of the pack, and sequence_index torch.int64."
    )
