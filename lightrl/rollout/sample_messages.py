"""Values on their way between processes: JSON beside tensors in one safetensors text. Reading one runs no code."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from safetensors.torch import load, save
from torch import Tensor

_TENSOR = "tensor:"  # begins the text that stands for a tensor


def to_bytes(value: Any) -> bytes:
    """Returns a value of dicts, lists, texts, numbers, None and tensors as bytes; floats keep every bit."""
    tensors: dict[str, Tensor] = {}
    text = json.dumps(_without_tensors(value, tensors)).encode()
    return len(text).to_bytes(8, "little") + text + save(tensors)


def from_bytes(content: bytes) -> Any:
    """Returns the value that to_bytes() wrote; tuples come back as lists."""
    length = int.from_bytes(content[:8], "little")
    return _with_tensors(json.loads(content[8 : 8 + length]), load(content[8 + length :]))


def _without_tensors(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        name = f"{_TENSOR}{len(tensors)}"
        tensors[name] = value.contiguous()
        return [_TENSOR, name]
    if isinstance(value, Mapping):
        return {key: _without_tensors(item, tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_tensors(item, tensors) for item in value]
    return value


def _with_tensors(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        if len(value) == 2 and value[0] == _TENSOR:
            return tensors[value[1]]
        return [_with_tensors(item, tensors) for item in value]
    if isinstance(value, dict):
        return {key: _with_tensors(item, tensors) for key, item in value.items()}
    return value
