from __future__ import annotations

import math

import pytest
import torch
from packed_tokens import sequence_index_of, tokens_at
from torch.testing import assert_close

from lightrl.algorithms.losses import (
    PolicyTokens,
    masked_log_ratio,
    mismatch_statistics,
    require_bool_mask,
    require_flat,
    require_same_shape,
    require_sequence_index,
    sequence_means,
    sequence_sums,
    token_loss,
)


def test_log_ratio_is_new_minus_old_and_never_beyond_twenty() -> None:
    new = torch.tensor([math.log(0.75), 30.0, math.nan], requires_grad=True)
    old = torch.tensor([math.log(0.5), 0.0, 1.0], requires_grad=True)
    log_ratio = masked_log_ratio(new, old, torch.tensor([True, True, False]))
    # log 1.5 = 0.4054651; 30 is held at 20; the masked one is 0
    assert_close(log_ratio.detach(), torch.tensor([0.4054651, 20.0, 0.0]), atol=1e-6, rtol=0)
    log_ratio.sum().backward()
    assert_close(new.grad, torch.tensor([1.0, 0.0, 0.0]), atol=0, rtol=0)
    assert old.grad is None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_log_ratio_that_is_not_finite_is_nan(value: float) -> None:
    mask = torch.tensor([True, True, False])
    for new, old in (((0.0, value, value), (0.5, 0.0, 0.0)), ((0.0, 0.0, 0.0), (0.5, value, value))):
        found = masked_log_ratio(torch.tensor(new), torch.tensor(old), mask)
        assert found.isnan().tolist() == [False, True, False]


def test_sums_and_means_by_sequence() -> None:
    values, index = torch.tensor([1.0, 2.0, 5.0, math.nan]), sequence_index_of([2, 1, 1])
    mask = torch.tensor([True, True, True, False])
    assert_close(sequence_sums(values[:3], index[:3], 4), torch.tensor([3.0, 5.0, 0.0, 0.0]), atol=0, rtol=0)
    assert_close(sequence_means(values, mask, index, 3), torch.tensor([1.5, 5.0, 0.0]), atol=0, rtol=0)


def test_per_sequence_gives_each_token_its_mean() -> None:
    tokens = tokens_at([1.0, 1.0, 1.0], [0.0, 0.0, 0.0], lengths=[2, 1], mask=[True, True, True])
    assert tokens.per_sequence(torch.tensor([1.0, 3.0, 7.0])).tolist() == [2.0, 2.0, 7.0]


def test_token_loss_clears_what_is_masked() -> None:
    mask = torch.tensor([True, False])
    loss = token_loss(torch.tensor([1.0, 9.0]), torch.tensor([0.0, 1.0]), torch.tensor([True, True]), mask)
    assert (loss.terms.tolist(), loss.ratio.tolist(), loss.is_clipped.tolist()) == ([1, 0], [1, 0], [True, False])


@pytest.mark.parametrize("shape", [(), (1,), (3,)])
def test_token_loss_takes_one_entry_per_token(shape: tuple[int, ...]) -> None:
    mask, zeros = torch.tensor([True, False]), torch.zeros(2)
    for terms, is_clipped in ((torch.ones(shape), mask), (zeros, torch.ones(shape).bool())):
        with pytest.raises(ValueError, match=r"terms of shape .* for 2 tokens. Give one entry for each token"):
            token_loss(terms, zeros, is_clipped, mask)


def test_mismatched_fields_are_refused() -> None:
    row = torch.zeros(2)
    fields = {"logprobs": row, "old_logprobs": row, "advantages": row, "mask": row.bool()}
    index = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"advantages \[2, 1\]"):
        PolicyTokens(**{**fields, "advantages": row[:, None]}, sequence_index=index, num_sequences=1)
    with pytest.raises(ValueError, match="sequence_index is .* of torch.float32"):
        PolicyTokens(**fields, sequence_index=row, num_sequences=1)
    with pytest.raises(ValueError, match="num_sequences is 0, but there are 2 tokens"):
        PolicyTokens(**fields, sequence_index=index, num_sequences=0)
    with pytest.raises(ValueError, match="selected is of torch.float32"):
        PolicyTokens(**fields, sequence_index=index, num_sequences=1, selected=row)


