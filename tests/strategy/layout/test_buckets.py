"""buckets: consecutive tensors up to a limit, never across what does not fit together."""

import torch

from lightrl.strategy.layout.buckets import buckets


def _names(sizes, limit, fits_together=lambda first, other: True):
    named = [(f"t{i}", torch.zeros(size)) for i, size in enumerate(sizes)]
    groups = buckets(iter(named), torch.Tensor.numel, limit, fits_together)
    return [[name for name, _ in group] for group in groups]


def test_a_group_holds_at_most_the_limit_and_a_larger_tensor_is_alone() -> None:
    assert _names([3, 2, 1, 9, 1], 5) == [["t0", "t1"], ["t2"], ["t3"], ["t4"]]  # 3 + 2 = 5, 1 + 9 > 5, 9 + 1 > 5
    assert _names([], 5) == []


def test_a_tensor_that_does_not_fit_begins_a_group() -> None:
    def same_parity(first, other):
        return first.numel() % 2 == other.numel() % 2

    assert _names([2, 4, 3, 1, 2], 100, same_parity) == [["t0", "t1"], ["t2", "t3"], ["t4"]]


def test_each_tensor_of_a_group_fits_to_its_first() -> None:
    def within_one(first, other):
        return abs(first.numel() - other.numel()) <= 1

    assert _names([1, 2, 3, 4], 100, within_one) == [["t0", "t1"], ["t2", "t3"]]
