"""Where tensors belong in a serving model, over modules with the attributes that vLLM's and SGLang's layers have."""

from types import SimpleNamespace

import torch
from torch import nn

from lightrl.engines.weights.account import Place
from lightrl.engines.weights.placement import Placement, ServerRules

RULES = ServerRules()


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
    finder = Placement(serving_model(), RULES)
    assert finder.places("layer.norm.weight", (6,)) == [Place("layer.norm.weight", (), ())]
    assert finder.places("layer.embed_tokens.weight", (5, 6)) == [
        Place("layer.embed_tokens.weight", ((0, 0, 5),), ((0, 0, 5),))  # 5 of 8 padded rows
    ]
    # 8 query rows, then 4 key rows, then 4 value rows
    assert finder.places("layer.v_proj.weight", (4, 6)) == [Place("layer.qkv_proj.weight", ((0, 12, 4),), ((0, 0, 4),))]
    assert finder.places("layer.up_proj.weight", (8, 6)) == [
        Place("layer.gate_up_proj.weight", ((0, 8, 8),), ((0, 0, 8),))
    ]


def test_slices_of_the_second_of_two_ranks() -> None:
    finder = Placement(serving_model(1, 2), RULES, tp_rank=1, tp_size=2)
    assert finder.places("layer.o_proj.weight", (6, 8)) == [Place("layer.o_proj.weight", (), ((1, 4, 4),))]
    assert finder.places("layer.embed_tokens.weight", (5, 6)) == [
        Place("layer.embed_tokens.weight", ((0, 0, 1),), ((0, 4, 1),))  # the fifth row alone
    ]
    # its 2 query heads are rows 4 to 8 of the trainer's, its one key head rows 2 to 4, behind 4 query rows of its own
    assert finder.places("layer.q_proj.weight", (8, 6)) == [Place("layer.qkv_proj.weight", ((0, 0, 4),), ((0, 4, 4),))]
    assert finder.places("layer.k_proj.weight", (4, 6)) == [Place("layer.qkv_proj.weight", ((0, 4, 2),), ((0, 2, 2),))]
    assert finder.places("layer.gate_proj.weight", (8, 6)) == [
        Place("layer.gate_up_proj.weight", ((0, 0, 4),), ((0, 4, 4),))
    ]


def test_key_heads_are_repeated_where_there_are_more_ranks() -> None:
    # 4 ranks, 2 key heads: ranks 2 and 3 have the second, rows 2 to 4
    for rank, first in ((0, 0), (1, 0), (2, 2), (3, 2)):
        finder = Placement(serving_model(rank, 4) if rank < 2 else _of_four(rank), RULES, tp_rank=rank, tp_size=4)
        (place,) = finder.places("layer.k_proj.weight", (4, 6))
        assert place == Place("layer.qkv_proj.weight", ((0, 2, 2),), ((0, first, 2),))


def _of_four(rank: int) -> nn.Module:
    model, layer = nn.Module(), nn.Module()
    layer.qkv_proj = attention(rank, 4)
    model.layer = layer
    return model


def test_experts_stacked_or_one_by_one() -> None:
    finder = Placement(serving_model(1, 2), RULES, tp_rank=1, tp_size=2)
    # 3 experts of intermediate size 4: this rank holds rows 2 to 4 of each gate and, behind them, of each up
    assert finder.places("layer.experts.gate_up_proj", (3, 8, 6)) == [
        Place("layer.experts.w13_weight", ((1, 0, 2),), ((1, 2, 2),)),
        Place("layer.experts.w13_weight", ((1, 2, 2),), ((1, 6, 2),)),
    ]
    assert finder.places("layer.experts.down_proj", (3, 6, 4)) == [Place("layer.experts.w2_weight", (), ((2, 2, 2),))]
    assert finder.places("layer.experts.2.up_proj.weight", (4, 6)) == [
        Place("layer.experts.w13_weight", ((0, 2, 1), (1, 2, 2)), ((0, 2, 2),))
    ]
    assert finder.places("layer.experts.2.down_proj.weight", (6, 4)) == [
        Place("layer.experts.w2_weight", ((0, 2, 1),), ((1, 2, 2),))
    ]
    (first,) = finder.places("layer.experts.0.down_proj.weight", (6, 4)) or ()
    assert first.held == ((0, 0, 1),)
    assert finder.places("layer.experts.3.down_proj.weight", (6, 4)) == []  # another rank has it
    packed = Placement(serving_model(), ServerRules(compares_experts=False))
    assert packed.places("layer.experts.down_proj", (3, 6, 4)) is None


