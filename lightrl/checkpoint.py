"""Checkpoint directories, which are complete or do not count; their content is the business of strategy/saving.

A step is written into a temporary directory, flushed to disk, marked, and renamed, so what a crash leaves is never
taken for a checkpoint. Only rank 0 calls begin and commit. The other ranks write files in between, and the caller makes
every rank wait after begin and before commit.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

logger = logging.getLogger(__name__)

MARKER_NAME = "COMPLETE"
LATEST_NAME = "latest"  # a file with the name of the newest, for people and shell scripts; nothing here reads it

_STEP_NAME = re.compile(r"step-(\d{6,})")
_REPLACED_PREFIX = ".replaced-"  # the former directory of a step that is being saved again
_TEMPORARY_PREFIX = ".tmp-"
_DELETED_PREFIX = ".tmp-deleted-"


class CheckpointDirectory:
    """The checkpoints of one run: a directory for each step, at most `keep` of them, the oldest deleted first.

    max_bytes limits their total size (0: no limit); the newest stays whatever its size.
    """

    def __init__(self, root: Path, keep: int, max_bytes: int = 0) -> None:
        if keep < 1:
            raise ValueError(f"keep is {keep}: at least 1 checkpoint must be kept.")
        if max_bytes < 0:
            raise ValueError(f"max_bytes is {max_bytes}: it must be 0 (no limit) or above.")
        self.root = Path(root)
        self.keep = keep
        self.max_bytes = max_bytes

    def begin(self, step: int) -> Path:
        """Makes the empty directory for the files of this step; clears what a crash left."""
        if step < 0:
            raise ValueError(f"step is {step}: it must be at least 0.")
        self.root.mkdir(parents=True, exist_ok=True)
        self._clear_leftovers()
        final, temporary = self.root / _step_name(step), self._temporary(step)
        if final.exists() and not (final / MARKER_NAME).exists():
            raise FileExistsError(f"{final} has no {MARKER_NAME} marker, so it is not overwritten. Move it away first.")
        temporary.mkdir()
        return temporary

    def commit(self, step: int, *, is_latest: bool = True) -> Path:
        """Makes the step's files a checkpoint and only then deletes the oldest.

        is_latest=False: only path(step) returns it, latest() never does.
        """
        temporary, final = self._temporary(step), self.root / _step_name(step)
        if not temporary.is_dir():
            raise FileNotFoundError(f"{temporary} is not there: call begin({step}) and write files before commit.")
        sizes = _file_sizes(temporary)
        if not sizes:
            raise ValueError(f"{temporary} holds no files: write the checkpoint's files before commit({step}).")
        _flush_tree(temporary)
        serial = 1 + max((checkpoint.serial for checkpoint in self._complete()), default=0)
        save_json(temporary / MARKER_NAME, {"step": step, "serial": serial, "is_latest": is_latest, "files": sizes})

        replaced = self.root / (_REPLACED_PREFIX + final.name)
        if final.exists():
            os.rename(final, replaced)
        os.rename(temporary, final)
        _flush(self.root)
        if is_latest:
            _replace_file(self.root / LATEST_NAME, f"{final.name}\n".encode())
        self._delete(replaced)
        for checkpoint in self._superfluous():
            self._delete(checkpoint.path)
        return final

    def _superfluous(self) -> list[_Checkpoint]:
        """Returns the oldest beyond the limits, but never the one that a run would resume from."""
        newest_first = self._complete()[::-1]
        num_kept, num_bytes = 0, 0
        for checkpoint in newest_first:
            num_bytes += checkpoint.num_bytes
            is_too_much = num_kept == self.keep or (self.max_bytes and num_bytes > self.max_bytes)
            if num_kept and is_too_much:
                break
            num_kept += 1
        resumable = next((checkpoint for checkpoint in newest_first if checkpoint.is_latest), None)
        return [checkpoint for checkpoint in newest_first[num_kept:][::-1] if checkpoint is not resumable]

    def latest(self) -> Path | None:
        """Returns the complete checkpoint that was committed last; after a rewind it need not have the highest step."""
        eligible = [checkpoint for checkpoint in self._complete(warn=True) if checkpoint.is_latest]
        return eligible[-1].path if eligible else None

    def steps(self) -> list[int]:
        """Returns the steps of the complete checkpoints, the oldest first."""
        return [checkpoint.step for checkpoint in self._complete()]

    def path(self, step: int) -> Path:
        """Returns the complete checkpoint of this step."""
        complete = {checkpoint.step: checkpoint.path for checkpoint in self._complete(warn=True)}
        if step not in complete:
            steps = ", ".join(map(str, sorted(complete))) or "none"
            raise FileNotFoundError(f"{self.root} has no complete checkpoint of step {step}. Complete steps: {steps}.")
        return complete[step]

    def _temporary(self, step: int) -> Path:
        return self.root / (_TEMPORARY_PREFIX + _step_name(step))

    def _complete(self, warn: bool = False) -> list[_Checkpoint]:
        """Returns the complete checkpoints, the oldest first; of a step that is being replaced the last committed."""
        by_step: dict[int, _Checkpoint] = {}
        for path in sorted(self.root.iterdir()) if self.root.is_dir() else ():
            if not _STEP_NAME.fullmatch(path.name.removeprefix(_REPLACED_PREFIX)):
                continue
            try:
                checkpoint = _read_checkpoint(path)
            except _IncompleteError as error:
                if warn:
                    logger.warning("Skipping the checkpoint %s: %s", path, error)
                continue
            present = by_step.get(checkpoint.step)
            if present is None or present.serial < checkpoint.serial:
                by_step[checkpoint.step] = checkpoint
        return sorted(by_step.values(), key=lambda checkpoint: checkpoint.serial)

    def _clear_leftovers(self) -> None:
        for path in sorted(self.root.iterdir()):
            if _has_step_name(path, _REPLACED_PREFIX):
                final = self.root / path.name.removeprefix(_REPLACED_PREFIX)
                if final.exists():
                    self._delete(path)
                else:
                    os.rename(path, final)
            elif _has_step_name(path, _TEMPORARY_PREFIX) or _has_step_name(path, _DELETED_PREFIX):
                shutil.rmtree(path)

    def _delete(self, path: Path) -> None:
        """Renames the directory before it is deleted, so that a crash leaves a leftover and not half a checkpoint."""
        if not path.exists():
            return
        doomed = self.root / (_DELETED_PREFIX + path.name.removeprefix(_REPLACED_PREFIX))
        if doomed.exists():
            shutil.rmtree(doomed)
        os.rename(path, doomed)
        shutil.rmtree(doomed)


# ---- Tags: folders of checkpoints under names of their own ---------------------------------------------------------


def resolve_checkpoint(load_dir: Path, tag: str | None) -> Path | None:
    """Returns the newest complete checkpoint of a tag; the tag may also be the name of one step's folder.

    Without a tag it returns the newest of all, or None if there is none.
    """
    if tag is None:
        untagged = CheckpointDirectory(load_dir, keep=1).latest()
        candidates = [*([untagged] if untagged else []), *_tagged_checkpoints(load_dir)]
        return max(candidates, key=_commit_time, default=None)
    path = CheckpointDirectory(load_dir / tag, keep=1).latest()
    if path is not None:
        return path
    if tag.startswith("step-") and tag.removeprefix("step-").isdigit():
        return CheckpointDirectory(load_dir, keep=1).path(int(tag.removeprefix("step-")))
    raise FileNotFoundError(f"{load_dir} holds no complete checkpoint of the tag {tag!r}.")


def drop_old_tags(root: Path, num_kept: int) -> None:
    """Deletes the tags whose checkpoints are the oldest, beyond num_kept tags."""
    for checkpoint in _tagged_checkpoints(root)[:-num_kept]:
        shutil.rmtree(checkpoint.parent)


def _tagged_checkpoints(root: Path) -> list[Path]:
    """Returns the newest complete checkpoint of every tag, the oldest first."""
    folders = [path for path in sorted(root.iterdir()) if path.is_dir()] if root.is_dir() else []
    tags = [folder for folder in folders if not folder.name.startswith(("step-", "."))]
    latest = [CheckpointDirectory(folder, keep=1).latest() for folder in tags]
    return sorted((path for path in latest if path is not None), key=_commit_time)


def _commit_time(checkpoint: Path) -> int:
    return (checkpoint / MARKER_NAME).stat().st_mtime_ns


# ---- Files -------------------------------------------------------------------------------------------------------


def save_json(path: Path, value: Any) -> None:
    """Writes the file whole or not at all."""
    _replace_file(path, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode())


def save_bytes(path: Path, content: bytes) -> None:
    """Writes the file whole or not at all."""
    _replace_file(path, content)


def load_json(path: Path) -> Any:
    """Reads what save_json wrote."""
    return json.loads(path.read_bytes())


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes the named tensors as safetensors, whole or not at all. Tensors that share memory are refused by name."""
    temporary = path.with_name(f"{_TEMPORARY_PREFIX}{path.name}")
    temporary.touch()
    mode = temporary.stat().st_mode  # safetensors gives its files 0600, whatever the umask
    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, temporary)
    temporary.chmod(mode)
    _flush(temporary)
    os.replace(temporary, path)
    _flush(path.parent)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Checkpoint:
    path: Path
    step: int
    serial: int  # counts the commits of the run: the order of age, also after a rewind to an earlier step
    is_latest: bool  # whether latest() may give it
    num_bytes: int


