"""Rewards that compare the response with the prompt's answer as text or as a number."""

from __future__ import annotations

import re
from decimal import Decimal

from lightrl.records import Sample

# A minus counts as a sign only if it does not subtract; commas may only separate thousands. The exponent is kept short
# because Decimal raises an error beyond its range, and a response may contain anything.
_NUMBER = re.compile(
    r"""
    (?: (?<![\w.)\]]) - )?
    (?: (?: [0-9]{1,3} (?: ,[0-9]{3} )+ (?![0-9]) | [0-9]+ ) (?: \.[0-9]+ )? | \.[0-9]+ )
    (?: [eE] [+-]? [0-9]{1,3} (?![0-9]) )?
    """,
    re.VERBOSE,
)

_SEPARATOR = re.compile(r"(?<=[0-9])(?:\{,\}|,\\!|\\[,;: ])(?=[0-9]{3}(?![0-9]))")  # of thousands, in LaTeX


def _stripped(sample: Sample) -> str | None:
    return sample.text.strip() or None


def exact_match(sample: Sample) -> float:
    """Returns 1 if the response, without surrounding white space, equals the answer as text."""
    return float(sample.text.strip() == expected_answer(sample))


exact_match.needs_time_limit = False  # type: ignore[attr-defined]  # a timer takes longer than the comparison


def contains(sample: Sample) -> float:
    """Returns 1 if the answer's text occurs anywhere in the response, also inside a longer word or number."""
    return float(expected_answer(sample) in sample.text)


def _last_number_of(sample: Sample) -> Decimal | None:
    return _last_number_in(sample.text)


def last_number(sample: Sample) -> float:
    """Returns 1 if the last number of the response equals the last one of the answer: 1,234.50 equals 1234.5."""
    expected = _last_number_in(expected_answer(sample))
    if expected is None:
        raise ValueError(f"the prompt's answer {sample.prompt.answer!r} holds no number to compare with")
    return float(_last_number_in(sample.text) == expected)


for _reward, _read in ((exact_match, _stripped), (last_number, _last_number_of)):  # for --eval.majority
    _reward.answer_of = _read  # type: ignore[attr-defined]


def expected_answer(sample: Sample) -> str:
    """Returns the prompt's answer, stripped; raises ValueError if there is no text, which a reward of 0 would hide."""
    answer = sample.prompt.answer
    if answer is None or isinstance(answer, list | dict) or not str(answer).strip():
        raise _nothing_to_compare_with(answer)
    return str(answer).strip()


def _nothing_to_compare_with(answer: object) -> ValueError:
    if isinstance(answer, list | dict):
        shown = str(answer)[:80]
        return ValueError(
            f"the prompt's answer {shown} is neither a text nor a number: write a reward of your own to compare with it"
        )
    return ValueError("the prompt has no answer to compare with (--data.answer_field names the field that holds it)")


def _last_number_in(text: str) -> Decimal | None:
    numbers = _NUMBER.findall(_SEPARATOR.sub(",", text.replace("\u2212", "-")))
    return Decimal(numbers[-1].replace(",", "")) if numbers else None
