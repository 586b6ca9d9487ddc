"""A user's own functions, given by path: each can have every trait, and is treated as a built-in one.

All that a toy estimator or loss needs is in this file.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from made_samples import made_sample
from torch import Tensor

from lightrl.algorithms.advantages import ScoredSamples
from lightrl.algorithms.corrections import Correction, OffPolicyTokens
from lightrl.algorithms.losses import PolicyTokens, TokenLoss, TokenWeights, ppo_clip, token_loss
from lightrl.algorithms.registry import advantage, loss, returns
from lightrl.algorithms.returns import TokenReturns, TokenRewards
from lightrl.algorithms.selection import UpdateTokens
from lightrl.comm import Comm
from lightrl.config import AlgorithmConfig, PPOAlgorithmConfig
from lightrl.data.packing import dummy_batch
from lightrl.metrics import Statistics
from lightrl.records import Experience, PackedBatch, Sample, TokenScores
from lightrl.trainers.objective import PolicyLoss, PolicyObjective
from lightrl.trainers.token_advantages import TokenAdvantages
from lightrl.trainers.token_selection import TokenSelector

HERE = f"{__name__}:"


# ---- The user's functions --------------------------------------------------------------------------------------------


def unmarked(samples: ScoredSamples, *, factor: float = 1.0) -> Tensor:
    return factor * samples.scores


def in_float32(samples: ScoredSamples) -> Tensor:
    same = samples.group_ids[:, None] == samples.group_ids
    return same.float() @ samples.scores


@advantage(whiten=True)
def whitened(samples: ScoredSamples) -> Tensor:
    return 2 * samples.scores


@advantage(needs="greedy_baseline")
def over_greedy(samples: ScoredSamples) -> Tensor:
    assert samples.baselines is not None
    return samples.scores / (1 + samples.baselines)


@advantage(needs=("signal_share",))
def over_share(samples: ScoredSamples) -> Tensor:
    assert samples.signal_share is not None
    return samples.scores / samples.signal_share


@advantage(min_group=3)
def of_three(samples: ScoredSamples) -> Tensor:
    return samples.scores - samples.groups.means(samples.scores)


@advantage(min_group="draws")
def of_draws(samples: ScoredSamples, *, draws: int = 5) -> Tensor:
    return samples.scores / draws


def weighted(tokens: PolicyTokens, *, weight: float = 1.0) -> TokenLoss:
    if weight < 0:
        raise ValueError(f"weight is {weight}: it must be at least 0.")
    terms = -weight * tokens.masked_advantages * tokens.log_ratio.exp()
    return token_loss(terms, tokens.log_ratio, ~tokens.mask, tokens.mask)


def detached(tokens: PolicyTokens) -> TokenLoss:
    return token_loss(-tokens.masked_advantages, tokens.log_ratio, ~tokens.mask, tokens.mask)


def averaged(tokens: PolicyTokens) -> TokenLoss:
    return token_loss(-tokens.log_ratio.exp().mean(), tokens.log_ratio, ~tokens.mask, tokens.mask)


def with_metrics(tokens: PolicyTokens, *, is_per_token: bool = True) -> TokenLoss:
    surprise = -tokens.logprobs if is_per_token else -tokens.logprobs.mean()
    return token_loss(tokens.logprobs, tokens.log_ratio, ~tokens.mask, tokens.mask, surprise=surprise)


def least_likely(tokens: UpdateTokens, *, fraction: float = 0.5) -> Tensor:
    return tokens.top(-tokens.logprobs, fraction)


@loss(selects_tokens=least_likely)
def unselected(tokens: PolicyTokens) -> TokenLoss:
    assert tokens.selected is not None
    return dataclasses.replace(ppo_clip(tokens), terms=torch.where(tokens.selected, 0.0, ppo_clip(tokens).terms))


def half(mask: Tensor, sequence_index: Tensor, num_sequences: int, *, part: float = 2.0) -> TokenWeights:
    return TokenWeights(weights=mask / part, total=mask.sum() / part / part)


def doubled(tokens: OffPolicyTokens, *, by: float = 2.0) -> Correction:
    return Correction(weights=by * tokens.mask.float(), statistics={"mine_sum": tokens.mask.sum()})


@returns(uses_critic=False)
def rewards_alone(tokens: TokenRewards) -> TokenReturns:
    return TokenReturns(advantages=tokens.rewards, returns=tokens.rewards)


def values_alone(tokens: TokenRewards) -> TokenReturns:
    assert tokens.values is not None
    return TokenReturns(advantages=tokens.values, returns=tokens.values)


# ---- Advantages ------------------------------------------------------------------------------------------------------


class Counting(Comm):
    """One process that counts its collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.num_collectives = 0

    def all_reduce(self, data: Any, *rest: Any, **named: Any) -> Any:
        self.num_collectives += 1
        return super().all_reduce(data, *rest, **named)

    def all_gather(self, data: Any) -> Any:
        self.num_collectives += 1
        return super().all_gather(data)


