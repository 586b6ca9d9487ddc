r"""A reward that compares mathematical answers with math-verify: 1/2 equals 0.5 and \frac{2}{4}."""

from __future__ import annotations

import importlib.util
import logging
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from lightrl.records import Sample
from lightrl.rewards.answer_part import END_OF_THOUGHTS, TAGGED
from lightrl.rewards.answer_words import is_qualified
from lightrl.rewards.choice_letter import choice_of, stated_choice
from lightrl.rewards.clock_time import is_at, time_of
from lightrl.rewards.equations import are_unsolved, names_its_value, turned
from lightrl.rewards.letter_case import with_own_letters
from lightrl.rewards.math_notation import ends_with_factorial, in_latex, is_marked, with_marks
from lightrl.rewards.measures import has_other_base, has_other_unit, split_letter, split_measure, unit_of, without_unit
from lightrl.rewards.ratios import is_ratio
from lightrl.rewards.scoring import Isolation, NoVerdictError
from lightrl.rewards.text_match import expected_answer

_FINAL_ANSWER = "####"  # precedes the answer in the solutions of word problems
_WORD = re.compile(r"(?<![\\A-Za-z{])(?!and\b)[A-Za-z]{3,}")
# Beside a tag, or Markdown's marks of bold, italics and code, math-verify finds no number or another one.
_OPENING_MARKS = re.compile(r"</?[A-Za-z_]{2,}>|(?:(?<=[\s(>:])|^)[*`]{1,3}(?=\S)")
_CLOSING_MARKS = re.compile(r"(?<=[^\s^_])[*`]{1,3}(?=[\s.,;:!?)<]|$)")
_LETTERS = re.compile(r"(?<![A-Za-z\\])[A-Za-z]{1,2}[\s.]*(?:[}$<]|\\[)\]]|$)", re.MULTILINE)
_PLAIN_NUMBER = re.compile(r"[-+]?[\d.,/]+")
_SUFFIXES = ("st", "nd", "rd", "th", "hr", "yr", "ft", "lb", "gm", "sq", "am", "pm", "mm", "cm", "km", "kg")
_SMALL, _LARGE = 1e-6, 1e15  # beyond these, the decimals to which math-verify rounds say nothing
_SMALL_DECIMAL = 0.1  # below it, two numbers with decimals have fewer than six digits in common with its six decimals
_PRECISION, _EXACT = 1e-6, 1e-12  # relative, of numbers with decimals and of others
_TOO_MANY_DIGITS = "integer string conversion"  # in Python's error for an integer of more than 4,300 digits
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
        answer = expected_answer(sample).rpartition(_FINAL_ANSWER)[2].strip()
        expected = _parse_expected(verifier, answer)
        try:
            is_right = _is_right(verifier, answer, expected, sample.text)
        except Exception as error:
            if _TOO_MANY_DIGITS in str(error):
                return 0.0  # not left out of training: a policy that repeats a digit would never learn to end
            raise NoVerdictError(f"math-verify cannot compare the response with the answer: {error}") from error
        return float(is_right)

    def answer_of(self, sample: Sample, /) -> str | None:
        """Returns the answer that math-verify reads, for --eval.majority: a number by its value, to ten digits."""
        verifier = _verifier()
        try:
            given = _parse_given(verifier, sample.text)
            is_number = bool(given) and getattr(given[0], "is_number", False)
            return str(given[0].evalf(10) if is_number else given[0]) if given else None
        except Exception as error:
            raise NoVerdictError(f"math-verify cannot read the response: {error}") from error


def _with_verifier() -> MathAnswer:
    _verifier()
    return MathAnswer()


def _is_right(verifier: Any, answer: str, expected: list[Any], text: str) -> bool:
    if time := time_of(answer):
        return is_at(time, text)
    is_right = is_ratio(answer, text)
    if is_right is not None:
        return is_right
    if is_qualified(text) and not is_qualified(f"<answer>{answer}</answer>"):
        return False
    if ends_with_factorial(text, answer):
        return True
    given = _parse_given(verifier, text)
    is_right = _are_equal(verifier, expected, given)
    if _LETTERS.search(answer) or (is_right and _LETTERS.search(text)):
        is_right = _are_equal_with_letters(verifier, answer, expected, text, given, is_right)
    number, unit = split_measure(answer)
    if has_other_unit(text, number, unit or unit_of(answer)) or has_other_base(text, answer):
        return False
    if is_right:
        return True
    if letter := choice_of(answer):
        return stated_choice(text) == letter
    bare = without_unit(text)
    if unit:
        return _is_bare_number(verifier, number, bare)
    if bare == text or has_other_unit(text, *split_letter(answer)):
        return False
    return _are_equal(verifier, expected, _parse_given(verifier, bare))


