"""Finds a reward by name, a built-in one or a user's own from a module or a file, and gives it its parameters."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from lightrl.config import named_values, nearest_name
from lightrl.imports import load_object
from lightrl.rewards.kinds import AnyReward

BUILTIN_REWARDS = {
    "exact_match": "lightrl.rewards.exact_match:exact_match",
    "contains": "lightrl.rewards.contains:contains",
    "last_number": "lightrl.rewards.last_number:last_number",
    "math": "lightrl.rewards.math_answer:MathAnswer",
    "format": "lightrl.rewards.response_format:ResponseFormat",
    "length": "lightrl.rewards.response_length:ResponseLength",
    "code": "lightrl.rewards.code_tests:CodeTests",
    "reward_model": "lightrl.rewards.model_reward:ModelReward",
    "judge": "lightrl.rewards.judge:Judge",
}
FILE_MODULE_PREFIX = "lightrl_reward_file_"
_TYPES: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "bool": (bool,)}


def load_reward(name: str, parameters: Mapping[str, Any] | None = None) -> AnyReward:
    """The reward of a built-in name, of "package.module:function", or of "path/to/file.py:function".

    A class is built with its parameters; a function keeps them. They are its keyword-only parameters. A text is read
    as what the parameter is declared to be.
    """
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
    given = _checked_parameters(name, reward, parameters or {})
    if inspect.isclass(reward):
        return cast(AnyReward, reward(**given))
    return cast(AnyReward, partial(reward, **given) if given else reward)


def _checked_parameters(name: str, reward: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    found = inspect.signature(reward).parameters.values()
    known = {item.name: item for item in found if item.kind is inspect.Parameter.KEYWORD_ONLY}
    for key in given:
        if key not in known:
            allowed = f"It has {', '.join(known)}." if known else "It has none."
            raise ValueError(f"The reward {name!r} has no parameter {key!r}. {allowed}")
    missing = [key for key, item in known.items() if item.default is inspect.Parameter.empty and key not in given]
    if missing:
        raise ValueError(
            f"The reward {name!r} needs a value for {', '.join(missing)}: give --reward_args {name}.{missing[0]}=..."
        )
    return {key: _typed(name, known[key], value) for key, value in given.items()}


def _typed(name: str, parameter: inspect.Parameter, value: Any) -> Any:
    """Declared str: the text as it is, so that a pattern needs no quoting. Anything else: read as YAML."""
    declared = (
        parameter.annotation if isinstance(parameter.annotation, str) else getattr(parameter.annotation, "__name__", "")
    )
    if declared == "str" or not isinstance(value, str):
        return value
    typed = named_values([f"{parameter.name}={value}"], "reward_args")[parameter.name]
    wanted = _TYPES.get(declared)
    is_right = wanted is None or (isinstance(typed, wanted) and (declared == "bool" or not isinstance(typed, bool)))
    if not is_right:
        raise ValueError(f"The reward {name!r}: {parameter.name} is {value!r}, and it must be {declared}.")
    return typed


def _load_from_file(path: Path, function_name: str) -> object:
    if not path.is_file():
        raise FileNotFoundError(
            f"There is no file {path} to load a reward from. The working directory is {Path.cwd()}."
        )
    module = run_file(path)
    if not hasattr(module, function_name):
        functions = {key for key, value in vars(module).items() if callable(value) and not key.startswith("_")}
        raise ValueError(f"The file {path} has no {function_name!r}. {nearest_name(function_name, functions)}")
    return getattr(module, function_name)


def run_file(path: Path) -> ModuleType:
    """The file as a module of its own."""
    module_name = f"{FILE_MODULE_PREFIX}{path.stem}"
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