def samples_of(count: int) -> list[Sample]:
    """Two samples of each prompt, of 1, 3, 2, 2, ... tokens."""
    return [
        made_sample(
            position=index // 2,
            sample_index=index % 2,
            response_ids=(5,) * (1, 3, 2, 2)[index % 4],
            sampler_logprobs=(-1.0,) * (1, 3, 2, 2)[index % 4],
        )
        for index in range(count)
    ]


def advantages_of(name: str, baselines: list[float] | None = None, comm: Comm | None = None) -> list[float]:
    objective = PolicyObjective(AlgorithmConfig(advantage=name))
    pairs = zip(samples_of(4), [1.0, 3.0, 2.0, 2.0], strict=True)
    scored = [Experience(sample=sample, reward=reward, advantage=0.0) for sample, reward in pairs]
    experience = objective.advantages(scored, comm or Comm(), baselines)
    return [item.advantage for item in experience]


def test_whitening_is_asked_for_by_a_trait() -> None:
    # Whitening undoes the factor of 2; the numbers are those of reinforce_plus_plus.
    assert advantages_of(HERE + "whitened") == pytest.approx(advantages_of("reinforce_plus_plus"), abs=1e-7)
    assert advantages_of(HERE + "unmarked") == [1.0, 3.0, 2.0, 2.0]


def test_a_greedy_baseline_is_asked_for_by_a_trait() -> None:
    assert PolicyObjective(AlgorithmConfig(advantage=HERE + "over_greedy")).traits.needs == ("greedy_baseline",)
    assert PolicyObjective(AlgorithmConfig(advantage=HERE + "unmarked")).traits.needs == ()
    assert advantages_of(HERE + "over_greedy", [1.0, 1.0, 3.0, 3.0]) == [0.5, 1.5, 0.5, 0.5]


