"""What a run optimises, from the names in its config: the loss of a micro-batch, and advantages of scored samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightrl.algorithms.advantages import ScoredSamples, signal_counts
from lightrl.algorithms.aggregation import TokenWeights, mean_loss
from lightrl.algorithms.corrections import OffPolicyTokens, corrected
from lightrl.algorithms.distillation import distillation_advantages, distillation_terms
from lightrl.algorithms.entropy import entropy_bonus
from lightrl.algorithms.kl import kl_terms
from lightrl.algorithms.moments import moment_sums, whiten
from lightrl.algorithms.registry import (
    SELECTING,
    WHITENED,
    load_advantage,
    load_aggregation,
    load_correction,
    load_loss,
    parameters_of,
)
from lightrl.algorithms.tokens import PolicyTokens
from lightrl.comm import Comm
from lightrl.config import AlgorithmConfig, DistillationConfig, named_values
from lightrl.metrics import Statistics
from lightrl.records import Experience, PackedBatch, Sample, TokenScores
from lightrl.rewards.failures import has_reward
from lightrl.trainers.coefficients import Coefficients

GREEDY_BASELINE = "remax"
_DRAWS_FROM_GROUP = "pass_at_k"


class PolicyLoss:
    """Built before anything expensive, so that a wrong name costs nothing."""

    def __init__(
        self,
        config: AlgorithmConfig,
        *,
        kl_in_loss: bool = True,
        distillation: DistillationConfig | None = None,
        selects_tokens: bool = False,
    ) -> None:
        """
        Args:
            kl_in_loss: False leaves the KL to the rewards, and only measures it here.
            distillation: how a teacher is followed; None without one.
            selects_tokens: whether the trainer chooses tokens over a whole update, by a TokenSelector.
        """
        self._config = config
        self._distillation = distillation
        self._kl_in_loss = kl_in_loss
        self.coefficients = Coefficients(config)
        self._policy_loss = load_loss(config.loss, loss_parameters(config))
        aggregation_args = named_values(config.aggregation_args, "algorithm.aggregation_args")
        self._aggregate = load_aggregation(config.aggregation, aggregation_args)
        correction_args = named_values(config.correction_args, "algorithm.correction_args")
        self._correct = None if config.correction == "none" else load_correction(config.correction, correction_args)
        if self._correct is None and correction_args:
            raise ValueError("--algorithm.correction_args are given, but --algorithm.correction is none.")
        _check_together(config, distillation, selects_tokens=selects_tokens)
        self._try_parameters()

    def _try_parameters(self) -> None:
        """Runs the built-in functions on two tokens: a value out of range is told now, not after the first rollout."""
        config, zeros, mask, owners = self._config, torch.zeros(2), torch.ones(2).bool(), torch.zeros(2).long()
        if ":" not in config.loss:
            tokens = PolicyTokens(
                logprobs=zeros,
                old_logprobs=zeros,
                advantages=zeros,
                mask=mask,
                sequence_index=owners,
                num_sequences=1,
                selected=mask,
            )
            with _told_as("algorithm.loss_args"):
                self._policy_loss(tokens)
        if ":" not in config.aggregation:
            with _told_as("algorithm.aggregation_args"):
                self._aggregate(mask, owners, 1)
        if self._correct is not None and ":" not in config.correction:
            sampled = OffPolicyTokens(
                logprobs=zeros, sampler_logprobs=zeros, mask=mask, sequence_index=owners, num_sequences=1
            )
            with _told_as("algorithm.correction_args"):
                self._correct(sampled)

    def weight(self, batch: PackedBatch) -> Tensor:
        """The micro-batch's share of the denominator, for train_batch."""
        return self.token_weights(batch).total

    def token_weights(self, batch: PackedBatch) -> TokenWeights:
        """How the micro-batch's tokens count."""
        return self._aggregate(batch.loss_mask, batch.sequence_index, len(batch.keys))

    def loss(self, scores: TokenScores, batch: PackedBatch, statistics: Statistics) -> Tensor:
        """The mean over the micro-batch; train_batch turns it into the mean over all of them."""
        mask, num_sequences = batch.loss_mask, len(batch.keys)
        old = scores.logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
        policy = self._policy_loss(
            PolicyTokens(
                logprobs=scores.logprobs,
                old_logprobs=old,
                advantages=self._token_advantages(old, batch),
                mask=mask,
                sequence_index=batch.sequence_index,
                num_sequences=num_sequences,
                selected=batch.selected if self._config.loss in SELECTING else None,
            )
        )
        if self._config.entropy_fraction < 1:
            policy = replace(policy, terms=torch.where(_given(batch.in_policy_loss), policy.terms, 0.0))
        count = int(mask.sum())
        statistics.mean("clip_fraction", float(policy.is_clipped.sum()), count)
        statistics.mean("ratio/mean", float(policy.ratio.sum()), count)
        statistics.highest("ratio/max", float(policy.ratio.max()) if policy.ratio.numel() else 0.0)
        if self._correct is not None:
            off_policy = OffPolicyTokens(
                logprobs=old,
                sampler_logprobs=batch.sampler_logprobs,
                mask=mask,
                sequence_index=batch.sequence_index,
                num_sequences=num_sequences,
            )
            correction = self._correct(off_policy)
            policy = corrected(policy, correction.weights)
            _count_correction(correction.statistics, statistics, count)
        kl = self._kl(scores, batch)
        statistics.mean("kl", float(kl.detach().sum()), count)
        statistics.mean("entropy", float(torch.where(mask, scores.entropy.detach(), 0.0).sum()), count)
        terms = policy.terms + self.coefficients.kl * kl if self._kl_in_loss else policy.terms
        if self.coefficients.entropy:
            terms = terms + entropy_bonus(scores.entropy, mask, coef=self.coefficients.entropy)
        if self._distillation is not None:
            terms = terms + self._distillation_terms(scores, old, batch, statistics)
        return mean_loss(terms, self.token_weights(batch))

    def _token_advantages(self, old: Tensor, batch: PackedBatch) -> Tensor:
        """Those of the rewards, and what the teacher thinks of each token."""
        teaching = self._distillation
        if teaching is None:
            return batch.advantages
        advantages = teaching.reward_weight * batch.advantages
        if teaching.kind == "advantage":
            teacher = _given(batch.teacher_logprobs)
            advantages = advantages + distillation_advantages(old, teacher, batch.loss_mask, coef=teaching.coef)
        return advantages

    def _distillation_terms(
        self, scores: TokenScores, old: Tensor, batch: PackedBatch, statistics: Statistics
    ) -> Tensor:
        """The reverse KL to the teacher as a term of the loss, 0 where it is in the advantages."""
        teaching, teacher, mask = self._distillation, _given(batch.teacher_logprobs), batch.loss_mask
        assert teaching is not None
        distance = torch.where(mask, scores.logprobs.detach() - teacher, 0.0)
        statistics.mean("distillation/reverse_kl", float(distance.sum()), float(mask.sum()))
        if teaching.kind != "loss":
            return torch.zeros_like(distance)
        return teaching.coef * distillation_terms(scores.logprobs, teacher, mask, old_logprobs=old)

    def _kl(self, scores: TokenScores, batch: PackedBatch) -> Tensor:
        if batch.ref_logprobs is None or self._config.kl_coef == 0:
            return torch.zeros_like(scores.logprobs)
        return kl_terms(
            policy=scores.logprobs,
            reference=batch.ref_logprobs,
            mask=batch.loss_mask,
            kind=self._config.kl_estimator,
            gradient=self._config.kl_gradient,
        )


