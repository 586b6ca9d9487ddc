"""The best model of a run's evaluations (--eval.best)."""

from __future__ import annotations

import ctypes
import json
import math
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightrl.config import (
    CheckpointConfig,
    DPOConfig,
    EvalConfig,
    ExampleEvalConfig,
    GRPOConfig,
    LateMistakeError,
    LogConfig,
    LoraConfig,
    PPOConfig,
    RMConfig,
    RolloutLogConfig,
    SFTConfig,
)
from lightrl.config.export_sections import ExportConfig
from lightrl.trainers import best
from lightrl.trainers.dpo import DPOTrainer
from lightrl.trainers.export_run import main as export_main
from lightrl.trainers.grpo import GRPOTrainer
from lightrl.trainers.hash_run import main as hash_main
from lightrl.trainers.ppo import PPOTrainer
from lightrl.trainers.reward_model import RMTrainer
from lightrl.trainers.sft import SFTTrainer

Options = Callable[[str], dict[str, Any]]
Rows = list[dict[str, Any]]


class Scripted(SFTTrainer):
    """Reports given values as the results of its evaluations; None: the process is killed there."""

    values: tuple[float | None, ...] = ()  # by step
    name = "eval/accuracy"

    def evaluate(self) -> dict[str, float]:
        value = self.values[self.step_index]
        if value is None:
            raise InterruptedError("killed")
        return {self.name: value, "eval/other": 1.0}


@pytest.fixture
def train(offline_flags: Options, tmp_path: Path) -> Any:
    """Trains in a folder, with an export after each step, and returns what best/ says."""

    def make(
        folder: str, values: tuple[float | None, ...], metric: str = "eval/accuracy", every: int = 1, **changes: Any
    ) -> dict[str, Any] | None:
        options = offline_flags("sft") | {"batch_size": 2, "max_steps": len(values) - 1}
        config = SFTConfig(
            **(options | {"eval_data": options["train_data"]} | changes),
            output_dir=str(tmp_path / folder),
            eval=ExampleEvalConfig(every=every, best=metric),
            checkpoint=CheckpointConfig(every=2),
            export=ExportConfig(every=1),
            log=LogConfig(tensorboard=False),
        )
        trainer = Scripted(config)
        trainer.values = values
        try:
            trainer.fit()
        except InterruptedError:
            pass
        finally:
            trainer.close()
        return best.record_of(tmp_path / folder / "best")

    return make


def weights_of(folder: Path) -> str:
    return (folder / "weights.sha256").read_text()


