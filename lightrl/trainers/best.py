"""Keeps the best model of a run's evaluations in best/ (--eval.best). A run without the option uses none of this."""

from __future__ import annotations

import ctypes
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightrl.checkpoint import flush, load_json, save_json
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
        """Takes over best/ if its evaluation is one of this run; otherwise the next evaluation replaces it."""
        _clear_leftovers(self._folder)
        record = record_of(self._folder)
        if record is None:
            return
        rows = {row["step"]: row for row in self._trainer.folder.metrics()}  # cut after the step to continue from
        name, step, value = record["metric"], record["step"], record["value"]
        is_known = value == rows.get(step, {}).get(name)
        if is_known and (name, record["is_lowest"]) == (self._metric, self._options.best_is_lowest):
            self._record, self._is_reported = record, True
        else:
            reason = "another --eval.best chose it" if is_known else "this run has not got there, or took another way"
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
                replace_folder(self._folder, made)
        before = f", before {self._record['value']:.4g} at step {self._record['step']}" if self._record else ""
        self._record = record
        self._trainer.strategy.print(f"best model: {self._metric} {value:.4g} at step {step}{before}")

    def after_export(self, folder: Path) -> None:
        """Says at the end of the run which model is in best/."""
        if folder != self._trainer.folder.final:
            return
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


def replace_folder(folder: Path, made: Path) -> None:
    """Gives a new folder the name of another one, which is deleted; a kill at any time leaves one of them, whole.

    On a file system that cannot exchange two names, such as NFS, there is a moment with none of that name; the next
    start of the run then brings the old one back.
    """
    for path in (*sorted(made.rglob("*"), reverse=True), made):
        flush(path)
    if not folder.exists():
        made.rename(folder)
    elif not _exchange(folder, made):
        folder.rename(_aside(folder))
        made.rename(folder)
    flush(folder.parent)
    for old in (made, _aside(folder)):
        shutil.rmtree(old, ignore_errors=True)


def _clear_leftovers(folder: Path) -> None:
    """Undoes what a kill during a replacement left."""
    aside = _aside(folder)
    if aside.exists() and not folder.exists():
        aside.rename(folder)
    for old in (aside, folder.with_name(f".{folder.name}")):
        shutil.rmtree(old, ignore_errors=True)


def _aside(folder: Path) -> Path:
    return folder.with_name(f".replaced-{folder.name}")


def _exchange(one: Path, other: Path) -> bool:
    """Exchanges the names of two folders in one system call; returns whether the system and its files have one."""
    call = getattr(ctypes.CDLL(None), "renameat2", None)  # Linux only
    names = os.fsencode(one), os.fsencode(other)
    return call is not None and call(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0
