"""Rectangles of tensors, worked out by hand, and that the rectangles of all ranks are the whole."""

from __future__ import annotations

import itertools

import pytest
import torch

from lightrl.config import MegatronConfig, StrategyOptions
from lightrl.strategy.megatron.parts import (
    COLUMNS,
    EXPERT_COLUMNS,
    EXPERT_ROWS,
    ROWS,
    WHOLE,
    Part,
    Place,
    Sizes,
    padded_rows,
    part_of,
    sizes_of,
    slot_of,
)


def test_the_options_name_every_size() -> None:
    megatron = MegatronConfig(pp_size=2, vpp_size=3, cp_size=4, ep_size=5, etp_size=6)
    assert sizes_of(StrategyOptions(tp_size=7, megatron=megatron)) == Sizes(tp=7, pp=2, vpp=3, cp=4, ep=5, etp=6)


def test_a_vocabulary_that_does_not_divide() -> None:
    # 7 rows over 2 ranks: ceil(7 / 2) = 4 rows and the other 3.
    sizes = Sizes(tp=2)
    assert part_of((7, 5), ROWS, sizes, Place(tp=0)) == Part((7, 5), (0, 0), (4, 5))
    assert part_of((7, 5), ROWS, sizes, Place(tp=1)) == Part((7, 5), (4, 0), (3, 5))
    assert padded_rows(7, 2) == 8


def test_gate_and_up_of_experts_are_cut_apart() -> None:
    # [4 experts, 2 x 6 rows, 5] as [4, 2, 6, 5]: ep rank 1 has experts 2 and 3, etp rank 1 of 3 columns 2 and 3.
    found = part_of((4, 12, 5), EXPERT_ROWS, Sizes(ep=2, etp=3), Place(ep=1, etp=1))
    assert found == Part((4, 2, 6, 5), (2, 0, 2, 0), (2, 2, 2, 5))


@pytest.mark.parametrize(
    ("shape", "cut", "sizes"),
    [
        ((6, 4), COLUMNS, Sizes(tp=2)),
        ((7, 4), ROWS, Sizes(tp=3)),
        ((4, 12, 5), EXPERT_ROWS, Sizes(ep=2, etp=3)),
        ((4, 5, 6), EXPERT_COLUMNS, Sizes(ep=2, etp=3)),
    ],
)
def test_the_parts_of_all_ranks_are_the_whole(shape: tuple[int, ...], cut: str, sizes: Sizes) -> None:
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    joined = torch.full_like(whole, -1)
    for tp, ep, etp in itertools.product(range(sizes.tp), range(sizes.ep), range(sizes.etp)):
        part = part_of(shape, cut, sizes, Place(tp=tp, ep=ep, etp=etp))
        where = tuple(slice(start, start + size) for start, size in zip(part.offsets, part.shape, strict=True))
        assert (joined.view(part.view)[where] == -1).all()
        joined.view(part.view)[where] = whole.view(part.view)[where]
    assert torch.equal(joined, whole)


def test_layers_go_to_chunks_in_turns() -> None:
    # 8 layers, 2 stages with 2 chunks of 2 layers each: stage 0 has layers 0, 1 and 4, 5.
    sizes, name = Sizes(pp=2, vpp=2), "layers.{}.mlp.up_proj.weight"
    held = {layer: slot_of(name.format(layer), sizes, Place(pp=0), num_layers=8, is_tied=False) for layer in range(8)}
    found = {layer: (slot.chunk, slot.path.split(".")[2]) for layer, slot in held.items() if slot is not None}
    assert found == {0: (0, "0"), 1: (0, "1"), 4: (1, "0"), 5: (1, "1")}


def test_both_ends_hold_a_tied_embedding_and_one_counts() -> None:
    def ends(is_tied: bool) -> list[tuple[str, bool] | None]:
        slots = [
            slot_of("embed_tokens.weight", Sizes(pp=3), Place(pp=pp), num_layers=3, is_tied=is_tied) for pp in range(3)
        ]
        return [None if slot is None else (slot.path, slot.is_copy) for slot in slots]

    assert ends(True) == [("embedding.weight", False), None, ("output_weight", True)]
    assert ends(False) == [("embedding.weight", False), None, None]


def test_an_unknown_parameter_is_refused() -> None:
    with pytest.raises(KeyError):
        slot_of("layers.0.self_attn.sinks", Sizes(), Place(), num_layers=1, is_tied=False)
    assert slot_of("norm.weight", Sizes(), Place(), num_layers=1, is_tied=False).cut == WHOLE  # type: ignore[union-attr]