def test_the_model_of_the_best_evaluation_is_kept(
    train: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # 0.5 again is not better, and NaN never is.
    record = train("run", (math.nan, 0.25, 0.5, math.nan, 0.5))
    assert record == {"step": 2, "metric": "eval/accuracy", "value": 0.5, "is_lowest": False}
    kept, exports = tmp_path / "run" / "best", tmp_path / "run" / "exports"
    assert weights_of(kept) == weights_of(exports / "step-2") != weights_of(exports / "step-3")
    assert {path.name for path in kept.iterdir()} == {
        *(path.name for path in (tmp_path / "run" / "final").iterdir()),
        "best.json",
    }
    said = capsys.readouterr().out
    assert "best model: eval/accuracy 0.25 at step 1\n" in said
    assert "best model: eval/accuracy 0.5 at step 2, before 0.25 at step 1\n" in said
    assert f"best model: {kept}, eval/accuracy 0.5 at step 2\n" in said
    assert [path.name for path in (tmp_path / "run").glob(".*")] == []
    AutoTokenizer.from_pretrained(kept)
    AutoModelForCausalLM.from_pretrained(kept)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert ["time/best" in row for row in rows] == [False, False, True, True, False]  # with the step after


def test_a_run_without_a_finite_value_says_that_it_has_no_best_model(
    train: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("run", (math.nan, math.inf)) is None
    assert "best model: none, since no evaluation has given a finite eval/accuracy\n" in capsys.readouterr().out
    assert not (tmp_path / "run" / "best").exists()


def test_lower_is_better_for_a_loss_and_where_it_is_asked_for(train: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert train("asked", (0.5, 0.25, 0.75), "eval/accuracy:min")["step"] == 1
    monkeypatch.setattr(Scripted, "name", "eval/loss")
    assert train("loss", (0.5, 0.25, 0.125), "eval/loss")["step"] == 2  # the last step's counts
    assert train("highest", (0.5, 0.25, 0.75), "eval/loss:max")["step"] == 2


def test_a_run_that_was_killed_ends_like_the_undisturbed_one(train: Any, tmp_path: Path) -> None:
    """Its checkpoints are of steps 2 and 4."""
    values = (0.1, 0.5, 0.3, 0.6, 0.2, 0.4)
    whole = train("whole", values)
    assert whole["step"] == 3
    # The best is of step 3, after the checkpoint that the run continues from.
    assert train("killed", (*values[:4], None, 0.4))["step"] == 3
    assert train("killed", values) == whole
    assert weights_of(tmp_path / "killed" / "best") == weights_of(tmp_path / "whole" / "best")
    # The best is of step 1, before it, and nothing later is better.
    values = (0.1, 0.5, 0.3, None, 0.2, 0.4)
    assert train("known", values)["step"] == 1
    assert train("known", (0.1, 0.5, 0.3, 0.4, 0.2, 0.4))["step"] == 1


def test_a_killed_run_whose_evaluations_differ_afterwards_keeps_its_best(train: Any, tmp_path: Path) -> None:
    """Evaluations differ, for example, with --rollout_ranks and a bound; its checkpoints are of steps 2, 4 and 6."""
    run = tmp_path / "run"
    assert train("run", (0.1, 0.5, 0.3, 0.6, None, 0.4))["step"] == 3  # step 1's model is kept beside it
    assert train("run", (0.1, 0.5, 0.3, 0.2, None, 0.4))["step"] == 1
    assert weights_of(run / "best") == weights_of(run / "exports" / "step-1")
    # Each is better than the one before, but the model to keep is that of the newest checkpoint, of step 4.
    assert train("run", (0.1, 0.5, 0.3, 0.7, 0.8, 0.9, None))["step"] == 5
    kept = weights_of(run / "exports" / "step-4")
    assert train("run", (0.1, 0.5, 0.3, 0.7, 0.8, 0.2, 0.3, 0.1))["step"] == 4
    assert weights_of(run / "best") == kept
    assert [path.name for path in run.glob(".*")] == []


def test_a_run_that_goes_another_way_forgets_its_best(
    train: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    none = (math.nan,) * 3
    assert train("run", (*none, 0.6, None, 0.4))["step"] == 3
    # From step 2 on it evaluates less often: never at step 3. It is killed once more, after the checkpoint of step 4.
    assert train("run", (*none, 0.6, 0.2, None), every=5)["step"] == 3
    assert "has the model of step 3 with eval/accuracy 0.6: this run has not got there" in capsys.readouterr().out
    assert train("run", (*none, 0.6, 0.2, 0.4), every=5) == {
        "step": 5,
        "metric": "eval/accuracy",
        "value": 0.4,
        "is_lowest": False,
    }
    # Another metric begins anew too, even if its values are lower.
    assert train("run", (0.0,) * 6 + (0.1, 0.01), "eval/accuracy:min")["step"] == 7
    assert "another --eval.best chose it, so the next evaluation replaces it" in capsys.readouterr().out


def test_a_metric_that_is_not_evaluated_is_refused(train: Any, tmp_path: Path) -> None:
    with pytest.raises(
        LateMistakeError, match=r"--eval.best eval/loss: .* no such metric, only eval/accuracy, eval/other\.$"
    ):
        train("run", (0.1, 0.2), "eval/loss")
    assert not (tmp_path / "run" / "exports").exists()  # before any step


@pytest.mark.parametrize("kind", ["grpo", "ppo", "sft", "rm", "dpo"])
def test_every_kind_of_run_keeps_its_best_model(
    kind: str, toy_options: dict[str, Any], offline_flags: Options, metrics_of: Callable[[Path], Rows], tmp_path: Path
) -> None:
    metric = "eval/reward" if kind in ("grpo", "ppo") else "eval/loss"
    common: dict[str, Any] = {"max_steps": 2, "output_dir": str(tmp_path / "run"), "lora": LoraConfig(rank=2)}
    trainer: Any
    if kind in ("grpo", "ppo"):
        options = toy_options | common | {"eval_data": toy_options["train_data"], "num_prompts": 2, "lr": 1e-2}
        options |= {"eval": EvalConfig(every=1, best=metric), "log": RolloutLogConfig(tensorboard=False)}
        if kind == "ppo":  # without adapters
            trainer = PPOTrainer(PPOConfig(**options | {"lora": LoraConfig()}))
        else:
            trainer = GRPOTrainer(GRPOConfig(**options))
    else:
        offline = offline_flags(kind) | common
        offline |= {"eval_data": offline["train_data"], "eval": ExampleEvalConfig(every=1, best=metric)}
        config, trained = {"sft": (SFTConfig, SFTTrainer), "rm": (RMConfig, RMTrainer), "dpo": (DPOConfig, DPOTrainer)}[
            kind
        ]
        trainer = trained(config(**offline, log=LogConfig(tensorboard=False)))
    trainer.fit()
    trainer.close()
    values = [row[metric] for row in metrics_of(tmp_path / "run")]
    record = best.record_of(tmp_path / "run" / "best")
    wanted = (min if metric == "eval/loss" else max)(values)
    assert record is not None
    assert (record["value"], record["step"]) == (wanted, values.index(wanted))
    assert hash_main([str(tmp_path / "run" / "best")]) == 0
    final = {path.name for path in (tmp_path / "run" / "final").iterdir()}
    assert {path.name for path in (tmp_path / "run" / "best").iterdir()} == {*final, "best.json"}
    assert ("adapter" in final) == (kind != "ppo")


def test_the_best_model_is_exported(train: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    train("run", (0.1, 0.5, 0.3))
    with pytest.raises(SystemExit):
        export_main([str(run), "--best", "--step", "2"])
    assert "--best and --step name two models" in capsys.readouterr().err
    assert export_main([str(run), "--best"]) == 0
    card = (run / "exports" / "best" / "README.md").read_text()
    assert "for 1 step." in card
    assert "| `eval/accuracy` | 0.5 |" in card
    assert best.described(best.record_of(run / "exports" / "best") or {}) == "eval/accuracy 0.5 at step 1"
    shutil.rmtree(run / "best")
    with pytest.raises(SystemExit):
        export_main([str(run), "--best", "--output", str(run / "again")])
    assert "has no best/: it was run without --eval.best" in capsys.readouterr().err


def test_damaged_weights_are_not_exported(train: Any, tmp_path: Path) -> None:
    train("run", (0.1, 0.5))
    weights = tmp_path / "run" / "best" / "model.safetensors"
    assert load_file(weights)
    weights.write_bytes(weights.read_bytes()[:-4] + b"half")
    with pytest.raises(ValueError, match="are not those that the run saved"):
        best.step_of_best(tmp_path / "run")


def test_a_best_model_that_was_removed_is_written_again(tmp_path: Path) -> None:
    write_pair(tmp_path / ".best", "new")
    best.replace_folder(tmp_path / "best", tmp_path / ".best", keeps_old=True)
    assert content_of(tmp_path / "best") == ["new"] * 2


# ---- The replacement -------------------------------------------------------------------------------------------------

_ACTS = ("os.rename", "os.remove", "os.rmdir", "open", "ctypes.call_function", "shutil.rmtree", "os.scandir")


def write_pair(folder: Path, text: str) -> None:
    folder.mkdir()
    (folder / "model").write_text(text)
    (folder / "best.json").write_text(json.dumps({"of": text}))


def content_of(folder: Path) -> list[str]:
    return [(folder / "model").read_text(), json.loads((folder / "best.json").read_text())["of"]]


def replace_and_die(folder: Path, made: Path, count: int, *, keeps_old: bool) -> bool:
    """Replaces a folder in another process, killed before its act of that number; returns whether there was one."""
    child = os.fork()
    if child == 0:
        left = count

        def count_down(event: str, _: object) -> None:
            nonlocal left
            if event in _ACTS:
                left -= 1
                if not left:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count_down)
        best.replace_folder(folder, made, keeps_old=keeps_old)
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("exchanges", [True, False])
@pytest.mark.parametrize("known", ["", "older", "old"])
def test_a_kill_leaves_the_old_or_the_new_folder(
    exchanges: bool, known: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """known: the model whose evaluation a run knows that continues from the newest checkpoint; empty: of no model."""
    if exchanges and getattr(ctypes.CDLL(None), "renameat2", None) is None:
        pytest.skip("this system cannot exchange names")
    if not exchanges:
        monkeypatch.setattr(best, "_exchange", lambda one, other: False)
    seen: set[str] = set()
    for count in range(1, 100):
        run = tmp_path / str(count)
        run.mkdir()
        write_pair(run / "best", "old")
        write_pair(run / ".best", "new")
        if known:
            write_pair(run / ".replaced-best", "older")
        was_killed = replace_and_die(run / "best", run / ".best", count, keeps_old=known == "old")
        if exchanges:  # even before the next start
            assert content_of(run / "best") in (["old"] * 2, ["new"] * 2)
        best.restore(run / "best", lambda record: record["of"] == known)
        (text,) = set(content_of(run / "best"))
        seen.add(text)
        assert [path.name for path in run.iterdir()] == ["best"]
        if not was_killed:
            break
    assert count > 6
    assert seen == ({known} if known else {"old", "new"})
    assert text == (known or "new")
