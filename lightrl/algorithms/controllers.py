"""Coefficients that follow a target. Each is one number, kept and saved by the caller; a step gives the next."""

from __future__ import annotations


def next_kl_coef(coef: float, *, kl: float, target: float, num_samples: int, horizon: int = 10_000) -> float:
    """Larger where the KL is above its target (arXiv:1909.08593, 2.2): coef (1 + e num_samples / horizon).

    e = kl / target - 1, held in [-0.2, 0.2].

    Args:
        kl: measured, over all ranks.
        num_samples: trained on since the last step.
        horizon: samples over which the coefficient can grow by a fifth.
    """
    if target <= 0 or horizon <= 0:
        raise ValueError(f"target is {target} and horizon {horizon}: both must be more than 0.")
    error = min(0.2, max(-0.2, kl / target - 1))
    return coef * (1 + error * num_samples / horizon)


def next_entropy_coef(
    coef: float, *, entropy: float, target: float, step: float = 0.005, highest: float = 1.0
) -> float:
    """Larger by step where the entropy is below its target, smaller above it, in [0, highest] (arXiv:2505.22312)."""
    if entropy == target:
        return coef
    return min(highest, max(0.0, coef + (step if entropy < target else -step)))


def active_entropy_coef(coef: float, *, entropy: float, target: float) -> float:
    """The coefficient that acts: 0 above the target, so that a bonus never drives entropy on (arXiv:2505.22312)."""
    return coef if entropy <= target else 0.0
