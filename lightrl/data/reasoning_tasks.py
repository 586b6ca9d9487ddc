"""Problems that reasoning-gym makes from a seed: --train_data 'reasoning_gym:chain_sum?size=2000'."""

from __future__ import annotations

import importlib
from typing import Any

from lightrl.config import named_values, nearest_name
from lightrl.imports import import_extra

PREFIX = "reasoning_gym:"
_DEFAULTS: dict[str, Any] = {"size": 1000, "seed": 0}


def reasoning_records(source: str) -> list[dict[str, Any]]:
    """Makes the problems of a source, as records with the prompt, the answer, and the entry by which they are scored.

    Args:
        source: reasoning_gym:TASK, or reasoning_gym:TASK?name=value&name=value with fields of the task's config.
    """
    task, _, written = source.removeprefix(PREFIX).partition("?")
    library = import_extra("reasoning_gym", extra="reasoning-gym", needed_by=f"The data set {source}")
    names = set(importlib.import_module("reasoning_gym.factory").DATASETS)
    if task not in names:
        raise ValueError(f"reasoning-gym has no task {task!r}. {nearest_name(task, names)}")
    settings = {**_DEFAULTS, **named_values([part for part in written.split("&") if part], "train_data")}
    try:
        problems = library.create_dataset(task, **settings)
        entries = [problems[index] for index in range(len(problems))]
    except Exception as error:  # an AssertionError for a value out of range, a TypeError for an unknown name
        raise ValueError(f"{source}: reasoning-gym refuses it ({type(error).__name__}: {error}).") from error
    return [
        {"prompt": entry["question"], "answer": entry["answer"], "task": task, "entry": dict(entry)}
        for entry in entries
    ]
