"""The native engine for a policy with LoRA adapters, which it applies unmerged, beside weights that never change.

Merged into bfloat16 weights, most of an adapter would be rounded away. Once the engine has the base weights, a sync
sends only the adapters. A user's adapters are kept next to the policy's, and each request chooses one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightrl.config.adapters import BASE, POLICY
from lightrl.engines.base import NamedTensors
from lightrl.engines.native.cache import LayerStorage, RowCache
from lightrl.engines.native.engine import NativeEngine, build_native_engine
from lightrl.engines.native.forward import FusedForward, ModelRunner, SampleState
from lightrl.engines.native.own_cache import OwnCacheForward
from lightrl.engines.native.products import PackedLinear
from lightrl.engines.native.row_adapters import NO_ADAPTER, ChosenAdapters, MixedRows, Rows, adapted, rows_of
from lightrl.engines.native.sampler import SamplingPlan
from lightrl.engines.native.scheduler import Admission, Request
from lightrl.engines.weights.account import raise_problems
from lightrl.engines.weights.adapters import ArrivingAdapters, Factors, label, layer_sizes, with_factors
from lightrl.models.lora import lora_layers
from lightrl.models.saved_adapters import SavedAdapter


class AdaptedLinear(PackedLinear):
    """Linear layers of one input as one product, and their adapters as two more; adapters become views of these.

    The adapters lie side by side, [inputs, ranks] and [ranks, outputs], with zeros between layers in the second. The
    parts of one adapter are adjacent, so that a forward with one adapter reads no other.
    """

    def __init__(self, layers: list[nn.Linear], *, chosen: ChosenAdapters | None = None) -> None:
        super().__init__(layers)
        self._chosen = chosen or ChosenAdapters()
        self._down = self._up = torch.empty(0)
        self._widths: tuple[int, ...] = ()  # rank of each adapter, summed over the layers
        self._alone: dict[int, tuple[Tensor, Tensor]] = {}  # the parts of each adapter

    def __call__(self, inputs: Tensor) -> Tensor:
        outputs, rows = super().__call__(inputs), self._chosen.rows
        if isinstance(rows, int):
            pair = self._alone.get(rows)
            return outputs if pair is None else outputs.addmm_(inputs.mm(pair[0]), pair[1])
        if not self._widths:
            return outputs
        reduced = inputs.mm(self._down).masked_fill_(rows.not_theirs(self._widths), 0)
        return outputs.addmm_(reduced, self._up)

    def add_to(self, hidden: Tensor, inputs: Tensor) -> None:
        """Adds the products to hidden states [n, out] in place."""
        hidden.add_(self(inputs))

    def refresh(self) -> None:
        """Lays adapters side by side again if they have storage of their own."""
        super().refresh()
        own = self._down.untyped_storage().data_ptr()
        held = [factors_of(layer) for layer in self._layers]
        if any(pair.down.untyped_storage().data_ptr() != own for pairs in held for pair in pairs.values()):
            self._lay_adapters(held)

    def _lay_adapters(self, held: list[dict[int, Factors]]) -> None:
        numbers = range(1 + max(number for pairs in held for number in pairs))
        spots = [(number, i) for number in numbers for i, pairs in enumerate(held) if number in pairs]
        ranks = [held[i][number].down.shape[0] for number, i in spots]
        outputs = [layer.out_features for layer in self._layers]
        weight = self._layers[0].weight
        self._down = weight.new_empty(weight.shape[1], sum(ranks))
        self._up = weight.new_zeros(sum(ranks), sum(outputs))
        rows, columns = self._up.split(ranks), self._down.split(ranks, 1)
        for (number, i), row, column in zip(spots, rows, columns, strict=True):
            own = Factors(column.t(), row.split(outputs, 1)[i].t())
            _copy(own, held[i][number])
            held[i][number] = own
        of_spots = list(zip(spots, ranks, strict=True))
        self._widths = tuple(sum(rank for (owner, _), rank in of_spots if owner == number) for number in numbers)
        parts = zip(self._down.split(self._widths, 1), self._up.split(self._widths), strict=True)
        self._alone = {number: pair for number, pair in enumerate(parts) if self._widths[number]}


class AdaptedForward(FusedForward):
    """The fused forward with adapters on any of its layers."""

    def __init__(self, model: PreTrainedModel, chosen: ChosenAdapters) -> None:
        self.make_linear = partial(AdaptedLinear, chosen=chosen)
        super().__init__(model)


class AdaptedRunner(ModelRunner):
    """Runs the fused forward, or the model's modules, with adapters."""

    replays_steps = False  # what a step computes depends on the adapters of its rows

    def __init__(self, model: PreTrainedModel, device: torch.device) -> None:
        self.chosen = ChosenAdapters()  # the adapters of the current forward
        self.decoded: Rows = 0  # the adapters of the decoding rows
        self.takes_turns = False  # whether rows of several adapters decode adapter by adapter
        self.make_fused = partial(AdaptedForward, chosen=self.chosen)
        super().__init__(model, device)

    def decode(
        self, tokens: Tensor, positions: Tensor, cache: SampleState, rope_deltas: Tensor | None = None
    ) -> Tensor:
        """Runs one token in each of the first n rows, with each row's adapter."""
        rows = self.chosen.rows = self.decoded
        if isinstance(rows, MixedRows) and isinstance(cache, RowCache) and self.takes_turns:
            return self._decode_in_turn(rows, tokens, positions, cache, rope_deltas)
        return super().decode(tokens, positions, cache, rope_deltas)

    def _decode_in_turn(
        self, rows: MixedRows, tokens: Tensor, positions: Tensor, cache: RowCache, rope_deltas: Tensor | None
    ) -> Tensor:
        """Runs all rows with each adapter in turn, and keeps from every run the rows that have this adapter."""
        found, kept = torch.empty(0), list[tuple[Tensor, Tensor, list[LayerStorage | None]]]()
        for number, own in rows.by_adapter():
            self.chosen.rows = number
            logits = super().decode(tokens, positions, cache, rope_deltas)
            found = logits if not kept else found.index_copy_(0, own, logits[own])
            kept.append((own, positions[own], cache.read_tokens(own, positions[own])))
        for where in kept:
            cache.write_tokens(*where)  # each run has overwritten the keys and values of all rows
        return found

    def _choose_forward(self, vocab_size: int, cache: SampleState) -> SampleState:
        self.chosen.rows = 0
        cache = super()._choose_forward(vocab_size, cache)
        if isinstance(self._verified, OwnCacheForward):
            self._verified.begin_row = self._begin_row
        return cache

    def _begin_row(self, row: int) -> None:
        if isinstance(self.decoded, MixedRows):
            self.chosen.rows = self.decoded.adapter_of(row)


