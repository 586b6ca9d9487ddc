"""Models score packs with shared beginnings as they score them whole; those that cannot are refused by name."""

from __future__ import annotations

import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from tiny_hybrids import SHAPE as HYBRID_SHAPE
from torch.testing import assert_close

from lightrl.config import GRPOConfig, LoraConfig
from lightrl.metrics import Statistics
from lightrl.models.critic import ActorCritic, Critic, ValueHead
from lightrl.models.lora import WithoutAdapters, add_adapters
from lightrl.models.policy import Policy, response_batch
from lightrl.records import PackedBatch
from lightrl.sharing.model import PromptSharing, attach_sharing, share_by_itself
from lightrl.sharing.tree import SharedBatch, share
from lightrl.strategy import create_strategy

SHAPE: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
CONFIGS: dict[str, Any] = {
    "qwen3": lambda: transformers.Qwen3Config(**SHAPE, head_dim=8),
    "qwen2": lambda: transformers.Qwen2Config(**SHAPE),
    "llama": lambda: transformers.LlamaConfig(**SHAPE),
    "gpt2": lambda: transformers.GPT2Config(vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=64),
    "gemma2": lambda: transformers.Gemma2Config(
        **SHAPE, head_dim=8, sliding_window=6, attn_logit_softcapping=2.0, query_pre_attn_scalar=8
    ),
    "mistral_window": lambda: transformers.MistralConfig(**SHAPE, sliding_window=5),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **SHAPE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
    ),
}
MAMBA = transformers.MambaConfig(vocab_size=61, hidden_size=16, num_hidden_layers=1, state_size=4)
STRATEGY = create_strategy(GRPOConfig(strategy="single"))


def hf_model(name: str) -> Any:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(CONFIGS[name]())


def batches() -> tuple[PackedBatch, PackedBatch]:
    """Returns a pack with two groups and a sample of its own, whole and shared."""
    draw = torch.Generator().manual_seed(3)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(61, (count,), generator=draw).tolist())

    prompts = tokens(20), tokens(11)
    pairs = [(prompt, tokens(count)) for prompt in prompts for count in (4, 1, 4, 7)]
    batch = response_batch(sorted([*pairs, (tokens(3), tokens(9))], key=lambda pair: sum(map(len, pair))))
    shared = share(batch)
    assert isinstance(shared, SharedBatch)
    return batch, shared


def scored(model: Any, batch: PackedBatch) -> list[torch.Tensor]:
    """Returns all scores, and the gradients of a random sum of them."""
    model.zero_grad()
    output = model(batch)
    found = [getattr(output, name, None) for name in ("logprobs", "entropy", "values", "final_values")]
    scores = [values for values in found if isinstance(values, torch.Tensor)]
    torch.manual_seed(1)
    sum((values * torch.randn(values.shape)).sum() for values in scores).backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    return [*(values.detach() for values in scores), *gradients]


def assert_alike(model: Any) -> None:
    whole, shared = (scored(model, batch) for batch in batches())
    assert len(whole) == len(shared) > 2
    for one, other in zip(whole, shared, strict=True):
        assert_close(other, one, atol=2e-6 * max(1.0, one.abs().max().item()), rtol=0)


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_scores_and_gradients_are_those_of_whole_sequences(name: str) -> None:
    policy = Policy(hf_model(name))
    attach_sharing(policy, STRATEGY)
    assert_alike(policy)


def test_what_else_a_forward_takes_is_passed_on() -> None:
    class Scaled(Policy):
        def forward(self, batch: PackedBatch, scale: float = 1.0) -> Any:
            return super().forward(batch).logprobs * scale

    policy = Policy(hf_model("qwen3"))
    attach_sharing(policy, STRATEGY)
    policy.__class__ = Scaled
    for batch in batches():
        assert_close(policy(batch, 0.5), policy(batch) * 0.5)


