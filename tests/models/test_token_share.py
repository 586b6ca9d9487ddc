"""A pack split over two ranks, by hand."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lightrl.models.policy import response_batch
from lightrl.models.token_share import pick, token_share

BATCH = response_batch([([5], [6]), ([7], [8, 9])])  # tokens 5 6 | 7 8 9, boundaries 0 2 5


@dataclass
class Alone:
    """One rank of a group of two, whose other rank contributes zeros."""

    rank: int
    size: int = 2

    def to_heads(self, part: Tensor) -> Tensor:
        raise NotImplementedError

    to_tokens = to_heads

    def total(self, part: Tensor) -> Tensor:
        return part


def test_a_pack_is_padded_by_a_sequence_of_its_own_and_cut() -> None:
    # 5 tokens and one of padding: 3 for each rank
    first, second = (token_share(BATCH, Alone(rank)) for rank in range(2))
    assert (first.input_ids.tolist(), second.input_ids.tolist()) == ([5, 6, 7], [8, 9, 0])
    assert (first.position_ids.tolist(), second.position_ids.tolist()) == ([0, 1, 0], [1, 2, 0])
    assert first.cu_seqlens == second.cu_seqlens == (0, 2, 5, 6)


def test_a_rank_scores_what_it_holds() -> None:
    # Places 0, 2 and 3 predict the responses; rank 1 holds places 3 to 5.
    hidden = torch.zeros(3, 1)
    first, second = (pick(BATCH.score_index, hidden, Alone(rank)) for rank in range(2))
    assert (first.which.tolist(), first.places.tolist()) == ([0, 1], [0, 2])
    assert (second.which.tolist(), second.places.tolist()) == ([2], [0])
    assert first.joined(torch.tensor([1.5, 2.5])).tolist() == [1.5, 2.5, 0.0]
    assert second.joined(torch.tensor([3.5])).tolist() == [0.0, 0.0, 3.5]


def test_without_a_group_the_pack_stays_as_it_is() -> None:
    share = token_share(BATCH, None)
    assert share.input_ids is BATCH.input_ids
    assert share.cu_seqlens == (0, 2, 5)
    picked = pick(BATCH.score_index, torch.zeros(5, 1), None)
    assert picked.places is BATCH.score_index
    values = torch.tensor([1.0, 2.0, 3.0])
    assert picked.joined(values[picked.which]).tolist() == [1.0, 2.0, 3.0]
