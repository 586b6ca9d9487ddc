"""A scored group goes through a checkpoint's file and comes back equal."""

import numpy as np
from made_samples import made_sample
from saved_state import through_a_file

from lightrl.records import Prompt, Sample, ScoredGroup, Status
from lightrl.rollout.saved_groups import group_from_state, group_state

PROMPTS = [Prompt(index=index, text=f"{index}=", token_ids=(1, index)) for index in range(4)]


def sample(index: int, *branches: Sample) -> Sample:
    return made_sample(
        prompt=PROMPTS[3],
        position=2,
        sample_index=index,
        response_ids=(5, 6, 7),
        sampler_logprobs=(-0.1, -1 / 3, 0.0),
        versions=(1, 2, 2),
        finish_reason="turns",
        text="x",
        prompt_ids=(1, 9, 9),
        own=(True, True, False),
        routing=np.full((6, 1, 2), 3 + index, np.int16),
        allowed=np.full((3, 2), index, np.int32),
        images=(b"\x89PNG", bytes([index])),
        turns=(0, 1),
        reward=0.25,
        turn_rewards=(0.0, 0.25),
        numbers={"calls": 2.0},
        status=Status.ARCHIVED,
        ticket=11,
        start_version=1,
        branches=branches,
        is_scored=True,
        components={"right": (2.0, 1.0), "short": (-0.5, 0.25)},
    )


def test_a_group_comes_back_equal() -> None:
    branch = sample(2)
    group = ScoredGroup(samples=(sample(0, branch), sample(1)), rewards=(1 / 3, 1.0), step=3, baseline=0.125)
    read = group_from_state(through_a_file(group_state(group)), PROMPTS)
    assert read == group
    assert (read.samples[1].routing == 4).all()
    assert (read.samples[1].allowed == 1).all()


def test_a_state_of_an_older_version_has_no_tickets() -> None:
    state = group_state(ScoredGroup(samples=(sample(0),), rewards=(0.5,), step=3))
    for name in (
        "own",
        "turns",
        "reward",
        "turn_rewards",
        "numbers",
        "status",
        "ticket",
        "start_version",
        "routing",
        "is_scored",
        "branches",
    ):
        del state["samples"][0][name]
    read = group_from_state(state, PROMPTS).samples[0]
    assert (read.own, read.turns, read.status, read.ticket, read.start_version) == ((), (0,), Status.COMPLETED, -1, -1)
    assert read.turn_rewards == ()
