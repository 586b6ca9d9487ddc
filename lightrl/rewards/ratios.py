"""Compares ratios of three and more parts, such as 3:4:5, which math-verify reads as divisions in a row."""

from __future__ import annotations

import re
from fractions import Fraction

from lightrl.rewards.answer_part import answer_part, behind_thoughts, without_commands

_RATIO = re.compile(r"(?<![\w.:])\d{1,9}(?:\.\d{1,9})?(?: ?: ?\d{1,9}(?:\.\d{1,9})?)+(?![\w:])")
_TEXT = re.compile(r"\\(?:text|mathrm) *\{([^{}]*)\}")


def is_ratio(answer: str, text: str) -> bool | None:
    """Returns whether a response gives the ratio that the prompt's answer is; None if both have at most two parts.

    Of a plain text the last ratio counts. A box or tags must have one ratio only.
    """
    part = behind_thoughts(text)
    content = answer_part(part)
    expected = _ratios_in(answer)
    given = _ratios_in(part if content is None else content)
    if not _RATIO.fullmatch(without_commands(answer, _TEXT)) or max(map(len, [*expected, *given[-1:]])) < 3:
        return None
    if not given or (content is not None and len(given) > 1):
        return False
    one, other = expected[0], given[-1]
    return len(one) == len(other) and all(a * sum(other) == b * sum(one) for a, b in zip(one, other, strict=True))


def _ratios_in(text: str) -> list[list[Fraction]]:
    ratios = _RATIO.findall(without_commands(text, _TEXT))
    return [[Fraction(number) for number in found.split(":")] for found in ratios]
