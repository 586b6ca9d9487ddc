"""Finds damage in a checkpoint before it is loaded, by its manifest and the checksums of all files."""

from __future__ import annotations

import zlib
from pathlib import Path

from safetensors import SafetensorError, safe_open

from lightrl.checkpoint import MARKER_NAME, load_json
from lightrl.strategy.saving.state_files import block_checksums


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
