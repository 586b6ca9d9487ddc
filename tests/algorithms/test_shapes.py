import pytest
import torch

from lightrl.algorithms.shapes import require_bool_mask, require_flat, require_same_shape, require_sequence_index


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
