"""A plan as text."""

import json
from dataclasses import replace
from typing import Any

from lightrl.config import GRPOConfig
from lightrl.plan.fit import remedies
from lightrl.plan.peaks import Machine, Models, plan_run
from lightrl.plan.text import as_json, table, verdict

MACHINE = Machine(ranks=1, memory=100, prompt_tokens=8, response_tokens=0, is_accelerator=False)


def test_table_verdict_and_json(small_config: Any) -> None:
    config = GRPOConfig(num_prompts=2, group_size=2, max_new_tokens=24)
    models = Models(small_config, config)
    made = plan_run(config, models, MACHINE)
    shown = table(made, MACHINE, "title")
    assert shown.splitlines()[0] == "title"
    assert "optimizer" in shown
    assert shown.count("<- peak") == 1
    found = remedies(config, models, MACHINE, made)
    said = verdict(made, MACHINE, is_enough=False, found=found)
    assert "DOES NOT FIT in 0 KB" in said
    assert said.count(" saves ") == min(3, len(found))
    assert "No single option is enough; --fit True looks for several" in said
    assert "too much" in said
    half = replace(MACHINE, memory=(made.peak.total + found[0].plan.peak.total) / 2)
    assert ": then it fits" in verdict(made, half, is_enough=False, found=found)
    assert "No single option" not in verdict(made, half, is_enough=False, found=found)
    tight = replace(MACHINE, memory=made.peak.total / 0.93)  # 7 % are free
    assert "which is LITTLE" in verdict(made, tight, is_enough=True, found=[])
    roomy = replace(MACHINE, memory=made.peak.total / 0.91)
    assert "LITTLE" not in verdict(made, roomy, is_enough=True, found=[])
    assert "fits in 1.0 TB" in verdict(made, replace(MACHINE, memory=1e12), is_enough=True, found=[])
    assert "give lightrl plan --device_memory" in verdict(made, replace(MACHINE, memory=0), is_enough=True, found=[])
    read = json.loads(as_json(made, is_enough=False, found=found))
    assert read["peak"]["bytes"] == round(made.peak.total)
    assert len(read["remedies"]) <= 3
