"""Makes samples of which a test states only what it is about."""

from __future__ import annotations

from typing import Any

from lightrl.records import Prompt, Sample

PROMPT = Prompt(index=0, text="", token_ids=(1,))


def made_sample(**given: Any) -> Sample:
    """A sample with the given fields; its other tokens have the probability 1 and the first weights."""
    length = len(given.get("response_ids", ()))
    plain: dict[str, Any] = {
        "prompt": PROMPT,
        "position": 0,
        "sample_index": 0,
        "response_ids": (),
        "sampler_logprobs": (0.0,) * length,
        "versions": (0,) * length,
        "finish_reason": "stop",
        "text": "",
    }
    return Sample(**plain | given)
