"""Exports of a run, while it goes on and afterwards."""

import os
import shutil
import subprocess
import sys
from datetime import timedelta
from functools import partial
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
from fake_hub import running_hub
from safetensors.torch import load_file

from lightrl.comm import Comm
from lightrl.config import CheckpointConfig, EvalConfig, GRPOConfig, LoraConfig, RolloutLogConfig
from lightrl.config.export_sections import ExportConfig, HubConfig
from lightrl.trainers import export
from lightrl.trainers.export_run import main
from lightrl.trainers.fit import build_trainer
from lightrl.trainers.grpo import GRPOTrainer
from lightrl.trainers.hash_run import main as hash_main


@pytest.fixture
def run(toy_options: dict[str, Any], tmp_path: Path) -> Any:
    """Makes a run of two steps."""

    def make(max_steps: int = 2, **options: Any) -> Path:
        config = GRPOConfig(
            **toy_options,
            num_prompts=2,
            max_steps=max_steps,
            lr=1e-2,
            output_dir=str(tmp_path / "run"),
            eval=EvalConfig(every=0),
            checkpoint=CheckpointConfig(every=1),
            log=RolloutLogConfig(tensorboard=False),
            lora=LoraConfig(rank=2),
            **({"export": ExportConfig(every=1)} | options),
        )
        trainer = build_trainer(GRPOTrainer, config)
        trainer.fit()
        trainer.close()
        return tmp_path / "run"

    return make


def test_a_run_exports_uploads_and_is_exported(
    run: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with running_hub(monkeypatch) as hub:
        folder = run(hub=HubConfig(push="me/model"))
        messages = [message for _, message, _ in hub.commits]
        assert messages == ["step 1", "the model after 2 steps"]
        assert {"README.md", "config.json", "model.safetensors", "weights.sha256"} <= set(hub.commits[1][2])
        assert main([str(folder), "--hub.push", "me/model"]) == 0
        assert len(hub.commits) == 3
    assert [path.name for path in (folder / "exports").iterdir() if path.name.startswith(".")] == []
    during = load_file(folder / "exports" / "step-1" / "model.safetensors")
    final = load_file(folder / "final" / "model.safetensors")
    assert any(not (during[name] == tensor).all() for name, tensor in final.items())
    assert "lora.rank: 2" in (folder / "final" / "README.md").read_text()

    # A checkpoint holds the adapters, and its export the merged model of that step.
    command = ["export", str(folder), "--step", "1", "--output", str(folder / "again")]
    environment = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}
    ended = subprocess.run(
        [sys.executable, "-m", "lightrl", *command], env=environment, capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == f"model: {folder / 'again'}\n"  # no warning of DeepSpeed, which transformers imports
    again = load_file(folder / "again" / "model.safetensors")
    assert all((again[name] == tensor).all() for name, tensor in during.items())
    capsys.readouterr()
    assert hash_main([str(folder / "again")]) == 0
    assert capsys.readouterr().out.split()[0] in (folder / "again" / "README.md").read_text()


class AnsweringComm(Comm):
    """A rank whose first decisions are given."""

    def __init__(self, rank: int, answers: list[bool]) -> None:
        super().__init__(timeout=timedelta(seconds=0.1))
        self.rank, self._answers, self.was_asked = rank, answers, Event()

    def any(self, flag: bool) -> bool:
        if not self._answers:
            self.was_asked.set()
            return flag
        return self._answers.pop(0)


def test_ranks_hear_of_a_long_upload_more_often_than_they_time_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uploaded: list[bool] = []
    monkeypatch.setattr(export, "write_card", lambda *_, **__: None)
    for rank, answers in ((0, [True, True, True]), (1, [True, True, False])):
        comm = AnsweringComm(rank, answers)
        upload = partial(lambda event, *_: uploaded.append(event.wait(20)), comm.was_asked)
        repository = SimpleNamespace(upload_or_warn=upload)
        monkeypatch.setattr(export, "Repository", lambda *_, made=repository, **__: made)
        trainer: Any = SimpleNamespace(
            strategy=SimpleNamespace(comm=comm),
            config=SimpleNamespace(hub=HubConfig(push="me/model")),
            folder=SimpleNamespace(root=tmp_path, final=tmp_path / "final"),
            step_index=2,
        )
        export.Export(trainer).after_export(tmp_path / "final")
        assert not answers
    assert uploaded == [True]  # by rank 0, which was asked meanwhile


def test_a_step_that_is_trained_again_replaces_its_export(run: Any) -> None:
    exports = run() / "exports"
    shutil.rmtree(exports.parent / "checkpoints")  # as if the run was killed before the first one
    shutil.rmtree(exports.parent / "final")
    (exports / ".step-1").mkdir()  # and while it wrote
    for name in ("step-1", ".step-1"):
        (exports / name / "model-00001-of-00002.safetensors").write_text("stale")
    run()
    assert [path.name for path in exports.iterdir()] == ["step-1"]
    exported = {path.name for path in (exports / "step-1").iterdir()}
    assert "model.safetensors" in exported
    assert "model-00001-of-00002.safetensors" not in exported


def test_a_final_model_that_is_not_of_the_last_step_is_not_exported(
    run: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run()
    options, rows = (folder / "config.yaml").read_text(), (folder / "metrics.jsonl").read_text()
    assert main([str(folder)]) == 0
    assert f"model: {folder / 'exports' / 'final'}" in capsys.readouterr().out
    # It goes on with --max_steps 4, and is killed after a step.
    (folder / "config.yaml").write_text(options.replace("max_steps: 2", "max_steps: 4"))
    (folder / "metrics.jsonl").write_text(rows + rows.splitlines()[-1].replace('"step": 2', '"step": 3') + "\n")
    assert main([str(folder)]) == 0
    assert "for 2 steps" in (folder / "exports" / "step-2" / "README.md").read_text()
    # It is killed while it writes final/.
    (folder / "config.yaml").write_text(options)
    (folder / "metrics.jsonl").write_text(rows)
    weights = folder / "final" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"half")
    shutil.rmtree(folder / "exports")
    assert main([str(folder)]) == 0
    assert [path.name for path in (folder / "exports").iterdir()] == ["step-2"]


def test_the_final_model_of_fewer_steps_is_not_exported(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run goes on with more steps and is killed between the line of its last step and final/."""
    folder = run()

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(GRPOTrainer, "save_models", killed)
        with pytest.raises(KeyboardInterrupt):
            run(max_steps=3, export=ExportConfig(every=0))
    shutil.rmtree(folder / "exports")
    assert main([str(folder)]) == 0
    assert [path.name for path in (folder / "exports").iterdir()] == ["step-3"]
    run(max_steps=3)
    assert main([str(folder)]) == 0
    assert sorted(path.name for path in (folder / "exports").iterdir()) == ["final", "step-3"]
