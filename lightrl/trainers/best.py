"""Keeps the best model of a run's evaluations in best/ (--eval.best). A run without the option uses none of this."""

from __future__ import annotations

import ctypes
import math
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lightrl.checkpoint import CheckpointDirectory, flush, load_json, save_json
from lightrl.config import LateMistakeError
from lightrl.strategy.saving.state_files import HASH_FILE
from lightrl.trainers.hash_run import compared
from lightrl.trainers.observer import Observer

RECORD_NAME = "best.json"  # in best/: the evaluation that chose the model
_PHASE = "best model"
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # constants of renameat2(2)


class Best(Observer):
    """Exports a trainer's model after each evaluation that is better than all before."""

    def __init__(self, trainer: Any) -> None:
        """Finds the best evaluation so far, if the run is continued; every rank must call it."""
        self._trainer, self._comm, self._options = trainer, trainer.strategy.comm, trainer.config.eval
        self._metric, self._folder = self._options.best_metric, best_folder(trainer.folder.root)
        self._record: Mapping[str, Any] | None = None  # of the best evaluation, on rank 0
        self._is_reported = False  # whether an evaluation has had the metric
        with self._comm.phase(_PHASE, local=True):
            if self._comm.is_main:
                self._continue()

    def _continue(self) -> None:
        """Takes over the model of the best evaluation that this run has kept, or the next evaluation replaces best/."""
        rows = {row["step"]: row for row in self._trainer.folder.metrics()}  # cut after the step to continue from

        def is_known(record: Mapping[str, Any]) -> bool:
            return bool(record["value"] == rows.get(record["step"], {}).get(record["metric"]))

        restore(self._folder, is_known)
        record = record_of(self._folder)
        if record is None:
            return
        name, step, value = record["metric"], record["step"], record["value"]
        if is_known(record) and (name, record["is_lowest"]) == (self._metric, self._options.best_is_lowest):
            self._record, self._is_reported = record, True
        else:
            other = "this run has not got there, or took another way"
            reason = "another --eval.best chose it" if is_known(record) else other
            self._trainer.strategy.print(
                f"{self._folder} has the model of step {step} with {name} {value:.4g}: {reason}, so the next "
                "evaluation replaces it."
            )

    def after_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Exports the model if the step was evaluated, and better than all before."""
        if "time/eval" not in metrics:
            return
        with self._comm.phase(_PHASE, local=True):
            is_better = self._comm.is_main and self._is_better(metrics)
        if self._comm.any(is_better):
            with self._trainer.watch.measure("time/best"):
                self._save(step, metrics.get(self._metric, math.nan))

    def _is_better(self, metrics: Mapping[str, float]) -> bool:
        value = metrics.get(self._metric, math.nan)
        if self._metric not in metrics and not self._is_reported:
            names = ", ".join(sorted(name for name in metrics if name.startswith("eval/")))
            raise LateMistakeError(
                f"--eval.best {self._options.best}: the evaluation has no such metric, only {names}."
            )
        self._is_reported = True
        if not math.isfinite(value):
            return False
        if self._record is None:
            return True
        before: float = self._record["value"]
        return value < before if self._options.best_is_lowest else value > before

    def _save(self, step: int, value: float) -> None:
        """Replaces best/ by a folder that is complete; every rank must call it."""
        made = self._folder.with_name(f".{self._folder.name}")
        record = {"step": step, "metric": self._metric, "value": value, "is_lowest": self._options.best_is_lowest}
        with self._comm.phase(_PHASE, local=True):
            if self._comm.is_main:
                shutil.rmtree(made, ignore_errors=True)
        self._trainer.export(made)
        with self._comm.phase(_PHASE, local=True):
            if self._comm.is_main:
                save_json(made / RECORD_NAME, record)
                replace_folder(self._folder, made, keeps_old=self._is_in_checkpoint())
        before = f", before {self._record['value']:.4g} at step {self._record['step']}" if self._record else ""
        self._record = record
        self._trainer.strategy.print(f"best model: {self._metric} {value:.4g} at step {step}{before}")

    def _is_in_checkpoint(self) -> bool:
        """Returns whether a run that continues from the newest checkpoint would know the best evaluation so far."""
        steps = CheckpointDirectory(self._trainer.folder.checkpoints, keep=1).steps()
        return self._record is not None and bool(steps) and self._record["step"] <= steps[-1]

    def after_export(self, folder: Path) -> None:
        """Says at the end of the run which model is in best/; nothing goes back before the last checkpoint now."""
        if folder != self._trainer.folder.final:
            return
        if self._comm.is_main:
            shutil.rmtree(_kept(self._folder), ignore_errors=True)
        none = f"none, since no evaluation has given a finite {self._metric}"
        which = f"{self._folder}, {described(self._record)}" if self._record else none
        self._trainer.strategy.print(f"best model: {which}")


# ---- The folder ------------------------------------------------------------------------------------------------------


def best_folder(run: Path) -> Path:
    """Returns the folder of the best model in the folder of a run."""
    return run / "best"


def record_of(folder: Path) -> dict[str, Any] | None:
    """Returns which evaluation chose the model in best/: step, metric, value, is_lowest; None if there is no model."""
    if not (folder / RECORD_NAME).is_file():
        return None
    found: dict[str, Any] = load_json(folder / RECORD_NAME)
    return found


def described(record: Mapping[str, Any]) -> str:
    """Returns the text of a record for people."""
    return f"{record['metric']} {record['value']:.4g} at step {record['step']}"


def step_of_best(run: Path) -> int:
    """Returns the step of the model in best/; raises ValueError if there is none, or if it is damaged."""
    folder = best_folder(run)
    record = record_of(folder)
    if record is None:
        raise ValueError(f"{run} has no best/: it was run without --eval.best, or has not evaluated yet.")
    if problem := compared(folder)[1]:
        raise ValueError(f"The weights in {folder} are not those that the run saved ({HASH_FILE}): {problem}.")
    step: int = record["step"]
    return step


def replace_folder(folder: Path, made: Path, *, keeps_old: bool = False) -> None:
    """Gives a new folder the name of another one; a kill at any time leaves one of them, whole.

    On a file system that cannot exchange two names, such as NFS, there is a moment with none of that name; the next
    start of the run then brings the old one back.

    Args:
        keeps_old: keep the old folder for restore(), in place of one that is kept already, instead of deleting it.
    """
    for path in (*sorted(made.rglob("*"), reverse=True), made):
        flush(path)
    if not folder.exists():
        made.rename(folder)
    elif not _exchange(folder, made):
        folder.rename(_swapped(folder))
        made.rename(folder)
        _swapped(folder).rename(made)
    if keeps_old and made.exists():  # nobody has removed the old one
        shutil.rmtree(_kept(folder), ignore_errors=True)
        made.rename(_kept(folder))
    flush(folder.parent)
    shutil.rmtree(made, ignore_errors=True)


def restore(folder: Path, is_known: Callable[[Mapping[str, Any]], bool]) -> None:
    """Gives best/ the newest model whose record the run knows, after a kill perhaps from a folder that was replaced.

    If it knows none, best/ stays as it is. The other folders are deleted.
    """
    others = [_swapped(folder), folder.with_name(f".{folder.name}"), _kept(folder)]  # the newest first
    records = {path: record_of(path) for path in (folder, *others)}
    whole = [path for path, record in records.items() if record is not None]
    known = [path for path in whole if is_known(records[path] or {})]
    chosen = next(iter((*known, *whole)), folder)
    if chosen != folder and not (folder.exists() and _exchange(folder, chosen)):
        shutil.rmtree(folder, ignore_errors=True)
        chosen.rename(folder)
    for old in others:
        shutil.rmtree(old, ignore_errors=True)


def _kept(folder: Path) -> Path:
    return folder.with_name(f".replaced-{folder.name}")


def _swapped(folder: Path) -> Path:
    return folder.with_name(f".swapped-{folder.name}")


def _exchange(one: Path, other: Path) -> bool:
    """Exchanges the names of two folders in one system call; returns whether the system and its files have one."""
    call = getattr(ctypes.CDLL(None), "renameat2", None)  # Linux only
    names = os.fsencode(one), os.fsencode(other)
    return call is not None and call(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0
