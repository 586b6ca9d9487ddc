"""Examines what is in a run's folder before the run: whether it is the same run, and where to continue."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightrl.checkpoint import CheckpointDirectory
from lightrl.config import RunConfig, changed_options
from lightrl.config.command_line import flatten
from lightrl.config.paths import why_unreadable, why_unwritable
from lightrl.config.yaml_text import read_yaml
from lightrl.trainers.branching import require_continuable, require_same_kind, require_same_roles

logger = logging.getLogger(__name__)


def refusal(folder: Path, error: Exception) -> str:
    """Returns why a run cannot use its folder; of an error that names no file, such as one of the lock, its text."""
    folder, name = folder.absolute(), getattr(error, "filename", None)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        full = f"the disk takes no more ({error.strerror})"
        return f"--output_dir {folder} cannot be used: {full}. Make room there, or name another folder."
    if not isinstance(error, OSError) or not name:
        return str(error)
    nearest = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    why = f"{nearest} takes no files ({error.strerror})"
    if folder in Path(name).absolute().parents and os.path.lexists(name):
        why = f"{name} there is not for this user ({error.strerror})"
    elif not os.path.exists(folder):
        why = why_unwritable(folder) or why
    elif not os.path.isdir(folder):
        why = "it is a file, not a folder"
    return f"--output_dir {folder} cannot be used: {why}. Name another folder."


def require_same(root: Path, config: RunConfig) -> None:
    """Raises ValueError if a folder that is not empty holds anything but the run of these options."""
    saved, metrics = root / "config.yaml", root / "metrics.jsonl"
    if saved.exists() and not metrics.exists() and not (root / "checkpoints").exists():
        return  # the earlier run ended before its first step
    if not saved.exists():
        raise ValueError(
            f"--output_dir {root} is not empty and is no run of lightrl (it has no config.yaml). Choose another folder."
        )
    if config.resume == "never":
        raise ValueError(
            f"--output_dir {root} already holds a run and --resume is never. Choose another folder, delete "
            "this one, or continue it with --resume auto."
        )
    _require_rows(metrics)
    _require_rows(root / "samples.jsonl")
    options = _read_config(saved)
    require_same_kind(f"--output_dir {root}", options, config)
    if any((root / "checkpoints").glob("step-*")):
        require_same_roles(f"--output_dir {root}", options, config)
    different = changed_options(config, options)
    if different:
        listed = "; ".join(f"{name} was {old!r}, now {new!r}" for name, old, new in different[:6])
        raise ValueError(
            f"--output_dir {root} belongs to another run: {listed}. Give the same options to continue that run, choose "
            f"another folder to begin anew, or branch off it by --output_dir NEW --resume {root}."
        )


def different_ranks(options: Sequence[Mapping[str, Any]]) -> str:
    """Describes how the options of some rank differ from the first rank's; as_dict() gives the options."""
    first, rank = options[0], next(rank for rank, given in enumerate(options) if given != options[0])
    theirs = dict(flatten(options[rank]))
    listed = [
        f"--{name} is {value!r} on rank 0 and {theirs.get(name)!r} on rank {rank}"
        for name, value in flatten(first)
        if theirs.get(name) != value
    ]
    return f"The ranks have different options: {'; '.join(listed[:6])}. Start the same command on every node."


def _require_rows(path: Path) -> None:
    """Raises ValueError unless each line is the row of a step; the last may be cut short."""
    damaged = 0
    for number, line in enumerate(_lines(path), start=1):
        if damaged:
            raise ValueError(
                f"{path} is damaged: line {damaged} is no row of a step. Move the file away to continue without it."
            )
        damaged = number if _step_of(line) is None else 0


def _lines(path: Path) -> Iterator[bytes]:
    """Yields the lines of a file, which may be larger than the memory; none if there is no file."""
    if path.exists():
        with path.open("rb") as file:
            yield from file


def config_file(run: Path) -> Path:
    """Returns the path of a run's config.yaml; raises ValueError if the folder has none."""
    path = run / "config.yaml"
    if not os.path.isfile(path):  # unlike Path's, it takes a name that is too long
        raise ValueError(f"{run} is no folder of a run: give one.")
    return path


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Returns the rows of metrics.jsonl, if it exists, except for one that a kill cut short."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if _step_of(line) is not None]


