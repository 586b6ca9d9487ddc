"""Requests under the names of other workflows."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from test_client import Recorder, client

from lightrl.rollout.foreign_requests import GenerationHyperparameters, LLMRequest


def test_two_requests_of_one_name_get_their_own_answers() -> None:
    recorder = Recorder()
    engine = client(recorder)
    settings = GenerationHyperparameters(max_new_tokens=3, stop_token_ids=(9,), stop=("+",))

    async def ask() -> Any:
        return await asyncio.gather(
            engine.agenerate(LLMRequest(rid="one", input_ids=[1, 2], gconfig=settings)),
            engine.agenerate(LLMRequest(rid="one", input_ids=[1, 2, 3], gconfig=settings.new(greedy=True, stop="<e"))),
        )

    sampled, greedy = asyncio.run(ask())
    assert (sampled.input_tokens, sampled.input_len, greedy.input_len) == ([1, 2], 2, 3)
    assert (sampled.output_tokens, sampled.output_len) == ([5], 1)
    assert (sampled.output_logprobs, sampled.output_versions, sampled.stop_reason) == ([-0.5], [3], "length")
    assert [params.temperature for params in recorder.asked] == [0.5, 0.0]
    assert [params.max_new_tokens for params in recorder.asked] == [3, 3]
    assert (recorder.asked[0].stop_token_ids, recorder.asked[0].stop) == ((9, 12), ("=", "+"))  # the run's first
    assert recorder.asked[1].stop == ("=", "<e")


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"n_samples": 4}, "n_samples 4, and it must be 1: each call makes one; --group_size says"),
        ({"top_k": 20}, "top_k 20, and it must be -1: the trainer's logprobs are of the whole distribution"),
        ({"min_new_tokens": 2}, "min_new_tokens 2, and it must be 0"),
        ({"top_p": 0.9}, "top_p 0.9, and it must be 1: the trainer's logprobs are of the whole distribution"),
    ],
)
def test_settings_that_the_run_does_not_have_are_refused(settings: dict[str, Any], text: str) -> None:
    request = SimpleNamespace(input_ids=[1], gconfig=SimpleNamespace(**settings))
    with pytest.raises(ValueError, match=text):
        asyncio.run(client(Recorder()).agenerate(request))
