"""Reads the options of a run from flags and YAML, and reports a mistake in them."""

from __future__ import annotations

import difflib
import itertools
import keyword
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_args, get_origin

from lightrl.config.evaluate import EvaluateConfig, left_out
from lightrl.config.help import help_on, short_help, whole_help
from lightrl.config.options import nearest_name, option_types
from lightrl.config.paths import why_unreadable
from lightrl.config.peer_names import own_names, reason_against
from lightrl.config.runs import DPOConfig, GRPOConfig, PPOConfig, RMConfig, SFTConfig
from lightrl.config.yaml_text import read_yaml
from lightrl.last_error import leave_error, print_last_word

ConfigT = TypeVar("ConfigT")

_HELP_ALL = {"--help-all", "--help_all"}
_HELP = {"-h", "--help"} | _HELP_ALL
_LIKE_A_FLAG = re.compile(r"--|-[^\W\d_]")  # but not -1 or "- item"
_MOST_NOTED = 8  # options of a file that an evaluation leaves out
_LONG = 300  # characters of a hint: the names of all options are more than anybody reads
_DEEPEST = 8  # sections in a section; a mapping that holds itself would be read forever


def parse_config(config_class: type[ConfigT], argv: Sequence[str] | None = None, program: str = "") -> ConfigT:
    """Reads flags and --config; any mistake is printed and ends the process with code 2, on every rank.

    Args:
        argv: The arguments; None means those of the process.
        program: What the user typed in front of them, for the help.
    """
    args = [_own_name(arg) for arg in (sys.argv[1:] if argv is None else argv)]
    program = program or sys.argv[0]
    try:
        if _HELP & set(args):
            _print_help(config_class, args, program)
        flags = [arg.partition("=")[0].replace("-", "_") for arg in args if arg.startswith("--")]
        if len(set(flags)) < len(flags):
            _warn_of_repeated_lists(config_class, flags)
        words = [*_yaml_flags(config_class, _config_path(args), flags), *args] if "__config" in flags else args
        import tyro  # noqa: PLC0415  (only the command line needs it)

        # The help is in docstrings: looking for comments too would read the sources again at every start.
        plain = (tyro.conf.FlagConversionOff, tyro.conf.HelptextFromCommentsOff)
        return tyro.cli(config_class, prog=program, args=words, config=plain, use_underscores=True)
    except (ValueError, OSError) as error:
        exit_with_user_error(error)
    except SystemExit as end:  # tyro has said what is wrong
        if end.code:
            _say_more(args, option_types(config_class))
        raise


def _say_more(args: Sequence[str], types: Mapping[str, Any]) -> None:
    """Says why training has no option of a name, or how it is called here, and which option is given too many values.

    types: of the options, by name.
    """
    leave_error("The options are wrong: the first lines of the output say which, and what is allowed.")
    flags = [arg.partition("=")[0].removeprefix("--").replace("-", "_") for arg in args if arg.startswith("--")]
    unknown = [flag for flag in flags if flag not in types]
    elsewhere = [reason for flag in unknown if (reason := _trainers_with(flag)) and not own_names([f"--{flag}"], types)]
    untrained = [reason for flag in unknown if (reason := reason_against(flag, types))]
    reasons = [*untrained, *own_names(args, types), *elsewhere, *_too_many_values(args, types)]
    for reason in reasons:
        print_user_error(ValueError(reason))


def _too_many_values(args: Sequence[str], types: Mapping[str, Any]) -> Iterator[str]:
    for index, arg in enumerate(args):
        flag, equals, value = arg.partition("=")
        name, behind = flag.removeprefix("--").replace("-", "_"), args[index + 1 :]
        words = [*([value] if equals else []), *itertools.takewhile(lambda word: not _LIKE_A_FLAG.match(word), behind)]
        hint = types.get(name) if arg.startswith("--") else None
        if len(words) > 1 and hint is not None and not _takes_several(hint):
            advice = f"Join names by commas: --{name} {','.join(words)}." if name == "log.to" else ""
            yield f"--{name} takes one value, and {len(words)} follow: {' '.join(words)}. {advice}".rstrip()


def _takes_several(hint: Any) -> bool:
    return any(get_origin(kind) is tuple for kind in (hint, *get_args(hint)))


def _trainers_with(name: str) -> str:
    """Returns which programs have an option that this one lacks, or an empty text."""
    kinds = (GRPOConfig, PPOConfig, SFTConfig, RMConfig, DPOConfig)
    owners = [kind.__name__.removesuffix("Config").lower() for kind in kinds if name in option_types(kind)]
    return f"--{name} is an option of lightrl train {'|'.join(owners)}, not of this program." if owners else ""


def _own_name(arg: str) -> str:
    """Returns a flag under the name of its field, which ends in an underscore where it would be a keyword of Python."""
    flag, equals, value = arg.partition("=")
    is_keyword = flag.startswith("--") and keyword.iskeyword(flag.rpartition(".")[2])
    return f"{flag}_{equals}{value}" if is_keyword else arg


def _warn_of_repeated_lists(config_class: type[Any], flags: Sequence[str]) -> None:
    """Says that of `--reward a --reward b` only the last counts, as of any option, so that flags override earlier ones.

    Silence would hide that the first values are lost.
    """
    for name, hint in option_types(config_class).items():
        count = flags.count(f"__{name}")
        if count > 1 and ... in get_args(hint) and os.environ.get("RANK", "0") == "0":
            sys.stderr.write(
                f"note: --{name} is given {count} times, and only the last one counts. To give several values, write "
                f"them behind one --{name}.\n"
            )


