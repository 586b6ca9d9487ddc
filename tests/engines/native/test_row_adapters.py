"""Rows of several adapters: each gets what its own adds, and nothing of another's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from lightrl.engines.native.row_adapters import NO_ADAPTER, MixedRows, rows_of
from lightrl.engines.weights.adapters import Factors

CPU = torch.device("cpu")


def rows(*numbers: int) -> MixedRows:
    return MixedRows(np.array(numbers), CPU)


def test_rows_of_one_adapter_are_told_by_its_number() -> None:
    assert rows_of([2, 2], CPU) == 2
    assert rows_of([NO_ADAPTER], CPU) == NO_ADAPTER
    mixed = rows_of([2, NO_ADAPTER, 0], CPU)
    assert isinstance(mixed, MixedRows)
    assert [mixed.adapter_of(row) for row in range(3)] == [2, NO_ADAPTER, 0]


def test_columns_of_other_adapters_are_masked() -> None:
    # one column of adapter 0, none of 1, two of 2
    mixed = rows(2, NO_ADAPTER, 0, 1)
    for _ in range(2):  # the second time a mask that is kept
        found = mixed.not_theirs((1, 0, 2))
        assert found.tolist() == [[True, False, False], [True] * 3, [False, True, True], [True] * 3]
        # another layer: two columns of adapter 0, one of 1, none of 2
        found = mixed.not_theirs((2, 1, 0))
        assert found.tolist() == [[True] * 3, [True] * 3, [False, False, True], [True, True, False]]


@pytest.mark.parametrize("shape", [(3, 2), (3, 1, 2)])
def test_a_layer_adds_to_each_row_its_own_product(shape: tuple[int, ...]) -> None:
    inputs = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]).view(shape)
    first = Factors(torch.tensor([[1.0, 1.0]]), torch.tensor([[10.0], [0.0]]))  # 10 (x + y), 0
    third = Factors(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0], [2.0]]))  # 0, 2 x
    found = rows(2, NO_ADAPTER, 0).add(torch.ones(shape), inputs, {0: first, 2: third})
    assert_close(found, torch.tensor([[1.0, 3.0], [1.0, 1.0], [111.0, 1.0]]).view(shape))


def test_a_layer_that_sees_some_rows_alone_is_refused() -> None:
    with pytest.raises(RuntimeError, match="given 2 rows where 3 samples decode"):
        rows(0, 1, 0).add(torch.ones(2, 2), torch.ones(2, 2), {})
