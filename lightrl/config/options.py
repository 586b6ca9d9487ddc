"""How options are declared, checked, read from flags and YAML, and written down. What the options are is elsewhere."""

from __future__ import annotations

import ast
import copy
import dataclasses
import difflib
import functools
import inspect
import itertools
import math
import operator
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypedDict, TypeVar, get_args, get_origin, get_type_hints

import yaml

from lightrl.config.untrained_options import reason_against, reasons_against
from lightrl.config.yaml_text import parse_yaml, read_yaml

if TYPE_CHECKING:
    from typing_extensions import Unpack

T = TypeVar("T")
ConfigT = TypeVar("ConfigT")
Resume = Literal["fixed", "free"]

# ---- Declaring an option -----------------------------------------------------------------------------------------


class Range(TypedDict, total=False):
    """The range of a number, and how the error about a value outside it is worded."""

    at_least: float
    above: float
    at_most: float
    below: float
    finite: bool  # False accepts infinity and NaN, which every other option refuses
    wanted: str  # replaces "it must be ..." in the error


def option(default: T, *, resume: Resume = "fixed", **allowed: Unpack[Range]) -> T:
    """Declares an option by its default, its range, and whether a resumed run may change it.

    Args:
        resume: "free" lets a resumed run change the option, because no step's result depends on it.
        allowed: The range, by the names of Range.
    """
    if not allowed.keys() <= Range.__annotations__.keys():
        raise TypeError(f"option() takes {', '.join(Range.__annotations__)}, not {', '.join(allowed)}.")
    return dataclasses.field(default=default, metadata={"resume": resume, "allowed": allowed})


