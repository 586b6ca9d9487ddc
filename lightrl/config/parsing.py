"""Reads a config from flags and YAML, and writes it down again."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_args, get_type_hints

import yaml

from lightrl.config.runs import RunConfig
from lightrl.config.values import nearest_name

ConfigT = TypeVar("ConfigT", bound=RunConfig)


def parse_config(config_class: type[ConfigT], argv: Sequence[str] | None = None) -> ConfigT:
    """Reads flags and --config; any mistake is printed and ends the process with code 2, on every rank."""
    import tyro  # noqa: PLC0415  (kept off the import path of those who build a config in Python)

    args = list(sys.argv[1:] if argv is None else argv)
    try:
        written = _yaml_flags(config_class, _config_path(args))
        return tyro.cli(config_class, args=written + args, config=(tyro.conf.FlagConversionOff,), use_underscores=True)
    except (ValueError, OSError) as error:
        exit_with_user_error(error)


def exit_with_user_error(error: BaseException) -> NoReturn:
    tell_user_error(error)
    raise SystemExit(2) from error


def tell_user_error(error: BaseException) -> None:
    """Every rank says it, since torchrun stops the others as soon as the first one leaves."""
    rank = os.environ.get("RANK")
    where = f"[rank {rank}] " if rank and os.environ.get("WORLD_SIZE", "1") != "1" else ""
    sys.stderr.write(f"{where}error: {error}\n")
    sys.stderr.flush()


def _config_path(args: Sequence[str]) -> str:
    path = ""
    for place, arg in enumerate(args):
        if arg == "--config" and place + 1 < len(args):
            path = args[place + 1]
        elif arg.startswith("--config="):
            path = arg.removeprefix("--config=")
    return path


def _yaml_flags(config_class: type[Any], path: str) -> list[str]:
    """A YAML file is flags written down, so there is one parser and one set of errors."""
    if not path:
        return []
    if not Path(path).is_file():
        raise FileNotFoundError(f"--config {path}: there is no such file.")
    try:
        content = yaml.safe_load(Path(path).read_text()) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"--config {path} is not valid YAML: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"--config {path} must hold `option: value` lines, not a {type(content).__name__}.")
    known = dict(_options(config_class))
    flags: list[str] = []
    for name, value in _flatten(content):
        if name not in known:
            raise ValueError(f"--config {path}: unknown option {name!r}. {nearest_name(name, set(known))}")
        if value is None and type(None) not in get_args(known[name]):
            raise ValueError(f"--config {path}: {name} has no value. Give one, or leave the line out.")
        if name == "config":
            continue  # the path that this very run was started with
        # In one word, so that a value may begin with dashes.
        flags += [f"--{name}", *map(str, value)] if isinstance(value, list) else [f"--{name}={value}"]
    return flags


def _flatten(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def option_names(config_class: type[Any]) -> Iterator[str]:
    """Yields every option as a flag spells it, without the dashes."""
    return (name for name, _ in _options(config_class))


def _options(config_class: type[Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the name and the type of every option."""
    hints = get_type_hints(config_class)
    for field in dataclasses.fields(config_class):
        if dataclasses.is_dataclass(hints[field.name]):
            yield from _options(hints[field.name], f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", hints[field.name]


def as_dict(config: Any) -> dict[str, Any]:
    """Plain values only, for YAML and JSON."""
    plain: dict[str, Any] = yaml.safe_load(
        yaml.safe_dump(dataclasses.asdict(config, dict_factory=_plain), sort_keys=False)
    )
    return plain


def _plain(items: list[tuple[str, Any]]) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in items}


def to_yaml(config: Any) -> str:
    return yaml.safe_dump(as_dict(config), sort_keys=False)
