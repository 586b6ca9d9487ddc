"""How a model computes: mixed precision, gradient checkpointing and torch.compile, set up by patches of its forward.

autocast and torch.compile must wrap the forward, and torch has no hook that runs around it. The hooks of a back end,
such as the gathers of FSDP, run outside the wrapped function.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import shutil
import textwrap
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from lightrl.models.packed_attention import ATTENTION_NAME, packed_attention
from lightrl.models.policy import persistent_buffers

_COMPILED = "_forward_is_compiled"
_IN_FLOAT32 = re.compile(r"\.float\(\)$|\.(to|type)\((dtype=)?torch\.float(32)?\)$")  # the end of a cast


def check_compiler(device: torch.device) -> None:
    """Raises ValueError if --compile would fail deep inside torch because there is no C++ compiler."""
    compiler = os.environ.get("CXX", "g++")
    if device.type == "cpu" and shutil.which(compiler) is None:
        raise ValueError(
            f"--compile needs a C++ compiler and finds no {compiler!r}. Install g++, or name yours by CXX."
        )


def compile_blocks(model: nn.Module, backend: str = "inductor") -> None:
    """Compiles each block of a model separately and in place, once; the names of parameters do not change.

    Attention is not compiled: its loop over the sequences of a pack would be recompiled for every pack.
    """
    AttentionInterface.register(ATTENTION_NAME, torch.compiler.disable(packed_attention))
    lists = [child for child in _decoder_of(model).children() if isinstance(child, nn.ModuleList)]
    for block in (block for group in lists for block in group):
        if not block.__dict__.get(_COMPILED, False):
            # dynamic: one graph for any number of tokens
            block.forward = torch.compile(block.forward, dynamic=True, backend=backend)
            block.__dict__[_COMPILED] = True


def _decoder_of(model: nn.Module) -> nn.Module:
    """Returns the language model inside a model; shapes in a vision tower would change with every image."""
    for module in model.modules():
        get_decoder: Any = getattr(module, "get_decoder", None)
        if callable(get_decoder):
            decoder: nn.Module = get_decoder()
            return decoder
    return model


def use_deterministic_kernels() -> None:
    """Makes torch refuse operations whose results differ in their bits from run to run."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is not deterministic without it
    torch.use_deterministic_algorithms(True)


def compute_in_bfloat16(model: nn.Module, device: torch.device) -> None:
    """Runs the forward in bfloat16, as under FSDP's mixed precision; the parameters keep their type.

    autocast would also run F.linear(x.float(), weight.float()) in bfloat16, as many routers have it. Modules that cast
    in this way run without autocast.
    """
    for module in model.modules():
        products, called = _products_of(type(module).forward)
        if products and all(products) and not any(_has_parameters(getattr(module, name, None)) for name in called):
            module.forward = torch.autocast(device.type, enabled=False)(module.forward)
    model.forward = torch.autocast(device.type, dtype=torch.bfloat16)(model.forward)


def autocast_beside_matrix_buffers(model: nn.Module, device: torch.device) -> None:
    """Runs modules that multiply by matrices kept as buffers, such as the decays of MiniMax, under autocast.

    FSDP casts parameters to bfloat16 and leaves buffers in float32, and a product of the two fails.
    """
    matrices = [name for name, item in persistent_buffers(model) if item.is_floating_point() and item.ndim > 1]
    for owner in sorted({name.rpartition(".")[0] for name in matrices}):
        module = model.get_submodule(owner)
        module.forward = torch.autocast(device.type, dtype=torch.bfloat16)(module.forward)


@cache
def _products_of(forward: Callable[..., Any]) -> tuple[tuple[bool, ...], frozenset[str]]:
    """Reads a forward: whether each F.linear has a weight cast to float32, and the attributes called."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except (OSError, TypeError, SyntaxError):  # written in C or in a session, with text to the left of it, or a lambda
        return (), frozenset()
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    names = [ast.unparse(call.func) for call in calls]
    weights = [
        ast.unparse(call.args[1]) if len(call.args) > 1 else ""
        for call, name in zip(calls, names, strict=True)
        if name.endswith(("F.linear", "functional.linear"))
    ]
    called = frozenset(name.removeprefix("self.") for name in names if re.fullmatch(r"self\.\w+", name))
    return tuple(_IN_FLOAT32.search(weight) is not None for weight in weights), called


def _has_parameters(part: Any) -> bool:
    """Returns whether a part would meet parameters in float32, which do not fit its input without autocast."""
    return isinstance(part, nn.Module) and next(part.parameters(), None) is not None


def enable_gradient_checkpointing(model: Any) -> None:
    """Makes a transformers model recompute activations in the backward; refuses other models that train."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        return
    body = getattr(model, "body", model)  # a critic's
    options = {"use_reentrant": False}
    if hasattr(body, "activation_checkpointing_enable"):  # since transformers 5.24, which has the old name until 6
        body.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
    elif hasattr(body, "gradient_checkpointing_enable"):
        body.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    else:
        raise ValueError(f"--gradient_checkpointing needs a transformers model, not {type(model).__name__}.")