def test_it_is_computed_once() -> None:
    policy = Policy(hf_model("qwen3"))
    attach_sharing(policy, STRATEGY)
    sizes = []
    policy.hf.model.layers[0].mlp.register_forward_pre_hook(lambda _, args: sizes.append(args[0].shape[1]))
    for batch in batches():
        policy(batch)
    # 4 x 20 + 4 x 11 + 2 x 16 + 12 tokens; the prompts once: 20 + 11 + 2 x 16 + 12
    assert sizes == [168, 75]


def test_critics_adapters_and_checkpointing_go_with_it() -> None:
    head = ValueHead(32)
    torch.nn.init.normal_(head.weight)
    adapted = Policy(hf_model("qwen3"))
    add_adapters(adapted.hf, LoraConfig(rank=2), seed=0)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    checkpointed = Policy(hf_model("qwen3"))
    checkpointed.hf.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    critic = Critic(hf_model("qwen3").model, copy.deepcopy(head))
    for model in (critic, ActorCritic(hf_model("qwen3"), head), adapted, checkpointed.train()):
        attach_sharing(model, STRATEGY)
        assert_alike(model)
    reference = WithoutAdapters(adapted)
    attach_sharing(reference, STRATEGY)  # the same decoder: nothing is attached twice
    with torch.no_grad():
        whole, shared = (reference(batch).logprobs for batch in batches())
    assert_close(shared, whole, atol=2e-6, rtol=0)


def test_models_with_a_state_are_refused() -> None:
    config = transformers.Qwen3NextConfig(
        **HYBRID_SHAPE,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    )
    for hybrid in (config, MAMBA):
        policy = Policy(transformers.AutoModelForCausalLM.from_config(hybrid))
        with pytest.raises(ValueError, match=rf"--share_prompts does not go with model type '{hybrid.model_type}'"):
            attach_sharing(policy, STRATEGY)


def cut_branches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets no segment see those above it."""
    layout_of = PromptSharing.layout_of

    def cut(tree: Any) -> Any:
        return replace(layout_of(tree), branches=(), grid=None)

    monkeypatch.setattr(PromptSharing, "layout_of", staticmethod(cut))


def test_a_model_that_computes_something_else_then_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its branches see nothing of the prompt."""
    cut_branches(monkeypatch)
    with pytest.raises(ValueError, match="scores of a few tokens differ by"):
        attach_sharing(Policy(hf_model("qwen3_moe")), STRATEGY)


def test_a_model_that_the_tests_compare_scores_nothing_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """A newer transformers may compute something else, so it is tried again."""
    scored_by: list[int] = []
    monkeypatch.setattr(
        type(STRATEGY), "forward", lambda self, data, model: scored_by.append(len(data)) or [model(*data)]
    )
    for name in ("llama", "qwen2", "qwen3"):
        attach_sharing(Policy(hf_model(name)), STRATEGY)
    assert scored_by == []
    monkeypatch.setattr("lightrl.models.policy.transformers.__version__", "99.0")
    attach_sharing(Policy(hf_model("llama")), STRATEGY)
    assert scored_by == [1, 1]


# ---- By itself: --share_prompts auto


def trainer_of(batches: str = "2 prompts", **models: Any) -> Any:
    return SimpleNamespace(**models, strategy=STRATEGY, statistics=Statistics(), batches=batches)


def computed_share(trainer: Any) -> float:
    """Returns the share of tokens that the policy computed, by what the statistics say of it."""
    return trainer.statistics.reduce(STRATEGY.comm).get("tokens/computed_share", 1.0)


def bytes_kept(policy: Policy) -> int:
    """Returns the size of the storages that a forward keeps for its backward."""
    weights = {value.untyped_storage().data_ptr() for value in policy.parameters()}
    sizes: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        scores = policy.train()(batches()[0])
    del scores
    return sum(sizes.values())


