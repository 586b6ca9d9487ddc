"""A reward that runs the code of a response against the tests of its prompt, in a sandbox."""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from lightrl.records import Sample
from lightrl.rewards.sandbox import SandboxLimits, run_python

_FENCE = re.compile(r"```(?:python|py|Python)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)

# The program and its tests share a process. A passed test is reported by a random word over a copy of stdout, so that a
# program that exits early or prints "passed" passes nothing.
_HARNESS = """
import os

def run(program, tests, word):
    report = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    scope = {{"__name__": "solution"}}
    exec(compile(program, "<response>", "exec"), scope)
    for number, test in enumerate(tests):
        try:
            exec(compile(test, "<test>", "exec"), scope)
        except BaseException:
            continue
        os.write(report, f"{{word}} {{number}}\\n".encode())

run({program!r}, {tests!r}, {word!r})
"""


class CodeTests:
    """The fraction of the prompt's tests that the response's code passes; with all_or_nothing, 1 for all and else 0.

    The tests are in a field of the prompt, as a list or its JSON. A test is Python statements such as assert f(2) == 4,
    which run after the code, or {"stdin": ..., "stdout": ...}, for which the code runs as a program. The code is the
    last fenced block of the response, or all of it.
    """

    def __init__(
        self, *, field: str = "tests", timeout_s: float = 10.0, memory_mb: int = 512, all_or_nothing: bool = False
    ) -> None:
        if not timeout_s > 0 or memory_mb < 64:
            raise ValueError(
                f"The reward code has timeout_s {timeout_s:g}, which must be above 0, and memory_mb {memory_mb}, which "
                "must be at least 64."
            )
        self._field = field
        self._limits = SandboxLimits(timeout_s=timeout_s, memory_mb=memory_mb)
        self._all_or_nothing = all_or_nothing
        # More programs at a time than there are cores would make each other time out.
        self.max_concurrency = max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        self._threads = ThreadPoolExecutor(max_workers=self.max_concurrency, thread_name_prefix="code")

    async def __call__(self, sample: Sample, /) -> float:
        tests = _tests_of(sample.prompt.fields, self._field)
        program = extract_code(sample.text)
        if not program.strip():
            return 0.0
        loop = asyncio.get_running_loop()
        num_passed = await loop.run_in_executor(self._threads, self._count_passed, program, tests)
        return float(num_passed == len(tests)) if self._all_or_nothing else num_passed / len(tests)

    def _count_passed(self, program: str, tests: Sequence[str | Mapping[str, str]]) -> int:
        """Counts the passed tests. All tests together have timeout_s; tests that are not reached count as failed."""
        deadline = time.monotonic() + self._limits.timeout_s
        statements = [test for test in tests if isinstance(test, str)]
        passed = self._run_statements(program, statements) if statements else 0
        for test in tests:
            left_s = deadline - time.monotonic()
            if isinstance(test, Mapping) and left_s > 0:
                passed += self._run_program(program, test, replace(self._limits, timeout_s=left_s))
        return passed

    def _run_statements(self, program: str, statements: Sequence[str]) -> int:
        word = secrets.token_hex(16)
        source = _HARNESS.format(program=program, tests=list(statements), word=word)
        lines = run_python(source, limits=self._limits).stdout.splitlines()
        return sum(f"{word} {number}" in lines for number in range(len(statements)))

    def _run_program(self, program: str, test: Mapping[str, str], limits: SandboxLimits) -> bool:
        result = run_python(program, stdin=test["stdin"], limits=limits)
        return result.exit_code == 0 and _lines(result.stdout) == _lines(test["stdout"])


def extract_code(text: str) -> str:
    """Returns the last fenced block, or the whole text if there is none."""
    blocks = _FENCE.findall(text)
    return blocks[-1] if blocks else text


def _lines(text: str) -> list[str]:
    """Splits a text into lines without the white space at the ends of lines and of the text."""
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _tests_of(fields: Mapping[str, Any], field: str) -> list[str | Mapping[str, str]]:
    """Reads the prompt's tests; raises ValueError if it has none, which a reward of 0 would hide."""
    tests = fields.get(field)
    if isinstance(tests, str) and tests.lstrip().startswith("["):
        tests = json.loads(tests)
    if isinstance(tests, str | Mapping):
        tests = [tests]
    if not tests:
        raise ValueError(
            f"the prompt has no tests in the field {field!r}. Name the field that holds them by --reward_args "
            "code.field=NAME"
        )
    return [_checked_test(test) for test in tests]


def _checked_test(test: Any) -> str | Mapping[str, str]:
    if isinstance(test, str):
        return test
    if isinstance(test, Mapping):
        pair = {"stdin": test.get("stdin", test.get("input", "")), "stdout": test.get("stdout", test.get("output"))}
        if all(isinstance(value, str) for value in pair.values()):
            return pair
    raise ValueError(f'a test is {test!r:.200}: it must be a string, or {{"stdin": string, "stdout": string}}')
