"""Packing, loading and reading back, against small layers that hold their weights as SGLang's do."""

import json

import pytest
import torch
from torch import nn

from lightrl.engines.sglang import loader
from lightrl.engines.sglang.loader import RULES, Bucket, description, is_loaded, read_reports
from lightrl.engines.weights.placement import Placement

HEADS, KV_HEADS, SIZE, HIDDEN, INNER, VOCAB = 4, 2, 2, 6, 10, 7


class _Layer(nn.Module):
    def __init__(self, weight, **attributes):
        super().__init__()
        self.weight = nn.Parameter(weight)
        for name, value in attributes.items():
            setattr(self, name, value)


class _Range:
    def __init__(self, start, end):
        self.org_vocab_start_index, self.org_vocab_end_index = start, end


def checkpoint():
    draw = torch.Generator().manual_seed(0)
    shapes = {
        "model.language_model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.language_model.layers.0.self_attn.q_proj.weight": (HEADS * SIZE, HIDDEN),
        "model.language_model.layers.0.self_attn.k_proj.weight": (KV_HEADS * SIZE, HIDDEN),
        "model.language_model.layers.0.self_attn.v_proj.weight": (KV_HEADS * SIZE, HIDDEN),
        "model.language_model.layers.0.self_attn.o_proj.weight": (HIDDEN, HEADS * SIZE),
        "model.language_model.layers.0.mlp.gate_proj.weight": (INNER, HIDDEN),
        "model.language_model.layers.0.mlp.up_proj.weight": (INNER, HIDDEN),
        "model.language_model.layers.0.mlp.experts.1.up_proj.weight": (INNER, HIDDEN),
        "model.language_model.layers.0.mlp.experts.1.down_proj.weight": (HIDDEN, INNER),
        "visual.blocks.0.attn.qkv.weight": (3 * HEADS * SIZE, HIDDEN),
        "visual.patch_embed.proj.weight": (HIDDEN, 3, 2, 2),
    }
    return {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}


