from __future__ import annotations

import errno
import logging
import multiprocessing
import os
import random
import resource
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close

from lightrl.checkpoint import (
    CheckpointDirectory,
    load_json,
    resolve_checkpoint,
    save_bytes,
    save_json,
    save_tensors,
)


def save(directory: CheckpointDirectory, step: int, generation: int | None = None) -> Path:
    """Commits a checkpoint of three files whose content tells the generation (default: the step)."""
    value = step if generation is None else generation
    temporary = directory.begin(step)
    save_tensors(temporary / "model.safetensors", {"weight": torch.full((100, 100), float(value))})
    (temporary / "ranks").mkdir()
    save_json(temporary / "ranks" / "rank-0.json", {"generation": value})
    save_json(temporary / "state.json", {"generation": value})
    return directory.commit(step)


def generation_in(checkpoint: Path | None) -> int:
    """Loads all of a checkpoint and checks that its files belong together."""
    assert checkpoint is not None
    generation = load_json(checkpoint / "state.json")["generation"]
    assert load_json(checkpoint / "ranks" / "rank-0.json") == {"generation": generation}
    weight = load_file(checkpoint / "model.safetensors")["weight"]
    assert_close(weight, torch.full((100, 100), float(generation)), atol=0, rtol=0)
    return int(generation)


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_a_committed_step_is_the_latest(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path / "run" / "checkpoints", keep=2)
    path = save(directory, 7)
    assert path == directory.root / "step-000007" == directory.latest() == directory.path(7)
    assert directory.steps() == [7]
    assert generation_in(path) == 7
    assert (directory.root / "latest").read_text() == "step-000007\n"
    marker = load_json(path / "COMPLETE")
    assert marker["step"] == 7
    assert marker["files"] == {
        name: (path / name).stat().st_size for name in ("model.safetensors", "ranks/rank-0.json", "state.json")
    }


def test_without_a_checkpoint_there_is_no_latest(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path / "absent", keep=1)
    assert directory.latest() is None
    assert directory.steps() == []
    directory.begin(3)
    assert directory.latest() is None


def test_rotation_keeps_the_last_committed_and_what_is_not_its_own(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path, keep=2)
    (tmp_path / "step-000001").mkdir()  # a name like ours, without a marker
    (tmp_path / "step-final").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    for step in (2, 3, 10):
        save(directory, step)
    assert directory.steps() == [3, 10]
    assert names(tmp_path) == ["latest", "notes.txt", "step-000001", "step-000003", "step-000010", "step-final"]


def test_the_oldest_is_deleted_only_after_the_newest_is_complete(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path, keep=1)
    save(directory, 1)
    (directory.begin(2) / "file").write_text("x")
    assert directory.steps() == [1]
    directory.commit(2)
    assert directory.steps() == [2]


def test_after_a_rewind_the_last_committed_is_the_newest_and_the_last_to_go(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path, keep=3)
    for step in (10, 20, 30):
        save(directory, step)
    save(directory, 15)  # the run was resumed from step 10
    assert directory.steps() == [20, 30, 15]
    assert generation_in(directory.latest()) == 15


def test_the_one_before_a_checkpoint_is_the_last_that_a_run_could_continue_then(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path, keep=9)
    first, second = save(directory, 10), save(directory, 20)
    (directory.begin(25) / "file").write_text("x")
    directory.commit(25, is_latest=False)
    third = save(directory, 15)  # the run was resumed from step 10
    assert [directory.before(path) for path in (first, second, third)] == [None, first, second]


def test_a_step_can_be_saved_again(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path, keep=2)
    for generation in (1, 2, 3):
        save(directory, 5, generation)
    assert generation_in(directory.latest()) == 3
    assert names(tmp_path) == ["latest", "step-000005"]


def test_the_former_directory_of_a_step_counts_until_the_new_one_is_there(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path, keep=2)
    replaced = tmp_path / ".replaced-step-000005"
    shutil.copytree(save(directory, 5, generation=1), tmp_path / "aside")
    final = save(directory, 5, generation=2)
    (tmp_path / "aside").rename(replaced)
    assert generation_in(directory.latest()) == 2
    shutil.rmtree(final)  # as if killed between the two renames
    assert directory.latest() == replaced
    assert resolve_checkpoint(tmp_path, replaced.name) == replaced  # as a run loads what latest() returned
    assert generation_in(directory.path(5)) == 1
    directory.begin(6)
    assert directory.latest() == final
    assert generation_in(final) == 1


