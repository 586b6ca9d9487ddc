from __future__ import annotations

import math

import pytest
import torch
from packed_tokens import sequence_index_of, tokens_at
from torch.testing import assert_close

from lightrl.algorithms.tokens import (
    PolicyTokens,
    masked_log_ratio,
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
