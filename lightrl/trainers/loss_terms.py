"""Optional parts of the policy's loss. `optional_terms` builds those that a run asks for, in order of action.

A plain run has none: its loss is the policy loss, averaged by the aggregation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from lightrl.algorithms.corrections import Correction, OffPolicyTokens, corrected, far_off_policy
from lightrl.algorithms.entropy import entropy_bonus
from lightrl.algorithms.kl import Estimator, add_kl, distillation_advantages, distillation_terms, kl_terms
from lightrl.algorithms.losses import PolicyTokens, TokenLoss
from lightrl.config import AlgorithmConfig, DistillationConfig
from lightrl.metrics import Statistics
from lightrl.records import PackedBatch, TokenScores


class CurrentCoefficients(Protocol):
    """The coefficients of the current step."""

    kl: float
    entropy: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Everything about a micro-batch that a term may read."""

    tokens: PolicyTokens
    scores: TokenScores
    batch: PackedBatch
    statistics: Statistics


class LossTerm:
    """A part of the loss that changes the policy loss's tokens beforehand, its terms afterwards, or both."""

    def prepare(self, tokens: PolicyTokens, batch: PackedBatch) -> PolicyTokens:
        """Returns the tokens that the policy loss reads."""
        return tokens

    def apply(self, loss: TokenLoss, micro: MicroBatch) -> TokenLoss:
        """Returns the policy loss with changed terms."""
        return loss


class EntropyFraction(LossTerm):
    """Keeps the policy loss only of the tokens of highest entropy, which TokenSelector chooses over the update."""

    def apply(self, loss: TokenLoss, micro: MicroBatch) -> TokenLoss:
        """Sets the terms of all other tokens to 0."""
        return replace(loss, terms=torch.where(_packed(micro.batch.in_policy_loss), loss.terms, 0.0))


class Interpolation(LossTerm):
    """Compares with a proximal policy, between the policy that sampled and the one that is updated."""

    def prepare(self, tokens: PolicyTokens, batch: PackedBatch) -> PolicyTokens:
        """Replaces the logprobs before the update by those of the proximal policy."""
        share = _packed(batch.proximal_share)
        proximal = torch.lerp(batch.sampler_logprobs, tokens.logprobs.detach(), share)
        return replace(tokens, old_logprobs=torch.where(tokens.mask, proximal, 0.0))


class OffPolicyCorrection(LossTerm):
    """Weights the terms by the proximal policy's probability over the engine's, as a correction defines."""

    def __init__(self, correct: Callable[[OffPolicyTokens], Correction]) -> None:
        self._correct = correct

    def apply(self, loss: TokenLoss, micro: MicroBatch) -> TokenLoss:
        """Multiplies the terms by the weights; the metrics describe the ratio before it was capped or rejected."""
        tokens, statistics = micro.tokens, micro.statistics
        correction = self._correct(_off_policy(micro, tokens.old_logprobs))
        count = int(tokens.mask.sum())
        for name, value in correction.statistics.items():
            if name.endswith("_max"):
                statistics.maximum(f"correction/{name}", float(value))
            elif name != "count":
                label = name.removesuffix("_sum").removesuffix("_count")
                statistics.mean(f"correction/{label}", float(value), count)
        return corrected(loss, correction.weights)


class OffPolicyMask(LossTerm):
    """Learns nothing from bad sequences that the policy has moved away from."""

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold

    def apply(self, loss: TokenLoss, micro: MicroBatch) -> TokenLoss:
        """Sets the terms of such sequences to 0; the denominator still counts their tokens."""
        tokens = micro.tokens
        of_policy = _off_policy(micro, tokens.logprobs)
        is_far = far_off_policy(of_policy, tokens.masked_advantages, threshold=self._threshold) & tokens.mask
        micro.statistics.mean("off_policy_masked", int(is_far.sum()), int(tokens.mask.sum()))
        return replace(loss, terms=torch.where(is_far, 0.0, loss.terms))


