"""Finds the newest undamaged checkpoint: a continued run skips and names a damaged one, but never deletes it."""

from __future__ import annotations

import logging
from pathlib import Path

from lightrl.checkpoint import CheckpointDirectory, set_aside
from lightrl.comm import Comm
from lightrl.strategy.saving.soundness import find_damage

logger = logging.getLogger(__name__)


def newest_sound(checkpoint: Path, comm: Comm, *, resume: str) -> Path:
    """Returns the checkpoint if it is sound or, with --resume auto, the newest sound one; ValueError if none is.

    Every rank must call it, and checks a share of the files.
    """
    while True:
        with comm.phase("checking the checkpoint", local=True):
            if not checkpoint.is_dir():
                raise FileNotFoundError(f"{checkpoint} is not there for every rank: use a folder that all ranks see.")
            found = find_damage(checkpoint, comm.rank, comm.world)
        damage = next((text for text in comm.all_gather_object(found) if text), "")
        if not damage:
            return checkpoint
        older: Path | None = None
        with comm.phase("checking the checkpoint", local=True):
            if comm.is_main:
                older = _skip(checkpoint, damage, resume)
        checkpoint = comm.broadcast_object(older) or checkpoint


def _skip(checkpoint: Path, damage: str, resume: str) -> Path:
    """Returns the previous checkpoint; renames the damaged one and keeps its files."""
    older = CheckpointDirectory(checkpoint.parent, keep=1).before(checkpoint)
    if resume != "auto":
        raise ValueError(f"--resume {checkpoint} is damaged: {damage}. Give another step.")
    if older is None:
        raise ValueError(
            f"{checkpoint} is damaged ({damage}), and no checkpoint before it is complete. Restore it, or delete "
            f"{checkpoint.parent} to begin again."
        )
    kept = set_aside(checkpoint)
    logger.warning("Skipping the checkpoint %s: %s. It is kept as %s.", checkpoint, damage, kept.name)
    return older
