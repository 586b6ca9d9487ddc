"""The memory of the adapters that an engine applies beside its weights (--lora.engine unmerged, --lora.others)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from lightrl.config import LoraConfig, RolloutConfig, engine_arguments
from lightrl.config.adapters import other_adapters
from lightrl.engines.native.forward import is_supported
from lightrl.engines.vllm.adapted import room_of
from lightrl.engines.weights.adapters import layer_sizes
from lightrl.models.saved_adapters import described_ranks
from lightrl.plan.models import Model, plain_of

Ranks = Mapping[str, int]  # of an adapter, by the layers that it stands beside

# Engines compute these as one product, and their adapters, too; the native one does so in its fused forward.
_PRODUCTS = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sides:
    """The two sides of layers, in elements of an adapter of rank 1: those of each rank, and those that ranks share."""

    whole: int = 0
    cut: int = 0

    def __add__(self, other: Sides) -> Sides:
        return Sides(whole=self.whole + other.whole, cut=self.cut + other.cut)

    def on_a_rank(self, size: int, *, is_whole_cut: bool = False) -> float:
        """Returns the elements on one of `size` ranks of an engine."""
        return (self.whole / size if is_whole_cut else self.whole) + self.cut / size


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Slots:
    """What vLLM and SGLang make room for beside the layers of a language model."""

    linear: Mapping[str, Sides]  # in all blocks, by the product that computes them
    experts: Sides  # that are one tensor
    embeddings: int  # and the output head, which each rank has; elements


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class EngineAdapters:
    """The adapters beside the weights of an engine: the policy's first, and then those of --lora.others."""

    ranks: Sequence[Ranks]
    sizes: Mapping[str, tuple[int, int]]  # inputs and outputs of each linear layer
    products: Sequence[Sequence[str]]  # the layers that the native engine computes at once
    slots: Slots
    unread: tuple[str, ...] = ()  # why an adapter is left out

    def native_numel(self) -> int:
        """Returns the elements that the native engine holds: those of a product side by side, with zeros between."""
        total = 0
        for layers in self.products:
            rank = sum(ranks.get(layer, 0) for ranks in self.ranks for layer in layers)
            total += rank * (self.sizes[layers[0]][0] + sum(self.sizes[layer][1] for layer in layers))
        return total

    def vllm_numel(self, config: RolloutConfig, *, is_accelerator: bool) -> float:
        """Returns the elements of a rank's slots: max_loras of rank max_lora_rank, whatever layers have adapters."""
        given, size = engine_arguments(config), config.engine_tp_size
        count = int(given.get("max_loras", len(self.ranks) + (not is_accelerator)))  # and one of zeros, on a CPU
        room = int(given.get("max_lora_rank", room_of(self._largest_rank())))
        layers = sum(self.slots.linear.values(), self.slots.experts)
        beside = layers.on_a_rank(size, is_whole_cut=bool(given.get("fully_sharded_loras")))
        return count * room * (beside + self.slots.embeddings)

    def sglang_numel(self, config: RolloutConfig) -> float:
        """Returns the elements of the slots: one for each adapter and one of zeros, beside all layers of a kind."""
        adapted = {_product(layer) for ranks in self.ranks for layer in ranks}
        layers = sum((self.slots.linear.get(product, Sides()) for product in adapted), Sides())  # else it is refused
        return (len(self.ranks) + 1) * self._largest_rank() * layers.on_a_rank(config.engine_tp_size)

    def _largest_rank(self) -> int:
        return max(rank for ranks in self.ranks for rank in ranks.values())


def described_adapters(options: LoraConfig, policy: Model) -> EngineAdapters:
    """Returns the adapters that an engine applies unmerged, by the options of a run (--lora)."""
    plain = plain_of(policy.hf_config)
    linear = [name for name, layer in plain.named_modules() if isinstance(layer, nn.Linear | Conv1D)]
    ranks, unread = [_own_ranks(policy)], []
    for name, folder in other_adapters(options).items():
        try:
            ranks.append(described_ranks(name, folder, plain))
        except (OSError, TypeError, ValueError) as error:
            unread.append(str(error))
    return EngineAdapters(
        ranks=ranks,
        sizes=layer_sizes(plain, linear),
        products=_products(linear, is_fused=is_supported(plain)),
        slots=_slots(plain),
        unread=tuple(unread),
    )


def _own_ranks(policy: Model) -> Ranks:
    part = ".lora_A."
    own = [weight for weight in policy.weights if part in weight.name]
    # The wrapper's name of the model comes first.
    return {weight.name.partition(part)[0].partition(".")[2]: weight.shape[0] for weight in own}


def _products(layers: Iterable[str], *, is_fused: bool) -> list[list[str]]:
    found: dict[str, list[str]] = {}
    for name in layers:
        parent, _, last = name.rpartition(".")
        found.setdefault(f"{parent}.{_product(name) if is_fused else last}", []).append(name)
    return list(found.values())


def _product(layer: str) -> str:
    last = layer.rpartition(".")[2]
    return _PRODUCTS.get(last, last)


def _slots(plain: Any) -> Slots:
    """Counts the linear layers below the output head, experts that are one tensor, and both ends of the model."""
    text, decoder = plain.config.get_text_config(), plain.get_decoder()
    plan = getattr(text, "base_model_tp_plan", None) or {}
    by_columns = {path.rpartition(".")[2] for path, way in plan.items() if way == "rowwise"}
    linear: dict[str, Sides] = {}
    names = [name for name, layer in decoder.named_modules() if isinstance(layer, nn.Linear | Conv1D)]
    for name, (inputs, outputs) in layer_sizes(decoder, names).items():
        whole, cut = (outputs, inputs) if name.rpartition(".")[2] in by_columns else (inputs, outputs)
        linear[_product(name)] = linear.get(_product(name), Sides()) + Sides(whole=whole, cut=cut)
    experts = Sides()
    for name, weight in decoder.named_parameters():
        if ".experts." in name and weight.dim() == 3:
            parts = 2 if "gate_up" in name else 1
            width = weight[0].numel() // text.hidden_size
            experts += Sides(whole=weight.shape[0] * parts * text.hidden_size, cut=weight.shape[0] * width)
    return Slots(linear=linear, experts=experts, embeddings=2 * (text.vocab_size + text.hidden_size))
