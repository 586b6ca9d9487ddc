"""maj@k: the accuracy of the answer that most of k samples of a prompt give (self-consistency, arXiv:2203.11171)."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
    votes = _votes(answers, rewards)
    most = max(map(len, votes), default=0)
    shares = [sum(right) / most for right in votes if len(right) == most]
    return math.fsum(shares) / len(shares) if shares else 0.0


def majority_at_k(answers: Sequence[Hashable | None], rewards: Sequence[float], k: int) -> float:
    """Returns the mean of majority_accuracy() over all choices of k of the samples, exactly up to rounding.

    It is unbiased, as pass_at_k() is: its expectation is the accuracy of a vote of k new samples. An answer that n
    samples give, r of them right, is right in r / n of its votes on average, whichever of these samples are chosen. So
    the mean is the sum over answers of r / n times the chance that the answer wins, where an answer that wins with
    others wins only its part. The chances are those of counts that have binomial distributions on condition that their
    sum is k: for each number of votes with which an answer wins, the answers are added one by one.
    """
    if not 1 <= k <= len(answers):
        raise ValueError(f"maj@{k} of {len(answers)} samples: k must be between 1 and the number of samples.")
    if k == len(answers):
        return majority_accuracy(answers, rewards)
    votes, share = _votes(answers, rewards), k / len(answers)
    silent = len(answers) - sum(map(len, votes))
    mean = 0.0
    for most in range(1, min(k, max(map(len, votes), default=0)) + 1):
        # [t, j]: the chance that t answers have `most` votes, no other has more, and j samples are chosen so far; and
        # the expected sum of the right shares of these t answers.
        chance, right = np.zeros((2, k // most + 1, k + 1))
        for count in range(min(silent, k) + 1):
            chance[0, count] = _binomial(silent, count, share)
        for voters in votes:
            chance, right = _with_answer(chance, right, voters, most, share)
        mean += float((right[1:, k] / np.arange(1, len(right))).sum())
    return mean / _binomial(len(answers), k, share)


def _votes(answers: Sequence[Hashable | None], rewards: Sequence[float]) -> list[list[bool]]:
    """Returns for each answer whether the samples that give it are right; those without a vote are left out."""
    votes: dict[Hashable, list[bool]] = defaultdict(list)
    for answer, reward in zip(answers, rewards, strict=True):
        if answer is not None and has_reward(reward):
            votes[answer].append(reward >= 1)
    return list(votes.values())


def _with_answer(
    chance: NDArray[np.float64], right: NDArray[np.float64], voters: Sequence[bool], most: int, share: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns the two tables of majority_at_k() after one more answer, which these samples give."""
    size = len(voters)
    tables = np.stack((chance, right))
    added = np.zeros_like(tables)
    end = tables.shape[2]
    for count in range(min(size, most - 1) + 1):
        added[:, :, count:] += _binomial(size, count, share) * tables[:, :, : end - count]
    if size >= most:
        winning = _binomial(size, most, share) * tables[:, :-1, : end - most]
        added[:, 1:, most:] += winning
        added[1, 1:, most:] += winning[0] * (sum(voters) / size)
    return added[0], added[1]


@lru_cache(maxsize=1 << 16)
def _binomial(size: int, count: int, share: float) -> float:
    """Returns the chance that count of size samples are chosen, each with the chance share, between 0 and 1."""
    ways = math.lgamma(size + 1) - math.lgamma(count + 1) - math.lgamma(size - count + 1)
    return math.exp(ways + count * math.log(share) + (size - count) * math.log1p(-share))


class MajorityVotes:
    """Adds maj@N to the metrics of an evaluation with N samples of each prompt, and maj@k for smaller k."""

    def __init__(self, rewards: RewardSet, comm: Comm, ks: Sequence[int] = ()) -> None:
        """Raises LateMistakeError if no reward reads answers."""
        self._read, self._comm, self._ks = reader_of(rewards), comm, ks

    def __call__(
        self,
        groups: Sequence[ScoredGroup],
        statistics: Statistics,
        *,
        ks: Sequence[int],
        source_field: str,
        prefix: str,
    ) -> None:
        """Adds what lightrl.rollout.metrics.describe_groups() adds, and maj@k; every rank calls it."""
        describe_groups(groups, statistics, ks=ks, source_field=source_field, prefix=prefix)
        with self._comm.phase("reading the answers", local=True):
            answers = iter(self._read([sample for group in groups for sample in group.samples]))
        for group in groups:
            given = [next(answers) for _ in group.samples]
            if any(map(has_reward, group.rewards)):
                for k in sorted({len(given), *self._ks}):
                    accuracy = majority_at_k(given, group.rewards, k)
                    for start in prefixes_of(group, source_field, prefix):
                        statistics.mean(f"{start}maj@{k}", accuracy, 1)


def add_majority(collector: Any, rewards: RewardSet, comm: Comm, ks: Sequence[int]) -> None:
    """Makes a collector's evaluations report maj@N and maj@k; raises LateMistakeError if no reward reads answers."""
    collector.describe_groups = MajorityVotes(rewards, comm, ks)
