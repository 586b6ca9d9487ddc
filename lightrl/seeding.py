"""Counter-based random numbers: every draw is a pure function of integers, never of a rank or of call order."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def _splitmix64(value: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014): a bijection of 64-bit integers that mixes every bit."""
    value = (value + _GOLDEN) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def prefix_state(*parts: int) -> int:
    """The 64-bit state after mixing in the parts: what a draw needs of all its integers but the last."""
    state = 0
    for part in parts:
        state = _splitmix64(state ^ _splitmix64(part & _MASK64))
    return state


def mix_seed(*parts: int) -> int:
    """One non-negative 63-bit seed from any integers; the order of the parts matters."""
    return prefix_state(*parts) >> 1


def uniform(*parts: int) -> float:
    """A float64 in [0, 1) that depends on nothing but the integers given."""
    return (mix_seed(*parts) >> 10) / (1 << 53)


def _splitmix64_array(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """_splitmix64 of every element; unsigned array arithmetic wraps, which is the mask."""
    values = values + np.uint64(_GOLDEN)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def uniform_array(states: NDArray[np.uint64], last_parts: NDArray[np.int64]) -> NDArray[np.float64]:
    """uniform(*parts, last) for many draws, bit for bit, from each one's prefix_state(*parts) and last part."""
    mixed = _splitmix64_array(states ^ _splitmix64_array(last_parts.astype(np.uint64)))
    return (mixed >> np.uint64(11)).astype(np.float64) / float(1 << 53)
