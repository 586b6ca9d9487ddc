"""A forward in training mode is that of evaluation mode, for every kind of noise that transformers' models have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.testing import assert_close

from lightrl.models.policy import Policy, check_scores, response_batch

CPU = torch.device("cpu")
SHAPE: dict[str, Any] = {
    "vocab_size": 53,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
OLD_SHAPE = {"vocab_size": 53, "hidden_size": 16, "ffn_dim": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
CONFIGS: dict[str, Callable[[], Any]] = {
    "mixtral": lambda: transformers.MixtralConfig(**SHAPE, num_local_experts=4, router_jitter_noise=0.3),
    "phimoe": lambda: transformers.PhimoeConfig(
        **SHAPE, num_local_experts=4, router_jitter_noise=0.3, input_jitter_noise=0.3
    ),
    "opt_layerdrop": lambda: transformers.OPTConfig(**OLD_SHAPE, word_embed_proj_dim=16, layerdrop=0.9, dropout=0.5),
    "gpt2": lambda: transformers.GPT2Config(vocab_size=53, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.5),
    "llama": lambda: transformers.LlamaConfig(**SHAPE, attention_dropout=0.5),
}


def policy(name: str) -> Policy:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]())
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.3)
    return Policy(model)


def batch() -> Any:
    return response_batch([([5, 6, 7], [8, 9]), ([10, 11], [12, 13, 14, 15])])


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_training_mode_scores_as_evaluation_mode_does(name: str) -> None:
    model = policy(name)
    with torch.no_grad():
        expected = model.eval()(batch()).logprobs
        for _ in range(3):
            assert_close(model.train()(batch()).logprobs, expected, atol=0, rtol=0)
    assert model.training
    check_scores(model, CPU)


@pytest.mark.parametrize("name", ["mixtral", "phimoe"])
def test_gradient_checkpointing_still_recomputes(name: str) -> None:
    gradients, calls = [], []
    for is_on in (False, True):
        model = policy(name).train()
        if is_on:
            model.hf.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        layer = model.hf.get_decoder().layers[0]
        count: list[int] = []
        layer.register_forward_pre_hook(lambda *_, count=count: count.append(1))
        model(batch()).logprobs.sum().backward()
        gradients.append({key: p.grad for key, p in model.named_parameters()})
        calls.append(len(count))
    assert calls == [1, 2]
    for key, expected in gradients[0].items():
        assert_close(gradients[1][key], expected, atol=1e-6, rtol=0)


class Noisy(nn.Module):
    """Adds noise that nothing names."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: Tensor) -> Tensor:
        result: Tensor = self.inner(hidden)
        return result + torch.rand_like(result) if self.training else result


def test_noise_of_another_kind_is_refused_by_the_name_of_its_module() -> None:
    model = policy("llama")
    layer = model.hf.get_decoder().layers[1]
    layer.mlp = Noisy(layer.mlp)
    with pytest.raises(ValueError, match=r"because of hf.model.layers.1.mlp \(Noisy\): it draws random numbers"):
        check_scores(model, CPU)
