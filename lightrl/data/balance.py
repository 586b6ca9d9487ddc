"""Assigns samples to ranks so that all have about equally many tokens and none waits long for another."""

from __future__ import annotations

from collections.abc import Sequence

_TOLERANCE = 1.05  # largest load over mean load, up to which no sample is worth moving


def assign_to_ranks(lengths: Sequence[int], owners: Sequence[int], world: int) -> list[int]:
    """Returns the rank of each sample; every rank gets the same result.

    It compares three assignments, from the one that moves nothing to the one that moves most, and takes the first that
    is within 5 % of even, or the most even one if none is.

    Args:
        lengths: tokens of each sample.
        owners: the rank that holds each sample now.
    """
    _check_assignment(lengths, owners, world)
    present = list(owners)
    if imbalance(lengths, present, world) <= _TOLERANCE:
        return present
    overflow_moved = _move_overflow(lengths, owners, world)
    if imbalance(lengths, overflow_moved, world) <= _TOLERANCE:
        return overflow_moved
    candidates = (present, overflow_moved, _deal_anew(lengths, owners, world))
    return min(candidates, key=lambda ranks: imbalance(lengths, ranks, world))


def imbalance(lengths: Sequence[int], ranks: Sequence[int], world: int) -> float:
    """Returns the tokens of the fullest rank over the mean of all ranks: from 1 (even) to world (all on one rank)."""
    _check_assignment(lengths, ranks, world)
    loads = [0] * world
    for length, rank in zip(lengths, ranks, strict=True):
        loads[rank] += length
    return max(loads) * world / sum(loads) if sum(loads) else 1.0


def _move_overflow(lengths: Sequence[int], owners: Sequence[int], world: int) -> list[int]:
    """Lets samples stay, longest first, while their owner is empty or has room; deals out the rest."""
    fair_load = sum(lengths) / world
    ranks, loads = list(owners), [0] * world
    overflow = []
    for sample in _longest_first(lengths):
        owner = owners[sample]
        if loads[owner] == 0 or loads[owner] + lengths[sample] <= fair_load:
            loads[owner] += lengths[sample]
        else:
            overflow.append(sample)
    _deal(overflow, lengths, owners, ranks, loads)
    return ranks


def _deal_anew(lengths: Sequence[int], owners: Sequence[int], world: int) -> list[int]:
    """Deals out all samples, longest first (Graham 1969): the largest load is at most 4/3 of the optimum."""
    ranks = list(owners)
    _deal(_longest_first(lengths), lengths, owners, ranks, [0] * world)
    return ranks


def _deal(
    samples: Sequence[int], lengths: Sequence[int], owners: Sequence[int], ranks: list[int], loads: list[int]
) -> None:
    """Gives each sample in turn to the emptiest rank: to its owner if that is one of them, otherwise to the lowest."""
    for sample in samples:
        lightest = min(loads)
        owner = owners[sample]
        rank = owner if loads[owner] == lightest else loads.index(lightest)
        ranks[sample] = rank
        loads[rank] += lengths[sample]


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda sample: (-lengths[sample], sample))


def _check_assignment(lengths: Sequence[int], ranks: Sequence[int], world: int) -> None:
    if len(lengths) != len(ranks):
        raise ValueError(f"There are {len(lengths)} lengths and {len(ranks)} ranks: each sample needs one of both.")
    if min(lengths, default=0) < 0:
        raise ValueError(f"A length is {min(lengths)}: it counts tokens, so it must be at least 0.")
    if not set(ranks) <= set(range(world)):  # all samples of all ranks are checked on each
        raise ValueError(f"The ranks {sorted(set(ranks))} are not all in a world of {world}: 0 to {world - 1}.")
