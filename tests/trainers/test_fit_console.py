from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightrl.comm import Comm
from lightrl.config import ExampleEvalConfig, GRPOConfig, LogConfig, OptimConfig, RolloutLogConfig, SFTConfig
from lightrl.config.export_sections import ExportConfig, HubConfig
from lightrl.trainers.fit import RunConsole, RunLog, Shown, Trainer, continuation, observers
from lightrl.trainers.run_folder import RunFolder

METRICS = {"reward/mean": 0.5, "tokens/per_second": 1234.0, "entropy": 0.25}


def test_plain_lines_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    console = RunConsole(Shown(), enabled=True, first_step=0, max_steps=40)
    with console.progress:
        for step in range(1, 5):
            console.step_done(step, METRICS)
        console.evaluated(4, {"eval/accuracy": 0.75, "eval/reward": 0.5})
        console.final_table([{"step": 4, "eval/accuracy": 0.75, "reward/mean": 0.5, "time/step": 2.0}])
    out = capsys.readouterr().out
    assert "step 2/40  reward 0.500  1,234 tokens/s  entropy 0.250" in out
    assert "step 3/40" not in out
    assert "step 4  eval/accuracy 0.750" in out
    assert "###############" in out  # 15 of 20 for 0.75


def test_the_last_step_is_shown_and_the_table_adds_up_the_seconds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    console = RunConsole(Shown(), enabled=True, first_step=0, max_steps=41)
    console.step_done(41, METRICS)  # no multiple of 41 // 20
    console.final_table([{"step": 1, "time/step": 4.0}])  # no evaluation, no table
    assert capsys.readouterr().out == "step 41/41  reward 0.500  1,234 tokens/s  entropy 0.250\n"
    rows = [{"step": step, "time/step": 4.0} for step in range(1, 5)]
    console.final_table([*rows, {"step": 5, "time/step": None, "eval/accuracy": 1.5, "entropy": 0.25}])
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "1.500" in line]
    cells = [cell.strip() for cell in row.split("\u2502")[1:-1]]
    assert cells == ["5", "1.500", "#" * 20, "", "0.250", "16"]  # a bar is full from 1 on; 4 x 4 s and none


def test_a_slow_run_is_not_silent_for_long(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = 0.0
    monkeypatch.setattr("lightrl.trainers.fit.time", SimpleNamespace(monotonic=lambda: seconds))
    console = RunConsole(Shown(), enabled=True, first_step=0, max_steps=1000)
    for step in range(1, 51):
        seconds += 25.0 if step < 9 else 1.0
        console.step_done(step, METRICS)
    shown = [int(line.split("/")[0].removeprefix("step ")) for line in capsys.readouterr().out.splitlines()]
    assert shown == [3, 6, 19, 50]  # after more than a minute each, and the one that is due


def test_a_terminal_has_no_bar_if_it_is_wanted_for_a_debugger(monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/symptoms.md: the bar would overwrite what is typed into pdb."""
    monkeypatch.setattr("sys.stdout", SimpleNamespace(isatty=lambda: True, write=len, flush=lambda: None))
    for name in ("TTY_COMPATIBLE", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    assert not RunConsole(Shown(), enabled=True, first_step=0, max_steps=2).progress.disable
    monkeypatch.setenv("TTY_COMPATIBLE", "0")
    assert RunConsole(Shown(), enabled=True, first_step=0, max_steps=2).progress.disable


def test_other_ranks_are_silent(capsys: pytest.CaptureFixture[str]) -> None:
    console = RunConsole(Shown(), enabled=False, first_step=0, max_steps=2)
    with console.progress:
        console.say("hello")
        console.step_done(2, METRICS)
    assert capsys.readouterr().out == ""


def test_an_evaluation_may_lack_a_metric(capsys: pytest.CaptureFixture[str]) -> None:
    console = RunConsole(Shown(), enabled=True, first_step=0, max_steps=2)
    with console.progress:
        console.evaluated(1, {"eval/reward": 0.5, "eval/response_tokens": 3.0})
    assert "step 1  eval/reward 0.500" in capsys.readouterr().out


def test_only_what_is_asked_for_looks_on() -> None:
    loggers, tokens = "lightrl.trainers.loggers.attach:Loggers", "lightrl.trainers.token_log:token_log"
    exporting = "lightrl.trainers.export:Export"
    assert observers(GRPOConfig()) == observers(SFTConfig()) == ()
    assert observers(SFTConfig(log=LogConfig(to="tensorboard"))) == (loggers,)
    assert observers(GRPOConfig(log=RolloutLogConfig(to="tensorboard", tokens=True))) == (tokens, loggers)
    assert observers(GRPOConfig(export=ExportConfig(every=2), profile="3"))[1] == exporting
    assert observers(SFTConfig(eval=ExampleEvalConfig(best="eval/loss"))) == ("lightrl.trainers.best:Best",)
    assert observers(GRPOConfig(hub=HubConfig(push="me/model"))) == (exporting,)


def test_a_step_that_is_logged_is_in_the_files_even_if_the_run_is_killed(tmp_path: Path) -> None:
    strategy = SimpleNamespace(comm=Comm())
    trainer: Any = SimpleNamespace(config=SFTConfig(), strategy=strategy, folder=RunFolder(tmp_path), step_index=1)
    log = RunLog(trainer)
    log.write(METRICS)
    (board,) = (tmp_path / "tensorboard").iterdir()
    assert b"entropy" in board.read_bytes()
    assert "entropy" in (tmp_path / "metrics.jsonl").read_text()
    log.close()


def test_a_run_that_begins_again_shows_each_step_once_in_tensorboard(tmp_path: Path) -> None:
    strategy = SimpleNamespace(comm=Comm())
    trainer: Any = SimpleNamespace(config=SFTConfig(), strategy=strategy, folder=RunFolder(tmp_path))
    for logged in ((0, 1, 2), (0, 1, 2), (2, 3)):  # it is killed before its checkpoint of step 1, and once after that
        trainer.step_index = 1 if logged[0] else 0
        log = RunLog(trainer)
        for trainer.step_index in logged:
            log.write(METRICS)
        log.close()
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in board.Scalars("entropy")] == [0, 1, 2, 3]


@pytest.mark.parametrize(("unit", "moved"), [("optimizer_step", 0), ("rl_step", 1)])
def test_a_finished_step_is_counted_and_moves_the_schedules_whose_unit_it_is(unit: Any, moved: int) -> None:
    moves: list[str] = []
    strategy = SimpleNamespace(trained=SimpleNamespace(step_schedules=lambda: moves.append("moved")))
    trainer: Any = SimpleNamespace(
        config=SFTConfig(optim=OptimConfig(schedule_unit=unit)), strategy=strategy, step_index=4
    )
    Trainer.finish_step(trainer)
    assert (trainer.step_index, len(moves)) == (5, moved)


def test_a_run_that_has_reached_its_last_step_says_that_none_is_left() -> None:
    def told(max_steps: int) -> str:
        run = SimpleNamespace(checkpoint="run/checkpoints/step-000004")
        trainer: Any = SimpleNamespace(step_index=4, config=SimpleNamespace(max_steps=max_steps), run=run)
        return continuation(trainer)

    assert told(5) == "continuing after step 4 from run/checkpoints/step-000004"
    assert told(4) == f"{told(5)}: --max_steps 4 leaves no step to do"
    assert told(2) == f"{told(5)}: --max_steps 2 leaves no step to do"
