"""Packed attention gives what transformers gives for a padded batch: hidden states and gradients."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F
from torch.testing import assert_close
from transformers import PreTrainedModel

from lightrl.models.packed_attention import (
    _to_heads,
    grouped_attention,
    packed_attention,
    packed_hidden_states,
    packed_layout,
    packed_mask,
    use_packed_attention,
)
from lightrl.models.token_split import TokenSplit

CPU = torch.device("cpu")
VOCAB = 61
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
MOE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**SHAPE),
    "qwen3": lambda: transformers.Qwen3Config(**SHAPE, head_dim=8),
    "gpt2": lambda: transformers.GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64),
    "gemma2": lambda: transformers.Gemma2Config(
        **SHAPE, head_dim=8, sliding_window=6, attn_logit_softcapping=2.0, query_pre_attn_scalar=8
    ),
    "mistral_window": lambda: transformers.MistralConfig(**SHAPE, sliding_window=5),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**SHAPE, **MOE),
    "qwen2_moe_window": lambda: transformers.Qwen2MoeConfig(
        **SHAPE, **MOE, use_sliding_window=True, sliding_window=5, max_window_layers=2
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **SHAPE, head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=6
    ),
}
LENGTHS = (1, 1, 3, 7, 7, 7, 12, 40)


def tiny_model(name: str) -> PreTrainedModel:
    """Random weights, large enough that attention to a wrong token shows."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation="eager")
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    for block in model.modules():
        if hasattr(block, "sinks"):
            torch.nn.init.normal_(block.sinks)
    result: PreTrainedModel = model.eval()
    return result


def random_sequences(lengths: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCAB, (length,), generator=generator) for length in lengths]


def padded_hidden(model: PreTrainedModel, sequences: list[torch.Tensor]) -> torch.Tensor:
    """The same tokens as one right-padded batch, its real places concatenated."""
    ids = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)
    lengths = torch.tensor([len(ids) for ids in sequences])
    mask = torch.arange(ids.shape[1])[None] < lengths[:, None]
    hidden: torch.Tensor = model.get_decoder()(input_ids=ids, attention_mask=mask.long(), use_cache=False)[0]
    return hidden[mask]


def tokens(ids: torch.Tensor, positions: torch.Tensor, boundaries: tuple[int, ...]) -> TokenSplit:
    return TokenSplit(input_ids=ids, position_ids=positions, cu_seqlens=boundaries)


def packed_hidden(model: PreTrainedModel, sequences: list[torch.Tensor]) -> torch.Tensor:
    lengths = [len(ids) for ids in sequences]
    boundaries = tuple(sum(lengths[:place]) for place in range(len(lengths) + 1))
    positions = torch.cat([torch.arange(length) for length in lengths])
    return packed_hidden_states(model.get_decoder(), tokens(torch.cat(sequences), positions, boundaries))


def gradients(model: PreTrainedModel, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    weight = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(2))
    (hidden * weight).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_pack_equals_padded_batch(name: str, checkpointing: bool) -> None:
    model = tiny_model(name)
    sequences = random_sequences(LENGTHS)
    expected = padded_hidden(model, sequences)
    expected_gradients = gradients(model, expected)

    use_packed_attention(model.get_decoder())
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        turn_off_dropout(model.train())
    actual = packed_hidden(model, sequences)
    actual_gradients = gradients(model, actual)

    assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    assert actual_gradients.keys() == expected_gradients.keys()
    for key, gradient in expected_gradients.items():
        assert_close(actual_gradients[key], gradient, atol=2e-5 * gradient.abs().max().item(), rtol=1e-4, msg=key)


def turn_off_dropout(model: PreTrainedModel) -> None:
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0


def test_runs_group_adjacent_equal_lengths() -> None:
    # Boundaries 0 1 2 6 10 14 16 are lengths 1 1 4 4 4 2: two of 1, three of 4, one of 2.
    layout = packed_layout((0, 1, 2, 6, 10, 14, 16), CPU)
    assert layout.runs == ((2, 1), (3, 4), (1, 2))
    assert layout.num_tokens == 16
    assert layout.max_length == 4


def attend(lengths: tuple[int, ...], value: list[float], **options: Any) -> list[float]:
    """Attention of one head of size 1 with all queries and keys 0, so that every visible token weighs the same."""
    boundaries = tuple(sum(lengths[:place]) for place in range(len(lengths) + 1))
    zeros = torch.zeros(1, 1, len(value), 1)
    values = torch.tensor(value, dtype=torch.float32).view(1, 1, -1, 1)
    layout = packed_layout(boundaries, CPU)
    output, _ = packed_attention(torch.nn.Module(), zeros, zeros, values, None, packed_layout=layout, **options)
    result: list[float] = output.flatten().tolist()
    return result


def test_each_token_sees_its_own_sequence_up_to_itself() -> None:
    # [1 3], [5 9]: 1, (1+3)/2 = 2, then 5, (5+9)/2 = 7.
    assert attend((2, 2), [1, 3, 5, 9]) == [1, 2, 5, 7]


def test_window_counts_the_token_itself() -> None:
    # Window 2: 2, (2+4)/2 = 3, (4+8)/2 = 6, (8+16)/2 = 12; the next sequence begins anew: 1.
    assert attend((4, 1), [2, 4, 8, 16, 1], sliding_window=2) == [2, 3, 6, 12, 1]
    assert attend((4, 1), [2, 4, 8, 16, 1], sliding_window=2, softcap=3.0) == [2, 3, 6, 12, 1]
    # Window 3, one less than the sequence: 2, 3, (2+4+9)/3 = 5, (4+9+17)/3 = 10.
    assert attend((4,), [2, 4, 9, 17], sliding_window=3) == [2, 3, 5, 10]


