"""Checkpoint directories: each one is complete or does not count. strategy/saving decides what is in them.

A step is written into a temporary directory, flushed to disk, marked, and renamed, so the leftovers of a crash are
never taken for a checkpoint. Only rank 0 calls begin and commit. The other ranks write files in between, and the caller
makes every rank wait after begin and before commit.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

logger = logging.getLogger(__name__)

MARKER_NAME = "COMPLETE"
LATEST_NAME = "latest"  # a file that names the newest, for people and shell scripts; nothing here reads it

_STEP_NAME = re.compile(r"step-(\d{6,})")
_REPLACED_PREFIX = ".replaced-"  # the former directory of a step that is being saved again
_TEMPORARY_PREFIX = ".tmp-"
_DELETED_PREFIX = ".tmp-deleted-"
_MAYBE_COMPLETE = re.compile(rf"({re.escape(_REPLACED_PREFIX)})?{_STEP_NAME.pattern}")


@dataclass
class CheckpointDirectory:
    """The checkpoints of one run: a directory for each step, at most `keep` of them, the oldest deleted first.

    max_bytes limits their total size (0: no limit); the newest is kept however large it is.
    """

    root: Path
    keep: int
    max_bytes: int = 0

    def __post_init__(self) -> None:
        if self.keep < 1 or self.max_bytes < 0:
            raise _wrong_limit(self.keep, self.max_bytes)

    def begin(self, step: int, folders: Iterable[str] = ()) -> Path:
        """Makes this step's directory, with empty folders in it, after deleting the leftovers of a crash."""
        if step < 0:
            raise ValueError(f"step is {step}: it must be at least 0.")
        self.root.mkdir(parents=True, exist_ok=True)
        for path in sorted(self.root.glob(".*")):
            self._clear_leftover(path)
        temporary = self.root / (_TEMPORARY_PREFIX + _step_name(step))
        for folder in (temporary, *(temporary / name for name in folders)):
            folder.mkdir()
        return temporary

    def drop_unfinished(self) -> None:
        """Deletes what begin() made and commit() has not finished; nobody may be writing there."""
        for path in self.root.glob(f"{_TEMPORARY_PREFIX}step-*"):
            shutil.rmtree(path, ignore_errors=True)

    def commit(self, step: int, *, is_latest: bool = True) -> Path:
        """Makes the step's files a checkpoint and only then deletes the oldest.

        With is_latest=False latest() never returns the checkpoint, only path(step) does, unless it replaces one that
        latest() may return: a run that has saved the step twice can still continue from it.
        """
        final = self.root / _step_name(step)
        temporary, replaced = self.root / (_TEMPORARY_PREFIX + final.name), self.root / (_REPLACED_PREFIX + final.name)
        written = sorted(temporary.rglob("*"))
        files = {path.relative_to(temporary).as_posix(): path for path in written if path.is_file()}
        if not files:
            raise _nothing_to_commit(temporary, step)
        # A safetensors file has a checksum per block, in the file beside it.
        checked = {name: zlib.crc32(path.read_bytes()) for name, path in files.items() if path.suffix != ".safetensors"}
        manifest = {"files": {name: path.stat().st_size for name, path in files.items()}, "crc32s": checked}
        # Files first, including those of other processes on this machine, then the directories that name them.
        for path in (*reversed(written), temporary):
            flush(path)
        earlier = self._complete()
        age = {"serial": 1 + max((checkpoint.serial for checkpoint in earlier), default=0), "time_ns": time.time_ns()}
        is_latest = is_latest or step in [checkpoint.step for checkpoint in earlier if checkpoint.is_latest]
        save_json(temporary / MARKER_NAME, {"step": step, **age, "is_latest": is_latest, **manifest})

        if final.exists():
            self._make_way(final, replaced, is_complete=step in self.steps())
        os.rename(temporary, final)
        flush(self.root)
        if is_latest:
            save_bytes(self.root / LATEST_NAME, f"{final.name}\n".encode())
        if earlier:
            self._clear(replaced)
        return final

    def _make_way(self, final: Path, replaced: Path, *, is_complete: bool) -> None:
        if is_complete:
            os.rename(final, replaced)
        else:
            set_aside(final)

    def _clear(self, replaced: Path) -> None:
        """Deletes the checkpoint that was replaced, and the oldest ones beyond the limits."""
        if replaced.exists():
            self._delete(replaced)
        for checkpoint in self._superfluous():
            self._delete(checkpoint.path)

    def _superfluous(self) -> list[_Checkpoint]:
        """Returns the oldest checkpoints beyond the limits, but never the one that a run would resume from."""
        oldest_first = self._complete()
        num_kept = self._num_kept([checkpoint.num_bytes for checkpoint in reversed(oldest_first)])
        resumable = [checkpoint for checkpoint in oldest_first if checkpoint.is_latest][-1:]
        beyond = oldest_first[: len(oldest_first) - num_kept]
        return [checkpoint for checkpoint in beyond if checkpoint not in resumable]

    def _num_kept(self, sizes: Sequence[int]) -> int:
        """Returns how many checkpoints fit within the limits, at least 1; sizes are in bytes, the newest first."""
        totals = [*accumulate(sizes[: self.keep])]
        return max(1, sum(not self.max_bytes or total <= self.max_bytes for total in totals))

    def latest(self) -> Path | None:
        """Returns the complete checkpoint that was committed last; after a rewind it need not have the highest step."""
        eligible = [checkpoint for checkpoint in self._complete(warn=True) if checkpoint.is_latest]
        return eligible[-1].path if eligible else None

    def before(self, checkpoint: Path) -> Path | None:
        """Returns the complete checkpoint that was committed last before this one."""
        eligible = [item.path for item in self._complete() if item.is_latest]
        older = eligible[: eligible.index(checkpoint)]
        return older[-1] if older else None

    def next_step(self) -> int:
        """Returns an unused step number, for a run that does not count steps."""
        names = [_STEP_NAME.fullmatch(path.name) for path in self.root.glob("step-*")]
        return max((int(name[1]) + 1 for name in names if name), default=0)

    def steps(self) -> list[int]:
        """Returns the steps of the complete checkpoints, the oldest first."""
        return [checkpoint.step for checkpoint in self._complete()]

    def path(self, step: int) -> Path:
        """Returns the complete checkpoint of this step."""
        complete = {checkpoint.step: checkpoint.path for checkpoint in self._complete()}
        if step not in complete:
            self._complete(warn=True)
            steps = ", ".join(map(str, sorted(complete))) or "none"
            raise FileNotFoundError(f"{self.root} has no complete checkpoint of step {step}. Complete steps: {steps}.")
        return complete[step]

    def _complete(self, warn: bool = False) -> list[_Checkpoint]:
        """Returns the complete checkpoints, oldest first; for a step that is being replaced, the one committed last."""
        paths = [path for path in sorted(self.root.glob("*")) if _MAYBE_COMPLETE.fullmatch(path.name)]
        read = [_read_if_complete(path, warn) for path in paths]
        complete = sorted((checkpoint for checkpoint in read if checkpoint), key=lambda checkpoint: checkpoint.serial)
        last_of_step = {checkpoint.step: checkpoint for checkpoint in complete}
        return [checkpoint for checkpoint in complete if checkpoint is last_of_step[checkpoint.step]]

    def _clear_leftover(self, path: Path) -> None:
        if _has_step_name(path, _REPLACED_PREFIX):
            final = self.root / path.name.removeprefix(_REPLACED_PREFIX)
            if final.exists():
                self._delete(path)
            else:
                os.rename(path, final)
        elif _has_step_name(path, _TEMPORARY_PREFIX):
            self._delete(path)
        elif _has_step_name(path, _DELETED_PREFIX):
            _remove(path)

    def _delete(self, path: Path) -> None:
        """Renames the directory before deleting it, so that a crash cannot leave half a checkpoint under its name."""
        name = path.name.removeprefix(_REPLACED_PREFIX).removeprefix(_TEMPORARY_PREFIX)
        doomed = self.root / (_DELETED_PREFIX + name)
        if doomed.exists():
            _remove_tree(doomed)
        os.rename(path, doomed)
        _remove(doomed)


