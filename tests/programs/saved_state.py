"""Saves the state of a part as checkpoints do, and reads it."""

from __future__ import annotations

import io
from typing import Any

import torch


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)
