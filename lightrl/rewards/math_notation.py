"""Writes mathematics in the LaTeX that math-verify reads as it is meant."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from itertools import pairwise
from math import factorial

from lightrl.rewards.equations import is_name

# math-verify reads 5 of a plain text with a minus sign of Unicode in front, and of 5 with a raised 2.
_SYMBOLS = str.maketrans(
    {
        "\u2212": "-",
        "\u00b7": "*",
        "\u22c5": "*",
        "\u00d7": "*",
        "\u00f7": "/",
        "\u221e": r"\infty ",
        "\u2205": r"\emptyset ",
        "\u00b0": r"^\circ ",
        "\u2260": r"\ne ",
        "\u2264": r"\le ",
        "\u2265": r"\ge ",
    }
)
_RAISED = re.compile("[\u2070\u00b9\u00b2\u00b3\u2074-\u2079\u207a\u207b]+")
_LOWERED = re.compile("[\u2080-\u2089]+")
_DASH = re.compile(r"(?<!\d)(?<!\d )[\u2010-\u2014](?=[\d.\\])")  # of a negative number, and not of a range
# It reads LaTeX: 10\,000 as 10 times 0, 2pi as 2 times i times p, twice the root of 3 as 2, 10^-3 as 10, and
# nothing in \boxed{73.}.
_IN_LATEX = [
    (re.compile(r"\\fbox(?= *\{)"), r"\\boxed"),
    (re.compile(r"(?<=\d)(?:\\[,;: ]|[\u00a0\u2009\u202f])(?=\d{3}(?!\d))"), ""),
    (
        re.compile(r"(?<![\\A-Za-z])(?<!rm{)(?<!xt{)(?<!me{)(pi|ln|log|exp|(?:arc)?(?:sin|cos|tan))(?![A-Za-z])"),
        r"\\\1",
    ),
    (re.compile(r"(?:\u221a|(?<![\\A-Za-z])sqrt) *(?:\(([^()]*)\)|(\d+(?:\.\d+)?|[A-Za-z]))"), r"\\sqrt{\1\2}"),
    (re.compile(r"\\varnothing(?![A-Za-z])"), r"\\emptyset"),
    (re.compile(r"\\not *="), r"\\ne "),
    (re.compile(r"(?<![^\s>{(:=])(?:negative|minus) (?=\d)", re.IGNORECASE), "-"),
    (re.compile(r"\^ *(-\d+)"), r"^{\1}"),
    (re.compile(r"(?<![\\.{])(?<!left)(?<!right)[.,](?=\s*\})"), ""),
    (re.compile(r"\\boxed\{ *(?:\\text\{)? *\(?([A-J])[).:] [^{}=]*\}? *\}"), r"\\boxed{\1}"),  # with its option's text
]
# It reads 5 of \ge 5, and of 5 million.
_WITHOUT_LEFT_SIDE = re.compile(
    r"(\\boxed *\{|\\\(|\\\[|(?<!\\)\$) *"
    r"(?=(?:\\(?:geq?|leq?|geqslant|leqslant|neq?|gt|lt|not|neg|lnot|equiv|mod)(?![A-Za-z])|[<>\u2260\u2264\u2265]))"
)
_SCIENTIFIC = re.compile(r"(?<![\w.\\])\d+(?:\.\d+)?[eE][-+]?\d{1,3}(?!\.?\w)")  # it reads 1e6 as e times 6
_WORDS_OF_FACTORS = "dozen|hundred|thousand|million|billion|trillion"
_LARGE = re.compile(
    rf"(?<![\w.,/^])(\d{{1,9}}(?:\.\d{{1,9}})?) *"
    rf"(?:(?<= )({_WORDS_OF_FACTORS})(?![A-Za-z])|\\text *\{{ *({_WORDS_OF_FACTORS})(?![A-Za-z])([^{{}}]*)\}})"
)
_FACTORS = {"dozen": 12, "hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
# It reads (101)_2 as a text, and (101)_{2} as a falling factorial.
_BASE = re.compile(r"(?<![\w}])(?:\((\d+)\)|\\text *\{(\d+)\}) *_ *(?:(\d)(?!\d)|\{ *(\d{1,2}) *\})")
# It reads 5 of 5 sixths, and of 5 and a half.
_PARTS = {
    **{"third": 3, "fourth": 4, "fifth": 5, "sixth": 6, "seventh": 7, "eighth": 8, "ninth": 9},
    **{"tenth": 10, "hundredth": 100, "thousandth": 1000},
}
_OF_PARTS = re.compile(
    rf"(?<![\w.,/^])(\d{{1,9}}) *(?:(?<= )(and a half|(?:{'|'.join(_PARTS)})s)\b"
    rf"|\\text *\{{ *(and a half|(?:{'|'.join(_PARTS)})s) *\}})"
)
# It reads 1 of 3 1/2.
_MIXED = re.compile(r"(?<![\w.,/^_}\\)])(\d{1,6})(?: |\\ |~)+(\d+)/(\d+)(?![\w/.]*\w)")
_VULGAR = re.compile(r"(?<![\w.,/^_}\\)])(\d{0,6}) ?([\u00bc-\u00be\u2150-\u215e])")
# It reads 0 of 0.\bar{3}.
_REPEATING = re.compile(r"(?<![\d.])(\d{0,9})\.(\d{0,9})\\(?:overline|bar|dot) *\{(\d{1,9})\}")

# It reads 6 of 6\frac23\%, and of 1/3\% the inverse of 3\%.
_PERCENT = re.compile(
    r"(?<![\w.,/^_}\\)])(?:(\d{1,6}) *)?\\[dt]?frac *(?:\{(\d{1,9})\}|(\d)) *(?:\{(\d{1,9})\}|(\d)) *(?=\\%)"
    r"|(?<![\w.,/^_}\\)])(\d{1,9})/(\d{1,9}) *(?=\\%)"
)

# At the end of a plain text, it reads the 2 of 2\sqrt{3}.
_UNMARKED = re.compile(r"(?<![^\s:])(?=[^\s$]{0,200}\\[a-z])([^\s$]{1,200}?)(?=[.,;]?\s*\Z)")
# And the 5 of 5x^2, 5 + 2i, (7, 5) and x > 5, behind one of these.
_LEAD = re.compile(r"(?:^|[=:](?= )|\b(?:is|are|be|equals?|gets?|gives?|answer)(?= ))\s*", re.IGNORECASE | re.MULTILINE)
_WORD = re.compile(r"(?:\\[A-Za-z]+|(?<![A-Za-z])[A-Za-z](?![A-Za-z])|\d|[-+*/^=<>!,.:()\[\]{}|_%'])+|and|or")
# What may stand before a space in it, and behind one: `5 + 2i`, and not `5 m`.
_BEFORE = re.compile(r"(?:[-+*/=<>,(\[{|]|\\[A-Za-z]+|\b(?:or|and))$")
_BEHIND = re.compile(r"[-+*/=<>)\]}|\\]|(?:or|and)$")
_ARITHMETIC = re.compile(r"[-+*/^().%\d\s]*|[-+]?\d{1,3}(?:,\d{3})+|\(?[A-Za-z]\)?|[\d.]+ ?h")
_VARIABLE = re.compile(r"(?<![A-Za-z\\])[A-Za-z](?![A-Za-z])")
# A factorial, and no number at the end of an exclamation: a mark or a small letter follows it.
_FACTORIAL = re.compile(r"(?<![\w.,!])(\d{1,2})!(?=[.,;:)]|\s+(?:[a-z]|[-+*/=<>] ))")
_FAR = 100  # characters
_GLUED = re.compile(r"(?<![^\s=])(?=[\d.]+(?:[xyznabi]\b|[A-Za-z]\^|\^[A-Za-z{]|\\(?:pi|sqrt|frac|ln|sin|cos)))")


def in_latex(text: str) -> str:
    """Rewrites the notations in a text that math-verify would misread, and nothing else."""
    text = _LOWERED.sub(_as_index("_"), _RAISED.sub(_as_index("^"), _DASH.sub("-", text)))
    for pattern, latex in _IN_LATEX:
        text = pattern.sub(latex, text)
    text = _REPEATING.sub(_as_fraction, _BASE.sub(_with_base, text.translate(_SYMBOLS)))
    text = _PERCENT.sub(_in_decimals, _VULGAR.sub(_in_one_fraction, _MIXED.sub(_in_one_fraction, text)))
    text = _WITHOUT_LEFT_SIDE.sub(r"\1x", _OF_PARTS.sub(_in_parts, _LARGE.sub(_in_digits, text)))
    return _SCIENTIFIC.sub(lambda match: f"{Decimal(match[0]):f}", text)


def with_marks(text: str) -> str:
    """Puts dollar signs around an expression with which a text without any other mark ends.

    A number elsewhere that is part of an expression, such as the 5 of `5x^2 is it`, gets a brace: it is none by itself.
    """
    if is_marked(text):
        return text
    text = text.replace("\\%", "%")  # else the number is read without it
    text = _FACTORIAL.sub(lambda found: str(factorial(int(found[1]))), text)
    start, end = _expression_at_end(text)
    if start < end:
        marked = _WITHOUT_LEFT_SIDE.sub(r"\1x", f"${text[start:end]}$")
        return f"{_GLUED.sub('{', text[:start])}{marked}{text[end:]}"
    marked = _UNMARKED.sub(r"$\1$", text)
    return marked if marked != text else _GLUED.sub("{", text)


def _expression_at_end(text: str) -> tuple[int, int]:
    """Returns the range of the expression that is the last clause of a text; an empty one if there is none."""
    end = len(text.rstrip(" \t\r\n.;!"))
    begin = max(end - _FAR, 0)
    for lead in reversed(list(_LEAD.finditer(text, begin, end))):
        clause = text[lead.end() : end]
        if clause:
            words = clause.split()
            is_whole = _is_joined(words) and all(map(_WORD.fullmatch, words))
            if is_whole and lead[0].startswith("="):
                left = _left_side(text, begin, lead.start())
                return (left, end) if left < lead.start() else (lead.end() if _is_expression(clause) else end, end)
            return (lead.end(), end) if is_whole and _is_expression(clause) else (end, end)
    return end, end


def _is_expression(clause: str) -> bool:
    return not _ARITHMETIC.fullmatch(clause)


def _is_joined(words: list[str]) -> bool:
    return all(_BEFORE.search(word) or _BEHIND.match(behind) for word, behind in pairwise(words))


def _left_side(text: str, begin: int, end: int) -> int:
    """Returns where the left side of an equation begins, if it has a variable and is no name; else its end."""
    words: list[str] = []
    for word in reversed(text[begin:end].split()):
        if not (_WORD.fullmatch(word) and _is_joined([word, *words][:2])) or word[-1] in ",.;:":
            break
        words.insert(0, word)
    left = " ".join(words)
    if not _VARIABLE.search(left) or is_name(left):
        return end
    found = re.compile(r"\s+".join(map(re.escape, words)) + r"\s*\Z").search(text, begin, end)
    return found.start() if found else end


def ends_with_factorial(text: str, answer: str) -> bool:
    """Returns whether a plain text ends with an answer such as `5!`, so that its mark is part of it."""
    end = text.rstrip().rstrip(".")[-_FAR:]
    is_factorial = re.fullmatch(r"\w{1,9}!", answer) and not is_marked(text) and "<answer>" not in text
    return bool(is_factorial) and re.search(rf"(?:^|[\s:]|(?<=[A-Za-z] )=\s){re.escape(answer)}$", end) is not None


def is_marked(text: str) -> bool:
    """Returns whether a text marks what is mathematics in it."""
    return any(mark in text for mark in ("$", "\\boxed", "\\(", "\\["))


def _as_index(mark: str) -> Callable[[re.Match[str]], str]:
    def written(match: re.Match[str]) -> str:
        index = unicodedata.normalize("NFKC", match[0])
        return f"{mark}{index}" if len(index) == 1 else f"{mark}{{{index}}}"

    return written


def _in_digits(large: re.Match[str]) -> str:
    r"""Returns 5 million as 5000000, with a unit that stands in the same \text{}."""
    number = f"{(Decimal(large[1]) * _FACTORS[large[2] or large[3]]).normalize():f}"
    unit = (large[4] or "").strip()
    return rf"{number}\text{{ {unit}}}" if unit else number


def _with_base(number: re.Match[str]) -> str:
    """Returns (101)_2 as 101_{2}; what is no number in the base, such as (5)_2, as it is."""
    digits, base = number[1] or number[2], int(number[3] or number[4])
    return f"{digits}_{{{base}}}" if max(map(int, digits)) < base else number[0]


def _in_parts(words: re.Match[str]) -> str:
    name = words[2] or words[3]
    return f"{words[1]}.5" if name.startswith("and") else f"{words[1]}/{_PARTS[name.removesuffix('s')]}"


def _as_fraction(repeating: re.Match[str]) -> str:
    r"""Returns 0.1\overline{6} as 15/90, the digits with a period less those in front of it."""
    whole, once, period = repeating.groups()
    first, all_digits = int(whole + once or 0), int(whole + once + period)
    return rf"\frac{{{all_digits - first}}}{{{(10 ** len(period) - 1) * 10 ** len(once)}}}"


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


def _in_decimals(percent: re.Match[str]) -> str:
    whole, *parts = percent.groups()
    numerator, denominator = (int(part) for part in parts if part)
    return f"{int(whole or 0) + numerator / denominator:.12f}" if denominator else percent[0]