class PolicyObjective(PolicyLoss):
    """The loss, and from a sample's reward to its advantage."""

    def __init__(
        self,
        config: AlgorithmConfig,
        *,
        group_size: int | None = None,
        distillation: DistillationConfig | None = None,
        selects_tokens: bool = False,
    ) -> None:
        """group_size: samples of each prompt, to compare with what the advantages need; None compares nothing."""
        super().__init__(config, distillation=distillation, selects_tokens=selects_tokens)
        self._estimate = load_advantage(
            config.advantage, named_values(config.advantage_args, "algorithm.advantage_args")
        )
        self._try_advantages(group_size)

    def _try_advantages(self, group_size: int | None) -> None:
        if ":" in self._config.advantage:
            return
        two = torch.tensor([0.0, 1.0])
        samples = ScoredSamples(
            rewards=two, group_ids=torch.zeros(2).long(), lengths=torch.ones(2), baselines=two, signal_share=1.0
        )
        with _told_as("algorithm.advantage_args"):
            self._estimate(samples)
        if group_size is not None and self._config.advantage == _DRAWS_FROM_GROUP:
            k = parameters_of(self._estimate)["k"]
            if k > group_size:
                raise ValueError(
                    f"--algorithm.advantage pass_at_k draws k={k} of --group_size {group_size}: give at least {k} "
                    f"samples, or a smaller k by --algorithm.advantage_args."
                )

    @property
    def needs_greedy_baseline(self) -> bool:
        """Whether advantages() must be given the reward of a greedy response to each prompt."""
        return self._config.advantage == GREEDY_BASELINE

    def advantages(
        self,
        samples: Sequence[Sample],
        rewards: Sequence[float],
        comm: Comm,
        baselines: Sequence[float] | None = None,
        *,
        shaping: Sequence[float] | None = None,
        is_trained: Sequence[bool] | None = None,
    ) -> list[Experience]:
        """One for each of this rank's samples that has a reward. Groups are whole here; every rank calls it, with no
        samples too.

        Args:
            shaping: to add to each reward; None adds nothing.
            is_trained: False for samples whose tokens count in no loss. Their rewards still count in their group's
                mean. None trains all.
        """
        places = [i for i in range(len(samples)) if has_reward(rewards[i]) and has_reward((baselines or rewards)[i])]
        samples, rewards = [samples[i] for i in places], [rewards[i] for i in places]
        baselines = None if baselines is None else [baselines[i] for i in places]
        shaping = [0.0 if shaping is None else shaping[i] for i in places]
        is_trained = [is_trained is None or is_trained[i] for i in places]
        lengths = torch.tensor(
            [len(sample.response_ids) * trained for sample, trained in zip(samples, is_trained, strict=True)],
            dtype=torch.float64,
        )
        shaped = [reward + extra for reward, extra in zip(rewards, shaping, strict=True)]
        scored = ScoredSamples(
            rewards=torch.tensor(shaped, dtype=torch.float64),
            group_ids=torch.tensor([sample.position for sample in samples], dtype=torch.int64),
            lengths=lengths,
            baselines=None if baselines is None else torch.tensor(baselines, dtype=torch.float64),
            signal_share=_signal_share(samples, shaped, comm),
        )
        values = self._estimate(scored).double() if samples else torch.zeros(0, dtype=torch.float64)
        if self._config.advantage in WHITENED:
            values = whiten(values, comm.all_reduce(moment_sums(values, lengths), "sum"))
        return [
            Experience(sample=sample, reward=reward, advantage=advantage, shaping=extra, is_trained=trained)
            for sample, reward, advantage, extra, trained in zip(
                samples, rewards, values.tolist(), shaping, is_trained, strict=True
            )
        ]


