from __future__ import annotations

import math

import pytest
import torch
from torch.testing import assert_close

from lightrl.algorithms.advantages import (
    Component,
    ScoredSamples,
    clip_values,
    cpgd,
    dr_grpo,
    gdpo,
    gpg,
    groups_of,
    grpo,
    mean_and_std,
    merged_moments,
    moments_of,
    opo,
    overlong_penalty,
    pass_at_k,
    reinforce,
    reinforce_plus_plus_baseline,
    remax,
    rloo,
    signal_counts,
    whiten,
)


def grpo_of_rows(rewards: torch.Tensor, *, normalize_std: bool = True, eps: float = 1e-4) -> torch.Tensor:
    """grpo of rewards in rows, one for each prompt; the result has the same shape."""
    group_ids = torch.arange(len(rewards)).repeat_interleave(rewards.shape[1])
    samples = ScoredSamples(rewards=rewards.reshape(-1), group_ids=group_ids)
    return grpo(samples, normalize_std=normalize_std, eps=eps).reshape(rewards.shape)


def test_two_groups_by_hand() -> None:
    # Row 1: mean 0.25; deviations .75, -.25, -.25, -.25; squares .5625 + 3 * .0625 = .75; / 3 = .25; std 0.5.
    #   0.75 / 0.5001 = 1.4997001, -0.25 / 0.5001 = -0.4999000
    # Row 2: mean 2; deviations -2, -1, 0, 3; squares 4 + 1 + 0 + 9 = 14; / 3 = 4.6666667; std 2.1602469.
    #   over 2.1603469: -0.9257772, -0.4628886, 0, 1.3886659
    advantages = grpo_of_rows(torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 2.0, 5.0]]))
    expected = torch.tensor([[1.4997001, -0.4999000, -0.4999000, -0.4999000], [-0.9257772, -0.4628886, 0.0, 1.3886659]])
    assert_close(advantages, expected, atol=1e-6, rtol=0)


def test_without_std_only_the_mean_is_taken_off() -> None:
    # mean 0.25
    advantages = grpo_of_rows(torch.tensor([[1.0, 0.0, 0.0, 0.0]]), normalize_std=False)
    assert_close(advantages, torch.tensor([[0.75, -0.25, -0.25, -0.25]]), atol=1e-6, rtol=0)


def test_eps_is_added_to_the_deviation() -> None:
    # mean 1, deviations -1 and 1, std sqrt(2 / 1) = 1.4142136; over 1.4142136 + 1 = 2.4142136: 0.4142136
    advantages = grpo_of_rows(torch.tensor([[0.0, 2.0]]), eps=1.0)
    assert_close(advantages, torch.tensor([[-0.4142136, 0.4142136]]), atol=1e-6, rtol=0)


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, -0.7, 1e6 + 0.1])
@pytest.mark.parametrize("group_size", [2, 3, 7, 8, 10])
@pytest.mark.parametrize("normalize_std", [True, False])
def test_equal_rewards_give_exactly_zero(reward: float, group_size: int, normalize_std: bool) -> None:
    advantages = grpo_of_rows(torch.full((2, group_size), reward), normalize_std=normalize_std)
    assert (advantages == 0).all()


def test_an_equal_group_leaves_its_neighbour_alone() -> None:
    # Row 2: mean 0.5, std sqrt(0.5) = 0.7071068; 0.5 / 0.7072068 = 0.7070068
    advantages = grpo_of_rows(torch.tensor([[0.1, 0.1], [0.0, 1.0]]))
    assert_close(advantages, torch.tensor([[0.0, 0.0], [-0.7070068, 0.7070068]]), atol=1e-6, rtol=0)


def test_integer_rewards_become_float() -> None:
    assert grpo_of_rows(torch.tensor([[0, 1]])).dtype == torch.float32


def test_no_prompts_give_no_advantages() -> None:
    assert grpo_of_rows(torch.zeros(0, 4)).shape == (0, 4)


