"""Finds where a chat template ends a turn, where most base models do not stop unless they are trained on answers."""

from __future__ import annotations

import logging
from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from lightrl.engines.base import eos_ids
from lightrl.models.chat_text import render
from lightrl.models.policy import load_config

logger = logging.getLogger(__name__)

_ANSWER = "lightrl-ends-here"


def warn_of_unstopped_turns(config: Any, model_path: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Warns of a token that ends a turn and is none of the model's end tokens, unless --stop names it."""
    end = end_of_turn(tokenizer)
    if end is None or end in _end_tokens(model_path, tokenizer, trust_remote_code=config.trust_remote_code):
        return
    text = str(tokenizer.convert_ids_to_tokens(end))
    if text not in config.stop:
        logger.warning(
            "The chat template ends a turn with %s, at which the model does not stop: responses may go on behind it. "
            "Give --stop %r, or train the model on answers first (scripts/train_sft.py makes it stop there).",
            *(text, text),
        )


def stop_at(ends: Collection[int], model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Adds those of the tokens that are special to the model's end tokens, and returns their texts."""
    known, added = eos_ids(model), tokenizer.added_tokens_decoder  # generate() of transformers reads no tokenizer's
    new = sorted(token for token in {*ends}.difference(known) if token in added and added[token].special)
    if new:
        assert model.generation_config is not None, "a language model has one"
        model.generation_config.eos_token_id = sorted({*known, *new})
    return [added[token].content for token in new]


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Returns the special token that follows an answer in a conversation; None if there is none."""
    turns = [{"role": "user", "content": ""}, {"role": "assistant", "content": _ANSWER}]
    try:
        behind = render(tokenizer, turns).partition(_ANSWER)[2]
        first = next(iter(tokenizer(behind, add_special_tokens=False)["input_ids"]), None)
    except Exception:  # the error that a real prompt raises is the one to show
        return None
    added = tokenizer.added_tokens_decoder
    return first if first in added and added[first].special else None


def _end_tokens(model_path: str, tokenizer: PreTrainedTokenizerBase, *, trust_remote_code: bool) -> tuple[int, ...]:
    config = load_config(model_path, trust_remote_code=trust_remote_code)
    try:
        generation = GenerationConfig.from_pretrained(model_path)
    except OSError:  # the folder has none
        generation = None
    model: Any = SimpleNamespace(config=config, generation_config=generation)
    return eos_ids(model, tokenizer)
