"""What vLLM and SGLang are told, or refused, about frequencies that the trainer fixed."""

from __future__ import annotations

from typing import Any

import pytest
import transformers
from transformers import PreTrainedModel

from lightrl.engines.frequencies import check_sglang, limit_vllm
from lightrl.models.fixed_rope import fix_frequencies

SHAPE: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def phi3(longest: int) -> PreTrainedModel:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "original_max_position_embeddings": 16,
    }
    config = transformers.Phi3Config(
        **SHAPE, max_position_embeddings=64, rope_parameters=rope, original_max_position_embeddings=16
    )
    model = transformers.Phi3ForCausalLM(config)
    fix_frequencies(model, longest)
    return model


def dynamic(longest: int) -> PreTrainedModel:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SHAPE, max_position_embeddings=16, rope_parameters=rope)
    )
    fix_frequencies(model, longest)
    return model


@pytest.mark.parametrize(
    ("longest", "given", "expected"),
    [(12, None, 12), (12, -1, 12), (12, 16, 16), (48, None, 48), (48, -1, 48), (48, 64, 64)],
)
def test_vllm_holds_what_makes_it_choose_the_trainers_factors(longest: int, given: Any, expected: Any) -> None:
    arguments = {} if given is None else {"max_model_len": given}
    limit_vllm(phi3(longest), arguments)
    assert arguments.get("max_model_len") == expected


def test_vllm_with_other_factors_is_refused() -> None:
    with pytest.raises(ValueError, match="max_model_len=32 makes vLLM take the long rope factors of phi3"):
        limit_vllm(phi3(12), {"max_model_len": 32})
    with pytest.raises(ValueError, match="max_model_len=16 makes vLLM take the short rope factors of phi3"):
        limit_vllm(phi3(48), {"max_model_len": 16})


def test_a_dynamic_rope_agrees_with_vllm_up_to_its_own_positions() -> None:
    arguments: dict[str, Any] = {}
    limit_vllm(dynamic(16), arguments)
    assert arguments == {}
    with pytest.raises(ValueError, match="longer than the 16 positions of llama"):
        limit_vllm(dynamic(20), arguments)


def test_sglang_takes_short_factors_only() -> None:
    check_sglang(phi3(16))
    with pytest.raises(ValueError, match="Above 16, SGLang chooses the rope factors of phi3"):
        check_sglang(phi3(17))
    with pytest.raises(ValueError, match="scales the dynamic rope of llama"):
        check_sglang(dynamic(12))
