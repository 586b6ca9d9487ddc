"""Says what an equation answers: `x = 5` and `AB = 5` are 5, but `2x = 5` is not, for which math-verify takes it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

_EQUALS = re.compile(r"(?<![<>!\\:])=")
_WORDS = r"\\(?:text|operatorname) *\{[^{}]*\}"
_INDEX = r"(?: *_ *(?:\w|\{[^{}]*\})|'|\^ *(?:\\prime|\{ *\\prime *\}|\\circ|\*))*"
_OF_VALUES = r"sqrt|[dt]?frac|[dt]?binom|(?:arc)?(?:sin|cos|tan|sec|csc|cot)h?|log|ln|lg|exp|sum|prod|int|infty"
_ACCENTS = r"(?:hat|bar|vec|tilde|overline|mathbf)"
_LETTER = (
    r"(?:(?<![A-Za-z\\])[A-Za-z](?![A-Za-z])"
    rf"|\\{_ACCENTS} *(?:\{{ *[A-Za-z]+ *\}}|[A-Za-z](?![A-Za-z]))"
    rf"|\\(?!(?:{_OF_VALUES})(?![A-Za-z]))[A-Za-z]+|{_WORDS})"
)
_POINTS = r"(?:m *)?(?:\\(?:angle|triangle|overline|vec|widehat) *)?\{? *[A-Z]{1,5}(?![A-Za-z]) *\}?"
_SPELT = r"(?:[A-Z][a-z]{2,}|[a-z]{4,})(?: [A-Za-z]+)*|sum|max|min|age"
_OF_DEGREES = r"\\(?:sin|cos|tan) *[({]? *\d+ *\^ *(?:\\circ|\{ *\\circ *\}) *[)}]?"  # math-verify reads radians
_LONGEST = 100  # characters of a name
_ARGUMENTS = r"(?: *\^ *\{ *-1 *\})?(?: *\([^()=]*\))"
_TUPLE = r"\( *[A-Za-z](?: *, *[A-Za-z])+ *\)|[A-Z](?: *: *[A-Z])+"
_NAME = re.compile(
    rf"(?:{_WORDS}|\\Delta(?![A-Za-z])|~|\\[ ,;:!]|\s)*"
    rf"(?:(?:{_LETTER}|{_POINTS}){_INDEX}(?:{_ARGUMENTS})?|[\[|]{_POINTS}[\]|]|{_SPELT}|{_TUPLE}|{_OF_DEGREES})?\s*"
)


def names_its_value(text: str, is_equal: Callable[[str, str], bool]) -> bool:
    """Returns whether each equation in an answer says what a name stands for, or what numbers amount to.

    Args:
        text: in LaTeX, without marks
        is_equal: says whether two sides have the same value
    """
    for clause in _clauses(text):
        *names, value = _sides(clause)
        if not all(is_name(name) or is_equal(name, value) for name in names):
            return False
    return True


def turned(text: str) -> str:
    """Returns an equation with the name on its left side: `5 = x` as `x=5`, and any other text as it is."""
    sides = _sides(text)
    if len(sides) != 2 or is_name(sides[0]) or not is_name(sides[1]):
        return text
    return f"{sides[1]}={sides[0]}"


def is_name(text: str) -> bool:
    """Returns whether a text is what an equation may define, such as `x_1`, `f(3)` or `AB`."""
    plain = " ".join(text.split())
    return 0 < len(plain) <= _LONGEST and bool(_NAME.fullmatch(plain))


def are_unsolved(one: Any, other: Any) -> bool:
    """Returns whether two parsed equations differ, and math-verify takes them for equal since both have no solution."""
    import sympy  # noqa: PLC0415  (optional)

    if not (isinstance(one, sympy.Eq) and isinstance(other, sympy.Eq)):
        return False
    if not all(isinstance(side, sympy.Expr) for side in (*one.args, *other.args)):  # such as the set of x = +-6
        return False
    ratio = sympy.simplify((one.lhs - one.rhs) / (other.lhs - other.rhs))
    return bool(ratio.free_symbols) and not sympy.solve(one)


def _clauses(text: str) -> Iterator[str]:
    """Yields what stands between commas and semicolons that no bracket encloses."""
    plain = re.sub(r"\\[{}]", " ", text)
    depth = start = 0
    for index, character in enumerate(plain):
        depth += (character in "([{") - (character in ")]}")
        if character in ",;" and depth <= 0 and plain[index - 1 : index] != "\\":
            yield plain[start:index]
            start = index + 1
    yield plain[start:]


def _sides(clause: str) -> list[str]:
    r"""Returns the parts between equals signs outside of braces, as in `\sum_{k=1}^n k = 3`."""
    sides, depth, start = [], 0, 0
    signs = {found.start() for found in _EQUALS.finditer(clause)}
    for index, character in enumerate(clause):
        depth += (character == "{") - (character == "}")
        if index in signs and depth <= 0:
            sides.append(clause[start:index])
            start = index + 1
    return [*sides, clause[start:]]
