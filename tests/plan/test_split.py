"""Sequence parallelism on paper."""

from typing import Any

import torch

from lightrl.config import GRPOConfig
from lightrl.models import token_split
from lightrl.plan.activations import PackShape, Settings, needs_of
from lightrl.plan.models import policy_of
from lightrl.plan.split import PaperGroup, split_over


def test_shapes_and_gradients_of_an_exchange() -> None:
    group = PaperGroup(2)
    part = torch.ones(1, 4, 3, 8, requires_grad=True)  # all 4 heads of 3 tokens
    heads = group.exchange(part)
    assert heads.shape == (1, 2, 6, 8)  # 2 heads of all 6 tokens
    assert group.exchange(torch.ones(1, 6, 2, 8)).shape == (1, 3, 4, 8)
    heads.sum().backward()  # type: ignore[no-untyped-call]
    assert part.grad is not None
    assert part.grad.shape == part.shape


def test_a_rank_holds_its_share_and_the_model_is_as_before(small_config: Any) -> None:
    own = token_split.held_positions
    with split_over(torch.nn.Identity(), 2):
        rows, which = token_split.held_positions(torch.arange(7), 5, PaperGroup(2))
        assert len(rows) == len(which) == 4
    assert token_split.held_positions is own
    model = policy_of(small_config, GRPOConfig())
    pack = PackShape(num_sequences=4, length=32, num_scored=24)
    whole, half = (needs_of(model, pack, Settings(sp_size=size)).top for size in (1, 2))
    assert 0.45 * whole < half < 0.8 * whole
