"""Statistics of a step as exact sums: a mean is the quotient of two exact sums, rounded only once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from lightrl.exact.sums import from_units, to_units
from lightrl.metrics import Statistics


class ExactStatistics(Statistics):
    """Named statistics that do not depend on the order of the added values or on the ranks that add them."""

    def __init__(self) -> None:
        super().__init__()
        self._sums: dict[str, tuple[str, int, int]] = {}  # name -> (kind, sum and count in units of exact sums)

    def values(self, name: str, values: Sequence[float]) -> None:
        """Adds values to a mean one by one, because a rank's own sum of them would be rounded."""
        for value in values:
            self.mean(name, value, 1.0)

    def _join(self, name: str, kind: str, value: float, count: float = 0.0) -> None:
        if kind in ("max", "min"):
            super()._join(name, kind, value, count)
            return
        total, count = float(value), float(count)
        if not math.isfinite(total) or not math.isfinite(count):
            self.maximum(f"{name}\0", 0.0)  # means a sum that is not finite
            total = 0.0
        _, before, counted = self._sums.get(name, (kind, 0, 0))
        self._sums[name] = (kind, before + to_units(total), counted + to_units(count))

    def reduce(self, comm: Any) -> dict[str, float]:
        """Returns the step's numbers over all ranks, sorted by name, and starts over."""
        sums, self._sums = self._sums, {}
        gathered = comm.all_gather_object(sums)
        largest = super().reduce(comm)
        result = {name: value for name, value in largest.items() if not name.endswith("\0")}
        for name in {name for part in gathered for name in part}:
            result[name] = (
                math.nan if f"{name}\0" in largest else _value([part[name] for part in gathered if name in part])
            )
        return dict(sorted(result.items()))


def _value(parts: Sequence[tuple[str, int, int]]) -> float:
    total = sum(part[1] for part in parts)
    if parts[0][0] == "sum":
        return from_units(total)
    count = sum(part[2] for part in parts)
    return from_units(total, count) if count else 0.0
