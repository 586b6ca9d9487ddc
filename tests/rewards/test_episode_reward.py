import dataclasses

import pytest

from lightrl.records import Prompt, Sample
from lightrl.rewards.episode_reward import episode_reward

SAMPLE = Sample(
    prompt=Prompt(index=0, text="", token_ids=(1,)),
    position=0,
    sample_index=0,
    response_ids=(),
    sampler_logprobs=(),
    versions=(),
    finish_reason="stop",
    text="",
    reward=0.25,
)


def test_the_reward_is_that_of_the_episode() -> None:
    assert episode_reward(SAMPLE) == 0.25
    with pytest.raises(ValueError, match=r"set episode\.reward in the workflow"):
        episode_reward(dataclasses.replace(SAMPLE, reward=None))