class AdaptedEngine(NativeEngine):
    """Engine that applies the adapters of its weight syncs, and those that it was created with."""

    make_runner = AdaptedRunner
    adapters: tuple[str, ...] = (POLICY, BASE)
    _runner: AdaptedRunner
    _sizes: dict[str, tuple[int, int]]

    def expect(self, layers: Iterable[str], others: Mapping[str, SavedAdapter]) -> None:
        """Requires every later weight sync to bring an adapter for each of these layers.

        others: The fixed adapters, by the names that requests use.
        """
        self._sizes = dict(layer_sizes(self.model, layers))
        self._others = {name: with_factors(other) for name, other in others.items()}
        self.adapters = (POLICY, BASE, *others)
        numbers = enumerate((POLICY, *others))
        self._numbers = {BASE: NO_ADAPTER, **{name: number for number, name in numbers}}
        adapted_layers = {*self._sizes, *chain.from_iterable(self._others.values())}
        for name in sorted(adapted_layers):
            layer = self.model.get_submodule(name)
            layer.adapter_factors = {}  # type: ignore[assignment]
            layer.forward = partial(_adapted, layer, layer.forward, self._runner.chosen)
        # An expert sees only some rows, and it is unknown which.
        self._runner.takes_turns = any("experts" in name.split(".") for name in adapted_layers)

    # ---- Requests ----------------------------------------------------------------------------------------------

    def _prefill_group(self, admissions: list[Admission]) -> Tensor:
        """Runs the prompts of each adapter separately, so that every layer needs only one adapter at a time."""
        numbers = [self._number_of(item.request) for item in admissions]
        logits: list[Tensor] = []
        for number in sorted(set(numbers)):
            self._runner.chosen.rows = number
            chosen = [item for item, own in zip(admissions, numbers, strict=True) if own == number]
            logits.append(super()._prefill_group(chosen))
        if len(logits) == 1:
            return logits[0]
        order = sorted(range(len(numbers)), key=lambda index: numbers[index])  # stable, so the order in which they ran
        return torch.cat(logits)[torch.tensor(order, device=self._device).argsort()]

    def _sampling_plan(self, first_row: int) -> SamplingPlan:
        """Updates the rows' adapters as well: it is called whenever the running samples or their order have changed."""
        if not first_row:
            requests = self._scheduler.rows.request[: self._scheduler.num_running]
            self._runner.decoded = rows_of(list(map(self._number_of, requests)), self._device)
        return super()._sampling_plan(first_row)

    def _number_of(self, request: Request) -> int:
        return self._numbers[request.params.adapter]

    # ---- Weights -----------------------------------------------------------------------------------------------

    def placeable_parameters(self) -> Mapping[str, Tensor]:
        """Returns none: a request may add an adapter on one rank."""
        return {}

    def load_weights(self, weights: NamedTensors, version: int) -> None:
        """Loads the adapters, with all weights or none of them: after the first sync, adapters may come alone."""
        self._require_open("load_weights")
        arriving = ArrivingAdapters(self._sizes)
        plain = arriving.taken_from(weights)
        first = next(plain, None)
        if first is not None:
            super().load_weights(chain([first], plain), version)
            self._take_others()
        given = arriving.factors()
        for name, pair in given.items():
            self._take(name, pair)
        self._runner.refresh()
        for name, pair in given.items():
            arriving.compare(name, pair, self._held(name))
        self._compare_others(arriving)
        raise_problems(arriving.account.problems(), f"Weight sync to version {version}")
        self._version = version

    def _take_others(self) -> None:
        for name, factors in self._others.items():
            for layer, pair in factors.items():
                self._take(layer, pair, self._numbers[name])

    def _compare_others(self, arriving: ArrivingAdapters) -> None:
        for name, factors in self._others.items():
            for layer, pair in factors.items():
                arriving.compare(label(name, layer), pair, self._held(layer, self._numbers[name]))

    def _take(self, name: str, given: Factors, number: int = 0) -> None:
        layer: Any = self.model.get_submodule(name)
        held, weight = factors_of(layer).get(number), layer.weight
        if held is None or held.down.shape != given.down.shape or held.down.device != weight.device:
            held = Factors(*(torch.empty_like(part, device=weight.device, dtype=weight.dtype) for part in given))
            factors_of(layer)[number] = held
        _copy(held, given)

    def _held(self, name: str, number: int = 0) -> Factors:
        """Returns an adapter as it is in the memory that the forward reads."""
        return factors_of(self.model.get_submodule(name))[number]


