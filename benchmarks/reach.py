"""Prints how much of the package one run enters: functions, their lines, and their files.

    python benchmarks/reach.py                      # a 3-step quickstart run in one process
    python benchmarks/reach.py --list               # and every function, file by file
    python benchmarks/reach.py --order 4            # functions in the order of their first call, to read a run
    python benchmarks/reach.py -- --strategy ddp    # options after -- go to the trainer

A function counts if a profile event reports a call of it between the start of the script and the end of the run. Its
lines are those of its definition without docstring, blank lines and comments: what one reads to follow it. The built-in
model is made before the measurement, so the run takes it from the cache, as every run but the first does.
"""

from __future__ import annotations

import argparse
import ast
import os
import runpy
import subprocess
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import CodeType, FrameType

PACKAGE = Path(__file__).resolve().parents[1] / "lightrl"
SCRIPT = PACKAGE.parent / "scripts/train_grpo.py"
RUN = ["--max_steps", "3", "--strategy", "single"]
MAKE_MODEL = "from lightrl.builtin.model import builtin_model_path as path; path(on_progress=print)"


def entered_code(options: list[str]) -> dict[CodeType, int]:
    """Returns the code objects of the package that a run of train_grpo enters, in any thread of this process.

    They are in the order of their first call, each with the number of functions of the package that this call is in;
    -1 for a call that an import makes.
    """
    entered: dict[CodeType, int] = {}

    def record(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code not in entered and is_ours(frame.f_code):
            around = [code for code in callers(frame) if is_ours(code)]
            is_import = any(code.co_name == "<module>" for code in around)
            entered[frame.f_code] = -1 if is_import else len(around)

    with tempfile.TemporaryDirectory() as folder:
        sys.argv = ["train_grpo.py", *RUN, "--output_dir", f"{folder}/run", *options]
        threading.setprofile(record)
        sys.setprofile(record)
        try:
            runpy.run_path(str(SCRIPT), run_name="__main__")
        except SystemExit as ended:
            if ended.code:
                raise
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]
    if not entered:
        imported = sys.modules["lightrl"].__file__
        raise SystemExit(f"The run used {imported}, not {PACKAGE}: nothing of this tree was measured.")
    return entered


def is_ours(code: CodeType) -> bool:
    """Returns whether code belongs to the package."""
    return code.co_filename.startswith(str(PACKAGE))


def callers(frame: FrameType) -> Iterator[CodeType]:
    """Yields the code of the calls around a frame, innermost first."""
    while (outer := frame.f_back) is not None:
        frame = outer
        yield frame.f_code


def in_order(entered: Mapping[CodeType, int], deepest: int) -> list[str]:
    """Returns a line for each function in the order of the first calls, indented by the calls around it.

    Functions within more than `deepest` others are left out, and so is what runs while modules are imported.
    """
    chosen = [(code, depth) for code, depth in entered.items() if 0 <= depth <= deepest and "<" not in code.co_name]
    return [
        f"{'  ' * depth}{getattr(code, 'co_qualname', code.co_name)}  "
        f"{Path(code.co_filename).relative_to(PACKAGE)}:{code.co_firstlineno}"
        for code, depth in chosen
    ]


def functions_of(path: Path) -> dict[tuple[int, str], set[int]]:
    """Returns the lines of code of every function in a file by (first line, name), without those of inner functions."""
    source = path.read_text()
    blank = {i for i, line in enumerate(source.splitlines(), 1) if not line.strip() or line.strip().startswith("#")}
    found: dict[tuple[int, str], set[int]] = {}

    def visit(node: ast.AST) -> set[int]:
        inner: set[int] = set()
        for child in ast.iter_child_nodes(node):
            inner |= visit(child)
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return inner
        first = min([node.lineno, *(item.lineno for item in node.decorator_list)])
        everything = set(range(first, (node.end_lineno or node.lineno) + 1))
        own = everything - inner - blank
        statement = node.body[0]
        if ast.get_docstring(node, clean=False) is not None:
            own -= set(range(statement.lineno, (statement.end_lineno or statement.lineno) + 1))
        found[first, node.name] = own
        return everything

    visit(ast.parse(source))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print every function that was entered")
    parser.add_argument("--order", type=int, metavar="DEPTH", help="print functions in order, down to so many calls")
    parser.add_argument("options", nargs="*", help="options of the trainer, after --")
    chosen = parser.parse_args()
    # This tree, wherever lightrl is installed from; programs that the run starts import it too.
    sys.path.insert(0, str(PACKAGE.parent))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    # In a process of its own: modules imported here would not be entered again.
    subprocess.run([sys.executable, "-c", MAKE_MODEL], check=True, env=environment)
    entered = entered_code(chosen.options)
    if chosen.order is not None:
        print("\n".join(in_order(entered, chosen.order)))
    by_file: dict[str, list[tuple[int, str, int]]] = defaultdict(list)
    for path in sorted({code.co_filename for code in entered}):
        functions = functions_of(Path(path))
        here = {(code.co_firstlineno, code.co_name) for code in entered if code.co_filename == path}
        for key in sorted(here & set(functions)):
            by_file[str(Path(path).relative_to(PACKAGE))].append((*key, len(functions[key])))
    print(f"{'file':<44} {'functions':>9} {'lines':>6}")
    for name, functions_here in by_file.items():
        print(f"{name:<44} {len(functions_here):>9} {sum(item[2] for item in functions_here):>6}")
        if chosen.list:
            for line, function, size in functions_here:
                print(f"    {line:>5} {function:<50} {size:>4}")
    everything = [item for part in by_file.values() for item in part]
    print(f"{'all: ' + str(len(by_file)) + ' files':<44} {len(everything):>9} {sum(i[2] for i in everything):>6}")


if __name__ == "__main__":
    main()
