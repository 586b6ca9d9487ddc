"""Estimators of one advantage per sample from one reward per sample, and the whitening of advantages.

An estimator is `fn(samples: ScoredSamples, **parameters) -> Tensor`, [B] for [B] rewards; every token of a sample gets
the sample's advantage. Methods that compare the samples of a group give exactly 0 for equal rewards and for groups of
one. `@advantage(...)` states what an estimator asks of the trainer: with `whiten=True` the trainer whitens the
advantages over all trained tokens of the update on all ranks. Advantages per token (GAE, returns) are in returns.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lightrl.algorithms.losses import require_flat, require_same_shape
from lightrl.algorithms.ranges import NotNegative, Positive
from lightrl.algorithms.registry import advantage

_ROUNDING = 1e-12  # a deviation below this fraction of the mean is rounding in float64: all values are equal


class Component(NamedTuple):
    """The values of one of several rewards for B samples."""

    values: Tensor  # [B], NaN where the reward does not apply
    weight: float  # in the sum


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredSamples:
    """B samples in any order; every group among them is complete."""

    rewards: Tensor  # [B]
    group_ids: Tensor  # [B] int64, equal for samples of the same prompt
    lengths: Tensor | None = None  # [B] trained tokens
    baselines: Tensor | None = None  # [B] reward of a greedy response to the same prompt, for needs="greedy_baseline"
    signal_share: float | None = None  # share of the update's samples, over all ranks, whose group has unequal rewards
    # (signal_counts), for needs="signal_share"
    components: Mapping[str, Component] | None = None  # what each reward gave, by its name, for needs="components"

    def __post_init__(self) -> None:
        require_flat(rewards=self.rewards, group_ids=self.group_ids, lengths=self.lengths, baselines=self.baselines)

    @property
    def scores(self) -> Tensor:
        """The rewards as floats, [B]."""
        return self.rewards if self.rewards.is_floating_point() else self.rewards.float()

    @property
    def groups(self) -> Groups:
        """The samples of each prompt."""
        return groups_of(self.group_ids)


@advantage(min_group=2)
def grpo(samples: ScoredSamples, *, normalize_std: bool = True, eps: NotNegative = 1e-4) -> Tensor:
    """Returns (reward - its group's mean) / (the group's deviation + eps) (GRPO, arXiv:2402.03300, 4.1.2).

    The deviation divides by G - 1 (Bessel), and eps is added to it outside the root, both as TRL does.

    Args:
        normalize_std: False leaves the differences from the mean unscaled, which is dr_grpo.
        eps: Added to the deviation.
    """
    groups, rewards = samples.groups, samples.scores
    advantages = rewards.double() - groups.means(rewards)
    if normalize_std:
        advantages = advantages / (groups.stds(rewards) + eps)
    return _where_signal(advantages, groups, rewards)


@advantage(min_group=2)
def dr_grpo(samples: ScoredSamples) -> Tensor:
    """Returns each reward minus its group's mean (Dr. GRPO, arXiv:2503.20783)."""
    return grpo(samples, normalize_std=False)


@advantage(min_group=2)
def rloo(samples: ScoredSamples) -> Tensor:
    """Returns each reward minus the mean of the others in its group (RLOO, arXiv:2402.14740): G / (G - 1) x dr_grpo."""
    groups, rewards = samples.groups, samples.scores
    num_others = groups.num_others()
    others = groups.sums(rewards)[groups.member_of] - rewards.double()
    return _where_signal(rewards.double() - others / num_others.clamp(min=1), groups, rewards)


@advantage()
def reinforce(samples: ScoredSamples) -> Tensor:
    """Returns the reward itself (REINFORCE, Williams 1992)."""
    return samples.scores.clone()


@advantage(whiten=True)
def reinforce_plus_plus(samples: ScoredSamples) -> Tensor:
    """Returns the reward itself, to be whitened over the update (REINFORCE++, arXiv:2501.03262)."""
    return reinforce(samples)


@advantage(whiten=True, min_group=2)
def reinforce_plus_plus_baseline(samples: ScoredSamples) -> Tensor:
    """Returns each reward minus its group's mean, to be whitened over the update (arXiv:2501.03262)."""
    return dr_grpo(samples)


