"""Findings: what a check found, and what to do about it."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Literal, NamedTuple

Verdict = Literal["ok", "warning", "fail"]


class Finding(NamedTuple):
    """The result of a check."""

    check: str
    verdict: Verdict
    found: str
    remedy: str = ""


def ok(check: str, found: str) -> Finding:
    """Returns a finding that needs no action."""
    return Finding(check, "ok", found)


def judged(check: str, found: str, *, fails: bool = False, warns: bool = False, remedy: str) -> Finding:
    """Returns a finding, with its remedy if it fails or warns."""
    verdict: Verdict = "fail" if fails else "warning" if warns else "ok"
    return Finding(check, verdict, found, "" if verdict == "ok" else remedy)


def findings_of(checks: Iterable[Callable[[], Iterable[Finding]]]) -> Iterator[Finding]:
    """Runs the checks one by one; a check that raises an error becomes a finding, and the others still run."""
    for check in checks:
        try:
            yield from check()
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            found = f"the check itself failed: {type(error).__name__}: {error} ({where.filename}:{where.lineno})"
            yield Finding(check.__name__.replace("_", " "), "fail", found, "Report this as a defect of lightrl.")
