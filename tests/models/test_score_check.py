"""The check of the scores: both sides of a model's thresholds, every kind of noise, and which models a run checks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.testing import assert_close

from lightrl.models import packed_attention
from lightrl.models import policy as policy_module
from lightrl.models.policy import Policy, needs_score_check, response_batch
from lightrl.models.score_check import check_scores, thresholds_in_reach

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


def policy(config: Any) -> Policy:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.3)
    return Policy(model)


def batch() -> Any:
    return response_batch([([5, 6, 7, 8], [9, 10, 11]), ([5] * 7, [9] * 5)])


@pytest.mark.parametrize(
    ("config", "needed"),
    [
        (transformers.LlamaConfig(**SHAPE), False),
        (transformers.Qwen3Config(**SHAPE, head_dim=8), False),
        (transformers.Qwen2Config(**SHAPE, use_sliding_window=True, max_window_layers=0), True),
        (
            transformers.LlamaConfig(
                **SHAPE, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
            ),
            True,
        ),
        (transformers.Phi3Config(**SHAPE), True),
    ],
)
def test_a_run_checks_every_model_that_the_tests_do_not(config: Any, needed: bool) -> None:
    assert needs_score_check(policy(config).hf) == needed


def test_a_run_checks_every_model_of_a_library_that_the_tests_do_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_module.transformers, "__version__", "5.190.1")
    assert needs_score_check(policy(transformers.LlamaConfig(**SHAPE)).hf)


def test_a_run_checks_a_model_of_code_that_came_with_it() -> None:
    class LlamaForCausalLM(transformers.LlamaForCausalLM):
        """Such as trust_remote_code loads: the name is known, the class is not."""

    assert needs_score_check(LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)))


def test_a_wrong_window_shows_in_a_short_check(monkeypatch: pytest.MonkeyPatch) -> None:
    model = policy(transformers.MistralConfig(**SHAPE, sliding_window=4096))
    check_scores(model, CPU)
    assert (model.hf.config.sliding_window, model.hf.get_decoder().config.sliding_window) == (4096, 4096)
    visible = packed_attention.visible
    monkeypatch.setattr(
        packed_attention, "visible", lambda n, keys, window, device: visible(n, keys, window and window + 1, device)
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


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_training_mode_scores_as_evaluation_mode_does(name: str) -> None:
    model = policy(CONFIGS[name]())
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
        model = policy(CONFIGS[name]()).train()
        if is_on:
            model.hf.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        attention = (
            model.hf.get_decoder().layers[0].self_attn
        )  # hooks of the layer may be outside of what is recomputed
        count: list[int] = []
        attention.register_forward_pre_hook(lambda *_, count=count: count.append(1))
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


class ScaledHead(nn.Linear):
    """Scales logits by weights that begin at 1, so that no score shows them."""

    def __init__(self, head: nn.Linear) -> None:
        super().__init__(head.in_features, head.out_features, bias=False)
        self.weight = head.weight
        self.logit_scale = nn.Parameter(torch.ones(head.out_features))

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (the name in torch)
        return super().forward(input) * self.logit_scale


def test_a_head_with_weights_that_would_not_train_is_refused() -> None:
    model = policy(transformers.LlamaConfig(**SHAPE))
    check_scores(model, CPU)
    model.hf.lm_head = ScaledHead(model.hf.lm_head)
    with pytest.raises(ValueError, match=r"'llama' cannot be trained: its output layer also has logit_scale, which "):
        check_scores(model, CPU)


def test_noise_of_another_kind_is_refused_by_the_name_of_its_module() -> None:
    model = policy(CONFIGS["llama"]())
    layer = model.hf.get_decoder().layers[1]
    layer.mlp = Noisy(layer.mlp)
    with pytest.raises(ValueError, match=r"because of hf.model.layers.1.mlp \(Noisy\): it draws random numbers"):
        check_scores(model, CPU)
