"""Policy against the model's own logits, for the output transforms that transformers' models have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch.testing import assert_close
from transformers import PreTrainedModel
from two_sequences import two_sequences

from lightrl.models.policy import Policy, persistent_buffers, predicting_positions, response_batch
from lightrl.models.score_check import check_scores

CPU = torch.device("cpu")
VOCAB = 53
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama_tied": lambda: transformers.LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "qwen2": lambda: transformers.Qwen2Config(**SHAPE, tie_word_embeddings=False),
    "qwen3": lambda: transformers.Qwen3Config(**SHAPE, head_dim=8, tie_word_embeddings=False),
    "gemma2_softcap": lambda: transformers.Gemma2Config(**SHAPE, head_dim=8, final_logit_softcapping=0.5),
    "cohere_multiplies": lambda: transformers.CohereConfig(**SHAPE, logit_scale=3.0),
    "falcon_h1_multiplies": lambda: transformers.FalconH1Config(
        **SHAPE, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8, lm_head_multiplier=0.05
    ),
    "granite_divides": lambda: transformers.GraniteConfig(**SHAPE, logits_scaling=4.0),
    "hyperclovax_multiplies": lambda: transformers.HyperCLOVAXConfig(**SHAPE, logits_scaling=4.0),
    "phi_head_bias": lambda: transformers.PhiConfig(**{**SHAPE, "num_key_value_heads": 2}),
    "gpt2_dropout": lambda: transformers.GPT2Config(vocab_size=VOCAB, n_embd=16, n_layer=2, n_head=2, n_positions=64),
    "opt": lambda: transformers.OPTConfig(
        vocab_size=VOCAB, hidden_size=16, ffn_dim=24, num_hidden_layers=2, num_attention_heads=2, word_embed_proj_dim=16
    ),
}


def tiny_model(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]())
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    result: PreTrainedModel = model.eval()
    return result


def reference_scores(model: PreTrainedModel, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies of the same four tokens, one unpadded sequence at a time.

    By eager attention: the fused one of transformers leaves Gemma 2's softcap out.
    """
    model.set_attn_implementation("eager")
    rows = [model(torch.tensor([[10, 11]])).logits[0, :1], model(torch.tensor([[5, 6, 7, 8, 9]])).logits[0, 1:4]]
    logprobs = (torch.cat(rows) / temperature).log_softmax(-1)
    return logprobs[torch.arange(4), torch.tensor([11, 7, 8, 9])], -(logprobs.exp() * logprobs).sum(-1)


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_scores_equal_the_models_own(name: str) -> None:
    model = tiny_model(name)
    with torch.no_grad():
        expected = reference_scores(model, 0.7)
    policy = Policy(model).train()
    scores = policy(two_sequences(0.7))
    assert_close(scores.logprobs, expected[0], atol=1e-5, rtol=1e-5)
    assert_close(scores.entropy, expected[1], atol=1e-5, rtol=1e-5)
    check_scores(policy, CPU)
    assert policy.training


def test_gradients_equal_the_models_own() -> None:
    model = tiny_model("llama_tied")
    logprobs, entropy = reference_scores(model, 0.7)
    weights = torch.tensor([0.5, -1.0, 2.0, 0.25])
    (logprobs * weights + 0.1 * entropy).sum().backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()

    scores = Policy(model)(two_sequences(0.7))
    (scores.logprobs * weights + 0.1 * scores.entropy).sum().backward()
    for name, parameter in model.named_parameters():
        assert_close(parameter.grad, expected[name], atol=1e-5, rtol=1e-4)


def test_without_entropy_it_is_nan() -> None:
    policy = Policy(tiny_model("llama_tied"), entropy=False)
    scores = policy(two_sequences(1.0))
    assert scores.entropy.isnan().all()
    assert scores.logprobs.isfinite().all()


def test_frozen_body_still_trains_the_head() -> None:
    policy = Policy(tiny_model("qwen3"))
    policy.hf.get_decoder().requires_grad_(False)
    policy(two_sequences(1.0)).logprobs.sum().backward()
    trained = [name for name, parameter in policy.hf.named_parameters() if parameter.grad is not None]
    assert trained == ["lm_head.weight"]


def test_every_parameter_is_used_in_forward() -> None:
    policy = Policy(tiny_model("phi_head_bias"))
    policy(two_sequences(1.0)).logprobs.sum().backward()
    assert all(parameter.grad is not None for parameter in policy.parameters())


def test_a_hidden_state_predicts_the_token_behind_it() -> None:
    #   position  0  1 | 2 3 4 5 6 | 7 8
    #   token     10 11| 5 6 7 8 9 | 3 4    scored: 11; 7 8 9; none
    # The state at position 0 predicts token 11 at position 1; those at 3, 4 and 5 predict tokens 7, 8 and 9.
    assert predicting_positions((0, 2, 7, 9), (1, 3, 0)) == [0, 3, 4, 5]


def test_a_pack_of_pairs_scores_their_responses() -> None:
    batch, expected = response_batch([([10], [11]), ([5, 6], [7, 8, 9])], 0.5), two_sequences(0.5)
    for name in ("input_ids", "position_ids", "score_index", "targets", "sequence_index"):
        assert torch.equal(getattr(batch, name), getattr(expected, name)), name
    assert (batch.cu_seqlens, batch.keys, batch.temperature) == ((0, 2, 7), ((0, 0), (0, 1)), 0.5)
    assert not batch.loss_mask.any()


def test_check_scores_names_a_model_with_unknown_logits() -> None:
    policy = Policy(tiny_model("qwen3"))
    own_forward = policy.hf.forward

    def doubled(*args: Any, **kwargs: Any) -> Any:
        output = own_forward(*args, **kwargs)
        output.logits = output.logits * 2
        return output

    policy.hf.forward = doubled
    with pytest.raises(ValueError, match="model type 'qwen3' differ from its own logits"):
        check_scores(policy, CPU)


def test_policy_is_the_actor() -> None:
    assert Policy(tiny_model("qwen3")).is_actor


class _WithCount(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.register_buffer("count", torch.zeros(2))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def get_extra_state(self) -> str:
        return "no tensor"


def test_the_buffers_of_a_saved_model_are_those_that_a_checkpoint_holds() -> None:
    inner = _WithCount()
    model = torch.nn.ModuleDict({"b": inner, "a": _WithCount()})
    found = persistent_buffers(model)
    assert [name for name, _ in found] == ["a.count", "b.count"]
    assert found[1][1] is inner.count
    assert [name for name, _ in persistent_buffers(inner)] == ["count"]