@advantage(needs="greedy_baseline")
def remax(samples: ScoredSamples) -> Tensor:
    """Returns each reward minus that of the greedy response to the same prompt (ReMax, arXiv:2310.10505)."""
    if samples.baselines is None:
        raise ValueError("remax needs the reward of a greedy response per sample: give ScoredSamples(baselines=...).")
    return samples.scores - samples.baselines


@advantage(min_group=2)
def opo(samples: ScoredSamples) -> Tensor:
    """Returns each reward minus its group's length-weighted mean, sum(l r) / sum(l) (OPO, arXiv:2505.23585)."""
    if samples.lengths is None:
        raise ValueError("opo weighs rewards by length: give ScoredSamples(lengths=...), trained tokens per sample.")
    groups, rewards = samples.groups, samples.scores
    lengths = samples.lengths.double()
    baseline = groups.sums(lengths * rewards) / groups.sums(lengths).clamp(min=1)
    return _where_signal(rewards.double() - baseline[groups.member_of], groups, rewards)


@advantage(needs="signal_share", min_group=2)
def gpg(samples: ScoredSamples, *, norm: Positive = 1.0) -> Tensor:
    """Returns (reward - its group's mean) / (norm x share of samples with a signal) (GPG, arXiv:2504.02546).

    A sample has a signal if the rewards of its group are unequal. The division keeps groups of equal rewards from
    shrinking the gradient of the others.
    """
    return dr_grpo(samples) / (norm * _signal_share(samples, "gpg"))


@advantage(needs="signal_share", min_group=2)
def cpgd(
    samples: ScoredSamples,
    *,
    weight: Literal["equal", "std", "signal"] = "std",
    max_weight: Positive = 3.0,
    eps: NotNegative = 1e-4,
) -> Tensor:
    """Multiplies dr_grpo by a weight for each prompt (CPGD, arXiv:2505.12504).

    The weight `equal` is 1; `std` is 1 / (the group's deviation + eps), which is grpo; `signal` is 1 / (the share of
    samples whose group has unequal rewards), at most max_weight ("clip-filter-like").
    """
    if weight == "equal":
        return dr_grpo(samples)
    if weight == "std":
        return grpo(samples, eps=eps)
    if weight == "signal":
        return dr_grpo(samples) * min(max_weight, 1 / _signal_share(samples, "cpgd"))
    raise ValueError(f"Unknown weight {weight!r}. Choose one of equal, std, signal.")


@advantage(whiten=True, needs="components", min_group=2)
def gdpo(samples: ScoredSamples, *, eps: NotNegative = 1e-4) -> Tensor:
    """Returns the weighted sum of each reward's own grpo, to be whitened over the update (GDPO, arXiv:2601.05242).

    A reward is compared within the samples of the group to which it applies, and adds 0 to the others.

    Args:
        eps: Added to the deviation of each reward.
    """
    if samples.components is None:
        raise ValueError("gdpo needs what each reward gave: give ScoredSamples(components=...).")
    total = torch.zeros_like(samples.scores)
    for component in samples.components.values():
        applies = ~component.values.isnan()
        if applies.any():
            alone = ScoredSamples(rewards=component.values[applies], group_ids=samples.group_ids[applies])
            total[applies] += component.weight * grpo(alone, eps=eps).to(total.dtype)
    return total


@advantage(min_group="k")
def pass_at_k(samples: ScoredSamples, *, k: int = 4, correct_above: float = 0.5) -> Tensor:
    """Returns each sample's advantage under pass@k: k random samples succeed if one is correct (arXiv:2508.10751).

    With N samples, W of them wrong: R = 1 - C(W, k) / C(N, k), deviation sqrt(R (1 - R)); a correct sample gets
    (1 - R) / deviation, a wrong one (1 - R - C(W - 1, k - 1) / C(N - 1, k - 1)) / deviation. All samples get 0 if all
    are wrong, if any k of them include a correct one, or if failed rewards leave fewer than k samples.

    Args:
        k: How many samples are drawn.
        correct_above: A sample with a larger reward is correct.
    """
    if k < 1 or k != int(k):
        raise ValueError(f"k is {k}: it must be a whole number, at least 1.")
    groups, is_correct = samples.groups, samples.scores > correct_above
    num_correct = groups.sums(is_correct).long().tolist()
    table = [
        _pass_at_k_values(size, size - right, k) for size, right in zip(groups.sizes.tolist(), num_correct, strict=True)
    ]
    values = torch.tensor(table, dtype=samples.scores.dtype, device=samples.scores.device).reshape(-1, 2)
    return values[groups.member_of, is_correct.long()]


