from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from packed_tokens import sequence_index_of
from torch import Tensor
from torch.testing import assert_close

from lightrl.algorithms.returns import (
    TokenRewards,
    discounted_sums,
    gae,
    kl_penalised,
    returns_to_go,
    rewards_at_the_end,
    rewards_when_earned,
    turn_returns,
)


def rewards_of(
    rewards: list[float],
    *,
    lengths: list[int] | None = None,
    mask: list[bool] | None = None,
    values: list[float] | None = None,
    final_values: list[float] | None = None,
    turns: list[int] | None = None,
) -> TokenRewards:
    lengths = [len(rewards)] if lengths is None else lengths
    return TokenRewards(
        rewards=torch.tensor(rewards),
        mask=torch.tensor([True] * len(rewards) if mask is None else mask, dtype=torch.bool),
        sequence_index=sequence_index_of(lengths),
        num_sequences=len(lengths),
        values=None if values is None else torch.tensor(values),
        final_values=None if final_values is None else torch.tensor(final_values),
        turn_index=None if turns is None else torch.tensor(turns),
    )


def close(found: Tensor, expected: list[float]) -> None:
    assert_close(found, torch.tensor(expected), atol=1e-6, rtol=0)


def test_gae_of_a_terminated_sequence() -> None:
    # gamma 0.9, lam 0.5; rewards 0, 0, 1; values 0.5, 0.4, 0.8
    # d3 = 1 - 0.8 = 0.2; d2 = 0.72 - 0.4 = 0.32; d1 = 0.36 - 0.5 = -0.14
    # A3 = 0.2; A2 = 0.32 + 0.45 x 0.2 = 0.41; A1 = -0.14 + 0.45 x 0.41 = 0.0445
    found = gae(rewards_of([0.0, 0.0, 1.0], values=[0.5, 0.4, 0.8]), gamma=0.9, lam=0.5)
    close(found.advantages, [0.0445, 0.41, 0.2])
    close(found.returns, [0.5445, 0.81, 1.0])


def test_gae_of_a_sequence_that_was_cut_off_goes_on_with_the_value_behind_it() -> None:
    # d3 = 1 + 0.9 x 2 - 0.8 = 2.0; A2 = 0.32 + 0.9 = 1.22; A1 = -0.14 + 0.45 x 1.22 = 0.409
    tokens = rewards_of([0.0, 0.0, 1.0], values=[0.5, 0.4, 0.8], final_values=[2.0])
    close(gae(tokens, gamma=0.9, lam=0.5).advantages, [0.409, 1.22, 2.0])


def test_gae_leaves_masked_tokens_out() -> None:
    # The first test with a tool's token between the first and the second, of which nothing is read.
    nan = math.nan
    tokens = rewards_of([0.0, nan, 0.0, 1.0], values=[0.5, nan, 0.4, 0.8], mask=[True, False, True, True])
    found = gae(tokens, gamma=0.9, lam=0.5)
    close(found.advantages, [0.0445, 0.0, 0.41, 0.2])
    close(found.returns, [0.5445, 0.0, 0.81, 1.0])


def test_sequences_of_a_pack_do_not_touch() -> None:
    # The first test, then one token of reward 3 and value 1 that was cut off before a value of 10: 3 + 9 - 1
    tokens = rewards_of([0.0, 0.0, 1.0, 3.0], lengths=[3, 1], values=[0.5, 0.4, 0.8, 1.0], final_values=[0.0, 10.0])
    close(gae(tokens, gamma=0.9, lam=0.5).advantages, [0.0445, 0.41, 0.2, 11.0])


def test_gae_at_the_ends_of_lambda() -> None:
    tokens = rewards_of([1.0, 2.0], values=[0.5, 4.0])
    close(gae(tokens, lam=0.0).advantages, [4.5, -2.0])  # the deltas: 1 + 4 - 0.5, 2 - 4
    close(gae(tokens, lam=1.0).advantages, [2.5, -2.0])  # returns minus values: 3 - 0.5, 2 - 4


@pytest.mark.parametrize("estimator", [gae, returns_to_go, turn_returns])
def test_nothing_that_comes_in_gets_a_gradient(estimator) -> None:  # type: ignore[no-untyped-def]
    for name in ("rewards", "values", "final_values"):
        tokens = rewards_of([1.0, 2.0], values=[0.5, 4.0], final_values=[1.0], turns=[0, 0])
        found = estimator(dataclasses.replace(tokens, **{name: getattr(tokens, name).requires_grad_()}))
        assert not found.advantages.requires_grad
        assert not found.returns.requires_grad


def test_gae_without_values_asks_for_them() -> None:
    with pytest.raises(ValueError, match=r"gae needs the critic's values"):
        gae(rewards_of([1.0]))


@pytest.mark.parametrize("estimator", [gae, returns_to_go, turn_returns])
def test_nothing_trained_and_nothing_at_all(estimator) -> None:  # type: ignore[no-untyped-def]
    nothing = rewards_of([math.nan], values=[math.nan], mask=[False], turns=[0])
    close(estimator(nothing).advantages, [0.0])
    empty = rewards_of([], lengths=[], values=[], turns=[])
    assert estimator(empty).advantages.shape == (0,)


