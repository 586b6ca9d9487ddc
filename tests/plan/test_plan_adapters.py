"""Adapters of an engine on paper: by hand, and what a native engine holds; vLLM's and SGLang's slots in their tests."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_vlm import tiny_config
from transformers import AutoModelForCausalLM, GPT2Config, Qwen3MoeConfig

from lightrl.config import GRPOConfig, parse_config
from lightrl.config.adapters import other_adapters
from lightrl.engines.native.adapted import AdaptedEngine, factors_of
from lightrl.models.lora import add_adapters, lora_layers
from lightrl.models.policy import Policy
from lightrl.plan.adapters import EngineAdapters, described_adapters
from lightrl.plan.models import policy_of
from lightrl.plan.peaks import Machine, Models, plan_run
from lightrl.programs import main
from lightrl.strategy import create_strategy
from lightrl.strategy.serving.adapter_source import serve_adapters

pytest.importorskip("peft")
others = pytest.importorskip("other_adapters")

MACHINE = Machine(ranks=1, memory=1e9, prompt_tokens=8, response_tokens=0, is_accelerator=False)


def config_of(*flags: str) -> GRPOConfig:
    return parse_config(GRPOConfig, ["--lora.rank", "8", "--lora.engine", "unmerged", *flags])


def described(hf_config: Any, config: GRPOConfig) -> EngineAdapters:
    return described_adapters(config.lora, policy_of(hf_config, config))


def test_elements_by_hand(small_config: Any) -> None:
    """A block has q 32 x 32, k and v 32 x 16, o 32 x 32, gate and up 32 x 48, and down 48 x 32."""
    config = config_of("--lora.target_modules", "q_proj", "down_proj")
    adapters = described(small_config, config)
    # One product is q, k and v: 8 x (32 + 64), with zeros beside k and v; down: 8 x (48 + 32).
    assert adapters.native_numel() == 3 * (8 * 96 + 8 * 80)
    # Sides that each rank has: the inputs of q, k, v, gate and up, and the outputs of o and down; it shares the others.
    whole, cut = 7 * 32, 32 + 16 + 16 + 32 + 48 + 48 + 48
    ends = 2 * (64 + 32)
    config.engine = "vllm"
    assert adapters.vllm_numel(config, is_accelerator=True) == 8 * (3 * (whole + cut) + ends)
    assert adapters.vllm_numel(config, is_accelerator=False) == 2 * 8 * (3 * (whole + cut) + ends)
    config.engine_tp_size, config.engine_args = 2, ("max_loras=4", "max_lora_rank=16")
    assert adapters.vllm_numel(config, is_accelerator=True) == 4 * 16 * (3 * (whole + cut / 2) + ends)
    config.engine_args = ("fully_sharded_loras=true",)
    assert adapters.vllm_numel(config, is_accelerator=True) == 8 * (3 * (whole + cut) / 2 + ends)


def test_slots_of_sglang_by_hand(small_config: Any) -> None:
    """In each of 3 blocks, q brings q, k and v of 32 x (32 + 16 + 16), and down_proj only itself, 48 x 32."""
    config = config_of("--lora.target_modules", "q_proj", "down_proj", "--engine", "sglang")
    adapters = described(small_config, config)
    # Inputs of q, k and v and the output of down on each rank; the ranks share outputs and the input of down. The
    # policy has a slot, and so have requests without an adapter.
    whole, cut = 3 * (3 * 32 + 32), 3 * (32 + 16 + 16 + 48)
    assert adapters.sglang_numel(config) == 2 * 8 * (whole + cut)
    config.engine_tp_size = 2
    assert adapters.sglang_numel(config) == 2 * 8 * (whole + cut / 2)
    more = replace(adapters, ranks=[*adapters.ranks, {"model.layers.1.self_attn.o_proj": 16}])
    assert more.sglang_numel(config) == 3 * 16 * (whole + 3 * 32 + (cut + 3 * 32) / 2)  # o is 32 x 32


SIZES: dict[str, Any] = {
    "vocab_size": 53, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip
MODELS: dict[str, Any] = {
    "modules": GPT2Config(vocab_size=53, n_embd=16, n_layer=2, n_head=2, n_positions=64, eos_token_id=2),
    "experts": Qwen3MoeConfig(**SIZES),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["fused", *MODELS])
def test_a_native_engine_holds_what_was_planned(kind: str, dtype: str, small_config: Any, tmp_path: Path) -> None:
    hf_config = MODELS.get(kind, small_config)
    model: Any = AutoModelForCausalLM.from_config(hf_config)
    targets = ("c_attn",) if kind == "modules" else others.ATTENTION
    folders = {
        "opponent": others.save_adapter(model, tmp_path / "opponent", rank=2, targets=targets),
        "judge": others.save_adapter(
            model, tmp_path / "judge", rank=7, targets=targets[:1], rank_pattern={"q_proj": 3}
        ),
    }
    config = config_of("--dtype", dtype, "--lora.others", *(f"{name}={path}" for name, path in folders.items()))
    plan = plan_run(config, Models(hf_config, config), MACHINE)
    assert plan.engine is not None
    size = torch.finfo(getattr(torch, dtype)).bits // 8
    assert plan.engine.adapters == size * described(hf_config, config).native_numel()
    assert plan.engine.adapters == held_bytes(model, config)


def held_bytes(model: Any, config: GRPOConfig) -> int:
    """Returns the bytes behind all adapters of the engine that a run with these options makes."""
    add_adapters(model, config.lora, seed=0)
    strategy = create_strategy(GRPOConfig(strategy="single", dtype=config.dtype))
    strategy.setup_distributed()
    serve_adapters(strategy, other_adapters(config.lora))
    policy: Any = strategy.prepare_model(Policy(model))
    strategy.setup_inference_engine(None, "native", actor=policy)
    engine: Any = strategy.serving.require_engine().engine
    assert isinstance(engine, AdaptedEngine)
    pairs = [pair for layer in engine.model.modules() for pair in factors_of(layer).values()]
    storages = [part.untyped_storage() for pair in pairs for part in pair]
    strategy.serving.close()
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def test_merged_weights_have_no_adapters_beside_them(small_config: Any) -> None:
    config = parse_config(GRPOConfig, ["--lora.rank", "8"])
    plan = plan_run(config, Models(small_config, config), MACHINE)
    assert plan.engine is not None
    assert plan.engine.adapters == 0


@pytest.mark.parametrize(
    ("flags", "is_merged"),
    [
        ([], True),
        (["--lora.target_modules", "q_proj"], False),
        (["--lora.engine", "unmerged"], False),
        (["--engine", "native"], False),
    ],
)
def test_vllm_merges_the_adapters_of_a_vision_tower(flags: list[str], is_merged: bool) -> None:
    config = config_of("--lora.engine", "auto", "--dtype", "bfloat16", "--engine", "vllm", *flags)
    assert (Models(tiny_config("qwen2_5_vl"), config).adapters_of(config) is None) == is_merged


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_slots_leave_less_room_for_the_cache(engine: str, small_config: Any) -> None:
    config = config_of("--engine", engine)
    models = Models(small_config, config)
    plan, whole = plan_run(config, models, MACHINE), parse_config(GRPOConfig, ["--engine", engine])
    bare = plan_run(whole, Models(small_config, whole), MACHINE)
    assert plan.engine is not None
    assert bare.engine is not None
    assert plan.engine.adapters > 0
    assert plan.engine.cache == bare.engine.cache - plan.engine.adapters


def test_an_adapter_that_cannot_be_read_is_told(
    small_config: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(small_config.to_dict()))
    model: Any = AutoModelForCausalLM.from_config(small_config)
    folder = others.save_adapter(model, tmp_path / "judge", rank=7)
    asked = ["plan", "grpo", "--model", str(tmp_path / "config.json"), "--max_new_tokens", "9", "--lora.rank", "8"]
    asked += ["--lora.engine", "unmerged", "--lora.others", f"judge={folder}"]
    (tmp_path / "judge" / "adapter_model.safetensors").unlink()  # the config alone is read
    main([*asked, "--json", "True"])
    first = capsys.readouterr()
    assert first.err == ""
    main([*asked, "rival=nowhere", "--json", "True"])
    second = capsys.readouterr()
    assert second.out == first.out
    assert second.err.startswith(
        "The plan leaves an adapter out, which the engine would hold, too: --lora.others rival=nowhere is no adapter"
    )


def test_layers_of_the_policy_have_the_names_of_the_model(small_config: Any) -> None:
    config = config_of()
    model: Any = AutoModelForCausalLM.from_config(small_config)
    add_adapters(model, config.lora, seed=0)
    assert set(described(small_config, config).ranks[0]) == {name for name, _ in lora_layers(model)}
