"""A run that continues takes the newest checkpoint without damage; the damaged one is named and kept."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from lightrl.checkpoint import CheckpointDirectory
from lightrl.comm import Comm
from lightrl.strategy.layout.plain import Piece
from lightrl.strategy.saving.state_files import StateWriter
from lightrl.trainers.sound_checkpoint import newest_sound


@pytest.fixture
def steps(tmp_path: Path) -> list[Path]:
    """The checkpoints of steps 1 to 3; that of step 3 has a wrong bit."""
    directory, paths = CheckpointDirectory(tmp_path, keep=9), []
    for step in (1, 2, 3):
        StateWriter(directory.begin(step), Comm()).add_tensors("model", [Piece("weight", torch.ones(step, 5))])
        paths.append(directory.commit(step))
    flip(paths[-1])
    return paths


def flip(checkpoint: Path) -> None:
    path = checkpoint / "model-rank00000-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")


def test_the_newest_sound_one_wins_and_nothing_is_deleted(steps: list[Path], caplog: pytest.LogCaptureFixture) -> None:
    flip(steps[1])
    with caplog.at_level(logging.WARNING):
        assert newest_sound(steps[2], Comm(), resume="auto") == steps[0]
    assert "Skipping the checkpoint" in caplog.text
    assert "the checksum of weight is wrong" in caplog.text
    assert "It is kept as damaged-step-000003." in caplog.text
    directory = CheckpointDirectory(steps[0].parent, keep=1)
    for step in (2, 3):  # the run comes to these steps again, and its rotation counts no damaged one
        (directory.begin(step) / "file").write_text("x")
        directory.commit(step)
    assert directory.steps() == [3]
    assert sorted(path.name for path in steps[0].parent.glob("damaged-*/*.safetensors")) == 2 * [
        "model-rank00000-00000.safetensors"
    ]


def test_a_checkpoint_that_was_asked_for_by_name_is_refused(steps: list[Path]) -> None:
    with pytest.raises(ValueError, match=r"--resume .*step-000003 is damaged: the checksum of weight .* another step"):
        newest_sound(steps[2], Comm(), resume=str(steps[2]))
    assert steps[2].exists()


def test_without_a_sound_one_the_run_does_not_begin_again_by_itself(steps: list[Path]) -> None:
    for path in steps[:2]:
        flip(path)
    with pytest.raises(ValueError, match="and no checkpoint before it is complete. Restore it, or delete"):
        newest_sound(steps[2], Comm(), resume="auto")
    assert steps[0].exists()


def test_a_folder_that_a_rank_does_not_see_is_no_damage(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="is not there for every rank"):
        newest_sound(tmp_path / "step-000001", Comm(), resume="auto")
