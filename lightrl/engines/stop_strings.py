"""Stop strings: where a text ends a sample, for every engine, since none of them has a tokenizer here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightrl.engines.base import Completion


def check_stop(stop: Sequence[str], tokenizer: Any) -> None:
    """Raises ValueError for stop strings that could not be looked for."""
    if isinstance(stop, str) or any(not isinstance(text, str) or not text for text in stop):
        raise ValueError(f"stop is {stop!r}: it must be a tuple of texts, none of them empty.")
    if tokenizer is None:
        raise ValueError("Stop strings need a tokenizer: set strategy.tokenizer before the engine is set up.")


def cut_after_stop(item: Completion, stop: Sequence[str], tokenizer: Any) -> Completion:
    """Cuts behind the token that completes the first stop string, where an engine that knew it would have stopped.

    A draw depends on seed, sample and token alone, so what stays is what such an engine would have made.
    """
    end = first_stop(item.output_token_ids, stop, tokenizer)
    return item if end is None else item.cut(end, "stop")


def first_stop(token_ids: Sequence[int], stop: Sequence[str], tokenizer: Any) -> int | None:
    """Returns how many tokens hold the first stop string, or None; a binary search, as text only grows."""

    def has_stop(count: int) -> bool:
        text = tokenizer.decode(list(token_ids[:count]), skip_special_tokens=False)
        return any(wanted in text for wanted in stop)

    low, high = 1, len(token_ids)
    if not high or not has_stop(high):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if has_stop(middle) else (middle + 1, high)
    return low
