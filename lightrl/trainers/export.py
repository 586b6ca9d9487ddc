"""Writes the model for its users while a run goes on (--export.every), with a model card, and uploads it (--hub.push).

Writes the averaged weights beside it at the end (--ema_decay). Nothing of it is entered by a run without these options:
export() and export_average() put themselves around the methods of one trainer.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightrl.trainers.model_card import write_card


def export(trainer: Any) -> None:
    """Exports the trainer's models from now on; every rank calls it."""
    config, comm, root = trainer.config, trainer.strategy.comm, trainer.folder.root
    with comm.phase("hub", local=True):
        upload = _uploader(config) if config.hub.push and comm.is_main else None
    step, save_models = trainer.step, trainer.save_models

    def save(folder: Path, number: int) -> None:
        save_models(folder)
        with comm.phase("model card", local=True):
            if comm.is_main:
                write_card(folder, root, config, step=number)

    def export_step(number: int) -> None:
        target = root / "exports" / f"step-{number}"
        partial = target.with_name(f".{target.name}")
        with comm.phase("export", local=True):
            if comm.is_main:
                shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed while it wrote
        save(partial, number)
        with comm.phase("export", local=True):
            if comm.is_main:
                shutil.rmtree(target, ignore_errors=True)  # there if the run goes on from a step before it
                partial.rename(target)
        if upload is not None:
            upload(target, f"step {number}")

    def observed_step() -> Any:
        report = step()
        number = trainer.step_index + 1
        if config.export.every and number % config.export.every == 0 and number < config.max_steps:
            with trainer.watch.measure("time/export"):
                export_step(number)
        return report

    def save_and_upload(folder: Path) -> None:
        save(folder, trainer.step_index)
        if upload is not None and folder == trainer.folder.final:
            upload(folder, f"the model after {trainer.step_index} steps")

    trainer.step, trainer.save_models = observed_step, save_and_upload


def export_average(trainer: Any) -> None:
    """Has the trainer write its averaged weights after the final model; every rank calls it."""
    save_models = trainer.save_models

    def save_both(folder: Path) -> None:
        save_models(folder)
        if folder == trainer.folder.final:
            with trainer.strategy.averaged_weights(trainer.model):
                save_models(trainer.folder.final_ema)

    trainer.save_models = save_both


def _uploader(config: Any) -> Callable[[Path, str], None]:
    """Returns a function that uploads a folder; raises at once if the hub does not take any."""
    from lightrl.trainers.hub_push import Repository  # noqa: PLC0415  (only with --hub.push)

    return Repository(config.hub.push, is_private=config.hub.private).upload_or_warn
