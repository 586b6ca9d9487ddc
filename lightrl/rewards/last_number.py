"""1 for a response whose last number is that of the answer, as word problems are commonly judged."""

from __future__ import annotations

import re
from decimal import Decimal

from lightrl.records import Sample
from lightrl.rewards.expected import expected_answer

# A minus counts as a sign only where it does not subtract; commas only between thousands. The exponent is kept short,
# since Decimal raises beyond its range and a response may hold anything.
_NUMBER = re.compile(
    r"""
    (?: (?<![\w.)\]]) - )?
    (?: (?: [0-9]{1,3} (?: ,[0-9]{3} )+ (?![0-9]) | [0-9]+ ) (?: \.[0-9]+ )? | \.[0-9]+ )
    (?: [eE] [+-]? [0-9]{1,3} (?![0-9]) )?
    """,
    re.VERBOSE,
)


def last_number(sample: Sample) -> float:
    """Whether the last number of the response equals the last one of the answer: 1,234.50 equals 1234.5."""
    expected = _last_number_in(expected_answer(sample))
    if expected is None:
        raise ValueError(f"the prompt's answer {sample.prompt.answer!r} holds no number to compare with")
    return float(_last_number_in(sample.text) == expected)


def _last_number_in(text: str) -> Decimal | None:
    numbers = _NUMBER.findall(text.replace("\u2212", "-"))
    return Decimal(numbers[-1].replace(",", "")) if numbers else None