def test_mask_of_a_sliding_layer_is_its_window() -> None:
    assert packed_mask(local_size=2) == 2
    assert packed_mask() is None


def test_sink_takes_weight_and_gives_none() -> None:
    # A sink score of 0 is one more token of value 0: 4/2 = 2, (4+8)/3 = 4.
    output = attend((2,), [4, 8], s_aux=torch.zeros(1))
    assert_close(output, [2.0, 4.0], atol=1e-6, rtol=0)


def test_a_rank_that_splits_the_heads_has_their_sinks() -> None:
    group: Any = SimpleNamespace(size=2, rank=1, exchange=lambda part: part)
    heads = torch.zeros(1, 4, 3, 2)
    *_, sinks = _to_heads(group, heads, heads, heads, torch.arange(4.0))
    assert sinks is not None
    assert sinks.tolist() == [2.0, 3.0]


def test_layout_reaches_a_model_that_takes_no_keywords() -> None:
    model = tiny_model("llama")
    sequences = random_sequences((3, 5))
    use_packed_attention(model.get_decoder())
    expected = packed_hidden(model, sequences)

    class NoKeywords(torch.nn.Module):
        def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, use_cache: bool) -> tuple[torch.Tensor]:
            return (model.get_decoder()(input_ids=input_ids, position_ids=position_ids, use_cache=use_cache)[0],)

    positions = torch.tensor([0, 1, 2, 0, 1, 2, 3, 4])
    actual = packed_hidden_states(NoKeywords(), tokens(torch.cat(sequences), positions, (0, 3, 8)))
    assert_close(actual, expected, atol=0, rtol=0)


def test_recomputation_without_boundaries_is_an_error() -> None:
    model = tiny_model("llama")
    use_packed_attention(model.get_decoder())
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()

    class NoKeywords(torch.nn.Module):
        def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, use_cache: bool) -> tuple[torch.Tensor]:
            return (model.get_decoder()(input_ids=input_ids, position_ids=position_ids, use_cache=use_cache)[0],)

    hidden = packed_hidden_states(NoKeywords(), tokens(torch.tensor([1, 2]), torch.tensor([0, 0]), (0, 1, 2)))
    with pytest.raises(ValueError, match="turn gradient checkpointing off"):
        hidden.sum().backward()


def test_call_outside_a_pack_is_an_error() -> None:
    model = tiny_model("llama")
    use_packed_attention(model.get_decoder())
    with pytest.raises(ValueError, match="LlamaAttention was called without the boundaries"):
        model(input_ids=torch.tensor([[1, 2]]), use_cache=False)


def test_padding_mask_is_an_error() -> None:
    with pytest.raises(ValueError, match="takes no attention_mask"):
        packed_mask(attention_mask=torch.ones(1, 3))


def test_dropout_is_an_error() -> None:
    with pytest.raises(ValueError, match="attention dropout 0.1"):
        attend((2,), [1, 2], dropout=0.1)


def test_wrong_boundaries_are_an_error() -> None:
    model = tiny_model("llama")
    use_packed_attention(model.get_decoder())
    with pytest.raises(ValueError, match="cu_seqlens ends at 3 for 2 tokens"):
        packed_hidden_states(model.get_decoder(), tokens(torch.tensor([1, 2]), torch.tensor([0, 1]), (0, 3)))


def test_a_model_that_would_mix_a_pack_is_told_apart() -> None:
    recurrent = transformers.Qwen3NextConfig(
        **SHAPE, **MOE, head_dim=8, layer_types=["linear_attention", "full_attention"]
    )
    own_attention = transformers.BloomConfig(vocab_size=VOCAB, hidden_size=16, n_layer=1, n_head=2)
    for config in (recurrent, own_attention):
        model = transformers.AutoModelForCausalLM.from_config(config)
        assert not use_packed_attention(model.get_decoder())
    assert use_packed_attention(tiny_model("gpt2").get_decoder())


@pytest.mark.parametrize(
    ("dtype", "size", "is_masked", "num_key_heads"),
    [
        (torch.bfloat16, 8, False, 2),  # flash attention takes it as it is
        (torch.bfloat16, 512, False, 4),  # heads too large for it
        (torch.bfloat16, 8, True, 4),  # it takes no mask
        (torch.float32, 8, False, 4),  # nor this type
    ],
)
def test_a_kernel_of_a_gpu_gets_as_many_heads_of_keys_as_it_needs(
    dtype: torch.dtype, size: int, is_masked: bool, num_key_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}

    def kernel(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **settings: Any) -> torch.Tensor:
        given.update(settings, heads=(key.shape[1], value.shape[1]))
        return query

    monkeypatch.setattr(F, "scaled_dot_product_attention", kernel)
    with FakeTensorMode():
        query, *keys = (torch.empty(3, heads, 5, size, device="cuda", dtype=dtype) for heads in (4, 2, 2))
        mask = torch.ones(5, 5, dtype=torch.bool, device="cuda") if is_masked else None
        grouped_attention(query, *keys, mask, 0.5)
    assert given.pop("attn_mask") is mask
    assert given == {
        "heads": (num_key_heads, num_key_heads),
        "is_causal": not is_masked,
        "scale": 0.5,
        "enable_gqa": num_key_heads == 2,
    }