def test_a_side_checkpoint_is_found_by_its_step_only(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path, keep=3)
    save(directory, 1)
    (directory.begin(2) / "file").write_text("x")
    path = directory.commit(2, is_latest=False)
    assert directory.latest() == tmp_path / "step-000001"
    assert directory.path(2) == path
    assert (tmp_path / "latest").read_text() == "step-000001\n"
    directory.keep = 1
    (directory.begin(3) / "file").write_text("x")
    directory.commit(3, is_latest=False)
    assert directory.steps() == [1, 3]  # step 1 is what a run would go on from


def test_a_side_checkpoint_of_a_step_that_a_run_may_continue_takes_its_place(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path, keep=3)
    save(directory, 1)
    (directory.begin(1) / "file").write_text("x")
    assert directory.commit(1, is_latest=False) == directory.latest()


def test_without_a_count_of_steps_the_next_one_is_past_the_highest(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path, keep=3)
    assert directory.next_step() == 0
    for step in (10, 2):  # after a rewind
        save(directory, step)
    (tmp_path / "step-old").mkdir()  # a user's own
    assert directory.next_step() == 11


def test_a_folder_without_a_checkpoint_is_no_tag(tmp_path: Path) -> None:
    save(CheckpointDirectory(tmp_path, keep=1), 3)
    (tmp_path / "notes").mkdir()
    assert resolve_checkpoint(tmp_path, None) == tmp_path / "step-000003"


def test_rotation_by_size_keeps_the_newest_whatever_it_takes(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(CheckpointDirectory(tmp_path, keep=9), step)
    size = sum(file.stat().st_size for file in (tmp_path / "step-000001").rglob("*") if file.is_file())
    save(CheckpointDirectory(tmp_path, keep=9, max_bytes=int(2.5 * size)), 4)
    assert CheckpointDirectory(tmp_path, keep=9).steps() == [3, 4]
    save(CheckpointDirectory(tmp_path, keep=9, max_bytes=1), 5)
    assert CheckpointDirectory(tmp_path, keep=9).steps() == [5]
    assert CheckpointDirectory(tmp_path, keep=9, max_bytes=6)._num_kept([1, 2, 3, 4]) == 3  # as many bytes as it may


def truncate(checkpoint: Path) -> None:
    with (checkpoint / "model.safetensors").open("r+b") as file:
        file.truncate(100)


def remove_a_file(checkpoint: Path) -> None:
    (checkpoint / "ranks" / "rank-0.json").unlink()


def remove_the_marker(checkpoint: Path) -> None:
    (checkpoint / "COMPLETE").unlink()


def damage_the_marker(checkpoint: Path) -> None:
    (checkpoint / "COMPLETE").write_text('{"step": 2, "fi')


def take_another_steps_marker(checkpoint: Path) -> None:
    (checkpoint / "COMPLETE").write_text((checkpoint.parent / "step-000001" / "COMPLETE").read_text())


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (truncate, "its file model.safetensors has 100 bytes of 40"),
        (remove_a_file, "its file ranks/rank-0.json is missing"),
        (remove_the_marker, "its COMPLETE marker cannot be read"),
        (damage_the_marker, "its COMPLETE marker is damaged"),
        (take_another_steps_marker, "its COMPLETE marker is that of step 1"),
    ],
)
def test_an_incomplete_checkpoint_is_skipped_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None], reason: str
) -> None:
    directory = CheckpointDirectory(tmp_path, keep=3)
    save(directory, 1)
    damage(save(directory, 2))
    with caplog.at_level(logging.WARNING):
        assert generation_in(directory.latest()) == 1
    assert "step-000002" in caplog.text
    assert reason in caplog.text
    assert directory.steps() == [1]
    assert generation_in(directory.path(1)) == 1
    assert len(caplog.messages) == 1  # what a run that continues from step 1 is told
    with pytest.raises(FileNotFoundError, match="no complete checkpoint of step 2. Complete steps: 1."):
        directory.path(2)


def test_a_damaged_step_that_is_saved_again_is_kept_aside(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path, keep=1)
    save(directory, 1)
    for damage in (truncate, remove_the_marker):
        damage(save(directory, 2))
        assert generation_in(save(directory, 2)) == 2
    assert names(tmp_path) == ["damaged-step-000002", "damaged-step-000002-2", "latest", "step-000002"]
    assert directory.steps() == [2]


