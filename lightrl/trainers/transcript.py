"""Transcript: who said what in the logged episodes of samples.jsonl (--rollout.workflow)."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

from lightrl.records import Experience
from lightrl.trainers.observer import Observer

_REPEATED_PAD = re.compile(r"(<\|\w*pad\|>)\1+")  # what an image was expanded to


class Transcript(Observer):
    """Adds to each logged sample the parts of its response, so that one reads an episode turn by turn."""

    def __init__(self, trainer: Any) -> None:
        self._decode = trainer.run.tokenizer.decode

    def sample_columns(self, item: Experience) -> dict[str, Any]:
        """Returns `turns`: texts with their special tokens, who wrote each, whether it is trained, and a turn's reward.

        A part begins where a turn of the policy begins, and where trained tokens or those of others end.
        """
        sample = item.sample
        kinds, ids = list(zip(sample.is_own, item.trained_tokens, strict=True)), sample.response_ids
        changes = (index for index in range(1, len(ids)) if kinds[index] != kinds[index - 1])
        rewards = dict(zip(sample.turns, sample.turn_rewards, strict=False))
        bounds = sorted({*changes, *sample.turns, 0, len(ids)})
        turns: list[dict[str, Any]] = []
        for begin, end in pairwise(bounds):
            text = _REPEATED_PAD.sub(r"\1", self._decode(ids[begin:end]))
            turns.append({"text": text, "is_own": kinds[begin][0], "is_trained": kinds[begin][1]})
            if begin in rewards:
                turns[-1]["reward"] = rewards[begin]
        return {"turns": turns}
