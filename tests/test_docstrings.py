"""The first line of a docstring is a sentence that makes sense on its own, as an editor shows it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "lightrl"
# A first line that begins so continues a sentence that the reader has not seen.
BROKEN_START = re.compile(
    r"(Of|Else|Those|With|Without|As|By|From|For|In|On|To|Where|Which|That|Also|Not|So|It|They|The same)\b"
)


def first_lines(path: Path) -> list[tuple[int, str]]:
    """Returns the line number and first line of each docstring of a file."""
    nodes = [
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    texts = [(node.body[0].lineno, ast.get_docstring(node)) for node in nodes if ast.get_docstring(node)]
    return [(number, text.splitlines()[0]) for number, text in texts if text]


def test_first_lines_stand_on_their_own() -> None:
    files = [*PACKAGE.rglob("*.py"), *(ROOT / "scripts").rglob("*.py")]
    broken = [
        f"{path.relative_to(ROOT)}:{number}: {text}"
        for path in sorted(files)
        for number, text in first_lines(path)
        if BROKEN_START.match(text)
    ]
    assert broken == []


def undocumented_methods(paths: list[Path]) -> list[str]:
    """Returns public methods without a docstring of their own or of a base class; protocols' stubs explain nothing."""
    trees = {path: ast.parse(path.read_text()) for path in paths}
    classes = {node.name: node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    return [
        f"{path.relative_to(ROOT)}:{method.lineno}: {node.name}.{method.name}"
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
        for method in node.body
        if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef)
        if not method.name.startswith(("_", "test_"))
        and not is_stub(method)
        and not is_documented(method.name, node, classes)
    ]


def is_stub(method: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    statement = method.body[-1]
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def is_documented(name: str, node: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> bool:
    methods = [item for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)]
    if any(item.name == name and ast.get_docstring(item) for item in methods):
        return True
    bases = (ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases)
    known = [classes[base] for base in bases if base in classes and classes[base] is not node]
    foreign = [base for base in node.bases if ast.unparse(base).split("[")[0].split(".")[-1] not in classes]
    return any(is_documented(name, base, classes) for base in known) or any(map(is_library, foreign))


def is_library(base: ast.expr) -> bool:
    """Whether a base class comes from a library, which documents the methods that it calls."""
    return ast.unparse(base).split("[")[0] not in ("ABC", "Protocol", "Generic", "NamedTuple", "Exception", "object")


def test_public_methods_are_documented_here_or_in_a_base() -> None:
    assert undocumented_methods(sorted(PACKAGE.rglob("*.py"))) == []


@pytest.mark.parametrize(
    ("text", "is_broken"),
    [
        ("Of the judge's own sampling.", True),
        ("Else an engine's end destroys the group.", True),
        ("The same for any command line.", True),
        ("Sampling temperature of the judge.", False),
        ("Returns the bytes that were freed.", False),
        ("Official names of the weights.", False),
    ],
)
def test_a_broken_start_is_recognised(text: str, is_broken: bool) -> None:
    assert bool(BROKEN_START.match(text)) == is_broken