def test_returns_to_go_by_hand() -> None:
    # 4; 2 + 0.5 x 4 = 4; 1 + 0.5 x 4 = 3; and the next sequence: 8
    tokens = rewards_of([1.0, 2.0, 4.0, 8.0], lengths=[3, 1])
    close(returns_to_go(tokens, gamma=0.5).advantages, [3.0, 4.0, 4.0, 8.0])
    close(returns_to_go(tokens).returns, [7.0, 6.0, 4.0, 8.0])


def test_a_later_sequence_of_several_tokens() -> None:
    # 8; 2 + 0.5 x 4 = 4, 4
    close(returns_to_go(rewards_of([8.0, 2.0, 4.0], lengths=[1, 2]), gamma=0.5).advantages, [8.0, 4.0, 4.0])


def test_what_tokens_earned_and_the_rest() -> None:
    # The first sample has 3, of which its first token earned 2 and an untrained one 5: the last trained one has the
    # rest, 3 - 2. The second earned nothing by token and has its 7 at the end; the third has no trained token.
    found = rewards_when_earned(
        torch.tensor([3.0, 7.0, 9.0]),
        torch.tensor([2.0, 5.0, 0.0, 0.0, 0.0, 4.0]),
        torch.tensor([True, False, True, True, True, False]),
        torch.tensor([0, 0, 0, 1, 1, 2]),
    )
    close(found, [2.0, 0.0, 1.0, 0.0, 7.0, 0.0])


def test_turn_returns_discount_by_turn() -> None:
    # Turn 0: 1 + 2; turn 1 (after a masked tool result): 4. Turn 0 gets 3 + 0.5 x 4 = 5. Then one turn of 7.
    tokens = rewards_of(
        [1.0, 2.0, 99.0, 0.0, 4.0, 7.0],
        lengths=[5, 1],
        turns=[0, 0, 0, 1, 1, 0],
        mask=[True, True, False, True, True, True],
    )
    close(turn_returns(tokens, gamma=0.5).advantages, [5.0, 5.0, 0.0, 4.0, 4.0, 7.0])


def test_turn_returns_need_turns() -> None:
    with pytest.raises(ValueError, match="turn_returns needs TokenRewards"):
        turn_returns(rewards_of([1.0]))


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 31, 32, 33])
def test_the_doubling_steps_are_the_plain_recursion(length: int) -> None:
    generator = torch.Generator().manual_seed(length)
    values, decay = (torch.rand(length, generator=generator, dtype=torch.float64) for _ in range(2))
    decay[length // 2] = 0.0
    decay[-1] = 0.0
    expected, following = torch.zeros(length, dtype=torch.float64), 0.0
    for t in reversed(range(length)):
        following = values[t].item() + decay[t].item() * following
        expected[t] = following
    assert_close(discounted_sums(values, decay), expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("estimator", [gae, returns_to_go, turn_returns])
def test_a_long_response_in_float64_keeps_its_digits(estimator) -> None:  # type: ignore[no-untyped-def]
    # 0.999 in float32 is 0.99900001287...: over 20,000 tokens its powers miss the sums by more than 1e-6.
    length, gamma = 20_000, 0.999
    rewards = torch.rand(length, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    tokens = TokenRewards(
        rewards=rewards,
        mask=torch.ones(length, dtype=torch.bool),
        sequence_index=torch.zeros(length, dtype=torch.int64),
        num_sequences=1,
        values=torch.zeros(length, dtype=torch.float64),  # so that GAE at lam 1 is the discounted sum as well
        turn_index=torch.arange(length),  # a turn for each token
    )
    expected, following = [0.0] * length, 0.0
    for t, reward in reversed(list(enumerate(rewards.tolist()))):
        expected[t] = following = reward + gamma * following
    found = estimator(tokens, gamma=gamma).advantages
    assert_close(found, torch.tensor(expected, dtype=torch.float64), atol=1e-9, rtol=0)


def test_a_pack_out_of_order_is_refused() -> None:
    with pytest.raises(ValueError, match="sequence_index must ascend"):
        TokenRewards(
            rewards=torch.zeros(2),
            mask=torch.ones(2, dtype=torch.bool),
            sequence_index=torch.tensor([1, 0]),
            num_sequences=2,
        )


def test_final_values_are_one_per_sequence() -> None:
    with pytest.raises(ValueError, match=r"final_values has shape \[2\]: it must be \[num_sequences\]"):
        rewards_of([1.0], final_values=[0.0, 0.0])


def test_a_reward_stands_at_the_last_trained_token() -> None:
    # The second sequence trains nothing, the third ends in a masked token.
    mask = torch.tensor([True, True, False, True, True, False])
    found = rewards_at_the_end(torch.tensor([5.0, 6.0, 7.0]), mask, sequence_index_of([2, 1, 3]))
    assert found.tolist() == [0, 5, 0, 0, 7, 0]


def test_no_trained_token_has_no_place_for_a_reward() -> None:
    mask = torch.tensor([False])
    assert rewards_at_the_end(torch.tensor([5.0]), mask, torch.tensor([0])).tolist() == [0]


def test_the_kl_is_taken_off_the_reward() -> None:
    # 1 - 0.5 x 0.4; 0 - 0.5 x -0.2; the masked one is not read
    rewards, kl = torch.tensor([1.0, 0.0, math.nan]), torch.tensor([0.4, -0.2, math.nan], requires_grad=True)
    mask = torch.tensor([True, True, False])
    found = kl_penalised(rewards, kl, mask, coef=0.5)
    assert_close(found, torch.tensor([0.8, 0.1, 0.0]), atol=1e-6, rtol=0)
    assert not found.requires_grad
