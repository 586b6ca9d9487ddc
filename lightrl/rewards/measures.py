"""Splits measures such as `18 cm^2` and `18 dollars` into number and unit, where math-verify reads a product."""

from __future__ import annotations

import re

_NUMBER = r"[-+]?(?:\d+/\d+|\d[\d,]*(?:\.\d+)?|\.\d+|\\[dt]?frac\{\d+\}\{\d+\})"
_LENGTH = r"[cdkm]m|in|ft|yd|mi|inch(?:es)?|feet|foot|yards?|miles?|(?:centi|kilo|milli)?met(?:er|re)s?|units?"
_POWER = r" (?:squared|cubed)| ?\^ ?(?:[23]|\{[23]\})|[\u00b2\u00b3]"
_UNIT = (
    rf"(?:(?:square|cubic) )?(?:{_LENGTH})(?:{_POWER})?|dollars?|cents?|euros?|pounds?|rupees?|USD|EUR|GBP"
    r"|(?:kilo|milli)?grams?|[km]g|ounces?|oz|lbs?|tons?|(?:milli)?lit(?:er|re)s?|m[lL]|gallons?"
    r"|seconds?|sec|minutes?|min|hours?|hrs?|h|days?|weeks?|months?|years?|degrees?|mph"
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
_MEASURE = re.compile(rf"(?<![\w.,/}}^])({_NUMBER})(?: |~|\\ )*({_UNIT})(?![\w^])")
_PRODUCT = re.compile(rf"({_NUMBER})([A-Za-z]{{1,2}})")
_LETTERS = {"m": "meter", "g": "gram", "s": "second"}  # units that are read behind a number as variables
_BOX = re.compile(rf"(?<=\\boxed\{{) *{_MEASURE.pattern}\.? *(?=\}})")


def split_measure(text: str) -> tuple[str, str]:
    """Returns the number and the unit of a text that is nothing else; the text and no unit for any other."""
    measure = _MEASURE.fullmatch(text.strip().rstrip("."))
    return (measure[1], measure[2]) if measure else (text, "")


def split_letter(text: str) -> tuple[str, str]:
    """Returns the number and the letters of a text such as `2t`, a variable or a unit; else the text and no letters."""
    product = _PRODUCT.fullmatch(text.strip().rstrip("."))
    return (product[1], product[2]) if product else (text, "")


def has_other_unit(text: str, number: str, unit: str) -> bool:
    """Returns whether a text gives the number another unit than this one, and nowhere this one; not if it is empty."""
    units = {_canonical(found[2]) for found in _MEASURE.finditer(text) if found[1] == number}
    return bool(units and unit) and _canonical(unit) not in units


def _canonical(unit: str) -> tuple[str, str]:
    """Returns the name of a unit and its power, the same for all spellings of it."""
    power = "3" if re.search(r"cubic|cubed|3|\u00b3", unit) else "2" if re.search(r"square|2|\u00b2", unit) else ""
    name = _LETTERS.get(unit) or re.sub(rf"square |cubic |{_POWER}", "", unit)
    name = name.removesuffix("s").replace("metre", "meter").replace("litre", "liter")
    return _LONG_NAMES.get(name, name), power


def without_unit(text: str) -> str:
    """Returns a text without the units of measures that fill a box."""
    return _BOX.sub(r"\1", text)
