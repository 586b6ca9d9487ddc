"""How options are declared, checked and written down. What the options are is elsewhere."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import functools
import itertools
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, get_args, get_origin, get_type_hints

import yaml

from lightrl.config.yaml_text import parse_yaml

if TYPE_CHECKING:
    from typing_extensions import Unpack

T = TypeVar("T")
ConfigT = TypeVar("ConfigT")
Resume = Literal["fixed", "free"]
Check = Callable[[Any], object]  # of a config; raises ValueError

_DECLARED: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "bool": (bool,)}

# ---- Declaring an option -----------------------------------------------------------------------------------------


class Range(TypedDict, total=False):
    """The range of a number, and how the error about a value outside it is worded."""

    at_least: float
    above: float
    at_most: float
    below: float
    finite: bool  # False accepts infinity and NaN, which every other option refuses
    wanted: str  # replaces "it must be ..." in the error


def option(default: T, *, resume: Resume = "fixed", check: Check | None = None, **allowed: Unpack[Range]) -> T:
    """Declares an option by its default, its range, and whether a resumed run may change it.

    Args:
        resume: "free" lets a resumed run change the option, because no step's result depends on it.
        check: Takes the config and raises ValueError if the option does not go with the others. It is called only
            where the option is not at its default.
        allowed: The range, by the names of Range.
    """
    return dataclasses.field(default=default, metadata={"resume": resume, "check": check, "allowed": allowed})


def check_needed(name: str, switch: str, config: Any) -> None:
    """Raises ValueError if the switch, another option of the section, is off, so that this one does nothing."""
    if not getattr(config, switch.rpartition(".")[2]):
        raise ValueError(f"--{name} does nothing without --{switch}: give both or neither.")


def refuse_beside(name: str, reasons: Iterable[tuple[str, bool, str]]) -> None:
    """Raises ValueError if an option does not go with another one.

    reasons: the other option, whether the run has both, and why it cannot.
    """
    for other, is_refused, reason in reasons:
        if is_refused:
            raise ValueError(f"--{name} does not go with --{other}: {reason}. Leave one of them out.")


def section(kind: Callable[[], T], *, resume: Resume = "fixed", check: Check | None = None) -> T:
    """Declares a group of options; resume="free" holds for all of them, and check is called if one was given."""
    return dataclasses.field(default_factory=kind, metadata={"resume": resume, "check": check})


def constant(make: Callable[[], T]) -> T:
    """Declares an attribute that a config has and nobody can set: no argument, no flag, no YAML key."""
    return dataclasses.field(default_factory=make, init=False, repr=False)


def without(*sections: type[Any]) -> Callable[[type[T]], type[T]]:
    """Decorates a kind of run that has no use for some sections: their options keep their defaults.

    A strategy reads the attributes of every kind of run; they are no arguments, flags or YAML keys of this one. The
    decorator stands below @dataclass.
    """

    def keep_defaults(kind: type[T]) -> type[T]:
        for name, (item, hint) in itertools.chain.from_iterable(own_fields(section).items() for section in sections):
            is_section = dataclasses.is_dataclass(hint)
            kind.__annotations__[name] = hint
            setattr(kind, name, constant(hint if is_section else functools.partial(copy.copy, item.default)))
        return kind

    return keep_defaults


def own_fields(config_class: type[Any]) -> dict[str, tuple[dataclasses.Field[Any], Any]]:
    """Returns the options and sections of a config class: field and type by name."""
    hints = get_type_hints(config_class)
    return {item.name: (item, hints[item.name]) for item in dataclasses.fields(config_class) if item.init}


def option_types(config_class: type[Any], prefix: str = "") -> dict[str, Any]:
    """Returns the type of every option by its full name, as a flag spells it without the dashes."""
    types: dict[str, Any] = {}
    for name, (_, hint) in own_fields(config_class).items():
        is_section = dataclasses.is_dataclass(hint)
        types |= option_types(hint, f"{prefix}{name}.") if is_section else {f"{prefix}{name}": hint}
    return types


def option_names(config_class: type[Any]) -> list[str]:
    """Returns the full name of every option, as a flag spells it without the dashes."""
    return list(option_types(config_class))


# ---- Checking ----------------------------------------------------------------------------------------------------


def check_options(config: Any, prefix: str = "") -> None:
    """Raises TypeError or ValueError for a value of the wrong type or out of range, here or in a section.

    A text where several are expected becomes one of them. Then the checks of the options that are not at their defaults
    run, and the `check` methods of the class and of all its bases, so that a subclass adds checks and repeats none. A
    section that was left at its defaults needs no check.
    """
    checks: list[Check | None] = []
    for name, (item, hint) in own_fields(type(config)).items():
        value, is_section = getattr(config, name), dataclasses.is_dataclass(hint)
        default = hint() if is_section else item.default
        if isinstance(value, str) and hint == tuple[str, ...]:
            value = (value,)
            setattr(config, name, value)
        if not is_section:
            _check_type(f"{prefix}{name}", hint, value)
            _check_range(f"{prefix}{name}", item, value)
        elif not isinstance(value, hint):
            raise TypeError(f"{prefix}{name} must be a {hint.__name__}, not {value!r}.")
        elif value != default:
            check_options(value, f"{prefix}{name}.")
        if value != default:
            checks.append(item.metadata.get("check"))
    for check in filter(None, checks):
        check(config)
    for kind in reversed(type(config).__mro__):
        if "check" in vars(kind):
            vars(kind)["check"](config)


def check_values(config: Any, prefix: str = "") -> None:
    """Raises ValueError for a wrong choice or a number out of range, and lets every type pass.

    It is for options that came from another trainer, whose types may differ.
    """
    for name, (item, hint) in own_fields(type(config)).items():
        value = getattr(config, name)
        if dataclasses.is_dataclass(hint):
            check_values(value, f"{prefix}{name}.")
        elif get_origin(hint) is Literal:
            _check_type(f"{prefix}{name}", hint, value)
        elif isinstance(value, int | float):
            _check_range(f"{prefix}{name}", item, value)


_LIMITS = {"at_least": operator.ge, "above": operator.gt, "at_most": operator.le, "below": operator.lt}
_ACCEPTED: dict[Any, Any] = {bool: bool, int: int, float: int | float, float | None: int | float | None, str: str}
_ACCEPTED |= {tuple[str, ...]: tuple | list, tuple[float, float]: tuple | list}
_NO_TEXT = re.compile("[\x00\ud800-\udfff]")  # NUL, and bytes of the command line that were no UTF-8


def _check_type(name: str, hint: Any, value: object) -> None:
    if get_origin(hint) is Literal and not any(value == one and type(value) is type(one) for one in get_args(hint)):
        raise ValueError(f"{name} is {value!r}: choose one of {', '.join(map(str, get_args(hint)))}.")
    if not isinstance(value, _ACCEPTED.get(hint, object)):
        raise TypeError(f"{name} must be {getattr(hint, '__name__', hint)}, not {value!r}.")
    wanted = get_args(hint)[0] if get_origin(hint) is tuple else hint
    for part in _parts(value):
        if not isinstance(part, _ACCEPTED.get(wanted, object)) or (isinstance(part, bool) and wanted in (int, float)):
            raise TypeError(f"{name} must be {wanted.__name__}, not {part!r}.")
        if isinstance(part, str) and _NO_TEXT.search(part):
            raise ValueError(f"--{name} is {part!r}: it has a NUL or a byte that is not UTF-8. Remove it.")


def _check_range(name: str, item: dataclasses.Field[Any], value: Any) -> None:
    allowed = item.metadata.get("allowed", {})
    for part in _parts(value):
        if isinstance(part, int | float) and not _is_inside(part, allowed):
            raise _outside(name, value, allowed)


def _parts(value: Any) -> Sequence[Any]:
    return value if isinstance(value, tuple | list) else (value,)


def _is_inside(number: float, allowed: Mapping[str, Any]) -> bool:
    is_number = -(2**63) <= number < 2**63 if isinstance(number, int) else math.isfinite(number)
    limits = (fits(number, allowed[limit]) for limit, fits in _LIMITS.items() if limit in allowed)
    return (is_number or not allowed.get("finite", True)) and all(limits)


def _outside(name: str, value: Any, allowed: Mapping[str, Any]) -> ValueError:
    is_open = not {"at_most", "below"} & allowed.keys()
    if is_open and not all(_is_inside(part, {}) for part in _parts(value)):
        wanted = "it must fit in 64 bits" if isinstance(value, int) else "it must be a finite number"
    else:
        wanted = allowed.get("wanted") or _range_in_words(allowed)
    return ValueError(f"--{name} is {value}: {wanted}.")


def _range_in_words(allowed: Mapping[str, Any]) -> str:
    limits = {limit: allowed[limit] for limit in _LIMITS if limit in allowed}
    if {"at_least", "at_most"} == set(limits):
        return f"it must be between {limits['at_least']} and {limits['at_most']}"
    if limits == {"at_least": 0}:
        return "it must be 0 or above"
    return "it must be " + " and ".join(f"{limit.replace('_', ' ')} {bound}" for limit, bound in limits.items())


# ---- Writing down ------------------------------------------------------------------------------------------------


def as_dict(config: Any) -> dict[str, Any]:
    """Returns the options as plain values, for YAML and JSON."""
    return {name: _plain(getattr(config, name)) for name in own_fields(type(config))}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return as_dict(value)
    return list(value) if isinstance(value, tuple) else value


def to_yaml(config: Any) -> str:
    """Returns the options as a YAML file that --config reads."""
    return yaml.safe_dump(as_dict(config), sort_keys=False)


def changed_options(config: Any, saved: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any, Any]]:
    """Compares a config with that of the run to be resumed, for options that must stay the same.

    Args:
        saved: The content of the run's config.yaml. An option that did not exist then had its default.

    Returns:
        Full name, saved value and value now of each option that differs, sorted by name.
    """
    known, defaults = own_fields(type(config)), type(config)()
    changed: list[tuple[str, Any, Any]] = []
    for name in sorted({*known, *saved}):
        if name not in known:
            changed.append((f"{prefix}{name}", saved[name], None))
            continue
        if known[name][0].metadata.get("resume") == "free":
            continue
        now, before = getattr(config, name), saved.get(name, _plain(getattr(defaults, name)))
        if dataclasses.is_dataclass(now) and isinstance(before, Mapping):
            changed += changed_options(now, before, f"{prefix}{name}.")
        elif before != _plain(now):
            changed.append((f"{prefix}{name}", before, _plain(now)))
    return changed


# ---- Values and hints --------------------------------------------------------------------------------------------


def named_values(items: Sequence[str], name: str) -> dict[str, Any]:
    """Parses the name=value texts of an option; values are read as YAML, so that 4, 0.5, 3e-4, true and [a, b] work."""
    values: dict[str, Any] = {}
    for item in items:
        key, separator, value = item.partition("=")
        if not separator or not key.isidentifier():
            raise ValueError(f"--{name} {item!r}: it must be name=value, without spaces around the sign.")
        if key in values:
            raise ValueError(f"--{name}: {key} is given twice.")
        values[key] = _yaml_value(value, f"--{name} {item[:60]!r}")
    return values


def declared_type(annotation: Any) -> str:
    """Returns the name of an annotation, which may be a text, of a parameter of a user's; empty if it has none."""
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")


def fits(declared: str, value: Any) -> bool:
    """Returns whether a value may be given to a parameter declared as int, float or bool; any other takes all."""
    wanted = _DECLARED.get(declared)
    return wanted is None or (isinstance(value, wanted) and (declared == "bool" or not isinstance(value, bool)))


def engine_arguments(config: Any) -> dict[str, Any]:
    """Returns --engine_args as a dict."""
    return named_values(config.engine_args, "engine_args")


def _yaml_value(text: str, label: str) -> Any:
    """Reads 3e-4 as a number too, which YAML 1.1 takes for a text because it has no point; '5' in quotes is a text."""
    value = parse_yaml(text, label)
    if isinstance(value, str) and not text.lstrip().startswith(("'", '"')):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def nearest_name(name: str, known: Sequence[str] | set[str]) -> str:
    """Returns a hint with the nearest known names, or with all of them."""
    close = difflib.get_close_matches(name, sorted(known), n=3, cutoff=0.5)
    return f"Did you mean {' or '.join(close)}?" if close else f"Known: {', '.join(sorted(known))}."
