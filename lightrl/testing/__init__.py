"""For tests of lightrl and of what plugs into it: real ranks with a hard time-out, and the contract of an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightrl.testing.spmd import SpmdError, free_port, run_program, run_spmd

if TYPE_CHECKING:
    from lightrl.testing.engine_contract import EngineContract

__all__ = ["EngineContract", "SpmdError", "free_port", "run_program", "run_spmd"]


def __getattr__(name: str) -> Any:
    if name == "EngineContract":  # needs pytest, which those who only start ranks may not have
        from lightrl.testing.engine_contract import EngineContract  # noqa: PLC0415

        return EngineContract
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
