"""What an engine reads off the trainer's model: its architecture, its end tokens and the folder it came from."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def eos_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> tuple[int, ...]:
    """Returns the end tokens that the generation config, the model config and the tokenizer name, ascending."""
    ids: set[int] = set()
    for source in (model.generation_config, model.config, model.config.get_text_config(), tokenizer):
        value = getattr(source, "eos_token_id", None)
        if value is not None:
            ids.update([value] if isinstance(value, int) else value)
    return tuple(sorted(ids))


def skeleton(source: PreTrainedModel) -> PreTrainedModel:
    """Returns the source's architecture without memory for weights; the source itself may be sharded or wrapped."""
    plain = next(kind for kind in type(source).__mro__ if not kind.__name__.startswith("FSDP"))
    config = type(source.config).from_dict(source.config.to_dict())
    with torch.device("meta"):
        model: PreTrainedModel = plain(config)
    model.tie_weights()
    return model


def architecture_of(source: PreTrainedModel) -> str:
    """Returns the name of the model's class as it was before FSDP put its own class in front."""
    classes = [kind for kind in type(source).__mro__ if issubclass(kind, PreTrainedModel)]
    return next(kind.__name__ for kind in classes if not hasattr(kind, "unshard"))


def model_folder(source: PreTrainedModel, processor: Any, scratch: Path) -> str:
    """Returns the folder or hub name that the model came from, or scratch with the model's configuration in it."""
    name = str(source.name_or_path or "")
    if (Path(name) / "config.json").is_file() if name else False:
        return name
    if _HUB_NAME.fullmatch(name) and not Path(name).exists() and not name.startswith("."):
        return name
    config = type(source.config).from_dict(source.config.to_dict())
    config.architectures = [architecture_of(source)]
    config.save_pretrained(scratch)
    if hasattr(processor, "image_processor"):
        processor.save_pretrained(scratch)
    return str(scratch)
