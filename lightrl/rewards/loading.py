"""Finds a reward by name: a built-in one, or a user's own from a module or a file."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import cast

from lightrl.config import nearest_name
from lightrl.imports import load_object
from lightrl.rewards.scoring import AnyReward

BUILTIN_REWARDS = {
    "exact_match": "lightrl.rewards.exact_match:exact_match",
    "contains": "lightrl.rewards.contains:contains",
    "last_number": "lightrl.rewards.last_number:last_number",
}


def load_reward(name: str) -> AnyReward:
    """The reward of a built-in name, of "package.module:function", or of "path/to/file.py:function"."""
    place, _, function_name = name.rpartition(":")
    if place.endswith(".py"):
        reward = _load_from_file(Path(place), function_name)
    else:
        example = "my_reward or path/to/file.py:my_reward"
        reward = load_object(name, builtin=BUILTIN_REWARDS, what="reward", example=example)
    if not callable(reward):
        raise ValueError(
            f"The reward {name!r} is a {type(reward).__name__}: it must be a function from a Sample to a number."
        )
    return cast(AnyReward, reward)


def _load_from_file(path: Path, function_name: str) -> object:
    if not path.is_file():
        raise FileNotFoundError(
            f"There is no file {path} to load a reward from. The working directory is {Path.cwd()}."
        )
    module = _run_file(path)
    if not hasattr(module, function_name):
        functions = {key for key, value in vars(module).items() if callable(value) and not key.startswith("_")}
        raise ValueError(f"The file {path} has no {function_name!r}. {nearest_name(function_name, functions)}")
    return getattr(module, function_name)


def _run_file(path: Path) -> ModuleType:
    module_name = f"lightrl_reward_file_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path.resolve())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and pickle look a class's module up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
    return module