def _is_bare_number(verifier: Any, number: str, text: str) -> bool:
    expected, given = _parse_expected(verifier, number), _parse_given(verifier, text)
    is_right = _are_equal(verifier, expected, given)
    if is_right and _LETTERS.search(text):
        return _are_equal_with_letters(verifier, number, expected, text, given, is_right)
    return is_right


def _are_equal(verifier: Any, expected: list[Any], given: list[Any]) -> bool:
    expected, given = _with_own_letters(verifier, expected, given)
    if not _is_equation(expected) and _is_equation(given):
        if not names_its_value(turned(given[-1]), partial(_is_same_value, verifier)):
            return False
        given = _parse(verifier, f"${turned(given[-1])}$") if turned(given[-1]) != given[-1] else given
    if _are_set_and_point(expected, given):
        return False
    is_same = _is_same_extreme(expected, given)
    if is_same is not None:
        return is_same
    settings = {"timeout_seconds": None, "raise_on_error": True, "allow_set_relation_comp": True}  # [1,2], 1 <= x <= 2
    numbers = _of_percent(expected), _of_percent(given)
    try:
        is_right = verifier.verify(expected, given, **settings)
    except KeyError:  # of a relation that math-verify cannot turn round, such as x != 5
        return False
    if is_right and are_unsolved(expected[0], given[0]):
        return False
    return bool(is_right or (numbers != (expected, given) and verifier.verify(*numbers, **settings)))


def _with_own_letters(verifier: Any, expected: list[Any], given: list[Any]) -> tuple[list[Any], list[Any]]:
    """Parses both again if one has a letter as a capital and one as a small letter, which math-verify takes for one."""
    if not (expected and given):
        return expected, given
    texts = str(expected[-1]), str(given[-1])
    renamed = with_own_letters(*texts)
    if renamed == texts:
        return expected, given
    return _parse(verifier, f"${renamed[0]}$"), _parse(verifier, f"${renamed[1]}$")


def _are_set_and_point(expected: list[Any], given: list[Any]) -> bool:
    r"""Returns whether one is written as a set, such as \{1, 2\}, and the other as a point or an interval (1, 2)."""
    kinds = {type(parsed[0]).__name__: str(parsed[-1]) for parsed in (expected, given) if parsed}
    return "\\{" in kinds.get("FiniteSet", "") and bool(kinds.keys() & {"Tuple", "Interval"})


def _is_equation(parsed: list[Any]) -> bool:
    return bool(parsed) and "=" in str(parsed[-1])


def _is_same_value(verifier: Any, one: str, other: str) -> bool:
    return _are_equal(verifier, _parse(verifier, f"${one}$"), _parse(verifier, f"${other}$"))


def _of_percent(parsed: list[Any]) -> list[Any]:
    """Returns the 5.5 of a parsed 5.5 percent, which math-verify takes for the same if both are integers."""
    parts: Any = getattr(parsed[0], "args", ()) if parsed else ()
    is_percent = len(parts) == 2 and type(parts[1]).__name__ == "UnevaluatedExpr" and str(parts[1]) == "1/100"
    return [parts[0]] if is_percent else parsed


def _are_equal_with_letters(
    verifier: Any, answer: str, expected: list[Any], text: str, given: list[Any], is_right: bool
) -> bool:
    """Compares again with letters that math-verify takes for units, if one of the two has such a variable at its end.

    It drops the t of 2t and the c of 5x + c. Behind a number and a space, a letter is a unit.
    """
    strict = _KeepsUnits(verifier)
    whole_expected, whole_given = _parse_expected(strict, answer), _parse_given(strict, text)
    if not (_drops_letters(expected, whole_expected) or _drops_letters(given, whole_given)):
        return is_right
    if not is_marked(text) and "<answer>" not in text:  # of plain text, only the number is found
        return is_right and re.search(rf"(?<![\w+*/^-]){re.escape(answer)}\W*$", text) is not None
    return _are_equal(verifier, whole_expected, whole_given)


