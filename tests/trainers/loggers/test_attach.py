"""Loggers on a trainer."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from lightrl.comm import Comm
from lightrl.config import GRPOConfig, JudgeConfig, RolloutLogConfig
from lightrl.trainers.loggers.attach import LoggedRun, attach, public_options


class Noted:
    """A logger that keeps what it gets."""

    made: list["Noted"] = []  # noqa: RUF012

    def __init__(self, run: LoggedRun) -> None:
        self.run, self.rows, self.is_closed = run, [], False  # type: ignore[var-annotated]
        Noted.made.append(self)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.rows.append((step, dict(metrics)))

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> str:
    module = ModuleType("own_loggers")
    module.Noted = Noted  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "own_loggers", module)
    Noted.made = []
    return "own_loggers:Noted"


def trainer_of(folder: Path, name: str, *, is_main: bool = True) -> Any:
    def append(step: int, metrics: Mapping[str, float]) -> None:
        with open(folder / "metrics.jsonl", "a") as file:
            file.write(json.dumps({"step": step, **metrics}))

    comm = SimpleNamespace(is_main=is_main, phase=Comm.phase.__get__(SimpleNamespace(_board=None)))
    return SimpleNamespace(
        config=GRPOConfig(log=RolloutLogConfig(to=name)),
        strategy=SimpleNamespace(comm=comm),
        folder=SimpleNamespace(root=folder, append_metrics=append),
        step_index=3,
        close=lambda: None,
    )


def test_a_logger_gets_what_metrics_jsonl_gets(tmp_path: Path, noted: str) -> None:
    trainer = trainer_of(tmp_path, noted)
    attach(trainer)
    trainer.folder.append_metrics(4, {"loss": 0.5})
    (logger,) = Noted.made
    assert logger.rows == [(4, {"loss": 0.5})]
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 4, "loss": 0.5}
    assert (logger.run.name, logger.run.step, logger.run.options["num_prompts"]) == (tmp_path.name, 3, 16)
    trainer.close()
    assert logger.is_closed
    again = trainer_of(tmp_path, noted)
    attach(again)
    assert Noted.made[1].run.id == logger.run.id  # a run that goes on is the same run


def test_other_ranks_have_none(tmp_path: Path, noted: str) -> None:
    attach(trainer_of(tmp_path, noted, is_main=False))
    assert not Noted.made


def test_no_secret_leaves_the_run() -> None:
    config = GRPOConfig(judge=JudgeConfig(url="http://user:hunter2@localhost:1/v1", api_key_env="MY_KEY"))
    options = public_options(config)
    assert options["judge.url"] == "http://***@localhost:1/v1"
    assert options["judge.api_key_env"] == "MY_KEY"  # the name of a variable
    assert "hunter2" not in str(options)
