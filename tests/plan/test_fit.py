"""Options that make a run fit."""

from dataclasses import replace
from typing import Any

from lightrl.config import SFTConfig
from lightrl.plan.fit import changed, choose, fits, remedies
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
