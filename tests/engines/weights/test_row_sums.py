"""Compiled sums of rows: the same fingerprints, to the bit, as torch's products."""

from __future__ import annotations

import pytest
import torch

from lightrl.c_library import find_compiler
from lightrl.engines.weights import row_sums as module
from lightrl.engines.weights.fingerprint import Sums, _matrix, fingerprint
from lightrl.engines.weights.row_sums import compile_row_sums, row_sums

CPU = torch.device("cpu")


@pytest.fixture
def columns(monkeypatch):
    """Compiles the sums for one test, and returns the columns of factors."""
    monkeypatch.setattr(module, "_library", None)
    try:
        find_compiler()
    except RuntimeError as error:
        pytest.skip(str(error))
    compile_row_sums()
    if module._library is None:
        pytest.skip("needs a processor with AVX-512 VNNI")
    return _matrix(CPU, torch.int8)


def exact(rows, columns):
    return columns.to(torch.int64) @ rows.to(torch.int64).t()


@pytest.mark.parametrize("num_rows", [1, 2, 300])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_sums_are_exact(num_rows, num_threads, columns):
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    rows = torch.randint(-128, 128, (num_rows, 4096), generator=torch.Generator().manual_seed(0)).to(torch.int8)
    try:
        assert torch.equal(row_sums(rows, columns).to(torch.int64), exact(rows, columns))
    finally:
        torch.set_num_threads(before)


def test_the_largest_sums_are_exact(columns):
    most = torch.stack([torch.where(column > 0, 127, -128) for column in columns]).to(torch.int8)
    least = torch.stack([torch.where(column > 0, -128, 127) for column in columns]).to(torch.int8)
    rows = torch.cat([most, least])
    assert torch.equal(row_sums(rows, columns).to(torch.int64), exact(rows, columns))


def test_rows_that_are_not_next_to_each_other_are_left_to_torch(columns):
    assert row_sums(torch.zeros(4, 8192, dtype=torch.int8)[:, :4096], columns) is None
    assert row_sums(torch.zeros(4, 2048, dtype=torch.int8), columns) is None


@pytest.mark.parametrize("shape", [(7,), (4096,), (130, 512), (513, 301), (20_000, 65)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fingerprints_are_those_of_torch(shape, dtype, columns, monkeypatch):
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    fast = fingerprint(tensor)
    monkeypatch.setattr(module, "_library", None)
    assert fast == fingerprint(tensor)


def test_a_sum_of_many_tensors_is_that_of_torch(columns, monkeypatch):
    tensors = [torch.randn(size) for size in (3, 40_000, 100, 1 << 18, 70_001)]

    def totals():
        sums = Sums()
        for tensor in tensors:
            sums.add(tensor)
        return sums.totals()

    fast = totals()
    monkeypatch.setattr(module, "_library", None)
    assert torch.equal(fast, totals())


def test_a_process_that_did_not_ask_for_it_uses_torch(monkeypatch):
    monkeypatch.setattr(module, "_library", None)
    assert row_sums(torch.zeros(2, 4096, dtype=torch.int8), _matrix(CPU, torch.int8)) is None
