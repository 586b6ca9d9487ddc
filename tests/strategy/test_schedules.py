import math

import pytest
import torch
from torch.testing import assert_close

from lightrl.config import OptimConfig
from lightrl.strategy.schedules import build_lr_scheduler, lr_factor


def factors(count: int, **settings: object) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = build_lr_scheduler(optimizer, OptimConfig(**settings), total_steps=10)  # type: ignore[arg-type]
    found = []
    for _ in range(count):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def check(found: list[float], wanted: list[float]) -> None:
    assert_close(torch.tensor(found), torch.tensor(wanted), atol=1e-6, rtol=0)


def test_constant() -> None:
    check(factors(12), [1.0] * 12)


def test_linear_with_warm_up() -> None:
    # 2 of warm-up: 1/2, 2/2; then 1 - k/8 for k = 0 .. 7, then the end
    check(factors(12, schedule="linear", warmup_steps=2), [0.5, 1.0, *[1 - k / 8 for k in range(9)], 0.0])


def test_cosine_to_a_minimum_with_warm_up_by_ratio() -> None:
    # 20 % of 10 = 2 of warm-up; then 0.1 + 0.9 x (1 + cos(pi k / 8)) / 2
    shape = [0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * k / 8)) for k in range(9)]
    check(factors(12, schedule="cosine", warmup_ratio=0.2, min_lr_ratio=0.1), [0.5, 1.0, *shape, 0.1])


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_all_warm_up_never_divides_by_zero(kind: str) -> None:
    assert lr_factor(10, kind=kind, warmup_steps=10, total_steps=10, min_ratio=0.0) == 1.0
