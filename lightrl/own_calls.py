"""Names the user's function behind an error in lightrl's own code, as when the function returned nothing by mistake."""

from __future__ import annotations

import ast
import inspect
import linecache
import sys
import sysconfig
import traceback
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any

_OURS = Path(__file__).parent
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_PACKAGES = {"site-packages", "dist-packages"}  # also those of the user, or of the interpreter below a venv
_NONE_TYPE = "NoneType"  # in the message of an error about a missing return


def is_own(path: Path) -> bool:
    """Returns whether a file is a user's, and neither lightrl's nor a library's."""
    is_ours = any(path.is_relative_to(folder) for folder in (str(_OURS), *_LIBRARIES))
    return path.is_absolute() and not is_ours and _PACKAGES.isdisjoint(path.parts)


def called_own_code(error: BaseException) -> str:
    """Returns a sentence about the user's function that lightrl had called in the line that failed; empty if none.

    A function whose own line is in the traceback needs no such sentence. If the error is about None, the line may also
    be one further out, whose result was passed on.
    """
    try:
        return _told(error)
    except Exception:  # from an attribute or a str() of the user's, and it must not take the place of the error
        return ""


def _told(error: BaseException) -> str:
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        path = Path(frame.f_code.co_filename)
        if is_own(path):
            return ""
        if not path.is_relative_to(_OURS):
            continue  # a library, which lightrl's line has called
        if found := next(_own_functions(frame, line), None):
            return _described(*found)
        if _NONE_TYPE not in str(error):
            return ""
    return ""


def _own_functions(frame: FrameType, line: int) -> Iterator[tuple[FunctionType, Any]]:
    """Yields function and owner of each user's function called in a line, or earlier for a None in that line."""
    try:
        tree = ast.parse("".join(linecache.getlines(frame.f_code.co_filename)))
    except SyntaxError:  # the file was changed during the run
        return
    scope = {**frame.f_globals, **frame.f_locals}
    here = [node for node in ast.walk(tree) if _spans(node, line)]
    lacking = {node.id for node in here if isinstance(node, ast.Name) and scope.get(node.id, node) is None}
    before = (node for node in ast.walk(tree) if frame.f_code.co_firstlineno < getattr(node, "lineno", 0) < line)
    assigned = [node for node in before if isinstance(node, ast.Assign)]
    made = [node.value for node in assigned if lacking.intersection(map(ast.unparse, node.targets))]
    calls = [(node, scope) for node in (*made, *here) if isinstance(node, ast.Call)]
    for call, names in (*calls, *_makers_of_attributes(here, scope)):
        owner, function = _resolved(call.func, names)
        while isinstance(function, partial):
            function = function.func
        function = inspect.unwrap(getattr(function, "__func__", function)) if callable(function) else None
        if isinstance(function, FunctionType) and is_own(Path(function.__code__.co_filename)):
            yield function, owner


def _makers_of_attributes(
    nodes: Sequence[ast.AST], scope: Mapping[str, Any]
) -> Iterator[tuple[ast.Call, dict[str, Any]]]:
    """Yields the calls, with their scope, by which methods of lightrl have set an attribute that is None now."""
    for node in nodes:
        if not isinstance(node, ast.Attribute):
            continue
        owner, value = _resolved(node, scope)
        if owner is None or value is not None:
            continue
        files = {getattr(sys.modules.get(kind.__module__), "__file__", None) or "" for kind in type(owner).__mro__}
        for file in sorted(file for file in files if Path(file).is_relative_to(_OURS)):
            for other in ast.walk(ast.parse("".join(linecache.getlines(file)))):
                if not isinstance(other, ast.Assign) or not isinstance(other.value, ast.Call):
                    continue
                if f"self.{node.attr}" in map(ast.unparse, other.targets):
                    yield other.value, {"self": owner}


def _spans(node: ast.AST, line: int) -> bool:
    return isinstance(node, ast.expr) and node.lineno <= line <= (node.end_lineno or line)


def _resolved(node: ast.expr, scope: Mapping[str, Any]) -> tuple[Any, Any]:
    """Returns an object and the attribute of it that an expression names, without running any code."""
    if isinstance(node, ast.Name):
        return None, scope.get(node.id)
    if not isinstance(node, ast.Attribute):
        return None, None
    _, owner = _resolved(node.value, scope)
    return owner, inspect.getattr_static(owner, node.attr, None)


def _described(function: FunctionType, owner: object) -> str:
    code, name = function.__code__, function.__name__
    told = (inspect.getdoc(getattr(type(owner), name)) or "").split("\n")[0] if hasattr(type(owner), name) else ""
    wanted = f" Its description: {told}" if told else ""
    return (
        f"lightrl had called {function.__qualname__}(), at line {code.co_firstlineno} of {code.co_filename}: check "
        f"what it returned.{wanted}"
    )
