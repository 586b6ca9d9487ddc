"""Options of --rollout.* that do nothing, or that contradict each other."""

from pathlib import Path

import pytest

from lightrl.config import GRPOConfig, WorkflowConfig, parse_config


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"over_issue": 0.5}, "max_staleness 0 allows for at most 0 times num_prompts.*Give --rollout.max_staleness 1"),
        ({"over_issue": 2.5, "max_staleness": 2}, "Give --rollout.max_staleness 3"),
        ({"partial": False}, "--rollout.partial does nothing"),
        ({"agree_every": 4}, "--rollout.agree_every does nothing"),
        ({"max_staleness": 2, "tail_after": 1}, "--rollout.tail_after does nothing without --rollout.tail_batch"),
        ({"over_issue": -1.0}, "over_issue"),
        ({"max_staleness": 2, "late": "drop"}, "--rollout.late drop does nothing without --rollout.over_issue"),
        ({"over_issue": 1.0, "max_staleness": 2, "late": "drop", "tail_batch": 0}, "tail_batch 0 waits for"),
        ({"over_issue": 1.0, "max_staleness": 2, "on_policy_min_ratio": 0.5}, "ratio 0.5 needs --rollout.late drop"),
        ({"workflow": "agent", "turn_wait_s": 5.0}, "turn_wait_s does nothing without --rollout.over_issue"),
        (
            {"over_issue": 0.5, "max_staleness": 2, "turn_wait_s": 5.0},
            "turn_wait_s does nothing without --rollout.workflow",
        ),
        ({"late": "drop", "on_policy_min_ratio": 1.5}, "on_policy_min_ratio"),
    ],
)
def test_bad_options_are_refused(options: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        GRPOConfig(rollout=WorkflowConfig(**options))  # type: ignore[arg-type]


def test_ranks_that_only_generate_drop_late_groups_by_the_bound_alone() -> None:
    GRPOConfig(rollout_ranks=1, rollout=WorkflowConfig(late="drop", max_staleness=1))
    with pytest.raises(ValueError, match="late drop does nothing without --rollout.max_staleness above 0"):
        GRPOConfig(rollout_ranks=1, rollout=WorkflowConfig(late="drop"))


def test_a_run_is_scheduled_where_it_is_asked_for() -> None:
    assert not WorkflowConfig().is_scheduled
    assert not WorkflowConfig().samples_can_be_older
    assert WorkflowConfig(over_issue=0.5, max_staleness=1).samples_can_be_older
    assert WorkflowConfig(filter="unequal_rewards").is_scheduled


@pytest.mark.parametrize("flags", [["--rollout.from", "folder"], ["--rollout.from=folder"], ["--rollout.from_=folder"]])
def test_a_flag_may_be_a_keyword_of_python(flags: list[str]) -> None:
    assert parse_config(GRPOConfig, flags).rollout.from_ == "folder"


@pytest.mark.parametrize("key", ["from", "from_"])
def test_yaml_takes_the_name_of_the_flag(key: str, tmp_path: Path) -> None:
    (tmp_path / "options.yaml").write_text(f"rollout:\n  {key}: folder\n")
    assert parse_config(GRPOConfig, ["--config", str(tmp_path / "options.yaml")]).rollout.from_ == "folder"


def test_options_of_a_record_that_contradict_are_told() -> None:
    with pytest.raises(ValueError, match="--rollout.record_only samples for a record"):
        GRPOConfig(rollout=WorkflowConfig(record_only=True))
    with pytest.raises(ValueError, match="leave --rollout.record out"):
        GRPOConfig(rollout=WorkflowConfig(record="a", from_="b"))
    with pytest.raises(ValueError, match="begin and end in a step: leave out --rollout_ranks"):
        GRPOConfig(rollout=WorkflowConfig(record="a"), rollout_ranks=1)
    with pytest.raises(ValueError, match="--rollout.max_turns does nothing without --rollout.workflow"):
        GRPOConfig(rollout=WorkflowConfig(record="a", max_turns=3))


def test_a_limit_of_groups_needs_something_that_it_limits() -> None:
    with pytest.raises(ValueError, match="--rollout.max_groups does nothing without --rollout.workflow in a run"):
        GRPOConfig(rollout=WorkflowConfig(max_groups=3))
    GRPOConfig(rollout=WorkflowConfig(max_groups=3, workflow="tools"))
    GRPOConfig(rollout=WorkflowConfig(max_groups=3, over_issue=0.5, max_staleness=1))


def test_an_environment_is_not_trained_by_the_default_reward_unasked() -> None:
    workflow = WorkflowConfig(workflow="environment", workflow_args=("environment=a:B",))
    with pytest.raises(ValueError, match="which --reward exact_match .* would not use. Give --reward episode"):
        GRPOConfig(rollout=workflow)
    GRPOConfig(rollout=workflow, reward=("episode",))
    GRPOConfig(rollout=workflow, reward=("exact_match=1",))
