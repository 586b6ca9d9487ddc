"""A checkpoint that is written beside the training: kill, errors, and other numbers of ranks."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightrl.checkpoint import CheckpointDirectory
from lightrl.comm import Comm, RankError
from lightrl.config import CheckpointConfig, StrategyOptions
from lightrl.strategy.saving import state_files
from lightrl.strategy.saving.background_save import BackgroundSave
from lightrl.strategy.torch_native import SingleStrategy
from lightrl.testing import SpmdError, run_spmd

PROGRAM = Path(__file__).parents[2] / "programs" / "checkpoint_program.py"
LEFT = PROGRAM.with_name("left_save_program.py")


def test_jobs_run_in_order_until_one_fails() -> None:
    done: list[int] = []

    def fail() -> None:
        raise OSError("full")

    saving = BackgroundSave([lambda: done.append(1), fail, lambda: done.append(3)], commit=lambda: None)
    saving.wait()
    assert saving.is_written
    assert done == [1]
    assert str(saving.error) == "full"


@pytest.mark.parametrize(
    ("error", "kind", "told"),
    [(OSError("full"), OSError, "^full"), (ValueError("odd"), RuntimeError, "^A checkpoint could not be written: odd")],
)
def test_files_that_could_not_be_written_make_no_checkpoint(error: Exception, kind: type[Exception], told: str) -> None:
    def fail() -> None:
        raise error

    committed: list[bool] = []
    saving = BackgroundSave([fail], commit=lambda: committed.append(True))
    with pytest.raises(kind, match=told):
        saving.finish(Comm())
    assert not committed
    assert not saving.jobs  # which hold the copies of the weights


def one_weight(value: float, *, asynchronous: bool = True) -> tuple[SingleStrategy, torch.nn.Linear]:
    """weight = value, SGD at rate 1 with the gradient 1: every update takes 1 away."""
    options = StrategyOptions(exact_batches=True, checkpoint=CheckpointConfig(asynchronous=asynchronous))
    strategy = SingleStrategy(0, 0.0, 1, 1, options)
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, value)
    strategy.register(model, torch.optim.SGD(model.parameters(), lr=1.0))
    return strategy, model


def update(strategy: SingleStrategy) -> None:
    strategy.train_batch([torch.ones(1, 1)], lambda out, mb: out.sum(), len)


def test_training_goes_on_and_the_checkpoint_holds_what_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    strategy, model = one_weight(5.0)
    may_write, save_tensors = threading.Event(), state_files.save_tensors

    def slow(*args: object) -> None:
        assert may_write.wait(60)
        save_tensors(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(state_files, "save_tensors", slow)
    directory = CheckpointDirectory(tmp_path, keep=3)
    strategy.set_global_step(1)
    strategy.save_ckpt(model, str(tmp_path))
    update(strategy)
    update(strategy)
    assert model.weight.item() == 3.0
    assert directory.latest() is None
    may_write.set()
    strategy.set_global_step(3)
    strategy.save_ckpt(model, str(tmp_path))  # waits for the first
    assert directory.steps() == [1]
    strategy.saver.finish()
    strategy.saver.finish()
    assert directory.steps() == [1, 3]
    for tag, value in (("step-000001", 5.0), ("step-000003", 3.0)):
        other, loaded = one_weight(0.0)
        other.load_ckpt(loaded, str(tmp_path), tag=tag)
        assert loaded.weight.item() == value


def test_a_later_update_completes_it_and_so_does_a_load(tmp_path: Path) -> None:
    strategy, model = one_weight(5.0)
    strategy.save_ckpt(model, str(tmp_path))
    assert strategy.saver.pending is not None
    strategy.saver.pending.wait()
    assert CheckpointDirectory(tmp_path, keep=1).steps() == []
    update(strategy)
    assert CheckpointDirectory(tmp_path, keep=1).steps() == [0]
    strategy.save_ckpt(model, str(tmp_path), tag="best")
    strategy.load_ckpt(model, str(tmp_path), tag="best")
    assert model.weight.item() == 4.0


@pytest.mark.parametrize(
    ("end", "code", "steps"), [("pass", 0, [7]), ("raise SystemExit(3)", 3, [7]), ("1 / 0", 1, [])]
)
def test_the_last_save_of_a_program_that_closes_nothing(end: str, code: int, steps: list[int], tmp_path: Path) -> None:
    script = f"""
import torch
from lightrl.config import CheckpointConfig, StrategyOptions
from lightrl.strategy.torch_native import SingleStrategy

options = StrategyOptions(exact_batches=True, checkpoint=CheckpointConfig(asynchronous=True))
strategy = SingleStrategy(0, 0.0, 1, 1, options)
model = torch.nn.Linear(1, 1)
strategy.register(model, torch.optim.SGD(model.parameters(), lr=1.0))
strategy.set_global_step(7)
strategy.save_ckpt(model, {str(tmp_path)!r})
{end}
"""
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == code
    assert CheckpointDirectory(tmp_path, keep=1).steps() == steps


@pytest.mark.parametrize("end", ["exit", "close"])
def test_a_rank_that_ends_waits_for_no_other_and_its_files_count(end: str, tmp_path: Path) -> None:
    run_spmd(LEFT, str(tmp_path), end, world_size=2, timeout_s=90)
    assert CheckpointDirectory(tmp_path / "checkpoints", keep=1).steps() == [7]


class LonelyComm(Comm):
    """Rank 0, whose only peer has left."""

    @contextmanager
    def phase(self, *_: object, **__: object) -> Iterator[Any]:
        yield
        raise RankError("rank 1 has left")


@pytest.mark.parametrize("has_failed", [False, True])
def test_the_error_of_a_rank_that_had_written_is_raised_beside_the_checkpoint(has_failed: bool) -> None:
    committed: list[bool] = []
    told, errors = ["written", "written"], {1: "ValueError"} if has_failed else {}
    board: Any = SimpleNamespace(post_result=lambda *_: None, results=lambda *_, **__: told, errors_now=lambda: errors)
    saving = BackgroundSave([], commit=lambda: committed.append(True), board=board)
    with pytest.raises(RankError) if has_failed else nullcontext():
        saving.finish(LonelyComm())
    assert committed == [True]
    told[1] = "failed: full"
    with pytest.raises(RankError):
        saving.finish(LonelyComm())
    assert committed == [True]


@pytest.mark.slow
@pytest.mark.long
def test_a_kill_while_writing_loses_nothing_and_other_numbers_of_ranks_go_on(tmp_path: Path) -> None:
    def run(part: str, world: int) -> str:
        return run_spmd(PROGRAM, part, str(tmp_path), world_size=world, timeout_s=200)

    run("whole", 2)
    with pytest.raises(SpmdError, match="killed while writing"):
        run("killed", 2)
    assert CheckpointDirectory(tmp_path / "checkpoints", keep=3).steps() == [1]
    assert run("resumed", 2).count("all checked") == 2
    assert run("moved", 4).count("all checked") == 4
    assert run("moved", 1).count("all checked") == 1
    assert CheckpointDirectory(tmp_path / "checkpoints", keep=3).steps() == [1, 2, 3]
