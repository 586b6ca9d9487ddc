"""Tokens dealt out to two ranks, by hand."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import torch
from torch.testing import assert_close

from lightrl.models.packed_attention import Scoring, packed_layout
from lightrl.models.policy import response_batch
from lightrl.models.token_split import split_tokens
from lightrl.records import VisionInputs
from lightrl.sharing.attention import tree_layout
from lightrl.sharing.dealing import DealtLayout, deal
from lightrl.sharing.tree import KeptBatch, SharedBatch, kept_tokens, prefix_tree, share

PROMPT = tuple(range(20, 40))
SEQUENCES = [(*PROMPT, 1, 2), (*PROMPT, 3, 4, 5)]


def kept() -> KeptBatch:
    """25 tokens: 20 of the prompt, 2 and 3 of the responses."""
    shared = share(response_batch([(PROMPT, sequence[20:]) for sequence in SEQUENCES]))
    assert isinstance(shared, SharedBatch)
    return kept_tokens(shared, shared.tree)


def test_every_rank_gets_an_even_share_of_prompt_and_responses() -> None:
    batch, dealt = kept(), deal(kept(), 2)
    assert batch.input_ids.tolist() == [*PROMPT, 1, 2, 3, 4, 5]
    first, second = (split_tokens(dealt, SimpleNamespace(rank=rank, size=2)) for rank in range(2))
    assert first.input_ids.tolist() == [*PROMPT[0::2], 1, 3, 5]
    assert second.input_ids.tolist() == [*PROMPT[1::2], 2, 4, 0]  # the last one is padding
    assert second.position_ids.tolist() == [*range(1, 20, 2), 21, 21, 0]
    assert dealt.cu_seqlens == first.cu_seqlens == (0, 20, 22, 25, 26)
    # The scored positions and the last tokens are those of the same tokens as before.
    assert (
        dealt.input_ids[dealt.score_index].tolist() == batch.input_ids[batch.score_index].tolist() == [39, 1, 39, 3, 4]
    )
    assert dealt.input_ids[list(dealt.last_tokens)].tolist() == [2, 5]


def test_features_of_images_go_with_their_tokens() -> None:
    """Tokens 2 to 5 are the features 0 to 3: rank 0 of two gets 2 and 4 at its places 1 and 2, rank 1 gets 3 and 5."""
    nothing = torch.zeros(0)
    vision = VisionInputs(
        pixel_values=nothing,
        grid_thw=nothing,
        feature_positions=torch.tensor([2, 3, 4, 5]),
        feature_index=torch.tensor([0, 1, 2, 3]),
    )
    batch = replace(kept(), vision=vision)
    dealt = deal(batch, 2)
    assert dealt.vision is not None
    assert dealt.vision.feature_positions.tolist() == [1, 2, 14, 15]  # ascending; 13 tokens on each rank
    assert dealt.vision.feature_index.tolist() == [0, 2, 1, 3]
    positions = dealt.vision.feature_positions
    assert dealt.input_ids[positions].tolist() == [PROMPT[place] for place in (2, 4, 3, 5)]


def test_attention_is_that_of_the_tree() -> None:
    bounds = (0, 22, 45)
    tree = prefix_tree(np.concatenate(SEQUENCES), bounds)
    assert tree is not None
    layout = tree_layout(tree)
    plain = packed_layout(layout.cu_seqlens, torch.device("cpu"))
    dealt = DealtLayout(
        cu_seqlens=plain.cu_seqlens, runs=plain.runs, boundaries=None, tree=layout, size=5
    )  # 25 tokens: 5 for each of 5 ranks
    draw = torch.Generator().manual_seed(0)
    parts = [torch.randn(1, heads, 25, 8, generator=draw) for heads in (4, 2, 2)]
    scoring = Scoring(scale=0.3, window=None, softcap=None, sinks=None)
    order = torch.tensor([rank + 5 * place for rank in range(5) for place in range(5)])
    wanted = layout.attend(*parts, scoring)[:, order]
    assert_close(dealt.attend(*(part[:, :, order] for part in parts), scoring), wanted, atol=0, rtol=0)