def factors_of(layer: nn.Module) -> dict[int, Factors]:
    """Returns the adapters of a layer of the engine's model, by number: 0 is the policy's."""
    found: dict[int, Factors] = getattr(layer, "adapter_factors", {})
    return found


@torch.no_grad()
def _copy(held: Factors, given: Factors) -> None:
    for target, source in zip(held, given, strict=True):
        target.copy_(source)


def _adapted(layer: nn.Module, forward: Callable[[Tensor], Tensor], chosen: ChosenAdapters, inputs: Tensor) -> Tensor:
    outputs, factors, rows = forward(inputs), factors_of(layer), chosen.rows
    if isinstance(rows, MixedRows):
        return rows.add(outputs, inputs, factors)
    return outputs + adapted(inputs, factors[rows]) if rows in factors else outputs


def build_adapted_engine(
    *, source: PreTrainedModel | None, others: Mapping[str, SavedAdapter], **parts: Any
) -> NativeEngine:
    """Makes a native engine that expects the adapters of the source, and holds others."""
    engine = build_native_engine(source=source, kind=AdaptedEngine, **parts)
    assert isinstance(engine, AdaptedEngine)
    assert source is not None, "build_native_engine() has refused that"
    engine.expect((name for name, _ in lora_layers(source)), others)
    return engine
