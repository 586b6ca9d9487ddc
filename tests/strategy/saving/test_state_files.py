import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from lightrl.comm import Comm
from lightrl.strategy.layout.plain import Piece
from lightrl.strategy.saving import state_files
from lightrl.strategy.saving.state_files import DeferredWriter, StateWriter
from lightrl.strategy.saving.state_reader import TensorReader, load_object


def comm_of(rank: int, world: int) -> Comm:
    """Only names files and deals out tensors here."""
    comm = Comm()
    comm.rank, comm.world = rank, world
    return comm


WHOLE = torch.arange(10.0).view(5, 2)


def write_split(folder: Path) -> list[StateWriter]:
    """Five rows over three ranks, which is 2, 2, 1; a scalar and two whole tensors; nothing of an empty one."""
    writers = []
    for rank, (start, stop) in enumerate([(0, 2), (2, 4), (4, 5)]):
        writer = StateWriter(folder, comm_of(rank, 3))
        pieces = [Piece("split", WHOLE[start:stop], (start, stop), 5)]
        pieces += [Piece("whole", torch.ones(3, dtype=torch.float64)), Piece("a/b/step", torch.tensor(4.0))]
        pieces += [Piece("none", torch.zeros(0, 2), (0, 0), 0), Piece("empty", torch.zeros(0, 3))]
        writer.add_tensors("model", pieces)
        writers.append(writer)
    return writers


def test_rows_of_many_ranks_are_read_whole_and_in_any_cut(tmp_path: Path) -> None:
    write_split(tmp_path)
    reader = TensorReader(tmp_path, "model")
    assert reader.names == {"split", "whole", "a/b/step", "empty"}
    assert_close(reader["split"], WHOLE, atol=0, rtol=0)
    for start in range(6):
        for stop in range(start, 6):
            assert_close(reader.rows("split", start, stop), WHOLE[start:stop], atol=0, rtol=0)
    assert_close(reader["whole"], torch.ones(3, dtype=torch.float64), atol=0, rtol=0)
    assert reader["a/b/step"].shape == ()
    assert float(reader["a/b/step"]) == 4.0
    assert reader["empty"].shape == (0, 3)
    assert (reader.shape_of("split"), reader.dtype_of("whole")) == (torch.Size([5, 2]), torch.float64)
    assert (reader.keys_of("a/b"), reader.keys_of("b")) == (["step"], [])


def test_the_first_rows_need_not_be_those_of_the_first_rank(tmp_path: Path) -> None:
    for rank, (start, stop) in enumerate([(3, 5), (0, 3)]):
        StateWriter(tmp_path, comm_of(rank, 2)).add_tensors("model", [Piece("w", WHOLE[start:stop], (start, stop), 5)])
    assert_close(TensorReader(tmp_path, "model")["w"], WHOLE, atol=0, rtol=0)


def test_each_whole_tensor_is_written_once_by_the_rank_with_least(tmp_path: Path) -> None:
    for rank in range(2):
        # 8, 4, 4 bytes: the first to rank 0, both others to rank 1
        pieces = [Piece(str(i), torch.zeros(size)) for i, size in enumerate((2, 1, 1))]
        StateWriter(tmp_path, comm_of(rank, 2)).add_tensors("model", pieces)
    counts = [(tmp_path / f"model-rank0000{rank}.json").read_text().count("shape") for rank in range(2)]
    assert counts == [1, 2]


def test_files_are_cut_at_the_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_files, "_FILE_BYTES", 8)
    named = [(str(i), torch.full((1,), float(i))) for i in range(5)]  # 4 bytes each
    StateWriter(tmp_path, comm_of(0, 1)).add_tensors("model", [Piece(name, tensor) for name, tensor in named])
    assert len(list(tmp_path.glob("*.safetensors"))) == 3
    reader = TensorReader(tmp_path, "model")
    assert [float(reader[name]) for name, _ in named] == [0, 1, 2, 3, 4]


def test_the_first_error_ends_the_writing_and_is_kept(tmp_path: Path) -> None:
    writer = StateWriter(tmp_path / "absent", comm_of(0, 1))
    writer.add_object("state.pt", {"step": 1})
    first = writer.error
    assert isinstance(first, FileNotFoundError)
    (tmp_path / "absent").mkdir()
    writer.add_tensors("model", [Piece("weight", torch.ones(2))])
    assert writer.error is first
    assert list((tmp_path / "absent").iterdir()) == []


