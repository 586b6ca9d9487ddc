"""The kinds of native engine that options of --native.* ask for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pkgutil import resolve_name
from typing import Any

from transformers import PreTrainedModel

from lightrl.config import NativeEngineConfig

# By name, since engine.py imports this module.
_PLAIN = "lightrl.engines.native.engine:NativeEngine"
_GUESSING = "lightrl.engines.native.lookup:LookupEngine"
_LENT = "lightrl.engines.native.lent:engine_on"
_EAGER = "lightrl.engines.native.eager:EagerEngine"
_WITH_KERNELS = "lightrl.engines.native.kernels:engine_with_kernels"


def kind_of(
    options: NativeEngineConfig, source: PreTrainedModel, kind: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """Returns the class or factory of the engine; kind: one that another option needs."""
    make = kind or _asked_for(options, source)
    return partial(resolve_name(_WITH_KERNELS), make) if options.cpu_kernels else make


def _asked_for(options: NativeEngineConfig, source: PreTrainedModel) -> Callable[..., Any]:
    if options.lookup:
        return partial(resolve_name(_GUESSING), num_guesses=options.lookup)
    if options.share_weights:
        return partial(resolve_name(_LENT), source)
    make: Callable[..., Any] = resolve_name(_PLAIN if options.cuda_graphs else _EAGER)
    return make