def signal_counts(samples: ScoredSamples) -> Tensor:
    """Returns the number of samples whose group has unequal rewards, and of all samples, [2] float64.

    After each is summed over the ranks, their ratio is `ScoredSamples.signal_share`.
    """
    has_signal = samples.groups.has_signal(samples.scores)
    return torch.tensor([float(has_signal.sum()), float(len(has_signal))], dtype=torch.float64)


def _pass_at_k_values(size: int, num_wrong: int, k: int) -> tuple[float, float]:
    """Returns the advantages of a wrong and of a correct sample in a group."""
    if size < k:
        return 0.0, 0.0
    failure = math.comb(num_wrong, k) / math.comb(size, k)
    if failure in (0.0, 1.0):
        return 0.0, 0.0
    deviation = math.sqrt(failure * (1 - failure))
    failure_with_a_wrong_one = math.comb(num_wrong - 1, k - 1) / math.comb(size - 1, k - 1)
    return (failure - failure_with_a_wrong_one) / deviation, failure / deviation


def _where_signal(advantages: Tensor, groups: Groups, rewards: Tensor) -> Tensor:
    """Sets groups of equal rewards to exactly 0: the floating-point mean of, say, seven times 0.1 is not 0.1."""
    return torch.where(groups.has_signal(rewards), advantages, 0.0).to(rewards.dtype)


def _signal_share(samples: ScoredSamples, estimator: str) -> float:
    if samples.signal_share is None:
        raise ValueError(
            f"{estimator} needs the share of samples with a signal on all ranks: give ScoredSamples(signal_share=...), "
            "from signal_counts added over ranks."
        )
    return samples.signal_share if samples.signal_share > 0 else 1.0  # no signal at all: every advantage is 0


# ---- Whitening: the ranks' moments are merged, and every rank applies the result -------------------------------------


def moments_of(values: Tensor, weights: Tensor) -> Tensor:
    """Returns the sum of the weights, the weighted mean, and the weighted sum of squared deviations, [3] float64.

    Args:
        values: Any shape; entries of weight 0 are not read.
        weights: The shape of values: a mask, or how many tokens share a sample's value.
    """
    require_same_shape(values=values, weights=weights)
    counted = weights.detach() > 0
    values, weights = values.detach()[counted].double(), weights.detach()[counted].double()
    first = values[:1].sum()  # shifted by it, 1e6 + {0, 1} loses no digit and equal values deviate by exactly 0
    shift = (weights * (values - first)).sum() / weights.sum().clamp(min=1)
    return torch.stack([weights.sum(), first + shift, (weights * (values - first - shift).square()).sum()])


def merged_moments(parts: Tensor) -> Tensor:
    """Returns the moments of all values, [3], from the moments of each part, [R, 3], such as those of each rank.

    The squared deviations of the parts' means are added to those within the parts (Chan, Golub and LeVeque, 1979).
    Plain sums of squares would lose digits when the mean is large.
    """
    weights, means, squares = parts.unbind(1)
    first = means[weights.argmax()]
    shift = (weights * (means - first)).sum() / weights.sum().clamp(min=1)
    return torch.stack(
        [weights.sum(), first + shift, squares.sum() + (weights * (means - first - shift).square()).sum()]
    )


def mean_and_std(moments: Tensor) -> tuple[float, float]:
    """Returns mean and deviation from moments; the deviation divides by the count, and is 0 for equal values."""
    count, mean, squares = moments.tolist()
    std = (squares / max(count, 1.0)) ** 0.5
    return mean, 0.0 if std <= _ROUNDING * abs(mean) else std