# Three prompts in mixed order. Group 5: rewards 1, 0, 5 (mean 2); group 9: 2, 2; group 1: one sample, 3.
IDS = torch.tensor([5, 9, 5, 1, 5, 9])
REWARDS = torch.tensor([1.0, 2.0, 0.0, 3.0, 5.0, 2.0])
LENGTHS = torch.tensor([2, 4, 1, 3, 1, 4])
NAN = math.nan  # the reward does not apply
COMPONENTS = {
    "a": Component(REWARDS, 2.0),
    "b": Component(torch.tensor([NAN, 0.0, 1.0, 5.0, 0.0, 1.0]), -1.0),
    "c": Component(torch.full((6,), NAN), 1.0),
}
WHOLE = ScoredSamples(
    rewards=REWARDS,
    group_ids=IDS,
    lengths=LENGTHS,
    baselines=REWARDS - 1,
    signal_share=0.5,
    components=COMPONENTS,
)


@pytest.mark.parametrize(
    ("estimator", "parameters", "expected"),
    [
        # Deviations -1, -2, 3; variance 14 / 2 = 7, deviation 2.6457513, + 0.0001
        (grpo, {}, [-0.3779502, 0, -0.7559003, 0, 1.1338505, 0]),
        (grpo, {"eps": 0.0}, [-0.3779645, 0, -0.7559289, 0, 1.1338934, 0]),
        (dr_grpo, {}, [-1, 0, -2, 0, 3, 0]),
        # Minus the mean of the two others: 1 - 2.5, 0 - 3, 5 - 0.5
        (rloo, {}, [-1.5, 0, -3, 0, 4.5, 0]),
        (reinforce, {}, [1, 2, 0, 3, 5, 2]),
        (reinforce_plus_plus_baseline, {}, [-1, 0, -2, 0, 3, 0]),
        (remax, {}, [1, 1, 1, 1, 1, 1]),
        # Baseline (2 x 1 + 1 x 0 + 1 x 5) / 4 = 1.75
        (opo, {}, [-0.75, 0, -1.75, 0, 3.25, 0]),
        # dr_grpo / (2 x 0.5), and / 0.5
        (gpg, {"norm": 2.0}, [-1, 0, -2, 0, 3, 0]),
        (gpg, {}, [-2, 0, -4, 0, 6, 0]),
        (cpgd, {"weight": "equal"}, [-1, 0, -2, 0, 3, 0]),
        (cpgd, {"weight": "std"}, [-0.3779502, 0, -0.7559003, 0, 1.1338505, 0]),
        (cpgd, {"weight": "signal"}, [-2, 0, -4, 0, 6, 0]),  # 1 / 0.5
        (cpgd, {"weight": "signal", "max_weight": 1.5}, [-1.5, 0, -3, 0, 4.5, 0]),
        # a: 2 x grpo of the rewards. b: deviations 0.5 and -0.5 of the two samples that it applies to in group 5, and
        # -0.5 and 0.5 in group 9, over 0.7071068 + 0.0001: 0.7070068, times -1. One sample alone gives 0.
        (gdpo, {}, [-0.7559004, 0.7070068, -2.2188074, 0, 2.9747078, -0.7070068]),
        # a: 2 x (-1, -2, 3) / 3.6457513; b: -0.5 / 1.7071068 = -0.2928932
        (gdpo, {"eps": 1.0}, [-0.5485838, 0.2928932, -1.3900608, 0, 1.9386446, -0.2928932]),
    ],
)
def test_estimators_by_hand(estimator, parameters, expected) -> None:  # type: ignore[no-untyped-def]
    found = estimator(WHOLE, **parameters)
    assert_close(found, torch.tensor(expected, dtype=torch.float32), atol=1e-6, rtol=0)


