"""The names of pytest that tests of programs use, for a sandbox: pytest loads slowly and need not be installed."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from decimal import Decimal
from numbers import Complex
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn

PROVIDED = frozenset({"approx", "fail", "fixture", "mark", "param", "raises"})
_RELATIVE, _ABSOLUTE = 1e-6, 1e-12  # tolerances of approx()


class ParameterSet(NamedTuple):
    """The values of one case, as param() gives them."""

    values: tuple[Any, ...]
    marks: Any = ()
    id: str | None = None


def param(*values: Any, marks: Any = (), id: str | None = None) -> ParameterSet:  # noqa: A002  (its name in pytest)
    """Returns a case for parametrize."""
    return ParameterSet(values, marks, id)


def fail(reason: str = "", pytrace: bool = True) -> NoReturn:
    """Fails the test."""
    raise AssertionError(reason)


def fixture(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Marks a function as a fixture and leaves it as it is."""
    if function is None:
        return lambda marked: fixture(marked, **options)
    function.fixture_options = options  # type: ignore[attr-defined]
    return function


class _Marks:
    def __getattr__(self, name: str) -> Callable[..., Any]:
        def mark(*args: Any, **named: Any) -> Any:
            if len(args) == 1 and not named and callable(args[0]):
                return _marked(args[0], SimpleNamespace(name=name, args=(), kwargs={}))
            return lambda function: _marked(function, SimpleNamespace(name=name, args=args, kwargs=named))

        return mark


def _marked(target: Any, mark: SimpleNamespace) -> Any:
    target.pytestmark = [*getattr(target, "pytestmark", ()), mark]
    return target


mark = _Marks()


def raises(expected: Any, *call: Any, match: str | None = None, **named: Any) -> Any:
    """Requires that the body of a `with`, or a call, raises an error of these classes, whose text may have to match."""
    if not call:
        return _raising(expected, match)
    with _raising(expected, match) as found:
        call[0](*call[1:], **named)
    return found


@contextmanager
def _raising(expected: Any, match: str | None) -> Iterator[SimpleNamespace]:
    found = SimpleNamespace(value=None, type=None)
    found.match = lambda pattern: _require_match(pattern, found.value)
    try:
        yield found
    except expected as error:
        found.value, found.type = error, type(error)
        if match is not None:
            _require_match(match, error)
        return
    raise AssertionError(f"nothing raised {expected}")


def _require_match(pattern: Any, error: Any) -> bool:
    if not re.search(pattern, str(error)):
        raise AssertionError(f"{error!s} does not match {pattern!r}")
    return True


class approx:  # noqa: N801  (its name in pytest)
    """Equals numbers within a tolerance, also in lists, tuples, dictionaries and arrays."""

    __hash__ = None  # type: ignore[assignment]
    __array_ufunc__ = None  # an array leaves the comparison to this object

    def __init__(self, expected: Any, rel: Any = None, abs: Any = None, nan_ok: bool = False) -> None:  # noqa: A002
        self._expected, self._nan_ok = expected, nan_ok
        self._relative = rel if rel is not None else _RELATIVE if abs is None else 0
        self._absolute = abs if abs is not None else _ABSOLUTE

    def __eq__(self, actual: object) -> bool:
        return self._is_near(actual, self._expected)

    def _is_near(self, actual: Any, expected: Any) -> bool:
        actual, expected = _as_list(actual), _as_list(expected)
        if isinstance(expected, dict):
            is_alike = isinstance(actual, dict) and actual.keys() == expected.keys()
            return is_alike and all(self._is_near(actual[key], expected[key]) for key in expected)
        if isinstance(expected, list | tuple):
            is_alike = isinstance(actual, list | tuple) and len(actual) == len(expected)
            return is_alike and all(map(self._is_near, actual, expected))
        if not all(isinstance(value, Complex | Decimal) for value in (actual, expected)):
            return bool(actual == expected)
        return bool(actual == expected) or self._is_near_number(actual, expected)

    def _is_near_number(self, actual: Any, expected: Any) -> bool:
        if expected != expected or actual != actual:
            return bool(self._nan_ok and expected != expected and actual != actual)
        if math.isinf(abs(expected)):
            return False
        kind = type(expected) if isinstance(expected, Decimal) else float
        tolerance = max(kind(self._relative) * abs(expected), kind(self._absolute))
        return bool(abs(expected - actual) <= tolerance)


def _as_list(value: Any) -> Any:
    return value.tolist() if type(value).__module__ == "numpy" else value
