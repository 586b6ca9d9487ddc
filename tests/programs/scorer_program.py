"""Scores the same samples on any number of ranks; `scorer_program.py OUT` writes the result of rank 0."""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
from reward_samples import answered

from lightrl.comm import RankError, connect
from lightrl.metrics import Statistics
from lightrl.records import Sample, ScoredGroup
from lightrl.rewards import NoVerdictError, RewardError, has_reward
from lightrl.rewards.reward_set import FailurePolicy, RewardSet, WeightedReward
from lightrl.rollout.collector import Scorer
from lightrl.rollout.metrics import evaluate


def picky(sample: Sample) -> float:
    if sample.text == "unsure":
        raise NoVerdictError("who knows")
    return float(sample.text)


def length(sample: Sample) -> float:
    return float(len(sample.text))


def long_ones(sample: Sample) -> float | None:
    return length(sample) if len(sample.text) > 1 else None


TEXTS = ["1", "2", "x", "4", "unsure", "6", "7", "y"]
REWARDS = [
    WeightedReward(label="picky", weight=2.0, reward=picky),
    WeightedReward(label="length", weight=-1.0, reward=length),
]


def main() -> None:
    comm = connect(torch.device("cpu"), timedelta(seconds=60))
    samples = [answered(text, position=place) for place, text in enumerate(TEXTS)]
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
    groups = [ScoredGroup(samples=(item,), rewards=(float(len(item.text)),), step=0) for item in shared]
    report["evaluated"] = evaluate(groups)
    if comm.is_main:
        Path(sys.argv[1]).write_text(json.dumps(report))
    comm.close()


if __name__ == "__main__":
    main()