COMPARING = [grpo, dr_grpo, rloo, opo, gpg, cpgd, reinforce_plus_plus_baseline]


@pytest.mark.parametrize("estimator", COMPARING)
@pytest.mark.parametrize("size", [1, 2, 7, 10])
@pytest.mark.parametrize("reward", [0.0, 0.1, -0.7, 1e6 + 0.1])
def test_equal_rewards_give_exactly_zero_to_any_group(estimator, size: int, reward: float) -> None:  # type: ignore[no-untyped-def]
    samples = ScoredSamples(
        rewards=torch.full((size,), reward),
        group_ids=torch.zeros(size, dtype=torch.int64),
        lengths=torch.arange(size) + 1,
        signal_share=0.0,
    )
    assert (estimator(samples) == 0).all()


@pytest.mark.parametrize("estimator", [*COMPARING, reinforce, remax])
def test_the_order_of_samples_changes_nothing(estimator) -> None:  # type: ignore[no-untyped-def]
    order = torch.tensor([4, 1, 0, 5, 3, 2])
    mixed = ScoredSamples(
        rewards=REWARDS[order],
        group_ids=IDS[order],
        lengths=LENGTHS[order],
        baselines=REWARDS[order] - 1,
        signal_share=0.5,
    )
    assert torch.equal(estimator(mixed), estimator(WHOLE)[order])


def test_sums_that_are_equal_hide_no_reward() -> None:
    """(1, 0) and (0, 1) add up to the same: grpo learns nothing, and gdpo the reward of the larger weight."""
    ids = torch.zeros(2, dtype=torch.int64)
    first = torch.tensor([1.0, 0.0])
    parts = {"a": Component(first, 1.0), "b": Component(10 * (1 - first), 0.1)}
    samples = ScoredSamples(rewards=torch.ones(2), group_ids=ids, components=parts)
    assert grpo(samples).tolist() == [0, 0]
    # a: 0.5 / 0.7072068 = 0.7070068. b: 0.1 x 5 / (7.0710678 + 0.0001) = 0.0707097, with the other sign
    assert_close(gdpo(samples), torch.tensor([0.6362971, -0.6362971]), atol=1e-6, rtol=0)


def test_a_table_and_ids_agree() -> None:
    table = torch.tensor([[1.0, 0.0, 0.0], [0.3, 0.1, 5.0]])
    samples = ScoredSamples(rewards=table.reshape(-1), group_ids=torch.tensor([0, 0, 0, 1, 1, 1]))
    assert torch.equal(grpo_of_rows(table), grpo(samples).reshape(2, 3))


def test_the_leave_one_out_factor() -> None:
    # G / (G - 1) = 3 / 2 times the difference from the mean
    assert_close(rloo(WHOLE), 1.5 * dr_grpo(WHOLE), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("rewards", "k", "expected"),
    [
        # N 4, 3 wrong, k 2: failure C(3,2) / C(4,2) = 1/2, deviation 1/2; right: 1/2 / (1/2) = 1;
        # wrong: (1/2 - C(2,1) / C(3,1)) / (1/2) = (1/2 - 2/3) 2 = -1/3
        ([0, 0, 1, 0], 2, [-1 / 3, -1 / 3, 1, -1 / 3]),
        # k 1: failure 3/4, deviation sqrt(3) / 4; right: sqrt(3); wrong: (3/4 - 1) / (sqrt(3) / 4) = -1 / sqrt(3)
        ([0, 0, 1, 0], 1, [-0.5773503, -0.5773503, 1.7320508, -0.5773503]),
        # 2 wrong, k 2: failure 1/6, deviation sqrt(5) / 6; right: 1 / sqrt(5); wrong: (1/6 - 1/3) 6 / sqrt(5)
        ([0, 1, 1, 0], 2, [-0.4472136, 0.4472136, 0.4472136, -0.4472136]),
        # 1 wrong: any two have a right one
        ([0, 1, 1, 1], 2, [0, 0, 0, 0]),
        ([0, 0, 0, 0], 2, [0, 0, 0, 0]),
        ([1, 1, 1, 1], 2, [0, 0, 0, 0]),
    ],
)
def test_pass_at_k_by_hand(rewards: list[float], k: int, expected: list[float]) -> None:
    samples = ScoredSamples(rewards=torch.tensor(rewards), group_ids=torch.zeros(4, dtype=torch.int64))
    assert_close(pass_at_k(samples, k=k), torch.tensor(expected, dtype=torch.float32), atol=1e-6, rtol=0)


