"""Advantages and returns per token, computed from the rewards of samples whichever ranks hold them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lightrl.algorithms.advantages import clip_values, mean_and_std, merged_moments, moments_of, whiten
from lightrl.algorithms.registry import ReturnsTraits, traits_of
from lightrl.algorithms.returns import TokenReturns, TokenRewards, kl_penalised, rewards_at_the_end, rewards_when_earned
from lightrl.comm import Comm
from lightrl.config import PPOAlgorithmConfig
from lightrl.data.packing import Key, TokenValues
from lightrl.metrics import Statistics
from lightrl.records import Experience, Sample
from lightrl.trainers.objective import load_and_try


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTargets:
    """The targets of policy and critic: for each sample, one number per response token."""

    advantages: dict[Key, list[float]]
    returns: dict[Key, list[float]]


def _two_tokens() -> tuple[TokenRewards]:
    zeros, mask, owners = torch.zeros(2), torch.ones(2).bool(), torch.zeros(2).long()
    tokens = TokenRewards(
        rewards=zeros, mask=mask, sequence_index=owners, num_sequences=1, values=zeros, turn_index=owners
    )
    return (tokens,)


class TokenAdvantages:
    """The estimator of a run, tried before anything expensive, and the moments of all rewards and advantages so far."""

    def __init__(self, config: PPOAlgorithmConfig) -> None:
        self._config = config
        self._estimate: Callable[[TokenRewards], TokenReturns] = load_and_try(
            "returns", config.advantage, config.advantage_args, _two_tokens, option="advantage"
        )
        self._uses_critic = traits_of(self._estimate, ReturnsTraits).uses_critic
        if config.truncation == "bootstrap" and not self._uses_critic:
            raise _never_bootstraps(config.advantage)
        self._reward_moments = torch.zeros(3, dtype=torch.float64)
        self._advantage_moments = torch.zeros(3, dtype=torch.float64)

    def state_dict(self) -> dict[str, Any]:
        """Returns the moments, for a checkpoint."""
        return {
            "reward_moments": self._reward_moments.tolist(),
            "advantage_moments": self._advantage_moments.tolist(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the moments of a checkpoint."""
        if "rewards" in state:  # sums of a checkpoint of version 0.1
            state = {f"{name}_moments": _moments_of_sums(*state[f"{name}s"]) for name in ("reward", "advantage")}
        self._reward_moments = torch.tensor(state["reward_moments"], dtype=torch.float64)
        self._advantage_moments = torch.tensor(state["advantage_moments"], dtype=torch.float64)

    def targets(
        self,
        experience: Sequence[Experience],
        values: TokenValues,
        kl: TokenValues | None,
        kl_coef: float,
        comm: Comm,
        statistics: Statistics,
    ) -> TokenTargets:
        """Returns the targets of this rank's samples. Every rank must call it, even without samples.

        Args:
            values: The critic's values by sample, one before each response token and one after the last.
            kl: The KL of each response token by sample, subtracted from its reward; None subtracts nothing.
            kl_coef: Weight of that KL.
            comm: Sums over the ranks.
            statistics: Gets the moments of advantages, returns and values.
        """
        samples = [item.sample for item in experience]
        lengths = [len(sample.response_ids) for sample in samples]
        owners = torch.arange(len(samples)).repeat_interleave(torch.tensor(lengths, dtype=torch.int64))
        mask = torch.tensor([is_own for sample in samples for is_own in sample.is_own], dtype=torch.bool)
        rewards = self._rewards(experience, comm)
        if self._config.reward_at == "turns":
            earned = _flat([_earned(sample) for sample in samples])
            rewards = rewards_when_earned(rewards, earned, mask, owners)
        else:
            rewards = rewards_at_the_end(rewards, mask, owners)
        if kl is not None:
            rewards = kl_penalised(rewards, _flat([kl[sample.key] for sample in samples]), mask, coef=kl_coef)
        old_values = _flat([values[sample.key][:-1] for sample in samples])
        estimated = self._estimate(
            TokenRewards(
                rewards=rewards,
                mask=mask,
                sequence_index=owners,
                num_sequences=len(samples),
                values=old_values,
                final_values=_flat([[self._final_value(sample, values)] for sample in samples]),
                turn_index=torch.tensor([turn for sample in samples for turn in _turns(sample)], dtype=torch.int64),
            )
        )
        if not self._uses_critic:
            estimated = _less_baseline(estimated, old_values, mask)
        _report(estimated.advantages[mask], estimated.returns[mask], old_values[mask], comm, statistics)
        is_trained = torch.tensor([yes for item in experience for yes in item.trained_tokens], dtype=torch.bool)
        advantages = self._normalized(estimated.advantages, mask, is_trained, comm)
        return TokenTargets(
            advantages=_by_sample(samples, lengths, advantages), returns=_by_sample(samples, lengths, estimated.returns)
        )

    def _rewards(self, experience: Sequence[Experience], comm: Comm) -> Tensor:
        """Returns the rewards, [S], normalised and clipped as the options say."""
        rewards = torch.tensor([item.reward for item in experience], dtype=torch.float64)
        if self._config.reward_normalization == "running":
            self._reward_moments = _merged(self._reward_moments, _moments(rewards, comm))
            rewards = whiten(rewards, self._reward_moments)
        return clip_values(rewards, self._config.reward_clip) if self._config.reward_clip else rewards

    def _final_value(self, sample: Sample, values: TokenValues) -> float:
        """Returns the value after the last token: 0 if the response ended, or counts as ended."""
        goes_on = sample.finish_reason != "stop" and self._config.truncation == "bootstrap"
        return values[sample.key][-1] if goes_on else 0.0

    def _normalized(self, advantages: Tensor, mask: Tensor, is_trained: Tensor, comm: Comm) -> Tensor:
        """Returns the advantages, normalised over the tokens that count in a loss."""
        kind, clip = self._config.advantage_normalization, self._config.advantage_clip
        if kind != "none":
            found = _moments(advantages[is_trained], comm)
            if kind == "running":
                found = self._advantage_moments = _merged(self._advantage_moments, found)
            advantages = torch.where(mask, whiten(advantages, found), 0.0)
        return clip_values(advantages, clip) if clip else advantages


