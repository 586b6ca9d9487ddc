"""Checks of records against options that name their fields; they are made only if such an option is given."""

from __future__ import annotations

from lightrl.config import EvaluateConfig, RolloutConfig
from lightrl.data.prompts import require_field
from lightrl.data.streamed import Streamed, chain
from lightrl.rewards.applicability import conditions_of, require_judges, require_readable, require_values
from lightrl.rewards.reward_set import labels_of
from lightrl.trainers.run import RunContext


def check_fields(run: RunContext) -> None:
    """Raises ValueError for a field that an option names and no record has, and for a record without a reward."""
    config: RolloutConfig = run.config
    if config.eval.source_field and run.eval_records:
        require_field(run.eval_records, config.eval.source_field, "--eval.source_field")
    if config.reward_for:
        _check_reward_for(run)


def _check_reward_for(run: RunContext) -> None:
    """Looks at every record but streamed ones, of which one without a reward fails when it is scored."""
    config, train, evaluation = run.config, run.train_records, run.eval_records
    labels = labels_of(config.reward)
    conditions = conditions_of(config.reward_for, labels)
    require_readable(conditions, (config.data.prompt_field, "messages", config.data.answer_field))
    everything = chain([train, evaluation])
    for label, condition in conditions.items():
        for field in condition.allowed:
            require_field(everything, field, f"--reward_for {label}.{field}")
    is_streamed = isinstance(train, Streamed)
    for records in (evaluation,) if is_streamed else (train, evaluation):
        require_judges(conditions, labels, records)
    if not is_streamed and not isinstance(config, EvaluateConfig):  # which may have the options of its training
        require_values(conditions, everything)
