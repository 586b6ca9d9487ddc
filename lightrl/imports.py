"""Loads what users name on the command line: built-ins by a short name, objects of their own by module or file."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from pkgutil import resolve_name
from types import ModuleType
from typing import Any, NoReturn

from lightrl.config import nearest_name
from lightrl.own_calls import is_own
from lightrl.own_files import run_file
from lightrl.torch_settings import ChangedByImportError, kept_by_import

# Errors that a program prints without a traceback, or that end it silently. If a user's code raises one of them while
# it is loaded, the message has to name the line.
_BARE = (ValueError, OSError, ImportError, SyntaxError, SystemExit)

_OURS = Path(__file__).parent
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def is_installed(package: str) -> bool:
    """Returns whether a package can be imported; a mere folder of that name on the path does not count."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def load_object(name: str, *, builtin: Mapping[str, str], what: str, example: str) -> Any:
    """Loads an object by a built-in name, or from a module or a file; modules in the working directory are found, too.

    Args:
        name: A key of `builtin`, package.module:attribute or path/to/file.py:attribute.
        builtin: Import paths of the built-in names.
        what: Kind of object, for error messages.
        example: Import path of a user's own object, for error messages.
    """
    return resolve_name(builtin[name]) if name in builtin else _load_own(name, builtin, what, example)


def _load_own(name: str, builtin: Mapping[str, str], what: str, example: str) -> Any:
    """Loads a user's object; every mistake in its name or error in its module is explained."""
    source, _, attribute = name.rpartition(":")
    is_file = source.endswith(".py")
    if not source and name.endswith(".py") and Path(name).is_file():
        raise _only_a_file(name, what, example)
    if not (source and attribute) or (source.startswith(".") and not is_file):
        _raise_unknown(name, builtin, what, example)
    if os.getcwd() not in sys.path:  # also for what a file imports
        sys.path.insert(0, os.getcwd())
    module = _module_of_file(source, name, what) if is_file else _imported(source, name, what)
    if not hasattr(module, attribute):
        defined = {key for key, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__}
        public = getattr(module, "__all__", ()) or {key for key in defined if not key.startswith("_")}
        hint = f" {nearest_name(attribute, public)}" if public else ""
        raise ValueError(f"The {what} {name!r}: {source} has no {attribute!r}.{hint}")
    return getattr(module, attribute)


def _imported(module_name: str, name: str, what: str) -> ModuleType:
    try:
        with kept_by_import(module_name):
            return importlib.import_module(module_name)
    except _BARE as error:
        _raise_unless_ours(error, module_name, f"The {what} {name!r}")


def _module_of_file(file: str, name: str, what: str) -> ModuleType:
    if not Path(file).is_file():
        raise FileNotFoundError(
            f"The {what} {name!r}: there is no file {file}. The working directory is {os.getcwd()}."
        )
    try:
        return run_file(Path(file))
    except _BARE as error:
        _raise_code_fails(error, f"The {what} {name!r}")


def _only_a_file(file: str, what: str, example: str) -> ValueError:
    try:
        body = ast.parse(Path(file).read_bytes()).body
    except SyntaxError:
        body = []  # reported when something of the file is loaded
    found = [item.name for item in body if isinstance(item, _DEFINITIONS)]
    choices = " or ".join(f"{file}:{name}" for name in found if not name.startswith("_"))
    return ValueError(
        f"The {what} {file!r} names a file, but no function or class of it. Write {choices or f'{file}:{example}'}."
    )


def _raise_unknown(name: str, builtin: Mapping[str, str], what: str, example: str) -> NoReturn:
    known = f" {nearest_name(name, set(builtin))} Choose one of {', '.join(builtin)}, or give" if builtin else " Give"
    raise ValueError(
        f"Unknown {what} {name!r}.{known} your own as package.module:{example} or path/to/file.py:{example}."
    )


def _raise_unless_ours(error: BaseException, module_name: str, subject: str) -> NoReturn:
    """Raises an error that a user can act on if the module is missing or its code fails; lightrl's own errors pass."""
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if missing and (module_name == missing or module_name.startswith(missing + ".")):
        raise ValueError(
            f"{subject}: there is no module {missing!r}. It must be installed or stand under the directory the run "
            f"is started in ({os.getcwd()})."
        ) from error
    if module_name.partition(".")[0] == "lightrl":
        raise error
    _raise_code_fails(error, subject)


def _raise_code_fails(error: BaseException, subject: str) -> NoReturn:
    """Raises an ImportError that names the line at which a user's code failed while it was loaded."""
    if isinstance(error, ChangedByImportError):  # it names the module, and no line failed
        raise error
    if isinstance(error, SyntaxError):
        reason, file, line = error.msg, error.filename, error.lineno
    else:
        frames = traceback.extract_tb(error.__traceback__)
        last = next(frame for frame in reversed(frames) if not frame.filename.startswith("<frozen"))
        reason, file, line = str(error), last.filename, last.lineno
    remedy = _beside(error, Path(file or "").parent) or "Correct that line, or install what it imports."
    raise ImportError(
        f"{subject} cannot be loaded: {type(error).__name__} at line {line} of {file}: {reason}. {remedy}"
    ) from error


def place_of(function: Any) -> str:
    """Returns the file and line at which a user's function is written, for an error message; empty if unknown."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return "" if code is None else f", at line {code.co_firstlineno} of {code.co_filename}"


def require_call(what: str, function: Any, *arguments: str) -> None:
    """Raises ValueError if a user's function cannot be called with these arguments, and tells where it is written."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # compiled functions may have none
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        called = f"({', '.join(arguments)})"
        raise ValueError(f"{what}{signature} cannot be called with {called}: {error}{place_of(function)}.") from None


def line_of_own_code(error: BaseException | None) -> str:
    """Returns the line at which a user's code raised an error, in parentheses; empty for errors of lightrl itself."""
    if error is None:
        return ""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if path.is_relative_to(_OURS):
            break  # and not what it called: a library
        if is_own(path):
            return f" ({type(error).__name__} at line {frame.lineno} of {path}, in {frame.name})"
    return line_of_own_code(error.__cause__)


def _beside(error: BaseException, folder: Path) -> str:
    name = error.name if isinstance(error, ModuleNotFoundError) else None
    if name and ((folder / f"{name}.py").is_file() or (folder / name).is_dir()):
        return f"{name} is in the same folder: start the run with PYTHONPATH={folder}."
    return ""


def import_extra(module: str, *, extra: str, needed_by: str) -> Any:
    """Imports a package that an extra installs; raises an ImportError that names the extra if it is missing.

    Args:
        extra: Name of the extra in pyproject.toml.
        needed_by: Subject of the message.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if (error.name or "").partition(".")[0] != package:
            raise
        raise ImportError(f'{needed_by} needs {package}: pip install "lightrl[{extra}]".') from error
