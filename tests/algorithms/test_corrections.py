from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from packed_tokens import gradient_of, sequence_index_of, tokens_at
from torch import Tensor
from torch.testing import assert_close

from lightrl.algorithms.corrections import (
    Level,
    OffPolicyTokens,
    corrected,
    far_off_policy,
    icepop,
    interpolated_logprobs,
    masked,
    rejected,
    truncated,
)
from lightrl.algorithms.losses import ppo_clip


def off_policy(
    ratios: list[float], *, lengths: list[int] | None = None, mask: list[bool] | None = None
) -> OffPolicyTokens:
    """Tokens that the sampler gave the probability 0.01, and the trainer ratio times that."""
    lengths = [len(ratios)] if lengths is None else lengths
    sampler = torch.full((len(ratios),), 0.01, dtype=torch.float64).log()
    return OffPolicyTokens(
        logprobs=sampler + torch.tensor(ratios, dtype=torch.float64).log(),
        sampler_logprobs=sampler,
        mask=torch.tensor([True] * len(ratios) if mask is None else mask, dtype=torch.bool),
        sequence_index=sequence_index_of(lengths),
        num_sequences=len(lengths),
    )


def close(found: Tensor, *expected: float) -> None:
    assert_close(found, torch.tensor(expected, dtype=torch.float64), atol=1e-6, rtol=0)


def close_scalar(found: Tensor, expected: float) -> None:
    assert_close(found, torch.tensor(expected, dtype=torch.float64), atol=1e-6, rtol=0)


# Two sequences: 4, 0.25, 8 (product 8, geometric mean 2) and 0.5.
RATIOS, LENGTHS = [4.0, 0.25, 8.0, 0.5], [3, 1]


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("token", [3.0, 0.25, 3.0, 0.5]),
        ("sequence", [3.0, 3.0, 3.0, 0.5]),
        ("geometric", [2.0, 2.0, 2.0, 0.5]),
    ],
)
def test_truncated_by_level(level: Level, expected: list[float]) -> None:
    close(truncated(off_policy(RATIOS, lengths=LENGTHS), level=level, cap=3.0).weights, *expected)


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("token", [4.0, 0.0, 0.0, 0.5]),
        ("sequence", [0.0, 0.0, 0.0, 0.5]),
        ("geometric", [2.0, 2.0, 2.0, 0.5]),
    ],
)
def test_masked_by_level(level: Level, expected: list[float]) -> None:
    close(masked(off_policy(RATIOS, lengths=LENGTHS), level=level, low=0.4, high=5.0).weights, *expected)


def test_icepop_is_the_token_mask_of_both_sides() -> None:
    close(icepop(off_policy([4.9, 0.25, 8.0, 0.6])).weights, 4.9, 0.0, 0.0, 0.6)


def test_rejected_tokens_are_out_and_the_others_unweighed() -> None:
    close(rejected(off_policy(RATIOS, lengths=LENGTHS), low=0.6, high=2.5).weights, 1.0, 1.0, 1.0, 0.0)
    close(rejected(off_policy(RATIOS), level="token", low=0.4, high=5.0).weights, 1.0, 0.0, 0.0, 1.0)


def test_a_ratio_exactly_at_the_bound_stays() -> None:
    tokens = off_policy([1.0])
    close(masked(tokens, low=1.0, high=1.0).weights, 1.0)
    assert int(truncated(tokens, cap=1.0).statistics["outside_count"]) == 0


def test_statistics_are_of_the_raw_ratio() -> None:
    # Ratios 4, 0.25, 8, 0.5 and a masked one: sum 12.75, of which 8 exceeds the cap of 5.
    # k3 = r - 1 - log r: 1.6137056, 0.6362944, 4.9205584, 0.1931472: 7.3637056
    tokens = off_policy([*RATIOS, 99.0], mask=[True] * 4 + [False])
    statistics = truncated(tokens, cap=5.0).statistics
    close_scalar(statistics["ratio_sum"], 12.75)
    close_scalar(statistics["ratio_max"], 8.0)
    close_scalar(statistics["k3_sum"], 7.3637056)
    assert (int(statistics["outside_count"]), int(statistics["count"])) == (1, 4)


def test_only_trained_tokens_count_as_outside() -> None:
    # The sequence's ratio, 8, is beyond the cap for both tokens, of which one is trained.
    tokens = off_policy([8.0, 3.0], mask=[True, False])
    assert int(truncated(tokens, level="sequence", cap=2.0).statistics["outside_count"]) == 1


@pytest.mark.parametrize("correction", [truncated, masked, icepop, rejected])
def test_nothing_trained_has_no_weight_and_no_statistics(correction) -> None:  # type: ignore[no-untyped-def]
    found = correction(off_policy([math.nan, 2.0], mask=[False, False]))
    close(found.weights, 0.0, 0.0)
    assert all(value.item() == 0 for value in found.statistics.values())


@pytest.mark.parametrize("correction", [truncated, masked, icepop, rejected])
def test_on_policy_nothing_changes(correction) -> None:  # type: ignore[no-untyped-def]
    close(correction(off_policy([1.0, 1.0])).weights, 1.0, 1.0)


def test_weights_carry_no_gradient() -> None:
    leaf = torch.zeros(2, requires_grad=True)
    tokens = OffPolicyTokens(
        logprobs=leaf,
        sampler_logprobs=torch.zeros(2),
        mask=torch.ones(2, dtype=torch.bool),
        sequence_index=torch.zeros(2, dtype=torch.int64),
        num_sequences=1,
    )
    assert not truncated(tokens).weights.requires_grad


