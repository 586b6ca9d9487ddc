"""WeightProof: the tensors handed to an engine are the trainer's, each name once, each with the trainer's values.

The trainer takes a fingerprint of each parameter from its own shards, and the tensors travel on another path. What
happens inside the engine is checked by the engine (load_weights) and by the canary (strategy/serving/canary.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from torch import Tensor

from lightrl.engines.weights.account import WeightAccount, raise_problems

_CHUNK = 1 << 24  # elements turned to float64 at a time: 128 MiB


class Fingerprint(NamedTuple):
    """Two sums over a tensor's values, in float64: they add up over shards, and padding with zeros adds nothing."""

    total: float
    squares: float
    numel: float


def fingerprint(tensor: Tensor) -> Fingerprint:
    """Returns the fingerprint of a whole tensor or of one shard."""
    total = squares = 0.0
    for chunk in tensor.detach().reshape(-1).split(_CHUNK):
        values = chunk.double()
        total += float(values.sum())
        squares += float(values.square().sum())
    return Fingerprint(total, squares, float(tensor.numel()))


def is_same(first: Fingerprint, second: Fingerprint) -> bool:
    """Returns whether two fingerprints agree up to the order of summation; a NaN equals nothing."""
    if first.numel != second.numel:
        return False
    # |sum| <= sqrt(numel * squares): the scale against which rounding is judged
    room = 1e-11 * math.sqrt(first.numel * first.squares) + 1e-300
    return abs(first.total - second.total) <= room and abs(first.squares - second.squares) <= 1e-11 * first.squares


class WeightProof:
    """Watches the pairs on their way to the engine and reports afterwards which are not the trainer's."""

    def __init__(self, expected: Mapping[str, Fingerprint] | None) -> None:
        """Takes the fingerprints of all the trainer's parameters; None counts bytes only."""
        self._expected = expected
        self._account = WeightAccount(dict.fromkeys(expected or ()))
        self.num_bytes = 0

    def watched(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yields the pairs unchanged and compares each with what is expected."""
        for name, tensor in weights:
            self.num_bytes += tensor.numel() * tensor.element_size()
            if self._expected is not None:
                self._check(name, tensor, self._expected)
            yield name, tensor

    def _check(self, name: str, tensor: Tensor, expected: Mapping[str, Fingerprint]) -> None:
        if self._account.accept(name, tensor) and not is_same(fingerprint(tensor), expected[name]):
            self._account.add_problem(f"{name} differs from the trainer's")

    def finish(self, version: int) -> None:
        """Raises WeightSyncError that names every parameter that was lost, added, repeated or changed on the way."""
        raise_problems(self._account.problems(), f"Weight sync to version {version}")
