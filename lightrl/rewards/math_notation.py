"""Writes mathematics in the LaTeX that math-verify reads as it is meant."""

from __future__ import annotations

import re
import unicodedata
from decimal import Decimal
from fractions import Fraction

# math-verify reads LaTeX: 10\,000 as 10 times 0, 2pi as 2 times i times p, twice the root of 3 as 2, 10^-3 as 10, and
# nothing in \boxed{73.}.
_IN_LATEX = [
    (re.compile(r"\\fbox(?= *\{)"), r"\\boxed"),
    (re.compile(r"(?<=\d)\\[,;: ](?=\d{3}(?!\d))"), ""),
    (re.compile(r"(?<![\\A-Za-z])(?<!rm{)(?<!xt{)(?<!me{)(pi|ln|log|sin|cos|tan)(?![A-Za-z])"), r"\\\1"),
    (re.compile("\u221a *(?:\\(([^()]*)\\)|(\\d+(?:\\.\\d+)?|[A-Za-z]))"), r"\\sqrt{\1\2}"),
    (re.compile(r"\^ *(-\d+)"), r"^{\1}"),
    (re.compile(r"(?<![\\.{])(?<!left)(?<!right)[.,](?=\s*\})"), ""),
    (re.compile(r"\\boxed\{ *(?:\\text\{)? *\(?([A-J])[).:] [^{}=]*\}? *\}"), r"\\boxed{\1}"),  # with its option's text
]
_SCIENTIFIC = re.compile(r"(?<![\w.\\])\d+(?:\.\d+)?[eE][-+]?\d{1,3}(?!\.?\w)")  # it reads 1e6 as e times 6
# It reads 1 of 3 1/2.
_MIXED = re.compile(r"(?<![\w.,/^_}\\)])(\d{1,6})(?: |\\ |~)+(\d+)/(\d+)(?![\w/.]*\w)")
_VULGAR = re.compile(r"(?<![\w.,/^_}\\)])(\d{0,6}) ?([\u00bc-\u00be\u2150-\u215e])")


def in_latex(text: str) -> str:
    """Rewrites the notations in a text that math-verify would misread, and nothing else."""
    for pattern, latex in _IN_LATEX:
        text = pattern.sub(latex, text)
    text = _VULGAR.sub(_in_one_fraction, _MIXED.sub(_in_one_fraction, text))
    return _SCIENTIFIC.sub(lambda match: f"{Decimal(match[0]):f}", text)


def _in_one_fraction(mixed: re.Match[str]) -> str:
    """Returns 3 1/2 as 7/2; what is no mixed number, such as 3 5/2, as it is."""
    if mixed.re is _VULGAR:
        fraction = Fraction(unicodedata.numeric(mixed[2])).limit_denominator(10)
    elif 0 < int(mixed[2]) < int(mixed[3]):
        fraction = Fraction(int(mixed[2]), int(mixed[3]))
    else:
        return mixed[0]
    value = int(mixed[1] or 0) + fraction
    return f"{value.numerator}/{value.denominator}"
