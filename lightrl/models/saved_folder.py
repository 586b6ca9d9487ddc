"""Completes the folder that a model's save_pretrained() writes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lightrl.models.multimodal import copy_processor

_FURTHER_LAYERS = re.compile(r'"(num_nextn_predict_layers|mtp_num_hidden_layers|num_mtp_layers)": [1-9]\d*')
_OF_SUCH_A_LAYER = re.compile("mtp|nextn|eh_proj")  # in the names of weights


def complete_folder(model: Any, folder: Path, saved: Iterable[str]) -> None:
    """Adds the image processor of a model with vision, and states no layer whose weights were not saved."""
    if hasattr(getattr(model, "config", None), "vision_config"):
        copy_processor(model.name_or_path, folder)
    config = folder / "config.json"
    if config.exists() and _FURTHER_LAYERS.search(stated := config.read_text(encoding="utf-8")):
        _drop_absent_layers(config, stated, saved)


def _drop_absent_layers(config: Path, stated: str, saved: Iterable[str]) -> None:
    """Sets the number of layers that predict further tokens (MTP) to 0, unless their weights are among the saved names.

    Programs that read the number look for the weights, and transformers loads a model without them. It even states one
    such layer for a DeepSeek-V3 that has none.
    """
    if not any(map(_OF_SUCH_A_LAYER.search, saved)):
        config.write_text(_FURTHER_LAYERS.sub(r'"\1": 0', stated), encoding="utf-8")
