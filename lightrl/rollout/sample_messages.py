"""Encodes values for other processes as JSON and tensors in one safetensors message. Reading it runs no code.

A group of samples has several short tensors for each sample. All tensors of one type are therefore joined into one:
saving and loading them separately took longer than making the samples.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

_TENSOR = "tensor:"  # begins the list that stands for a tensor: its type, its index among that type, its shape


def to_bytes(value: Any) -> bytes:
    """Encodes a value of dicts, lists, texts, numbers, None and tensors as bytes; floats keep every bit."""
    tensors: dict[str, list[Tensor]] = {}  # flat, by type
    content = _without_tensors(value, tensors)
    sizes = {kind: [tensor.numel() for tensor in parts] for kind, parts in tensors.items()}
    text = json.dumps([sizes, content]).encode()
    return len(text).to_bytes(8, "little") + text + save({kind: torch.cat(parts) for kind, parts in tensors.items()})


def from_bytes(content: bytes) -> Any:
    """Decodes the result of to_bytes(); tuples come back as lists."""
    end = 8 + int.from_bytes(content[:8], "little")
    sizes, value = json.loads(content[8:end])
    return _with_tensors(value, {kind: flat.split(sizes[kind]) for kind, flat in load(content[end:]).items()})


def _without_tensors(value: Any, tensors: dict[str, list[Tensor]]) -> Any:
    if isinstance(value, Tensor):
        parts = tensors.setdefault(str(value.dtype), [])
        parts.append(value.reshape(-1))
        return [_TENSOR, str(value.dtype), len(parts) - 1, *value.shape]
    if isinstance(value, Mapping):
        return {key: _without_tensors(item, tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_tensors(item, tensors) for item in value]
    return value


def _with_tensors(value: Any, tensors: Mapping[str, Sequence[Tensor]]) -> Any:
    if isinstance(value, list):
        if value and value[0] == _TENSOR:
            _, kind, index, *shape = value
            return tensors[kind][index].view(shape)
        return [_with_tensors(item, tensors) for item in value]
    if isinstance(value, dict):
        return {key: _with_tensors(item, tensors) for key, item in value.items()}
    return value
