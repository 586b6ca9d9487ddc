"""Greedy responses that other ranks make and score, beside the samples of the same prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from remote_groups import PROMPTS, group

from lightrl.comm import Comm
from lightrl.data.sampler import PromptSampler
from lightrl.metrics import Statistics
from lightrl.records import Prompt
from lightrl.rollout.remote_collector import GreedyRemoteCollector, RemoteCollector
from lightrl.rollout.sample_messages import to_bytes
from lightrl.rollout.saved_groups import group_state


class ScriptedLink:
    """Two rollout ranks, whose rewards are 10 x position, and 0.5 more for what is sampled."""

    def __init__(self) -> None:
        self.posted: list[Mapping[str, Any]] = []

    def require_others(self) -> None:
        pass

    def post(self, command: Mapping[str, Any]) -> None:
        self.posted.append(command)

    def answers(self) -> list[bytes]:
        command = self.posted[-1]
        prefix, added = ("greedy/", 0.0) if command["do"] == "greedy" else ("", 0.5)
        places = list(enumerate(command["prompts"], start=command["first"]))
        answers = []
        for rank in (1, 0):
            groups = [group(prompt, position, 10.0 * position + added) for position, prompt in places[rank::2]]
            values = {f"{prefix}reward/mean": ("mean", sum(one.rewards[0] for one in groups), len(groups))}
            answers.append(to_bytes({"groups": [group_state(one) for one in groups], "statistics": values}))
        return answers


def collector(kind: type[RemoteCollector]) -> tuple[RemoteCollector, ScriptedLink, Sequence[tuple[int, Prompt]]]:
    link, sampler = ScriptedLink(), PromptSampler(4, 3, seed=0)
    drawn = sampler.draw(3)
    made = kind(Comm(), link, PROMPTS, sampler)  # type: ignore[arg-type]
    return made, link, [(position, PROMPTS[index]) for position, index in enumerate(drawn)]


def test_samples_and_greedy_responses_keep_their_own_rewards() -> None:
    made, link, prompts = collector(GreedyRemoteCollector)
    samples = made.sample(prompts, step=2, group_size=1, temperature=1.0)
    greedy = made.sample_greedily(prompts)
    drawn = [prompt.index for _, prompt in prompts]
    assert link.posted[1] == {"do": "greedy", "first": 0, "prompts": drawn}
    assert [sample.prompt.index for sample in greedy] == drawn
    statistics = Statistics()
    assert made.score(samples, statistics) == [0.5, 10.5, 20.5]
    assert made.score(greedy, statistics, prefix="greedy/") == [0.0, 10.0, 20.0]
    assert statistics.reduce(Comm()) == {"reward/mean": 10.5, "greedy/reward/mean": 10.0}


def test_a_plain_collector_has_no_greedy_responses() -> None:
    made, _, prompts = collector(RemoteCollector)
    with pytest.raises(RuntimeError, match="has no greedy responses"):
        made.sample_greedily(prompts)
