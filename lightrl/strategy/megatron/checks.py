"""Checks at start what --strategy megatron cannot do; each error names the option or the part of the model."""

from __future__ import annotations

from typing import Any

from torch import nn

from lightrl.config import StrategyOptions
from lightrl.models.packed_attention import varies_with_length
from lightrl.strategy.megatron import deepseek
from lightrl.strategy.megatron.parts import Sizes, padded_rows

FAMILIES = ("deepseek_v3", "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")


def check_options(options: StrategyOptions) -> None:
    """Raises ValueError for options that this strategy does not support, or that contradict each other."""
    megatron = options.megatron
    for is_asked, option, instead in (
        (
            megatron.impl == "te",
            "--megatron.impl te",
            "Transformer Engine's layers are not built (docs/megatron.md): use local",
        ),
        (options.sp_size > 1, f"--sp_size {options.sp_size}", "split tokens by --megatron.cp_size"),
        (options.compile, "--compile", "leave it out"),
        (options.gradient_checkpointing, "--gradient_checkpointing", "use --megatron.recompute full"),
        (options.optim.name != "adamw", f"--optim.name {options.optim.name}", "use adamw"),
        (options.routing.has_losses, "--routing.balance_coef and --routing.z_coef", "use --strategy fsdp"),
    ):
        if is_asked:
            raise ValueError(f"--strategy megatron does not take {option}: {instead}.")
    if megatron.sequence_parallel and options.tp_size == 1:
        raise ValueError("--megatron.sequence_parallel True splits tokens over the ranks of --tp_size, which is 1.")
    if megatron.vpp_size > 1 and megatron.pp_size < 3:
        raise ValueError(
            f"--megatron.vpp_size {megatron.vpp_size} needs --megatron.pp_size of 3 or more, not {megatron.pp_size}: "
            "with two stages the one before and the one after are the same rank, and their messages may be mixed up."
        )


def check_model(model: nn.Module, config: Any, sizes: Sizes, *, sequence_parallel: bool) -> None:
    """Raises ValueError for a model that this layout cannot spread."""
    if any(".lora_A." in name for name, _ in model.named_parameters()):
        raise ValueError("--strategy megatron does not train LoRA adapters yet. Use --strategy fsdp, or no --lora.")
    check_config(config, sizes, sequence_parallel=sequence_parallel)


def check_config(config: Any, sizes: Sizes, *, sequence_parallel: bool) -> None:
    """Raises ValueError for the transformers config of a model that this layout cannot spread."""
    kind = config.model_type
    if kind not in FAMILIES:
        raise ValueError(
            f"--strategy megatron has no table for models of type {kind!r}. It has one for {', '.join(FAMILIES)}; use "
            "--strategy fsdp for others and for models with images."
        )
    is_deepseek = kind == deepseek.KIND
    found = _unknown_part(config) or (deepseek.refused_part(config) if is_deepseek else "")
    if found:
        raise ValueError(f"--strategy megatron does not build {found} of this {kind} model. Use --strategy fsdp.")
    if is_deepseek:
        deepseek.check_sizes(sizes)
    _check_counts(config, sizes)
    _check_experts(config, sizes, sequence_parallel=sequence_parallel)


def _unknown_part(config: Any) -> str:
    """Names the first part of a config that the layers do not support."""
    layers = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    is_sparse = num_experts(config) > 0
    uneven = getattr(config, "mlp_only_layers", None) or getattr(config, "decoder_sparse_step", 1) != 1
    for is_there, name in (
        (bool(layers), f"layers of {', '.join(sorted(layers))}"),
        (window is not None, f"the sliding window of {window} tokens"),
        (config.hidden_act != "silu", f"the activation {config.hidden_act}"),
        (getattr(config, "mlp_bias", False), "the biases of the MLP"),
        (getattr(config, "attention_bias", False), "the bias of the attention's output"),
        (is_sparse and bool(uneven), "layers without experts between those with them"),
        (varies_with_length(config), "the rotary embedding that varies with the length"),
    ):
        if is_there:
            return name
    return ""


def num_experts(config: Any) -> int:
    """Returns the number of experts in a layer; 0 for a dense model."""
    return int(getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None) or 0)


def _check_counts(config: Any, sizes: Sizes) -> None:
    width = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    counts = [
        ("--tp_size", sizes.tp, "attention heads", config.num_attention_heads),
        ("--tp_size", sizes.tp, "key-value heads", config.num_key_value_heads),
        ("--megatron.pp_size x --megatron.vpp_size", sizes.pp * sizes.vpp, "layers", config.num_hidden_layers),
    ]
    if num_experts(config):
        counts += [
            ("--megatron.ep_size", sizes.ep, "experts", num_experts(config)),
            ("--megatron.etp_size", sizes.etp, "columns of an expert", width),
        ]
    else:
        counts += [("--tp_size", sizes.tp, "MLP columns", config.intermediate_size)]
    for option, size, what, count in counts:
        if count % size:
            valid = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
            raise ValueError(f"{option} {size} does not divide the model's {count} {what}. Valid: {valid}.")
    num_tokens = config.vocab_size
    if padded_rows(num_tokens, sizes.tp) // sizes.tp * (sizes.tp - 1) >= num_tokens:
        raise ValueError(
            f"--tp_size {sizes.tp} leaves a rank without a token of this model's vocabulary of {num_tokens}, which is "
            "split into equal parts and padded at the end. Use a smaller --tp_size."
        )


def _check_experts(config: Any, sizes: Sizes, *, sequence_parallel: bool) -> None:
    if not num_experts(config):
        if sizes.ep > 1 or sizes.etp > 1:
            raise ValueError(
                f"--megatron.ep_size {sizes.ep} and --megatron.etp_size {sizes.etp} split experts, and this "
                f"{config.model_type} model has none. Leave both at 1."
            )
        return
    if sizes.tp > 1 and not sequence_parallel:
        raise ValueError("A model with experts needs --megatron.sequence_parallel True where --tp_size is above 1.")
    if sizes.tp > 1 and sizes.ep == 1 and sizes.etp == 1:
        # megatron-core 0.16.1 then leaves the gradients of experts unreduced over the ranks of --tp_size.
        raise ValueError(
            f"A model with experts and --tp_size {sizes.tp} needs --megatron.etp_size {sizes.tp} or a "
            "--megatron.ep_size above 1: with neither, megatron-core trains it wrongly and says nothing."
        )
