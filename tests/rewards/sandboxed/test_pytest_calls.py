"""Tests called by name, with the names of pytest that the sandbox provides and with pytest's own."""

from __future__ import annotations

import ast
import sys
from typing import Any

import pytest

from lightrl.rewards.sandboxed import pytest_names
from lightrl.rewards.sandboxed.pytest_calls import call, names_of_pytest, provide_pytest

TEXT = """
import pytest
seen = []

def setup_module(module):
    seen.append("module")

@pytest.fixture(autouse=True)
def always():
    seen.append("always")

@pytest.fixture(name="pair")
def make_pair(one):
    yield [one, one]

@pytest.fixture
def one():
    return 1

def setup_function(function):
    seen.append(function.__name__)

@pytest.mark.parametrize("x, y", [(1, 2), pytest.param(3, 4)])
@pytest.mark.parametrize("z", [5, 6])
def test_cases(x, y, z=0, w=7):
    seen.append((x, y, z, w))

def test_fixtures(pair, one, monkeypatch, capsys):
    monkeypatch.setattr("builtins.input", lambda: "typed")
    print(input())
    seen.append((pair, one, capsys.readouterr().out, capsys.readouterr().out))

class TestKind:
    @classmethod
    def setup_class(cls):
        cls.x = 1

    def setup_method(self):
        self.y = self.x + 1

    @pytest.fixture
    def three(self):
        return self.y + 1

    @pytest.mark.usefixtures("one")
    @pytest.mark.parametrize("v", [8, 9])
    def test_method(self, three, v):
        seen.append((self.x, self.y, three, v))

async def test_async():
    seen.append("async")
"""


@pytest.fixture(params=["own", "real"])
def scope(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    own = pytest_names if request.param == "own" else pytest
    monkeypatch.setitem(sys.modules, "pytest", own)
    monkeypatch.setattr(own, "fixture", pytest_names.fixture)
    monkeypatch.setattr("builtins.input", input)
    names: dict[str, Any] = {"__name__": "tests"}
    exec(TEXT, names)
    return names


@pytest.mark.parametrize(
    ("name", "method", "case", "seen"),
    [
        ("test_cases", "", 1, ["module", "test_cases", "always", (3, 4, 5, 7)]),
        ("test_fixtures", "", None, ["module", "test_fixtures", "always", ([1, 1], 1, "typed\n", "")]),
        ("TestKind", "test_method", 1, ["module", "always", (1, 2, 3, 9)]),
        ("test_async", "", None, ["module", "test_async", "always", "async"]),
    ],
)
def test_a_test_gets_its_values(
    scope: dict[str, Any], capsys: Any, name: str, method: str, case: int | None, seen: list[Any]
) -> None:
    call(scope, name, method, case)
    assert scope["seen"] == seen


def test_without_a_number_all_cases_are_called(scope: dict[str, Any]) -> None:
    call(scope, "test_cases")
    assert [item for item in scope["seen"] if isinstance(item, tuple)] == [
        (1, 2, 5, 7), (3, 4, 5, 7), (1, 2, 6, 7), (3, 4, 6, 7)
    ]  # fmt: skip


def test_the_names_of_pytest_are_its_own_only_where_the_sandbox_lacks_them(monkeypatch: pytest.MonkeyPatch) -> None:
    few = ast.parse("import pytest as p\nfrom pytest import raises\np.approx(1)")
    more = ast.parse("import pytest\npytest.warns(UserWarning)")
    assert names_of_pytest(few) == {"approx", "raises"}
    monkeypatch.setattr(pytest, "fixture", pytest.fixture)
    monkeypatch.setitem(sys.modules, "pytest", pytest)
    provide_pytest(more)
    assert sys.modules["pytest"] is pytest
    assert pytest.fixture is pytest_names.fixture
    provide_pytest(few)
    assert sys.modules["pytest"] is pytest_names
