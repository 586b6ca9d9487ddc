"""Sums whose bits do not depend on the order of the terms, on the ranks that add them, or on a reduction's tree.

Multiples of the same power of two, the grid, add up without rounding as long as the sum needs at most 53 bits. So
numbers are rounded to a grid before they are added, and the order has no effect (Demmel and Nguyen, Fast Reproducible
Floating-Point Summation, ARITH 2013).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from fractions import Fraction

import torch
from torch import Tensor

# ---- Python floats: their sum as an integer --------------------------------------------------------------------------

_UNITS = 1074  # every finite float is a multiple of 2^-1074


def to_units(value: float) -> int:
    """Returns a finite float as an integer multiple of 2^-1074; such integers add without rounding."""
    numerator, denominator = value.as_integer_ratio()
    return numerator << (_UNITS + 1 - denominator.bit_length())


def from_units(units: int, count: int = 1 << _UNITS) -> float:
    """Returns the float nearest to units / count, in the unit of to_units(); without a count, to the sum itself."""
    return float(Fraction(units, count))


# ---- Gradients: two grids of float64 ---------------------------------------------------------------------------------

# An element is split into a multiple of 2^-21 and a rest, which is rounded to a multiple of 2^-58. There is room for
# 2^16 tiles of elements below 2^15: sums stay below 2^31 = 2^52 x 2^-21, sums of rests below 2^-6 = 2^52 x 2^-58.
LARGEST = 2.0**15
_HIGH = 1.5 * 2.0**31  # for any |x| <= 2^30, the last place of x + _HIGH is 2^-21
_LOW = 1.5 * 2.0**-6
_HALF_HIGH_UNIT = 2.0**-22
_CHUNK = 1 << 15  # elements, so that the float64 copies of a chunk fit into a core's cache


class GradientSum:
    """The sum of the gradients of tiles, independent of their order; an element of 2^15 or more makes it NaN.

    It is made once per parameter and used for every update, since mapping new memory takes longer than adding a tile.
    """

    def __init__(self, num_elements: int) -> None:
        self.high = torch.empty(num_elements, dtype=torch.float64)
        self.low = torch.empty(num_elements, dtype=torch.float64)
        self.is_empty = True  # nothing was added since the last total(), so high and low are overwritten
        size = min(num_elements, _CHUNK)
        self._wide, self._rounded = (torch.empty(size, dtype=torch.float64) for _ in range(2))

    def add(self, gradient: Tensor) -> None:
        """Adds the gradient of a tile, flat and float32."""
        for start in range(0, gradient.numel(), _CHUNK):
            where = slice(start, start + _CHUNK)
            self._add_chunk(gradient[where], self.high[where], self.low[where])
        self.is_empty = False

    def add_nothing(self) -> None:
        """Sets an empty sum to 0."""
        if self.is_empty:
            self.high.zero_()
            self.low.zero_()
            self.is_empty = False

    def _add_chunk(self, values: Tensor, high: Tensor, low: Tensor) -> None:
        smallest, largest = torch.aminmax(values)
        size = max(-float(smallest), float(largest))
        if not size < LARGEST:  # catches NaN too
            high.fill_(math.nan)
            low.zero_()
            return
        wide = self._wide[: values.numel()]
        wide.copy_(values)
        has_high = size > _HALF_HIGH_UNIT  # otherwise all are rounded to 0
        if self.is_empty:
            if has_high:
                torch.add(wide, _HIGH, out=high).sub_(_HIGH)
                wide -= high
            else:
                high.zero_()
            torch.add(wide, _LOW, out=low).sub_(_LOW)
        elif size > 0:
            rounded = self._rounded[: values.numel()]
            if has_high:
                torch.add(wide, _HIGH, out=rounded).sub_(_HIGH)
                high += rounded
                wide -= rounded
            torch.add(wide, _LOW, out=rounded).sub_(_LOW)
            low += rounded

    def total(self) -> Tensor:
        """Returns the sum, rounded once, as float32, and starts over.

        The result lies in the memory of high, which the next add() overwrites. A chunk is written where it, or an
        earlier one, was.
        """
        size = self.high.numel()
        total = self.high.view(torch.float32)[:size]
        for part, high, low in zip(*(values.split(_CHUNK) for values in (total, self.high, self.low)), strict=True):
            part.copy_(torch.add(high, low, out=self._wide[: len(part)]))
        self.is_empty = True
        return total


# ---- The norm --------------------------------------------------------------------------------------------------------


def sum_of_squares(parts: Iterable[Tensor], largest: float, num_elements: int) -> tuple[float, float]:
    """Returns the sum of squares as two numbers, each of which adds to other ranks' numbers without rounding.

    Args:
        parts: float32 tensors of this rank.
        largest: the largest absolute value on any rank, finite.
        num_elements: an upper bound of the number of values over all ranks.
    """
    if largest == 0:
        return 0.0, 0.0
    log_count = math.ceil(math.log2(num_elements)) + 1
    high = 1.5 * 2.0 ** (2 * (math.frexp(largest)[1]) + log_count)
    low = high * 2.0 ** (log_count - 53)
    sums = [0.0, 0.0]
    for values in _chunks(parts):
        squares = values.double().square_()  # exact: 48 bits
        rounded = (squares + high).sub_(high)
        sums[0] += float(rounded.sum())
        rest = squares.sub_(rounded)
        sums[1] += float((rest + low).sub_(low).sum())
    return sums[0], sums[1]


def _chunks(parts: Iterable[Tensor]) -> Iterator[Tensor]:
    for part in parts:
        yield from part.reshape(-1).split(_CHUNK)
