import pytest
import torch

from lightrl.algorithms.shapes import require_bool_mask, require_same_shape


def test_equal_shapes_pass() -> None:
    require_same_shape(logprobs=torch.zeros(3), mask=torch.ones(3, dtype=torch.bool))


def test_a_column_beside_a_row_is_refused_with_both_shapes() -> None:
    with pytest.raises(ValueError, match=r"logprobs \[3\], advantages \[3, 1\]"):
        require_same_shape(logprobs=torch.zeros(3), advantages=torch.zeros(3, 1))


def test_float_mask_is_refused() -> None:
    with pytest.raises(ValueError, match=r"mask is of torch.float32.*mask.bool\(\)"):
        require_bool_mask(torch.ones(3))
