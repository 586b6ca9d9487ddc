"""The critic's values against the hidden states of transformers' own forward, one sequence at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.testing import assert_close
from transformers import BertConfig, BertModel
from two_sequences import two_sequences

from lightrl.data.packing import dummy_batch
from lightrl.models.critic import ActorCritic, Critic, ValueHead, load_critic, load_value_head, save_value_head
from lightrl.models.policy import Policy

SHAPE: dict[str, Any] = {
    "vocab_size": 53,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
CONFIGS: dict[str, Any] = {
    "llama_tied": transformers.LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "qwen3": transformers.Qwen3Config(**SHAPE, head_dim=8, tie_word_embeddings=False),
    "gpt2": transformers.GPT2Config(vocab_size=53, n_embd=16, n_layer=2, n_head=2, n_positions=64),
}


def language_model(name: str) -> Any:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name])
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


def saved(name: str, folder: Path) -> str:
    language_model(name).save_pretrained(folder)
    return str(folder)


def expected_values(model: Any, head: ValueHead) -> tuple[Tensor, Tensor]:
    """Of the places that predict 11, 7, 8 and 9, and of the last place of each sequence."""
    model.base_model.set_attn_implementation("eager")
    one, two = (model.base_model(torch.tensor([ids]))[0][0] for ids in ([10, 11], [5, 6, 7, 8, 9]))
    values = [(hidden @ head.weight.T + head.bias)[:, 0] for hidden in (one, two)]
    return torch.cat([values[0][:1], values[1][1:4]]), torch.stack([values[0][1], values[1][4]])


@pytest.mark.parametrize("name", list(CONFIGS))
def test_values_equal_the_models_own_hidden_states(name: str, tmp_path: Path) -> None:
    critic = load_critic(saved(name, tmp_path), materialize=True, init_std=0.5, seed=3)
    found = critic(two_sequences())
    values, final_values = expected_values(language_model(name), critic.value_head)
    assert_close(found.values, values, atol=1e-5, rtol=1e-5)
    assert_close(found.final_values, final_values, atol=1e-5, rtol=1e-5)
    assert len(set(found.values.tolist())) == 4
    found.values.sum().backward()
    assert [n for n, parameter in critic.named_parameters() if parameter.grad is None] == []
    assert not any("lm_head" in n for n, _ in critic.named_parameters())
    assert not critic.is_actor


def test_a_new_head_is_zero_or_drawn_from_the_seed(tmp_path: Path) -> None:
    path = saved("qwen3", tmp_path)
    zero = load_critic(path, materialize=True, init_std=0.0, seed=0)
    assert zero(two_sequences()).values.tolist() == [0.0] * 4
    config = CONFIGS["qwen3"]
    first, again, other = (
        load_value_head(path, config, materialize=True, init_std=0.1, seed=seed).weight for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    on_meta = load_critic(path, materialize=False, init_std=0.1, seed=1)
    assert all(parameter.is_meta for parameter in on_meta.parameters())
    assert dict(on_meta.named_parameters()).keys() == dict(zero.named_parameters()).keys()


def test_a_saved_critic_is_loaded_with_its_head(tmp_path: Path) -> None:
    critic = load_critic(saved("qwen3", tmp_path / "policy"), materialize=True, init_std=0.5, seed=1)
    critic.save_pretrained(tmp_path / "critic", dict(critic.state_dict()))
    with pytest.raises(ValueError, match=r"--critic.head_init_std 0.5 has no effect: .*critic has a value head"):
        load_critic(str(tmp_path / "critic"), materialize=True, init_std=0.5, seed=0)
    again = load_critic(str(tmp_path / "critic"), materialize=True, init_std=0.0, seed=0)
    assert_close(again(two_sequences()).values, critic(two_sequences()).values, atol=0, rtol=0)
    transformers.AutoModel.from_pretrained(tmp_path / "critic")  # others read the body


def test_a_reward_models_score_is_where_the_head_starts(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.Qwen3Config(**SHAPE, head_dim=8, num_labels=1)
    reward_model = transformers.AutoModelForSequenceClassification.from_config(config)
    reward_model.save_pretrained(tmp_path / "reward")
    critic = load_critic(str(tmp_path / "reward"), materialize=True, init_std=0.0, seed=0)
    assert torch.equal(critic.value_head.weight, reward_model.score.weight)
    assert critic.value_head.bias.tolist() == [0.0]
    config.num_labels = 2
    transformers.AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "two")
    with pytest.raises(ValueError, match=r"weight has shape \[2, 16\], but a critic of this model needs \[1, 16\]"):
        load_critic(str(tmp_path / "two"), materialize=True, init_std=0.0, seed=0)


@pytest.mark.parametrize("kind", ["score", "v_head.summary", "value_head"])
@pytest.mark.parametrize("size", ["1GB", "5KB"])  # in one file, and in several
def test_a_critic_of_another_program_keeps_its_head_with_the_bias(kind: str, size: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.Qwen3Config(**SHAPE, head_dim=8, num_labels=1)
    theirs = transformers.AutoModelForTokenClassification.from_config(config).eval()
    torch.nn.init.normal_(theirs.score.bias)
    state = {name.replace("score.", f"{kind}."): value for name, value in theirs.state_dict().items()}
    theirs.save_pretrained(tmp_path, state_dict=state, max_shard_size=size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (size == "5KB")
    values = load_critic(str(tmp_path), materialize=True, init_std=0.0, seed=0)(two_sequences()).values
    wanted = [theirs(torch.tensor([ids])).logits[0, :, 0] for ids in ([10, 11], [5, 6, 7, 8, 9])]
    assert_close(values, torch.cat([wanted[0][:1], wanted[1][1:4]]), atol=1e-6, rtol=1e-5)


def test_the_head_computes_in_float32_in_any_case(tmp_path: Path) -> None:
    critic = load_critic(saved("qwen3", tmp_path), materialize=True, init_std=0.5, seed=1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        values = critic(two_sequences()).values
    assert values.dtype == torch.float32
    rounded = values.to(torch.bfloat16).float()
    assert not torch.equal(values, rounded)


def test_a_policy_with_a_value_head_says_what_both_say(tmp_path: Path) -> None:
    path = saved("llama_tied", tmp_path)
    critic = load_critic(path, materialize=True, init_std=0.5, seed=1)
    both = ActorCritic(language_model("llama_tied"), critic.value_head)
    found = both(two_sequences())
    policy = Policy(language_model("llama_tied"))
    assert_close(found.logprobs, policy(two_sequences()).logprobs, atol=0, rtol=0)
    assert_close(found.values, critic(two_sequences()).values, atol=1e-6, rtol=1e-6)
    assert_close(found.final_values, critic(two_sequences()).final_values, atol=1e-6, rtol=1e-6)
    # The engine and the exported model get the language model alone.
    assert {name for name, _ in both.hf.named_parameters()} == {name for name, _ in policy.hf.named_parameters()}
    save_value_head(tmp_path, dict(both.value_head.state_dict()))
    head = load_value_head(path, both.hf.config, materialize=True, init_std=0.0, seed=0)
    assert torch.equal(head.weight, both.value_head.weight)


def test_a_dummy_batch_gives_a_gradient_of_zero(tmp_path: Path) -> None:
    critic = load_critic(saved("qwen3", tmp_path), materialize=True, init_std=0.5, seed=1)
    (critic(dummy_batch(temperature=1.0)).values * 0).sum().backward()
    assert all(not parameter.grad.any() for parameter in critic.parameters() if parameter.grad is not None)


def test_a_model_that_lacks_weights_is_told(tmp_path: Path) -> None:
    path = saved("qwen3", tmp_path)
    body = transformers.AutoModel.from_pretrained(path)
    state = {name: value for name, value in body.state_dict().items() if "norm" not in name}
    body.save_pretrained(tmp_path / "part", state_dict=state)
    with pytest.raises(ValueError, match="part lacks weights: layers.0.input_layernorm.weight"):
        load_critic(str(tmp_path / "part"), materialize=True, init_std=0.0, seed=0)
    assert isinstance(Critic(body, ValueHead(16)), Critic)


@pytest.mark.parametrize("materialize", [True, False])
def test_an_encoder_is_no_critic(tmp_path: Path, materialize: bool) -> None:
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    BertModel(BertConfig(vocab_size=16, **sizes)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="^--model .*: in BertModel a token sees those after it"):
        load_critic(str(tmp_path), materialize=materialize, init_std=0.0, seed=0)
