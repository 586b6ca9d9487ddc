"""Finds samples that older weights made and measures their age, for runs that can have such samples."""

from __future__ import annotations

from collections.abc import Sequence

from lightrl.comm import Comm
from lightrl.data.packing import Key
from lightrl.metrics import Statistics
from lightrl.records import Experience


def older_samples(mine: Sequence[Experience], step: int, comm: Comm) -> frozenset[Key]:
    """Returns the keys of all ranks' samples with a token of older weights; the result is the same on every rank.

    Ranks that split a model run the loss on each other's samples. The version of the weights is the number of the step
    that they were synced for.
    """
    keys = {item.key for item in mine if any(version < step for version in item.sample.versions)}
    return frozenset().union(*comm.all_gather_object(keys))


def describe_staleness(mine: Sequence[Experience], step: int, statistics: Statistics) -> None:
    """Adds how many steps old the weights of tokens are, and how many versions of weights made a sample."""
    own = [
        [version for version, is_own in zip(item.sample.versions, item.sample.is_own, strict=True) if is_own]
        for item in mine
    ]
    ages = [step - version for versions in own for version in versions]
    if ages:  # a step without a sample has no mean, and 0 would look like one
        statistics.mean("rollout/staleness", sum(ages), len(ages))
        statistics.maximum("rollout/staleness_max", max(ages))
        statistics.mean("rollout/versions", sum(len(set(versions)) for versions in own), len(own))
