"""Brings the lengths at which a model changes its rules within reach of a check on a few tokens.

A sliding window of 4,096 tokens, or rope factors that change at 4,096, would not show in sequences of 7 and 12 tokens,
and longer ones would be slow on a large model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from transformers import PreTrainedModel

from lightrl.models.fixed_rope import original_lengths
from lightrl.records import PackedBatch

_WINDOWS = ("sliding_window", "attention_chunk_size")
_SHORT_WINDOW = 9  # between the shorter sequences of the checks, of 7 tokens, and the longest, of 12
_BEFORE = 6  # tokens of the longest sequence that lie before a length at which a rope changes


@contextmanager
def thresholds_in_reach(model: PreTrainedModel, batch: PackedBatch) -> Iterator[PackedBatch]:
    """Yields the pack to check with, whose sequences lie on both sides of every threshold of the model.

    Inside the context sliding windows are shorter than the pack's longest sequence, which comes last. Where the config
    names a length at which the rope changes, that sequence has the positions around it.
    """
    decoder = model.get_decoder()  # not the vision tower, whose windows are of images
    owners = (decoder.config, *decoder.modules())
    changed = [(owner, name) for owner in owners for name in _WINDOWS if _is_long(owner, name)]
    before = [getattr(owner, name) for owner, name in changed]
    lengths = original_lengths(model.config) if batch.vision is None else []
    try:
        for owner, name in changed:
            setattr(owner, name, _SHORT_WINDOW)
        yield _moved_to(batch, min(lengths)) if lengths else batch
    finally:
        for (owner, name), value in zip(changed, before, strict=True):
            setattr(owner, name, value)


def _is_long(owner: Any, name: str) -> bool:
    value = vars(owner).get(name)
    return isinstance(value, int) and not isinstance(value, bool) and value > _SHORT_WINDOW


def _moved_to(batch: PackedBatch, length: int) -> PackedBatch:
    """Returns the pack with the positions of its last sequence around a length."""
    positions = batch.position_ids.clone()
    positions[batch.cu_seqlens[-2] :] += max(0, length - _BEFORE)
    return replace(batch, position_ids=positions)
