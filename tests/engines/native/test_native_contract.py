"""The native engine under the contract of all engines."""

from lightrl.testing import EngineContract


class TestNativeEngine(EngineContract):
    engine = "native"
