"""The memory of adapters that an engine applies unmerged (--lora.engine unmerged, --lora.others)."""

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

Ranks = Mapping[str, int]  # ranks of an adapter, by layer

# Engines compute these layers, and their adapters, as one product; the native engine does so in its fused forward.
_PRODUCTS = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sides:
    """Elements of a rank-1 adapter on both sides of layers: those that each rank holds whole, and those it shares."""

    whole: int = 0
    cut: int = 0

    def __add__(self, other: Sides) -> Sides:
        return Sides(whole=self.whole + other.whole, cut=self.cut + other.cut)

    def on_a_rank(self, size: int, *, is_whole_cut: bool = False) -> float:
        """Returns the elements on one of `size` ranks of an engine."""
        return (self.whole / size if is_whole_cut else self.whole) + self.cut / size


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Slots:
    """The adapter slots that vLLM and SGLang allocate for the layers of a language model."""

    linear: Mapping[str, Sides]  # all blocks, by the product that computes the layers
    experts: Sides  # experts that are one tensor
    embeddings: int  # elements, including the output head; each rank has all


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class EngineAdapters:
    """The adapters that an engine applies: the policy's first, then those of --lora.others."""

    ranks: Sequence[Ranks]
    sizes: Mapping[str, tuple[int, int]]  # inputs and outputs of each linear layer
    products: Sequence[Sequence[str]]  # layers that the native engine computes together
    slots: Slots
    in_decoder: bool = True  # whether the policy's lie in the decoder alone, and none in a vision tower
    unread: tuple[str, ...] = ()  # reasons why adapters are not counted

    def native_numel(self) -> int:
        """Returns the elements in the native engine: layers of a product lie side by side, with zeros between."""
        total = 0
        for layers in self.products:
            rank = sum(ranks.get(layer, 0) for ranks in self.ranks for layer in layers)
            total += rank * (self.sizes[layers[0]][0] + sum(self.sizes[layer][1] for layer in layers))
        return total

    def vllm_numel(self, config: RolloutConfig, *, is_accelerator: bool) -> float:
        """Returns the elements of a rank's slots: max_loras of rank max_lora_rank for all layers, adapted or not."""
        given, size = engine_arguments(config), config.engine_tp_size
        count = int(given.get("max_loras", len(self.ranks) + (not is_accelerator)))  # plus one of zeros on a CPU
        room = int(given.get("max_lora_rank", room_of(self._largest_rank())))
        layers = sum(self.slots.linear.values(), self.slots.experts)
        beside = layers.on_a_rank(size, is_whole_cut=bool(given.get("fully_sharded_loras")))
        return count * room * (beside + self.slots.embeddings)

    def sglang_numel(self, config: RolloutConfig) -> float:
        """Returns the elements of the slots: one per adapter and one of zeros, for all layers of an adapted kind."""
        adapted = {_product(layer) for ranks in self.ranks for layer in ranks}
        layers = sum((self.slots.linear.get(product, Sides()) for product in adapted), Sides())  # others are refused
        return (len(self.ranks) + 1) * self._largest_rank() * layers.on_a_rank(config.engine_tp_size)

    def _largest_rank(self) -> int:
        return max(rank for ranks in self.ranks for rank in ranks.values())


def described_adapters(options: LoraConfig, policy: Model) -> EngineAdapters:
    """Returns the adapters that an engine applies unmerged, according to a run's options (--lora)."""
    plain = plain_of(policy.hf_config)
    linear = [name for name, layer in plain.named_modules() if isinstance(layer, nn.Linear | Conv1D)]
    ranks, unread = [_own_ranks(policy)], []
    for name, folder in other_adapters(options).items():
        try:
            ranks.append(described_ranks(name, folder, plain))
        except (OSError, TypeError, ValueError) as error:
            unread.append(str(error))
    modules, inside = dict(plain.named_modules()), set(plain.get_decoder().modules())
    return EngineAdapters(
        ranks=ranks,
        sizes=layer_sizes(plain, linear),
        products=_products(linear, is_fused=is_supported(plain)),
        slots=_slots(plain),
        in_decoder=all(modules[name] in inside for name in ranks[0]),
        unread=tuple(unread),
    )


def _own_ranks(policy: Model) -> Ranks:
    part = ".lora_A."
    own = [weight for weight in policy.weights if part in weight.name]
    # The wrapper's own name for the model comes first.
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
    """Counts linear layers below the output head, experts that are one tensor, embeddings and the head."""
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
