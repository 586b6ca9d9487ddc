"""Scores the same samples on any number of ranks; `scorer_program.py OUT` writes the result of rank 0."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
from reward_samples import answered

from lightrl.comm import Comm, RankError, connect
from lightrl.config import AlgorithmConfig
from lightrl.metrics import Statistics
from lightrl.records import Experience, Sample, ScoredGroup
from lightrl.rewards import NoVerdictError, RewardError, has_reward
from lightrl.rewards.reward_set import FailurePolicy, RewardSet, WeightedReward
from lightrl.rollout.collector import Scorer
from lightrl.rollout.metrics import evaluate
from lightrl.trainers.objective import PolicyObjective


def picky(sample: Sample) -> float:
    if sample.text == "unsure":
        raise NoVerdictError("who knows")
    return float(sample.text)


def length(sample: Sample) -> float:
    return float(len(sample.text))


def long_ones(sample: Sample) -> float | None:
    return length(sample) if len(sample.text) > 1 else None


class Together:
    is_collective = True

    def __call__(self, samples: list[Sample]) -> list[float]:
        everyones = comm_of_all[0].all_gather_object([sample.text for sample in samples])
        assert sorted(text for part in everyones for text in part) == ["unsure", "x", "y"]
        return [3.0] * len(samples)


comm_of_all: list[Comm] = []
TEXTS = ["1", "2", "x", "4", "unsure", "6", "7", "y"]
REWARDS = [
    WeightedReward(label="picky", weight=2.0, reward=picky),
    WeightedReward(label="length", weight=-1.0, reward=length),
]


def gdpo_of(comm: Comm) -> list[list[float]]:
    """The place and the advantage of this rank's samples, two of each of three prompts."""
    right, short = [1.0, 0.0, 1.0, 1.0, 0.0, 1.0], [1.0, 0.0, math.nan, math.nan, 4.0, 2.0]
    experience = [
        Experience(
            sample=replace(
                answered("", position=place // 2, sample_index=place % 2, num_tokens=1 + place),
                components={"right": (1.0, right[place]), "short": (0.5, short[place])},
            ),
            reward=1.0,
            advantage=0.0,
        )
        for place in range(6)
        if place // 2 % comm.world == comm.rank
    ]
    found = PolicyObjective(AlgorithmConfig(advantage="gdpo")).advantages(experience, comm)
    return [[2 * item.sample.position + item.sample.sample_index, item.advantage] for item in found]


def main() -> None:
    comm = connect(torch.device("cpu"), timedelta(seconds=60))
    kinds = {True: {"kind": "letters"}, False: {"kind": "digits"}}
    samples = [answered(text, position=place, fields=kinds[text.isalpha()]) for place, text in enumerate(TEXTS)]
    mine = samples[: 0 if comm.rank else None]  # one rank has all, the others none
    shared = samples[comm.rank :: comm.world]
    report: dict[str, object] = {}
    for name, part in (("uneven", mine), ("shared", shared)):
        for value in (None, -3.0):
            statistics = Statistics()
            scorer = Scorer(comm, RewardSet(REWARDS, policy=FailurePolicy(max_failures=2, value=value)))
            rewards = scorer.score(part, statistics)
            keyed = [
                (sample.position, reward if has_reward(reward) else None)
                for sample, reward in zip(part, rewards, strict=True)
            ]
            everyones = sorted(item for part_of in comm.all_gather_object(keyed) for item in part_of)
            report[f"{name} {value}"] = [[reward for _, reward in everyones], statistics.reduce(comm)]
    scorer = Scorer(comm, RewardSet(REWARDS, policy=FailurePolicy(max_failures=1)))
    try:
        scorer.score(shared)
    except RewardError as error:
        told = str(error)
    except RankError as error:
        told = str(error)
    report["too many"] = comm.all_gather_object(told)
    selective = [*REWARDS[1:], WeightedReward(label="long_ones", weight=3.0, reward=long_ones)]
    statistics = Statistics()
    sums = Scorer(comm, RewardSet(selective)).score(mine, statistics)
    report["selective"] = [sums, statistics.reduce(comm)]
    try:
        Scorer(comm, RewardSet(selective[1:])).score(shared)
    except RewardError as error:
        told = str(error)
    except RankError as error:
        told = str(error)
    report["not judged"] = comm.all_gather_object(told)
    both = RewardSet(
        [
            WeightedReward(label="picky", weight=1.0, reward=picky),
            WeightedReward(label="together", weight=1.0, reward=Together()),
        ]
    )
    both.judge_only(("picky.kind=digits", "together.kind=letters"))
    comm_of_all.append(comm)
    statistics = Statistics()
    sums = Scorer(comm, both).score(mine, statistics)
    report["by field"] = [sums, statistics.reduce(comm)]
    report["gdpo"] = [pair for part in comm.all_gather_object(gdpo_of(comm)) for pair in part]
    groups = [ScoredGroup(samples=(item,), rewards=(float(len(item.text)),), step=0) for item in shared]
    report["evaluated"] = evaluate(groups)
    if comm.is_main:
        Path(sys.argv[1]).write_text(json.dumps(report))
    comm.close()


if __name__ == "__main__":
    main()
