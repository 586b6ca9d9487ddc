"""Splits measures such as `18 cm^2` and `18 dollars` into number and unit, where math-verify reads a product."""

from __future__ import annotations

import re

from lightrl.rewards.answer_part import answer_part, behind_thoughts

_NUMBER = r"[-+]?(?:\d+/\d+|\d[\d,]*(?:\.\d+)?|\.\d+|\\[dt]?frac\{\d+\}\{\d+\})"
_LENGTH = r"[cdkm]m|in|ft|yd|mi|inch(?:es)?|feet|foot|yards?|miles?|(?:centi|kilo|milli)?met(?:er|re)s?|units?"
_POWER = r" (?:squared|cubed)| ?\^ ?(?:[23]|\{[23]\})|[\u00b2\u00b3]"
_UNIT = (
    rf"(?:(?:square|cubic|sq\.?|cu\.?) )?(?:{_LENGTH})(?:{_POWER})?|dollars?|cents?|euros?|pounds?|rupees?|USD|EUR|GBP"
    r"|(?:kilo|milli)?grams?|[km]g|ounces?|oz|lbs?|tons?|(?:milli)?lit(?:er|re)s?|m[lL]|gallons?"
    r"|seconds?|sec|minutes?|min|hours?|hrs?|h|days?|weeks?|months?|years?|degrees?|radians?|mph"
)
_LONG_NAMES = {
    **{
        f"{short}m": f"{prefix}meter"
        for short, prefix in (("c", "centi"), ("d", "deci"), ("k", "kilo"), ("m", "milli"))
    },
    **{"ft": "foot", "feet": "foot", "in": "inch", "inche": "inch", "yd": "yard", "mi": "mile"},
    **{"kg": "kilogram", "mg": "milligram", "lb": "pound", "oz": "ounce", "mL": "milliliter", "ml": "milliliter"},
    **{"sec": "second", "min": "minute", "hr": "hour", "h": "hour", "USD": "dollar", "EUR": "euro", "GBP": "pound"},
}
# A letter is a unit only after a space, and meters per second are neither meters nor seconds.
_MEASURE = re.compile(
    rf"(?<![\w.,/}}^])({_NUMBER})(?:(?: |~|\\ )*({_UNIT})|(?: |~|\\ )+(m(?:{_POWER})?|[gs]))(?![\w^/]| per\b)"
)
_UNIT_AT_END = re.compile(rf"(?:\\[a-z]+|(?<![A-Za-z])[A-Za-z]|[\d)}}\]]) ({_UNIT}|m(?:{_POWER})?|[gs])$")
_PRODUCT = re.compile(rf"({_NUMBER})([A-Za-z]{{1,2}})")
_LETTERS = {"m": "meter", "g": "gram", "s": "second"}  # units that are read as variables after a number
_BASE = re.compile(r"(?<![\w^{.,])[\d.,]+\)? *_ *(?:(\d+)|\{(\d+)\})(?=[.\s]*$)")
_IN_TEXT = re.compile(r"\\(?:text(?:rm|normal)?|mathrm|mbox|operatorname) *\{([^{}]*)\}")
_SPACES = re.compile(r"(?:[ \t~]|\\[,;:! ]|\\q?quad(?![A-Za-z]))+")
_DEGREES = re.compile(r"\^ *(?:\\circ|\{ *\\circ *\})|\u00b0")
_BOX = re.compile(rf"(?<=\\boxed\{{) *{_MEASURE.pattern}\.? *(?=\}})")


def split_measure(text: str) -> tuple[str, str]:
    """Returns the number and the unit of a text that is nothing else; the text and no unit for any other."""
    measure = _MEASURE.fullmatch(_undressed(text).rstrip("."))
    return (measure[1], measure[2] or measure[3]) if measure else (text, "")


def unit_of(text: str) -> str:
    """Returns the unit at the end of an expression; empty if there is none."""
    at_end = _UNIT_AT_END.search(_undressed(text).rstrip("."))
    return split_measure(text)[1] or (at_end[1] if at_end else "")


def split_letter(text: str) -> tuple[str, str]:
    """Returns the number and the letters of a text such as `2t`, a variable or a unit; else the text and no letters."""
    product = _PRODUCT.fullmatch(text.strip().rstrip("."))
    return (product[1], product[2]) if product else (text, "")


def has_other_unit(text: str, number: str, unit: str) -> bool:
    """Returns whether a text gives the number another unit than this one, and nowhere this one; not if it is empty.

    If the text boxes or tags something with a unit, that one counts, whatever its number is.
    """
    if not unit:
        return False
    part = behind_thoughts(text)
    if boxed := unit_of(answer_part(part) or ""):
        return _canonical(boxed) != _canonical(unit)
    units = {_canonical(found[2] or found[3]) for found in _MEASURE.finditer(_undressed(part)) if found[1] == number}
    return bool(units) and _canonical(unit) not in units


def has_other_base(text: str, answer: str) -> bool:
    """Returns whether the last number of a text that states its base has another one than an answer that does."""
    part = behind_thoughts(text)
    given, expected = (_BASE.search(_undressed(found)) for found in (answer_part(part) or part, answer))
    if given is None or expected is None:
        return False
    return (given[1] or given[2]) != (expected[1] or expected[2])


def _undressed(text: str) -> str:
    r"""Returns a text with the units in it as they are written without LaTeX: 5\text{ m} as 5 meter."""
    text = _IN_TEXT.sub(lambda found: f" {_LETTERS.get(found[1].strip(), found[1].strip())}", text)
    return _SPACES.sub(" ", _DEGREES.sub(" degrees", text.replace("$", ""))).strip()


def _canonical(unit: str) -> tuple[str, str]:
    """Returns the name of a unit and its power, the same for all spellings of it."""
    power = "3" if re.search(r"cu\b|cub|3|\u00b3", unit) else "2" if re.search(r"sq|2|\u00b2", unit) else ""
    name = re.sub(rf"(?:square|cubic|sq\.?|cu\.?) |{_POWER}", "", unit)
    name = _LETTERS.get(name, name).removesuffix("s").replace("metre", "meter").replace("litre", "liter")
    return _LONG_NAMES.get(name, name), power


def without_unit(text: str) -> str:
    """Returns a text without the units of measures that fill a box."""
    return _BOX.sub(r"\1", text)
