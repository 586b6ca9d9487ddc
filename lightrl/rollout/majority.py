"""maj@N: the accuracy of the answer that most of N samples of a prompt give (self-consistency, arXiv:2203.11171)."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import Any

from lightrl.comm import Comm
from lightrl.metrics import Statistics
from lightrl.records import ScoredGroup
from lightrl.rewards.answers import reader_of
from lightrl.rewards.reward_set import RewardSet
from lightrl.rewards.scoring import has_reward
from lightrl.rollout.metrics import describe_groups, prefixes_of


def majority_accuracy(answers: Sequence[Hashable | None], rewards: Sequence[float]) -> float:
    """Returns the share of samples with a reward of 1 or more among those that give the most frequent answer.

    If several answers are the most frequent, it is the mean over them, so that the order of the samples does not
    matter. A sample without an answer, or without a reward, has no vote; without any vote it is 0.
    """
    votes: dict[Hashable, list[bool]] = defaultdict(list)
    for answer, reward in zip(answers, rewards, strict=True):
        if answer is not None and has_reward(reward):
            votes[answer].append(reward >= 1)
    most = max(map(len, votes.values()), default=0)
    shares = [sum(right) / most for right in votes.values() if len(right) == most]
    return math.fsum(shares) / len(shares) if shares else 0.0


class MajorityVotes:
    """Adds maj@N to the metrics of an evaluation with N samples of each prompt."""

    def __init__(self, rewards: RewardSet, comm: Comm) -> None:
        """Raises LateMistakeError if no reward reads answers."""
        self._read, self._comm = reader_of(rewards), comm

    def __call__(
        self,
        groups: Sequence[ScoredGroup],
        statistics: Statistics,
        *,
        ks: Sequence[int],
        source_field: str,
        prefix: str,
    ) -> None:
        """Adds what lightrl.rollout.metrics.describe_groups() adds, and maj@N; every rank calls it."""
        describe_groups(groups, statistics, ks=ks, source_field=source_field, prefix=prefix)
        with self._comm.phase("reading the answers", local=True):
            answers = iter(self._read([sample for group in groups for sample in group.samples]))
        for group in groups:
            given = [next(answers) for _ in group.samples]
            if any(map(has_reward, group.rewards)):
                for start in prefixes_of(group, source_field, prefix):
                    statistics.mean(f"{start}maj@{len(given)}", majority_accuracy(given, group.rewards), 1)


def add_majority(collector: Any, rewards: RewardSet, comm: Comm) -> None:
    """Makes a collector's evaluations report maj@N; raises LateMistakeError if no reward reads answers."""
    collector.describe_groups = MajorityVotes(rewards, comm)
