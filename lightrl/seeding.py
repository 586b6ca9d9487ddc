"""Counter-based random numbers: every draw is a pure function of integers, never of a rank or of call order."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def _splitmix64(value: Any) -> Any:
    """Mixes every bit of a 64-bit integer, or of each element of a uint64 array, without losing any.

    This is the finaliser of SplitMix64 (Steele, Lea, Flood 2014).
    """
    value = (value + _GOLDEN) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def prefix_state(*parts: int) -> int:
    """Returns the 64-bit state after mixing in the parts: all integers of a draw except the last one."""
    state: int = 0
    for part in parts:
        state = _splitmix64(state ^ _splitmix64(part & _MASK64))
    return state


def mix_seed(*parts: int) -> int:
    """Returns one non-negative 63-bit seed for any integers; the order of the parts matters."""
    return prefix_state(*parts) >> 1


def prefix_states(states: NDArray[np.uint64] | np.uint64, last_parts: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Returns prefix_state(*parts, last) for each last part; states: prefix_state(*parts)."""
    mixed: NDArray[np.uint64] = _splitmix64(states ^ _splitmix64(last_parts.astype(np.uint64)))
    return mixed


def uniform_array(states: NDArray[np.uint64], last_parts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Returns many draws, float64 in [0, 1): the high 53 bits of mix_seed(*parts, last) for each.

    Args:
        states: prefix_state(*parts) of each draw.
        last_parts: its last part.
    """
    return (prefix_states(states, last_parts) >> np.uint64(11)).astype(np.float64) / float(1 << 53)
