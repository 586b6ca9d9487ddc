"""The check on a few tokens sees both sides of a model's thresholds, and leaves the model as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from lightrl.models import packed_attention
from lightrl.models.policy import Policy, check_scores, response_batch
from lightrl.models.thresholds import thresholds_in_reach

CPU = torch.device("cpu")
SHAPE: dict[str, Any] = {
    "vocab_size": 53,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 8192,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0, 4.0, 8.0, 16.0],
    "original_max_position_embeddings": 4096,
}


def policy(config: Any) -> Policy:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return Policy(model)


def batch() -> Any:
    return response_batch([([5, 6, 7, 8], [9, 10, 11]), ([5] * 7, [9] * 5)])


def test_a_wrong_window_shows_in_a_short_check(monkeypatch: pytest.MonkeyPatch) -> None:
    model = policy(transformers.MistralConfig(**SHAPE, sliding_window=4096))
    check_scores(model, CPU)
    assert (model.hf.config.sliding_window, model.hf.get_decoder().config.sliding_window) == (4096, 4096)
    visible = packed_attention._visible
    monkeypatch.setattr(
        packed_attention, "_visible", lambda n, window, device: visible(n, window and window + 1, device)
    )
    with pytest.raises(ValueError, match="differ from its own logits"):
        check_scores(model, CPU)


def test_the_last_sequence_lies_around_the_length_at_which_a_rope_changes() -> None:
    model = policy(transformers.Phi3Config(**SHAPE, rope_parameters=LONGROPE, original_max_position_embeddings=4096))
    with thresholds_in_reach(model.hf, batch()) as moved:
        assert moved.position_ids.tolist() == [*range(7), *range(4090, 4102)]


def test_frequencies_that_follow_the_call_show_in_a_short_check(monkeypatch: pytest.MonkeyPatch) -> None:
    config = transformers.Phi3Config(**SHAPE, rope_parameters=LONGROPE, original_max_position_embeddings=4096)
    check_scores(policy(config), CPU)
    monkeypatch.setattr(packed_attention, "varies_with_length", lambda config: False)
    with pytest.raises(ValueError, match="mixes tokens"):
        check_scores(policy(config), CPU)


def test_a_model_without_thresholds_is_checked_as_it_is() -> None:
    model, given = policy(transformers.LlamaConfig(**SHAPE)), batch()
    with thresholds_in_reach(model.hf, given) as seen:
        assert seen is given
