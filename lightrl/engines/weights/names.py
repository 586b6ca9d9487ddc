"""Translates transformers' names of weights in memory into those of a checkpoint.

Since transformers 5, a model in memory may name its weights differently from its checkpoint, or hold the weights of
several experts as one tensor. Engines that read checkpoints need the checkpoint's names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import groupby

from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, revert_weight_conversion

_LAYER = re.compile(r"^(.*?\.\d+)\.")


def checkpoint_pairs(model: PreTrainedModel, pairs: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yields the pairs under the names and in the form of the model's checkpoint.

    If the form changes, one layer is held at a time: pairs must come layer by layer, as sorted names do.
    """
    # from_pretrained notes its conversions on the model, but a rank that built the model from its config has none of
    # them, and all ranks must agree. These two functions are not public. They can go when transformers offers a way to
    # name weights as save_pretrained does without saving; 5.19 has none:
    # https://github.com/huggingface/transformers/blob/v5.19.0/src/transformers/core_model_loading.py
    conversions = [
        item for item in get_model_conversion_mapping(model, add_legacy=False) if not isinstance(item, PrefixChange)
    ]
    if not conversions:
        yield from pairs
        return
    model._weight_conversions = conversions  # type: ignore[assignment]  # what revert_weight_conversion reads
    for _, layer in groupby(pairs, key=lambda pair: _layer(pair[0])):
        yield from sorted(revert_weight_conversion(model, dict(layer)).items())


def _layer(name: str) -> str:
    """Returns the part of a name up to the number of its layer, or the whole name."""
    match = _LAYER.match(name)
    return match[1] if match else name
