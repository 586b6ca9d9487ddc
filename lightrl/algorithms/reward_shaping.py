"""Rewards before they become advantages: length, place, KL, and which groups are worth training on."""

from __future__ import annotations

import torch
from torch import Tensor

from lightrl.algorithms.groups import groups_of
from lightrl.algorithms.shapes import require_bool_mask, require_flat, require_same_shape, require_sequence_index
from lightrl.algorithms.tokens import sequence_sums


def overlong_penalty(lengths: Tensor, *, max_length: int, buffer: int, scale: float = 1.0) -> Tensor:
    """To add to rewards: 0 up to max_length - buffer, then down in a line to -scale (DAPO, arXiv:2503.14476, eq. 13).

    Args:
        lengths: [B] response tokens.
        max_length: of a response; longer ones get -scale too.
        buffer: tokens before max_length over which the penalty grows.
    """
    if not 0 < buffer <= max_length:
        raise ValueError(f"buffer is {buffer} and max_length {max_length}: buffer must be in [1, max_length].")
    over = lengths.float() - (max_length - buffer)
    return -scale * (over / buffer).clamp(0, 1)


def signal_samples(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """[B] bool: samples whose group has unequal rewards, all that dynamic sampling keeps (arXiv:2503.14476)."""
    require_flat(rewards=rewards, group_ids=group_ids)
    return groups_of(group_ids).has_signal(rewards)


def samples_within(rewards: Tensor, group_ids: Tensor, *, lowest: float, highest: float) -> Tensor:
    """[B] bool: samples whose group's mean reward is in [lowest, highest], neither too hard nor too easy."""
    require_flat(rewards=rewards, group_ids=group_ids)
    if lowest > highest:
        raise ValueError(f"lowest is {lowest} and highest {highest}: no mean reward lies between.")
    means = groups_of(group_ids).means(rewards)
    return (means >= lowest) & (means <= highest)


def scaled_rewards(rewards: Tensor, *, bias: float = 0.0, scale: float = 1.0, clip: float | None = None) -> Tensor:
    """(reward + bias) scale, then held in [-clip, clip]."""
    scaled = (rewards + bias) * scale
    return scaled if clip is None else scaled.clamp(-clip, clip)


def rewards_at_the_end(rewards: Tensor, mask: Tensor, sequence_index: Tensor) -> Tensor:
    """[N] a sample's reward at its last trained token, 0 at all others.

    A sequence without a trained token has no place for its reward and loses it.

    Args:
        rewards: [S] per sequence.
        sequence_index: [N] ascending.
    """
    require_bool_mask(mask)
    require_sequence_index(sequence_index, mask, len(rewards))
    places, owners = mask.nonzero().squeeze(1), sequence_index[mask]
    is_last = torch.ones_like(owners, dtype=torch.bool)
    is_last[:-1] = owners[1:] != owners[:-1]
    out = rewards.new_zeros(mask.shape)
    out[places[is_last]] = rewards[owners[is_last]]
    return out


def kl_penalised(rewards: Tensor, kl: Tensor, mask: Tensor, *, coef: float) -> Tensor:
    """[N] rewards - coef kl at each trained token, without a gradient: the KL in the reward (arXiv:2203.02155).

    Here the estimate k1 is the right one: the sum of a response's k1 is its log ratio, whose mean is the KL.
    """
    require_same_shape(rewards=rewards, kl=kl, mask=mask)
    require_bool_mask(mask)
    return torch.where(mask, rewards - coef * kl.detach(), 0.0)


def kl_penalised_samples(rewards: Tensor, kl: Tensor, mask: Tensor, sequence_index: Tensor, *, coef: float) -> Tensor:
    """[S] rewards minus coef times the sum of the KL over each sequence, for estimators that take one reward."""
    require_bool_mask(mask)
    require_sequence_index(sequence_index, mask, len(rewards))
    return rewards - coef * sequence_sums(torch.where(mask, kl.detach(), 0.0), sequence_index, len(rewards))
