"""From rewards to advantages, by comparing the samples of one prompt with each other."""

from __future__ import annotations

import torch
from torch import Tensor


def group_advantages(rewards: Tensor, *, normalize_std: bool = True, eps: float = 1e-4) -> Tensor:
    """Each reward minus its group's mean, over the group's standard deviation plus eps (GRPO, arXiv:2402.03300, 4.1.2).

    The deviation divides by G - 1 (Bessel), and eps is added to it outside the root, both as TRL does. A group of equal
    rewards teaches nothing: its advantages are exactly 0, although the floating-point mean of, say, seven times 0.1
    is not 0.1.

    Args:
        rewards: [P, G], a row for each prompt; the result has the same shape.
        normalize_std: False leaves the differences from the mean unscaled (Dr. GRPO, arXiv:2503.20783).
    """
    if rewards.dim() != 2:
        raise ValueError(f"rewards has shape {list(rewards.shape)}: it must be [prompts, samples of each prompt].")
    if rewards.shape[1] < 2:
        raise ValueError(
            f"A group has {rewards.shape[1]} sample(s): it takes at least 2 to compare. Sample more for each prompt."
        )
    if not rewards.is_floating_point():
        rewards = rewards.float()
    advantages = rewards - rewards.mean(dim=1, keepdim=True)
    if normalize_std:
        variance = advantages.square().sum(dim=1, keepdim=True) / (rewards.shape[1] - 1)
        advantages = advantages / (variance.sqrt() + eps)
    is_equal = (rewards == rewards[:, :1]).all(dim=1, keepdim=True)
    return torch.where(is_equal, torch.zeros_like(advantages), advantages)
