"""The options of an evaluation."""

from pathlib import Path

import pytest

from lightrl.config import EvaluateConfig, GRPOConfig, LoraConfig, PPOConfig, WorkflowConfig, parse_config, to_yaml
from lightrl.config.evaluate import OF_STEPS
from lightrl.trainers.fit import _MAKERS


def test_the_data_to_evaluate_on_are_the_only_ones_read() -> None:
    config = parse_config(EvaluateConfig, ["--eval_data", "mine.jsonl", "--eval.n", "8", "--eval.k", "1", "8"])
    assert (config.train_data, config.eval.k) == ("mine.jsonl", (1, 8))
    assert EvaluateConfig().train_data == "builtin:addition"


def test_a_k_beyond_the_samples_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse_config(EvaluateConfig, ["--eval.k", "8"])
    assert stop.value.code == 2
    captured = capsys.readouterr()
    assert "--eval.k 8 needs as many samples" in captured.out + captured.err


def test_what_changes_the_steps_of_a_training_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert {*OF_STEPS} == {*_MAKERS}
    options = [
        ["--exact", "True"],
        ["--rollout_ranks", "1"],
        ["--rollout.record", "folder"],
        ["--rollout.from", "folder"],
        ["--data.curriculum", "half_solved"],
        ["--rollout.over_issue", "0.5", "--rollout.max_staleness", "1"],
        ["--rollout.max_staleness", "1"],
        ["--rollout.filter", "unequal_rewards"],
    ]
    for words in options:
        with pytest.raises(SystemExit):
            parse_config(EvaluateConfig, words)
        told = capsys.readouterr().err.replace("\u2502", "").split()
        assert f"{words[0]} applies to training: an evaluation takes no steps. Leave it out." in " ".join(told)


def test_of_the_file_of_a_training_only_what_evaluates_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rollout = WorkflowConfig(max_staleness=1, workflow="tools", max_turns=3, max_groups=2)
    options = {"model": "start", "output_dir": "runs/a", "num_prompts": 4, "num_minibatches": 2, "max_new_tokens": 64}
    for config in (
        GRPOConfig(**options, rollout=rollout),
        PPOConfig(**options, reward=("math",), top_p=0.9),
        GRPOConfig(**options, rollout=WorkflowConfig(max_staleness=1, max_groups=2)),  # of the schedule
    ):
        path = tmp_path / "config.yaml"
        config.eval.best = "eval/reward"
        path.write_text(to_yaml(config))
        read = parse_config(EvaluateConfig, ["--config", str(path), "--model", "runs/a/final", "--eval.n", "4"])
        assert (read.model, read.max_new_tokens, read.reward, read.eval.n) == ("runs/a/final", 64, config.reward, 4)
        assert (read.rollout.workflow, read.rollout.max_turns) == (config.rollout.workflow, config.rollout.max_turns)
        assert read.rollout.max_groups == (2 if read.rollout.workflow else 0)
        assert (read.output_dir, read.rollout.max_staleness, read.top_p) == ("", 0, 1.0)
        said = capsys.readouterr().err
        assert f"note: --config {path} is of a training; the evaluation leaves out its " in said


def test_the_adapter_that_a_training_began_with_is_not_added_to_its_model(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(GRPOConfig(model="start", lora=LoraConfig(path="old/adapter", engine="merged"))))
    given = ["--config", str(path)]
    assert parse_config(EvaluateConfig, given).lora.path == "old/adapter"
    assert parse_config(EvaluateConfig, [*given, "--model", "runs/a/final"]).lora == LoraConfig()
    assert parse_config(EvaluateConfig, [*given, "--model=start", "--lora.path", "mine"]).lora.path == "mine"


def test_an_option_that_no_program_has_is_refused_in_the_file_of_a_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("algorithm:\n  loss: ppo_clip\nmax_new_token: 8\n")
    with pytest.raises(SystemExit, match="2"):
        parse_config(EvaluateConfig, ["--config", str(path)])
    assert "unknown option 'max_new_token'. Did you mean max_new_tokens" in capsys.readouterr().err


def test_the_folder_in_a_file_of_an_evaluation_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "evaluate.yaml"
    path.write_text("model: start\noutput_dir: here\n")
    assert parse_config(EvaluateConfig, ["--config", str(path)]).output_dir == "here"
    assert "note" not in capsys.readouterr().err
