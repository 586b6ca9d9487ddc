"""Finds the newest undamaged checkpoint: a continued run skips and names a damaged one, but never deletes it."""

from __future__ import annotations

import logging
import zlib
from pathlib import Path

from safetensors import SafetensorError, safe_open

from lightrl.checkpoint import MARKER_NAME, CheckpointDirectory, load_json, set_aside
from lightrl.comm import Comm
from lightrl.strategy.saving.state_files import block_checksums

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


def find_damage(checkpoint: Path, rank: int = 0, world: int = 1) -> str:
    """Describes the damage in this rank's share of the files; empty if there is none.

    A checkpoint of an earlier version may lack checksums; then only its files' sizes were compared, when it was listed.
    """
    try:
        manifest = load_json(checkpoint / MARKER_NAME)
        for name, expected in sorted(manifest.get("crc32s", {}).items())[rank::world]:
            if zlib.crc32((checkpoint / name).read_bytes()) != expected:
                return f"the checksum of its file {name} is wrong"
        indices = [name for name in sorted(manifest["files"]) if "-rank" in name and name.endswith(".json")]
        for name in indices[rank::world]:
            if damaged := _damaged_tensor(checkpoint / name):
                return f"the checksum of {damaged} is wrong in a file of {name}"
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        return f"it cannot be read ({error})"
    return ""


def _damaged_tensor(index: Path) -> str:
    """Returns the name of a tensor that differs from its checksums; empty if none does."""
    for name, entry in load_json(index).items():
        if entry.get("crc32s"):
            with safe_open(index.parent / entry["file"], framework="pt") as opened:
                if block_checksums(opened.get_tensor(name), entry["crc_rows"]) != entry["crc32s"]:
                    return str(name)
    return ""
