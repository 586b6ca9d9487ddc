"""`hash RUN` recomputes every stored hash of a run and fails where one differs."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lightrl.comm import Comm
from lightrl.strategy.layout.plain import Piece
from lightrl.strategy.saving.state_files import HASH_FILE, StateWriter, write_folder_hash, write_state_hash
from lightrl.trainers.hash_run import main


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with a final model, its adapter, and a checkpoint with a critic."""
    weights = {"w": torch.arange(6.0).view(3, 2), "bias": torch.ones(3)}
    for name in ("final", "final/adapter"):
        (tmp_path / name).mkdir()
        save_file(weights, tmp_path / name / "model.safetensors")
        write_folder_hash(tmp_path / name)
    for name in ("checkpoints/step-000002", "checkpoints/step-000002/critic"):
        (tmp_path / name).mkdir(parents=True)
        StateWriter(tmp_path / name, Comm()).add_tensors("model", [Piece(*item) for item in weights.items()])
        write_state_hash(tmp_path / name)
    (tmp_path / "checkpoints" / ".tmp-step-000003").mkdir()
    save_file(weights, tmp_path / "checkpoints" / ".tmp-step-000003" / "model-rank00000-00000.safetensors")
    return tmp_path


def test_a_sound_run_prints_every_hash(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run)]) == 0
    (digest,) = {line.split()[0] for line in capsys.readouterr().out.splitlines()}  # the same weights everywhere
    assert main([str(run / "final")]) == 0
    assert capsys.readouterr().out == f"{digest}  final\n{digest}  adapter\n"
    (run / "final" / HASH_FILE).unlink()
    assert main([str(run / "final")]) == 0
    assert "final: no weights.sha256 to compare with" in capsys.readouterr().out


def test_several_folders_are_named_by_their_paths(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [run / "final" / "adapter", run / "checkpoints"]
    assert main([str(folder) for folder in folders]) == 0
    lines = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
    step = run / "checkpoints/step-000002"
    assert [name for _, name in lines] == [str(run / "final/adapter"), str(step), str(step / "critic")]
    assert len({digest for digest, _ in lines}) == 1
    with pytest.raises(SystemExit) as ended:  # before it reads any file
        main([str(run), str(run / "none")])
    assert ended.value.code == 2
    assert capsys.readouterr().out == ""


def test_a_changed_or_damaged_file_is_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run / "final" / "model.safetensors"
    weights = load_file(path)
    weights["w"][1, 1] += 1e-6
    save_file(weights, path)
    (run / "checkpoints/step-000002/model-rank00000-00000.safetensors").write_bytes(b"short")
    assert main([str(run)]) == 1
    lines = {line.split()[1].rstrip(":"): line for line in capsys.readouterr().out.splitlines()}
    assert "differs from" in lines["final"]
    assert lines["final"].endswith("first in w")
    assert "cannot be read" in lines["checkpoints/step-000002"]
    assert ":" not in lines["final/adapter"]


@pytest.mark.parametrize("damage", [b"\n\n", b"\xff\xfe\n"])
def test_a_damaged_file_of_hashes_differs(run: Path, damage: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    stored = run / "final" / HASH_FILE
    stored.write_bytes(stored.read_bytes().partition(b"\n")[0] + damage)
    assert main([str(run)]) == 1
    assert "  final: differs from " in capsys.readouterr().out


@pytest.mark.parametrize(("make", "reason"), [(True, "holds no saved weights"), (False, "is not a folder")])
def test_what_is_no_run_is_a_users_mistake(
    tmp_path: Path, make: bool, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "nothing"
    if make:
        folder.mkdir()
    with pytest.raises(SystemExit) as end:
        main([str(folder)])
    assert end.value.code == 2
    assert reason in capsys.readouterr().err
    assert main([]) == 2
    assert main(["--help"]) == 0