def test_pass_at_k_of_two_groups() -> None:
    # The first and the third case above, interleaved.
    rewards, ids = torch.tensor([0.0, 0, 0, 1, 1, 1, 0, 0]), torch.tensor([4, 2, 4, 2, 4, 2, 4, 2])
    found = pass_at_k(ScoredSamples(rewards=rewards, group_ids=ids), k=2)
    expected = torch.tensor([-1 / 3, -0.4472136, -1 / 3, 0.4472136, 1, 0.4472136, -1 / 3, -0.4472136])
    assert_close(found, expected, atol=1e-6, rtol=0)


def test_opo_of_responses_without_a_trained_token_is_finite() -> None:
    samples = ScoredSamples(rewards=torch.tensor([1.0, 0.0]), group_ids=torch.zeros(2).long(), lengths=torch.zeros(2))
    assert opo(samples).tolist() == [1, 0]


def test_a_group_that_has_lost_samples_is_no_reason_to_stop_pass_at_k() -> None:
    # The first case above beside a group of one, of which there are no two to draw.
    rewards, ids = torch.tensor([0.0, 0, 1, 0, 1]), torch.tensor([0, 0, 0, 0, 7])
    found = pass_at_k(ScoredSamples(rewards=rewards, group_ids=ids), k=2)
    assert_close(found, torch.tensor([-1 / 3, -1 / 3, 1, -1 / 3, 0]), atol=1e-6, rtol=0)
    with pytest.raises(ValueError, match="k is 2.5: it must be a whole number"):
        pass_at_k(ScoredSamples(rewards=rewards, group_ids=ids), k=2.5)  # type: ignore[arg-type]


def test_signal_counts_add_up_over_ranks() -> None:
    # Group 5 alone has unequal rewards: 3 of 6
    assert signal_counts(WHOLE).tolist() == [3, 6]


@pytest.mark.parametrize(
    ("estimator", "message"),
    [
        (opo, r"ScoredSamples\(lengths="),
        (remax, r"ScoredSamples\(baselines="),
        (gpg, r"gpg needs .* ScoredSamples\(signal_share="),
        (gdpo, r"gdpo needs .* ScoredSamples\(components="),
    ],
)
def test_what_an_estimator_needs_is_asked_for(estimator, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=message):
        estimator(ScoredSamples(rewards=REWARDS, group_ids=IDS))


def test_an_unknown_weight_names_the_choices() -> None:
    with pytest.raises(ValueError, match="Unknown weight 'var'. Choose one of equal, std, signal"):
        cpgd(WHOLE, weight="var")  # type: ignore[arg-type]


def test_lengths_of_another_number_are_refused() -> None:
    with pytest.raises(ValueError, match=r"lengths \[2\]"):
        ScoredSamples(rewards=REWARDS, group_ids=IDS, lengths=LENGTHS[:2])


# Group 7: rewards 1, 3, 5; group -2: 4; group 30: 2, 2
GROUP_IDS = torch.tensor([7, -2, 30, 7, 30, 7])
GROUP_REWARDS = torch.tensor([1.0, 4.0, 2.0, 3.0, 2.0, 5.0])


