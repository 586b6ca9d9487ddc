"""The proof of independent rows holds with the setting of MKL and products of enough rows, and fails without them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from lightrl.exact.environment import linear
from lightrl.testing import run_program

PROGRAM = Path(__file__).resolve().parents[1] / "programs" / "exact_rows_program.py"


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="this torch has no MKL")
def test_rows_are_independent_with_the_setting_and_refused_without() -> None:
    assert "independent" in run_program([sys.executable, str(PROGRAM)], timeout_s=60)
    refused = run_program([sys.executable, str(PROGRAM), "AUTO"], timeout_s=60, expect_failure=True)
    assert "MKL_CBWR=AUTO" in refused


@pytest.mark.parametrize("shape", [(0, 3), (3,), (2, 1, 3), (40, 3)])
def test_few_rows_and_none_have_the_shape_of_torch(shape: tuple[int, ...]) -> None:
    rows, weight, bias = torch.randn(shape), torch.randn(5, 3), torch.randn(5)
    torch.testing.assert_close(linear(rows, weight, bias), torch.nn.functional.linear(rows, weight, bias))
