"""One process under the contract of all strategies."""

from lightrl.testing import StrategyContract


class TestSingle(StrategyContract):
    strategy = "single"
    world_sizes = (1,)
