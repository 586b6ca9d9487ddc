"""Calls a test as pytest would: with the values of its cases, its fixtures, and what is to be set up before it."""

from __future__ import annotations

import ast
import builtins
import inspect
import io
import itertools
import operator
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, reduce
from importlib import import_module
from typing import Any, NamedTuple

from lightrl.rewards.sandboxed import pytest_names

BUILT_IN = ("capsys", "monkeypatch")


def names_of_pytest(module: ast.Module) -> set[str]:
    """Returns the names of pytest that a test uses."""
    imports = [node for node in ast.walk(module) if isinstance(node, ast.Import)]
    own = {name.asname or name.name for node in imports for name in node.names if name.name == "pytest"}
    attributes = [node for node in ast.walk(module) if isinstance(node, ast.Attribute)]
    used = {node.attr for node in attributes if isinstance(node.value, ast.Name) and node.value.id in own}
    froms = [node for node in ast.walk(module) if isinstance(node, ast.ImportFrom) and node.module == "pytest"]
    return used | {name.name for node in froms for name in node.names}


def provide_pytest(module: ast.Module) -> None:
    """Makes the names of pytest that a test uses importable: those of its own kind here, or else the real ones."""
    if names_of_pytest(module) <= pytest_names.PROVIDED:
        sys.modules["pytest"] = pytest_names
    else:
        installed: Any = import_module("pytest")
        installed.fixture = pytest_names.fixture


def call(scope: Mapping[str, Any], name: str, method: str = "", case: int | None = None) -> None:
    """Calls a test function, or a method of a class, with the values of one case, or of all one after another."""
    _set_up(scope.get("setUpModule") or scope.get("setup_module"), None)
    owner: Any = None
    if method:
        _set_up(getattr(scope[name], "setup_class", None), scope[name])
        owner = scope[name]()
    target = getattr(owner, method) if method else scope[name]
    marks = [*getattr(scope[name], "pytestmark", ()), *(getattr(target, "pytestmark", ()) if method else ())]
    cases = _cases(marks)
    for values in cases if case is None else cases[case : case + 1]:
        _set_up(getattr(owner, "setup_method", None) if method else scope.get("setup_function"), target)
        fixtures = _Fixtures(scope, owner, values)
        fixtures.use_automatic(marks)
        result = target(**fixtures.arguments(target))
        if inspect.iscoroutine(result):
            import asyncio  # noqa: PLC0415  (slow to load, and rarely needed)

            asyncio.run(result)
        fixtures.undo()


def _set_up(function: Callable[..., Any] | None, argument: Any) -> None:
    if function is not None:
        function(*[argument] * len(inspect.signature(function).parameters))


def _cases(marks: list[Any]) -> list[dict[str, Any]]:
    """Returns the arguments of each case: every combination of the values of all marks."""
    sides = [[_named(mark.args[0], values) for values in mark.args[1]] for mark in marks if mark.name == "parametrize"]
    return [dict(itertools.chain(*(side.items() for side in chosen))) for chosen in itertools.product(*sides)]


def _named(names: Any, values: Any) -> dict[str, Any]:
    listed = [name.strip() for name in names.split(",") if name.strip()] if isinstance(names, str) else list(names)
    if type(values).__name__ == "ParameterSet":
        values = values.values
    elif len(listed) == 1 and isinstance(names, str):
        values = [values]
    return dict(zip(listed, values, strict=True))


class _Fixtures:
    """The values of a test's arguments, each made once."""

    def __init__(self, scope: Mapping[str, Any], owner: Any, values: Mapping[str, Any]) -> None:
        own = [getattr(owner, name) for name in dir(type(owner))] if owner is not None else []
        marked = [item for item in [*scope.values(), *own] if _is_own(item) and hasattr(item, "fixture_options")]
        self._functions = {item.fixture_options.get("name") or item.__name__: item for item in marked}
        self._values = dict(values)

    def use_automatic(self, marks: list[Any]) -> None:
        """Makes the fixtures that a test uses without an argument."""
        automatic = [name for name, item in self._functions.items() if item.fixture_options.get("autouse")]
        for name in [*automatic, *(name for mark in marks if mark.name == "usefixtures" for name in mark.args)]:
            self._value(name)

    def arguments(self, function: Callable[..., Any]) -> dict[str, Any]:
        """Returns the values of the arguments of a function that have no default, or are those of a case."""
        parameters = inspect.signature(function).parameters.values()
        named = [item for item in parameters if item.kind not in (item.VAR_POSITIONAL, item.VAR_KEYWORD)]
        wanted = [item.name for item in named if item.default is item.empty or item.name in self._values]
        return {name: self._value(name) for name in wanted}

    def undo(self) -> None:
        """Takes back what the test has changed by monkeypatch, before the next case."""
        patches = self._values.get("monkeypatch")
        if isinstance(patches, _Patches):
            patches.undo()

    def _value(self, name: str) -> Any:
        if name not in self._values:
            if name in self._functions:
                function = self._functions[name]
                made = function(**self.arguments(function))
                self._values[name] = next(made) if inspect.isgenerator(made) else made
            else:
                self._values[name] = {"capsys": _Captured, "monkeypatch": _Patches}[name]()
        return self._values[name]


