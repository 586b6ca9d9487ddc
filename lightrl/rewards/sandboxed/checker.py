"""Runs one test in a process of its own; functions of the program run in the program's process and return data."""

from __future__ import annotations

import ast
import builtins
import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from types import ModuleType
from typing import Any

from lightrl.rewards.sandboxed.peer import PROGRAM_MODULE, TEST_MODULE, Peer

_CARRIED = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def check(number: int, channel: tuple[int, int], verdict: int, tests_file: int) -> int:
    """Runs the test with this number and writes 1 to the verdict if it passes; the file holds all tests as JSON."""
    with open(tests_file, "rb", closefd=False) as file:
        file.seek(0)
        tests = json.loads(file.read())
    os.close(tests_file)
    peer = Peer(*channel, names=None)
    test = _with_definitions(tests, number)
    scope = _Scope(peer, _names_from_elsewhere(test))
    try:
        if any("pytest" in text for text in tests[: number + 1]):
            _provide_pytest(test)
        exec(compile(test, "<test>", "exec"), scope)
    except BaseException:
        return 1
    os.write(verdict, b"1")
    return 0


def _with_definitions(tests: Sequence[str], number: int) -> ast.Module:
    """Returns the test, preceded by the imports and definitions of the tests before it."""
    carried: list[ast.stmt] = []
    heads = {_head(tests[number])}
    for text in tests[:number]:
        with suppress(SyntaxError, ValueError):
            carried += [node for node in _parsed(text, heads) if _is_carried(node)]
    test = ast.parse(tests[number])
    rest = [node for node in test.body if not _is_future(node)]
    test.body = [*(node for node in test.body if _is_future(node)), *carried, *rest]
    return test


def _head(text: str) -> str:
    """Returns a test without its last line: the calls of one file of tests differ in that alone."""
    return text.rpartition("\n")[0]


def _parsed(text: str, heads: set[str]) -> list[ast.stmt]:
    """Returns the statements of a test, or those of its last line if the others have been parsed for another test."""
    head = _head(text)
    if head and head in heads:
        with suppress(SyntaxError, ValueError):
            return ast.parse(text[len(head) + 1 :]).body
    heads.add(head)
    return ast.parse(text).body


def _is_carried(node: ast.stmt) -> bool:
    if not isinstance(node, _CARRIED) or _is_future(node):
        return False
    decorators = [] if isinstance(node, ast.Import | ast.ImportFrom) else node.decorator_list
    return not any("pytest" in ast.unparse(mark) for mark in decorators)  # whose cases may be in a name


def _is_future(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and node.module == "__future__"


def _provide_pytest(test: ast.Module) -> None:
    from lightrl.rewards.sandboxed.pytest_calls import provide_pytest  # noqa: PLC0415  (takes time to load)

    provide_pytest(test)


def _names_from_elsewhere(test: ast.Module) -> set[str]:
    """Returns the names that the test reads but does not define."""
    names = [node for node in ast.walk(test) if isinstance(node, ast.Name)]
    made = {node.id for node in names if not isinstance(node.ctx, ast.Load)}
    return {node.id for node in names} - made


def _module_of(peer: Peer, given: set[str], starred: set[str]) -> ModuleType:
    """Returns a module for tests that import what they call; import * leaves names of Python alone."""

    def attribute(name: str) -> Any:
        if name not in given:
            raise AttributeError(name)
        return peer.ask("name", name)

    module = ModuleType(PROGRAM_MODULE)
    module.__dict__.update(__getattr__=attribute, __all__=sorted(starred))
    return module


class _Scope(dict[str, Any]):
    """The names of a test; a name that the test has not defined itself is requested from the program.

    A built-in name such as abs means Python's own, even if the program defines it too: otherwise a program could
    redefine what the test compares with. It means the program's if the test uses nothing else of the program.
    """

    def __init__(self, peer: Peer, read: set[str]) -> None:
        module = ModuleType(TEST_MODULE)
        sys.modules[TEST_MODULE] = module
        super().__init__({"__name__": TEST_MODULE, "__builtins__": builtins})
        self._peer = peer
        given = {name for name in peer.ask("names") if not name.startswith("__")}
        own = {name for name in given if not hasattr(builtins, name)}
        hidden = (given & read) - own
        self._given = own | hidden if len(hidden) == 1 and not own & read else own
        sys.modules[PROGRAM_MODULE] = _module_of(peer, given, own)

    def __missing__(self, name: str) -> Any:
        if name not in self._given:
            raise KeyError(name)
        return self._peer.ask("name", name)
