"""Options that make a run fit."""

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from lightrl.config import GRPOConfig, SFTConfig
from lightrl.plan.fit import _ladder, _single_changes, changed, choose, fits, lacks_cache, remedies
from lightrl.plan.peaks import Machine, Models, plan_run
from lightrl.plan.text import verdict

MACHINE = Machine(ranks=2, memory=0, prompt_tokens=8, response_tokens=24, is_accelerator=False)


def test_remedies_and_the_choice_keep_their_word(small_config: Any) -> None:
    config = SFTConfig(batch_size=16)
    models = Models(small_config, config)
    made = plan_run(config, models, MACHINE)
    found = remedies(config, models, MACHINE, made)
    best = found[0]
    unknown = replace(MACHINE, memory=1)  # which nothing fits
    saved = [remedy.saved for remedy in remedies(config, models, unknown, made)]
    assert saved == sorted(saved, reverse=True)
    assert best.plan.peak.total == made.peak.total - best.saved
    tight = replace(MACHINE, memory=made.peak.total * 0.6)
    assert not fits(made, tight)
    chosen = choose(config, models, tight)
    assert chosen is not None
    assert fits(chosen.plan, tight, 0.92)
    assert "--max_tokens_per_microbatch" in chosen.flags()
    assert plan_run(changed(config, chosen.changes), models, tight).peak.total <= 0.92 * tight.memory
    assert config.max_tokens_per_microbatch == 16384  # the config itself stays


def test_adapters_are_no_remedy_where_their_package_is_missing(
    small_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = SFTConfig(batch_size=16)
    models, unknown = Models(small_config, config), replace(MACHINE, memory=1)
    made = plan_run(config, models, unknown)
    assert {"lora.rank": 32} in list(_single_changes(config, models, unknown, made))
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "peft" else found(name))
    assert {"lora.rank": 32} not in list(_single_changes(config, models, unknown, made))
    assert remedies(config, models, unknown, made)  # and none of the others needs the package


def test_vllm_is_tried_where_the_native_engine_keeps_all_weights(small_config: Any) -> None:
    config = GRPOConfig(num_prompts=8, group_size=2, max_tokens_per_microbatch=32, gradient_checkpointing=True)
    models = Models(small_config, config)
    machine = Machine(ranks=8, memory=1.4e5, prompt_tokens=8, response_tokens=24)
    chosen = choose(config, models, machine)
    assert chosen.changes["engine"] == "vllm"
    assert fits(chosen.plan, machine, 0.92)
    on_cpu = choose(config, models, replace(machine, is_accelerator=False))
    assert "engine" not in on_cpu.changes  # and nothing fits: the least of all is returned
    assert not fits(on_cpu.plan, machine, 0.92)
    tried = [
        plan_run(changed(config, changes), models, replace(machine, is_accelerator=False))
        for changes in ({}, {"dtype": "bfloat16"}, {"fsdp.cpu_offload": True})
    ]
    assert on_cpu.plan.peak.total < min(made.peak.total for made in tried)
    assert chosen.saved == plan_run(config, models, machine).peak.total - chosen.plan.peak.total


@pytest.mark.parametrize(
    ("engine", "ranks", "size", "sizes"),
    [("vllm", 8, 1, [2, 4]), ("sglang", 2, 1, [2]), ("vllm", 6, 1, [2]), ("vllm", 8, 2, [4]), ("native", 8, 1, [])],
)
def test_an_engine_is_split_by_what_divides_its_heads_and_the_ranks(
    small_config: Any, engine: str, ranks: int, size: int, sizes: list[int]
) -> None:
    config = GRPOConfig(engine=engine, engine_tp_size=size)  # the model has 4 heads
    models = Models(small_config, config)
    machine = replace(MACHINE, ranks=ranks, memory=24e9)
    made = plan_run(config, models, machine)
    asked = [
        changes["engine_tp_size"] for changes in _ladder(config, models, machine, made) if "engine_tp_size" in changes
    ]
    assert sorted(set(asked)) == sizes


def test_the_type_is_changed_before_the_model_is_spread(small_config: Any) -> None:
    config = GRPOConfig()
    models = Models(small_config, config)
    changes = [*_ladder(config, models, MACHINE, plan_run(config, models, MACHINE))]
    first_spread = next(index for index, item in enumerate(changes) if any(name.startswith("fsdp.") for name in item))
    assert [item.get("dtype") for item in changes[:first_spread]] == (
        [None] * (first_spread // 2) + ["bfloat16"] * (first_spread // 2)
    )
    assert "fsdp.cpu_offload" in changes[-1]


def test_an_engine_without_room_for_a_sequence_is_given_a_larger_share() -> None:
    model = json.loads((Path(__file__).parents[2] / "benchmarks" / "models" / "qwen2.5-7b.json").read_text())
    config = GRPOConfig(engine="vllm", max_new_tokens=1024, dtype="bfloat16", strategy="fsdp")
    config.max_tokens_per_microbatch, config.gradient_checkpointing, config.fsdp.cpu_offload = 1280, True, True
    config.fsdp.reduce_each_micro_batch = True
    models = Models(AutoConfig.for_model(**model), config)
    machine = Machine(ranks=8, memory=24e9, prompt_tokens=256, response_tokens=0)
    made = plan_run(config, models, machine)
    assert lacks_cache(made)  # 0.4 of 24 GB are less than the 15.2 GB of its weights
    assert made.peak.total < machine.memory
    found = remedies(config, models, machine, made)
    assert found[0].changes["engine_mem_fraction"] in (0.7, 0.8)
    assert fits(found[0].plan, machine)
    said = verdict(made, machine, is_enough=False, found=found)
    assert "DOES NOT FIT, though 24.0 GB are more" in said
    assert "the engine's share of the memory (--engine_mem_fraction)" in said
    enough = replace(machine, memory=80e9)
    changes = _ladder(config, models, enough, plan_run(config, models, enough))
    assert max(item.get("engine_mem_fraction", 0) for item in changes) < 0.4
