"""The options of the native engine, and those that `--native.cpu_kernels` does not go with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightrl.c_library import find_compiler
from lightrl.config.options import option


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


def check_cpu_kernels(config: Any) -> None:
    """Raises ValueError for an option whose engine does not use the kernels, or if nothing can compile them."""
    reasons = (
        (f"engine {config.engine}", config.engine != "native", "only the native engine has them"),
        ("native.lookup", config.native.lookup > 0, "the engine that guesses runs several tokens of a row at a time"),
        ("exact", config.exact, "they round in another way than the trainer"),
        ("routing.replay", config.routing.replay, "no mixture of experts can use them"),
    )
    for name, is_refused, reason in reasons:
        if is_refused:
            raise ValueError(f"--native.cpu_kernels does not go with --{name}: {reason}. Leave one of them out.")
    try:
        find_compiler()
    except RuntimeError as error:
        raise ValueError(f"--native.cpu_kernels True: {error}") from error