def whiten(values: Tensor, moments: Tensor, *, shift_mean: bool = True, eps: float = 1e-8) -> Tensor:
    """Returns (values - mean) / (deviation + eps).

    Values that are all equal become 0, or stay as they are if shift_mean is False.

    Args:
        values: Advantages or rewards of this rank.
        moments: The result of moments_of() for all values to compare with, merged over all ranks.
        shift_mean: False adds the mean to the result again; a value below the mean may change its sign all the same.
        eps: Added to the deviation.
    """
    mean, std = mean_and_std(moments)
    if std == 0:
        return torch.zeros_like(values) if shift_mean else values.clone()
    scaled = ((values.double() - mean) / (std + eps)).to(values.dtype)
    return scaled if shift_mean else scaled + mean


def clip_values(values: Tensor, limit: float) -> Tensor:
    """Clips rewards or advantages to [-limit, limit]."""
    if limit <= 0:
        raise ValueError(f"limit is {limit}: values are held in [-limit, limit], so it must be more than 0.")
    return values.clamp(-limit, limit)


# ---- Rewards of one prompt -------------------------------------------------------------------------------------------


def overlong_penalty(lengths: Tensor, *, max_length: int, buffer: int, scale: float = 1.0) -> Tensor:
    """Returns the penalty to add to the rewards of overlong responses (DAPO, arXiv:2503.14476, eq. 13).

    It is 0 up to max_length - buffer tokens and falls linearly from there to -scale at max_length.

    Args:
        lengths: Response tokens, [B].
        max_length: The longest response; longer ones get -scale too.
        buffer: Tokens before max_length over which the penalty grows.
        scale: The largest penalty.
    """
    if not 0 < buffer <= max_length:
        raise ValueError(f"buffer is {buffer} and max_length {max_length}: buffer must be in [1, max_length].")
    over = lengths.float() - (max_length - buffer)
    return -scale * (over / buffer).clamp(0, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """B samples in G groups, one for each prompt; the members of a group may be in any order.

    Every group must be complete. If a group spans ranks, gather its rewards and ids first (a few numbers), and keep
    only this rank's part of the result.
    """

    member_of: Tensor  # [B] int64 in [0, G)
    sizes: Tensor  # [G] int64

    def sums(self, values: Tensor) -> Tensor:
        """Adds up the values of each group, [G]; float64, so that the order of the members does not matter."""
        zeros = torch.zeros(len(self.sizes), dtype=torch.float64, device=values.device)
        return zeros.index_add(0, self.member_of, values.double())

    def means(self, values: Tensor) -> Tensor:
        """Returns the mean of each sample's group, [B] float64."""
        return (self.sums(values) / self.sizes)[self.member_of]

    def stds(self, values: Tensor) -> Tensor:
        """Returns the deviation of each sample's group, [B] float64, with divisor size - 1; 0 for a group of one."""
        deviations = values.double() - self.means(values)
        variance = self.sums(deviations.square()) / (self.sizes - 1).clamp(min=1)
        return variance.sqrt()[self.member_of]

    def has_signal(self, values: Tensor) -> Tensor:
        """Returns [B] bool: False where all members of the sample's group have exactly the same value."""
        unset = values.new_zeros(len(self.sizes))
        lowest = unset.scatter_reduce(0, self.member_of, values, "amin", include_self=False)
        highest = unset.scatter_reduce(0, self.member_of, values, "amax", include_self=False)
        return (lowest != highest)[self.member_of]

    def num_others(self) -> Tensor:
        """Returns the number of other members in each sample's group, [B] int64."""
        return self.sizes[self.member_of] - 1


def groups_of(group_ids: Tensor) -> Groups:
    """Numbers the groups by their ids, [B], which may be any integers."""
    require_flat(group_ids=group_ids)
    if group_ids.is_floating_point() or group_ids.dtype == torch.bool:
        raise ValueError(f"group_ids is of {group_ids.dtype}: give an integer for each sample.")
    _, member_of, sizes = torch.unique(group_ids, return_inverse=True, return_counts=True)
    return Groups(member_of=member_of, sizes=sizes)
