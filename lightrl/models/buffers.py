"""Completes models without weights: buffers that no checkpoint holds, such as rotary frequencies, and gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel


@torch.no_grad()
def compute_buffers(model: PreTrainedModel) -> None:
    """Computes the value of every buffer, for a model whose memory was never initialised.

    Modules with buffers are initialised in the way in which transformers does it when it loads a model. A buffer that a
    checkpoint holds cannot be computed; a ValueError names it.
    """
    saved = [name for name, _ in model.named_buffers() if name in model.state_dict()]
    if saved:
        raise ValueError(
            f"{type(model).__name__} keeps {saved[0]} in its checkpoint beside its parameters, so that it cannot be "
            "computed from the configuration: load the model with its weights."
        )
    _compute(model, model)


def _compute(module: nn.Module, owner: PreTrainedModel) -> None:
    owner = module if isinstance(module, PreTrainedModel) else owner  # a part such as a vision tower has its own rules
    if module._buffers or module is owner:  # a model may compute those of its layers
        owner._init_weights(module)
    for child in module.children():
        _compute(child, owner)


def as_loaded(model: Any) -> Any:
    """Makes a model on the meta device train what from_pretrained() does on rank 0: not all that its class freezes."""
    for tensor in model.requires_grad_().state_dict(keep_vars=True).values():
        tensor._is_hf_initialized = True  # as if loaded: a model's own code may read values where it makes new weights
    model.initialize_weights()
    return model
