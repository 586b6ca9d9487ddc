"""torch.compile for the blocks of a model that trains, each by itself; attention stays as it is.

Gathers and other hooks of a back end run around a block, outside of what is compiled.
"""

from __future__ import annotations

import os
import shutil
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from lightrl.models.packed_attention import ATTENTION_NAME, packed_attention

_COMPILED = "_forward_is_compiled"


def check_compiler(device: torch.device) -> None:
    """Else the first step would fail, deep inside torch."""
    compiler = os.environ.get("CXX", "g++")
    if device.type == "cpu" and shutil.which(compiler) is None:
        raise ValueError(
            f"--compile needs a C++ compiler and finds no {compiler!r}. Install g++, or name yours by CXX."
        )


def compile_blocks(model: nn.Module, backend: str = "inductor") -> None:
    """In place, and once; names of parameters stay."""
    # Its loop over the sequences of a pack would be compiled anew for every pack.
    AttentionInterface.register(ATTENTION_NAME, torch.compiler.disable(packed_attention))
    lists = [child for child in _decoder_of(model).children() if isinstance(child, nn.ModuleList)]
    for block in (block for group in lists for block in group):
        if not block.__dict__.get(_COMPILED, False):
            # Of any length: one graph for all numbers of tokens.
            block.forward = torch.compile(block.forward, dynamic=True, backend=backend)
            block.__dict__[_COMPILED] = True


def _decoder_of(model: nn.Module) -> nn.Module:
    """A vision tower is left alone: its shapes change with every image."""
    for module in model.modules():
        get_decoder: Any = getattr(module, "get_decoder", None)
        if callable(get_decoder):
            decoder: nn.Module = get_decoder()
            return decoder
    return model