def _remove(doomed: Path) -> None:
    """Deletes a directory, or warns: NFS keeps the files that a process still reads, and with them their directory."""
    try:
        _remove_tree(doomed)
    except OSError as error:
        logger.warning("%s could not be deleted (%s). The next checkpoint tries again.", doomed, error)


def _remove_tree(path: Path) -> None:
    """Deletes a directory; if it is a link to one that somebody has moved elsewhere, only the link."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path)


def set_aside(checkpoint: Path) -> Path:
    """Renames a damaged checkpoint, so that a run can save the step again; damaged checkpoints are never deleted."""
    number = 1
    while (aside := checkpoint.with_name(f"damaged-{checkpoint.name}{f'-{number}' if number > 1 else ''}")).exists():
        number += 1
    return checkpoint.rename(aside)


# ---- Tags: folders of checkpoints under names of their own ---------------------------------------------------------


def open_directory(root: Path, tag: str | None, *, keep: int, max_bytes: int) -> CheckpointDirectory:
    """Returns the directory for a checkpoint, named by its tag, or by its step if it has no tag.

    The limits count tagged and untagged checkpoints separately. The newest and the one that a run would resume from are
    always kept.
    """
    if not tag:
        return CheckpointDirectory(root, keep, max_bytes)
    return TaggedCheckpoint(root / _checked_tag(tag), keep, max_bytes)


@dataclass
class TaggedCheckpoint(CheckpointDirectory):
    """The checkpoint of one tag; saving replaces the previous one. The limits count the tags of the folder above."""

    def commit(self, step: int, *, is_latest: bool = True) -> Path:
        """Makes the step's files the tag's checkpoint and only then deletes the oldest tags."""
        final = super().commit(step, is_latest=is_latest)
        folders = _tag_folders(self.root.parent)
        num_kept = self._num_kept([sum(item.num_bytes for item in folder._complete()) for folder in reversed(folders)])
        resumable = resolve_checkpoint(self.root.parent, None)
        for folder in folders[: len(folders) - num_kept]:
            if resumable is None or resumable.parent != folder.root:
                folder._delete_all()
        return final

    def _superfluous(self) -> list[_Checkpoint]:
        *older, _ = self._complete()
        resumable = self.latest()
        return [checkpoint for checkpoint in older if checkpoint.path != resumable]

    def newest(self) -> Path | None:
        """Returns the complete checkpoint that was committed last, even if no run would resume from it."""
        complete = self._complete(warn=True)
        return complete[-1].path if complete else None

    def _delete_all(self) -> None:
        """Deletes the checkpoints, and the folder unless someone keeps other files there."""
        for checkpoint in self._complete():
            self._delete(checkpoint.path)
        (self.root / LATEST_NAME).unlink(missing_ok=True)
        if not any(self.root.iterdir()):
            self.root.rmdir()


def resolve_checkpoint(load_dir: Path, tag: str | None) -> Path | None:
    """Returns the newest complete checkpoint of a tag; the tag may also be the name of one step's folder.

    Without a tag it returns the newest of all that a run may resume from, or None if there is none.
    """
    if not tag:
        latest = [folder.latest() for folder in (CheckpointDirectory(load_dir, keep=1), *_tag_folders(load_dir))]
        return max((path for path in latest if path is not None), key=_commit_time, default=None)
    path = TaggedCheckpoint(load_dir / tag, keep=1).newest()
    if path is not None:
        return path
    name = tag.removeprefix(_REPLACED_PREFIX)  # what latest() finds after a crash between the two renames of a commit
    if name.startswith("step-") and name.removeprefix("step-").isdigit():
        return CheckpointDirectory(load_dir, keep=1).path(int(name.removeprefix("step-")))
    raise FileNotFoundError(f"{load_dir} holds no complete checkpoint of the tag {tag!r}.")


def _checked_tag(tag: str) -> str:
    name = str(tag)
    is_taken = name in (LATEST_NAME, MARKER_NAME) or name.startswith(".") or _STEP_NAME.fullmatch(name)
    if is_taken or Path(name).name != tag:
        raise ValueError(
            f"The tag {tag!r} cannot name a folder beside the checkpoints. Give a name such as 'best', without a slash "
            f"or a leading dot; {LATEST_NAME!r}, {MARKER_NAME!r} and names like 'step-000001' are taken."
        )
    return tag


def _tag_folders(root: Path) -> list[TaggedCheckpoint]:
    """Returns the folder of every tag that has a complete checkpoint, the oldest first."""
    folders = [path for path in sorted(root.iterdir()) if path.is_dir()] if root.is_dir() else []
    names = [path for path in folders if not path.name.startswith(".") and not _STEP_NAME.fullmatch(path.name)]
    newest = [(folder.newest(), folder) for folder in (TaggedCheckpoint(path, keep=1) for path in names)]
    complete = [(_commit_time(path), folder) for path, folder in newest if path is not None]
    return [folder for _, folder in sorted(complete, key=lambda item: item[0])]


def _commit_time(checkpoint: Path) -> tuple[int, int]:
    """Returns a key that orders checkpoints of all tags by age, also in a copy of their folder."""
    marker = checkpoint / MARKER_NAME
    return load_json(marker).get("time_ns", 0), marker.stat().st_mtime_ns  # markers had no time_ns at first


# ---- Files -------------------------------------------------------------------------------------------------------


def save_json(path: Path, value: Any) -> None:
    """Writes the file whole or not at all."""
    save_bytes(path, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode())


def save_bytes(path: Path, content: bytes) -> None:
    """Writes the file whole or not at all."""
    temporary = path.with_name(f"{_TEMPORARY_PREFIX}{path.name}")
    try:
        temporary.write_bytes(content)
        _put_in_place(temporary, path)
    except OSError as error:
        raise disk_error(error, temporary) from error


def load_json(path: Path) -> Any:
    """Reads a file that save_json wrote; raises ValueError for anything else."""
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: it is no JSON ({str(error) or type(error).__name__}).") from error


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes the named tensors as safetensors, whole or not at all. Tensors that share memory are refused by name."""
    temporary = path.with_name(f"{_TEMPORARY_PREFIX}{path.name}")
    temporary.touch()
    mode = temporary.stat().st_mode  # safetensors gives its files 0600, whatever the umask
    try:
        save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, temporary)
        with suppress(OSError):  # some file systems have no modes
            temporary.chmod(mode)
        _put_in_place(temporary, path)
    except (SafetensorError, OSError) as error:
        raise disk_error(error, temporary) from error


