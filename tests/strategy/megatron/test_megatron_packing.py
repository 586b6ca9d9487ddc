"""Which tokens a rank of context parallelism holds, worked out by hand."""

from __future__ import annotations

import torch

from lightrl.models.policy import response_batch
from lightrl.strategy.megatron.packing import lay_out, own_positions

# Sequences of 5 and 3 tokens.
BATCH = response_batch([((10, 11), (12, 13, 14)), ((20,), (21, 22))])


def test_one_rank_holds_the_pack_as_it_is() -> None:
    pack = lay_out(BATCH, num_parts=1, part=0, multiple=1)
    assert pack.cu_seqlens == BATCH.cu_seqlens
    assert pack.source.tolist() == pack.where.tolist() == [*range(8)]
    assert pack.joined is None


def test_each_rank_takes_a_piece_from_both_ends() -> None:
    # 5 tokens are padded to 8, four pieces of 2: rank 0 has 0 1 and 6 7 (padding), rank 1 has 2 3 and 4 5 (padding).
    # 3 tokens are padded to 4, four pieces of 1: rank 0 has 0 and 3 (padding), rank 1 has 1 2.
    first, second = (lay_out(BATCH, num_parts=2, part=part, multiple=1) for part in (0, 1))
    assert first.cu_seqlens == (0, 8, 12)
    assert first.source.tolist() == [0, 1, 0, 0, 5, 0]
    assert second.source.tolist() == [2, 3, 4, 0, 6, 7]
    assert first.where.tolist() == [0, 1, -1, -1, -1, 4, -1, -1]
    assert second.where.tolist() == [-1, -1, 0, 1, 2, -1, 4, 5]
    # The tokens of both ranks one after the other, in the order of the padded pack.
    positions = [0, 1, 6, 7, 8, 11, 2, 3, 4, 5, 9, 10]
    assert first.joined is not None
    assert torch.tensor(positions)[first.joined].tolist() == [*range(12)]


def test_sequence_parallelism_pads_the_last_sequence() -> None:
    pack = lay_out(BATCH, num_parts=1, part=0, multiple=3)  # 8 tokens become 9
    assert pack.cu_seqlens == (0, 5, 9)
    assert pack.source.shape[0] == 9
    assert pack.where.tolist() == [*range(8)]


def test_each_rank_holds_a_multiple_where_the_tokens_are_split_too() -> None:
    # 8 + 4 tokens are 6 a rank; four more for the last sequence make 16, which are 8 a rank.
    pack = lay_out(BATCH, num_parts=2, part=0, multiple=4)
    assert (pack.cu_seqlens, pack.source.shape[0]) == ((0, 8, 16), 8)


def test_positions_of_a_single_rank_are_all() -> None:
    assert own_positions(3, 1, 0, torch.device("cpu")).tolist() == [0, 1, 2]
