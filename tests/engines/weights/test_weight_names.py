"""Checkpoint names for a mixture of experts and a vision-language model."""

import pytest
import torch
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from lightrl.engines.base import skeleton
from lightrl.engines.weights.names import checkpoint_pairs

TEXT = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}
MOE = {**TEXT, "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 4, "decoder_sparse_step": 1}
ROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 8, "num_heads": 2, "out_hidden_size": 16}


def moe():
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**MOE))


def vlm():
    return Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(text_config={**TEXT, "rope_parameters": ROPE}, vision_config=VISION)
    )


def sorted_pairs(model):
    return sorted((name, parameter.detach()) for name, parameter in model.named_parameters())


@pytest.mark.parametrize("make", [moe, vlm])
def test_names_and_values_are_those_of_a_saved_checkpoint(make, tmp_path):
    from safetensors.torch import load_file

    model = make()
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    pairs = list(checkpoint_pairs(skeleton(model), sorted_pairs(model)))
    assert sorted(name for name, _ in pairs) == sorted(saved)
    for name, tensor in pairs:
        assert torch.equal(tensor, saved[name]), name


def test_one_layer_of_experts_is_held_at_a_time():
    model = moe()
    taken = []

    def watched():
        for name, tensor in sorted_pairs(model):
            taken.append(name)
            yield name, tensor

    first_of_layer_1 = next(
        name for name, _ in checkpoint_pairs(skeleton(model), watched()) if name.startswith("model.layers.0.")
    )
    assert first_of_layer_1
    assert not any(name.startswith("model.layers.1.self_attn") for name in taken)


def test_a_plain_model_goes_through_as_it_is():
    model = Qwen3ForCausalLM(Qwen3Config(**TEXT))
    pairs = sorted_pairs(model)
    assert all(a is b for (_, a), (_, b) in zip(checkpoint_pairs(skeleton(model), pairs), pairs, strict=True))
