r"""A reward that compares mathematical answers with math-verify: 1/2 equals 0.5 and \frac{2}{4}."""

from __future__ import annotations

import importlib.util
import logging
from typing import Any

from lightrl.records import Sample
from lightrl.rewards.scoring import Isolation, NoVerdictError
from lightrl.rewards.text_match import expected_answer

_FINAL_ANSWER = "####"  # precedes the answer in the solutions of word problems


class MathAnswer:
    """1 if the answer that math-verify reads in the response (boxed, LaTeX, or the last number) equals the prompt's."""

    # It runs in a process of its own: on a model's output, the parser and sympy can hang or use up all memory, and
    # math-verify's own time limit works in the main thread only.
    isolation = Isolation(timeout_s=5.0, no_verdict_if_stopped=True)

    def __init__(self) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise ImportError('The reward math needs math-verify: pip install "lightrl[math]".')

    def __call__(self, sample: Sample, /) -> float:
        verifier = _verifier()
        expected = _parse_expected(verifier, expected_answer(sample))
        try:
            given = verifier.parse(sample.text, parsing_timeout=None, raise_on_error=True)
            is_right = verifier.verify(expected, given, timeout_seconds=None, raise_on_error=True)
        except Exception as error:
            raise NoVerdictError(f"math-verify cannot compare the response with the answer: {error}") from error
        return float(is_right)


def _parse_expected(verifier: Any, answer: str) -> list[Any]:
    """Parses the prompt's answer; raises ValueError if it is not mathematics, which a reward of 0 would hide."""
    answer = answer.rpartition(_FINAL_ANSWER)[2].strip()
    is_marked = any(mark in answer for mark in ("$", "\\boxed", "\\(", "\\["))
    parsed: list[Any] = verifier.parse(
        answer if is_marked else f"${answer}$", parsing_timeout=None, raise_on_error=True
    )
    if not parsed:
        raise ValueError(f"math-verify finds no mathematical expression in the prompt's answer {answer!r}")
    return parsed


def _verifier() -> Any:
    import math_verify  # noqa: PLC0415  (optional, and it loads sympy)

    # math-verify warns that its time limit is off, but the process has a limit.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return math_verify
