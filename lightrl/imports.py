"""Things that users name on the command line: built in by a short name, their own by package.module:name."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Mapping
from typing import Any

from lightrl.config import nearest_name


def is_installed(package: str) -> bool:
    """Returns whether a package can be imported; a mere folder of its name on the path is none."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def load_object(name: str, *, builtin: Mapping[str, str], what: str, example: str) -> Any:
    """What a built-in name or an import path stands for; the working directory is importable, as with python -m."""
    if ":" not in name and name not in builtin:
        raise ValueError(
            f"Unknown {what} {name!r}. {nearest_name(name, set(builtin))} Choose one of {', '.join(builtin)}, or give "
            f"your own as package.module:{example}."
        )
    module_name, _, attribute = builtin.get(name, name).partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise ValueError(
                f"The {what} {name!r}: there is no module {error.name!r}. It must be installed or stand under the "
                f"directory the run is started in ({os.getcwd()})."
            ) from error
        raise
    if not hasattr(module, attribute):
        raise ValueError(f"The {what} {name!r}: module {module_name!r} has no {attribute!r}.")
    return getattr(module, attribute)
