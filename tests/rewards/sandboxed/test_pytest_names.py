"""Against pytest's own: what tests of programs may say gives the same answer with these names."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

import numpy as np
import pytest

from lightrl.rewards.sandboxed import pytest_names

VALUES = [
    0.3, 0.1 + 0.2, 0.3 * (1 + 9e-7), 0.3 * (1 + 2e-6), 0, 1e-13, 1e-11, 1, 1 + 1e-7, "a", None, math.inf, -math.inf,
    math.nan, [0.3, 1], (0.1 + 0.2, 1), [0.3], {"a": 0.3}, {"a": 0.1 + 0.2}, {"b": 0.3}, 1j, 1j + 1e-9, [], 100, 100.5,
    {"a": 0.3, "b": 0.3}, 1e9, 1e9 + 100, 100.3,
]  # fmt: skip


@pytest.mark.parametrize("tolerances", [{}, {"abs": 0.5}, {"rel": 0.01}, {"rel": 0.001, "abs": 0.25}, {"nan_ok": True}])
def test_approx_is_that_of_pytest(tolerances: dict[str, Any]) -> None:
    takes_all = "rel" not in tolerances  # pytest refuses texts otherwise
    for wanted in VALUES if takes_all else [value for value in VALUES if value not in ("a", None)]:
        for actual in VALUES:
            theirs = actual == pytest.approx(wanted, **tolerances)
            assert (actual == pytest_names.approx(wanted, **tolerances)) == theirs, (actual, wanted)
            assert (actual != pytest_names.approx(wanted, **tolerances)) != theirs, (actual, wanted)


def test_a_function_with_named_arguments_is_one_of_a_mark() -> None:
    marked = pytest_names.mark.skipif(len, reason="no function to mark")(lambda: None)
    assert marked.pytestmark[0].args == (len,)


def test_approx_takes_arrays_and_decimals() -> None:
    assert np.array([0.1 + 0.2, 1]) == pytest_names.approx(np.array([0.3, 1]))
    assert np.array([0.1 + 0.2, 1]) == pytest_names.approx([0.3, 1])
    assert np.array([0.4, 1]) != pytest_names.approx(np.array([0.3, 1]))
    assert Decimal("0.3000000001") == pytest_names.approx(Decimal("0.3"))
    assert Decimal("0.31") != pytest_names.approx(Decimal("0.3"))


@pytest.mark.parametrize(
    ("error", "expected", "match", "passes"),
    [
        (ValueError("bad 1"), ValueError, None, True),
        (ValueError("bad 1"), (KeyError, Exception), r"bad \d", True),
        (ValueError("bad 1"), ValueError, "1", True),
        (ValueError("bad 1"), ValueError, "good", False),
        (ValueError("bad 1"), KeyError, None, False),
        (None, ValueError, None, False),
    ],
)
def test_raises_requires_an_error(error: Any, expected: Any, match: str | None, passes: bool) -> None:
    def body() -> None:
        if error:
            raise error

    def checked(raises: Any) -> bool:
        try:
            with raises(expected, match=match) as found:
                body()
        except BaseException:
            return False
        return found.value is error and found.type is type(error) and found.match("bad") is not False

    assert checked(pytest_names.raises) == checked(pytest.raises) == passes


def test_raises_takes_a_call() -> None:
    assert isinstance(pytest_names.raises(ValueError, int, "x").value, ValueError)
    assert isinstance(pytest_names.raises(ValueError, int, "2", base=2).value, ValueError)
    with pytest.raises(AssertionError, match="nothing raised"):
        pytest_names.raises(ValueError, int, "1")
    with pytest.raises(AssertionError, match="no good"):
        pytest_names.fail("no good")
