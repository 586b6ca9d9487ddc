"""A reward that runs the code of a response against the tests of its prompt, in a sandbox."""

from __future__ import annotations

import ast
import asyncio
import json
import logging
import math
import re
import textwrap
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache
from typing import Any

from lightrl.cores import cores_of_rank
from lightrl.records import Sample, inner_value
from lightrl.rewards.called_tests import left_out, with_calls
from lightrl.rewards.sandbox import SandboxLimits, SandboxResult, choose_confinement, run_inputs, run_tests

logger = logging.getLogger(__name__)

_FENCE = re.compile(r"(?<![`~])(?:```+|~~~+)")
_INDENT = 3  # of a fence, at most; one further to the right is in a text
_FAR = 200  # lines
_QUOTES = re.compile(r"\\.|\"\"\"|'''|[\"'#\n]", re.DOTALL)
_PYTHON = re.compile(r"\{?\.?(?:python|py)[\d.]*\}?", re.IGNORECASE)
_DECIMAL = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
_TOLERANCE = 1e-6  # relative or absolute, of numbers that are to be printed with a decimal point
_CALL = """
try:
    call = Solution().{name}
except NameError:
    call = {name}
checks = __import__("lightrl.rewards.sandboxed.results", fromlist="*")
assert checks.is_result(call(*checks.value_of({arguments!r})), {results!r})
"""


class CodeTests:
    """The fraction of the prompt's tests that the response's code passes; with all_or_nothing, 1 for all, otherwise 0.

    The tests are in a field of the prompt, as a list or its JSON. A test is Python statements such as assert f(2) == 4,
    which use what the code defines, or {"stdin": ..., "stdout": ...}, for which the code runs as a program; {"inputs":
    [...], "outputs": [...]} stands for several, of calls if it has an "fn_name". The code is the last fenced block of
    the response, of Python or else of no stated language, or all of it.
    """

    def __init__(
        self,
        *,
        field: str = "tests",
        timeout_s: float = 10.0,
        memory_mb: int = 512,
        all_or_nothing: bool = False,
        unsafe: bool = False,
    ) -> None:
        if not timeout_s > 0 or memory_mb < 64:
            raise ValueError(
                f"The reward code has timeout_s {timeout_s:g}, which must be above 0, and memory_mb {memory_mb}, which "
                "must be at least 64."
            )
        self._field = field
        self._limits = SandboxLimits(timeout_s=timeout_s, memory_mb=memory_mb)
        self._unsafe = unsafe
        choose_confinement(unsafe)  # here, so that a system without any is reported before anything expensive
        self._all_or_nothing = all_or_nothing
        self._has_warned = False
        # If there were more programs at a time than cores, they would make each other time out.
        self.max_concurrency = cores_of_rank()
        self._threads = ThreadPoolExecutor(max_workers=self.max_concurrency, thread_name_prefix="code")

    async def __call__(self, sample: Sample, /) -> float:
        tests = _tests_of(sample.prompt.fields, self._field)
        if not self._has_warned:
            self._warn_of_left_out(sample.prompt.fields)
        program = extract_code(sample.text)
        if not program.strip():
            return 0.0
        loop = asyncio.get_running_loop()
        num_passed = await loop.run_in_executor(self._threads, self._count_passed, program, tests)
        return float(num_passed == len(tests)) if self._all_or_nothing else num_passed / len(tests)

    def _warn_of_left_out(self, fields: Mapping[str, Any]) -> None:
        """Warns once of a test that is not called although others of its prompt are."""
        given = _parsed(inner_value(fields, self._field))
        texts = [item for item in (given if isinstance(given, list | tuple) else [given]) if isinstance(item, str)]
        if reason := next(filter(None, map(left_out, texts)), ""):
            self._has_warned = True
            logger.warning(
                "The reward code leaves out tests of %r: %s. A response is judged by the others (docs/rewards.md).",
                self._field,
                reason,
            )

    def _count_passed(self, program: str, tests: Sequence[str | Mapping[str, str]]) -> int:
        """Counts the passed tests. All tests share timeout_s; tests that are not reached in time count as failed."""
        started = time.monotonic()
        statements = [test for test in tests if isinstance(test, str)]
        pairs = [test for test in tests if isinstance(test, Mapping)]
        passed = sum(run_tests(program, statements, limits=self._limits, unsafe=self._unsafe)) if statements else 0
        left_s = self._limits.timeout_s - (time.monotonic() - started)
        if not pairs or left_s <= 0:
            return passed
        limits = replace(self._limits, timeout_s=left_s)
        results = run_inputs(program, [pair["stdin"] for pair in pairs], limits=limits, unsafe=self._unsafe)
        # The expected output is compared here, outside the program's own process.
        return passed + sum(_is_right(result, pair["stdout"]) for result, pair in zip(results, pairs, strict=True))


