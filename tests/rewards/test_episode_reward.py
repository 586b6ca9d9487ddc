import dataclasses

import pytest
from made_samples import made_sample

from lightrl.rewards.episode_reward import episode_reward

SAMPLE = made_sample(reward=0.25)


def test_the_reward_is_that_of_the_episode() -> None:
    assert episode_reward(SAMPLE) == 0.25
    with pytest.raises(ValueError, match=r"set episode\.reward in the workflow"):
        episode_reward(dataclasses.replace(SAMPLE, reward=None))
