"""Tools to test lightrl and its plug-ins: ranks with a hard time-out, a check of losses, contracts of larger parts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightrl.process_group import free_port
from lightrl.testing.loss_check import check_loss
from lightrl.testing.spmd import SpmdError, run_program, run_spmd

if TYPE_CHECKING:
    from lightrl.testing.engine_contract import EngineContract
    from lightrl.testing.strategy_contract import StrategyContract, StrategyParity

__all__ = [
    "EngineContract",
    "SpmdError",
    "StrategyContract",
    "StrategyParity",
    "check_loss",
    "free_port",
    "run_program",
    "run_spmd",
]


def __getattr__(name: str) -> Any:
    # The contracts need pytest, which may be missing where a script only starts ranks.
    if name == "EngineContract":
        from lightrl.testing.engine_contract import EngineContract  # noqa: PLC0415

        return EngineContract
    if name in ("StrategyContract", "StrategyParity"):
        from lightrl.testing import strategy_contract  # noqa: PLC0415

        return getattr(strategy_contract, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