def test_the_manifest_has_sizes_and_checksums(tmp_path: Path) -> None:
    marker = load_json(save(CheckpointDirectory(tmp_path, keep=1), 1) / "COMPLETE")
    assert sorted(marker["files"]) == ["model.safetensors", "ranks/rank-0.json", "state.json"]
    # CRC-32 of '{\n  "generation": 1\n}\n'
    assert marker["crc32s"] == dict.fromkeys(("ranks/rank-0.json", "state.json"), 0x9E1F3716)


def test_begin_clears_what_a_crash_left_and_nothing_else(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path, keep=2)
    save(directory, 1)
    for name in (".tmp-step-000002", ".tmp-deleted-step-000000", ".tmp-step-mine", ".tmp-cache"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    temporary = directory.begin(2)
    assert names(tmp_path) == [".tmp-cache", ".tmp-step-000002", ".tmp-step-mine", "latest", "step-000001"]
    assert names(temporary) == []


def test_a_checkpoint_that_cannot_be_deleted_yet_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def is_busy(*_: Any, **__: Any) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    directory = CheckpointDirectory(tmp_path, keep=1)
    save(directory, 1)
    with monkeypatch.context() as busy:  # as NFS, while another process reads a file of the checkpoint
        busy.setattr(os, "rmdir", is_busy)
        save(directory, 2)
        save(directory, 3)
    assert directory.steps() == [3]
    assert ".tmp-deleted-step-000001 could not be deleted" in caplog.text
    save(directory, 4)
    assert names(tmp_path) == ["latest", "step-000004"]


def test_a_leftover_that_cannot_be_deleted_yet_does_not_hinder_the_next_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_busy(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))

    directory = CheckpointDirectory(tmp_path, keep=2)
    (directory.begin(1) / "left").write_text("x")  # by a run that was killed
    with monkeypatch.context() as busy:  # as NFS, while a process on another node still writes there
        busy.setattr(os, "rmdir", is_busy)
        save(directory, 1)
    save(directory, 2)
    assert names(tmp_path) == ["latest", "step-000001", "step-000002"]


def test_misuse_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep is 0"):
        CheckpointDirectory(tmp_path, keep=0)
    directory = CheckpointDirectory(tmp_path, keep=1)
    with pytest.raises(ValueError, match="step is -1"):
        directory.begin(-1)
    with pytest.raises(FileNotFoundError, match=r"call begin\(4\) and write files before commit"):
        directory.commit(4)
    directory.begin(4)
    with pytest.raises(ValueError, match="holds no files"):
        directory.commit(4)


def test_json_that_cannot_be_written_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    save_json(path, {"step": 1})
    with pytest.raises(ValueError, match="not JSON compliant"):
        save_json(path, {"loss": float("nan")})
    assert load_json(path) == {"step": 1}
    assert names(tmp_path) == ["state.json"]


def test_tensors_round_trip_with_their_types(tmp_path: Path) -> None:
    tensors = {
        "weight": torch.arange(6, dtype=torch.bfloat16).view(2, 3).T,  # not contiguous
        "step": torch.tensor(3),
        "mask": torch.tensor([True, False]),
        "empty": torch.zeros(0, 4),
        "trained": torch.nn.Parameter(torch.ones(2)),
    }
    path = tmp_path / "tensors.safetensors"
    save_tensors(path, tensors)
    loaded = load_file(path)
    assert sorted(loaded) == sorted(tensors)
    for name, tensor in tensors.items():
        assert_close(loaded[name], tensor.detach(), atol=0, rtol=0)
    assert names(tmp_path) == ["tensors.safetensors"]
    assert path.stat().st_mode & 0o777 == 0o666 & ~current_umask()


def test_a_file_system_without_modes_takes_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "chmod", no_modes)
    save_tensors(tmp_path / "tensors.safetensors", {"weight": torch.ones(2)})
    assert names(tmp_path) == ["tensors.safetensors"]


def no_modes(*_: object, **__: object) -> None:
    raise PermissionError(errno.EPERM, "Operation not permitted")


def current_umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask


class CrashError(BaseException):
    """Stands for a kill: nothing in the code may catch it."""