def _is_right(result: SandboxResult, expected: str) -> bool:
    if result.exit_code != 0:
        return False
    printed, wanted = _lines(result.stdout), _lines(expected)
    return printed == wanted or (len(printed) == len(wanted) and all(map(_are_near, printed, wanted)))


def _are_near(line: str, wanted: str) -> bool:
    """Returns whether two lines are equal but for the last digits of decimals, as judges of programming contests do."""
    parts = [re.split(r"(\s+)", text) for text in (line, wanted)]
    return len(parts[0]) == len(parts[1]) and all(map(_is_near, *parts))


def _is_near(word: str, wanted: str) -> bool:
    if "." not in wanted or not (_DECIMAL.fullmatch(word) and _DECIMAL.fullmatch(wanted)):
        return word == wanted
    return math.isclose(float(word), float(wanted), rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)


def extract_code(text: str) -> str:
    """Returns the last fenced block of Python, or else of no stated language, or the whole text if there is none."""
    for part in (text.rpartition("</think>")[2], text):  # a fence that the thoughts leave open ends with them
        blocks = _blocks(part)
        marked = [code for language, code in blocks if _PYTHON.fullmatch(language)]
        if found := marked or [code for language, code in blocks if not language]:
            code = found[-1]
            return textwrap.dedent(code) if code.lstrip("\r\n")[:1].isspace() else code  # which may alter texts in it
    return text


def _blocks(text: str) -> list[tuple[str, str]]:
    """Returns language and code of each fenced block; the last one may lack its end."""
    blocks: list[tuple[str, str]] = []
    opening: re.Match[str] | None = None
    language, code = "", ""
    lines = text.splitlines(keepends=True)
    for number, line in enumerate(lines):
        fences = list(_FENCE.finditer(line))
        if opening is not None:
            closing = _closing(opening, fences, line)
            if closing and _is_in_docstring(code, opening, lines[number : number + _FAR]):
                closing = None
            code += line[: closing.start()].rstrip() if closing else line
            if closing is None:
                continue
            blocks.append((language, code))
            is_next = line[closing.end() :][:1].isalnum()  # a language: the block before it lacks its end
            opening, fences = None, fences[fences.index(closing) + (not is_next) :]
        if len(fences) % 2 and "`" not in line[fences[-1].end() :]:  # an even number encloses text within the line
            opening, code = fences[-1], ""
            language = (line[opening.end() :].split() or [""])[0]
    return [*blocks, (language, code)] if opening is not None else blocks


def _closing(opening: re.Match[str], fences: Sequence[re.Match[str]], line: str) -> re.Match[str] | None:
    """Returns the fence that ends a block: about as far to the right as its first, or after code at a line's end."""
    for fence in fences:
        if not fence[0].startswith(opening[0]):
            continue
        if not line[: fence.start()].strip():
            return fence if fence.start() <= opening.start() + _INDENT else None
        if not line[fence.end() :].strip():
            return fence
    return None


def _is_in_docstring(code: str, opening: re.Match[str], following: Sequence[str]) -> bool:
    """Returns whether a fence after the code is inside a text in triple quotes, and a later fence ends the block."""
    quote = _open_quote(code)
    for line in following if quote else ():
        if not quote and _closing(opening, list(_FENCE.finditer(line)), line):
            return True
        quote = _open_quote(line, quote)
    return False


def _open_quote(code: str, quote: str = "") -> str:
    """Returns the triple quotes that the code leaves open; quote: those that are open before it."""
    for mark in _QUOTES.findall(code):
        if quote:
            is_end = mark == quote or (len(quote) == 1 and (mark == "\n" or mark[0] == quote))
            quote = "" if is_end else quote
        elif mark[0] in "\"'#":
            quote = mark
    return quote if len(quote) == 3 else ""