def test_models_that_can_find_what_is_common_in_any_pack() -> None:
    policy, reference = Policy(hf_model("qwen3")), Policy(hf_model("qwen3_moe"))
    trainer = trainer_of(model=policy, policy=policy, reference=reference, teacher=None, critic=torch.nn.Linear(1, 1))
    share_by_itself(trainer)
    assert trainer.batches == "2 prompts; common prefixes are computed once"
    whole, _ = batches()
    plain = scored(Policy(hf_model("qwen3")), whole)
    assert computed_share(trainer) == 1.0  # the check is no part of a step
    for one, other in zip(plain, scored(policy, whole), strict=True):
        assert_close(other, one, atol=2e-6 * max(1.0, one.abs().max().item()), rtol=0)
    assert computed_share(trainer) == 75 / 168  # as in test_it_is_computed_once
    scored(reference, whole)
    assert computed_share(trainer) == 75 / 168


def test_a_pack_whose_tree_saves_little_runs_whole() -> None:
    trainer = trainer_of(policy=Policy(hf_model("qwen3")))
    share_by_itself(trainer)
    prompt = tuple(range(20, 36))
    # Of 2 x (16 + length) tokens, 16 are saved: a seventh is left alone, more than that is shared.
    for length, wanted in ((40, 1.0), (30, 1 - 16 / 92)):
        responses = (tuple(range(length)), tuple(range(1, length + 1)))
        trainer.policy(response_batch([(prompt, response) for response in responses]))
        assert computed_share(trainer) == pytest.approx(wanted)


def test_a_pack_keeps_less_for_its_backward_than_whole() -> None:
    """So lightrl plan, which counts whole sequences, never says too little."""
    shared, whole = Policy(hf_model("qwen3")), Policy(hf_model("qwen3"))
    share_by_itself(trainer_of(policy=shared))
    assert bytes_kept(shared) < 0.8 * bytes_kept(whole)


@pytest.mark.parametrize("name", ["gemma2", "mistral_window"])
def test_a_model_whose_attention_would_copy_keys_runs_whole(name: str) -> None:
    policy = Policy(hf_model(name))
    trainer = trainer_of(policy=policy)
    share_by_itself(trainer)
    assert (trainer.batches, computed_share(trainer)) == ("2 prompts", 1.0)
    assert not hasattr(policy.hf.model, "prompt_sharing")
    for one, other in zip(scored(policy, batches()[0]), scored(Policy(hf_model(name)), batches()[0]), strict=True):
        assert torch.equal(one, other)


def test_a_model_that_cannot_runs_whole_beside_one_that_can(monkeypatch: pytest.MonkeyPatch) -> None:
    has_state = Policy(transformers.AutoModelForCausalLM.from_config(MAMBA))
    policy = Policy(hf_model("qwen3"))
    trainer = trainer_of(policy=policy, teacher=has_state)
    share_by_itself(trainer)
    assert not hasattr(has_state.hf.get_decoder(), "prompt_sharing")
    policy(batches()[0])
    assert computed_share(trainer) < 0.5
    cut_branches(monkeypatch)
    other = trainer_of(batches="", policy=Policy(hf_model("qwen3_moe")))
    share_by_itself(other)  # its check fails
    other.policy(batches()[0])
    assert (other.batches, computed_share(other)) == ("", 1.0)


def test_a_dictionary_of_a_user_runs_whole() -> None:
    """Its loss function sees the logits of every token."""
    policy, plain = Policy(hf_model("qwen3")), Policy(hf_model("qwen3"))
    share_by_itself(trainer_of(policy=policy))
    sizes = []
    policy.hf.model.layers[0].mlp.register_forward_pre_hook(lambda _, args: sizes.append(args[0].shape[1]))
    rows = {"input_ids": torch.arange(40).expand(3, -1), "attention_mask": torch.ones(3, 40, dtype=torch.int64)}
    shared, whole = (STRATEGY.forward(rows, model=model) for model in (policy, plain))
    assert torch.equal(shared, whole)
    assert sum(sizes) == 3 * 40


def test_a_model_elsewhere_than_on_a_cpu_runs_whole() -> None:
    trainer = trainer_of(policy=Policy(hf_model("qwen3")))
    trainer.strategy = SimpleNamespace(comm=STRATEGY.comm, device=torch.device("cuda"))
    share_by_itself(trainer)
    assert not hasattr(trainer.policy.hf.model, "prompt_sharing")