def test_only_estimators_that_ask_for_them_use_collectives() -> None:
    # Half of the samples are in a group with a signal.
    assert advantages_of(HERE + "over_share") == [2.0, 6.0, 4.0, 4.0]
    names = ("grpo", HERE + "unmarked", "gpg", HERE + "over_share", "reinforce_plus_plus", HERE + "whitened")
    counts = []
    for name in names:
        comm = Counting()
        advantages_of(name, comm=comm)
        counts.append(comm.num_collectives)
    assert counts == [0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("name", "group_size", "text"),
    [
        ("grpo", 1, "--group_size is 1: grpo compares the samples of a prompt with each other and needs at least 2"),
        ("lightrl.algorithms.advantages:grpo", 1, "--group_size is 1: lightrl.algorithms.advantages:grpo compares"),
        (HERE + "of_three", 2, "of_three compares the samples of a prompt with each other and needs at least 3"),
        (HERE + "of_draws", 4, "of_draws draws draws=5 of --group_size 4"),
        ("pass_at_k", 3, "pass_at_k draws k=4 of --group_size 3"),
    ],
)
def test_a_group_that_is_too_small_is_refused(name: str, group_size: int, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        PolicyObjective(AlgorithmConfig(advantage=name), group_size=group_size)


def as_a_list(samples: ScoredSamples) -> Any:
    return samples.scores.tolist()


def of_the_batch(samples: ScoredSamples) -> Tensor:
    return samples.scores.mean()


def mean_loss(tokens: PolicyTokens) -> Any:
    return -(tokens.masked_advantages * tokens.log_ratio).mean()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"advantage": HERE + "as_a_list"}, "returned list, and it must return a tensor with one number per sample"),
        (
            {"advantage": HERE + "of_the_batch"},
            r"returned a tensor of shape \[\], and it must return a tensor with one",
        ),
        ({"loss": HERE + "mean_loss"}, r"returned a tensor of shape \[\], and it must return TokenLoss"),
    ],
)
def test_what_a_function_returns_by_mistake_is_told_at_the_start(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        PolicyObjective(AlgorithmConfig(**options), group_size=4)


@pytest.mark.parametrize(
    "name", ["unmarked", "whitened", "over_greedy", "lightrl.algorithms.advantages:reinforce", "reinforce", "remax"]
)
def test_a_group_of_one_is_enough_for_what_compares_nothing(name: str) -> None:
    path = name if name in ("reinforce", "remax") or ":" in name else HERE + name
    objective = PolicyObjective(AlgorithmConfig(advantage=path), group_size=1)
    (alone,) = samples_of(1)
    experience = objective.advantages([Experience(sample=alone, reward=3.0, advantage=0.0)], Comm(), [1.0])
    # Whitened, a sample by itself is at the mean; over_greedy gives 3 / (1 + 1), remax 3 - 1.
    wanted = {"whitened": 0.0, "over_greedy": 1.5, "remax": 2.0}.get(name, 3.0)
    assert [item.advantage for item in experience] == [wanted]


@pytest.mark.parametrize("name", ["reinforce", "reinforce_plus_plus", "remax", "gpg", "pass_at_k"])
def test_a_built_in_function_by_path_is_the_same_as_by_name(name: str) -> None:
    baselines = [1.0, 1.0, 0.5, 0.5] if name == "remax" else None
    path = f"lightrl.algorithms.advantages:{name}"
    assert advantages_of(path, baselines) == advantages_of(name, baselines)


# ---- Losses, aggregations, corrections -------------------------------------------------------------------------------


def batch() -> PackedBatch:
    zeros = torch.zeros(3)
    return dataclasses.replace(
        dummy_batch(temperature=1.0),
        loss_mask=torch.ones(3).bool(),
        advantages=torch.tensor([1.0, 2.0, 4.0]),
        sampler_logprobs=zeros,
        sequence_index=torch.zeros(3).long(),
        old_logprobs=None,
        selected=torch.tensor([False, True, False]),
    )


def loss_of(**algorithm: Any) -> float:
    objective = PolicyLoss(AlgorithmConfig(**algorithm), has_selector=True)
    scores = TokenScores(logprobs=torch.zeros(3), entropy=torch.zeros(3))
    return float(objective.loss(scores, batch(), Statistics()))


def test_own_losses_aggregations_and_corrections_act() -> None:
    assert loss_of() == pytest.approx(-7 / 3)
    assert loss_of(loss=HERE + "weighted", loss_args=("weight=3",)) == pytest.approx(-7)
    assert loss_of(aggregation=HERE + "half") == pytest.approx(-14 / 3)
    assert loss_of(correction=HERE + "doubled") == pytest.approx(-14 / 3)


def test_own_losses_report_metrics() -> None:
    """The mean is over the trained tokens of all micro-batches: the untrained NaN is not read."""
    loss, statistics = PolicyLoss(AlgorithmConfig(loss=HERE + "with_metrics")), Statistics()
    for logprobs, mask in (([-1.0, -3.0, -5.0], [True] * 3), ([-11.0, torch.nan, torch.nan], [True, False, False])):
        micro = dataclasses.replace(batch(), loss_mask=torch.tensor(mask))
        loss.loss(TokenScores(logprobs=torch.tensor(logprobs), entropy=torch.zeros(3)), micro, statistics)
    assert statistics.reduce(Comm())["loss/surprise"] == pytest.approx(5.0)  # (1 + 3 + 5 + 11) / 4


def test_own_losses_select_tokens() -> None:
    assert loss_of(loss=HERE + "unselected") == pytest.approx(-5 / 3)
    config = AlgorithmConfig(loss=HERE + "unselected", selection_args=("fraction=0.25",))
    selector = TokenSelector(config)
    sample = dataclasses.replace(samples_of(1)[0], response_ids=(5,) * 4, sampler_logprobs=(0.0,) * 4)
    logprobs = {(0, 0): [-1.0, -4.0, -2.0, -3.0]}
    experience = [Experience(sample=sample, reward=0.0, advantage=1.0)]
    choice = selector.choose(experience, logprobs, logprobs, seed=0, comm=Comm(), statistics=Statistics())
    assert choice == {"selected": {(0, 0): [False, True, False, False]}}
    with pytest.raises(ValueError, match="needs tokens that are chosen over a whole update"):
        PolicyLoss(config)
    with pytest.raises(ValueError, match="selection_args: fraction is 2"):
        TokenSelector(dataclasses.replace(config, selection_args=("fraction=2",)))


@pytest.mark.parametrize(
    ("algorithm", "text"),
    [
        ({"loss": HERE + "weighted", "loss_args": ("weight=-1",)}, "--algorithm.loss_args: weight is -1"),
        ({"loss": HERE + "weighted", "loss_args": ("height=1",)}, "has no parameter height. It has weight"),
        ({"loss": HERE + "weighted", "clip_low": 0.1}, "has no parameter clip_low. It has weight"),
        (
            {"loss": HERE + "detached"},
            "--algorithm.loss .*detached: its terms have no gradient. Compute them from tokens.l",
        ),
        (
            {"loss": HERE + "averaged"},
            r"--algorithm.loss .*averaged: token_loss\(\) got terms of shape \[\] .* for 2 tok",
        ),
        (
            {"loss": HERE + "with_metrics", "loss_args": ("is_per_token=false",)},
            r"is_clipped of shape \[2\] and surprise of shape \[\] for 2 tokens",
        ),
        ({"aggregation": HERE + "half", "aggregation_args": ("part=x",)}, "--algorithm.aggregation_args: "),
        ({"correction": HERE + "doubled", "correction_args": ("by=x",)}, "--algorithm.correction_args: "),
        ({"advantage": HERE + "unmarked", "advantage_args": ("factor=x",)}, "--algorithm.advantage_args: "),
        ({"advantage": HERE + "half"}, "--algorithm.advantage .*half: "),
        ({"advantage": HERE + "in_float32"}, "--algorithm.advantage .*in_float32: .*same dtype"),
    ],
)
def test_own_functions_are_tried_before_the_run(algorithm: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        PolicyObjective(AlgorithmConfig(**algorithm))


# ---- Returns ---------------------------------------------------------------------------------------------------------


def test_own_returns_say_whether_they_read_a_critic() -> None:
    TokenAdvantages(PPOAlgorithmConfig(advantage=HERE + "values_alone"))
    for name in (HERE + "rewards_alone", "returns_to_go", "lightrl.algorithms.returns:turn_returns"):
        assert not TokenAdvantages(PPOAlgorithmConfig(advantage=name))._uses_critic


def test_no_name_is_special() -> None:
    """The trainers read traits alone: none of these modules spells the name of an algorithm."""
    names = ("remax", "reinforce", "pass_at_k", "clip_cov", "kl_cov", "ppo_clip", "returns_to_go")
    for module in ("objective", "loss_terms", "token_selection", "token_advantages"):
        text = Path(str(sys.modules[f"lightrl.trainers.{module}"].__file__)).read_text()
        assert [name for name in names if name in text] == []
