"""Main copies by hand, on one rank without megatron-core; test_megatron_strategy.py trains with them on two."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightrl.models.critic import ValueHead
from lightrl.strategy.megatron.main_copies import MainCopies, compute_in_bfloat16, copies_of, follow_steps
from lightrl.strategy.megatron.main_copies import require_on_device as require
from lightrl.strategy.serving.residency import StorageOffloader


class OneWeight(nn.Module):
    """A stage with one weight of 1."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(pipeline_dtype=torch.float32)
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, scale: float) -> Any:
        return self.weight * scale


def with_copies() -> tuple[OneWeight, nn.Parameter, MainCopies]:
    """Returns a stage that is its own model, its main copy, and its copies."""
    stage = OneWeight()
    main = stage.weight
    compute_in_bfloat16(stage, [stage])
    copies = copies_of(stage)
    assert copies is not None
    return stage, main, copies


@pytest.mark.parametrize("settings", [{"fused": True}, {"foreach": True}, {"foreach": False}])
def test_small_updates_arrive_by_every_kernel(settings: dict[str, Any]) -> None:
    """A weight in bfloat16 stays at 1: between 0.5 and 1 its numbers are 2^-8 apart, and 1 - 1e-4 is rounded to 1."""
    stage, main, _ = with_copies()
    optimizer = torch.optim.SGD([main], lr=1e-4, **settings)
    follow_steps(optimizer, stage)
    for _ in range(100):
        stage(1.0).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert main.item() == pytest.approx(0.99, abs=1e-5)  # 1 - 100 x 1e-4
    stage(1.0)
    assert stage.weight.item() == 253 / 256  # 0.99 x 256 = 253.44
    assert stage.config.pipeline_dtype == torch.bfloat16

    alone = torch.ones(1, dtype=torch.bfloat16)
    for _ in range(100):
        alone -= 1e-4
    assert alone.item() == 1


def test_gradients_of_micro_batches_are_added_in_float32() -> None:
    stage, main, _ = with_copies()
    for scale in (1.0, 2**-9):  # in bfloat16 their sum is 1
        stage(scale).sum().backward()
    assert main.grad is not None
    assert main.grad.dtype == torch.float32
    assert main.grad.item() == 1 + 2**-9
    assert stage.weight.grad is None


def test_what_is_written_from_outside_is_rounded_at_the_next_pass() -> None:
    stage, main, _ = with_copies()
    main.detach().copy_(torch.tensor([3.001]))
    assert stage(1.0).item() == 3


def test_copies_in_host_memory_leave_passes_alone() -> None:
    stage, main, copies = with_copies()
    main.detach().fill_(2.0)
    offloader = StorageOffloader()
    assert offloader.offload(copies.main()) == 4  # rounded before it left
    assert stage(1.0).item() == 2
    with pytest.raises(RuntimeError, match=r"load_megatron_copy_params\(\)"):
        require(stage)
    offloader.restore()
    require(stage)
    assert main.item() == 2


def test_a_frozen_model_is_rounded_without_copies_and_a_value_head_stays() -> None:
    frozen = OneWeight().requires_grad_(False)
    frozen.head = ValueHead(1).requires_grad_(False)
    compute_in_bfloat16(frozen, [frozen])
    assert copies_of(frozen) is None
    assert frozen.weight.dtype == torch.bfloat16
    assert frozen.head.weight.dtype == torch.float32
