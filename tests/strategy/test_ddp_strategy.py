"""DDP under the contract of all strategies."""

import pytest
import torch
from torch import Tensor, nn

from lightrl.comm import Comm
from lightrl.strategy.ddp import DDPStrategy
from lightrl.testing import StrategyContract


@pytest.mark.slow
class TestDDP(StrategyContract):
    strategy = "ddp"
    world_sizes = (3,)


class TwinComm(Comm):
    """One of two ranks that always hold the same."""

    def __init__(self) -> None:
        super().__init__()
        self.world = 2

    def _reduce_in_place(self, flat: Tensor, op: str) -> None:
        if op == "sum":
            flat.mul_(2)


def test_a_parameter_that_no_rank_uses_is_left_alone() -> None:
    """As in a world of one, where an optimizer leaves out what has no gradient."""
    strategy = DDPStrategy(0, 0.0, 1, 2)
    strategy.comm = TwinComm()
    model = nn.ModuleList([nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)])
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    model[0](torch.ones(1, 1)).sum().backward()
    strategy.apply_gradients(optimizer, model, 1.0)
    # AdamW: 1 - 0.1 x 0.5 by the decay, and the first step has the size of the rate.
    assert [float(parameter.detach()) for parameter in model.parameters()] == [pytest.approx(0.85), 1.0]
