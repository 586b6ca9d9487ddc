"""Stages on paper compute what a layer of Megatron computes, on small real tensors."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.testing import assert_close

from lightrl.plan.paper_stage import PaperStage, RankShape

SHAPE = RankShape(
    hidden_size=8,
    num_heads=2,
    num_groups=1,
    head_size=4,
    width=6,
    num_rows=10,
    has_query_norm=True,
    has_bias=True,
    num_experts=0,
    all_experts=0,
    experts_per_token=0,
    expert_parts=1,
    split_by=1,
    cp=1,
    lengths=(3, 2),
    num_scored=4,
    recompute=False,
)


def stage(shape: RankShape, *, is_first: bool, is_last: bool) -> PaperStage:
    torch.manual_seed(0)
    made = PaperStage(shape, 2, is_first=is_first, is_last=is_last, has_output=True)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter)
    return made


def gradients(made: PaperStage) -> dict[str, Tensor]:
    made.zero_grad()
    made(made.pack()).sum().backward()
    return {name: item.grad for name, item in made.named_parameters() if item.grad is not None}


def test_shapes_of_each_kind_of_stage() -> None:
    pack = stage(SHAPE, is_first=True, is_last=True).pack()
    assert pack.cu_seqlens == (0, 3, 5)
    assert stage(SHAPE, is_first=True, is_last=False)(pack).shape == (5, 1, 8)
    assert stage(SHAPE, is_first=False, is_last=True)(pack).shape == (2, 4)  # log-probabilities and entropies


def test_every_weight_has_a_gradient_in_every_layout() -> None:
    split = replace(SHAPE, split_by=2, lengths=(4, 2), recompute=True)
    parts = replace(SHAPE, cp=2, lengths=(4, 4))
    experts = replace(SHAPE, num_experts=2, all_experts=4, experts_per_token=2, expert_parts=2)
    for shape in (SHAPE, split, parts, experts):
        made = stage(shape, is_first=True, is_last=True)
        found = gradients(made)
        assert found.keys() == dict(made.named_parameters()).keys()
        assert all(bool(grad.isfinite().all()) for grad in found.values())


def test_a_product_of_projections_by_hand() -> None:
    columns = stage(SHAPE, is_first=True, is_last=False).layers[0].mlp.gate_up  # type: ignore[union-attr]
    hidden = torch.randn(5, 1, 8)
    wanted = torch.cat([F.linear(hidden, part) for part in columns.weights], dim=-1)
    assert_close(columns(hidden), wanted)


def test_recomputed_layers_have_the_same_gradients() -> None:
    kept, again = (stage(replace(SHAPE, recompute=on), is_first=True, is_last=True) for on in (False, True))
    wanted = gradients(kept)
    for name, grad in gradients(again).items():
        assert_close(grad, wanted[name])
