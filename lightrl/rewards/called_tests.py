"""Finds the tests that Python statements leave to pytest or unittest to call."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterable, Mapping
from functools import lru_cache
from importlib.util import find_spec
from typing import TypeGuard

from lightrl.rewards.sandboxed.pytest_calls import BUILT_IN, names_of_pytest
from lightrl.rewards.sandboxed.pytest_names import PROVIDED

_RUNNERS = ("pytest.main", *(f"unittest.{name}" for name in ("main", "TextTestRunner", "TestLoader", "TestSuite")))
_SKIPPED = ("unittest.skip", "unittest.expectedFailure", "pytest.mark.skip", "pytest.mark.xfail")
_SET_UPS = ("setUpModule", "setup_module", "setup_function")
_SUITE = "__import__('unittest').TestSuite"  # which also calls setUpClass()
_CALLER = "__import__('lightrl.rewards.sandboxed.pytest_calls', fromlist='*').call"
_MOST_CASES = 100  # that count as a test each; more are one test

_Function = ast.FunctionDef | ast.AsyncFunctionDef


@lru_cache(maxsize=1024)
def with_calls(test: str) -> tuple[str, ...]:
    """Returns the tests that statements stand for: all together, or each that is left to pytest or unittest to call.

    Raises ValueError if they use more of pytest than the sandbox has, and it is not installed.
    """
    try:
        module = ast.parse(test)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return (test,)
    _require_pytest(names_of_pytest(module))
    names = _imported(module)
    body = [part for node in module.body for part in (node.body if _is_guard(node) else [node])]
    body = [node for node in body if not _runs_all(node, names)]
    statements = test if body == module.body else ast.unparse(ast.Module(body, []))
    definitions = [node for node in body if isinstance(node, _Function | ast.ClassDef)]
    others = [node for node in body if node not in definitions]
    found = _Definitions(body, names)
    used = {part.id for node in others for part in ast.walk(node) if isinstance(part, ast.Name)}
    if used & {node.name for node in definitions if found.calls(node)}:
        return (statements,)
    return tuple(f"{statements}\n{call}" for node in definitions for call in found.calls(node)) or (statements,)


@lru_cache(maxsize=1024)
def left_out(test: str) -> str:
    """Returns why the first test that looks like one for pytest is not called; empty if there is none."""
    try:
        module = ast.parse(test)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ""
    found = _Definitions(module.body, _imported(module))
    missing = [lack for node in module.body for lack in found.lacks(node)]
    return next(
        (f"{name}() takes {', '.join(sorted(args))}: neither cases nor a fixture" for name, args in missing if args), ""
    )


def _require_pytest(used: set[str]) -> None:
    unknown = sorted(used - PROVIDED - {"main"})
    if unknown and find_spec("pytest") is None:
        raise ValueError(
            f"the prompt's tests use pytest.{unknown[0]}, which needs pytest: pip install pytest. Without it, the "
            f"reward code knows {', '.join(sorted(PROVIDED))}"
        )


class _Definitions:
    """The functions and classes of a test, and how each is called."""

    def __init__(self, body: list[ast.stmt], names: Mapping[str, str]) -> None:
        self._names = names
        self._classes = {node.name: node for node in body if isinstance(node, ast.ClassDef)}
        self._set_ups = {node.name for node in body if isinstance(node, _Function) and node.name in _SET_UPS}
        self._fixtures = self._fixtures_in(body)
        assigned = [node for node in body if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)]
        self._values = {node.targets[0].id: node.value for node in assigned if isinstance(node.targets[0], ast.Name)}

    def calls(self, node: _Function | ast.ClassDef) -> list[str]:
        """Returns the calls of a test function, or of the methods of a class of tests."""
        if isinstance(node, ast.ClassDef):
            return self._calls_of_methods(node)
        if not self._is_test(node) or self.missing(node, ()):
            return []
        is_plain = not (self._set_ups or self._is_special(node) or self._automatic(self._fixtures))
        return [f"{node.name}()"] if is_plain else self._called(node.decorator_list, repr(node.name))

    def lacks(self, node: ast.stmt) -> list[tuple[str, set[str]]]:
        """Returns the tests that a statement defines for pytest, and their arguments that nothing gives a value."""
        if isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            own = [part for kind in self._lineage(node) for part in kind.body]
            tests = [part for part in node.body if isinstance(part, _Function) and self._is_test(part)]
            return [(part.name, self.missing(part, own, node.decorator_list) - _self_of(part)) for part in tests]
        if isinstance(node, _Function) and self._is_test(node):
            return [(node.name, self.missing(node, ()))]
        return []

    def missing(self, node: _Function, own: Iterable[ast.stmt], decorators: Iterable[ast.expr] = ()) -> set[str]:
        """Returns the arguments of a test that nothing gives a value."""
        known = {**self._fixtures, **self._fixtures_in(own)}
        marks = [*decorators, *node.decorator_list]
        given = {name for mark in self._cases(marks) if not _is_indirect(mark) for name in _names_in(mark)}
        return {name for name in _required(node) if name not in given and not self._can_make(name, known)}

    def _can_make(self, name: str, known: Mapping[str, _Function], depth: int = 0) -> bool:
        if name in known and depth < len(known):
            options = {
                word.arg for mark in known[name].decorator_list if isinstance(mark, ast.Call) for word in mark.keywords
            }
            is_simple = "params" not in options and isinstance(known[name], ast.FunctionDef)
            needed = _required(known[name]) - {"self"}
            return is_simple and all(self._can_make(other, known, depth + 1) for other in needed)
        return name in BUILT_IN

    def _calls_of_methods(self, node: ast.ClassDef) -> list[str]:
        lineage = self._lineage(node)
        methods = {part.name: part for base in reversed(lineage) for part in base.body if isinstance(part, _Function)}
        tests = [part for part in methods.values() if self._is_test(part)]
        if self._is_skipped(node.decorator_list):
            return []
        if any(ast.unparse(base).endswith("TestCase") for kind in lineage for base in kind.bases):
            first = "setUpModule(); " if "setUpModule" in self._set_ups else ""
            return [f"{first}{_SUITE}([{node.name}({part.name!r})]).debug()" for part in tests]
        unknown = [base for base in map(ast.unparse, node.bases) if base not in (*self._classes, "object")]
        if not node.name.startswith("Test") or "__init__" in methods or unknown:
            return []
        own = [part for kind in lineage for part in kind.body]
        return [
            call
            for part in tests
            if not self.missing(part, own, node.decorator_list) - _self_of(part)
            for call in self._called([*node.decorator_list, *part.decorator_list], f"{node.name!r}, {part.name!r}")
        ]

    def _lineage(self, node: ast.ClassDef) -> list[ast.ClassDef]:
        bases = [self._classes.get(ast.unparse(base)) for base in node.bases]
        return [
            node,
            *(kind for base in bases if base is not None and base is not node for kind in self._lineage(base)),
        ]

    def _called(self, decorators: list[ast.expr], named: str) -> list[str]:
        """Returns a call for each case, or one for all of them if their number is unknown or large."""
        counts = [self._count(mark.args[1]) for mark in self._cases(decorators) if len(mark.args) > 1]
        total = math.prod(count or 0 for count in counts)
        if counts and 0 < total <= _MOST_CASES:
            return [f"{_CALLER}(globals(), {named}, case={case})" for case in range(total)]
        return [f"{_CALLER}(globals(), {named})"]

    def _count(self, values: ast.expr) -> int | None:
        if isinstance(values, ast.Name):
            values = self._values.get(values.id, values)
        if not isinstance(values, ast.List | ast.Tuple):
            return None
        return None if any(isinstance(item, ast.Starred) for item in values.elts) else len(values.elts)

    def _cases(self, decorators: Iterable[ast.expr]) -> list[ast.Call]:
        return [
            mark
            for mark in decorators
            if isinstance(mark, ast.Call) and self._dotted(mark) == "pytest.mark.parametrize" and mark.args
        ]

    def _is_test(self, node: _Function) -> bool:
        is_fixture = any(self._dotted(mark) == "pytest.fixture" for mark in node.decorator_list)
        return node.name.startswith("test") and not is_fixture and not self._is_skipped(node.decorator_list)

    def _is_special(self, node: _Function) -> bool:
        is_marked = any(self._dotted(mark).startswith("pytest.mark.") for mark in node.decorator_list)
        return is_marked or bool(_required(node)) or isinstance(node, ast.AsyncFunctionDef)

    def _is_skipped(self, decorators: Iterable[ast.expr]) -> bool:
        return any(self._dotted(mark) in _SKIPPED for mark in decorators)

    def _automatic(self, fixtures: Mapping[str, _Function]) -> bool:
        marks = [mark for node in fixtures.values() for mark in node.decorator_list if isinstance(mark, ast.Call)]
        return any(word.arg == "autouse" for mark in marks for word in mark.keywords)

    def _fixtures_in(self, body: Iterable[ast.stmt]) -> dict[str, _Function]:
        functions = [node for node in body if isinstance(node, _Function)]
        marked = [
            (node, mark) for node in functions for mark in node.decorator_list if self._dotted(mark) == "pytest.fixture"
        ]
        return {_fixture_name(node, mark): node for node, mark in marked}

    def _dotted(self, node: ast.expr) -> str:
        return _dotted(node, self._names)


def _imported(module: ast.Module) -> dict[str, str]:
    """Returns the full name behind each name that a module imports, such as unittest.main for main."""
    names = {}
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            names.update({item.asname: item.name for item in node.names if item.asname})
        elif isinstance(node, ast.ImportFrom):
            names.update({item.asname or item.name: f"{node.module}.{item.name}" for item in node.names})
    return names


def _dotted(node: ast.expr, names: Mapping[str, str]) -> str:
    """Returns the whole name that an expression is, or calls; empty for any other."""
    if isinstance(node, ast.Call):
        return _dotted(node.func, names)
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value, names)}.{node.attr}"
    return names.get(node.id, node.id) if isinstance(node, ast.Name) else ""


def _is_guard(node: ast.stmt) -> TypeGuard[ast.If]:
    """Returns whether the statement asks if the tests are the main program, as they are for pytest and unittest."""
    return isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"


def _runs_all(node: ast.stmt, names: Mapping[str, str]) -> bool:
    """Returns whether the statement has a library run all tests, which neither finds them here nor fails with them."""
    if not isinstance(node, ast.Expr | ast.Assign | ast.Raise):
        return False
    parts = [part for part in ast.walk(node) if isinstance(part, ast.Attribute | ast.Name)]
    return any(_dotted(part, names) in _RUNNERS for part in parts)


def _names_in(mark: ast.Call) -> list[str]:
    """Returns the arguments that a parametrize names: in a text with commas, or a list of texts."""
    first = mark.args[0]
    parts = first.elts if isinstance(first, ast.List | ast.Tuple) else [first]
    texts = [part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)]
    return [name.strip() for text in texts for name in text.split(",")]


def _is_indirect(mark: ast.Call) -> bool:
    return any(word.arg == "indirect" for word in mark.keywords)


def _fixture_name(node: _Function, mark: ast.expr) -> str:
    words = mark.keywords if isinstance(mark, ast.Call) else []
    named = [word.value.value for word in words if word.arg == "name" and isinstance(word.value, ast.Constant)]
    return str(named[0]) if named else node.name


def _required(node: _Function) -> set[str]:
    """Returns the arguments without a default."""
    listed = [*node.args.posonlyargs, *node.args.args]
    listed = listed[: len(listed) - len(node.args.defaults)]
    named = [item for item, value in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True) if value is None]
    return {item.arg for item in [*listed, *named]}


def _self_of(node: _Function) -> set[str]:
    is_static = any(ast.unparse(mark) == "staticmethod" for mark in node.decorator_list)
    listed = [*node.args.posonlyargs, *node.args.args]
    return {listed[0].arg} if listed and not is_static else set()
