"""Damage that leaves the sizes as they were is found before a checkpoint is loaded, by the rank whose share it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lightrl.checkpoint import CheckpointDirectory, load_json, save_json
from lightrl.comm import Comm
from lightrl.strategy.layout.plain import Piece
from lightrl.strategy.saving.state_files import StateWriter
from lightrl.trainers.sound_checkpoint import find_damage


def saved(root: Path, step: int) -> Path:
    """A checkpoint with a critic."""
    directory = CheckpointDirectory(root, keep=9)
    folder = directory.begin(step)
    (folder / "critic").mkdir()
    for part in (folder, folder / "critic"):
        writer = StateWriter(part, Comm())
        writer.add_tensors("model", [Piece("scalar", torch.tensor(1.0)), Piece("weight", torch.randn(40, 3))])
        writer.add_object("state.pt", {"step": step})
    return directory.commit(step)


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


def test_a_sound_checkpoint_and_one_without_checksums_pass(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, 1)
    assert find_damage(checkpoint) == ""
    for index in checkpoint.rglob("model-rank*.json"):  # as an earlier version wrote them
        save_json(index, {name: {"file": entry["file"]} for name, entry in load_json(index).items()})
    marker = load_json(checkpoint / "COMPLETE")
    del marker["crc32s"]
    save_json(checkpoint / "COMPLETE", marker)
    assert find_damage(checkpoint) == ""


def unlink(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize(
    ("name", "damage", "text"),
    [
        ("model-rank00000-00000.safetensors", flip_a_bit, "the checksum of weight is wrong in a file of model-rank00"),
        ("critic/model-rank00000-00000.safetensors", flip_a_bit, "is wrong in a file of critic/model-rank00000.json"),
        ("state.pt", flip_a_bit, "the checksum of its file state.pt is wrong"),
        ("critic/model-rank00000.json", flip_a_bit, "the checksum of its file critic/model-rank00000.json is wrong"),
        ("model-rank00000-00000.safetensors", unlink, "it cannot be read (No such file or directory"),
        ("COMPLETE", unlink, "it cannot be read ([Errno 2]"),
    ],
)
def test_damage_is_named(name: str, damage: Callable[[Path], None], text: str, tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, 1)
    damage(checkpoint / name)
    found = [find_damage(checkpoint, rank, 3) for rank in range(3)]
    assert sum(text in item for item in found) >= 1, found
    if name != "COMPLETE":  # each file is one rank's to check
        assert sum(bool(item) for item in found) == 1, found
