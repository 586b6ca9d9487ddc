"""Translates the run's options into the arguments of vllm.LLM()."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from lightrl.config import StrategyOptions, engine_arguments, nearest_name

_CPU_KV_BYTES = 256 << 20
_CPU_NUM_SEQS = 64  # decoding is slower with more of them
_MEDIA_PER_PROMPT = {"image": 8, "video": 2}

# Arguments that are decided by the run's options or by the engine itself, and the option in question.
_RESERVED = {
    "model": "--model",
    "tensor_parallel_size": "--engine_tp_size",
    "dtype": "--dtype",
    "trust_remote_code": "--trust_remote_code",
    "gpu_memory_utilization": "--engine_mem_fraction",
    "enable_sleep_mode": "--engine_sleep_level",
    "seed": "--seed",
    "distributed_executor_backend": "",
    "pipeline_parallel_size": "",
    "data_parallel_size": "",
    "load_format": "",
    "logprobs_mode": "",
    "skip_tokenizer_init": "",
    "tokenizer": "",
    "generation_config": "",
    "runner": "",
    "convert": "",
    "worker_cls": "",
}


def user_arguments(options: StrategyOptions, known: set[str]) -> dict[str, Any]:
    """Returns the arguments in --engine_args; raises ValueError for unknown ones and those the engine must decide."""
    given = engine_arguments(options)
    for name in given:
        if name in _RESERVED:
            hint = f"use {_RESERVED[name]}" if _RESERVED[name] else "the engine decides it"
            raise ValueError(f"--engine_args {name}=... is not possible: {hint}.")
        if name not in known:
            raise ValueError(f"--engine_args {name}=...: vLLM has no such argument. {nearest_name(name, known)}")
    return given


def known_arguments() -> set[str]:
    """Returns the names of vLLM's engine arguments."""
    from vllm import EngineArgs

    return {item.name for item in dataclasses.fields(EngineArgs)}


def llm_arguments(
    options: StrategyOptions,
    *,
    model: str,
    device: torch.device,
    tp_size: int,
    is_distributed: bool,
    takes_media: bool,
    states_context: bool = True,
) -> dict[str, Any]:
    """Returns all arguments of vllm.LLM(); states_context: whether the model's config says how long its context is."""
    arguments: dict[str, Any] = {
        "model": model,
        "load_format": "dummy",  # the weights come with the first sync
        "skip_tokenizer_init": not takes_media,
        "generation_config": "vllm",  # each request brings its sampling parameters and end tokens
        "tensor_parallel_size": tp_size,
        "dtype": options.dtype,
        "trust_remote_code": options.trust_remote_code,
        "logprobs_mode": "processed_logprobs",  # of the distribution that was sampled
        "seed": 0,  # the same on all ranks of a group; every request has its own seed
        "disable_log_stats": True,
    }
    if is_distributed:
        arguments["distributed_executor_backend"] = "external_launcher"
    if takes_media:
        arguments["limit_mm_per_prompt"] = dict(_MEDIA_PER_PROMPT)
        arguments["mm_processor_cache_gb"] = 0  # a prompt is processed once for all of its samples anyway
    # A step that is scheduled ahead would run with other weights than its tokens' version says.
    arguments["async_scheduling"] = False
    if states_context:
        # As much of it as fits: a long one would need more memory than many runs give the engine.
        arguments["max_model_len"] = -1
    if device.type == "cuda":
        arguments |= {
            "enable_sleep_mode": options.engine_sleep_level > 0,
            "gpu_memory_utilization": options.engine_mem_fraction,
        }
    else:
        arguments |= {
            "enforce_eager": True,
            "kv_cache_memory_bytes": _CPU_KV_BYTES,
            "max_num_seqs": _CPU_NUM_SEQS,
        }
    return arguments | user_arguments(options, known_arguments())