def disk_error(error: SafetensorError | OSError, path: Path) -> Exception:
    """Returns the operating system's error with the path of its file, which that of a write or a flush does not name.

    safetensors wraps the error into a text, such as `(os error 28)`.
    """
    if isinstance(error, OSError):
        has_number = error.errno is not None  # without one, all that it says is its text
        return OSError(error.errno, error.strerror, error.filename or str(path)) if has_number else error
    code = re.search(r"os error (\d+)", str(error))
    return error if code is None else OSError(int(code[1]), os.strerror(int(code[1])), str(path))


def _put_in_place(temporary: Path, path: Path) -> None:
    """Gives a file its name once its content is on disk."""
    flush(temporary)
    os.replace(temporary, path)
    flush(path.parent)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Checkpoint:
    path: Path
    step: int
    serial: int  # counts the commits of the run, so it orders by age even after a rewind to an earlier step
    is_latest: bool  # whether latest() may return it
    num_bytes: int


class _IncompleteError(ValueError):
    """The reason why a directory does not count as a checkpoint."""


def _read_if_complete(path: Path, warn: bool) -> _Checkpoint | None:
    try:
        return _read_checkpoint(path)
    except (OSError, ValueError, TypeError, KeyError, ArithmeticError) as error:
        if warn:
            _warn_of_skipped(path, error)
        return None