def test_a_deferred_writer_keeps_copies(tmp_path: Path) -> None:
    writer = DeferredWriter(tmp_path, comm_of(0, 1))
    weight, values = torch.ones(2), {"step": 1}
    writer.add_tensors("model", [Piece("weight", weight)])
    writer.add_object("state.pt", values)
    assert list(tmp_path.iterdir()) == []
    weight.zero_()
    values["step"] = 2
    for job in writer.jobs:
        job()
    assert TensorReader(tmp_path, "model")["weight"].tolist() == [1.0, 1.0]
    assert torch.load(tmp_path / "state.pt", weights_only=True) == {"step": 1}


def test_missing_rows_and_damaged_files_are_named(tmp_path: Path) -> None:
    write_split(tmp_path)
    (tmp_path / "model-rank00001.json").unlink()
    with pytest.raises(ValueError, match="lacks rows 2 to 5 of split"):
        TensorReader(tmp_path, "model")["split"]
    path = tmp_path / "model-rank00000-00000.safetensors"
    path.write_bytes(b"x" * 100)
    with pytest.raises(ValueError, match=f"{path} is damaged"):
        TensorReader(tmp_path, "model").rows("split", 0, 1)


def test_changed_values_of_the_same_size_are_noticed(tmp_path: Path) -> None:
    write_split(tmp_path)
    path = tmp_path / "model-rank00000-00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1  # a bit of a weight
    path.write_bytes(content)
    reader = TensorReader(tmp_path, "model")
    changed = [name for name in reader.names if not is_readable(reader, name)]
    assert len(changed) == 1
    with pytest.raises(ValueError, match=rf"{path} is damaged \(a checksum of {changed[0]} is wrong\)"):
        reader[changed[0]]
    for index in tmp_path.glob("*.json"):  # a checkpoint of an earlier version has no checksums
        entries = json.loads(index.read_text())
        index.write_text(json.dumps({name: without_checksum(entry) for name, entry in entries.items()}))
    assert TensorReader(tmp_path, "model")[changed[0]] is not None


@pytest.mark.parametrize("bytes_per_block", [4, 8, 16, 1000])  # rows have 8 bytes: blocks of 1, 1, 2, and all 6
def test_changed_values_are_noticed_by_whoever_reads_rows_of_their_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bytes_per_block: int
) -> None:
    monkeypatch.setattr(state_files, "_CHECKED_BYTES", bytes_per_block)
    weight = torch.arange(12.0).view(6, 2)
    StateWriter(tmp_path, comm_of(0, 1)).add_tensors("model", [Piece("w", weight, (0, 6), 6)])
    reader = TensorReader(tmp_path, "model")
    cuts = [(start, stop) for start in range(6) for stop in range(start + 1, 7)]
    for start, stop in cuts:
        assert_close(reader.rows("w", start, stop), weight[start:stop], atol=0, rtol=0)
    path = next(tmp_path.glob("*.safetensors"))
    content = bytearray(path.read_bytes())
    content[-3] ^= 1  # in the last row
    path.write_bytes(content)
    rows = max(1, min(6, bytes_per_block // 8))
    for start, stop in cuts:
        touches = stop > (5 // rows) * rows
        if touches:
            with pytest.raises(ValueError, match="a checksum of w is wrong"):
                reader.rows("w", start, stop)
        else:
            assert_close(reader.rows("w", start, stop), weight[start:stop], atol=0, rtol=0)


def test_a_checksum_is_of_the_values_whatever_their_stride() -> None:
    rows = torch.arange(100.0).view(20, 5)
    for tensor in (rows[:1, 0], rows[:1, :1], rows[:, 2], rows[:0, 0], rows.t(), rows[3, 3]):
        assert state_files.block_checksums(tensor, 2) == state_files.block_checksums(torch.tensor(tensor.tolist()), 2)


def is_readable(reader: TensorReader, name: str) -> bool:
    try:
        return bool(reader[name].isfinite().all())
    except ValueError:
        return False


def without_checksum(entry: dict[str, Any]) -> dict[str, Any]:
    assert all(value >= 0 for value in entry.pop("crc32s"))
    del entry["crc_rows"]
    return entry


@pytest.mark.parametrize("content", [b"", b"[]", b"[" * 100_000, b'{"a": 5}', b'{"a": {}}', b'{"a": {"shape": "x"}}'])
def test_a_damaged_index_or_object_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model-rank00000.json").write_bytes(content)
    with pytest.raises(ValueError, match="model-rank00000.json is damaged"):
        TensorReader(tmp_path, "model")
    (tmp_path / "state.pt").write_bytes(content)
    with pytest.raises(ValueError, match="state.pt is damaged"):
        load_object(tmp_path / "state.pt")
