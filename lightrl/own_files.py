"""Runs a user's Python file as a module. Processes of isolated rewards do so too, so this imports little."""

from __future__ import annotations

import importlib.util
import os
import sys
import zlib
from pathlib import Path
from types import ModuleType

from lightrl.torch_settings import kept_by_import

_PREFIX = "lightrl_file_"  # prefix of the modules' names
_sources: dict[str, bytes] = {}  # source of each file's module, by module name: a changed file is run again


def run_file(path: Path) -> ModuleType:
    """Runs a Python file as a separate module; the same file is run once, because pickle looks up its functions."""
    file = path.resolve()
    module_name = f"{_PREFIX}{path.stem}_{zlib.crc32(os.fsencode(file)):08x}"
    source = file.read_bytes()
    if module_name in sys.modules and _sources.get(module_name) == source:
        return sys.modules[module_name]
    _sources[module_name] = source
    spec = importlib.util.spec_from_file_location(module_name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and pickle look up a class's module there
    try:
        with kept_by_import(str(path)):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
    return module


def is_of_file(module_name: str) -> bool:
    """Returns whether run_file() made a module, which another process cannot import by its name."""
    return module_name.startswith(_PREFIX)
