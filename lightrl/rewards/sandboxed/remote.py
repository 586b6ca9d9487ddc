"""Remote: stands for an object that lives in the other process, which carries out all operations on it.

It never equals plain data and does not calculate with it. So a program can neither decide the comparison in a test nor
see the value that it is compared with. Enumerations and named tuples are compared by the data that they contain.
"""

from __future__ import annotations

import builtins
import operator
from collections.abc import Callable
from typing import Any


def _await(coroutine: Any) -> Any:
    import asyncio  # noqa: PLC0415  (slow to load, and rarely needed)

    return asyncio.run(_returned(coroutine))


async def _returned(awaitable: Any) -> Any:
    return await awaitable


_FUNCTIONS = ("len", "iter", "next", "bool", "str", "repr", "hash", "int", "float", "abs", "reversed", "format")
_ITEMS = ("getitem", "setitem", "delitem", "index", "neg", "pos", "invert")
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and_", "or_", "xor")
_OF_CONTENT = ("len", "iter", "bool", "hash", "int", "float", "abs", "getitem", "index", "neg", "pos", "invert")

OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda target, *args, **named: target(*args, **named),
    "getattr": getattr,
    "setattr": setattr,
    "delattr": delattr,
    "enter": lambda target: type(target).__enter__(target),
    "exit": lambda target: type(target).__exit__(target, None, None, None),
    "instancecheck": lambda target, value: isinstance(value, target),
    "subclasscheck": lambda target, value: issubclass(value, target),
    "await": _await,
    **{name: getattr(builtins, name) for name in _FUNCTIONS},
    **{name: getattr(operator, name) for name in (*_ITEMS, *_COMPARISONS, *_ARITHMETIC)},
}
_ASKED = ("call", "setattr", "delattr", "enter", "instancecheck", "subclasscheck", *_FUNCTIONS, *_ITEMS)
_LOCAL_ATTRIBUTES = ("__class__", "__dict__")


class Remote:
    """Stands for an object at the other end of a channel."""

    def __init__(self, ask: Callable[..., Any], number: int, content: tuple[Any, ...]) -> None:
        object.__setattr__(self, "_ask", ask)
        object.__setattr__(self, "_number", number)  # by which the other end knows it
        object.__setattr__(self, "_content", content)  # its data; () if it has none

    def __contains__(self, item: Any) -> bool:
        return any(item == other for other in iter(self))

    def __exit__(self, *_error: object) -> Any:
        return _asked(self, "exit")

    def __getattribute__(self, name: str) -> Any:
        if name in _LOCAL_ATTRIBUTES or (name.startswith("__") and name in Remote.__dict__):
            return object.__getattribute__(self, name)
        return _asked(self, "getattr", name)


def number_of(remote: Remote) -> int:
    """Returns the number by which the other end knows the object."""
    number: int = object.__getattribute__(remote, "_number")
    return number


def _content_of(remote: Remote) -> tuple[Any, ...]:
    content: tuple[Any, ...] = object.__getattribute__(remote, "_content")
    return content


def _asked(target: Remote, operation: str, *args: Any, **named: Any) -> Any:
    return object.__getattribute__(target, "_ask")(operation, target, *args, **named)


def _unary(operation: str) -> Callable[..., Any]:
    def method(self: Remote, *args: Any, **named: Any) -> Any:
        content = _content_of(self)
        if content and operation in _OF_CONTENT:
            return OPERATIONS[operation](content[0], *args)
        return _asked(self, operation, *args, **named)

    return method


def _binary(operation: str, *, is_reversed: bool = False) -> Callable[[Remote, Any], Any]:
    def method(self: Remote, other: Any) -> Any:
        content = _content_of(self)
        if isinstance(other, Remote) and not content and not _content_of(other):
            if number_of(self) == number_of(other) and operation in ("eq", "ne"):
                return operation == "eq"
            return _asked(other, operation, self) if is_reversed else _asked(self, operation, other)
        value = (*_content_of(other), other)[0] if isinstance(other, Remote) else other
        if not content or isinstance(value, Remote):
            return NotImplemented
        return OPERATIONS[operation](value, content[0]) if is_reversed else OPERATIONS[operation](content[0], value)

    return method


def _add_operations() -> None:
    for name in _ASKED:
        setattr(Remote, f"__{name}__", _unary(name))
    for name in _COMPARISONS:
        setattr(Remote, f"__{name}__", _binary(name))
    for name in _ARITHMETIC:
        setattr(Remote, f"__{name.rstrip('_')}__", _binary(name))
        setattr(Remote, f"__r{name.rstrip('_')}__", _binary(name, is_reversed=True))


_add_operations()
