"""Tests called by name, with the names of pytest that the sandbox provides and with pytest's own."""

from __future__ import annotations

import ast
import sys
from types import SimpleNamespace
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
@pytest.mark.parametrize(["z"], [(5,), (6,)])
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

    @pytest.fixture
    def noted(self):
        seen.append("noted")

    @pytest.mark.usefixtures("noted")
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
    names["claims"] = SimpleNamespace(fixture_options={"name": "one"})  # an object of a program is no fixture
    return names


@pytest.mark.parametrize(
    ("name", "method", "case", "seen"),
    [
        ("test_cases", "", 1, ["module", "test_cases", "always", (3, 4, 5, 7)]),
        ("test_fixtures", "", None, ["module", "test_fixtures", "always", ([1, 1], 1, "typed\n", "")]),
        ("TestKind", "test_method", 1, ["module", "always", "noted", (1, 2, 3, 9)]),
        ("test_async", "", None, ["module", "test_async", "always", "async"]),
    ],
)
def test_a_test_gets_its_values(
    scope: dict[str, Any], capsys: Any, name: str, method: str, case: int | None, seen: list[Any]
) -> None:
    call(scope, name, method, case)
    assert scope["seen"] == seen


def test_set_up_module_runs_before_the_tests() -> None:
    scope: dict[str, Any] = {}
    exec("seen = []\ndef setUpModule(): seen.append('module')\ndef test_it(): seen.append('it')", scope)
    call(scope, "test_it")
    assert scope["seen"] == ["module", "it"]


def test_without_a_number_all_cases_are_called(scope: dict[str, Any]) -> None:
    call(scope, "test_cases")
    assert [item for item in scope["seen"] if isinstance(item, tuple)] == [
        (1, 2, 5, 7), (3, 4, 5, 7), (1, 2, 6, 7), (3, 4, 6, 7)
    ]  # fmt: skip


def test_the_names_of_pytest_are_its_own_only_where_the_sandbox_lacks_them(monkeypatch: pytest.MonkeyPatch) -> None:
    few = ast.parse("import math, pytest as p\nmath.floor(1)\nfrom pytest import raises\np.approx(1)")
    more = ast.parse("import pytest\npytest.warns(UserWarning)")
    assert names_of_pytest(few) == {"approx", "raises"}
    monkeypatch.setattr(pytest, "fixture", pytest.fixture)
    monkeypatch.setitem(sys.modules, "pytest", pytest)
    provide_pytest(more)
    assert sys.modules["pytest"] is pytest
    assert pytest.fixture is pytest_names.fixture
    provide_pytest(few)
    assert sys.modules["pytest"] is pytest_names


PATCHES = """
import os, sys, types

class Kind:
    inherited = 1

class Child(Kind):
    own = 2

thing = types.SimpleNamespace(a=1)
items = {"a": 1}
os.environ["LIGHTRL_A"] = "1"
before = os.getcwd(), list(sys.path)
sys.modules["of_tests"] = module = types.ModuleType("of_tests")
module.Child = Child

def change(patch):
    patch.setattr(thing, "a", value=2)
    patch.setattr(thing, "b", 2, raising=False)
    patch.setattr(thing, "b", 3)
    patch.setattr("of_tests.Child.own", 4)
    patch.setattr(Child, "inherited", 5)
    patch.delattr("of_tests.Kind", raising=False)
    patch.setitem(items, "a", 2)
    patch.setitem(items, "b", 3)
    patch.delitem(items, "c", raising=False)
    patch.setenv("LIGHTRL_A", 0, prepend=":")
    patch.setenv("LIGHTRL_B", 2, prepend=":")
    patch.delenv("LIGHTRL_C", raising=False)
    patch.chdir("/")
    patch.syspath_prepend("/")

def state():
    return (
        dict(vars(thing)), Child.own, Child.inherited, dict(items), os.environ["LIGHTRL_A"],
        os.environ.get("LIGHTRL_B"), (os.getcwd(), list(sys.path)) == before,
        "inherited" in vars(Child),
    )

def test_undo(monkeypatch, capsys):
    change(monkeypatch)
    assert state() == ({"a": 2, "b": 3}, 4, 5, {"a": 2, "b": 3}, "0:1", "2", False, True)
    with monkeypatch.context() as inner:
        inner.delattr(thing, "a", raising=False)
        assert not hasattr(thing, "a")
        inner.delitem(items, "a")
        inner.delenv("LIGHTRL_A")
    assert state()[0] == state()[3] == {"a": 2, "b": 3}
    for wrong in (monkeypatch.setattr, monkeypatch.delattr):
        try:
            wrong(thing, "none", *([1] if wrong == monkeypatch.setattr else []))
        except AttributeError:
            continue
        raise SystemExit
    monkeypatch.undo()
    assert state() == unchanged
    print("heard")
    with capsys.disabled():
        print("not heard")
    assert capsys.readouterr().out == "heard\\n"

@pytest.mark.parametrize("n", [1, 2])
def test_cases(monkeypatch, n):
    assert state() == unchanged
    change(monkeypatch)

unchanged = ({"a": 1}, 2, 1, {"a": 1}, "1", None, True, False)
"""


def test_what_monkeypatch_changes_is_taken_back(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    for name in ("A", "B"):
        monkeypatch.setenv(f"LIGHTRL_{name}", "")
    monkeypatch.delenv("LIGHTRL_B")
    names: dict[str, Any] = {"__name__": "tests", "pytest": pytest_names}
    exec(PATCHES, names)
    call(names, "test_cases")
    assert names["state"]() == names["unchanged"]
    call(names, "test_undo")
    sys.modules.pop("of_tests")
