"""The native engine for a policy with LoRA adapters, which it applies beside weights that never change.

Merged into bfloat16 weights most of an adapter would be rounded away. A sync sends the adapters alone, once the engine
has the weights under them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from lightrl.engines.base import NamedTensors
from lightrl.engines.native.engine import NativeEngine, build_native_engine
from lightrl.engines.native.forward import FusedForward, ModelRunner
from lightrl.engines.native.products import PackedLinear
from lightrl.engines.weights.account import raise_problems
from lightrl.engines.weights.adapters import ArrivingAdapters, Factors, fits, layer_sizes
from lightrl.models.lora import lora_layers


class AdaptedLinear(PackedLinear):
    """Linear layers of one input as one product, and their adapters as two more, of which they become views.

    The adapters lie side by side, [inputs, ranks] and [ranks, outputs], with zeros between them in the second.
    """

    def __init__(self, layers: list[nn.Linear]) -> None:
        super().__init__(layers)
        self._down = self._up = torch.empty(0)

    def __call__(self, inputs: Tensor) -> Tensor:
        outputs = super().__call__(inputs)
        return outputs.addmm_(inputs.mm(self._down), self._up) if self._up.numel() else outputs

    def add_to(self, hidden: Tensor, inputs: Tensor) -> None:
        """Adds the products to hidden states [n, out] in place."""
        hidden.add_(self(inputs))

    def refresh(self) -> None:
        """Lays adapters side by side that have storage of their own."""
        super().refresh()
        own = self._down.untyped_storage().data_ptr()
        pairs = [factors_of(layer) for layer in self._layers]
        if any(pair is not None and pair.down.untyped_storage().data_ptr() != own for pair in pairs):
            self._lay_adapters(pairs)

    def _lay_adapters(self, pairs: list[Factors | None]) -> None:
        outputs = [layer.out_features for layer in self._layers]
        ranks = [0 if pair is None else pair.down.shape[0] for pair in pairs]
        weight = self._layers[0].weight
        self._down = weight.new_empty(weight.shape[1], sum(ranks))
        self._up = weight.new_zeros(sum(ranks), sum(outputs))
        rows, columns = self._up.split(ranks), self._down.split(ranks, 1)
        for i, (layer, pair) in enumerate(zip(self._layers, pairs, strict=True)):
            if pair is not None:
                held = Factors(columns[i].t(), rows[i].split(outputs, 1)[i].t())
                _copy(held, pair)
                _set_factors(layer, held)


class AdaptedForward(FusedForward):
    """The fused forward with adapters on any of its layers."""

    make_linear = AdaptedLinear


class AdaptedRunner(ModelRunner):
    """Runs the fused forward, or the model's modules, with adapters."""

    make_fused = AdaptedForward


class AdaptedEngine(NativeEngine):
    """Applies the adapters that its weight syncs bring."""

    make_runner = AdaptedRunner
    _sizes: dict[str, tuple[int, int]]

    def expect(self, layers: Iterable[str]) -> None:
        """Makes every later weight sync bring an adapter for each of these layers."""
        self._sizes = dict(layer_sizes(self.model, layers))
        for name in self._sizes:
            layer = self.model.get_submodule(name)
            layer.forward = partial(_adapted, layer, layer.forward)

    def load_weights(self, weights: NamedTensors, version: int) -> None:
        """Takes the adapters, and all weights or none of them: after the first sync adapters may come alone."""
        self._require_open("load_weights")
        arriving = ArrivingAdapters(self._sizes)
        plain = arriving.taken_from(weights)
        first = next(plain, None)
        if first is not None:
            super().load_weights(chain([first], plain), version)
        given = {name: pair for name, pair in arriving.factors().items() if self._fits(name, pair, arriving)}
        for name, pair in given.items():
            self._take(name, pair)
        self._runner.refresh()
        for name, pair in given.items():
            arriving.compare(name, pair, self._held(name))
        raise_problems(arriving.account.problems(), f"Weight sync to version {version}")
        self._version = version

    def _fits(self, name: str, pair: Factors, arriving: ArrivingAdapters) -> bool:
        is_fit = fits(pair, *self._sizes[name])
        if not is_fit:
            arriving.account.add_problem(f"misshapen adapter of {name}: got {[tuple(part.shape) for part in pair]}")
        return is_fit

    def _take(self, name: str, given: Factors) -> None:
        layer: Any = self.model.get_submodule(name)
        held, weight = factors_of(layer), layer.weight
        if held is None or held.down.shape != given.down.shape or held.down.device != weight.device:
            held = Factors(*(torch.empty_like(part, device=weight.device, dtype=weight.dtype) for part in given))
            _set_factors(layer, held)
        _copy(held, given)

    def _held(self, name: str) -> Factors:
        """Returns the adapter in the memory that the forward reads."""
        held = factors_of(self.model.get_submodule(name))
        assert held is not None, "_take() has set it"
        return held


def factors_of(layer: nn.Module) -> Factors | None:
    """Returns the adapter of a layer of the engine's model."""
    found: Factors | None = getattr(layer, "adapter_factors", None)
    return found


def _set_factors(layer: Any, factors: Factors) -> None:
    layer.adapter_factors = factors


@torch.no_grad()
def _copy(held: Factors, given: Factors) -> None:
    for target, source in zip(held, given, strict=True):
        target.copy_(source)


def _adapted(layer: nn.Module, forward: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
    outputs, factors = forward(inputs), factors_of(layer)
    return outputs if factors is None else outputs + F.linear(F.linear(inputs, factors.down), factors.up)


def build_adapted_engine(*, source: PreTrainedModel | None, **parts: Any) -> NativeEngine:
    """Makes a native engine that expects the adapters of the source."""
    engine = build_native_engine(source=source, kind=AdaptedEngine, **parts)
    assert isinstance(engine, AdaptedEngine)
    assert source is not None, "build_native_engine() has refused that"
    engine.expect(name for name, _ in lora_layers(source))
    return engine
