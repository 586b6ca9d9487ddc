"""Options that make a run fit."""

from dataclasses import replace
from typing import Any

import pytest

from lightrl.config import GRPOConfig, SFTConfig
from lightrl.plan.fit import _ladder, changed, choose, fits, remedies
from lightrl.plan.peaks import Machine, Models, plan_run

MACHINE = Machine(ranks=2, memory=0, prompt_tokens=8, response_tokens=24, is_accelerator=False)


def test_remedies_and_the_choice_keep_their_word(small_config: Any) -> None:
    config = SFTConfig(batch_size=16)
    models = Models(small_config, config)
    made = plan_run(config, models, MACHINE)
    found = remedies(config, models, MACHINE, made)
    assert [remedy.saved for remedy in found] == sorted((remedy.saved for remedy in found), reverse=True)
    best = found[0]
    assert best.plan.peak.total == made.peak.total - best.saved
    tight = replace(MACHINE, memory=made.peak.total * 0.6)
    assert not fits(made, tight)
    chosen = choose(config, models, tight)
    assert chosen is not None
    assert "--max_tokens_per_microbatch" in chosen.flags()
    assert plan_run(changed(config, chosen.changes), models, tight).peak.total <= 0.92 * tight.memory
    assert config.max_tokens_per_microbatch == 16384  # the config itself stays


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


def test_the_type_is_changed_last(small_config: Any) -> None:
    config = GRPOConfig()
    models = Models(small_config, config)
    changes = [*_ladder(config, models, MACHINE, plan_run(config, models, MACHINE))]
    half = len(changes) // 2
    assert not any("dtype" in item for item in changes[:half])
    assert all(item["dtype"] == "bfloat16" for item in changes[half:])