def _read_checkpoint(path: Path) -> _Checkpoint:
    """Returns the checkpoint; raises what _warn_of_skipped() explains unless it is complete."""
    marker = load_json(path / MARKER_NAME)
    step, sizes = int(marker["step"]), dict(marker["files"])
    if path.name.removeprefix(_REPLACED_PREFIX) != _step_name(step):
        raise _IncompleteError(f"its {MARKER_NAME} marker is that of step {step}")
    for name, size in sizes.items():
        actual = (path / name).stat().st_size
        if actual != size:
            raise _IncompleteError(f"its file {name} has {actual} bytes of {size}")
    serial, is_latest = int(marker["serial"]), bool(marker["is_latest"])
    return _Checkpoint(path=path, step=step, serial=serial, is_latest=is_latest, num_bytes=sum(sizes.values()))


def _warn_of_skipped(path: Path, error: Exception) -> None:
    if isinstance(error, _IncompleteError):
        reason = str(error)
    elif not isinstance(error, OSError):
        reason = f"its {MARKER_NAME} marker is damaged"
    elif not error.filename or Path(error.filename).name == MARKER_NAME:
        reason = f"its {MARKER_NAME} marker cannot be read ({error.strerror})"
    else:
        reason = f"its file {Path(error.filename).relative_to(path)} is missing"
    logger.warning("Skipping the checkpoint %s: %s", path, reason)


def _wrong_limit(keep: int, max_bytes: int) -> ValueError:
    if keep < 1:
        return ValueError(f"keep is {keep}: at least 1 checkpoint must be kept.")
    return ValueError(f"max_bytes is {max_bytes}: it must be 0 (no limit) or above.")


def _nothing_to_commit(temporary: Path, step: int) -> OSError | ValueError:
    if not temporary.is_dir():
        return FileNotFoundError(f"{temporary} is not there: call begin({step}) and write files before commit.")
    return ValueError(f"{temporary} holds no files: write the checkpoint's files before commit({step}).")


def _step_name(step: int) -> str:
    return f"step-{step:06d}"


def _has_step_name(path: Path, prefix: str) -> bool:
    return path.name.startswith(prefix) and _STEP_NAME.fullmatch(path.name.removeprefix(prefix)) is not None


def flush(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
