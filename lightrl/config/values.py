"""Checks and readings of single values, and the hints that errors give."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml


def check_types(config: Any, prefix: str = "") -> None:
    """What the command line's parser checks, for those who build a config in Python."""
    hints = get_type_hints(type(config))
    for item in dataclasses.fields(config):
        name, hint, value = f"{prefix}{item.name}", hints[item.name], getattr(config, item.name)
        if dataclasses.is_dataclass(hint):
            if not isinstance(value, hint):  # type: ignore[arg-type]
                raise TypeError(f"{name} must be a {hint.__name__}, not {value!r}.")  # type: ignore[union-attr]
            check_types(value, f"{name}.")
        elif get_origin(hint) is Literal:
            _check_choice(name, hint, value)
        elif hint == float | None:
            if value is not None:
                _check_plain_type(name, float, value)
        else:
            _check_plain_type(name, hint, value)


def _check_plain_type(name: str, hint: Any, value: object) -> None:
    if hint not in (bool, int, float, str):
        return
    is_right = isinstance(value, int | float if hint is float else hint)
    if not is_right or (isinstance(value, bool) and hint is not bool):
        raise TypeError(f"{name} must be {hint.__name__}, not {value!r}.")


def check_choices(config: Any, prefix: str = "") -> None:
    """Only the options that are one of a few words or numbers, where another value would be taken for the default."""
    hints = get_type_hints(type(config))
    for item in dataclasses.fields(config):
        name, hint, value = f"{prefix}{item.name}", hints[item.name], getattr(config, item.name)
        if dataclasses.is_dataclass(hint):
            check_choices(value, f"{name}.")
        elif get_origin(hint) is Literal:
            _check_choice(name, hint, value)


def _check_choice(name: str, hint: Any, value: object) -> None:
    if value not in get_args(hint):
        raise ValueError(f"{name} is {value!r}: choose one of {', '.join(map(str, get_args(hint)))}.")


def check_not_negative(values: Mapping[str, float]) -> None:
    for name, value in values.items():
        if not value >= 0:
            raise ValueError(f"--{name} is {value}: it must be 0 or above.")


def check_at_least_one(values: Mapping[str, int]) -> None:
    for name, value in values.items():
        if value < 1:
            raise ValueError(f"--{name} is {value}: it must be at least 1.")


def check_fractions(values: Mapping[str, float]) -> None:
    for name, value in values.items():
        if not 0 <= value <= 1:
            raise ValueError(f"--{name} is {value}: it must be between 0 and 1.")


def check_finite(values: Mapping[str, float]) -> None:
    for name, value in values.items():
        if not math.isfinite(value):
            raise ValueError(f"--{name} is {value}: it must be a finite number.")


def nearest_multiples(value: int, divisor: int, name: str) -> str:
    """A hint with the two nearest valid values."""
    low = value // divisor * divisor
    options = [low, low + divisor] if low else [divisor]
    return f"Nearest valid {name}: {' or '.join(map(str, options))}."


def nearest_name(name: str, known: Sequence[str] | set[str]) -> str:
    """A hint with the nearest known names, or all of them."""
    close = difflib.get_close_matches(name, sorted(known), n=3, cutoff=0.5)
    return f"Did you mean {' or '.join(close)}?" if close else f"Known: {', '.join(sorted(known))}."


def engine_arguments(config: Any) -> dict[str, Any]:
    """--engine_args as a dict."""
    return named_values(config.engine_args, "engine_args")


def named_values(items: Sequence[str], option: str) -> dict[str, Any]:
    """name=value texts as a dict; values are read as YAML, so 4, 0.5, 3e-4, true and [a, b] are what they look like."""
    found: dict[str, Any] = {}
    for item in items:
        name, separator, value = item.partition("=")
        if not separator or not name.isidentifier():
            raise ValueError(f"--{option} {item!r}: it must be name=value, without spaces around the sign.")
        if name in found:
            raise ValueError(f"--{option}: {name} is given twice.")
        found[name] = _plain_value(value)
    return found


def _plain_value(text: str) -> Any:
    """YAML 1.1 takes 3e-4 for a text, since it has no point."""
    value = yaml.safe_load(text)
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value
