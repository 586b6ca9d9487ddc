"""DDP under the contract of all strategies."""

import pytest

from lightrl.testing import StrategyContract


@pytest.mark.slow
class TestDDP(StrategyContract):
    strategy = "ddp"
    world_sizes = (3,)
