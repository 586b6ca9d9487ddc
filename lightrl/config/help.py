"""The text of --help: short, about one topic, or whole. An option's text is the one under its field."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, get_args, get_origin

from lightrl.config.options import own_fields

_WIDEST = 110  # characters of a line; longer ones are hard to read
_COLUMN = 40  # where the text begins in the short help
_INDENT = "    "


class _Described(NamedTuple):
    flag: str  # without the dashes
    values: str
    text: str
    default: str

    @property
    def first_sentence(self) -> str:
        return re.split(r"(?<=\.) (?=[A-Z]|[\w:]+: )", self.text, maxsplit=1)[0]


def short_help(config_class: type[Any], program: str) -> str:
    """Returns the options without a section in a line each, and the sections."""
    lines = [_usage(config_class, program), "", "options, each with its default:"]
    lines += [
        _row(f"--{option.flag} {option.default}", option.first_sentence)
        for option in _described(config_class)
        if "." not in option.flag
    ]
    sections = [
        _row(f"--{name}.* ({sum(1 for _ in _described(kind))})", (inspect.getdoc(kind) or "").partition("\n")[0])
        for name, kind in _sections(config_class)
    ]
    lines += ["", "sections, each with the number of its options:", *sections] if sections else []
    lines += ["", _closing(program, has_sections=bool(sections))]
    return "\n".join(lines)


def whole_help(config_class: type[Any], program: str) -> str:
    """Returns every option with its whole text."""
    return "\n".join([_usage(config_class, program), "", *map(_in_full, _described(config_class))])


def help_on(config_class: type[Any], topic: str) -> str:
    """Returns the whole texts of a section, of an option, or of all options with the topic in name, text or values."""
    word = topic.lstrip("-").replace("-", "_").rstrip(".*")
    options = list(_described(config_class))
    found = [option for option in options if option.flag == word or option.flag.startswith(f"{word}.")]
    found = found or [option for option in options if word and word in option.flag]
    begins = re.compile(rf"\b{re.escape(word)}", re.IGNORECASE)
    found = found or [option for option in options if word and begins.search(f"{option.values} {option.text}")]
    if not found:
        sections = ", ".join(name for name, _ in _sections(config_class))
        raise ValueError(f"--help {topic}: no section or option has this in its name or text. Sections: {sections}.")
    return "\n".join(map(_in_full, found))


def _usage(config_class: type[Any], program: str) -> str:
    return f"usage: {program} [OPTIONS]\n\n{inspect.getdoc(config_class)}"


def _closing(program: str, *, has_sections: bool) -> str:
    of_sections = "SECTION explains the options of a section, --help "
    explained = f"{of_sections}WORD those" if has_sections else "WORD explains the options"
    return (
        f"{program} --help {explained} that name WORD, and\n"
        "--help-all every option. --config FILE reads options from YAML; a flag overrides the file."
    )


def _sections(config_class: type[Any]) -> Iterator[tuple[str, type[Any]]]:
    for name, (_, hint) in own_fields(config_class).items():
        if dataclasses.is_dataclass(hint):
            yield name, hint  # type: ignore[misc]  # a class, as the hint of a field is


def _described(config_class: type[Any], prefix: str = "") -> Iterator[_Described]:
    """Yields the options of a config in the order of its fields, those of a section after those without one."""
    texts: dict[str, str] = {}
    for kind in reversed(config_class.__mro__):
        texts |= _texts_under_fields(kind)
    for name, (item, hint) in own_fields(config_class).items():
        if not dataclasses.is_dataclass(hint):
            flag = f"{prefix}{name}".rstrip("_")  # `from_` is --rollout.from
            yield _Described(flag, _values(hint), texts.get(name, ""), _written(item.default))
    for name, kind in _sections(config_class):
        yield from _described(kind, f"{prefix}{name}.")


def _values(hint: Any) -> str:
    """Describes the values that an option of the type accepts."""
    if get_origin(hint) is Literal:
        return "{" + ",".join(map(str, get_args(hint))) + "}"
    if get_origin(hint) is tuple:
        several = [_values(part) for part in get_args(hint) if part is not Ellipsis]
        return f"[{several[0]} ...]" if Ellipsis in get_args(hint) else " ".join(several)
    if get_args(hint):
        return "|".join(_values(part) for part in get_args(hint))
    return {bool: "{True,False}", type(None): "None"}.get(hint) or str(hint.__name__).upper()


def _written(default: Any) -> str:
    if isinstance(default, tuple):
        return " ".join(map(str, default)) or "none"
    return repr(default) if default == "" else str(default)


def _row(start: str, text: str) -> str:
    """Returns a line in two columns, the second cut at the width of the terminal."""
    first = f"  {start}".ljust(_COLUMN - 2) + "  "
    return first + textwrap.shorten(text, max(30, _width() - len(first)), placeholder=" ...")


def _in_full(option: _Described) -> str:
    text = textwrap.wrap(f"{option.text} (default: {option.default})", _width() - len(_INDENT))
    return "\n".join([f"--{option.flag} {option.values}", *(f"{_INDENT}{line}" for line in text)])


def _width() -> int:
    return min(_WIDEST, shutil.get_terminal_size((_WIDEST, 24)).columns)


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
