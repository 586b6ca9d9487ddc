"""Bytes of fake tensors while they live."""

import torch

from lightrl.plan.meter import StorageMeter
from lightrl.plan.models import fake


def test_views_and_known_tensors_are_not_counted_and_the_dead_are_forgotten() -> None:
    with fake():
        weight = torch.empty(8, 8)
        with StorageMeter([weight]) as meter:
            first = torch.ones(4, 8)  # 128 bytes
            second = first @ weight  # 128 bytes
            second.view(32)
            weight.t()
            assert (meter.live, meter.peak) == (256, 256)
            del first
            assert (meter.live, meter.peak) == (128, 256)
