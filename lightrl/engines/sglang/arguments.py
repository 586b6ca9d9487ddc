"""Translates lightrl's options into the arguments of sglang.Engine; pure, so that it is tested without SGLang."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import Any

from lightrl.config import StrategyOptions, engine_arguments, nearest_name
from lightrl.engines.sglang.loader import LOADER
from lightrl.seeding import mix_seed

SPARE_PLACES = 8  # SGLang takes prompts and answers up to a few tokens below its context length
_CPU_POOL_TOKENS = 32_768  # otherwise the cache takes a share of all memory
_OPTION_FOR = {  # SGLang's arguments that lightrl sets, and the options that they follow
    "model_path": "--model",
    "dtype": "--dtype",
    "tp_size": "--engine_tp_size",
    "mem_fraction_static": "--engine_mem_fraction",
    "trust_remote_code": "--trust_remote_code",
    "random_seed": "--seed",
    "device": "--distributed.device",
    "base_gpu_id": "",
    "gpu_id_step": "",
    "nccl_port": "",
    "dist_init_addr": "",
    "nnodes": "",
    "node_rank": "",
    "dp_size": "",
    "pp_size": "",
    "enable_dp_attention": "",
    "load_format": "",
    "custom_weight_loader": "",
    "skip_tokenizer_init": "",
    "enable_memory_saver": "",
    "custom_sigquit_handler": "",
    "tokenizer_worker_num": "",
    "weight_version": "",
    "speculative_algorithm": "",
    "enable_lora": "--lora.engine",
    "max_lora_rank": "--lora.rank",  # with a larger one, the parts of an adapter are not where they are written
    "max_loras_per_batch": "",
    "max_loaded_loras": "",
    "lora_paths": "--lora.others",
    "lora_target_modules": "--lora.target_modules",
}


def server_arguments(
    options: StrategyOptions,
    *,
    model_path: str,
    context_length: int | None,
    is_cpu: bool,
    gpu: int,
    tp_size: int,
    random_seed: int,
    nccl_port: int,
    known: Collection[str],
) -> dict[str, Any]:
    """Returns the arguments of Engine(); `known` has the names of SGLang's arguments.

    `gpu` is the first of tp_size consecutive devices of this machine.
    """
    given = engine_arguments(options)
    _check_given(given, known)
    context = given.pop("context_length", context_length)
    ours = {
        "model_path": model_path,
        "trust_remote_code": options.trust_remote_code,
        "dtype": options.dtype,
        "tp_size": tp_size,
        "random_seed": random_seed,
        "mem_fraction_static": options.engine_mem_fraction,
        "device": "cpu" if is_cpu else "cuda",
        "base_gpu_id": 0 if is_cpu else gpu,
        "nccl_port": nccl_port,
        "skip_tokenizer_init": True,
        "load_format": "dummy",  # the first weight sync brings the weights
        "custom_weight_loader": [LOADER],
        "enable_memory_saver": not is_cpu,  # its library needs a CUDA driver
    }
    if context is not None:
        ours["context_length"] = int(context) + SPARE_PLACES
    return {**_defaults(is_cpu), **given, **ours}


def _defaults(is_cpu: bool) -> dict[str, Any]:
    defaults: dict[str, Any] = {"log_level": "error", "grammar_backend": "none"}
    if is_cpu:
        defaults |= {
            "attention_backend": "torch_native",
            "mm_attention_backend": "sdpa",
            "sampling_backend": "pytorch",
            "disable_cuda_graph": True,
            "max_total_tokens": _CPU_POOL_TOKENS,
        }
    return defaults


def _check_given(given: Mapping[str, Any], known: Collection[str]) -> None:
    for name in given:
        if name not in known:
            raise ValueError(f"--engine_args: sglang has no argument {name!r}. {nearest_name(name, set(known))}")
        if name in _OPTION_FOR:
            instead = f" Use {_OPTION_FOR[name]}." if _OPTION_FOR[name] else ""
            raise ValueError(f"--engine_args: {name} is set by lightrl and cannot be given.{instead}")


def engine_seed(seed: int, rank: int, group_size: int) -> int:
    """Returns a seed for each group of ranks, since engines with equal seeds would draw the same samples."""
    return mix_seed(seed, rank // group_size) % 2**31


def environment_for_start(environment: Mapping[str, str], *, is_cpu: bool, tp_size: int) -> dict[str, str]:
    """Returns the environment with which SGLang's processes should start, based on this process's."""
    wanted = dict(environment)
    # Image features of older weights outlive weight updates and flushes in this cache. This can go when a flush
    # clears it (0.5.23: not yet): https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/managers/mm_schedule.py
    wanted["SGLANG_VLM_CACHE_SIZE_MB"] = "0"
    wanted["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"  # for SPARE_PLACES
    wanted.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # its own process groups are independent of torchrun's
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):  # the memory saver cannot move such segments
        kept = [part for part in wanted.get(name, "").split(",") if part and "expandable_segments" not in part]
        wanted.pop(name, None)
        if kept:
            wanted[name] = ",".join(kept)
    if is_cpu:
        wanted.setdefault("OMP_NUM_THREADS", "1")  # two busy-waiting threads per core are ten times slower
        if tp_size > 1:  # otherwise it demands one rank per memory node of the machine
            cores = sorted(os.sched_getaffinity(0))
            binding = "|".join(str(cores[rank % len(cores)]) for rank in range(tp_size))
            wanted.setdefault("SGLANG_CPU_OMP_THREADS_BIND", binding)
    return wanted