def test_equal_shapes_pass() -> None:
    require_same_shape(logprobs=torch.zeros(3), mask=torch.ones(3, dtype=torch.bool))


def test_a_column_beside_a_row_is_refused_with_both_shapes() -> None:
    with pytest.raises(ValueError, match=r"logprobs \[3\], advantages \[3, 1\]"):
        require_same_shape(logprobs=torch.zeros(3), advantages=torch.zeros(3, 1))


def test_float_mask_is_refused() -> None:
    with pytest.raises(ValueError, match=r"mask is of torch.float32.*mask.bool\(\)"):
        require_bool_mask(torch.ones(3))


def test_a_named_mask_is_refused_by_its_name() -> None:
    with pytest.raises(ValueError, match=r"selected is of torch.float32.*selected.bool\(\)"):
        require_bool_mask(torch.ones(3), name="selected")


def test_two_rows_of_tokens_have_no_sequence_index() -> None:
    with pytest.raises(ValueError, match=r"sequence_index is \[2, 2\] of torch.int64, the mask \[2, 2\]"):
        require_sequence_index(torch.zeros(2, 2, dtype=torch.int64), torch.ones(2, 2, dtype=torch.bool), 2)


def test_flat_tensors_of_one_length_pass_and_others_are_named() -> None:
    require_flat(rewards=torch.zeros(3), lengths=None)
    with pytest.raises(ValueError, match=r"rewards \[3\], lengths \[2\]"):
        require_flat(rewards=torch.zeros(3), lengths=torch.zeros(2))
    with pytest.raises(ValueError, match=r"rewards \[1, 3\]"):
        require_flat(rewards=torch.zeros(1, 3))


def test_mismatch_by_hand() -> None:
    # trainer - sampler at the two kept tokens: ln 0.5 - ln 0.25 = 0.6931472, ln 0.25 - ln 0.5 = -0.6931472.
    # k3 of KL(sampler || trainer) = exp(t - s) - 1 - (t - s): 2 - 1 - 0.6931472 and 0.5 - 1 + 0.6931472: sum 0.5.
    trainer = torch.tensor([0.5, 0.25, math.nan]).log()
    sampler = torch.tensor([0.25, 0.5, 0.5]).log()
    statistics = mismatch_statistics(trainer, sampler, torch.tensor([True, True, False]))
    assert_close(statistics["max_abs"], torch.tensor(0.6931472), atol=1e-6, rtol=0)
    assert_close(statistics["sum_abs"], torch.tensor(1.3862944), atol=1e-6, rtol=0)
    assert_close(statistics["sum_k3"], torch.tensor(0.5), atol=1e-6, rtol=0)
    assert int(statistics["count"]) == 2


def test_the_direction_is_from_the_sampler_to_the_trainer() -> None:
    # One token, t - s = ln 2: 2 - 1 - 0.6931472. The other direction would be 0.1931472.
    statistics = mismatch_statistics(torch.tensor([0.5]).log(), torch.tensor([0.25]).log(), torch.tensor([True]))
    assert_close(statistics["sum_k3"], torch.tensor(0.3068528), atol=1e-6, rtol=0)


def test_nothing_kept_is_all_zero() -> None:
    statistics = mismatch_statistics(torch.tensor([math.nan]), torch.zeros(1), torch.tensor([False]))
    assert {name: value.item() for name, value in statistics.items()} == {
        "max_abs": 0,
        "sum_abs": 0,
        "sum_k3": 0,
        "count": 0,
    }


def test_the_statistics_carry_no_gradient() -> None:
    trainer = torch.zeros(2, requires_grad=True)
    statistics = mismatch_statistics(trainer, torch.ones(2), torch.tensor([True, True]))
    assert not any(value.requires_grad for value in statistics.values())
