"""Exports the model during a run (--export.every), with a model card, and uploads the final one (--hub.push).

At the end it also exports the averaged weights (--ema_decay). A run without these options uses none of this.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from threading import Thread
from typing import Any

from lightrl.trainers.hub_push import Repository
from lightrl.trainers.model_card import write_card
from lightrl.trainers.observer import Observer
from lightrl.wording import counted

_NEWS_S = 10.0  # between two words of rank 0 that it is still uploading


class Export(Observer):
    """Exports a trainer's models during the run, and puts a model card into each exported folder."""

    def __init__(self, trainer: Any) -> None:
        """Prepares the exports; every rank must call it."""
        self._trainer, self._config, self._comm = trainer, trainer.config, trainer.strategy.comm
        with self._comm.phase("hub", local=True):
            self._repository: Repository | None = None
            if self._config.hub.push and self._comm.is_main:
                self._repository = Repository(self._config.hub.push, is_private=self._config.hub.private)

    def after_step(self, step: int) -> None:
        """Exports the models if an export is due; the final ones are exported at the end of the run."""
        every = self._config.export.every
        if every and step % every == 0 and step < self._config.max_steps:
            with self._trainer.watch.measure("time/export"):
                self._export(step)

    def _export(self, step: int) -> None:
        target = self._trainer.folder.root / "exports" / f"step-{step}"
        partial = target.with_name(f".{target.name}")
        with self._comm.phase("export", local=True):
            if self._comm.is_main:
                shutil.rmtree(partial, ignore_errors=True)  # left by a run that was killed while writing
        self._trainer.export(partial)
        with self._comm.phase("export", local=True):
            if self._comm.is_main:
                shutil.rmtree(target, ignore_errors=True)  # exists if the run was resumed from an earlier step
                partial.rename(target)
        self._push(target, f"step {step}")

    def after_export(self, folder: Path) -> None:
        """Writes the model card, and uploads the final model."""
        step = self._trainer.step_index
        with self._comm.phase("model card", local=True):
            if self._comm.is_main:
                write_card(folder, self._trainer.folder.root, self._config, step=step)
        if folder == self._trainer.folder.final:
            self._push(folder, f"the model after {counted(step, 'step')}")

    def _push(self, folder: Path, message: str) -> None:
        """Uploads a folder if the options ask for it; every rank must call it, and all wait for rank 0."""
        if not self._config.hub.push:
            return
        uploading: Thread | None = None
        if self._repository is not None:
            uploading = Thread(
                target=self._repository.upload_or_warn, args=(folder, message), name="upload", daemon=True
            )
            uploading.start()
        # One collective that waits for the whole upload would break at its time-out.
        while self._comm.any(uploading is not None and uploading.is_alive()):
            if uploading is not None:
                uploading.join(min(_NEWS_S, self._comm.timeout.total_seconds() / 2))


class AverageExport(Observer):
    """Writes a trainer's averaged weights after the final model."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def after_export(self, folder: Path) -> None:
        """Exports the models again with their averaged weights."""
        trainer = self._trainer
        if folder == trainer.folder.final:
            with trainer.strategy.averaged_weights(trainer.model):
                trainer.export(trainer.folder.root / "final_ema")
