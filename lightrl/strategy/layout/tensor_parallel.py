"""Tensor parallelism of transformers models with DTensor: each rank of a group holds a part of every projection.

The model's own config says how each projection is cut (base_model_tp_plan). The embeddings, the output embedding and
the norms of hidden states stay whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from lightrl.models.multimodal import FAMILIES
from lightrl.models.packed_attention import check_heads, mixes_by_attention

# transformers' names of the known ways. The norms of queries and keys see only the heads of one rank, so they get
# SequenceParallel, which sums the gradient of their weight over the group; without it, ranks silently drift apart.
_STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "replicated_with_grad_allreduce": partial(SequenceParallel, sequence_dim=0, use_local_output=True),
}
_STAYS_WHOLE = "embedding_rowwise"


def check_splits(config: Any, *, tp_size: int, sp_size: int) -> None:
    """Raises ValueError for the transformers config of a model that cannot be split this way."""
    if tp_size == sp_size == 1:
        return
    if tp_size > 1 and config.model_type in FAMILIES:
        raise ValueError(
            f"Model type {config.model_type!r} takes images, and --tp_size {tp_size} cuts models of text alone. Use "
            "--tp_size 1; --sp_size splits their tokens."
        )
    text = config.get_text_config()
    if not mixes_by_attention(text):
        raise ValueError(
            f"Model type {config.model_type!r} has layers that run whole sequences, which --tp_size and --sp_size "
            "cannot split. Leave both at 1."
        )
    num_heads = text.num_attention_heads
    num_kv_heads = getattr(text, "num_key_value_heads", None) or num_heads
    if tp_size > 1:
        tensor_parallel_plan(text)
        if any(getattr(text, "activation_sparsity_pattern", None) or ()):
            raise ValueError(
                f"--tp_size cannot cut a model of type {config.model_type!r}: its activation_sparsity_pattern keeps "
                "the largest of all columns of an MLP, and a rank has a part of them. Use --tp_size 1 for this one."
            )
        if getattr(text, "clip_qkv", None) is not None:
            raise ValueError(
                f"--tp_size cannot cut a model of type {config.model_type!r} with clip_qkv {text.clip_qkv:g}: it clips "
                "queries, keys and values in place, which torch refuses for parts of a tensor. Use --tp_size 1 for "
                "this one."
            )
        columns = text.intermediate_size  # Gemma 3n has a list, with an entry for each layer
        num_columns = math.gcd(*columns) if isinstance(columns, list | tuple) else columns
        _check_cuts(
            {"attention heads": num_heads, "key-value heads": num_kv_heads, "MLP columns": num_columns}, tp_size
        )
    check_heads(num_heads // tp_size, num_kv_heads // tp_size, sp_size)


def _check_cuts(counts: dict[str, int], tp_size: int) -> None:
    if any(count % tp_size for count in counts.values()):
        smallest = min(counts.values())
        valid = [n for n in range(1, smallest + 1) if not any(count % n for count in counts.values())]
        text = ", ".join(f"{count} {name}" for name, count in counts.items())
        raise ValueError(f"--tp_size {tp_size} does not divide the model's {text}. Valid: {valid}.")


def tensor_parallel_plan(config: Any) -> dict[str, str]:
    """Returns {pattern of module names in the decoder: way to cut}; ValueError for a model without a known plan."""
    found: Mapping[str, str] = getattr(config, "base_model_tp_plan", None) or {}
    plan = {name: way for name, way in found.items() if way != _STAYS_WHOLE}
    unknown = sorted(set(plan.values()) - set(_STYLES))
    if unknown:
        reason = f"it has layers cut as {', '.join(unknown)}"
    elif not plan:
        reason = "transformers has no plan for it"
    elif getattr(config, "intermediate_size", None) is None:  # GPT-J and CodeGen, which have a plan since 5.24
        reason = "its config has no intermediate_size, the width of its MLPs"
    else:
        return plan
    raise ValueError(
        f"--tp_size cannot cut a model of type {config.model_type!r}: {reason}. It cuts dense models such as "
        "Llama, Mistral, Qwen2 and Qwen3; use --tp_size 1 for this one."
    )


def cut_projections(decoder: Any, mesh: DeviceMesh) -> None:
    """Reduces the decoder to this rank's part in place; its parameters must be on the meta device."""
    plan = tensor_parallel_plan(decoder.config)
    if any(hasattr(module, "base_layer") for module in decoder.modules()):
        raise ValueError("--tp_size cannot cut a model with LoRA adapters. Use --tp_size 1, or train without LoRA.")
    check_parameters(decoder)
    styles: dict[str, ParallelStyle] = {name: _STYLES[way]() for name, way in plan.items()}
    frozen = [name for name, parameter in decoder.named_parameters() if not parameter.requires_grad]
    parallelize_module(decoder, mesh, styles | {name: _SharedInput() for name in _blocks(plan)}, src_data_rank=None)
    for name in frozen:  # torch replaces them with new parameters that require gradients
        decoder.get_parameter(name).requires_grad_(False)


def _blocks(plan: Mapping[str, str]) -> set[str]:
    """Returns the patterns of modules whose input several cut projections share."""
    return {name.rpartition(".")[0] for name, way in plan.items() if way == "colwise"}


def check_parameters(decoder: Any) -> None:
    """Raises ValueError for a parameter beside cut projections that the decoder's plan does not name.

    It meets only this rank's heads or columns: its shape does not fit them, or its gradient lacks the other ranks'.
    """
    plan = tensor_parallel_plan(decoder.config)
    blocks = _blocks(plan)
    for name, _ in decoder.named_parameters():
        atoms = ["*" if atom.isdigit() else atom for atom in name.split(".")]
        owners = {".".join(atoms[:count]) for count in range(1, len(atoms))}
        if owners & blocks and not owners & plan.keys():
            raise ValueError(
                f"--tp_size cannot cut a model of type {decoder.config.model_type!r}: transformers' plan does not say "
                f"how to cut {name}, which belongs to a part that is cut. Use --tp_size 1 for this one."
            )


class _SharedInput(ParallelStyle):
    """Sums the gradient of an input of several projections over the group once, not once per projection."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_pre_hook(partial(_share_input, device_mesh), with_kwargs=True)
        return module


def _share_input(
    mesh: DeviceMesh, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if args:
        return (_replicated(args[0], mesh), *args[1:]), kwargs
    return args, kwargs | {"hidden_states": _replicated(kwargs["hidden_states"], mesh)}


def _replicated(hidden: Tensor, mesh: DeviceMesh) -> DTensor:
    return DTensor.from_local(hidden, mesh, (Replicate(),), run_check=False)