def _lines(text: str) -> list[str]:
    """Splits a text into lines, without white space at the end of a line or of the text."""
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _tests_of(fields: Mapping[str, Any], field: str) -> list[str | Mapping[str, str]]:
    """Reads the prompt's tests; raises ValueError if all programs pass them or none does, which a reward would hide."""
    given = _parsed(inner_value(fields, field))
    tests = [test for item in (given if isinstance(given, list | tuple) else [given]) for test in _tests_in(item)]
    if all(isinstance(test, str) and _flaw(test) for test in tests):
        first = str(tests[0]) if tests else ""
        flaw = f" (statements {_flaw(first)}: {left_out(first) or repr(first)[:60]})" if tests else ""
        raise ValueError(
            f"the prompt has no tests in the field {field!r}{flaw}. Name the field that holds them by --reward_args "
            "code.field=NAME"
        )
    return tests


def _parsed(test: Any) -> Any:
    """Parses a text that holds a JSON object or list; returns any other text, which holds statements, unchanged."""
    if isinstance(test, str) and test.lstrip().startswith(("[", "{")):
        try:
            return json.loads(test)
        except (ValueError, RecursionError):
            return test
    return test


def _tests_in(item: Any) -> list[str | Mapping[str, str]]:
    """Returns the tests that an item stands for; raises ValueError if it is no test."""
    item = _parsed(item)
    if item is None or isinstance(item, str):
        return list(with_calls(item)) if item else []
    if isinstance(item, Mapping) and (tests := _tests_of_pairs(item)) is not None:
        return tests
    raise ValueError(f'a test is {item!r:.200}: it must be a string, or {{"stdin": string, "stdout": string}}')


def _tests_of_pairs(item: Mapping[str, Any]) -> list[Any] | None:
    """Returns a test for each input and its output; None if some pair makes no test.

    APPS, TACO and CodeContests keep all inputs in one item, and all outputs; APPS and TACO some of these as lines.
    """
    given = _first(item, ("inputs", "stdin", "input"), ""), _first(item, ("outputs", "stdout", "output"))
    inputs, outputs = given if all(isinstance(side, list) for side in given) else [[side] for side in given]
    metadata = _parsed(item.get("metadata"))
    name = item.get("fn_name") or (metadata.get("func_name") if isinstance(metadata, Mapping) else None)
    tests: list[Any] = []
    if name and str(name).isidentifier():
        tests = [_call(name, arguments, wanted) for arguments, wanted in zip(inputs, outputs, strict=False)]
    elif not name and item.get("testtype") != "functional":
        pairs = zip(map(_joined, inputs), map(_joined, outputs), strict=False)
        tests = [{"stdin": stdin, "stdout": stdout} for stdin, stdout in pairs if _are_texts(stdin, stdout)]
    return tests if len(tests) == len(inputs) == len(outputs) and all(tests) else None


def _call(name: str, arguments: Any, wanted: Any) -> str:
    """Returns statements that call a function of the program, or a method of its Solution; empty if they cannot.

    In LiveCodeBench, arguments are lines of JSON. In APPS and TACO they are a list, and the result may be in one.
    """
    results = [wanted, *wanted] if isinstance(wanted, list) and len(wanted) == 1 else [wanted]
    if isinstance(arguments, str):
        try:
            arguments, results = [json.loads(line) for line in arguments.splitlines()], [json.loads(wanted)]
        except (TypeError, ValueError, RecursionError):
            return ""
    if not isinstance(arguments, list):
        return ""
    return _CALL.format(name=name, arguments=repr(arguments), results=repr(results))


def _first(test: Mapping[str, Any], names: Sequence[str], default: Any = None) -> Any:
    """Returns the first field that is given: in columnar formats every test has the fields of all, with nulls."""
    return next((test[name] for name in names if test.get(name) is not None), default)


def _are_texts(*values: Any) -> bool:
    return all(isinstance(value, str) for value in values)


def _joined(value: Any) -> Any:
    is_lines = isinstance(value, list) and all(isinstance(line, str) for line in value)
    return "\n".join(value) if is_lines else value


@lru_cache(maxsize=1024)
def _flaw(test: str) -> str:
    """Explains why the statements cannot tell programs apart; empty if they can."""
    try:
        is_idle = all(map(_is_idle, ast.parse(test).body))  # they only define, import or write down values
    except (SyntaxError, ValueError):
        return "that are no Python"
    except (RecursionError, MemoryError):
        return ""
    return "that no program can fail" if is_idle else ""


def _is_idle(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.ClassDef):
        return all(map(_is_idle, statement.body))
    if isinstance(statement, ast.Expr | ast.Assign):
        return not any(isinstance(node, ast.Name | ast.Call) for node in ast.walk(statement.value))
    return isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.Import | ast.ImportFrom | ast.Pass)
