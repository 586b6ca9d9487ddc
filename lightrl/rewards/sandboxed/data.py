"""Converts values to JSON data and back; the caller provides functions for values that are not plain data."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable, Mapping
from typing import Any

_SAFE_TYPES = ("int", "float", "complex", "str", "bytes", "bool", "list", "tuple", "dict", "set", "frozenset", "object")
# Types of the standard library, by module and name: (function to the parts of a value, function from these parts).
_FROM_PARTS: dict[tuple[str, str], tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]] = {
    ("builtins", "complex"): (lambda value: [value.real, value.imag], lambda kind, parts: kind(*parts)),
    ("builtins", "range"): (lambda value: [value.start, value.stop, value.step], lambda kind, parts: kind(*parts)),
    ("builtins", "slice"): (lambda value: [value.start, value.stop, value.step], lambda kind, parts: kind(*parts)),
    ("builtins", "bytes"): (lambda value: value.hex(), lambda kind, parts: kind.fromhex(parts)),
    ("builtins", "bytearray"): (lambda value: value.hex(), lambda kind, parts: kind.fromhex(parts)),
    ("builtins", "tuple"): (list, lambda kind, parts: kind(parts)),
    ("builtins", "set"): (list, lambda kind, parts: kind(parts)),
    ("builtins", "frozenset"): (list, lambda kind, parts: kind(parts)),
    ("builtins", "dict"): (lambda value: [list(pair) for pair in value.items()], lambda kind, parts: kind(parts)),
    ("collections", "OrderedDict"): (
        lambda value: [list(pair) for pair in value.items()],
        lambda kind, parts: kind(parts),
    ),
    ("collections", "Counter"): (
        lambda value: [list(pair) for pair in value.items()],
        lambda kind, parts: kind(dict(parts)),
    ),
    ("collections", "defaultdict"): (
        lambda value: [list(pair) for pair in value.items()],
        lambda kind, parts: kind(None, parts),
    ),
    ("collections", "deque"): (lambda value: [list(value), value.maxlen], lambda kind, parts: kind(*parts)),
    ("decimal", "Decimal"): (str, lambda kind, parts: kind(parts)),
    ("fractions", "Fraction"): (lambda value: [value.numerator, value.denominator], lambda kind, parts: kind(*parts)),
    ("datetime", "date"): (lambda value: value.isoformat(), lambda kind, parts: kind.fromisoformat(parts)),
    ("datetime", "time"): (lambda value: value.isoformat(), lambda kind, parts: kind.fromisoformat(parts)),
    ("datetime", "datetime"): (lambda value: value.isoformat(), lambda kind, parts: kind.fromisoformat(parts)),
    ("datetime", "timedelta"): (
        lambda value: [value.days, value.seconds, value.microseconds],
        lambda kind, parts: kind(*parts),
    ),
}
if hasattr(sys, "set_int_max_str_digits"):
    sys.set_int_max_str_digits(0)


class UnknownDataError(Exception):
    """A value cannot be packed as data, or data cannot be unpacked to a value."""


def pack_data(value: Any, pack_object: Callable[[Any], Any]) -> Any:
    """Packs a value as JSON data; instances of subclasses are packed as objects, as their behaviour is arbitrary."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is list:
        return [pack_data(item, pack_object) for item in value]
    for name in ((kind.__module__, kind.__name__),):
        if name in _FROM_PARTS and getattr(sys.modules.get(name[0]), name[1], None) is kind:
            return {"type": list(name), "parts": pack_data(_FROM_PARTS[name][0](value), pack_object)}
    if value is Ellipsis or value is NotImplemented:
        return {"builtin": str(value)}
    name_of_own = getattr(value, "__name__", "") if kind.__module__ == "builtins" else ""
    if isinstance(name_of_own, str) and name_of_own and getattr(builtins, name_of_own, None) is value:
        return {"builtin": name_of_own}
    return _pack_array(value, pack_object)


def _pack_array(value: Any, pack_object: Callable[[Any], Any]) -> Any:
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        return pack_data(value.item(), pack_object)
    if numpy is not None and type(value) is numpy.ndarray and value.dtype.kind in "biufcU":
        return {"array": [value.dtype.str, list(value.shape), pack_data(value.tolist(), pack_object)]}
    return pack_object(value)


def unpack_data(data: Any, unpack_object: Callable[[Mapping[str, Any]], Any], *, allow_functions: bool) -> Any:
    """Unpacks data that came from another process; it constructs no other types than those above."""

    def unpack(item: Any) -> Any:
        if isinstance(item, list):
            return [unpack(part) for part in item]
        if not isinstance(item, dict):
            return item
        if "type" in item:
            name = tuple(item["type"])
            if name not in _FROM_PARTS:
                raise UnknownDataError(f"the type {name}")
            return _FROM_PARTS[name][1](getattr(__import__(name[0]), name[1]), unpack(item["parts"]))
        if "array" in item:
            import numpy  # noqa: PLC0415  (optional in a sandbox)

            kind, shape, values = item["array"]
            return numpy.array(unpack(values), dtype=kind).reshape(shape)
        if "builtin" in item:
            if not allow_functions and item["builtin"] not in (*_SAFE_TYPES, "Ellipsis", "NotImplemented"):
                raise UnknownDataError(f"the function {item['builtin']}")
            return getattr(builtins, item["builtin"])
        return unpack_object(item)

    return unpack(data)