def section(kind: Callable[[], T], *, resume: Resume = "fixed") -> T:
    """Declares a group of options; resume="free" holds for all of them."""
    return dataclasses.field(default_factory=kind, metadata={"resume": resume})


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

    A text where several are expected becomes one of them. Then the `check` methods of the class and of all its bases
    run, so that a subclass adds checks and repeats none. A section that was left at its defaults needs no check.
    """
    for name, (item, hint) in own_fields(type(config)).items():
        value = getattr(config, name)
        is_section = dataclasses.is_dataclass(hint)
        if isinstance(value, str) and hint == tuple[str, ...]:
            value = (value,)
            setattr(config, name, value)
        if not is_section:
            _check_type(f"{prefix}{name}", hint, value)
            _check_range(f"{prefix}{name}", item, value)
        elif not isinstance(value, hint):
            raise TypeError(f"{prefix}{name} must be a {hint.__name__}, not {value!r}.")
        elif value != hint():
            check_options(value, f"{prefix}{name}.")
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
    if get_origin(hint) is Literal and value not in get_args(hint):
        raise ValueError(f"{name} is {value!r}: choose one of {', '.join(map(str, get_args(hint)))}.")
    if not isinstance(value, _ACCEPTED.get(hint, object)):
        raise TypeError(f"{name} must be {getattr(hint, '__name__', hint)}, not {value!r}.")
    wanted = get_args(hint)[0] if get_origin(hint) is tuple else hint
    for part in _parts(value):
        if not isinstance(part, _ACCEPTED.get(wanted, object)) or (isinstance(part, bool) and wanted in (int, float)):
            raise TypeError(f"{name} must be {wanted.__name__}, not {part!r}.")
        if isinstance(part, str) and _NO_TEXT.search(part):
            raise ValueError(f"--{name} is {part!r}: it holds a character that no UTF-8 text has. Leave it out.")


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


# ---- Reading flags and YAML --------------------------------------------------------------------------------------

_DEEPEST = 8  # sections in a section; a mapping that holds itself would be read forever


def parse_config(config_class: type[ConfigT], argv: Sequence[str] | None = None) -> ConfigT:
    """Reads flags and --config; any mistake is printed and ends the process with code 2, on every rank."""
    args = list(sys.argv[1:] if argv is None else argv)
    parse = _parse_and_print_help if {"-h", "--help"} & set(args) else _parse
    try:
        has_file = any(arg.partition("=")[0] == "--config" for arg in args)
        return parse(config_class, [*_yaml_flags(config_class, _config_path(args)), *args] if has_file else args)
    except (ValueError, OSError) as error:
        exit_with_user_error(error)
    except SystemExit as end:  # tyro has said what is wrong
        for reason in reasons_against(args, option_names(config_class)) if end.code else ():
            print_user_error(ValueError(reason))
        raise


def _parse(config_class: type[ConfigT], args: Sequence[str]) -> ConfigT:
    import tyro  # noqa: PLC0415  (only the command line needs it)

    return tyro.cli(config_class, args=args, config=(tyro.conf.FlagConversionOff,), use_underscores=True)


def _parse_and_print_help(config_class: type[ConfigT], args: Sequence[str]) -> ConfigT:
    _set_help(config_class)
    try:
        try:
            return _parse(config_class, args)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # whoever read the help has seen enough, as in `--help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0) from None


def exit_with_user_error(error: BaseException) -> NoReturn:
    """Prints the error without a traceback and ends the process with code 2."""
    print_user_error(error)
    raise SystemExit(2) from error


def print_user_error(error: BaseException) -> None:
    """Prints the error on every rank: torchrun stops the others as soon as the first one leaves."""
    rank = os.environ.get("RANK")
    where = f"[rank {rank}] " if rank and os.environ.get("WORLD_SIZE", "1") != "1" else ""
    sys.stderr.write(f"{where}error: {error}\n")
    sys.stderr.flush()


def _config_path(args: Sequence[str]) -> str:
    path = ""
    for arg, following in itertools.zip_longest(args, args[1:]):
        if arg == "--config" and following is not None:
            path = following
        elif arg.startswith("--config="):
            path = arg.removeprefix("--config=")
    return path


def _yaml_flags(config_class: type[Any], path: str) -> list[str]:
    """Returns a YAML file as flags, so that there is one parser and one set of errors; an empty path holds none."""
    if not path:
        return []
    types = option_types(config_class)
    flags: list[str] = []
    given: set[str] = set()
    for name, value in flatten(_read_yaml(path)):
        if name in given:
            raise ValueError(f"--config {path}: {name} is given twice, on its own and in a section. Keep one.")
        given.add(name)
        if name not in types:
            hint = reason_against(name, types) or nearest_name(name, set(types))
            raise ValueError(f"--config {path}: unknown option {name!r}. {hint}")
        if value is None and type(None) not in get_args(types[name]):
            raise ValueError(f"--config {path}: {name} has no value. Give one, or leave the line out.")
        if isinstance(value, list) and any(str(part).startswith("--") for part in value):
            raise ValueError(f"--config {path}: {name} is {value}: a value cannot begin with dashes.")
        if name == "config":
            continue  # the path that the run which saved this file was started with
        # Name and value are one word, so that a value may begin with dashes.
        flags += [f"--{name}", *map(str, value)] if isinstance(value, list) else [f"--{name}={value}"]
    return flags


def _read_yaml(path: str) -> Mapping[str, Any]:
    if not Path(path).is_file():
        raise FileNotFoundError(f"--config {path}: there is no such file.")
    content = read_yaml(Path(path), f"--config {path}") or {}
    if not isinstance(content, dict):
        raise ValueError(f"--config {path} must hold `option: value` lines, not a {type(content).__name__}.")
    return content


def flatten(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the options of a nested mapping by their full names."""
    for key, value in content.items():
        if isinstance(value, Mapping):
            if prefix.count(".") > _DEEPEST:
                raise ValueError(f"{prefix}{key} is nested too deeply: an option is named section.option.")
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _set_help(config_class: type[Any]) -> None:
    """Sets each option's help to the text under its field, as one paragraph.

    tyro reads those texts too, but keeps the line breaks of the source:
    https://github.com/brentyi/tyro/blob/1.0.17/src/tyro/_strings.py (remove_single_line_breaks ends a paragraph at each
    indented line).
    """
    texts: dict[str, str] = {}
    for kind in reversed(config_class.__mro__):
        texts |= _texts_under_fields(kind)
    for name, (item, hint) in own_fields(config_class).items():
        if name in texts:
            item.metadata = MappingProxyType({**item.metadata, "help": texts[name]})
        if dataclasses.is_dataclass(hint):
            _set_help(hint)  # type: ignore[arg-type]


def _texts_under_fields(kind: type[Any]) -> dict[str, str]:
    definition = _classes_of(kind.__module__).get(kind.__name__)
    return {
        field.target.id: " ".join(text.value.value.split())
        for field, text in itertools.pairwise(definition.body if definition else ())
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }


@functools.cache
def _classes_of(module: str) -> dict[str, ast.ClassDef]:
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (OSError, TypeError):  # built in, or typed at a prompt
        return {}
    return {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


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


def engine_arguments(config: Any) -> dict[str, Any]:
    """Returns --engine_args as a dict."""
    return named_values(config.engine_args, "engine_args")


def _yaml_value(text: str, label: str) -> Any:
    """Reads 3e-4 as a number too, which YAML 1.1 takes for a text because it has no point."""
    value = parse_yaml(text, label)
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def nearest_multiples(value: int, divisor: int, name: str) -> str:
    """Returns a hint with the two nearest valid values."""
    low = value // divisor * divisor
    options = [low, low + divisor] if low else [divisor]
    return f"Nearest valid {name}: {' or '.join(map(str, options))}."


def nearest_name(name: str, known: Sequence[str] | set[str]) -> str:
    """Returns a hint with the nearest known names, or with all of them."""
    close = difflib.get_close_matches(name, sorted(known), n=3, cutoff=0.5)
    return f"Did you mean {' or '.join(close)}?" if close else f"Known: {', '.join(sorted(known))}."