class _IncompleteError(Exception):
    """The reason why a directory does not count as a checkpoint."""


def _read_checkpoint(path: Path) -> _Checkpoint:
    try:
        marker = load_json(path / MARKER_NAME)
        step, serial, sizes = int(marker["step"]), int(marker["serial"]), dict(marker["files"])
        is_latest = bool(marker["is_latest"])
    except OSError as error:
        raise _IncompleteError(f"its {MARKER_NAME} marker cannot be read ({error.strerror})") from error
    except (ValueError, TypeError, KeyError) as error:
        raise _IncompleteError(f"its {MARKER_NAME} marker is damaged") from error
    if path.name.removeprefix(_REPLACED_PREFIX) != _step_name(step):
        raise _IncompleteError(f"its {MARKER_NAME} marker is that of step {step}")
    for name, size in sizes.items():
        try:
            actual = (path / name).stat().st_size
        except OSError as error:
            raise _IncompleteError(f"its file {name} is missing") from error
        if actual != size:
            raise _IncompleteError(f"its file {name} has {actual} bytes of {size}")
    return _Checkpoint(path=path, step=step, serial=serial, is_latest=is_latest, num_bytes=sum(sizes.values()))


def _step_name(step: int) -> str:
    return f"step-{step:06d}"


def _has_step_name(path: Path, prefix: str) -> bool:
    return path.name.startswith(prefix) and _STEP_NAME.fullmatch(path.name.removeprefix(prefix)) is not None


def _file_sizes(directory: Path) -> dict[str, int]:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): path.stat().st_size for path in files}


def _flush_tree(directory: Path) -> None:
    """Flushes files, also those that other processes of this machine wrote, before the directories that name them."""
    for path in sorted(directory.rglob("*"), reverse=True):
        _flush(path)
    _flush(directory)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _replace_file(path: Path, content: bytes) -> None:
    temporary = path.with_name(f"{_TEMPORARY_PREFIX}{path.name}")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    _flush(path.parent)