def _print_help(config_class: type[Any], args: Sequence[str], program: str) -> NoReturn:
    """Prints the help that the first flag of that kind asks for, and ends the process."""
    asked, following = next(pair for pair in itertools.pairwise([*args, ""]) if pair[0] in _HELP)
    if asked in _HELP_ALL:
        text = whole_help(config_class, program)
    elif following and not following.startswith("-"):
        text = help_on(config_class, following)
    else:
        text = short_help(config_class, program)
    print_text(text)
    raise SystemExit(0)


def print_text(text: str) -> None:
    """Prints a text whose reader may have seen enough before its end, as in `--help | head`."""
    try:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class LateMistakeError(ValueError):
    """A mistake of the user's that shows only when the trainer is built, such as a hub that takes no upload."""


def exit_with_user_error(error: BaseException) -> NoReturn:
    """Prints the error without a traceback and ends the process with code 2."""
    print_user_error(error)
    raise SystemExit(2) from error


def print_user_error(error: BaseException) -> None:
    """Prints the error on every rank: torchrun stops the others as soon as the first one leaves."""
    print_last_word(f"error: {error}")


def _config_path(args: Sequence[str]) -> str:
    path = ""
    for arg, following in itertools.zip_longest(args, args[1:]):
        if arg == "--config" and following is not None:
            path = following
        elif arg.startswith("--config="):
            path = arg.removeprefix("--config=")
    if not path and args[-1] != "--config":
        raise ValueError("--config is empty, as a shell variable without a value is. Name a file, or leave it out.")
    return path


def _yaml_flags(config_class: type[Any], path: str, beside: Sequence[str] = ()) -> list[str]:
    """Returns a YAML file as flags, so that there is one parser and one set of errors; an empty path holds none.

    beside: the flags of the command line, with underscores only.
    """
    if not path:
        return []
    types = option_types(config_class)
    flags: list[str] = []
    given: set[str] = set()
    content, written = _named(_read_yaml(path)), dict(_named(_read_yaml(path, as_written=True)))
    is_evaluation = issubclass(config_class, EvaluateConfig)
    unused = left_out(dict(content), has_other_model="__model" in beside) if is_evaluation else []
    _note_unused(unused, path)
    for name, value in content:
        if name in given:
            raise ValueError(f"--config {path}: {name} is given twice, on its own and in a section. Keep one.")
        given.add(name)
        if name in unused:
            continue
        if name not in types:
            raise _unknown_options([other for other, _ in content if other not in {*types, *unused}], types, path)
        _check_value(name, value, types[name], path)
        if name == "config":
            continue  # the path that the run which saved this file was started with
        value = written.get(name, value) if _is_text(types[name]) else value
        # Name and value are one word, so that a value may begin with dashes; so may the first of several.
        values = [str(part) for part in (value if isinstance(value, list) else [value])]
        flags += [f"--{name}={values[0]}", *values[1:]] if values else [f"--{name}"]
    return flags


def _named(content: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(_own_name(f"--{key}").removeprefix("--"), value) for key, value in flatten(content)]


def _unknown_options(names: Sequence[str], types: Mapping[str, Any], path: str) -> ValueError:
    """Returns an error with a line for each name: the file of another trainer has many."""
    told = []
    for name in dict.fromkeys(names):
        hint = reason_against(name, types) or " ".join(own_names([f"--{name}"], types)) or _trainers_with(name)
        told.append(f"unknown option {name!r}. {hint or _nearest_option(name, set(types))}")
    return ValueError(f"--config {path}: " + "\n  ".join(told))


def _is_text(hint: Any) -> bool:
    """Returns whether an option is a text, one of several texts, or a list of texts."""
    return all(kind in (str, type(None), ...) or isinstance(kind, str) for kind in get_args(hint) or (hint,))


def _note_unused(unused: Sequence[str], path: str) -> None:
    if unused and os.environ.get("RANK", "0") == "0":
        shown = ", ".join(unused[:_MOST_NOTED])
        more = f" and {len(unused) - _MOST_NOTED} others" if len(unused) > _MOST_NOTED else ""
        sys.stderr.write(f"note: --config {path} is of a training; the evaluation leaves out its {shown}{more}.\n")


def _nearest_option(name: str, known: set[str]) -> str:
    """Returns a hint with the nearest options; of a section that this kind of run lacks, none is near."""
    owner, dot, _ = name.partition(".")
    if dot and not difflib.get_close_matches(owner, {option.partition(".")[0] for option in known}):
        return f"This program has no section {owner!r}. Leave it out; --help lists what there is."
    hint = nearest_name(name, known)
    return hint if len(hint) < _LONG else "--help lists all options."


def _check_value(name: str, value: Any, hint: Any, path: str) -> None:
    """Raises ValueError for a value that no flag can express, or that the parser would refuse with a poorer message."""
    if value is None and type(None) not in get_args(hint):
        raise ValueError(f"--config {path}: {name} has no value. Give one, or leave the line out.")
    if isinstance(value, list) and not _takes_several(hint):
        raise ValueError(f"--config {path}: {name} is {value}: it takes one value, not a list.")
    if isinstance(value, list) and None in value:
        raise ValueError(f"--config {path}: {name} has an empty value in its list. Give one, or put quotes around it.")
    if isinstance(value, list) and any(map(_LIKE_A_FLAG.match, map(str, value[1:]))):
        told = f"{name} is {value}: of several values only the first may begin with a dash. Move it there."
        raise ValueError(f"--config {path}: {told}")


def _read_yaml(path: str, *, as_written: bool = False) -> Mapping[str, Any]:
    if problem := why_unreadable(path):
        raise FileNotFoundError(f"--config {path}: {problem}.")
    content = read_yaml(Path(path), f"--config {path}", as_written=as_written) or {}
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