def _drops_letters(parsed: list[Any], whole: list[Any]) -> bool:
    short, text = (str(found[-1]) if found else "" for found in (parsed, whole))
    letters = text.removeprefix(short)
    is_variable = re.fullmatch(r"[A-Za-z]{1,2}", letters.strip()) and letters.strip() not in _SUFFIXES
    return bool(short and is_variable) and not (letters[0].isspace() and _PLAIN_NUMBER.fullmatch(short.strip()))


class _KeepsUnits:
    """Parses as math-verify does, but takes no letters for units."""

    def __init__(self, verifier: Any) -> None:
        latex = verifier.LatexExtractionConfig()
        latex = replace(latex, normalization_config=replace(latex.normalization_config, units=False))
        self._verifier, self._config = verifier, [latex, verifier.ExprExtractionConfig()]

    def parse(self, text: str, **settings: Any) -> list[Any]:
        parsed: list[Any] = self._verifier.parse(text, extraction_config=self._config, **settings)
        return parsed


def _parse_expected(verifier: Any, answer: str) -> list[Any]:
    """Parses the prompt's answer; raises ValueError if it is not mathematics, which a reward of 0 would hide."""
    plain = answer.replace("\\$", "")  # of an amount of money
    parsed = _parse(verifier, plain if is_marked(plain) else f"${plain.replace('**', '^')}$")
    if not parsed:
        raise ValueError(f"math-verify finds no mathematical expression in the prompt's answer {answer!r}")
    return parsed


def _parse_given(verifier: Any, text: str) -> list[Any]:
    """Parses the response's answer: the text after its thoughts, if there is any."""
    for part in (text.rpartition(END_OF_THOUGHTS)[2], text):
        tagged = [] if "\\boxed" in part else TAGGED.findall(part)
        if parsed := _parse_any(verifier, _forms_of(tagged[-1]) if tagged else [part]):
            return parsed
    return []


def _forms_of(answer: str) -> list[str]:
    """Returns the forms in which to read an answer between tags: boxed first, or as text first if it has words."""
    boxed = f"\\boxed{{{_without_marks(answer).strip().rstrip('.')}}}"
    if is_marked(answer):
        return [answer]
    return [answer, boxed] if _WORD.search(in_latex(answer)) else [boxed, answer]


def _parse_any(verifier: Any, texts: Sequence[str]) -> list[Any]:
    """Returns the first of the texts that has an answer, parsed."""
    return next(filter(None, (_parse(verifier, _without_marks(text)) for text in texts)), [])


def _without_marks(text: str) -> str:
    return _OPENING_MARKS.sub(" ", _CLOSING_MARKS.sub("", text))


def _parse(verifier: Any, text: str) -> list[Any]:
    parsed: list[Any] = verifier.parse(with_marks(in_latex(text)), parsing_timeout=None, raise_on_error=True)
    return parsed


def _is_same_extreme(expected: list[Any], given: list[Any]) -> bool | None:
    """Compares very small numbers, all of which are 0 to math-verify, and very large ones with decimals; else None."""
    numbers = [parsed[0] for parsed in (expected, given) if parsed]
    if len(numbers) < 2 or not all(getattr(number, "is_number", False) and number.is_finite for number in numbers):
        return None
    have_decimals = [number.is_Float or any(part.is_Float for part in number.args) for number in numbers]
    is_rounded = any(have_decimals)
    one, other = (number.evalf() for number in numbers)
    if abs(one) < (_SMALL_DECIMAL if all(have_decimals) else _SMALL) or (is_rounded and abs(one) > _LARGE):
        return bool(abs(one - other) <= abs(one) * (_PRECISION if is_rounded else _EXACT) + _ZERO)
    return None


def _verifier() -> Any:
    import math_verify  # noqa: PLC0415  (optional, and it loads sympy)

    # math-verify warns that its time limit is off, but the process has a limit.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return math_verify
