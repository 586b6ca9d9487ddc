"""Where tensors belong in a serving model, over modules with the attributes that vLLM's and SGLang's layers have."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from lightrl.engines.weights.placement import Delivery, Landed, Place, named_shapes


class Weights(nn.Module):
    """A layer with a weight of this shape and what else is given."""

    def __init__(self, *shape: int, leaf: str = "weight", **attributes: object) -> None:
        super().__init__()
        setattr(self, leaf, nn.Parameter(torch.zeros(shape)))
        for name, value in attributes.items():
            setattr(self, name, value)


def attention(rank: int, size: int) -> nn.Module:
    """4 query heads of 2, 2 key and value heads, hidden size 6, on rank of size: as vLLM builds it."""
    kv_heads, replicas = max(1, 2 // size), max(1, size // 2)
    rows = (4 // size + 2 * kv_heads) * 2
    return Weights(
        rows,
        6,
        num_heads=4 // size,
        num_kv_heads=kv_heads,
        num_kv_head_replicas=replicas,
        total_num_heads=4,
        total_num_kv_heads=2,
        head_size=2,
        output_sizes=[8, kv_heads * 2 * size, kv_heads * 2 * size],
        tp_rank=rank,
        tp_size=size,
    )


def serving_model(rank: int = 0, size: int = 1) -> nn.Module:
    model, layer = nn.Module(), nn.Module()
    layer.qkv_proj = attention(rank, size)
    layer.o_proj = Weights(6, 8 // size, tp_rank=rank, tp_size=size)
    layer.gate_up_proj = Weights(2 * 8 // size, 6, output_sizes=[8, 8], tp_rank=rank, tp_size=size)
    layer.qkv = attention(rank, size)
    layer.query_key_value = attention(rank, size)
    layer.norm = Weights(6)
    layer.experts = nn.Module()
    layer.experts.register_parameter("w13_weight", nn.Parameter(torch.zeros(3, 8 // size, 6)))
    layer.experts.register_parameter("w2_weight", nn.Parameter(torch.zeros(3, 6, 4 // size)))
    start, end = (0, 5) if size == 1 else ((0, 4), (4, 5))[rank]
    rows = SimpleNamespace(org_vocab_start_index=start, org_vocab_end_index=end)
    layer.embed_tokens = Weights(8 // size, 6, shard_indices=rows)
    model.layer = layer
    return model


def test_whole_tensors_of_one_rank() -> None:
    landed = Landed(serving_model())
    assert landed.places("layer.norm.weight", (6,)) == [Place("layer.norm.weight", (), ())]
    assert landed.places("layer.embed_tokens.weight", (5, 6)) == [
        Place("layer.embed_tokens.weight", ((0, 0, 5),), ((0, 0, 5),))  # 5 of 8 padded rows
    ]
    # 8 query rows, then 4 key rows, then 4 value rows
    assert landed.places("layer.v_proj.weight", (4, 6)) == [Place("layer.qkv_proj.weight", ((0, 12, 4),), ((0, 0, 4),))]
    assert landed.places("layer.up_proj.weight", (8, 6)) == [
        Place("layer.gate_up_proj.weight", ((0, 8, 8),), ((0, 0, 8),))
    ]


def test_slices_of_the_second_of_two_ranks() -> None:
    landed = Landed(serving_model(1, 2), tp_rank=1, tp_size=2)
    assert landed.places("layer.o_proj.weight", (6, 8)) == [Place("layer.o_proj.weight", (), ((1, 4, 4),))]
    assert landed.places("layer.embed_tokens.weight", (5, 6)) == [
        Place("layer.embed_tokens.weight", ((0, 0, 1),), ((0, 4, 1),))  # the fifth row alone
    ]
    # its 2 query heads are rows 4 to 8 of the trainer's, its one key head rows 2 to 4, behind 4 query rows of its own
    assert landed.places("layer.q_proj.weight", (8, 6)) == [Place("layer.qkv_proj.weight", ((0, 0, 4),), ((0, 4, 4),))]
    assert landed.places("layer.k_proj.weight", (4, 6)) == [Place("layer.qkv_proj.weight", ((0, 4, 2),), ((0, 2, 2),))]
    assert landed.places("layer.gate_proj.weight", (8, 6)) == [
        Place("layer.gate_up_proj.weight", ((0, 0, 4),), ((0, 4, 4),))
    ]


def test_key_heads_are_repeated_where_there_are_more_ranks() -> None:
    # 4 ranks, 2 key heads: ranks 2 and 3 have the second, rows 2 to 4
    for rank, first in ((0, 0), (1, 0), (2, 2), (3, 2)):
        landed = Landed(serving_model(rank, 4) if rank < 2 else _of_four(rank), tp_rank=rank, tp_size=4)
        (place,) = landed.places("layer.k_proj.weight", (4, 6))
        assert place == Place("layer.qkv_proj.weight", ((0, 2, 2),), ((0, first, 2),))


def _of_four(rank: int) -> nn.Module:
    model, layer = nn.Module(), nn.Module()
    layer.qkv_proj = attention(rank, 4)
    model.layer = layer
    return model


def test_experts_stacked_or_one_by_one() -> None:
    landed = Landed(serving_model(1, 2), tp_rank=1, tp_size=2)
    # 3 experts of intermediate size 4: this rank holds rows 2 to 4 of each gate and, behind them, of each up
    assert landed.places("layer.experts.gate_up_proj", (3, 8, 6)) == [
        Place("layer.experts.w13_weight", ((1, 0, 2),), ((1, 2, 2),)),
        Place("layer.experts.w13_weight", ((1, 2, 2),), ((1, 6, 2),)),
    ]
    assert landed.places("layer.experts.down_proj", (3, 6, 4)) == [Place("layer.experts.w2_weight", (), ((2, 2, 2),))]
    assert landed.places("layer.experts.2.up_proj.weight", (4, 6)) == [
        Place("layer.experts.w13_weight", ((0, 2, 1), (1, 2, 2)), ((0, 2, 2),))
    ]
    assert landed.places("layer.experts.2.down_proj.weight", (6, 4)) == [
        Place("layer.experts.w2_weight", ((0, 2, 1),), ((1, 2, 2),))
    ]
    packed = Landed(serving_model(), compare_experts=False)
    assert packed.places("layer.experts.down_proj", (3, 6, 4)) == []


def test_what_is_fused_on_both_sides_is_compared_part_by_part_unless_it_may_be_reordered() -> None:
    landed = Landed(serving_model(1, 2), tp_rank=1, tp_size=2)
    assert landed.places("layer.qkv.weight", (16, 6)) == [
        Place("layer.qkv.weight", ((0, 0, 4),), ((0, 4, 4),)),
        Place("layer.qkv.weight", ((0, 4, 2),), ((0, 8 + 2, 2),)),
        Place("layer.qkv.weight", ((0, 6, 2),), ((0, 12 + 2, 2),)),
    ]
    assert landed.places("layer.query_key_value.weight", (16, 6)) == []


def test_unknown_names_and_shapes_have_no_place() -> None:
    landed = Landed(serving_model())
    for name, shape in (
        ("layer.other.weight", (6,)),
        ("layer.norm.weight", (7,)),
        ("layer.k_proj.weight", (3, 6)),
        ("layer.experts.gate_up_proj", (3, 7, 6)),
        ("layer.o_proj.weight", (8, 8)),
    ):
        assert landed.places(name, shape) == []
        assert not landed.note(name, torch.zeros(shape))
    assert landed.unread[0] == "layer.other.weight"


def test_models_inside_a_model_rename_too() -> None:
    model = nn.Module()
    model.inner = serving_model()
    rules = {"orig_to_new_substr": {}, "orig_to_new_suffix": {}}
    model.hf_to_vllm_mapper = SimpleNamespace(**rules, orig_to_new_prefix={"model.": "inner."})
    model.inner.hf_to_vllm_mapper = SimpleNamespace(**rules, orig_to_new_prefix={"block.": "layer."})
    landed = Landed(model)
    assert landed.places("model.block.norm.weight", (6,)) == [Place("inner.layer.norm.weight", (), ())]


def test_what_is_not_held_is_named() -> None:
    model = serving_model()
    given = {name: torch.randn(6, 8 if "o_proj" in name else 6) for name in ("layer.o_proj.weight",)}
    landed = Landed(model)
    assert landed.note("layer.o_proj.weight", given["layer.o_proj.weight"])
    assert landed.problems() == ["the engine does not hold layer.o_proj.weight as it was given"]
    with torch.no_grad():
        model.layer.o_proj.weight.copy_(given["layer.o_proj.weight"])
    assert landed.problems() == []
    with torch.no_grad():
        model.layer.o_proj.weight.mul_(1 + 1e-6)
    assert len(landed.problems()) == 1
    model.layer.o_proj.weight.data = torch.empty(0)
    assert len(landed.problems()) == 1


def test_a_square_matrix_may_be_kept_transposed() -> None:
    model = nn.Module()
    model.c_proj = Weights(4, 4)
    given = torch.randn(4, 4)
    landed = Landed(model)
    landed.note("c_proj.weight", given)
    with torch.no_grad():
        model.c_proj.weight.copy_(given.T)
    assert landed.problems() == []
    with torch.no_grad():
        model.c_proj.weight.copy_(given.roll(1, 0))
    assert len(landed.problems()) == 1


# ---- Delivery

SHAPES = {"layer.norm.weight": (6,), "layer.o_proj.weight": (6, 8), "layer.extra": (2,)}


def pairs_of(shapes: dict[str, tuple[int, ...]], consumed: list[str]) -> Iterator[tuple[str, Tensor]]:
    for name, shape in shapes.items():
        yield name, torch.ones(shape)
        consumed.append(name)


def run(load, sent, expected=SHAPES):
    consumed: list[str] = []
    delivery = Delivery(load, Landed(serving_model()), expected)
    delivery.run(pairs_of(sent, consumed))
    assert consumed == list(sent)  # whatever happened: on other ranks the tensors may come out of collectives
    return delivery


def test_a_name_that_the_loader_ignores_is_found_out() -> None:
    delivery = run(lambda pairs: {name for name, _ in pairs if name != "layer.extra"}, SHAPES)
    assert delivery.problems == ["layer.extra was ignored by the engine's loader"]
    assert delivery.loaded == {"layer.norm.weight", "layer.o_proj.weight"}
    assert delivery.missing([]) == []


def test_unknown_misshapen_and_missing_parameters_never_reach_the_loader() -> None:
    seen: list[str] = []
    delivery = run(
        lambda pairs: seen.extend(name for name, _ in pairs),
        {"layer.norm.weight": (5,), "a": (1,), "layer.extra": (2,)},
    )
    assert seen == ["layer.extra"]
    assert delivery.problems == ["misshapen layer.norm.weight: got (5,), not (6,)", "unknown a"]
    assert delivery.missing([]) == ["missing layer.norm.weight", "missing layer.o_proj.weight"]
    assert delivery.missing([frozenset(["layer.o_proj.weight", "layer.extra"])]) == ["missing layer.norm.weight"]


def test_a_refusal_names_the_parameter_and_the_rest_goes_on() -> None:
    def load(pairs):
        for name, _ in pairs:
            assert "norm" not in name, "shapes differ"
        return {"layer.o_proj.weight"}

    delivery = run(load, SHAPES)
    assert delivery.problems == ["layer.norm.weight was refused: AssertionError: shapes differ"]
    assert delivery.seen == set(SHAPES)


def test_a_loader_that_stops_early_is_named() -> None:
    delivery = run(lambda pairs: {"x"}, SHAPES)
    assert delivery.problems == ["the loader stopped at the first parameter"]


def test_an_error_of_the_trainers_is_raised_as_it_is() -> None:
    def broken():
        yield "layer.norm.weight", torch.ones(6)
        raise KeyError("a rank is gone")

    delivery = Delivery(lambda pairs: [name for name, _ in pairs], Landed(serving_model()), SHAPES)
    with pytest.raises(KeyError, match="a rank is gone"):
        delivery.run(broken())


def test_tied_parameters_are_one_group() -> None:
    model = nn.Module()
    model.embed, model.head, model.other = Weights(3, 2), Weights(3, 2), Weights(1)
    model.head.weight = model.embed.weight
    shapes, tied = named_shapes(model)
    assert shapes == {"embed.weight": (3, 2), "head.weight": (3, 2), "other.weight": (1,)}
    assert tied == [frozenset(["embed.weight", "head.weight"])]
