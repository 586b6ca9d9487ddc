"""Advantages per token through the trainer's own code, against numbers worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from made_samples import made_sample

from lightrl.comm import Comm
from lightrl.config import PPOAlgorithmConfig
from lightrl.metrics import Statistics
from lightrl.records import Experience, Sample
from lightrl.trainers.token_advantages import TokenAdvantages, TokenTargets

# Two samples: rewards 1 and 0.5, three tokens that ended and two that were cut off.
VALUES = {(0, 0): [0.5, 0.25, 0.75, 9.0], (0, 1): [0.2, 0.4, 0.6]}
KL = {(0, 0): [0.1, 0.0, 0.2], (0, 1): [0.3, -0.1]}


def sample(place: int, length: int, finish_reason: Any) -> Sample:
    return made_sample(
        sample_index=place, response_ids=(5,) * length, sampler_logprobs=(-1.0,) * length, finish_reason=finish_reason
    )


def experience(rewards: tuple[float, float] = (1.0, 0.5), finish_reason: str = "length") -> list[Experience]:
    samples = [sample(0, 3, "stop"), sample(1, 2, finish_reason)]
    return [Experience(sample=s, reward=r, advantage=0.0) for s, r in zip(samples, rewards, strict=True)]


def targets(
    kl: Any = None, kl_coef: float = 0.0, finish_reason: str = "length", **options: Any
) -> tuple[TokenTargets, dict[str, float]]:
    statistics = Statistics()
    options = {"advantage_normalization": "none", "advantage_args": ("gamma=0.5", "lam=0.5")} | options
    estimator = TokenAdvantages(PPOAlgorithmConfig(**options))
    found = estimator.targets(experience(finish_reason=finish_reason), VALUES, kl, kl_coef, Comm(), statistics)
    return found, statistics.reduce(SimpleNamespace(all_gather_object=lambda item: [item]))


def near(found: dict[Any, list[float]], first: list[float], second: list[float]) -> None:
    assert found[0, 0] == pytest.approx(first, abs=1e-6)
    assert found[0, 1] == pytest.approx(second, abs=1e-6)


def test_gae_by_hand() -> None:
    found, metrics = targets()
    # gamma = lam = 1/2, the reward at the last token. First sample, from its end (after it nothing comes, whatever
    # the critic says of that state):
    #   d3 = 1 - 0.75 = 0.25; d2 = 0.5 x 0.75 - 0.25 = 0.125; d1 = 0.5 x 0.25 - 0.5 = -0.375
    #   A3 = 0.25; A2 = 0.125 + 0.25 x 0.25 = 0.1875; A1 = -0.375 + 0.25 x 0.1875 = -0.328125
    # Second, cut off but taken as ended: d2 = 0.5 - 0.4 = 0.1; d1 = 0.5 x 0.4 - 0.2 = 0; A1 = 0.25 x 0.1 = 0.025
    near(found.advantages, [-0.328125, 0.1875, 0.25], [0.025, 0.1])
    near(found.returns, [0.171875, 0.4375, 1.0], [0.225, 0.5])
    assert metrics["critic/return_mean"] == pytest.approx(2.334375 / 5, abs=1e-6)
    assert metrics["critic/value_mean"] == pytest.approx(2.1 / 5, abs=1e-6)
    assert metrics["advantage_mean"] == pytest.approx(0.234375 / 5, abs=1e-6)


def test_what_a_tool_wrote_is_no_step_of_the_policy() -> None:
    """A tool wrote the second token of the first sample: the policy's two tokens follow on each other."""
    first, second = experience()
    first = replace(first, sample=replace(first.sample, own=(True, False, True)))
    statistics = Statistics()
    config = PPOAlgorithmConfig(advantage_normalization="none", advantage_args=("gamma=0.5", "lam=0.5"))
    found = TokenAdvantages(config).targets([first, second], VALUES, None, 0.0, Comm(), statistics)
    # d3 = 1 - 0.75 = 0.25; d1 = 0.5 x 0.75 - 0.5 = -0.125; A1 = -0.125 + 0.25 x 0.25 = -0.0625
    near(found.advantages, [-0.0625, 0.0, 0.25], [0.025, 0.1])
    near(found.returns, [0.4375, 0.0, 1.0], [0.225, 0.5])
    metrics = statistics.reduce(SimpleNamespace(all_gather_object=lambda item: [item]))
    assert metrics["critic/value_mean"] == pytest.approx((0.5 + 0.75 + 0.2 + 0.4) / 4, abs=1e-6)
    assert metrics["critic/return_mean"] == pytest.approx((0.4375 + 1.0 + 0.225 + 0.5) / 4, abs=1e-6)
    whitened = TokenAdvantages(PPOAlgorithmConfig(advantage_normalization="whiten"))
    found = whitened.targets([first, second], VALUES, None, 0.0, Comm(), Statistics())
    assert [value == 0 for value in found.advantages[0, 0]] == [False, True, False]


