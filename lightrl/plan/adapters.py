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

# The fused forward of the native engine computes these as one product, and their adapters, too.
_PRODUCTS = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Slots:
    """What vLLM makes room for beside all layers of a model, in elements of a slot of rank 1."""

    whole: int  # sides of layers that each rank has
    cut: int  # sides that the ranks of an engine share
    embeddings: int  # and the output head, which each rank has


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
        room = int(given.get("max_lora_rank", room_of(max(rank for ranks in self.ranks for rank in ranks.values()))))
        whole = self.slots.whole / size if given.get("fully_sharded_loras") else self.slots.whole
        return count * room * (whole + self.slots.cut / size + self.slots.embeddings)


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
        found.setdefault(f"{parent}.{_PRODUCTS.get(last, last) if is_fused else last}", []).append(name)
    return list(found.values())


def _slots(plain: Any) -> Slots:
    """Counts the linear layers below the output head, experts that are one tensor, and both ends of the model."""
    text, decoder = plain.config.get_text_config(), plain.get_decoder()
    plan = getattr(text, "base_model_tp_plan", None) or {}
    by_columns = {path.rpartition(".")[2] for path, way in plan.items() if way == "rowwise"}
    whole = cut = 0
    linear = [name for name, layer in decoder.named_modules() if isinstance(layer, nn.Linear | Conv1D)]
    for name, (inputs, outputs) in layer_sizes(decoder, linear).items():
        is_by_columns = name.rpartition(".")[2] in by_columns
        whole += outputs if is_by_columns else inputs
        cut += inputs if is_by_columns else outputs
    for name, weight in decoder.named_parameters():
        if ".experts." in name and weight.dim() == 3:
            parts = 2 if "gate_up" in name else 1
            width = weight[0].numel() // text.hidden_size
            whole += weight.shape[0] * parts * text.hidden_size
            cut += weight.shape[0] * width
    return Slots(whole=whole, cut=cut, embeddings=2 * (text.vocab_size + text.hidden_size))
