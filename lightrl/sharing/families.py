"""Rules that keep a family, the samples of one prompt, together in a micro-batch and on a rank.

A family has samples, or only their number: `lightrl plan` follows the same rules on paper.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

from lightrl.data.balance import assign_to_ranks, imbalance
from lightrl.data.packing import Packable

if TYPE_CHECKING:
    from typing_extensions import Self

_UNEVEN = 1.05  # ratio of the fullest rank's load to the mean above which families are split
_MOST_PARTS = 8  # families per rank


class Divisible(Packable, Protocol):
    """Samples of one prompt; num_tokens counts only the tokens that are computed."""

    @property
    def num_samples(self) -> int:
        """The number of samples."""
        ...

    def halves(self) -> list[Self]:
        """Splits the family into two, each with every other sample by length."""
        ...

    def pieces(self, max_samples: int) -> list[Self]:
        """Splits the family into parts of up to max_samples, in the order of the samples."""
        ...


_Family = TypeVar("_Family", bound=Divisible)


class Dealt(NamedTuple):
    """The assignment of all families to ranks."""

    owners: list[int]
    targets: list[int]
    imbalance: float  # ratio of the fullest rank's tokens to the mean
    fullest: float  # tokens of the fullest rank

    def of_rank(self, rank: int) -> list[int]:
        """Returns the target ranks of the families that a rank holds."""
        return [target for target, owner in zip(self.targets, self.owners, strict=True) if owner == rank]


def dealt(loads_by_rank: Sequence[Sequence[int]]) -> Dealt:
    """Assigns the families of all ranks, given their numbers of tokens."""
    loads = [load for part in loads_by_rank for load in part]
    owners = [rank for rank, part in enumerate(loads_by_rank) for _ in part]
    world = len(loads_by_rank)
    targets = assign_to_ranks(loads, owners, world)
    uneven = imbalance(loads, targets, world)
    return Dealt(owners, targets, uneven, uneven * sum(loads) / world)


def evenly_dealt(
    parts: list[_Family], deal: Callable[[list[_Family]], Dealt], world: int
) -> tuple[list[_Family], Dealt]:
    """Returns families and their ranks, halving all families as long as that makes the ranks more even.

    deal: assigns families; a collective if the ranks of a run call it.
    """
    best = deal(parts)
    while best.imbalance > _UNEVEN and len(best.targets) < _MOST_PARTS * world:
        halved = [half for part in parts for half in (part.halves() if part.num_samples > 1 else [part])]
        other = deal(halved)
        if other.fullest >= best.fullest:
            break
        parts, best = halved, other
    return parts, best


def cut_to_fit(pending: Sequence[_Family], max_tokens: int | None) -> list[_Family]:
    """Cuts families in half until each part fits or is a single sample."""
    left, fitting = list(pending), []
    while left:
        family = left.pop()
        if max_tokens is None or family.num_tokens <= max_tokens or family.num_samples == 1:
            fitting.append(family)
        else:
            left += family.halves()
    return fitting


def filled(families: Sequence[_Family], max_samples: int) -> list[list[_Family]]:
    """Returns micro-batches of up to max_samples, keeping as many samples of a family together as fit."""
    pieces = [piece for family in families for piece in family.pieces(max_samples)]
    parts: list[list[_Family]] = []
    for piece in sorted(pieces, key=lambda piece: (-piece.num_samples, piece.key)):
        room = (part for part in parts if sum(one.num_samples for one in part) + piece.num_samples <= max_samples)
        part = next(room, None)
        if part is None:
            parts.append([piece])
        else:
            part.append(piece)
    return parts
