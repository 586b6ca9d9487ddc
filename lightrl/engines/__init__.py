"""Engines by name or by import path."""

from __future__ import annotations

from typing import Any

import torch

from lightrl.engines.base import EngineGroup, InferenceEngine
from lightrl.imports import load_object

BUILTIN_ENGINES = {
    "native": "lightrl.engines.native.build:build_native_engine",
    "vllm": "lightrl.engines.vllm.build:build_vllm_engine",
    "sglang": "lightrl.engines.sglang.engine:build_sglang_engine",
}


def check_engine_name(name: str) -> None:
    """ValueError unless it is a built-in name, which imports nothing, or a user's own that can be imported."""
    if name not in BUILTIN_ENGINES:
        load_object(name, builtin=BUILTIN_ENGINES, what="engine", example="MyEngine")


def create_engine(
    name: str, *, source: Any, tokenizer: Any, options: Any, device: torch.device, group: EngineGroup | None = None
) -> InferenceEngine:
    """Calls the engine's class or factory with the trainer's unwrapped model, the tokenizer, the options, the ranks."""
    factory = load_object(name, builtin=BUILTIN_ENGINES, what="engine", example="MyEngine")
    missing = sorted(getattr(factory, "__abstractmethods__", ()))
    if missing:
        raise ValueError(f"Engine {name!r} does not implement {', '.join(missing)}.")
    if isinstance(factory, type) and not issubclass(factory, InferenceEngine):
        raise ValueError(f"Engine {name!r} is no subclass of lightrl.InferenceEngine.")
    engine = factory(source=source, tokenizer=tokenizer, options=options, device=device, group=group or EngineGroup())
    if not isinstance(engine, InferenceEngine):
        raise ValueError(f"Engine {name!r} made a {type(engine).__name__}, which is not a lightrl InferenceEngine.")
    return engine