@pytest.mark.parametrize("finish_reason", ["length", "turns", "context"])
def test_a_response_that_was_cut_off_may_go_on(finish_reason: str) -> None:
    found, _ = targets(truncation="bootstrap", finish_reason=finish_reason)
    # Only the second: d2 = 0.5 + 0.5 x 0.6 - 0.4 = 0.4; A1 = 0 + 0.25 x 0.4 = 0.1
    near(found.advantages, [-0.328125, 0.1875, 0.25], [0.1, 0.4])
    near(found.returns, [0.171875, 0.4375, 1.0], [0.3, 0.8])


def test_the_kl_comes_off_the_reward_of_each_token() -> None:
    found, _ = targets(kl=KL, kl_coef=2.0)
    # rewards -0.2, 0, 1 - 0.4 = 0.6 and -0.6, 0.5 + 0.2 = 0.7
    #   d = (-0.575, 0.125, -0.15); A3 = -0.15; A2 = 0.125 - 0.0375 = 0.0875; A1 = -0.575 + 0.021875 = -0.553125
    #   d = (-0.6, 0.3); A1 = -0.6 + 0.075 = -0.525
    near(found.advantages, [-0.553125, 0.0875, -0.15], [-0.525, 0.3])


def test_advantages_are_whitened_over_all_tokens() -> None:
    found, _ = targets(advantage_normalization="whiten")
    plain = [-0.328125, 0.1875, 0.25, 0.025, 0.1]
    mean = sum(plain) / 5  # 0.046875
    std = (sum((value - mean) ** 2 for value in plain) / 5) ** 0.5
    wanted = [(value - mean) / std for value in plain]
    near(found.advantages, wanted[:3], wanted[3:])
    near(found.returns, [0.171875, 0.4375, 1.0], [0.225, 0.5])  # the critic's target stays as it is
    clipped, _ = targets(advantage_normalization="whiten", advantage_clip=0.5)
    near(clipped.advantages, *([max(-0.5, min(0.5, v)) for v in part] for part in (wanted[:3], wanted[3:])))


def test_a_token_that_is_too_old_to_train_on_counts_in_no_mean() -> None:
    first, second = experience()
    aged = replace(first.sample, versions=(4, 5, 6)), replace(second.sample, versions=(5, 5))
    items = [replace(one, sample=sample, min_version=5) for one, sample in zip((first, second), aged, strict=True)]
    config = PPOAlgorithmConfig(advantage_args=("gamma=0.5", "lam=0.5"))
    found = TokenAdvantages(config).targets(items, VALUES, None, 0.0, Comm(), Statistics()).advantages
    # Of the advantages of test_gae_by_hand(), 0.1875, 0.25, 0.025 and 0.1 are trained: mean 0.140625.
    deviation = (sum((value - 0.140625) ** 2 for value in (0.1875, 0.25, 0.025, 0.1)) / 4) ** 0.5
    assert found[0, 0][1:] == pytest.approx([0.046875 / deviation, 0.109375 / deviation], abs=1e-6)
    assert found[0, 1] == pytest.approx([-0.115625 / deviation, -0.040625 / deviation], abs=1e-6)


def test_the_explained_variance() -> None:
    def explained(values: dict[Any, list[float]]) -> float:
        statistics = Statistics()
        options = PPOAlgorithmConfig(advantage_normalization="none")
        TokenAdvantages(options).targets(experience(), values, None, 0.0, Comm(), statistics)
        return statistics.reduce(SimpleNamespace(all_gather_object=lambda item: [item]))["critic/explained_variance"]

    # With gamma = lam = 1 every token's return is its sample's reward: 1 three times and 0.5 twice.
    assert explained({(0, 0): [1.0, 1.0, 1.0, 0.0], (0, 1): [0.5, 0.5, 0.0]}) == pytest.approx(1.0, abs=1e-6)
    assert explained({(0, 0): [0.3, 0.3, 0.3, 0.0], (0, 1): [0.3, 0.3, 0.0]}) == pytest.approx(0.0, abs=1e-6)
    # Half of each difference is left: 1 - (1/2)^2
    assert explained({(0, 0): [0.5, 0.5, 0.5, 0.0], (0, 1): [0.25, 0.25, 0.0]}) == pytest.approx(0.75, abs=1e-6)


