"""Passes errors from one process to the other by the names of their classes."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Mapping
from typing import Any

_QUIET = (StopIteration, StopAsyncIteration, GeneratorExit, KeyboardInterrupt)  # would end a test's loop silently
_classes: dict[tuple[str, ...], type[BaseException]] = {}


def describe_error(error: BaseException, pack: Callable[[Any], Any]) -> dict[str, Any]:
    """Describes an error as plain JSON data, without arguments that are not data."""
    try:
        args = [pack(item) for item in error.args]
    except Exception:  # an argument is not data; class and operation still show what happened
        args = []
    return {"lineage": lineage(type(error)), "args": args}


def error_from(described: Mapping[str, Any], args: list[Any], operation: str) -> BaseException:
    """Returns the described error; one that would end a loop silently becomes a RuntimeError."""
    kind = error_class(described["lineage"])
    if issubclass(kind, StopIteration) and operation == "next":
        return StopIteration()
    if issubclass(kind, _QUIET):
        return RuntimeError(f"the program raised {kind.__name__}")
    try:
        return kind(*args)
    except Exception:  # a class of the program's own, whose constructor takes other arguments
        return RuntimeError(f"the program raised {kind.__name__}")


def lineage(kind: type[BaseException]) -> list[str]:
    """Returns the names of an error's class and of its base classes, up to the first built-in one."""
    names = []
    for base in kind.__mro__:
        names.append(base.__name__)
        if getattr(builtins, base.__name__, None) is base:
            return names
    return [*names, "Exception"]


def error_class(names: list[str]) -> type[BaseException]:
    """Returns the class in this process that corresponds to a lineage."""
    last = getattr(builtins, str(names[-1]), None)
    kind = last if isinstance(last, type) and issubclass(last, BaseException) else Exception
    for start in range(len(names) - 2, -1, -1):
        key = tuple(str(name) for name in names[start:])
        if key not in _classes:
            _classes[key] = type(key[0], (kind,), {})
        kind = _classes[key]
    return kind