def test_what_is_fused_on_both_sides_is_compared_part_by_part_unless_it_may_be_reordered() -> None:
    finder = Placement(serving_model(1, 2), RULES, tp_rank=1, tp_size=2)
    assert finder.places("layer.qkv.weight", (16, 6)) == [
        Place("layer.qkv.weight", ((0, 0, 4),), ((0, 4, 4),)),
        Place("layer.qkv.weight", ((0, 4, 2),), ((0, 8 + 2, 2),)),
        Place("layer.qkv.weight", ((0, 6, 2),), ((0, 12 + 2, 2),)),
    ]
    assert finder.places("layer.query_key_value.weight", (16, 6)) is None


def test_unknown_names_and_shapes_have_no_place() -> None:
    finder = Placement(serving_model(), RULES)
    for name, shape in (
        ("layer.other.weight", (6,)),
        ("layer.norm.weight", (7,)),
        ("layer.k_proj.weight", (3, 6)),
        ("layer.experts.gate_up_proj", (3, 7, 6)),
        ("layer.o_proj.weight", (8, 8)),
    ):
        assert finder.places(name, shape) is None


def test_models_inside_a_model_rename_too() -> None:
    model = nn.Module()
    model.inner = serving_model()
    rules = {"orig_to_new_substr": {}, "orig_to_new_suffix": {}}
    model.hf_to_vllm_mapper = SimpleNamespace(**rules, orig_to_new_prefix={"model.": "inner."})
    model.inner.hf_to_vllm_mapper = SimpleNamespace(**rules, orig_to_new_prefix={"block.": "layer."})
    finder = Placement(model, RULES)
    assert finder.places("model.block.norm.weight", (6,)) == [Place("inner.layer.norm.weight", (), ())]


def test_a_model_renames_parts_and_endings_of_names() -> None:
    model = serving_model()
    model.hf_to_vllm_mapper = SimpleNamespace(
        orig_to_new_substr={".block.": "."}, orig_to_new_prefix={}, orig_to_new_suffix={".gamma": ".weight", ".b": None}
    )
    finder = Placement(model, RULES)
    assert finder.places("layer.block.norm.gamma", (6,)) == [Place("layer.norm.weight")]
    assert finder.own_name("layer.norm.b") == "layer.norm.b"


def test_a_server_may_know_a_name_by_an_ending_that_only_one_parameter_has() -> None:
    model = nn.Module()
    model.first, model.second = nn.Module(), nn.Module()
    model.first.norm, model.second.norm = nn.LayerNorm(2), nn.LayerNorm(2)
    model.first.qkv_proj = attention(0, 1)
    finder = Placement(model, ServerRules(renamed={"qkv": "qkv_proj"}, finds_by_ending=True))
    assert finder.places("other.norm.weight", (2,)) is None  # two have it
    assert finder.places("model.first.norm.weight", (2,)) == [Place("first.norm.weight")]
    assert Placement(model, RULES).places("model.first.norm.weight", (2,)) is None
    whole = finder.places("visual.first.qkv.weight", (16, 6))
    assert whole is not None
    assert [place.parameter for place in whole] == ["first.qkv_proj.weight"] * 3


def test_the_part_of_a_place_is_where_it_was_found() -> None:
    model = serving_model(1, 2)  # on a rank: 4 rows of gate and 4 of up; 4 of queries, 2 of keys, 2 of values
    model.projector = nn.Module()
    model.projector.up_proj = Weights(5, 6)  # the only one of this ending, of another shape than the layer's
    finder = Placement(model, ServerRules(finds_by_ending=True), tp_rank=1, tp_size=2)
    shapes = {"gate_proj": 8, "up_proj": 8, "q_proj": 8, "k_proj": 4, "v_proj": 4}
    places = {name: finder.places(f"layer.{name}.weight", (rows, 6)) for name, rows in shapes.items()}
    assert {name: [finder.part_of(place) for place in found or ()] for name, found in places.items()} == {
        "gate_proj": [0],
        "up_proj": [1],
        "q_proj": [0],
        "k_proj": [1],
        "v_proj": [2],
    }
    (whole,) = finder.places("layer.o_proj.weight", (6, 8)) or ()
    assert finder.part_of(whole) == 0


