"""Makes a native engine for the trainer's model: the same architecture with weights of its own, still unset."""

from __future__ import annotations

import logging
from typing import Any

import torch
from transformers import PreTrainedModel

from lightrl.config import StrategyOptions, engine_arguments
from lightrl.engines.base import EngineGroup
from lightrl.engines.native.engine import NativeEngine, eos_ids
from lightrl.models.multimodal import FAMILIES, MediaProcessor
from lightrl.models.policy import model_loader

logger = logging.getLogger(__name__)


def build_native_engine(
    *,
    source: PreTrainedModel | None,
    tokenizer: Any,
    options: StrategyOptions,
    device: torch.device,
    group: EngineGroup,
) -> NativeEngine:
    """source gives the architecture; its weights may be sharded, so they come by the first weight sync."""
    if source is None:
        raise ValueError("The native engine needs the actor: setup_inference_engine(args, 'native', actor=actor).")
    if engine_arguments(options):
        raise ValueError("The native engine takes no --engine_args: its options are --native.*.")
    if group.size > 1 and group.comm.is_main:
        logger.warning("The native engine has no tensor parallelism: the ranks of a group repeat each other's work.")
    dtype = torch.bfloat16 if options.dtype == "bfloat16" else torch.float32
    return NativeEngine(
        empty_copy(source, dtype, device),
        eos_token_ids=eos_ids(source, tokenizer),
        max_num_seqs=options.native.max_num_seqs,
        device=device,
        dtype=dtype,
        media=_media_of(source, options),
    )


def _media_of(source: PreTrainedModel, options: StrategyOptions) -> MediaProcessor | None:
    """The processor that lies beside the source's weights; none for a model that was made of a config alone."""
    if source.config.model_type not in FAMILIES or not source.name_or_path:
        return None
    return MediaProcessor.load(source.name_or_path, trust_remote_code=options.trust_remote_code)


@torch.no_grad()
def empty_copy(source: PreTrainedModel, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """The source's architecture with unset parameters and the source's buffers (rotary tables are in no checkpoint)."""
    config = type(source.config).from_dict(source.config.to_dict())
    with torch.device("meta"):
        model: PreTrainedModel = model_loader(config).from_config(config, dtype=dtype, attn_implementation="sdpa")
    model.to_empty(device=device)
    model.tie_weights()
    buffers = dict(source.named_buffers())
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    model.eval().requires_grad_(False)
    return model
