"""The reward that the workflow or the environment gave its episode."""

from __future__ import annotations

from lightrl.records import Sample


def episode_reward(sample: Sample) -> float:
    """Returns the reward of the episode; raises ValueError if the workflow set none."""
    if sample.reward is None:
        raise ValueError(
            "the sample has no reward of its own: set episode.reward in the workflow (--rollout.workflow), or use "
            "another --reward"
        )
    return sample.reward
