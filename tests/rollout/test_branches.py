"""Several conversations of one episode: one sample while it is scored, several when they are trained."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightrl.builtin.model import builtin_tokenizer
from lightrl.records import Experience, Prompt
from lightrl.rollout.branches import with_branches
from lightrl.rollout.episode import Episode, Turn, episode_of_several


def turn(*ids: int) -> Turn:
    return Turn(token_ids=ids, logprobs=(-1.0,) * len(ids), versions=(4,) * len(ids), finish_reason="stop", text="")


def test_several_conversations_are_one_sample_until_it_has_an_advantage() -> None:
    first, second = Episode([2]), Episode([2, 5, 9])
    first.say(turn(5))
    second.say(turn(6, 7))
    prompt = Prompt(index=0, text="", token_ids=(2,))
    sample = episode_of_several([first, second]).sample(prompt, 3, 1, builtin_tokenizer())
    assert [branch.key for branch in sample.branches] == [(3, 1_000_001)]
    moved = replace(sample, position=8)  # as carried-over groups are
    item = Experience(sample=moved, reward=1.0, advantage=0.5)
    other = Experience(sample=replace(moved, sample_index=2, branches=()), reward=0.0, advantage=-0.5)
    parts = with_branches([item, other])
    assert [part.key for part in parts] == [(8, 1), (8, 1_000_001), (8, 2)]
    assert [part.advantage for part in parts] == [0.5, 0.5, -0.5]
    assert parts[1].sample.prompt_ids == (2, 5, 9)
    assert parts[1].sample.response_ids == (6, 7)
    with pytest.raises(ValueError, match="an empty list of episodes"):
        episode_of_several([])
