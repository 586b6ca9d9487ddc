"""The ranges of an algorithm's parameters, written as their types, such as `gamma: Share = 1.0`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints


@dataclass(frozen=True, slots=True)
class Interval:
    """The numbers from low to high."""

    low: float
    high: float = math.inf
    has_low: bool = True  # whether low itself is inside

    def __contains__(self, number: float) -> bool:
        return self.low <= number <= self.high and (self.has_low or number != self.low)

    def __str__(self) -> str:
        if self.high < math.inf:
            return f"between {self.low:g} and {self.high:g}"
        return f"at least {self.low:g}" if self.has_low else f"above {self.low:g}"


Share = Annotated[float, Interval(0, 1)]
NotNegative = Annotated[float, Interval(0)]
Positive = Annotated[float, Interval(0, has_low=False)]


def check_values(function: Callable[..., Any], given: Mapping[str, Any], label: str) -> None:
    """Raises ValueError for a value that is NaN, infinite, out of range, or not of the parameter's type."""
    try:
        hints = get_type_hints(function, include_extras=True)
    except (NameError, TypeError):  # a user's annotations need not be importable
        hints = {}
    for name, value in given.items():
        hint, interval = _parts(hints.get(name))
        wanted = _wanted(hint, interval, value)
        if wanted:
            raise ValueError(f"{label}: {name} is {value!r}, and it must be {wanted}.")


def _parts(hint: Any) -> tuple[Any, Interval | None]:
    if get_origin(hint) is Annotated:
        kind, *extras = get_args(hint)
        return kind, next((item for item in extras if isinstance(item, Interval)), None)
    return hint, None


def _wanted(hint: Any, interval: Interval | None, value: Any) -> str:
    """Describes the values that are allowed; empty if this value is one of them."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if get_origin(hint) is Literal and value not in get_args(hint):
        return f"one of {', '.join(map(str, get_args(hint)))}"
    if hint is bool and not isinstance(value, bool):
        return "true or false"
    if hint is int and not isinstance(value, int):
        return "a whole number"
    if hint in (int, float) and not is_number:
        return "a number"
    if is_number and not math.isfinite(value):
        return f"a finite number{f', {interval}' if interval else ''}"
    return str(interval) if interval and value not in interval else ""
