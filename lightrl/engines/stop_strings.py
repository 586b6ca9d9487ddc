"""Stop strings: ends samples at given texts, for every engine, since no engine has a tokenizer here."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from lightrl.engines.base import Completion
from lightrl.records import FinishReason

_MOST_BYTES = 4  # of a character in UTF-8


def check_stop(stop: Sequence[str], tokenizer: Any) -> None:
    """Raises ValueError for stop strings that cannot be searched for."""
    if isinstance(stop, str) or any(not isinstance(text, str) or not text for text in stop):
        raise ValueError(f"stop is {stop!r}: it must be a tuple of texts, none of them empty.")
    if tokenizer is None:
        raise ValueError("Stop strings need a tokenizer: set strategy.tokenizer before the engine is set up.")


def stop_tokens(stop: Sequence[str], tokenizer: Any, vocab_size: float = math.inf) -> tuple[int, ...]:
    """Returns the tokens that are a stop string by themselves, such as <|im_end|>: an engine can end a sample there.

    vocab_size: the number of the model's tokens; a tokenizer may have more.
    """
    found = [(tokenizer.convert_tokens_to_ids(text), text) for text in stop]
    known = [(token, text) for token, text in found if token is not None and token < vocab_size]
    return tuple(token for token, text in known if tokenizer.decode([token]) == text)


def cut_after_stop(item: Completion, stop: Sequence[str], tokenizer: Any, min_new_tokens: int = 0) -> Completion:
    """Cuts a sample after the token that completes its first stop string, where an engine would have stopped.

    A draw depends only on seed, sample and token, so the result is what an engine that knows stop strings would have
    made. A stop string that ends within the first min_new_tokens tokens does not count.
    """
    end = first_stop(item.output_token_ids, stop, tokenizer, after=min_new_tokens)
    return item if end is None else cut_to(item, end, "stop")


def cut_to(item: Completion, length: int, reason: FinishReason) -> Completion:
    """Returns the completion as if its sample had ended after this many tokens."""
    num_run = len(item.prompt_token_ids) + length - 1  # an engine never runs a sample's last token
    return replace(
        item,
        output_token_ids=item.output_token_ids[:length],
        logprobs=item.logprobs[:length],
        versions=item.versions[:length],
        routing=None if item.routing is None else item.routing[:num_run],
        allowed=None if item.allowed is None else item.allowed[item.allowed[:, 0] < length],
        finish_reason=reason,
    )


def first_stop(token_ids: Sequence[int], stop: Sequence[str], tokenizer: Any, *, after: int = 0) -> int | None:
    """Returns the number of tokens up to the first stop string that ends after the first `after` tokens, or None.

    This is a binary search, since a text only grows.
    """

    def readable(count: int) -> Iterator[str]:
        """Yields the text of `count` tokens and, if that ends within a character, those of fewer tokens.

        Where bytes are tokens (Llama 2, Mistral, Gemma), the first ones of a character make the bytes before them
        unreadable, too, such as a line break, until the last one comes.
        """
        for length in range(count, max(count - _MOST_BYTES, 0), -1):
            text: str = tokenizer.decode(list(token_ids[:length]), skip_special_tokens=False)
            yield text
            if not text.endswith("\ufffd"):
                return

    # Bytes of a character that the next token completes decode to U+FFFD: the character is not within the minimum yet.
    start = max((len(text.rstrip("\ufffd")) for text in readable(after)), default=0)

    def has_stop(count: int) -> bool:
        texts = readable(count)
        places = (text.find(wanted, max(0, start + 1 - len(wanted))) for text in texts for wanted in stop)
        return any(place >= 0 for place in places)

    low, high = after + 1, len(token_ids)
    if low > high or not has_stop(high):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if has_stop(middle) else (middle + 1, high)
    return low