def engine_model(full, rank, size):
    """What rank of size holds of the checkpoint, laid out by hand."""
    text = {name.removeprefix("model.language_model."): tensor for name, tensor in full.items()}
    heads, kv, inner = HEADS * SIZE // size, KV_HEADS * SIZE // size, INNER // size

    def rows(name, count):
        return text[name][rank * count : (rank + 1) * count]

    attention = {
        "num_heads": HEADS // size,
        "num_kv_heads": KV_HEADS // size,
        "num_kv_head_replicas": 1,
        "head_size": SIZE,
        "total_num_heads": HEADS,
        "total_num_kv_heads": KV_HEADS,
        "output_sizes": [HEADS * SIZE, KV_HEADS * SIZE, KV_HEADS * SIZE],
    }
    end = min(VOCAB, (rank + 1) * 4) if size > 1 else VOCAB
    vocabulary = _Range(rank * 4 if size > 1 else 0, end)
    embedding = torch.zeros(4 if size > 1 else 8, HIDDEN)
    own = text["embed_tokens.weight"][vocabulary.org_vocab_start_index : end]
    embedding[: len(own)] = own
    qkv = [rows(f"layers.0.self_attn.{name}_proj.weight", heads if name == "q" else kv) for name in "qkv"]
    column = slice(rank * heads, (rank + 1) * heads)
    gate_up = [rows(f"layers.0.mlp.{name}_proj.weight", inner) for name in ("gate", "up")]
    layer = nn.Module()
    layer.self_attn, layer.mlp = nn.Module(), nn.Module()
    layer.self_attn.qkv_proj = _Layer(torch.cat(qkv), **attention)
    layer.self_attn.o_proj = _Layer(text["layers.0.self_attn.o_proj.weight"][:, column].contiguous())
    layer.mlp.gate_up_proj = _Layer(torch.cat(gate_up), output_sizes=[INNER, INNER])
    layer.mlp.experts = nn.Module()
    layer.mlp.experts.moe_tp_rank, layer.mlp.experts.moe_tp_size = rank, size
    w13, w2 = torch.zeros(2, 2 * inner, HIDDEN), torch.zeros(2, HIDDEN, inner)
    w13[1, inner:] = rows("layers.0.mlp.experts.1.up_proj.weight", inner)
    w2[1] = text["layers.0.mlp.experts.1.down_proj.weight"][:, rank * inner : (rank + 1) * inner]
    layer.mlp.experts.w13_weight, layer.mlp.experts.w2_weight = nn.Parameter(w13), nn.Parameter(w2)
    model = nn.Module()
    model.model, model.visual = nn.Module(), nn.Module()
    model.model.embed_tokens = _Layer(embedding, shard_indices=vocabulary)
    model.model.layers = nn.ModuleList([layer])
    block = nn.Module()
    block.attn = nn.Module()
    thirds = text["visual.blocks.0.attn.qkv.weight"].chunk(3)
    parts = [third[rank * heads : (rank + 1) * heads] for third in thirds]
    alike = {"num_kv_heads": HEADS // size, "total_num_kv_heads": HEADS, "output_sizes": [HEADS * SIZE] * 3}
    block.attn.qkv_proj = _Layer(torch.cat(parts), **{**attention, **alike})
    model.visual.blocks = nn.ModuleList([block])
    model.visual.patch_embed = nn.Module()
    model.visual.patch_embed.proj = _Layer(text["visual.patch_embed.proj.weight"].reshape(HIDDEN, -1).clone())
    return model


@pytest.mark.parametrize(("rank", "size"), [(0, 1), (0, 2), (1, 2)])
def test_every_layout_is_found_and_every_change_is_seen(rank, size):
    full = checkpoint()
    placement = Placement(engine_model(full, rank, size), RULES, tp_rank=rank, tp_size=size)
    for name, tensor in full.items():
        assert is_loaded(placement, name, description(tensor)) is True, name
        assert is_loaded(placement, name, description(tensor * 1.01)) is False, name
    gate, up = (f"model.language_model.layers.0.mlp.{part}_proj.weight" for part in ("gate", "up"))
    assert is_loaded(placement, gate, description(full[gate]))
    assert not is_loaded(placement, gate, description(full[up]))
    assert is_loaded(placement, "nowhere.weight", description(torch.zeros(3))) is None


def test_key_heads_that_ranks_share():
    weight = torch.arange(12.0)[:, None]  # 4 query heads of 2, then 1 key head and 1 value head of 2, on 4 ranks
    rank = 3
    held = torch.cat([weight[rank * 2 : rank * 2 + 2], weight[8:10], weight[10:12]])
    attributes = {"num_heads": 1, "num_kv_heads": 1, "num_kv_head_replicas": 4, "head_size": 2}
    attributes |= {"total_num_heads": 4, "total_num_kv_heads": 1, "output_sizes": [8, 8, 8]}
    model = nn.Module()
    model.attn = nn.Module()
    model.attn.qkv_proj = _Layer(held, **attributes)
    placement = Placement(model, RULES, tp_rank=rank, tp_size=4)
    for name, tensor in (("q", weight[:8]), ("k", weight[8:10]), ("v", weight[10:12])):
        assert is_loaded(placement, f"attn.{name}_proj.weight", description(tensor.clone())) is True


class _Target(nn.Module):
    """Loads as SGLang's models do: unknown names in silence."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 5), nn.Linear(3, 5, dtype=torch.bfloat16)
        self.renamed = nn.Linear(4, 4, bias=False)

    def load_weights(self, weights):
        own = dict(self.named_parameters())
        for name, tensor in weights:
            target = own.get("renamed.weight" if name == "elsewhere.w" else name)
            if target is not None:
                assert target.shape == tensor.shape, f"{tuple(target.shape)} is not {tuple(tensor.shape)}"
                target.data.copy_(tensor)


def send(model, tensors, folder, monkeypatch, num_buckets=2):
    monkeypatch.setattr(loader, "_tp_rank_and_size", lambda: (0, 1))
    names = list(tensors)
    cut = len(names) // num_buckets
    for index, part in enumerate((names[:cut], names[cut:])):
        bucket = Bucket()
        for name in part:
            bucket.add(name, tensors[name])
        packed = bucket.pack(report=str(folder), is_first=index == 0, is_last=index == 1, device=torch.device("cpu"))
        loader.load_bucket(model, packed)
    return read_reports(folder, 1)


def test_buckets_of_mixed_types_land(tmp_path, monkeypatch):
    model = _Target()
    tensors = {
        "b.bias": torch.randn(5).bfloat16(),
        "a.weight": torch.randn(5, 3),
        "b.weight": torch.randn(5, 3).bfloat16(),
        "a.bias": torch.randn(5),
    }
    assert send(model, tensors, tmp_path, monkeypatch) == ([], [])
    own = dict(model.named_parameters())
    assert all(torch.equal(own[name], tensor) for name, tensor in tensors.items())
    assert list(tmp_path.iterdir()) == []


def test_what_does_not_land_is_named_and_nothing_is_raised(tmp_path, monkeypatch):
    tensors = {
        "a.weight": torch.randn(5, 3),
        "a.bias": torch.randn(4),
        "nowhere.weight": torch.randn(2),
        "elsewhere.w": torch.randn(4, 4),
    }
    problems, unread = send(_Target(), tensors, tmp_path, monkeypatch)
    assert problems == [
        "a.bias does not fit: AssertionError (5,) is not (4,)",
        "nowhere.weight is no parameter of _Target in SGLang",
    ]
    assert unread == ["elsewhere.w"]  # it was written somewhere


def test_a_later_tensor_that_overwrites_is_seen(tmp_path, monkeypatch):
    model = _Target()
    real = model.load_weights
    model.load_weights = lambda weights: real([("a.weight", tensor) for _, tensor in weights])
    problems, _ = send(model, {"a.weight": torch.randn(5, 3), "b.weight": torch.randn(5, 3)}, tmp_path, monkeypatch)
    assert problems == ["a.weight is not held as it was given", "b.weight is not held as it was given"]


def test_a_scheduler_that_says_nothing_is_a_problem(tmp_path):
    (tmp_path / "1.json").write_text(json.dumps({"problems": [], "unread": []}))
    assert read_reports(tmp_path, 2) == (["1 of 2 schedulers reported that they loaded the weights"], [])
