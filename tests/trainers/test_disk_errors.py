"""A disk that takes no more, at each file of a run: the last good checkpoint stays, and the run stops or goes on."""

from __future__ import annotations

import ctypes
import errno
import json
import multiprocessing
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer.record_writer import RecordWriter

from lightrl import checkpoint
from lightrl.checkpoint import CheckpointDirectory
from lightrl.comm import RankError
from lightrl.config import CheckpointConfig, SFTConfig
from lightrl.strategy.base import StrategyBase
from lightrl.strategy.saving import state_files
from lightrl.testing import run_spmd
from lightrl.trainers.disk_errors import describe_disk_error, find_disk_error
from lightrl.trainers.fit import RunLog, fit
from lightrl.trainers.run_folder import RunFolder
from lightrl.trainers.sft import SFTTrainer

Options = Callable[[str], dict[str, Any]]
FULL, QUOTA, READ_ONLY, GONE = errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ENOENT
AFTER = 2  # steps that the disk takes


def make(options: dict[str, Any], folder: Path, **changes: Any) -> SFTTrainer:
    settings = CheckpointConfig(every=1, keep=3, **changes)
    return SFTTrainer(SFTConfig(**options, checkpoint=settings, strategy="single", output_dir=str(folder)))


def failing(code: int, original: Callable[..., Any], is_due: Callable[[], bool], where: str) -> Callable[..., Any]:
    def write(*args: Any, **kwargs: Any) -> Any:
        if is_due():
            raise OSError(code, os.strerror(code), where)
        return original(*args, **kwargs)

    return write


PLACES: dict[str, tuple[object, str]] = {
    "metrics": (RunFolder, "append_metrics"),
    "samples": (RunFolder, "append_samples"),
    "folder of a checkpoint": (CheckpointDirectory, "begin"),
    "tensors": (state_files, "save_tensors"),
    "marker": (checkpoint, "save_json"),
    "rename": (os, "rename"),
}


CASES = [  # each kind of error where files are written most often, and each place once more; True: beside the training
    *[(place, code, False) for place in ("metrics", "tensors") for code in (FULL, QUOTA, READ_ONLY, GONE)],
    ("samples", FULL, False),
    ("folder of a checkpoint", READ_ONLY, False),
    ("marker", QUOTA, False),
    ("rename", FULL, False),
    ("tensors", FULL, True),
    ("marker", QUOTA, True),
]


