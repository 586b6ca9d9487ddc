"""One step of a run, repeated from the checkpoint before it."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightrl.config import CheckpointConfig, EvalConfig, GRPOConfig, WorkflowConfig
from lightrl.trainers import lifetime, recorded_run
from lightrl.trainers.fit import build_trainer
from lightrl.trainers.grpo import GRPOTrainer
from lightrl.trainers.repeated_step import _metrics_of, _reason, differences


def test_only_numbers_that_are_not_the_same_are_told() -> None:
    wanted = {"step": 3, "loss": 0.1, "kl": None, "entropy": 1.5, "time/step": 2.0, "eval/reward": 0.3}
    assert differences(wanted, {"loss": 0.1, "kl": float("nan"), "entropy": 1.5, "time/step": 9.0}) == []
    assert differences(wanted, {"loss": 0.1, "entropy": 1.5000001}) == ["entropy was 1.5, now 1.5000001"]


def test_the_reason_of_differences_is_given_for_episodes_that_may_wait() -> None:
    assert _reason("") == []
    (told,) = _reason("agent")
    assert told.startswith("Episodes of --rollout.workflow agent that wait for something outside the engine")


def test_a_run_whose_last_line_a_kill_cut_short_has_the_steps_before_it(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 0.5}\n{"step": 2, "lo')
    assert _metrics_of(tmp_path, 1) == {"step": 1, "loss": 0.5}
    assert _metrics_of(tmp_path, 2) == {}  # the next step, as after step 1


def test_a_step_is_repeated_to_the_bit_from_the_checkpoint_before_it(
    toy_options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = GRPOTrainer(
        GRPOConfig(
            **toy_options,
            num_prompts=4,
            num_minibatches=2,
            max_steps=4,
            lr=1e-2,
            eval=EvalConfig(every=0),
            checkpoint=CheckpointConfig(every=2, keep=5),
            output_dir=str(tmp_path / "run"),
        )
    )
    trainer.fit()
    weights = {name: value.clone() for name, value in trainer.policy.state_dict().items()}
    trainer.close()

    built: list[Any] = []
    original: Callable[..., Any] = recorded_run.build_trainer

    def build(*given: Any) -> Any:
        built.append(original(*given))
        return built[-1]

    monkeypatch.setattr(recorded_run, "build_trainer", build)
    entered: list[int] = []
    monkeypatch.setattr("builtins.breakpoint", lambda: entered.append(built[-1].step_index))
    assert recorded_run.replay([str(tmp_path / "run"), "--step", "4", "--debug"]) == 0
    said = capsys.readouterr().out
    assert "from " in said
    assert "step-000002" in said
    assert "step 4 was repeated to the bit: " in said
    assert entered == [3]  # the steps before it are finished
    again = built[-1].policy.state_dict()
    assert all(torch.equal(value, again[name]) for name, value in weights.items())
    metrics = tmp_path / "run" / "metrics.jsonl"
    with pytest.raises(SystemExit, match="2"):
        recorded_run.replay([str(tmp_path / "run"), "--step", "6"])
    assert "has 4 steps, so replay takes at most 5, the next one" in capsys.readouterr().err
    metrics.write_text(metrics.read_text().replace('"entropy": ', '"entropy": 7'))
    assert recorded_run.replay([str(tmp_path / "run"), "--step", "3"]) == 1
    assert "entropy was 7" in capsys.readouterr().out


def test_a_step_that_is_repeated_with_other_options_leaves_the_record_of_the_run_alone(
    toy_options: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shared = {**toy_options, "num_prompts": 2, "eval": EvalConfig(every=0), "output_dir": str(tmp_path / "run")}
    options = GRPOConfig(**shared, max_steps=1, rollout=WorkflowConfig(record=str(tmp_path / "record")))
    trainer = build_trainer(GRPOTrainer, options)
    trainer.fit()
    trainer.close()
    written = {path: path.read_bytes() for path in (tmp_path / "record").rglob("*.jsonl")}
    assert recorded_run.replay([str(tmp_path / "run"), "--step", "1", "--seed", "7"]) == 1
    assert "not repeated to the bit" in capsys.readouterr().out
    assert written == {path: path.read_bytes() for path in written}


def test_a_step_before_the_point_at_which_a_run_branched_off_is_told(
    toy_options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lifetime, "end_process", sys.exit)

    def train(name: str, max_steps: int, **options: Any) -> None:
        shared = {**toy_options, "num_prompts": 2, "eval": EvalConfig(every=0), "output_dir": str(tmp_path / name)}
        trainer = GRPOTrainer(GRPOConfig(**shared, max_steps=max_steps, **options))
        trainer.fit()
        trainer.close()

    train("base", 2, checkpoint=CheckpointConfig(every=2))
    train("branch", 3, checkpoint=CheckpointConfig(every=0), resume=str(tmp_path / "base"))
    with pytest.raises(SystemExit, match="2"):
        recorded_run.replay([str(tmp_path / "branch"), "--step", "1"])
    assert "--step 1: the run begins after step 2" in capsys.readouterr().err
