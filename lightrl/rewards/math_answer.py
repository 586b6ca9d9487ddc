r"""A reward that compares mathematical answers with math-verify: 1/2 equals 0.5 and \frac{2}{4}."""

from __future__ import annotations

import importlib.util
import logging
import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from lightrl.records import Sample
from lightrl.rewards.scoring import Isolation, NoVerdictError
from lightrl.rewards.text_match import expected_answer

_FINAL_ANSWER = "####"  # precedes the answer in the solutions of word problems
_END_OF_THOUGHTS = "</think>"
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_WORD = re.compile(r"(?<![\\A-Za-z{])(?!and\b)[A-Za-z]{3,}")
# Beside a tag, or Markdown's marks of bold, italics and code, math-verify finds no number or another one.
_OPENING_MARKS = re.compile(r"</?[A-Za-z_]{2,}>|(?:(?<=[\s(>:])|^)[*`]{1,3}(?=\S)")
_CLOSING_MARKS = re.compile(r"(?<=[^\s^_])[*`]{1,3}(?=[\s.,;:!?)<]|$)")
# math-verify reads LaTeX: 10\,000 as 10 times 0, 2pi as 2 times i times p, twice the root of 3 as 2, 10^-3 as 10, and
# nothing in \boxed{73.}.
_IN_LATEX = [
    (re.compile(r"(?<=\d)\\[,;: ](?=\d{3}(?!\d))"), ""),
    (re.compile(r"(?<![\\A-Za-z])(?<!rm{)(?<!xt{)(?<!me{)(pi|ln|log|sin|cos|tan)(?![A-Za-z])"), r"\\\1"),
    (re.compile("\u221a *(?:\\(([^()]*)\\)|(\\d+(?:\\.\\d+)?|[A-Za-z]))"), r"\\sqrt{\1\2}"),
    (re.compile(r"\^ *(-\d+)"), r"^{\1}"),
    (re.compile(r"(?<![\\.{])(?<!left)(?<!right)[.,](?=\s*\})"), ""),
    (re.compile(r"\\boxed\{ *(?:\\text\{)? *\(?([A-J])[).:] [^{}=]*\}? *\}"), r"\\boxed{\1}"),  # with its option's text
]
_SCIENTIFIC = re.compile(r"(?<![\w.\\])\d+(?:\.\d+)?[eE][-+]?\d{1,3}(?!\.?\w)")  # it reads 1e6 as e times 6
_SMALL, _LARGE = 1e-6, 1e15  # beyond these, the decimals to which math-verify rounds say nothing
_PRECISION, _EXACT = 1e-6, 1e-12  # relative, of numbers with decimals and of others
_ZERO = 1e-50  # more than what sympy computes for an expression that is 0, such as sin(pi)


class MathAnswer:
    """1 if the answer that math-verify reads in the response (boxed, tagged, LaTeX, last number) is the prompt's."""

    # It runs in a process of its own: on a model's output, the parser and sympy can hang or use up all memory, and
    # math-verify's own time limit works in the main thread only.
    isolation = Isolation(timeout_s=5.0, no_verdict_if_stopped=True)

    def __init__(self) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise ImportError('The reward math needs math-verify: pip install "lightrl[math]".')

    def __reduce__(self) -> Any:
        return _with_verifier, ()  # for its process, which must not load sympy in the time for the first sample

    def __call__(self, sample: Sample, /) -> float:
        verifier = _verifier()
        expected = _parse_expected(verifier, expected_answer(sample))
        try:
            given = _parse_given(verifier, sample.text)
            is_right = _is_same_extreme(expected, given)
            if is_right is None:
                is_right = verifier.verify(expected, given, timeout_seconds=None, raise_on_error=True)
        except Exception as error:
            raise NoVerdictError(f"math-verify cannot compare the response with the answer: {error}") from error
        return float(is_right)


def _with_verifier() -> MathAnswer:
    _verifier()
    return MathAnswer()


def _parse_expected(verifier: Any, answer: str) -> list[Any]:
    """Parses the prompt's answer; raises ValueError if it is not mathematics, which a reward of 0 would hide."""
    answer = answer.rpartition(_FINAL_ANSWER)[2].strip()
    parsed = _parse(verifier, answer if _is_marked(answer) else f"${answer.replace('**', '^')}$")
    if not parsed:
        raise ValueError(f"math-verify finds no mathematical expression in the prompt's answer {answer!r}")
    return parsed


def _parse_given(verifier: Any, text: str) -> list[Any]:
    """Parses the response's answer, which stands behind its thoughts, if anything does."""
    for part in (text.rpartition(_END_OF_THOUGHTS)[2], text):
        tagged = [] if "\\boxed" in part else _TAGGED.findall(part)
        if parsed := _parse_any(verifier, _forms_of(tagged[-1]) if tagged else [part]):
            return parsed
    return []


def _forms_of(answer: str) -> list[str]:
    """Returns what to read an answer between tags as: as if it were boxed, or first as text if it has words."""
    boxed = f"\\boxed{{{_without_marks(answer).strip().rstrip('.')}}}"
    if _is_marked(answer):
        return [answer]
    return [answer, boxed] if _WORD.search(_in_latex(answer)) else [boxed, answer]


def _parse_any(verifier: Any, texts: Sequence[str]) -> list[Any]:
    """Returns the first of the texts that has an answer, parsed."""
    return next(filter(None, (_parse(verifier, _without_marks(text)) for text in texts)), [])


def _without_marks(text: str) -> str:
    return _OPENING_MARKS.sub(" ", _CLOSING_MARKS.sub("", text))


def _is_marked(text: str) -> bool:
    return any(mark in text for mark in ("$", "\\boxed", "\\(", "\\["))


def _in_latex(text: str) -> str:
    for pattern, latex in _IN_LATEX:
        text = pattern.sub(latex, text)
    return _SCIENTIFIC.sub(lambda match: f"{Decimal(match[0]):f}", text)


def _parse(verifier: Any, text: str) -> list[Any]:
    parsed: list[Any] = verifier.parse(_in_latex(text), parsing_timeout=None, raise_on_error=True)
    return parsed


def _is_same_extreme(expected: list[Any], given: list[Any]) -> bool | None:
    """Compares very small numbers, all of which are 0 to math-verify, and very large ones with decimals; else None."""
    numbers = [parsed[0] for parsed in (expected, given) if parsed]
    if len(numbers) < 2 or not all(getattr(number, "is_number", False) and number.is_finite for number in numbers):
        return None
    is_rounded = any(number.is_Float or any(part.is_Float for part in number.args) for number in numbers)
    one, other = (number.evalf() for number in numbers)
    if abs(one) < _SMALL or (is_rounded and abs(one) > _LARGE):
        return bool(abs(one - other) <= abs(one) * (_PRECISION if is_rounded else _EXACT) + _ZERO)
    return None


def _verifier() -> Any:
    import math_verify  # noqa: PLC0415  (optional, and it loads sympy)

    # math-verify warns that its time limit is off, but the process has a limit.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return math_verify
