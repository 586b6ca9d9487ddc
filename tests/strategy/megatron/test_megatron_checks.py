"""Each refusal names the option or the part of the model, and what to do."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import GPT2Config, MistralConfig, Qwen3Config, Qwen3MoeConfig

from lightrl.config import LoraConfig, MegatronConfig, RoutingConfig, StrategyOptions
from lightrl.models.lora import add_adapters
from lightrl.strategy.megatron.checks import check_config, check_model, check_options
from lightrl.strategy.megatron.parts import Sizes
from lightrl.strategy.megatron.ranks import check_sizes
from lightrl.strategy.megatron.strategy import MegatronStrategy
from lightrl.testing.tiny_training import tiny_policy

DENSE = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
EXPERTS = {"num_experts": 4, "moe_intermediate_size": 16}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"megatron": MegatronConfig(impl="te")}, "--megatron.impl te: .* use local"),
        ({"sp_size": 2}, "--sp_size 2: split tokens by --megatron.cp_size"),
        ({"gradient_checkpointing": True}, "use --megatron.recompute full"),
        ({"routing": RoutingConfig(z_coef=0.1)}, "--routing.balance_coef and --routing.z_coef: use --strategy fsdp"),
        ({"compile": True}, "--compile"),
        ({"megatron": MegatronConfig(sequence_parallel=True)}, "ranks of --tp_size, which is 1"),
        ({"megatron": MegatronConfig(pp_size=2, vpp_size=2)}, "--megatron.pp_size of 3 or more, not 2"),
    ],
)
def test_options_that_it_does_not_follow(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        check_options(StrategyOptions(**options))


@pytest.mark.parametrize(
    ("config", "sizes", "text"),
    [
        (GPT2Config(), Sizes(), "no table for models of type 'gpt2'.*--strategy fsdp"),
        (MistralConfig(**DENSE, sliding_window=8), Sizes(), "the sliding window of 8 tokens"),
        (Qwen3Config(**DENSE, attention_bias=True), Sizes(), "the bias of the attention's output"),
        (Qwen3Config(**DENSE, hidden_act="gelu"), Sizes(), "the activation gelu"),
        (Qwen3Config(**DENSE), Sizes(tp=4), "--tp_size 4 does not divide the model's 2 key-value heads. Valid: 1, 2."),
        (Qwen3Config(**DENSE), Sizes(pp=3), "does not divide the model's 4 layers. Valid: 1, 2, 4."),
        (Qwen3Config(**DENSE), Sizes(ep=2), "this qwen3 model has none"),
        (Qwen3MoeConfig(**DENSE, **EXPERTS), Sizes(ep=3), "--megatron.ep_size 3 does not divide the model's 4 experts"),
        (Qwen3MoeConfig(**DENSE, **EXPERTS), Sizes(tp=2, ep=2), "needs --megatron.sequence_parallel True"),
        (Qwen3MoeConfig(**DENSE, **EXPERTS, mlp_only_layers=[1]), Sizes(), "layers without experts"),
    ],
)
def test_models_that_it_does_not_spread(config: Any, sizes: Sizes, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        check_config(config, sizes, sequence_parallel=False)


def test_a_vocabulary_that_leaves_a_rank_without_tokens() -> None:
    sizes = {**DENSE, "num_key_value_heads": 4}
    with pytest.raises(ValueError, match=r"--tp_size 4 leaves .* vocabulary of 9"):  # parts of 3: 3 + 3 + 3 + 0
        check_config(Qwen3Config(**sizes, vocab_size=9), Sizes(tp=4), sequence_parallel=False)
    check_config(Qwen3Config(**sizes, vocab_size=10), Sizes(tp=4), sequence_parallel=False)  # 3 + 3 + 3 + 1


def test_replayed_experts_are_taken() -> None:
    check_options(StrategyOptions(routing=RoutingConfig(replay=True)))


def test_adapters() -> None:
    policy = tiny_policy()
    add_adapters(policy.hf, LoraConfig(rank=2), seed=0)
    with pytest.raises(ValueError, match="does not train LoRA adapters"):
        check_model(policy, policy.hf.config, Sizes(), sequence_parallel=False)


def test_experts_whose_gradients_would_stay_unreduced() -> None:
    with pytest.raises(ValueError, match="trains it wrongly"):
        check_config(Qwen3MoeConfig(**DENSE, **EXPERTS), Sizes(tp=2), sequence_parallel=True)
    check_config(Qwen3MoeConfig(**DENSE, **EXPERTS), Sizes(tp=2, etp=2), sequence_parallel=True)


def test_sizes_that_do_not_fit_the_world() -> None:
    with pytest.raises(ValueError, match="= 4 does not divide 6 ranks. Valid products: 1, 2, 3, 6."):
        check_sizes(6, Sizes(tp=2, pp=2))
    with pytest.raises(ValueError, match="--megatron.ep_size 4 .* = 4 does not divide 2 ranks"):
        check_sizes(2, Sizes(ep=4))


def test_a_cpu_is_refused() -> None:
    strategy = MegatronStrategy(0, 1.0, 1, 1, StrategyOptions(exact_batches=True))
    with pytest.raises(ValueError, match="--strategy megatron needs GPUs"):
        strategy.setup_distributed()


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match="lightrl\\[megatron\\]"):
        MegatronStrategy(0, 1.0, 1, 1, StrategyOptions(exact_batches=True))
