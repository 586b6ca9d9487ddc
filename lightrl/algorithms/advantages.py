"""From one reward per sample to one advantage per sample.

An estimator is `fn(samples: ScoredSamples, **parameters) -> Tensor`, [B] for [B] rewards; every token of a sample then
has its advantage. Where a method compares samples of a group, equal rewards and groups of one give exactly 0. Those of
registry.WHITENED are followed by moments.whiten over all trained tokens of the update on all ranks. Advantages per
token (GAE, returns) are in returns.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lightrl.algorithms.groups import Groups, groups_of
from lightrl.algorithms.shapes import require_flat


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredSamples:
    """B samples with every member of their groups, in any order."""

    rewards: Tensor  # [B]
    group_ids: Tensor  # [B] int64, equal for samples of the same prompt
    lengths: Tensor | None = None  # [B] trained tokens; opo needs it
    baselines: Tensor | None = None  # [B] reward of a greedy response to the same prompt; remax needs it
    signal_share: float | None = None  # of the update's samples on all ranks (signal_counts); gpg and cpgd need it

    def __post_init__(self) -> None:
        require_flat(rewards=self.rewards, group_ids=self.group_ids, lengths=self.lengths, baselines=self.baselines)

    @property
    def scores(self) -> Tensor:
        """[B] the rewards as floats."""
        return self.rewards if self.rewards.is_floating_point() else self.rewards.float()

    @property
    def groups(self) -> Groups:
        return groups_of(self.group_ids)


def group_advantages(rewards: Tensor, *, normalize_std: bool = True, eps: float = 1e-4) -> Tensor:
    """grpo for a table of rewards, [P, G], a row for each prompt; the result has the same shape."""
    if rewards.dim() != 2:
        raise ValueError(f"rewards has shape {list(rewards.shape)}: it must be [prompts, samples of each prompt].")
    num_prompts, size = rewards.shape
    if size < 2:
        raise ValueError(f"A group has {size} sample(s): it takes at least 2 to compare. Sample more for each prompt.")
    group_ids = torch.arange(num_prompts, device=rewards.device).repeat_interleave(size)
    samples = ScoredSamples(rewards=rewards.reshape(-1), group_ids=group_ids)
    return grpo(samples, normalize_std=normalize_std, eps=eps).reshape(rewards.shape)


def grpo(samples: ScoredSamples, *, normalize_std: bool = True, eps: float = 1e-4) -> Tensor:
    """Each reward minus its group's mean, over the group's deviation plus eps (GRPO, arXiv:2402.03300, 4.1.2).

    The deviation divides by G - 1 (Bessel), and eps is added to it outside the root, both as TRL does.

    Args:
        normalize_std: False leaves the differences from the mean unscaled, which is dr_grpo.
    """
    groups, rewards = samples.groups, samples.scores
    advantages = rewards.double() - groups.means(rewards)
    if normalize_std:
        advantages = advantages / (groups.stds(rewards) + eps)
    return _where_signal(advantages, samples)


def dr_grpo(samples: ScoredSamples) -> Tensor:
    """Each reward minus its group's mean (Dr. GRPO, arXiv:2503.20783)."""
    return grpo(samples, normalize_std=False)


def rloo(samples: ScoredSamples) -> Tensor:
    """Each reward minus the mean of the others in its group (RLOO, arXiv:2402.14740): G / (G - 1) times dr_grpo."""
    groups, rewards = samples.groups, samples.scores
    num_others = groups.num_others()
    others = groups.sums(rewards)[groups.member_of] - rewards.double()
    return _where_signal(rewards.double() - others / num_others.clamp(min=1), samples)


def reinforce(samples: ScoredSamples) -> Tensor:
    """The reward itself (REINFORCE, Williams 1992). Whitened over the update it is REINFORCE++ (arXiv:2501.03262)."""
    return samples.scores.clone()


def reinforce_plus_plus_baseline(samples: ScoredSamples) -> Tensor:
    """Each reward minus its group's mean, to be whitened over the update (REINFORCE++-baseline, arXiv:2501.03262)."""
    return dr_grpo(samples)


