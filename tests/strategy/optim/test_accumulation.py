"""Accumulation by calls, and the arithmetic of batch sizes."""

import pytest
import torch

from lightrl.strategy.optim.accumulation import accumulation_of, accumulation_steps


def test_calls_are_counted_for_each_optimizer() -> None:
    first, second = (torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0) for _ in range(2))
    accumulation = accumulation_of(first)
    assert accumulation.is_boundary()  # gradients from elsewhere
    accumulation.count(4)
    assert accumulation_of(first) is accumulation
    assert not accumulation.is_boundary()
    assert accumulation.gradient_divisor() == 0.25  # one of four: an early update undoes the division by 4
    assert accumulation_of(second).is_boundary()
    accumulation.after_update(first, is_finite=False)
    assert (accumulation.is_boundary(), accumulation.gradient_divisor()) == (True, 1.0)


def test_sizes_that_do_not_fit_name_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert accumulation_steps(128, 4) == 4
    assert accumulation_steps(128, 4, group_size=2) == 8
    with pytest.raises(ValueError, match="Nearest valid train_batch_size: 120 or 144"):
        accumulation_steps(128, 3)
