"""The options of the native engine, and those that they do not go with; adapters.py has those of LoRA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightrl.c_library import find_compiler
from lightrl.config.options import option, refuse_beside

_SHARDS = ("fsdp", "deepspeed", "megatron")  # a strategy of your own is asked when it has prepared its model


@dataclass(kw_only=True, slots=True)
class NativeEngineConfig:
    """Options of --engine native."""

    max_num_seqs: int = option(256, at_least=1)
    """Number of sequences decoded at the same time on a rank; more requests wait their turn."""
    lookup: int = option(0, at_least=0, at_most=64)
    """Number of tokens to guess per step, from what followed the same tokens earlier in the sample. Guesses do not
    change the samples; they save steps where texts repeat themselves and few samples run. 0: no guesses."""
    cuda_graphs: bool = True
    """On a GPU, replay decode steps as CUDA graphs: two to three times as fast. For Llama, Mistral, Qwen2 and Qwen3
    without adapters, guesses or --distributed.deterministic; has no effect elsewhere."""
    share_weights: bool = False
    """Let the engine read the trainer's own weights: they are in memory once, and a weight sync copies nothing.
    Strategies single and ddp in float32, without LoRA."""
    cpu_kernels: bool = False
    """On a CPU, use C kernels for everything but matrix products, and with AMX for these too; with AVX-512 VNNI also
    for the proofs of a weight sync. They are compiled at the start, in about a second, and need a C compiler. For
    Llama, Mistral, Qwen2 and Qwen3."""


def check_native(config: Any) -> None:
    """Raises ValueError for a run in which an option of the native engine does not go with another option."""
    if config.native.lookup:
        _check_lookup(config)
    if config.native.share_weights:
        _check_share_weights(config)
    if config.native.cpu_kernels:
        _check_cpu_kernels(config)


def _check_lookup(config: Any) -> None:
    """Raises ValueError for an option that guessing tokens (--native.lookup) cannot be combined with."""
    is_truncated = getattr(config, "is_truncated", False)
    reasons = (
        (f"engine {config.engine}", config.engine != "native", "only the native engine guesses"),
        ("exact", config.exact, "the bits of a token depend on how wide its forward is"),
        ("routing.replay", config.routing.replay, "the engine that records experts draws one token at a time"),
        ("top_p and --top_k", is_truncated, "the engine that reports what was left draws one token at a time"),
    )
    refuse_beside("native.lookup", reasons)


def _check_share_weights(config: Any) -> None:
    """Raises ValueError for an option with which trainer and engine do not have the same weights in one memory."""
    lora = getattr(config, "lora", None)
    rollout = getattr(config, "rollout", None)
    reasons = (
        (f"engine {config.engine}", config.engine != "native", "only the native engine reads the trainer's weights"),
        (f"strategy {config.strategy}", config.strategy in _SHARDS, "its ranks hold shards of the weights"),
        (f"dtype {config.dtype}", config.dtype != "float32", "the engine's weights are rounded to it"),
        (f"engine_sleep_level {config.engine_sleep_level}", config.engine_sleep_level == 2, "it drops the weights"),
        ("offload_while_generating", config.offload_while_generating, "it moves the weights away from the engine"),
        ("lora", lora is not None and lora.is_on, "the engine's weights have the adapters merged into them"),
        ("native.lookup", config.native.lookup > 0, "the engine that guesses keeps weights of its own"),
        ("exact", config.exact, "its engine keeps weights of its own"),
        ("routing.replay", config.routing.replay, "the engine that records experts keeps weights of its own"),
        ("rollout_ranks", getattr(config, "rollout_ranks", 0) > 0, "the ranks that generate have no trainer"),
        ("rollout.keep_cache", getattr(rollout, "keep_cache", False), "that engine keeps weights of its own"),
        ("top_p and --top_k", getattr(config, "is_truncated", False), "that engine keeps weights of its own"),
    )
    refuse_beside("native.share_weights", reasons)


def _check_cpu_kernels(config: Any) -> None:
    """Raises ValueError for an option whose engine does not use the kernels, or if nothing can compile them."""
    reasons = (
        (f"engine {config.engine}", config.engine != "native", "only the native engine has them"),
        ("native.lookup", config.native.lookup > 0, "the engine that guesses runs several tokens of a row at a time"),
        ("exact", config.exact, "they round in another way than the trainer"),
        ("routing.replay", config.routing.replay, "no mixture of experts can use them"),
    )
    refuse_beside("native.cpu_kernels", reasons)
    try:
        find_compiler()
    except RuntimeError as error:
        raise ValueError(f"--native.cpu_kernels True: {error}") from error