def test_rewards_are_measured_by_all_of_the_run() -> None:
    options = PPOAlgorithmConfig(
        reward_normalization="running", advantage_normalization="none", reward_clip=0.9, advantage_args=("gamma=1",)
    )
    estimator = TokenAdvantages(options)
    none = {(0, 0): [0.0] * 4, (0, 1): [0.0] * 3}

    def rewards(found: TokenAdvantages, raw: tuple[float, float]) -> list[float]:
        returns = found.targets(experience(raw), none, None, 0.0, Comm(), Statistics()).returns
        return [returns[0, 0][0], returns[0, 1][0]]

    # mean 2, deviation 1 of (1, 3): -1 and 1, held in 0.9
    assert rewards(estimator, (1.0, 3.0)) == pytest.approx([-0.9, 0.9], abs=1e-6)
    again = TokenAdvantages(options)
    again.load_state_dict(estimator.state_dict())
    for found in (estimator, again):
        # of (1, 3, 2, 4): mean 2.5, variance 1.25: -0.4472136 and 1.3416408, held
        assert rewards(found, (2.0, 4.0)) == pytest.approx([-0.4472136, 0.9], abs=1e-6)


def test_advantages_may_be_measured_by_all_of_the_run() -> None:
    options = PPOAlgorithmConfig(advantage_normalization="running")
    estimator = TokenAdvantages(options)
    none = {(0, 0): [0.0] * 4, (0, 1): [0.0] * 3}

    def first_advantage(first_reward: float = 1.0) -> float:
        found = estimator.targets(experience((first_reward, 0.0)), none, None, 0.0, Comm(), Statistics())
        return found.advantages[0, 0][0]

    # Advantages 1, 1, 1, 0, 0: mean 0.6, deviation sqrt(0.24); twice the same leaves both as they are.
    assert first_advantage() == pytest.approx(0.4 / 0.24**0.5, abs=1e-6)
    assert first_advantage() == pytest.approx(0.4 / 0.24**0.5, abs=1e-6)
    # Ten tokens, six of 1 and four of 0: 6 x 0.4^2 + 4 x 0.6^2 = 2.4
    assert estimator.state_dict()["advantage_moments"] == pytest.approx([10.0, 0.6, 2.4], abs=1e-6)
    # A step of five zeros, which has no deviation of its own: six of 1 and nine of 0 have a mean of 0.4.
    assert first_advantage(0.0) == pytest.approx(-0.4 / 0.24**0.5, abs=1e-6)
    again = TokenAdvantages(options)
    again.load_state_dict(estimator.state_dict())
    assert again.state_dict() == estimator.state_dict()


def test_a_value_that_is_not_finite_stays_in_its_step() -> None:
    estimator = TokenAdvantages(PPOAlgorithmConfig(advantage_normalization="running"))

    def first_advantage(value: float) -> float:
        values = {(0, 0): [0.0, 0.0, value, 0.0], (0, 1): [0.0] * 3}
        found = estimator.targets(experience((1.0, 0.0)), values, None, 0.0, Comm(), Statistics())
        return found.advantages[0, 0][0]

    first_advantage(0.0)
    before = estimator.state_dict()
    first_advantage(math.nan)
    assert estimator.state_dict() == before
    assert first_advantage(0.0) == pytest.approx(0.4 / 0.24**0.5, abs=1e-6)


def test_turn_returns_discount_by_turn_and_subtract_the_critic() -> None:
    """Two turns of the policy around two tokens that it read: one token, then two; the reward 1 is at the end."""
    turned = replace(sample(0, 5, "stop"), own=(True, False, False, True, True), turns=(0, 3))
    estimator = TokenAdvantages(
        PPOAlgorithmConfig(advantage="turn_returns", advantage_args=("gamma=0.5",), advantage_normalization="none")
    )
    values = {(0, 0): [0.2, 9.0, 9.0, 0.75, 0.5, 9.0]}
    item = Experience(sample=turned, reward=1.0, advantage=0.0)
    found = estimator.targets([item], values, None, 0.0, Comm(), Statistics())
    # The second turn has the reward 1, the first 0.5 x 1. Less the critic: 0.5 - 0.2, 1 - 0.75, 1 - 0.5.
    assert found.returns[0, 0] == pytest.approx([0.5, 0.0, 0.0, 1.0, 1.0], abs=1e-6)
    assert found.advantages[0, 0] == pytest.approx([0.3, 0.0, 0.0, 0.25, 0.5], abs=1e-6)
    # Nothing to read between the turns, the second of which begins with the third token.
    item = replace(item, sample=replace(turned, own=(), turns=(0, 2)))
    found = estimator.targets([item], values, None, 0.0, Comm(), Statistics())
    assert found.returns[0, 0] == pytest.approx([0.5, 0.5, 1.0, 1.0, 1.0], abs=1e-6)


