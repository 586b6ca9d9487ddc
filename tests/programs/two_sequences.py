"""A pack of two short sequences, for the tests of what models say of it."""

from __future__ import annotations

import torch

from lightrl.records import PackedBatch


def two_sequences(temperature: float = 1.0) -> PackedBatch:
    """[10 | 11] and [5 6 | 7 8 9]: prompts before the bar, responses after it."""
    zeros = torch.zeros(4)
    return PackedBatch(
        input_ids=torch.tensor([10, 11, 5, 6, 7, 8, 9]),
        position_ids=torch.tensor([0, 1, 0, 1, 2, 3, 4]),
        cu_seqlens=(0, 2, 7),
        score_index=torch.tensor([0, 3, 4, 5]),
        targets=torch.tensor([11, 7, 8, 9]),
        sequence_index=torch.tensor([0, 1, 1, 1]),
        loss_mask=zeros == 0,
        advantages=zeros,
        sampler_logprobs=zeros,
        temperature=temperature,
        keys=((0, 0), (1, 0)),
    )