def test_decoupled_ppo_by_hand() -> None:
    # Sampled at 0.4, proximal 0.5, policy 0.55: ratio 1.1 to the proximal one, weight 0.5 / 0.4 = 1.25.
    # -1.1 x 2 x 1.25 = -2.75, and its slope the same; at policy 0.75 the clip holds 1.2: -1.2 x 2 x 1.25 = -3, slope 0.
    loss = tokens_at([1.1, 1.5], [2.0, 2.0])
    weights = truncated(
        OffPolicyTokens(
            logprobs=loss.old_logprobs,
            sampler_logprobs=torch.full((2,), 0.4, dtype=torch.float64).log(),
            mask=loss.mask,
            sequence_index=loss.sequence_index,
            num_sequences=1,
        )
    ).weights
    close(corrected(ppo_clip(loss), weights).terms, -2.75, -3.0)
    close(gradient_of(lambda tokens: corrected(ppo_clip(tokens), weights), loss), -2.75, 0.0)


def test_decoupled_ppo_is_ppo_where_the_proximal_policy_sampled() -> None:
    loss = ppo_clip(tokens_at([1.1, 1.5], [2.0, -2.0]))
    close(corrected(loss, truncated(off_policy([1.0, 1.0])).weights).terms, *loss.terms.tolist())


def test_a_rejected_term_is_not_read() -> None:
    terms = torch.tensor([math.inf, 2.0], dtype=torch.float64)
    loss = ppo_clip(tokens_at([1.0, 1.0], [1.0, 1.0]))
    close(corrected(dataclasses.replace(loss, terms=terms), torch.tensor([0.0, 0.5])).terms, 0.0, 1.0)


def test_a_weight_that_carries_a_gradient_gets_none() -> None:
    weights = torch.ones(1, dtype=torch.float64, requires_grad=True)
    assert not corrected(ppo_clip(tokens_at([1.1], [1.0])), weights).terms.requires_grad


def test_interpolated_logprobs_by_hand() -> None:
    # Versions 2, 4, 5, 6 sampled; proximal 5, current 6: shares 3/4, 1/2, 0 and 0 (sampled by the current version).
    sampler, current = (torch.full((4,), value, requires_grad=True) for value in (-4.0, -2.0))
    versions = torch.tensor([2, 4, 5, 6])
    found = interpolated_logprobs(current, sampler, versions=versions, proximal_version=5, current_version=6)
    assert_close(found, torch.tensor([-2.5, -3.0, -4.0, -4.0]), atol=1e-6, rtol=0)
    assert not found.requires_grad


def test_a_token_younger_than_the_proximal_version_keeps_its_own_logprob() -> None:
    # Sampled by 6, between proximal 5 and current 7: (5 - 6) / (7 - 6) is no share.
    sampler, current = torch.tensor([-4.0]), torch.tensor([-2.0])
    versions = torch.tensor([6])
    found = interpolated_logprobs(current, sampler, versions=versions, proximal_version=5, current_version=7)
    assert found.tolist() == [-4.0]


def test_a_ratio_beyond_any_number_stays_finite() -> None:
    # Held at e^20 = 485165195
    tokens = dataclasses.replace(off_policy([1.0]), logprobs=torch.full((1,), 1000.0, dtype=torch.float64))
    found = masked(tokens, level="sequence", high=1e9)
    assert found.weights.item() == pytest.approx(485165195.41, abs=0.01)
    assert all(value.isfinite() for value in found.statistics.values())


def test_the_proximal_version_cannot_be_ahead() -> None:
    row = torch.zeros(1)
    with pytest.raises(ValueError, match="proximal_version is 7, after current_version 6"):
        interpolated_logprobs(row, row, versions=row.long(), proximal_version=7, current_version=6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: truncated(t, cap=0), "cap is 0"),
        (lambda t: masked(t, low=1.1, high=2), "low is 1.1 and high 2"),
        (lambda t: truncated(t, level="batch"), "Unknown level 'batch'. Choose one of token, sequence, geometric"),
    ],
)
def test_bounds_that_cannot_be_are_refused(call, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=message):
        call(off_policy([1.0]))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("correct", [truncated, masked, icepop, rejected])
def test_what_is_not_finite_shows_in_the_weights(correct, value: float) -> None:  # type: ignore[no-untyped-def]
    """A cap would make a number of it again, and a bound 0."""
    tokens = off_policy([1.0, 1.0], lengths=[1, 1])
    sampler = tokens.sampler_logprobs.clone()
    sampler[1] = value
    weights = correct(dataclasses.replace(tokens, sampler_logprobs=sampler)).weights
    assert weights.isnan().tolist() == [False, True]
    loss = corrected(ppo_clip(tokens_at([1.0, 1.0], [1.0, 1.0])), weights)
    assert loss.terms.isnan().tolist() == [False, True]


def test_only_bad_sequences_that_the_policy_has_left_are_far() -> None:
    # Mean of log(sampler / trainer): (log 4 + log 1) / 2 = 0.6931472 in the first two, log 4 = 1.3862944 of the one
    # trained token in the third, and log 0.5 in the last.
    tokens = off_policy([0.25, 1.0, 0.25, 1.0, 0.25, 9.0, 2.0], lengths=[2, 2, 2, 1], mask=[True] * 5 + [False, True])
    advantages = torch.tensor([1.0, 1.0, -3.0, 1.0, -1.0, 0.0, -1.0], dtype=torch.float64)
    found = [far_off_policy(tokens, advantages, threshold=threshold).tolist() for threshold in (0.6, 0.7, 1.4)]
    assert found == [
        [False, False, True, True, True, True, False],
        [False, False, False, False, True, True, False],
        [False] * 7,
    ]
    # A sequence with a mean of 0 is not bad.
    assert not far_off_policy(tokens, torch.zeros_like(advantages), threshold=0.6).any()