def last_step(options: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> int | None:
    """Returns the step that ends a run: --max_steps, or that of the last pass over data with answers.

    None: the rows of metrics.jsonl do not show yet how long a pass is.
    """
    max_steps = options.get("max_steps")
    if max_steps or "batch_size" not in options:
        return max_steps if isinstance(max_steps, int) else None
    step, epoch = next(((row["step"], row["epoch"]) for row in reversed(rows) if row.get("epoch")), (0, 0.0))
    return math.ceil(options["num_epochs"] * step / epoch - 1e-6) if epoch else None  # the quotient has been rounded


def _step_of(line: bytes | str) -> int | None:
    """Returns the step of a row of metrics.jsonl or samples.jsonl; None for anything else."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, TypeError, KeyError, IndexError, RecursionError):
        return None
    return step if isinstance(step, int) else None


def _read_config(path: Path) -> dict[str, Any]:
    try:
        content = read_yaml(path, "it")
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error} Choose another --output_dir.") from error
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise ValueError(f"{path} is damaged: it holds no options. Choose another --output_dir.")
    return content


def find_checkpoint(config: RunConfig, checkpoints: Path) -> Path | None:
    """Returns the checkpoint that --resume asks for; None means a start from the beginning."""
    if config.resume == "never":
        return None
    if config.resume == "auto":
        return newest(checkpoints) if checkpoints.is_dir() else None
    found = continued(Path(config.resume), checkpoints)
    require_continuable(found, config)
    return found


def newest(checkpoints: Path) -> Path | None:
    """Returns the newest complete checkpoint, if any; raises ValueError if there are only incomplete ones."""
    found = CheckpointDirectory(checkpoints, keep=1).latest()
    damaged = sorted(checkpoints.glob("step-*"))
    if found is None and damaged:
        raise ValueError(
            f"{checkpoints} holds {damaged[-1].name}, and no checkpoint there is complete. Restore it, or delete "
            "the folder to begin again."
        )
    return found


def continued(path: Path, own: Path) -> Path:
    """Returns the checkpoint at a path or, if that is of another run, the newest of this run's own, if any.

    A run that branched off another one can thus be continued by its own command, even if that one is gone. A path
    inside the run's own folder goes back to an earlier step.
    """
    if not os.path.exists(path) and (kept := _newest_of_branch(path, own)):
        logger.warning("--resume %s is gone: the run, which began there, goes on from its own %s.", path, kept.name)
        return kept
    found = checkpoint_at(path, own)
    if own.is_dir() and not found.resolve().is_relative_to(own.resolve()):
        return newest(own) or found
    return found


def _newest_of_branch(path: Path, own: Path) -> Path | None:
    """Returns the newest checkpoint of a run that branched off from this path, outside of its folder; None if none."""
    saved = own.parent / "config.yaml"
    began_there = saved.is_file() and str(_read_config(saved).get("resume")) == str(path)
    is_outside = own.parent.resolve() not in path.resolve().parents
    return newest(own) if began_there and is_outside and own.is_dir() else None


def checkpoint_at(path: Path, own: Path) -> Path:
    """Returns the checkpoint at a path: the folder of a run, its checkpoints/, or a single checkpoint.

    own: this run's checkpoints/, where the error for a path such as step-60 looks for the one that is meant.
    """
    if problem := why_unreadable(path, is_folder=True):
        number = path.name.removeprefix("step-")
        meant = [root / f"step-{number:0>6}" for root in (path.parent, own) if number.isdecimal()]
        hint = next((f" Did you mean {folder}?" for folder in meant if folder.is_dir()), "")
        raise FileNotFoundError(f"--resume {path}: {problem}. Give auto, never, or a checkpoint's folder.{hint}")
    if path.name == "checkpoints" or (path / "checkpoints").is_dir():
        root = path if path.name == "checkpoints" else path / "checkpoints"
        found = CheckpointDirectory(root, keep=1).latest()
        if found is None:
            raise FileNotFoundError(f"--resume {path}: there is no complete checkpoint in {root}.")
        return found
    if not path.name.removeprefix("step-").isdigit():
        raise ValueError(f"--resume {path} is no checkpoint: give a run's folder or one of its checkpoints/step-... .")
    return CheckpointDirectory(path.parent, keep=1).path(int(path.name.removeprefix("step-")))


def cut_after(path: Path, steps_done: int) -> None:
    """Drops the rows after a step; a log without a row to keep is moved aside."""
    if not steps_done:
        moved = path.rename(_unused_name(path))
        logger.warning("The run begins at its first step: what %s had of an earlier start is in %s.", path, moved.name)
        return
    if not path.exists():
        if path.stem == "metrics" and path.with_name("checkpoints").is_dir():  # a branch begins with neither
            logger.warning("%s is gone, and with it the steps up to %d, after which the run goes on.", path, steps_done)
        return
    temporary, last = path.with_suffix(".tmp"), 0
    with temporary.open("wb") as kept:
        for line in _lines(path):
            step = _step_of(line)  # None: a line that a kill cut short
            if step is not None and step <= steps_done:
                kept.write(line.rstrip(b"\n") + b"\n")
                last = step
    temporary.replace(path)
    if last < steps_done and path.stem == "metrics":  # a step of which no sample is left has no line in samples.jsonl
        logger.warning("%s lacks the steps after %d, though the run goes on after %d.", path, last, steps_done)


def _unused_name(path: Path) -> Path:
    number = 1
    while (candidate := path.with_name(f"{path.stem}.old-{number}{path.suffix}")).exists():
        number += 1
    return candidate
