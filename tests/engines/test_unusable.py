"""Tests of the texts about an engine's completions; test_colocated.py has those of all that is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lightrl.engines.base import Completion
from lightrl.engines.unusable import describe_unusable, wrong_number

SAMPLE = Completion(
    request_id=0,
    sample_index=0,
    prompt_token_ids=(1,),
    output_token_ids=(1, 2),
    logprobs=(-1.0, 0.0),
    versions=(0, 0),
    finish_reason="stop",
)


def test_the_reason_of_an_episode_ends_no_request() -> None:
    reason: Any = "turns"
    told = describe_unusable(replace(SAMPLE, finish_reason=reason), {0}, 10)
    assert told.endswith("with the finish_reason 'turns', which is none of ('stop', 'length', 'abort')")


def test_a_completion_of_no_running_request_is_told_with_those_that_run() -> None:
    assert describe_unusable(SAMPLE, [3], 10).endswith("no Completion of a running request (those are [3])")


def test_a_wrong_number_of_completions_is_told_with_the_method_to_correct() -> None:
    assert wrong_number("Mine", 0, 8).startswith("Mine gave 0 completions for 8 samples. Its has_unfinished() must")