def test_a_turn_has_what_it_earned() -> None:
    """Three turns around two tokens that were read; the second is not trained, the third earned nothing."""
    turned = replace(
        sample(0, 6, "stop"),
        own=(True, True, False, False, False, True),
        turns=(0, 3, 5),
        turn_rewards=(2.0, 0.5),
    )

    def returns(turned: Sample, **options: str) -> list[float]:
        values = {(0, 0): [0.0] * (len(turned.response_ids) + 1)}
        config = PPOAlgorithmConfig(
            advantage="returns_to_go", advantage_args=("gamma=0.5",), advantage_normalization="none", **options
        )
        item = Experience(sample=turned, reward=3.0, advantage=0.0)
        return TokenAdvantages(config).targets([item], values, None, 0.0, Comm(), Statistics()).returns[0, 0]

    # The policy's tokens are 0, 1 and 5. Token 1 earned 2, and the last has the rest of 3, the 0.5 of a turn without a
    # trained token among it: 1; 2 + 0.5 x 1 = 2.5; 0.5 x 2.5 = 1.25.
    assert returns(turned, reward_at="turns") == pytest.approx([1.25, 2.5, 0.0, 0.0, 0.0, 1.0], abs=1e-6)
    # All 3 at the end: 3; 1.5; 0.75.
    assert returns(turned) == pytest.approx([0.75, 1.5, 0.0, 0.0, 0.0, 3.0], abs=1e-6)
    # A turn ends where the next one begins. Token 1 earned 2, token 2 earned 0.5, and the last has the rest of 3, 0.5:
    # 0.5; 0.5 + 0.5 x 0.5 = 0.75; 2 + 0.5 x 0.75 = 2.375; 0.5 x 2.375 = 1.1875.
    adjacent = replace(sample(0, 4, "stop"), turns=(0, 2, 3), turn_rewards=(2.0, 0.5))
    assert returns(adjacent, reward_at="turns") == pytest.approx([1.1875, 2.375, 0.75, 0.5], abs=1e-6)


def test_without_a_turn_to_wait_for_returns_to_go_is_gae_with_lam_1() -> None:
    kept, _ = targets(advantage="returns_to_go", advantage_args=("gamma=0.5",))
    gae, _ = targets(advantage_args=("gamma=0.5", "lam=1"))
    for key in kept.advantages:
        assert kept.advantages[key] == pytest.approx(gae.advantages[key], abs=1e-6)


def test_a_rank_without_samples_takes_part() -> None:
    found = TokenAdvantages(PPOAlgorithmConfig()).targets([], {}, {}, 0.1, Comm(), Statistics())
    assert (found.advantages, found.returns) == ({}, {})


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"advantage": "grpo"}, "Unknown returns 'grpo'"),
        ({"advantage_args": ("lamda=1",)}, "The returns 'gae' has no parameter lamda. It has gamma, lam"),
        (
            {"advantage": "returns_to_go", "truncation": "bootstrap"},
            "which --algorithm.advantage returns_to_go does not",
        ),
    ],
)
def test_what_cannot_be_estimated_is_told(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        TokenAdvantages(PPOAlgorithmConfig(**options))


def test_a_checkpoint_that_holds_sums_goes_on() -> None:
    """Of the values 1, 2 and 6: count 3, sum 9, squares 41. So the mean is 3, and they deviate by 4 + 1 + 9 = 14."""
    estimator = TokenAdvantages(PPOAlgorithmConfig())
    estimator.load_state_dict({"rewards": [3.0, 9.0, 41.0], "advantages": [0.0, 0.0, 0.0]})
    assert estimator.state_dict() == {"reward_moments": [3.0, 3.0, 14.0], "advantage_moments": [0.0, 0.0, 0.0]}