class KLToReference(LossTerm):
    """Measures the KL to the reference model and adds it to the loss, unless it is part of the rewards."""

    def __init__(
        self, config: AlgorithmConfig, coefficients: CurrentCoefficients, estimate: Estimator, *, in_loss: bool
    ) -> None:
        """Raises ValueError for an estimate without a gradient, which would do nothing in the loss."""
        two = torch.zeros(2, requires_grad=True)
        if in_loss and config.kl_gradient == "own" and not estimate(two, two.detach()).requires_grad:
            raise ValueError(
                f"--algorithm.kl_estimator {config.kl_estimator} has no gradient: let it compute with the policy's "
                "logprobs as they are, or add --algorithm.kl_gradient kl."
            )
        self._config = config
        self._estimate = estimate
        self._coefficients = coefficients
        self._in_loss = in_loss

    def apply(self, loss: TokenLoss, micro: MicroBatch) -> TokenLoss:
        """Adds coefficient x KL to the term of each token."""
        kl = kl_terms(
            policy=micro.scores.logprobs,
            reference=_packed(micro.batch.ref_logprobs),
            mask=micro.tokens.mask,
            kind=self._estimate,
            gradient=self._config.kl_gradient,
            old=micro.tokens.old_logprobs if self._config.kl_weighted else None,
        )
        micro.statistics.mean("kl", float(kl.detach().sum()), 0)  # PolicyLoss counts the tokens
        return replace(loss, terms=add_kl(loss.terms, kl, coef=self._coefficients.kl)) if self._in_loss else loss


class EntropyBonus(LossTerm):
    """Rewards entropy with a coefficient that may follow a target."""

    def __init__(self, coefficients: CurrentCoefficients) -> None:
        self._coefficients = coefficients

    def apply(self, loss: TokenLoss, micro: MicroBatch) -> TokenLoss:
        """Subtracts coefficient x entropy from the term of each token."""
        if not self._coefficients.entropy:
            return loss
        bonus = entropy_bonus(micro.scores.entropy, micro.tokens.mask, coef=self._coefficients.entropy)
        return replace(loss, terms=loss.terms + bonus)


class Distillation(LossTerm):
    """Follows a teacher by the reverse KL, as part of each token's advantage or as a term of the loss."""

    def __init__(self, config: DistillationConfig) -> None:
        self._config = config

    def prepare(self, tokens: PolicyTokens, batch: PackedBatch) -> PolicyTokens:
        """Weights the rewards' advantages and, if distillation is part of them, adds the teacher's for each token."""
        config, advantages = self._config, self._config.reward_weight * tokens.advantages
        if config.kind == "advantage":
            teacher = _packed(batch.teacher_logprobs)
            advantages = advantages + distillation_advantages(
                tokens.old_logprobs, teacher, tokens.mask, coef=config.coef
            )
        return replace(tokens, advantages=advantages)

    def apply(self, loss: TokenLoss, micro: MicroBatch) -> TokenLoss:
        """Measures the reverse KL and, if distillation is a term of the loss, adds it to the terms."""
        tokens, teacher, mask = micro.tokens, _packed(micro.batch.teacher_logprobs), micro.tokens.mask
        distance = torch.where(mask, tokens.logprobs.detach() - teacher, 0.0)
        micro.statistics.mean("distillation/reverse_kl", float(distance.sum()), float(mask.sum()))
        if self._config.kind != "loss":
            return loss
        terms = distillation_terms(tokens.logprobs, teacher, mask, old_logprobs=tokens.old_logprobs)
        return replace(loss, terms=loss.terms + self._config.coef * terms)


def optional_terms(
    config: AlgorithmConfig,
    coefficients: CurrentCoefficients,
    *,
    correct: Callable[[OffPolicyTokens], Correction] | None,
    estimate_kl: Estimator | None,
    kl_in_loss: bool,
    distillation: DistillationConfig | None,
) -> list[LossTerm]:
    """Builds the terms that the options ask for, in the order in which they act."""
    terms: list[LossTerm] = [Interpolation()] if config.proximal == "interpolate" else []
    if config.entropy_fraction < 1:
        terms.append(EntropyFraction())
    if correct is not None:
        terms.append(OffPolicyCorrection(correct))
    if config.off_policy_mask:
        terms.append(OffPolicyMask(config.off_policy_mask))
    if estimate_kl is not None:
        terms.append(KLToReference(config, coefficients, estimate_kl, in_loss=kl_in_loss))
    if config.entropy_coef or config.entropy_target:
        terms.append(EntropyBonus(coefficients))
    if distillation is not None:
        terms.append(Distillation(distillation))
    return terms


def _off_policy(micro: MicroBatch, logprobs: Tensor) -> OffPolicyTokens:
    """Returns what compares a policy's logprobs with those of the engine that sampled."""
    return OffPolicyTokens(
        logprobs=logprobs,
        sampler_logprobs=micro.batch.sampler_logprobs,
        mask=micro.tokens.mask,
        sequence_index=micro.tokens.sequence_index,
        num_sequences=micro.tokens.num_sequences,
    )


def _packed(values: Tensor | None) -> Tensor:
    assert values is not None, "the trainer packs what the terms of its objective read"
    return values
