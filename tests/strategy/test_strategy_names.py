"""The classes of the built-in strategies, imported by their names."""

import pytest

import lightrl.strategy
from lightrl.strategy.fsdp import FSDPStrategy


def test_a_built_in_strategy_is_imported_by_the_name_of_its_class() -> None:
    assert lightrl.strategy.FSDPStrategy is FSDPStrategy
    with pytest.raises(AttributeError, match="no attribute 'Strategy'"):
        _ = lightrl.strategy.Strategy