def _never_bootstraps(name: str) -> ValueError:
    return ValueError(
        f"--algorithm.truncation bootstrap adds the critic's value after a response that was cut off, which "
        f"--algorithm.advantage {name} does not read. Use gae, or leave it out."
    )


def _turns(sample: Sample) -> list[int]:
    """Returns the turn of each response token; tokens that the policy did not choose belong to the turn before."""
    return [bisect_right(sample.turns, index) for index in range(len(sample.response_ids))]


def _earned(sample: Sample) -> list[float]:
    """Returns each response token's reward: a turn's reward goes to the last token that the policy chose in it."""
    earned, is_own = [0.0] * len(sample.response_ids), sample.is_own
    ends = (*sample.turns[1:], len(sample.response_ids))
    for start, end, reward in zip(sample.turns, ends, sample.turn_rewards, strict=False):
        chosen = [index for index in range(start, end) if is_own[index]]
        if chosen:
            earned[chosen[-1]] = reward
    return earned


def _less_baseline(estimated: TokenReturns, values: Tensor, mask: Tensor) -> TokenReturns:
    """Subtracts the critic's values from the returns of an estimator that does not use a critic."""
    return replace(estimated, advantages=torch.where(mask, estimated.advantages - values, 0.0))


def _moments_of_sums(count: float, total: float, squares: float) -> list[float]:
    mean = total / count if count else 0.0
    return [count, mean, max(0.0, squares - count * mean * mean)]


def _flat(parts: Sequence[Sequence[float]]) -> Tensor:
    """Joins the values as float64, so that the order of samples has no effect after rounding to float32."""
    return torch.tensor([value for part in parts for value in part], dtype=torch.float64)


def _by_sample(samples: Sequence[Sample], lengths: list[int], values: Tensor) -> dict[Key, list[float]]:
    parts = values.split(lengths) if samples else ()
    return {sample.key: part.tolist() for sample, part in zip(samples, parts, strict=True)}


def _moments(values: Tensor, comm: Comm) -> Tensor:
    return merged_moments(comm.all_gather(moments_of(values, torch.ones_like(values))[None]))


def _merged(before: Tensor, now: Tensor) -> Tensor:
    """Returns the run's moments including those of a step, unless one of its values was not finite."""
    return merged_moments(torch.stack([before, now])) if now.isfinite().all() else before


def _report(advantages: Tensor, returns: Tensor, values: Tensor, comm: Comm, statistics: Statistics) -> None:
    """Adds metrics of the numbers before normalisation.

    An explained variance of 1 means that the critic predicted every return; 0, that it knows only their mean.
    """
    parts = {"advantage": advantages, "critic/return": returns, "critic/value": values}
    for name, part in parts.items():
        mean, std = mean_and_std(_moments(part, comm))
        statistics.maximum(f"{name}_mean", mean)
        statistics.maximum(f"{name}_std", std)
    unexplained, total = (mean_and_std(_moments(part, comm))[1] for part in (returns - values, returns))
    statistics.maximum("critic/explained_variance", 1 - (unexplained / total) ** 2 if total else 0.0)