def test_a_server_may_pad_what_a_checkpoint_holds() -> None:
    model = serving_model(1, 2)  # on a rank: 4 rows of gate and 4 of up, 4 columns of o_proj, experts of 2
    rules = ServerRules(pads=True)
    finder = Placement(model, rules, tp_rank=1, tp_size=2)
    # 7 of 8 rows: the second rank has 3 of its 4
    assert finder.places("layer.gate_proj.weight", (7, 6)) == [
        Place("layer.gate_up_proj.weight", ((0, 0, 3),), ((0, 4, 3),))
    ]
    assert finder.places("layer.up_proj.weight", (7, 6)) == [
        Place("layer.gate_up_proj.weight", ((0, 4, 3),), ((0, 4, 3),))
    ]
    assert finder.places("layer.o_proj.weight", (6, 7)) == [Place("layer.o_proj.weight", ((1, 0, 3),), ((1, 4, 3),))]
    assert finder.places("layer.experts.2.up_proj.weight", (3, 6)) == [
        Place("layer.experts.w13_weight", ((0, 2, 1), (1, 2, 1)), ((0, 2, 1),))
    ]
    assert finder.places("layer.experts.2.down_proj.weight", (6, 3)) == [
        Place("layer.experts.w2_weight", ((0, 2, 1), (2, 0, 1)), ((1, 2, 1),))
    ]
    assert finder.places("layer.gate_proj.weight", (3, 6)) == []  # all of it is on the first rank
    assert finder.places("layer.gate_proj.weight", (9, 6)) is None
    assert Placement(model, RULES, tp_rank=1, tp_size=2).places("layer.gate_proj.weight", (7, 6)) is None


def test_quantised_values_are_not_compared() -> None:
    model = nn.Module()
    model.register_parameter("w", nn.Parameter(torch.zeros(3).to(torch.int8), requires_grad=False))
    assert Placement(model, RULES).places("w", (3,)) is None


def test_an_expert_of_another_rank_is_known_and_not_here() -> None:
    model = serving_model()
    model.layer.experts.moe_ep_rank = 1  # experts 3 to 5
    finder = Placement(model, RULES)
    assert finder.places("layer.experts.2.down_proj.weight", (6, 4)) == []
    assert finder.places("layer.experts.4.down_proj.weight", (6, 4)) == [
        Place("layer.experts.w2_weight", ((0, 1, 1),), ((1, 0, 4),))
    ]


def composed_weight_loader():
    """As vLLM and SGLang name the one of -exp(A_log)."""
    return lambda parameter, given: None


def mamba_v2_sharded_weight_loader():
    """As they name the one that gives each rank a slice of every part of a convolution."""
    return lambda parameter, given: None


def test_what_a_loader_computes_or_deals_out_is_not_compared() -> None:
    model, layer = nn.Module(), nn.Module()
    layer.A, layer.D = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))
    layer.A.weight_loader = composed_weight_loader()
    layer.conv1d, layer.in_proj = Weights(8, 1, 3, tp_size=2), Weights(8, 6, tp_size=2)
    layer.conv1d.weight.weight_loader = mamba_v2_sharded_weight_loader()
    model.layer = layer
    finder = Placement(model, RULES, tp_size=2)
    assert finder.places("layer.A", (4,)) is None
    assert finder.places("layer.conv1d.weight", (16, 1, 3)) is None  # its rows are not those from 0 to 8
    assert finder.places("layer.conv1d.weight", (8, 1, 3)) == [Place("layer.conv1d.weight")]  # one rank has all of them
    assert finder.places("layer.D", (4,)) == [Place("layer.D")]
    assert finder.places("layer.in_proj.weight", (16, 6)) == [Place("layer.in_proj.weight", (), ((0, 0, 8),))]
