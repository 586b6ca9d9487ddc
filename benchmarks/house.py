"""Measures the shape of the package and writes the figures into docs/architecture.md.

    python benchmarks/house.py                 # all figures; a run of a minute finds what the quickstart reaches
    python benchmarks/house.py --skip-reach    # only what the sources show; prints and writes nothing

tests/test_house.py holds the limits. benchmarks/unused_names.txt lists the definitions that only code outside this
repository uses, each with its reason.
"""

from __future__ import annotations

import argparse
import ast
import re
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from itertools import combinations
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "lightrl"
PAGE = ROOT / "docs" / "architecture.md"
REGISTRY = "lightrl/algorithms/registry.py"
ALLOWED_NAMES = Path(__file__).with_name("unused_names.txt")
BEGIN, END = "<!-- made by `make house` -->", "<!-- end of what `make house` makes -->"
MAX_FILE_LINES, MAX_FUNCTION_LINES, DUPLICATE_LINES = 450, 60, 6
MAX_DUPLICATES = 9  # pairs: signatures that a contract fixes, and what two trainers build alike (ADR 0012)
MAX_STRATEGY_LINES, MAX_STRATEGY_NAMES = 350, 32  # of StrategyBase
LEAST_CLASS_LINES = 50  # of a class in the table
MAX_REACHED_FILES, MAX_REACHED_LINES = 51, 3_834  # of the quickstart, by benchmarks/reach.py
USERS = ("lightrl", "scripts", "benchmarks", "examples")  # tests do not keep a definition alive
Function = ast.FunctionDef | ast.AsyncFunctionDef


# ---- Sources


