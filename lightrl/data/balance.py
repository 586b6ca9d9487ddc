"""Which rank trains on which sample, so that ranks have about equally many tokens and none waits long for another."""

from __future__ import annotations

from collections.abc import Sequence

_TOLERANCE = 1.05  # of the largest load over the mean: evener than this is not worth moving samples for


def assign_to_ranks(lengths: Sequence[int], owners: Sequence[int], world: int) -> list[int]:
    """The rank for each sample, the same on every rank that asks.

    Of three assignments, from the one that moves nothing to the one that moves most, it is the first within 5 % of
    even, or else the evenest.

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
    """The tokens of the fullest rank over the mean of all ranks: 1 is even, world is all on one. 1 without tokens."""
    _check_assignment(lengths, ranks, world)
    loads = [0] * world
    for length, rank in zip(lengths, ranks, strict=True):
        loads[rank] += length
    return max(loads) * world / sum(loads) if sum(loads) else 1.0


def _move_overflow(lengths: Sequence[int], owners: Sequence[int], world: int) -> list[int]:
    """A sample stays while its owner is empty or has room for it, the longest first; the rest are dealt out."""
    share = sum(lengths) / world
    ranks, loads = list(owners), [0] * world
    overflow = []
    for sample in _longest_first(lengths):
        owner = owners[sample]
        if loads[owner] == 0 or loads[owner] + lengths[sample] <= share:
            loads[owner] += lengths[sample]
        else:
            overflow.append(sample)
    _deal(overflow, lengths, owners, ranks, loads)
    return ranks


def _deal_anew(lengths: Sequence[int], owners: Sequence[int], world: int) -> list[int]:
    """Longest processing time first (Graham 1969): never more than 4/3 of the best that can be had."""
    ranks = list(owners)
    _deal(_longest_first(lengths), lengths, owners, ranks, [0] * world)
    return ranks


def _deal(
    samples: Sequence[int], lengths: Sequence[int], owners: Sequence[int], ranks: list[int], loads: list[int]
) -> None:
    """Gives each sample in turn to the emptiest rank: its owner if that is one of them, else the lowest."""
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
    if any(length < 0 for length in lengths):
        raise ValueError(f"A length is {min(lengths)}: it counts tokens, so it must be at least 0.")
    if any(not 0 <= rank < world for rank in ranks):
        raise ValueError(f"The ranks {sorted(set(ranks))} are not all in a world of {world}: 0 to {world - 1}.")
