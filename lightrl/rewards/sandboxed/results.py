"""Compares what a function of the program returns with a result that comes from JSON."""

from __future__ import annotations

import json
import math
from typing import Any

_NAMES = {"inf": math.inf, "nan": math.nan}  # as repr() writes Infinity and NaN of JSON


def value_of(written: str) -> Any:
    """Returns the value that repr() has written in a test."""
    return eval(written, {"__builtins__": {}}, _NAMES)


def is_result(returned: Any, wanted: str) -> bool:
    """Returns whether a value is in a list of results, which repr() has written.

    JSON has lists alone, and texts alone as keys: a tuple equals a list, and the key 1 equals "1". NaN equals itself.
    """
    return any(_are_equal(returned, result) for result in value_of(wanted))


def _are_equal(returned: Any, wanted: Any) -> bool:
    if isinstance(returned, list | tuple) and isinstance(wanted, list | tuple):
        return len(returned) == len(wanted) and all(map(_are_equal, returned, wanted))
    if isinstance(returned, dict) and isinstance(wanted, dict):
        found, expected = ({_as_key(key): value for key, value in side.items()} for side in (returned, wanted))
        is_whole = len(found) == len(returned) and found.keys() == expected.keys()
        return is_whole and all(_are_equal(value, expected[key]) for key, value in found.items())
    if isinstance(returned, float) and isinstance(wanted, float) and math.isnan(wanted):
        return math.isnan(returned)
    return bool(returned == wanted)


def _as_key(key: Any) -> Any:
    return json.dumps(key) if key is None or isinstance(key, bool | int | float) else key
