"""Engines, by name or by import path."""

from __future__ import annotations

from typing import Any

import torch

from lightrl.engines.base import EngineGroup, InferenceEngine
from lightrl.imports import load_object

BUILTIN_ENGINES = {
    "native": "lightrl.engines.native.engine:build_native_engine",
    "vllm": "lightrl.engines.vllm.build:build_vllm_engine",
    "sglang": "lightrl.engines.sglang.engine:build_sglang_engine",
}


def check_engine_name(name: str) -> None:
    """Raises ValueError unless this is a built-in name, which imports nothing, or a path that can be imported."""
    if name not in BUILTIN_ENGINES:
        load_object(name, builtin=BUILTIN_ENGINES, what="engine", example="MyEngine")


def create_engine(
    name: str, *, source: Any, tokenizer: Any, options: Any, device: torch.device, group: EngineGroup | None = None
) -> InferenceEngine:
    """Calls the engine's class or factory; returns what it made if it is an InferenceEngine.

    Args:
        name: a built-in name, or the import path of a class or factory.
        source: the trainer's unwrapped model.
        tokenizer: the model's tokenizer.
        options: the options of the run.
        device: the device of this rank.
        group: the ranks that drive the engine together; None is this rank alone.
    """
    factory = load_object(name, builtin=BUILTIN_ENGINES, what="engine", example="MyEngine")
    if isinstance(factory, type):
        _check_class(name, factory)
    engine = factory(source=source, tokenizer=tokenizer, options=options, device=device, group=group or EngineGroup())
    if not isinstance(engine, InferenceEngine):
        raise ValueError(f"Engine {name!r} made a {type(engine).__name__}, which is not a lightrl InferenceEngine.")
    return engine


def _check_class(name: str, engine_class: type) -> None:
    missing = sorted(getattr(engine_class, "__abstractmethods__", ()))
    if missing:
        raise ValueError(f"Engine {name!r} does not implement {', '.join(missing)}.")
    if not issubclass(engine_class, InferenceEngine):
        raise ValueError(f"Engine {name!r} is no subclass of lightrl.InferenceEngine.")
