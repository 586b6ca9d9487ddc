"""The contract over a strategy that sums gradients over the ranks and so leaves averaging_ranks at 1."""

from pathlib import Path

from lightrl.testing import StrategyContract


class TestSummingStrategy(StrategyContract):
    strategy = "summing_strategy:SummingStrategy"
    cwd = Path(__file__).parents[1] / "programs"