@contextmanager
def _told_as(option: str) -> Iterator[None]:
    """A parameter that the function cannot take, with the option that gave it."""
    try:
        yield
    except (ValueError, TypeError, ZeroDivisionError) as error:
        raise ValueError(f"--{option}: {error}") from error


def loss_parameters(config: AlgorithmConfig) -> dict[str, Any]:
    """Returns the parameters of --algorithm.loss: loss_args, and the clip range where one is given."""
    parameters = named_values(config.loss_args, "algorithm.loss_args")
    for name, bound in (("clip_low", config.clip_low), ("clip_high", config.clip_high)):
        if bound is None:
            continue
        if name in parameters:
            raise ValueError(
                f"--algorithm.{name} {bound} and --algorithm.loss_args {name}={parameters[name]} set the same bound: "
                "give one of them."
            )
        parameters[name] = bound
    return parameters


def _check_together(config: AlgorithmConfig, distillation: DistillationConfig | None, *, selects_tokens: bool) -> None:
    """What is right by itself but not beside the rest."""
    if config.correction != "none" and config.old_logprobs == "engine":
        raise ValueError(
            f"--algorithm.correction {config.correction} weighs by the trainer's probability over the engine's, "
            "which --algorithm.old_logprobs engine puts into the ratio already. Use one of the two."
        )
    if not selects_tokens and (config.loss in SELECTING or config.selection_args or config.entropy_fraction != 1):
        raise ValueError(
            f"--algorithm.loss {config.loss}, selection_args {list(config.selection_args)} and entropy_fraction "
            f"{config.entropy_fraction}: one of them needs tokens that are chosen over a whole update, which this "
            "trainer does not do; train_grpo does."
        )
    if distillation is not None and distillation.kind == "advantage" and config.loss in SELECTING:
        raise ValueError(
            f"--algorithm.loss {config.loss} selects tokens by the advantages of their rewards, to which "
            "--distillation.kind advantage adds. Give --distillation.kind loss."
        )


def _given(values: Tensor | None) -> Tensor:
    assert values is not None, "the trainer packs what the objective's options need"
    return values


def _signal_share(samples: Sequence[Sample], rewards: Sequence[float], comm: Comm) -> float:
    """The share of all ranks' samples whose group has unequal rewards."""
    counts = torch.zeros(2, dtype=torch.float64)
    if samples:
        group_ids = torch.tensor([sample.position for sample in samples], dtype=torch.int64)
        counts = signal_counts(ScoredSamples(rewards=torch.tensor(rewards, dtype=torch.float64), group_ids=group_ids))
    with_signal, total = comm.all_reduce(counts, "sum").tolist()
    return with_signal / total if total else 0.0


def _count_correction(found: dict[str, Tensor], statistics: Statistics, count: int) -> None:
    """Of the ratio trainer / engine before it was capped or rejected."""
    for name, value in found.items():
        if name.endswith("_max"):
            statistics.highest(f"correction/{name}", float(value))
        elif name != "count":
            statistics.mean(f"correction/{name.removesuffix('_sum').removesuffix('_count')}", float(value), count)