class CrashingSystem:
    """Lets so many operations on the disk through, then crashes; a removal crashes halfway."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_allowed: int) -> None:
        self.num_left = num_allowed
        self.rmtree = shutil.rmtree
        for owner, name in ((os, "rename"), (os, "replace"), (os, "fsync"), (Path, "mkdir")):
            monkeypatch.setattr(owner, name, self._counted(getattr(owner, name)))
        monkeypatch.setattr(shutil, "rmtree", self._crashing_rmtree)

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self._count()
            return function(*args, **kwargs)

        return counted

    def _count(self) -> None:
        if self.num_left == 0:
            raise CrashError
        self.num_left -= 1

    def _crashing_rmtree(self, path: Path) -> None:
        files = sorted(file for file in path.rglob("*") if file.is_file())
        for file in files[: len(files) // 2]:
            file.unlink()
        self._count()
        self.rmtree(path)


@pytest.mark.parametrize("keep", [1, 2])
def test_a_crash_at_any_operation_leaves_the_newest_complete_one(
    tmp_path: Path, keep: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # counted below, but a thousand of them would take long
    num_allowed = 0
    while True:
        root = tmp_path / str(num_allowed)
        directory = CheckpointDirectory(root, keep=keep)
        save(directory, 1, generation=1)
        save(directory, 2, generation=2)
        committed = 2
        try:
            with monkeypatch.context() as crashing:
                CrashingSystem(crashing, num_allowed)
                # Saved anew, saved again, and saved after a rewind.
                for generation, step in ((3, 3), (4, 3), (5, 2)):
                    save(directory, step, generation)
                    committed = generation
        except CrashError:
            pass
        # Once its rename is done a step counts, although commit has not returned.
        assert generation_in(CheckpointDirectory(root, keep=keep).latest()) in (committed, committed + 1)
        if committed == 5:
            break
        found = generation_in(CheckpointDirectory(root, keep=keep).latest())
        CheckpointDirectory(root, keep=keep).begin(9)
        assert generation_in(CheckpointDirectory(root, keep=keep).latest()) == found
        save(CheckpointDirectory(root, keep=keep), 9, generation=9)
        assert generation_in(CheckpointDirectory(root, keep=keep).latest()) == 9
        assert all(name == "latest" or name.startswith("step-") for name in names(root))
        assert len(names(root)) == keep + 1
        num_allowed += 1
    assert num_allowed > 50


def save_for_ever(root: Path, first_generation: int, log: Path) -> None:
    directory = CheckpointDirectory(root, keep=2)
    generation = first_generation
    while True:
        save(directory, generation // 2, generation)  # each step is saved twice
        with log.open("a") as file:
            file.write(f"{generation}\n")
        generation += 1


def test_the_newest_complete_one_loads_after_a_kill_at_any_moment(tmp_path: Path) -> None:
    root, log = tmp_path / "checkpoints", tmp_path / "log"
    directory = CheckpointDirectory(root, keep=2)
    save(directory, 0, generation=0)
    log.write_text("0\n")
    draw = random.Random(0)
    for killed in range(1, 16):
        # Forked: a start in milliseconds, where a fresh interpreter takes seconds to import torch.
        saver = multiprocessing.get_context("fork").Process(
            target=save_for_ever, args=(root, last_logged(log) + 1, log), daemon=True
        )
        saver.start()
        while last_logged(log) < killed and saver.is_alive():
            time.sleep(0.001)
        time.sleep(draw.uniform(0, 0.1))
        saver.kill()
        saver.join()
        assert saver.exitcode == -signal.SIGKILL
        generation = generation_in(directory.latest())
        assert generation in (last_logged(log), last_logged(log) + 1)
        log.write_text(f"{generation}\n")
    assert last_logged(log) >= 15


def test_of_a_checkpoint_that_was_moved_and_linked_only_the_link_is_deleted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = CheckpointDirectory(tmp_path / "run", keep=1)
    for step in (1, 2, 2, 2):  # step 1 is the oldest one, and step 2 is saved again
        path, elsewhere = save(directory, step), tmp_path / f"moved-{len(list(tmp_path.iterdir()))}"
        assert not path.is_symlink()
        path.rename(elsewhere)
        path.symlink_to(elsewhere)
        assert directory.latest() == path
    assert sorted(path.name for path in directory.root.iterdir()) == ["latest", "step-000002"]
    assert len(list(tmp_path.glob("moved-*/state.json"))) == 4
    assert caplog.messages == []


def last_logged(log: Path) -> int:
    return int(log.read_text().split()[-1])


@pytest.mark.parametrize(
    "write",
    [
        lambda path: save_tensors(path, {"weight": torch.zeros(100_000)}),
        lambda path: save_bytes(path, bytes(100_000)),
        lambda path: save_json(path, [0] * 100_000),
    ],
)
def test_a_full_disk_is_an_error_of_the_system_that_names_the_file(
    write: Callable[[Path], None], tmp_path: Path
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(OSError, match="File too large") as error:
            write(tmp_path / "file")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert error.value.filename == str(tmp_path / ".tmp-file")
    assert f"{tmp_path}/.tmp-file" in str(error.value)
