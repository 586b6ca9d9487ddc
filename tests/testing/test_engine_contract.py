"""The contract over an engine without a cache, whose weights are loaded by the code of docs/adding_an_engine.md."""

from lightrl.testing import EngineContract


class TestEngineWithoutCache(EngineContract):
    engine = "engine_without_cache:EngineWithoutCache"
    cuts_draws = constrains_draws = False
    has_cache = False
