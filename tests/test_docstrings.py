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
NOT_YET = (
    "lightrl/engines", "lightrl/strategy", "lightrl/testing",
    "lightrl/trainers",
)  # fmt: skip


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
        if BROKEN_START.match(text) and not path.relative_to(ROOT).as_posix().startswith(NOT_YET)
    ]
    assert broken == []


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
