"""A pack split over two ranks, by hand."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightrl.models.policy import response_batch
from lightrl.models.token_split import apply_to_split, held_positions, split_tokens
from lightrl.records import VisionInputs

BATCH = response_batch([([5], [6]), ([7], [8, 9])])  # tokens 5 6 | 7 8 9, boundaries 0 2 5


@dataclass
class Alone:
    """One rank of a group, whose other ranks contribute zeros."""

    rank: int
    size: int = 2

    def exchange(self, part: Tensor) -> Tensor:
        raise NotImplementedError

    def total(self, part: Tensor) -> Tensor:
        return part


def test_a_pack_is_padded_by_a_sequence_of_its_own_and_cut() -> None:
    # 5 tokens and one of padding: 3 for each rank
    first, second = (split_tokens(BATCH, Alone(rank)) for rank in range(2))
    assert (first.input_ids.tolist(), second.input_ids.tolist()) == ([5, 6, 7], [8, 9, 0])
    assert (first.position_ids.tolist(), second.position_ids.tolist()) == ([0, 1, 0], [1, 2, 0])
    assert first.cu_seqlens == second.cu_seqlens == (0, 2, 5, 6)
    # 5 tokens and three of padding: 2 for each of four ranks
    parts = [split_tokens(BATCH, Alone(rank, size=4)) for rank in range(4)]
    assert [part.input_ids.tolist() for part in parts] == [[5, 6], [7, 8], [9, 0], [0, 0]]
    assert [part.cu_seqlens for part in parts] == [(0, 2, 5, 8)] * 4


def test_a_rank_holds_the_features_of_its_tokens() -> None:
    """Tokens 0, 3 and 4 are the features 2, 0 and 1 of images: the last two are the places 0 and 1 of rank 1."""
    nothing = torch.zeros(0)
    vision = VisionInputs(
        pixel_values=nothing,
        grid_thw=nothing,
        feature_positions=torch.tensor([0, 3, 4]),
        feature_index=torch.tensor([2, 0, 1]),
    )
    parts = [split_tokens(replace(BATCH, vision=vision), Alone(rank)).vision for rank in range(2)]
    held = [(part.feature_positions.tolist(), part.feature_index.tolist()) for part in parts if part is not None]
    assert held == [([0], [2]), ([0, 1], [0, 1])]
    assert split_tokens(BATCH, Alone(0)).vision is None


def test_a_rank_scores_what_it_holds() -> None:
    # Positions 0, 2 and 3 predict the responses; rank 1 holds positions 3 to 5.
    first, second = (held_positions(BATCH.score_index, 3, Alone(rank)) for rank in range(2))
    assert (first[0].tolist(), first[1].tolist()) == ([0, 2], [0, 1])
    assert (second[0].tolist(), second[1].tolist()) == ([0], [2])

    def score(rows: Tensor, which: Tensor) -> tuple[Tensor, Tensor]:
        return rows[:, 0], 10.0 * which

    hidden = torch.tensor([[1.5], [0.0], [2.5]])
    scores, indices = apply_to_split(score, hidden, BATCH.score_index, Alone(0))
    assert (scores.tolist(), indices.tolist()) == ([1.5, 2.5, 0.0], [0.0, 10.0, 0.0])
    scores, _ = apply_to_split(score, hidden + 2, BATCH.score_index, Alone(1))
    assert scores.tolist() == [0.0, 0.0, 3.5]
