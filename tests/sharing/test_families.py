"""Families stay together where that is even, by hand; sizes stand for samples."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lightrl.sharing.families import Dealt, cut_to_fit, dealt, evenly_dealt, filled


@dataclass(frozen=True)
class Sized:
    """Samples of 5 tokens behind a prompt of 20."""

    key: tuple[int, int]
    num_samples: int
    label = "A family"

    @property
    def num_tokens(self) -> int:
        return 20 + 5 * self.num_samples

    def halves(self) -> list[Sized]:
        return self.pieces(-(-self.num_samples // 2))

    def pieces(self, max_samples: int) -> list[Sized]:
        starts = range(0, self.num_samples, max_samples)
        return [
            replace(self, key=(self.key[0], start), num_samples=min(max_samples, self.num_samples - start))
            for start in starts
        ]


def sizes(families: list[Sized]) -> list[int]:
    return sorted(family.num_samples for family in families)


def test_families_are_halved_until_they_fit() -> None:
    family = Sized((0, 0), 4)  # 40 tokens; a half 30, a single sample 25
    assert sizes(cut_to_fit([family], None)) == sizes(cut_to_fit([family], 40)) == [4]
    assert sizes(cut_to_fit([family], 39)) == [2, 2]
    assert sizes(cut_to_fit([family], 29)) == sizes(cut_to_fit([family], 1)) == [1, 1, 1, 1]


def test_micro_batches_are_filled_with_pieces() -> None:
    families = [Sized((0, 0), 5), Sized((1, 0), 2)]
    parts = filled(families, 3)
    assert [[(piece.key, piece.num_samples) for piece in part] for part in parts] == [
        [((0, 0), 3)],
        [((0, 3), 2)],
        [((1, 0), 2)],
    ]
    assert [sizes(part) for part in filled(families, 4)] == [[4], [1, 2]]
    assert [sizes(part) for part in filled([Sized((0, 0), 2), Sized((1, 0), 1)], 3)] == [[1, 2]]


def test_one_family_is_spread_over_two_ranks() -> None:
    """Whole, one rank has 60 tokens; in halves each has 40; in quarters each has 2 x 30, and so it stays at halves."""
    parts, found = evenly_dealt([Sized((0, 0), 8)], lambda mine: dealt([[one.num_tokens for one in mine], []]), 2)
    assert sizes(parts) == [4, 4]
    assert (sorted(found.targets), found.imbalance, found.fullest) == ([0, 1], 1.0, 40.0)
    assert found.of_rank(1) == []  # whatever the targets, the second rank held nothing


def test_even_families_stay_where_they_are() -> None:
    whole = [Sized((0, 0), 4), Sized((1, 0), 4)]
    parts, found = evenly_dealt(whole, lambda mine: dealt([[one.num_tokens] for one in mine]), 2)
    assert parts == whole
    assert found.targets == found.owners == [0, 1]


def test_families_are_halved_only_if_ranks_have_few() -> None:
    def deal(mine: list[Sized]) -> Dealt:
        return dealt([[one.num_tokens for one in mine], []])

    # 5 and 4 of 220 tokens: 1,100 on the fullest rank; 9 and 9 halves of 120: 1,080
    assert sizes(evenly_dealt([Sized((number, 0), 40) for number in range(9)], deal, 2)[0]) == [20] * 18
    # 9 and 8 of 420 tokens: 3,780; 17 and 17 halves of 220 would be 3,740
    assert sizes(evenly_dealt([Sized((number, 0), 80) for number in range(17)], deal, 2)[0]) == [80] * 17


def test_families_that_halves_do_not_make_more_even_stay_whole() -> None:
    num_dealt = []

    def deal(mine: list[Sized]) -> Dealt:
        num_dealt.append(len(mine))
        assert len(num_dealt) < 3
        return dealt([[one.num_tokens for one in mine], []])

    parts, found = evenly_dealt([Sized((0, 0), 1)], deal, 2)
    assert (sizes(parts), num_dealt, found.fullest) == ([1], [1, 1], 25.0)