def remax(samples: ScoredSamples) -> Tensor:
    """Each reward minus that of the greedy response to the same prompt (ReMax, arXiv:2310.10505)."""
    if samples.baselines is None:
        raise ValueError("remax needs the reward of a greedy response per sample: give ScoredSamples(baselines=...).")
    return samples.scores - samples.baselines


def opo(samples: ScoredSamples) -> Tensor:
    """Each reward minus its group's mean weighed by length, sum(l r) / sum(l) (OPO, arXiv:2505.23585)."""
    if samples.lengths is None:
        raise ValueError("opo weighs rewards by length: give ScoredSamples(lengths=...), trained tokens per sample.")
    groups, rewards = samples.groups, samples.scores
    lengths = samples.lengths.double()
    baseline = groups.sums(lengths * rewards) / groups.sums(lengths).clamp(min=1)
    return _where_signal(rewards.double() - baseline[groups.member_of], samples)


def gpg(samples: ScoredSamples, *, norm: float = 1.0) -> Tensor:
    """(reward - its group's mean) / norm, over the share of samples whose group has a signal (GPG, arXiv:2504.02546).

    Groups of equal rewards then do not shrink the gradient of the others.
    """
    return dr_grpo(samples) / (norm * _signal_share(samples, "gpg"))


def cpgd(
    samples: ScoredSamples,
    *,
    weight: Literal["equal", "std", "signal"] = "std",
    max_weight: float = 3.0,
    eps: float = 1e-4,
) -> Tensor:
    """dr_grpo times a weight for each prompt (CPGD, arXiv:2505.12504).

    equal: 1. std: 1 / the group's deviation, which is grpo. signal: 1 / the share of samples whose group has a signal,
    at most max_weight ("clip-filter-like").
    """
    if weight == "equal":
        return dr_grpo(samples)
    if weight == "std":
        return grpo(samples, eps=eps)
    if weight == "signal":
        return dr_grpo(samples) * min(max_weight, 1 / _signal_share(samples, "cpgd"))
    raise ValueError(f"Unknown weight {weight!r}. Choose one of equal, std, signal.")


def pass_at_k(samples: ScoredSamples, *, k: int = 4, correct_above: float = 0.5) -> Tensor:
    """The advantage of being in a random k of the group's samples that has a correct one (arXiv:2508.10751).

    With N samples, W of them wrong: R = 1 - C(W, k) / C(N, k), deviation sqrt(R (1 - R)); a correct sample gets
    (1 - R) / deviation, a wrong one (1 - R - C(W - 1, k - 1) / C(N - 1, k - 1)) / deviation. Where all are wrong, or
    any k have a correct one, all get 0; so do groups of fewer than k, as failed rewards may leave them.

    Args:
        correct_above: a sample with a larger reward is correct.
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
    """[2] float64: samples whose group has unequal rewards, samples. Add over ranks; their ratio is signal_share."""
    has_signal = samples.groups.has_signal(samples.scores)
    return torch.tensor([float(has_signal.sum()), float(len(has_signal))], dtype=torch.float64)


def _pass_at_k_values(size: int, num_wrong: int, k: int) -> tuple[float, float]:
    """Advantages of a wrong and of a correct sample in a group."""
    if size < k:
        return 0.0, 0.0
    failure = math.comb(num_wrong, k) / math.comb(size, k)
    if failure in (0.0, 1.0):
        return 0.0, 0.0
    deviation = math.sqrt(failure * (1 - failure))
    failure_with_a_wrong_one = math.comb(num_wrong - 1, k - 1) / math.comb(size - 1, k - 1)
    return (failure - failure_with_a_wrong_one) / deviation, failure / deviation


def _where_signal(advantages: Tensor, samples: ScoredSamples) -> Tensor:
    """Exactly 0 in groups of equal rewards: the floating-point mean of, say, seven times 0.1 is not 0.1."""
    rewards = samples.scores
    return torch.where(samples.groups.has_signal(rewards), advantages, 0.0).to(rewards.dtype)


def _signal_share(samples: ScoredSamples, estimator: str) -> float:
    if samples.signal_share is None:
        raise ValueError(
            f"{estimator} needs the share of samples with a signal on all ranks: give ScoredSamples(signal_share=...), "
            "from signal_counts added over ranks."
        )
    return samples.signal_share if samples.signal_share > 0 else 1.0  # no signal at all: every advantage is 0