def test_group_statistics_by_hand() -> None:
    groups = groups_of(GROUP_IDS)
    assert_close(groups.means(GROUP_REWARDS), torch.tensor([3.0, 4, 2, 3, 2, 3]).double(), atol=1e-12, rtol=0)
    # (4 + 0 + 4) / 2 = 4
    assert_close(groups.stds(GROUP_REWARDS), torch.tensor([2.0, 0, 0, 2, 0, 2]).double(), atol=1e-12, rtol=0)
    assert groups.has_signal(GROUP_REWARDS).tolist() == [True, False, False, True, False, True]
    assert groups.num_others().tolist() == [2, 0, 1, 2, 1, 2]


def test_the_order_within_groups_does_not_matter() -> None:
    order = torch.tensor([3, 5, 1, 0, 4, 2])
    mixed = groups_of(GROUP_IDS[order])
    assert torch.equal(mixed.means(GROUP_REWARDS[order]), groups_of(GROUP_IDS).means(GROUP_REWARDS)[order])


def test_no_samples_make_no_group() -> None:
    assert groups_of(torch.zeros(0, dtype=torch.int64)).means(torch.zeros(0)).shape == (0,)


def test_ids_that_are_no_integers_are_refused() -> None:
    with pytest.raises(ValueError, match="group_ids is of torch.float32: give an integer for each sample"):
        groups_of(torch.zeros(2))


def test_only_unequal_groups_carry_a_signal() -> None:
    rewards, ids = torch.tensor([0.1, 1.0, 0.1, 0.0, 1.0]), torch.tensor([3, 1, 3, 1, 8])
    assert groups_of(ids).has_signal(rewards).tolist() == [False, True, False, True, False]
    # Means 0.1, 0.5, 1
    assert groups_of(ids).means(rewards).tolist() == pytest.approx([0.1, 0.5, 0.1, 0.5, 1.0], abs=1e-8)


def test_moments_count_each_value_by_its_weight() -> None:
    # Weight 3, mean (2 x 1 + 1 x 4) / 3 = 2, squared deviations 2 x 1 + 1 x 4 = 6; the weight 0 is not read.
    found = moments_of(torch.tensor([1.0, 4.0, math.nan]), torch.tensor([2, 1, 0]))
    assert_close(found, torch.tensor([3.0, 2.0, 6.0]).double(), atol=1e-12, rtol=0)


def test_moments_of_ranks_are_those_of_all_values() -> None:
    # {1, 3} is (2, 2, 2), {0} is (1, 0, 0), a rank without values (0, 0, 0). Together mean 4 / 3 and
    # (1/3)^2 + (5/3)^2 + (4/3)^2 = 42 / 9 of squared deviations.
    parts = torch.tensor([[0.0, 0.0, 0.0], [2.0, 2.0, 2.0], [1.0, 0.0, 0.0]]).double()
    wanted = torch.tensor([3.0, 4 / 3, 42 / 9]).double()
    assert_close(merged_moments(parts), wanted, atol=1e-6, rtol=0)
    assert_close(merged_moments(parts.flip(0)), wanted, atol=1e-6, rtol=0)
    assert merged_moments(parts[:1]).tolist() == [0, 0, 0]