@pytest.mark.parametrize(("place", "code", "background"), CASES)
def test_a_run_stops_or_goes_on(
    place: str,
    code: int,
    background: bool,
    offline_flags: Options,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The disk takes no more in step 3 of 5; with `continue` it does again in step 4."""
    owner, name = PLACES[place]
    options = offline_flags("sft") | {"max_steps": 5}
    for mode in ("stop", "continue"):
        folder = tmp_path / mode
        trainer = make(options, folder, on_disk_error=mode, asynchronous=background)
        with monkeypatch.context() as patch:
            has_failed: list[int] = []

            def is_due(trainer: SFTTrainer = trainer, has_failed: list[int] = has_failed) -> bool:
                due = trainer.step_index > AFTER and not has_failed
                has_failed.extend([1] * due)
                return due

            original = getattr(owner, name)
            patch.setattr(owner, name, failing(code, original, is_due, str(folder / "file")))
            patch.setattr(RunLog, "write_samples", lambda log, _: log._trainer.folder.append_samples(0, []))
            if mode == "stop":
                with pytest.raises(OSError, match=os.strerror(code)) as error:
                    fit(trainer)
                assert find_disk_error(error.value, folder) is error.value
            else:
                fit(trainer)
        trainer.close()
        steps = CheckpointDirectory(folder / "checkpoints", keep=9).steps()
        said = capsys.readouterr().err
        if mode == "stop":
            assert steps[-1] in ([1, 2, 3] if background else [2]), (
                steps
            )  # beside the training one may still be written
        else:
            assert steps[-1] == 5
            assert said.count("warning: ") == 1, said
            assert f"({os.strerror(code)}) for {folder}/file: what was written before is kept; no " in said
            rows = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
            assert [step for step in rows if step] == [step for step in range(1, 6) if place != "metrics" or step != 3]
            assert (folder / "final" / "weights.sha256").exists()


@pytest.mark.parametrize("background", [False, True])
def test_a_checkpoint_that_does_not_fit_leaves_the_room_to_the_rest_of_the_run(
    background: bool, offline_flags: Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make(offline_flags("sft") | {"max_steps": 3}, tmp_path, on_disk_error="continue", asynchronous=background)
    checkpoints, seen = tmp_path / "checkpoints", list[str]()

    def is_due() -> bool:
        return trainer.step_index > AFTER and any(checkpoints.glob(".tmp-step-*/*.safetensors"))  # one fits

    def saved(trainer: SFTTrainer, folder: Path) -> None:
        seen.extend(path.name for path in checkpoints.iterdir())

    where = failing(FULL, state_files.save_tensors, is_due, str(tmp_path / "file"))
    monkeypatch.setattr(state_files, "save_tensors", where)
    monkeypatch.setattr(SFTTrainer, "export", saved)
    fit(trainer)
    trainer.close()
    assert "step-000001" in seen
    assert "step-000003" not in seen  # the disk was full indeed
    assert not [name for name in seen if name.startswith(".")]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # the writer's thread, as intended
def test_tensorboard_goes_on_after_an_error_of_its_writer(
    offline_flags: Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The thread that writes ends with its first error, and is no use from then on."""
    trainer = make(offline_flags("sft") | {"max_steps": 5}, tmp_path / "run", on_disk_error="continue")
    has_failed: list[int] = []

    def is_due() -> bool:
        due = trainer.step_index > AFTER and not has_failed
        has_failed.extend([1] * due)
        return due

    monkeypatch.setattr(RecordWriter, "write", failing(FULL, RecordWriter.write, is_due, ""))
    fit(trainer)
    said = capsys.readouterr().err
    assert said.count("warning: ") == 1
    assert "what was written before is kept; TensorBoard lacks this step, and the run goes on" in said
    board = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert [event.step for event in board.Scalars("loss")] == [1, 2, 4, 5]
    assert [row["step"] for row in trainer.folder.metrics()] == [1, 2, 3, 4, 5]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of TensorBoard's writer
def test_metrics_are_written_while_tensorboard_cannot_be_opened_again(
    offline_flags: Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = make(offline_flags("sft") | {"max_steps": 6}, tmp_path / "run", on_disk_error="continue")

    def is_full() -> bool:
        return AFTER < trainer.step_index < AFTER + 3  # after steps 3 and 4

    for name in ("__init__", "write"):
        monkeypatch.setattr(RecordWriter, name, failing(FULL, getattr(RecordWriter, name), is_full, ""))
    fit(trainer)
    assert [row["step"] for row in trainer.folder.metrics()] == [1, 2, 3, 4, 5, 6]
    said = capsys.readouterr().err
    assert said.count("; TensorBoard lacks this step, and the run goes on") == said.count("warning: ") == 2
    board = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert [event.step for event in board.Scalars("loss")] == [1, 2, 5, 6]


def test_other_errors_stop_a_run_that_goes_on_without_a_disk(
    offline_flags: Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ValueError("no disk error")

    monkeypatch.setattr(state_files, "save_tensors", broken)
    trainer = make(offline_flags("sft"), tmp_path / "run", on_disk_error="continue")
    with pytest.raises(ValueError, match="no disk error"):
        fit(trainer)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of TensorBoard's writer
@pytest.mark.parametrize("is_made", [False, True])
def test_a_folder_that_is_removed_is_made_again(
    is_made: bool,
    offline_flags: Options,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """is_made: a checkpoint that was being written has made the folder again, empty."""
    root = tmp_path / "run"
    trainer = make(offline_flags("sft") | {"max_steps": 4}, root, on_disk_error="continue")
    step = trainer.step

    def remove_and_step() -> Any:
        if trainer.step_index == AFTER:
            shutil.rmtree(root)
            if is_made:
                (root / "checkpoints").mkdir(parents=True)
        return step()

    monkeypatch.setattr(trainer, "step", remove_and_step)
    fit(trainer)
    said = capsys.readouterr().err
    log = "tensorboard/events.out.tfevents" if is_made else "metrics.jsonl"
    assert f"the run's folder takes no more (No such file or directory) for {root}/{log}" in said
    assert {"owner.json", "config.yaml", "metrics.jsonl", "checkpoints", "final"} <= {
        path.name for path in root.iterdir()
    }
    trainer.close()
    again = make(offline_flags("sft") | {"max_steps": 5}, root)
    assert again.step_index == 4


@pytest.mark.parametrize(
    "nameless", [OSError(FULL, os.strerror(FULL)), SafetensorError("I/O error: No space left on device (os error 28)")]
)
def test_a_final_model_that_cannot_be_written_ends_the_run_and_the_checkpoints_stay(
    nameless: Exception, offline_flags: Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What writes a model, a library, names no file."""

    def full(*_: object) -> None:
        raise nameless

    trainer = make(offline_flags("sft"), tmp_path / "run", on_disk_error="continue")
    with monkeypatch.context() as patch:
        patch.setattr(StrategyBase, "save_pretrained", full)
        with pytest.raises((OSError, SafetensorError)) as error:
            fit(trainer)
    found, final = find_disk_error(error.value, tmp_path), tmp_path / "run" / "final"
    assert found is not None
    told = f"the disk takes no more (No space left on device) for {final}: what was written before is kept"
    assert describe_disk_error(found) == told
    trainer.close()
    again = make(offline_flags("sft"), tmp_path / "run")
    assert again.step_index == 3
    fit(again)
    assert (final / "weights.sha256").exists()


@pytest.mark.parametrize("method", ["model", "tokenizer"])
def test_a_final_model_that_is_not_whole_has_no_hash(
    method: str, offline_flags: Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder already holds the final model of fewer steps."""
    final, options = tmp_path / "run" / "final", offline_flags("sft")
    for num_steps in (3, 4):
        trainer = make(options | {"max_steps": num_steps}, tmp_path / "run")
        part: Any = trainer.model.hf if method == "model" else trainer.run.tokenizer
        if num_steps == 4:
            monkeypatch.setattr(type(part), "save_pretrained", failing(FULL, part.save_pretrained, lambda: True, ""))
            with pytest.raises(OSError, match="No space left"):
                fit(trainer)
            monkeypatch.undo()
        else:
            fit(trainer)
            assert (final / "weights.sha256").exists()
        trainer.close()
    assert not (final / "weights.sha256").exists()


def test_which_errors_are_of_the_disk(tmp_path: Path) -> None:
    inside = FileNotFoundError(GONE, os.strerror(GONE), str(tmp_path / "run" / "x"))
    assert find_disk_error(inside, tmp_path / "run") is inside
    assert find_disk_error(inside, tmp_path / "other") is None
    assert find_disk_error(OSError("no number"), tmp_path) is None
    assert find_disk_error(ValueError("x"), tmp_path) is None
    wrapped = RuntimeError("a checkpoint could not be written")
    wrapped.__cause__ = inside
    assert find_disk_error(wrapped, tmp_path) is inside
    told = RankError("rank 1 failed")
    told.mistake = f"rank 1: {OSError(FULL, os.strerror(FULL), '/a: b')}"
    found = find_disk_error(told, tmp_path)
    assert found is not None
    assert (found.errno, found.filename) == (FULL, "/a: b")


def test_only_the_error_of_a_single_rank_is_read_from_a_report(tmp_path: Path) -> None:
    report = "--- rank 0 ---\nTraceback\nOSError: [Errno 28] No space left on device: '/a'\n"
    found = find_disk_error(RankError(f"rank 0 failed in phase 'export':\n{report}"), tmp_path)
    assert found is not None
    assert found.filename == "/a"
    assert find_disk_error(RankError(f"{report}During it\nKeyError: 1"), tmp_path) is None
    assert find_disk_error(RankError(f"--- rank 1 ---\nKeyError: 1\n{report}"), tmp_path) is None


@pytest.mark.slow
def test_a_rank_that_waits_for_the_one_that_writes_a_model_says_the_same(tmp_path: Path) -> None:
    program = Path(__file__).resolve().parents[1] / "programs" / "full_disk_program.py"
    run_spmd(program, str(tmp_path), world_size=2, timeout_s=200)
    said = [(tmp_path / f"{rank}.txt").read_text() for rank in range(2)]
    full = f"the disk takes no more (No space left on device) for {tmp_path}/.best: what was written before is kept"
    assert said == [full, full]


# ---- A real disk -----------------------------------------------------------------------------------------------------


def train_on_a_small_disk(options: dict[str, Any], root: Path, answer: Any) -> None:
    """A process of its own, since only it sees the disk that it mounts."""
    torch.set_num_threads(1)  # the threads of OpenMP have not survived the fork
    libc = ctypes.CDLL(None, use_errno=True)
    root.mkdir()
    if libc.unshare(0x20000) or libc.mount(b"none", b"/", None, 0x40000 | 0x4000, None):  # NEWNS; private, all below
        answer.send(f"no mount namespace: {os.strerror(ctypes.get_errno())}")
        return
    if libc.mount(b"tmpfs", str(root).encode(), b"tmpfs", 0, b"size=700k"):
        answer.send(f"no tmpfs: {os.strerror(ctypes.get_errno())}")
        return
    trainer = make(options | {"max_steps": 40}, root / "run")
    try:
        fit(trainer)
    except OSError as error:
        found = find_disk_error(error, root)
        newest = CheckpointDirectory(root / "run" / "checkpoints", keep=9).latest()
        assert found is not None
        assert newest is not None
        trainer.close()
        libc.mount(b"tmpfs", str(root).encode(), b"tmpfs", 0x20, b"size=100m")  # remount, larger
        again = make(options | {"max_steps": 6}, root / "run")
        assert again.step_index == int(newest.name[-6:])
        fit(again)
        answer.send(f"{found.strerror}; {(root / 'run' / 'final' / 'weights.sha256').exists()}")
    else:
        answer.send("the disk was large enough")


def test_a_small_disk_fills_up_and_the_run_goes_on_when_there_is_room(offline_flags: Options, tmp_path: Path) -> None:
    ours, theirs = multiprocessing.Pipe()
    options = offline_flags("sft")
    process = multiprocessing.get_context("fork").Process(
        target=train_on_a_small_disk, args=(options, tmp_path / "disk", theirs)
    )
    process.start()
    theirs.close()
    said = ours.recv()
    process.join()
    if said.startswith("no "):
        pytest.skip(said)
    assert said == "No space left on device; True"


def test_a_checkpoint_folder_that_a_rank_does_not_see_asks_about_the_nodes() -> None:
    question = "(do all nodes share this folder?)"
    for name, is_asked in (("run/checkpoints/.tmp-step-000002/a", True), ("run/metrics.jsonl", False)):
        error = FileNotFoundError(errno.ENOENT, "No such file or directory", name)
        assert (f"for {name} {question}: what was" in describe_disk_error(error)) is is_asked
    full = OSError(errno.ENOSPC, "No space left on device", "run/checkpoints/.tmp-step-000002/a")
    assert question not in describe_disk_error(full)