def _is_own(item: Any) -> bool:
    """Returns whether the test has defined a function: objects of the program could claim to be fixtures."""
    return inspect.isfunction(item) or inspect.ismethod(item)


_NOTHING = object()


class _Output(NamedTuple):
    out: str
    err: str


class _Captured:
    """pytest's capsys: what the program and the test print."""

    def __init__(self) -> None:
        self._before = sys.stdout, sys.stderr
        self._streams = sys.stdout, sys.stderr = io.StringIO(), io.StringIO()

    def readouterr(self) -> _Output:
        """Returns the text printed since the last call."""
        printed = _Output(*(stream.getvalue() for stream in self._streams))
        for stream in self._streams:
            stream.seek(0)
            stream.truncate()
        return printed

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Prints in the body are not captured."""
        sys.stdout, sys.stderr = self._before
        try:
            yield
        finally:
            sys.stdout, sys.stderr = self._streams


class _Patches:
    """pytest's monkeypatch."""

    def __init__(self) -> None:
        self._changes: list[Callable[[], object]] = []  # what takes back each change

    def setattr(self, target: Any, name: Any, value: Any = _NOTHING, raising: bool = True) -> None:
        """Sets an attribute of an object, or with two arguments that of the path `module.name`."""
        if value is _NOTHING:
            target, name, value = *_owner_of(target), name
        self._keep_attribute(target, name, raising)
        builtins.setattr(target, name, value)

    def delattr(self, target: Any, name: Any = _NOTHING, raising: bool = True) -> None:
        """Deletes an attribute of an object, or with one argument that of the path `module.name`."""
        if name is _NOTHING:
            target, name = _owner_of(target)
        if raising or hasattr(target, name):
            self._keep_attribute(target, name, True)
            builtins.delattr(target, name)

    def _keep_attribute(self, target: Any, name: str, raising: bool) -> None:
        before = getattr(target, name, _NOTHING)
        if before is _NOTHING and raising:
            raise AttributeError(f"{target!r} has no attribute {name!r}")
        kept = vars(target).get(name, _NOTHING) if inspect.isclass(target) else before
        again = partial(builtins.delattr, target, name) if kept is _NOTHING else None
        self._changes.append(again or partial(builtins.setattr, target, name, kept))

    def setitem(self, items: Any, name: Any, value: Any) -> None:
        """Sets an item."""
        self._keep_item(items, name)
        items[name] = value

    def delitem(self, items: Any, name: Any, raising: bool = True) -> None:
        """Deletes an item."""
        if raising or name in items:
            self._keep_item(items, name)
            del items[name]

    def _keep_item(self, items: Any, name: Any) -> None:
        is_there = name in items if isinstance(items, Mapping) else True
        again = partial(operator.setitem, items, name, items[name]) if is_there else partial(items.pop, name, None)
        self._changes.append(again)

    def setenv(self, name: str, value: Any, prepend: str | None = None) -> None:
        """Sets a variable of the environment, or puts a text and a separator before its value."""
        joined = f"{value}{prepend}{os.environ[name]}" if prepend and name in os.environ else str(value)
        self.setitem(os.environ, name, joined)

    def delenv(self, name: str, raising: bool = True) -> None:
        """Deletes a variable of the environment."""
        self.delitem(os.environ, name, raising)

    def chdir(self, path: Any) -> None:
        """Changes the current folder."""
        self._changes.append(partial(os.chdir, os.getcwd()))
        os.chdir(path)

    def syspath_prepend(self, path: Any) -> None:
        """Has imports look into a folder first."""
        self._changes.append(partial(operator.setitem, sys.path, slice(None), list(sys.path)))
        sys.path.insert(0, str(path))

    def undo(self) -> None:
        """Takes back all changes."""
        while self._changes:
            self._changes.pop()()

    @contextmanager
    def context(self) -> Iterator[_Patches]:
        """Yields another monkeypatch, whose changes are taken back after the body."""
        patches = _Patches()
        try:
            yield patches
        finally:
            patches.undo()


def _owner_of(path: str) -> tuple[Any, str]:
    """Returns the module or class that a path names before its last dot, and the name after it."""
    owner, _, name = path.rpartition(".")
    module, names = owner, list[str]()
    while True:
        try:
            return reduce(getattr, names, import_module(module)), name
        except ImportError:
            if "." not in module:
                raise
            module, _, last = module.rpartition(".")
            names.insert(0, last)
