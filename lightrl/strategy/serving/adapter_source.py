"""AdapterSource: the weights that a sync sends if the engine applies a policy's LoRA adapters unmerged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightrl.config.adapters import other_adapters, sends_adapters
from lightrl.engines.base import InferenceEngine, skeleton
from lightrl.engines.weights.adapters import DOWN, UP
from lightrl.engines.weights.fingerprint import KnownWeights
from lightrl.imports import load_object
from lightrl.models import lora
from lightrl.models.policy import load_policy
from lightrl.models.saved_adapters import layers_of_saved, read_saved_adapters
from lightrl.strategy.base import StrategyBase
from lightrl.strategy.layout.plain import NamedShard, has_adapters
from lightrl.strategy.torch_native import TorchStrategy

_BUILDERS = {
    "native": "lightrl.engines.native.adapted:build_adapted_engine",
    "vllm": "lightrl.engines.vllm.adapted:build_adapted_engine",
    "sglang": "lightrl.engines.sglang.adapted:build_adapted_engine",
}
_CHECKS = {"sglang": "lightrl.engines.sglang.adapted:check_layers"}  # for engines that do not support every layer


def check_adapters(config: Any, model_path: str) -> None:
    """Raises ValueError if peft is missing or an adapter does not fit model or engine; reads no weights."""
    lora.require_peft(config.lora)
    check = _CHECKS.get(config.engine) if sends_adapters(config) else None
    if not (config.lora.others or check):
        return
    model = load_policy(model_path, materialize=False, trust_remote_code=config.trust_remote_code).hf
    layers = layers_of_saved(other_adapters(config.lora), model)
    if check:
        check_layers = load_object(check, builtin={}, what="check", example="check_layers")
        for name, own in layers.items():
            check_layers(model, own, f"--lora.others {name}")
        lora.add_adapters(model, config.lora, seed=0)
        check_layers(model, [name for name, _ in lora.lora_layers(model)], "--lora.target_modules")


def serve_as_configured(strategy: StrategyBase, config: Any, model: Any) -> None:
    """Calls serve_adapters() if the run's options ask for it (--lora.engine), and the adapted model allows it."""
    # vLLM has no place for adapters of a vision tower.
    is_merged = config.lora.engine == "auto" and config.engine == "vllm" and not _adapts_only_the_decoder(model)
    if sends_adapters(config) and not is_merged:
        serve_adapters(strategy, other_adapters(config.lora))


def _adapts_only_the_decoder(model: Any) -> bool:
    inside = set(model.get_decoder().modules())
    return all(layer in inside for _, layer in lora.lora_layers(model))


def serve_adapters(strategy: StrategyBase, others: Mapping[str, str] | None = None) -> None:
    """Makes the strategy's engine apply adapters unmerged; call it before the engine is made.

    A custom strategy that is no TorchStrategy still sends merged weights.

    Args:
        others: Folders that peft wrote, by the names that requests use for their adapters.
    """
    folders = dict(others or {})
    if not isinstance(strategy, TorchStrategy):
        if folders:
            raise ValueError(f"--lora.others {' '.join(folders)}: {type(strategy).__name__} sends merged weights.")
        return
    made = {name: partial(_make_engine, builder, folders) for name, builder in _BUILDERS.items()}
    strategy.serving.factories = {**strategy.serving.factories, **made}
    strategy.serving.source = AdapterSource(strategy)


def _make_engine(builder: str, folders: Mapping[str, str], *, source: Any, **parts: Any) -> InferenceEngine:
    """Makes an engine that expects the source's adapters and holds those of the folders."""
    others = read_saved_adapters(folders, skeleton(source)) if folders else {}
    build = load_object(builder, builtin={}, what="engine", example="MyEngine")
    engine: InferenceEngine = build(source=source, others=others, **parts)
    return engine


class AdapterSource:
    """Sends the base weights once, and after that only the adapters, since the base weights never change."""

    def __init__(self, strategy: TorchStrategy) -> None:
        self._strategy = strategy
        self._sends_all = True

    def weight_fingerprints(self, model: nn.Module, dtype: torch.dtype | None) -> KnownWeights | None:
        """Decides which tensors full_parameters() sends next, and returns a fingerprint of each."""
        layout, unwrapped = self._strategy.layout, self._strategy.unwrap_model(model)
        if not has_adapters(unwrapped):
            return self._strategy.weight_fingerprints(model, dtype)
        self._make_readable(model)
        plain = self._choose_weights(unwrapped)

        def shards() -> Iterator[NamedShard]:
            for name, parameter in plain:
                yield NamedShard(name, parameter, layout.shard(parameter))
            for name, factor, scale in _factors(unwrapped):
                shard = layout.shard(factor)
                yield NamedShard(name, factor, shard if scale == 1 else shard * scale)

        return layout.fingerprints(shards(), dtype)

    def full_parameters(self, model: nn.Module, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Returns (name, whole tensor) pairs: weights that the engine lacks, then the adapters. A collective."""
        unwrapped = self._strategy.unwrap_model(model)
        if not has_adapters(unwrapped):
            return self._strategy.full_parameters(model, dtype)
        self._make_readable(model)
        return self._gathered(_plain(unwrapped) if self._sends_all else [], _factors(unwrapped), dtype)

    def _gathered(
        self,
        plain: Sequence[tuple[str, nn.Parameter]],
        factors: Sequence[tuple[str, nn.Parameter, float]],
        dtype: torch.dtype | None,
    ) -> Iterator[tuple[str, Tensor]]:
        layout = self._strategy.layout
        yield from layout.gather_named(((name, layout.detached(item)) for name, item in plain), dtype)
        gathered = layout.gather_named((name, layout.detached(factor)) for name, factor, _ in factors)
        for (name, whole), (_, _, scale) in zip(gathered, factors, strict=True):
            scaled = whole if scale == 1 else whole * scale  # in float32, so that only the cast rounds
            yield name, scaled if dtype is None else scaled.to(dtype)

    def _choose_weights(self, unwrapped: nn.Module) -> list[tuple[str, nn.Parameter]]:
        """Returns the weights that the engine lacks: all at first, after a failed sync, and after sleep level 2."""
        plain = _plain(unwrapped)
        engine = self._strategy.serving.require_engine()
        lacks_some = engine.needs_weights or any(parameter.requires_grad for _, parameter in plain)
        # A sync may have failed on only one rank, but every rank must gather the same tensors.
        self._sends_all = self._strategy.comm.any(lacks_some)
        return plain if self._sends_all else []

    def _make_readable(self, model: nn.Module) -> None:
        self._strategy.after_forward_only(model)
        self._strategy.trained.require_on_device(model)


def _plain(unwrapped: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return sorted(lora.plain_parameters(unwrapped))


def _factors(unwrapped: Any) -> list[tuple[str, nn.Parameter, float]]:
    """Returns (name, factor, its scale) of all adapters, sorted by name."""
    found = []
    for weight, adapter in lora.adapters_of(unwrapped).items():
        layer = weight.removesuffix(".weight")
        found += [(layer + DOWN, adapter.down, 1.0), (layer + UP, adapter.up, adapter.scale)]
    return sorted(found, key=lambda item: item[0])