@cache
def sources() -> dict[str, ast.Module]:
    """Returns the syntax tree of every module of the package, by its path such as lightrl/comm.py."""
    return {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


def module_name(path: str) -> str:
    """Returns the import name of a path: lightrl.strategy for lightrl/strategy/__init__.py."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def num_lines(node: ast.AST) -> int:
    """Returns the lines from a definition's first to its last, decorators left out."""
    assert isinstance(node, ast.stmt)
    return (node.end_lineno or node.lineno) - node.lineno + 1


def file_sizes() -> dict[str, int]:
    """Returns the lines of every module."""
    return {path: len((ROOT / path).read_text().splitlines()) for path in sources()}


def function_sizes() -> dict[str, int]:
    """Returns the lines of every function and method, by path:line name."""
    return {
        f"{path}:{node.lineno} {node.name}": num_lines(node)
        for path, tree in sources().items()
        for node in ast.walk(tree)
        if isinstance(node, Function)
    }


# ---- Classes


@dataclass(frozen=True)
class ClassFigures:
    """What one class asks of its reader."""

    name: str
    path: str
    lines: int
    own_names: frozenset[str]  # public methods, properties and class attributes
    all_names: frozenset[str]  # and those of its bases inside the package


def classes_in(folder: str) -> list[ClassFigures]:
    """Returns the figures of every class below a folder, the largest first."""
    nodes = {node.name: node for tree in sources().values() for node in tree.body if isinstance(node, ast.ClassDef)}
    here = [
        (path, node)
        for path, tree in sources().items()
        if path.startswith(folder)
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    ]
    figures = [
        ClassFigures(node.name, path, num_lines(node), _own_names(node), _all_names(node, nodes)) for path, node in here
    ]
    return sorted(figures, key=lambda item: (-item.lines, item.name))


def _own_names(node: ast.ClassDef) -> frozenset[str]:
    names: set[str] = set()
    for statement in node.body:
        if isinstance(statement, Function):
            names.add(statement.name)
        elif isinstance(statement, ast.AnnAssign | ast.Assign):
            targets = [statement.target] if isinstance(statement, ast.AnnAssign) else statement.targets
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return frozenset(name for name in names if not name.startswith("_"))


def _all_names(node: ast.ClassDef, nodes: dict[str, ast.ClassDef]) -> frozenset[str]:
    names = _own_names(node)
    for base in node.bases:
        name = ast.unparse(base).split("[")[0].split(".")[-1]
        if name in nodes and nodes[name] is not node:
            names |= _all_names(nodes[name], nodes)
    return names


# ---- Imports


def import_graph() -> dict[str, set[str]]:
    """Returns which modules of the package each imports: anywhere in it, for types or inside functions too."""
    modules = {module_name(path) for path in sources()}
    graph: dict[str, set[str]] = {}
    for path, tree in sources().items():
        imported: set[str] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                imported |= (inner & modules) | ({node.module} if inner - modules else set())
        graph[module_name(path)] = (imported & modules) - {module_name(path)}
    return graph


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Returns the groups of nodes that reach each other, each group sorted."""
    reached = {node: _reachable(node, graph) for node in graph}
    groups = {tuple(sorted({node} | {other for other in reached[node] if node in reached[other]})) for node in graph}
    return [list(group) for group in sorted(groups) if len(group) > 1]


def _reachable(start: str, graph: dict[str, set[str]]) -> set[str]:
    reached: set[str] = set()
    waiting = [start]
    while waiting:
        new = graph[waiting.pop()] - reached
        reached |= new
        waiting += new
    return reached


# ---- Dead definitions


def allowed_names() -> dict[str, str]:
    """Returns the reason for each pattern of unused_names.txt. A line is `path name: reason`."""
    lines = [line for line in ALLOWED_NAMES.read_text().splitlines() if line and not line.startswith("#")]
    return {key: reason.strip() for key, _, reason in (line.partition(": ") for line in lines)}


def unused_names() -> list[str]:
    """Returns what vulture finds in the package when only the package, scripts, benchmarks and examples use it."""
    from vulture import Vulture

    finder = Vulture(ignore_names=["__getattr__", "__dir__"])
    finder.used_names |= _names_in_strings()
    finder.scavenge([str(ROOT / folder) for folder in USERS], exclude=["*/torchvision_cpu/*"])
    items = finder.get_unused_code(min_confidence=60)
    here = [(Path(item.filename).relative_to(ROOT).as_posix(), item.name) for item in items]
    return sorted({f"{path} {name}" for path, name in here if path.startswith("lightrl/")})


def _names_in_strings() -> set[str]:
    """Returns the names that the package imports by a string: package.module:name, or a name of the registry."""
    names = set()
    for path, tree in sources().items():
        pattern = re.compile(r"(?:[\w.]+:)?(\w+)" if path == REGISTRY else r"[\w.]+:(\w+)")
        strings = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
        matches = (pattern.fullmatch(value) for value in strings if isinstance(value, str))
        names |= {match[1] for match in matches if match}
    return names


def unexplained_names() -> list[str]:
    """Returns unused definitions that no pattern of unused_names.txt explains."""
    patterns = allowed_names()
    return [item for item in unused_names() if not any(fnmatch(item, pattern) for pattern in patterns)]


def idle_patterns() -> list[str]:
    """Returns the patterns of unused_names.txt that match nothing any more."""
    items = unused_names()
    return [pattern for pattern in allowed_names() if not any(fnmatch(item, pattern) for item in items)]


# ---- Duplicates


@dataclass(frozen=True)
class Duplicate:
    """A pair of passages with the same lines of code."""

    first: str  # path:line
    second: str
    lines: int


def duplicates() -> list[Duplicate]:
    """Returns the pairs of passages of at least six equal lines; docstrings, comments and imports do not count."""
    code = {path: list(_code_lines(path)) for path in sources()}
    windows: dict[tuple[str, ...], list[tuple[str, int]]] = defaultdict(list)
    for path, lines in code.items():
        for index in range(len(lines) - DUPLICATE_LINES + 1):
            windows[tuple(text for _, text in lines[index : index + DUPLICATE_LINES])].append((path, index))
    pairs = []
    for places in windows.values():
        for (path, index), (other, other_index) in combinations(places, 2):
            lines, other_lines = code[path], code[other]
            if index and other_index and lines[index - 1][1] == other_lines[other_index - 1][1]:
                continue  # the pair that begins a line earlier covers this one
            if path == other and other_index - index < DUPLICATE_LINES:
                continue  # overlaps itself
            length = _equal_lines(lines[index:], other_lines[other_index:])
            pairs.append(Duplicate(f"{path}:{lines[index][0]}", f"{other}:{other_lines[other_index][0]}", length))
    return sorted(pairs, key=lambda pair: (-pair.lines, pair.first))


def _code_lines(path: str) -> Iterator[tuple[int, str]]:
    skipped: set[int] = set()
    for node in ast.walk(sources()[path]):
        if isinstance(node, ast.Import | ast.ImportFrom) or (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        ):
            skipped |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    for number, line in enumerate((ROOT / path).read_text().splitlines(), 1):
        text = line.strip()
        if text and number not in skipped and not text.startswith(("#", "@")):
            yield number, text


def _equal_lines(first: list[tuple[int, str]], second: list[tuple[int, str]]) -> int:
    length = 0
    for (_, text), (_, other) in zip(first, second, strict=False):
        if text != other:
            break
        length += 1
    return length


# ---- The table


def reach() -> tuple[int, int, int]:
    """Returns the files, functions and lines that the quickstart enters."""
    command = [sys.executable, str(Path(__file__).with_name("reach.py"))]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    *_, files, _, functions, lines = output.strip().splitlines()[-1].split()
    return int(files), int(functions), int(lines)


def table(reached: tuple[int, int, int] | None) -> str:
    """Returns the figures as Markdown."""
    files, functions = file_sizes(), function_sizes()
    longest_file, longest_function = max(files, key=files.__getitem__), max(functions, key=functions.__getitem__)
    sizes = sorted(functions.values())
    rows = [
        ("modules, lines", f"{len(files)}, {sum(files.values()):,}", ""),
        ("longest file", f"{files[longest_file]} (`{longest_file}`)", f"{MAX_FILE_LINES}"),
        ("longest function", f"{functions[longest_function]} (`{longest_function}`)", f"{MAX_FUNCTION_LINES}"),
        ("half of the functions, nine in ten", f"{statistics.median(sizes):g}, {sizes[len(sizes) * 9 // 10]}", "6, 18"),
        ("import cycles, type-only ones included", f"{len(cycles(import_graph()))}", "0"),
        ("unused definitions without a reason", f"{len(unexplained_names())}", "0"),
        (f"pairs of {DUPLICATE_LINES} or more equal lines", f"{len(duplicates())}", f"{MAX_DUPLICATES}"),
    ]
    if reached:
        rows += [
            ("files that the quickstart enters", f"{reached[0]}", f"{MAX_REACHED_FILES}"),
            (
                "functions that it enters, and their lines",
                f"{reached[1]}, {reached[2]:,}",
                f"{MAX_REACHED_LINES:,} lines",
            ),
        ]
    lines = ["| Figure | Now | Limit or goal |", "|---|---|---|"]
    lines += [f"| {name} | {value} | {limit} |" for name, value, limit in rows]
    lines += [
        "",
        f"| Class in `lightrl/strategy/` of {LEAST_CLASS_LINES} lines or more | Lines | Public names of its own | "
        "With its bases |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| `{item.name}` ({item.path.removeprefix('lightrl/')}) | {item.lines} | {len(item.own_names)} | "
        f"{len(item.all_names)} |"
        for item in classes_in("lightrl/strategy/")
        if item.lines >= LEAST_CLASS_LINES
    ]
    return "\n".join(lines)


def write(text: str) -> None:
    """Replaces what stands between the markers of docs/architecture.md."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise SystemExit(f"{PAGE} lacks the markers {BEGIN} and {END}.")
    PAGE.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")


def main() -> None:
    """Prints the figures and what breaks a limit, and writes the table unless told not to measure the run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--skip-reach", action="store_true", help="print only; do not run the quickstart")
    chosen = parser.parse_args()
    text = table(None if chosen.skip_reach else reach())
    print(text)
    for pair in duplicates():
        print(f"{pair.lines} equal lines: {pair.first} and {pair.second}")
    for name in unexplained_names():
        print(f"unused: {name}")
    if not chosen.skip_reach:
        write(text)


if __name__ == "__main__":
    main()
