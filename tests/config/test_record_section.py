"""The options of records."""

import pytest

from lightrl.config import GRPOConfig, WorkflowConfig, parse_config


@pytest.mark.parametrize("flags", [["--rollout.from", "folder"], ["--rollout.from=folder"], ["--rollout.from_=folder"]])
def test_a_flag_may_be_a_keyword_of_python(flags: list[str]) -> None:
    assert parse_config(GRPOConfig, flags).rollout.from_ == "folder"


def test_options_that_contradict_are_told() -> None:
    with pytest.raises(ValueError, match="--rollout.record_only samples for a record"):
        GRPOConfig(rollout=WorkflowConfig(record_only=True))
    with pytest.raises(ValueError, match="leave --rollout.record out"):
        GRPOConfig(rollout=WorkflowConfig(record="a", from_="b"))
    with pytest.raises(ValueError, match="begin and end in a step: leave --rollout_ranks"):
        GRPOConfig(rollout=WorkflowConfig(record="a"), rollout_ranks=1)
    with pytest.raises(ValueError, match="--rollout.max_turns does nothing without --rollout.workflow"):
        GRPOConfig(rollout=WorkflowConfig(record="a", max_turns=3))
