"""A reward that runs the code of a response against the tests of its prompt, in a sandbox."""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from lightrl.records import Sample
from lightrl.rewards.sandbox import SandboxLimits, SandboxResult, choose_confinement, run_inputs, run_tests

_FENCE = re.compile(r"```([^\s`]*)[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)  # any language: its end is no start
_PYTHON = ("", "python", "py", "python3")


class CodeTests:
    """The fraction of the prompt's tests that the response's code passes; with all_or_nothing, 1 for all, otherwise 0.

    The tests are in a field of the prompt, as a list or its JSON. A test is Python statements such as assert f(2) == 4,
    which use what the code defines, or {"stdin": ..., "stdout": ...}, for which the code runs as a program. The code is
    the last fenced block of the response (of Python, or of no stated language), or all of it.
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
        # If there were more programs at a time than cores, they would make each other time out.
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
    return result.exit_code == 0 and _lines(result.stdout) == _lines(expected)


def extract_code(text: str) -> str:
    """Returns the last fenced block of Python or of no stated language, or the whole text if there is none."""
    blocks = [code for language, code in _FENCE.findall(text) if language.lower() in _PYTHON]
    return blocks[-1] if blocks else text


def _lines(text: str) -> list[str]:
    """Splits a text into lines, without white space at the end of a line or of the text."""
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