def test_whitening_by_hand() -> None:
    # Mean 2, variance (1 + 1 + 4 + 4) / 4 = 2.5, deviation 1.5811388; -1 / 1.5811388 and so on
    values = torch.tensor([1.0, 3.0, 0.0, 4.0])
    found = moments_of(values, torch.ones(4))
    assert mean_and_std(found) == (2.0, pytest.approx(1.5811388, abs=1e-6))
    expected = torch.tensor([-0.6324555, 0.6324555, -1.2649111, 1.2649111])
    assert_close(whiten(values, found), expected, atol=1e-6, rtol=0)
    # with the mean put back
    assert_close(whiten(values, found, shift_mean=False), expected + 2, atol=1e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("level", [0.0, 1e6, -1e6])
def test_a_small_spread_at_a_high_level_is_no_rounding(level: float, dtype: torch.dtype) -> None:
    # Mean level + 1 / 3, variance (1 + 1 + 4) / 27 = 2 / 9: -1/3 and 2/3 over 0.4714045. Two ranks say the same.
    values = torch.tensor([0.0, 0.0, 1.0], dtype=dtype) + level
    expected = torch.tensor([-0.7071068, -0.7071068, 1.4142136], dtype=dtype)
    parts = torch.stack([moments_of(part, torch.ones(len(part))) for part in (values[:1], values[1:])])
    for found in (moments_of(values, torch.ones(3)), merged_moments(parts)):
        assert_close(whiten(values, found), expected, atol=1e-6, rtol=0)


def test_eps_is_added_to_the_deviation_when_whitening() -> None:
    # Mean 1, deviation 1: -1 / (1 + 1)
    values = torch.tensor([0.0, 2.0])
    assert whiten(values, moments_of(values, torch.ones(2)), eps=1.0).tolist() == [-0.5, 0.5]


def test_moments_carry_no_gradient() -> None:
    leaf = torch.ones(2, requires_grad=True)
    assert not moments_of(leaf, torch.ones(2)).requires_grad
    assert not moments_of(torch.ones(2), leaf).requires_grad


@pytest.mark.parametrize("value", [0.0, 0.1, -3.7, 1e6 + 0.1])
@pytest.mark.parametrize("count", [1, 7, 1000])
def test_equal_values_become_exactly_zero(value: float, count: int) -> None:
    values = torch.full((count,), value)
    part = moments_of(values, torch.ones(count))
    for found in (part, merged_moments(torch.stack([part, moments_of(values[:3], torch.ones(len(values[:3])))]))):
        assert (whiten(values, found) == 0).all()
        assert torch.equal(whiten(values, found, shift_mean=False), values)


def test_values_that_differ_by_rounding_alone_become_zero() -> None:
    # The next float64 after 1e8 is 1.5e-8 above it: a deviation of 7.5e-9, as large as the default eps.
    values = torch.tensor([1e8, math.nextafter(1e8, 2e8)], dtype=torch.float64)
    found = moments_of(values, torch.ones(2))
    assert whiten(values, found).tolist() == [0, 0]
    assert torch.equal(whiten(values, found, shift_mean=False), values)


def test_nothing_counted_is_zero() -> None:
    values = torch.tensor([1.0])
    assert whiten(values, moments_of(values, torch.zeros(1))).tolist() == [0]


def test_a_value_that_is_not_finite_is_not_whitened_away() -> None:
    values = torch.tensor([0.0, math.nan, 1.0])
    assert whiten(values, moments_of(values, torch.ones(3))).isnan().all()


def test_clip_holds_both_sides() -> None:
    assert clip_values(torch.tensor([-9.0, 0.5, 9.0]), 2.0).tolist() == [-2.0, 0.5, 2.0]
    with pytest.raises(ValueError, match="limit is 0: values are held in"):
        clip_values(torch.zeros(1), 0)


def test_overlong_penalty_grows_over_the_buffer() -> None:
    # max 100, buffer 20: nothing up to 80, -(85 - 80) / 20, -1 at 100 and beyond
    found = overlong_penalty(torch.tensor([10, 80, 85, 90, 100, 101]), max_length=100, buffer=20)
    assert_close(found, torch.tensor([0.0, 0.0, -0.25, -0.5, -1.0, -1.0]), atol=1e-6, rtol=0)
    assert overlong_penalty(torch.tensor([90]), max_length=100, buffer=20, scale=4.0).item() == -2.0


@pytest.mark.parametrize("buffer", [0, 101])
def test_a_buffer_outside_the_length_is_refused(buffer: int) -> None:
    with pytest.raises(ValueError, match=f"buffer is {buffer} and max_length 100"):
        overlong_penalty(torch.tensor([1]), max_length=100, buffer=buffer)
