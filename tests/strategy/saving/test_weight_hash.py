"""The hash of weights is that of its definition, whoever held which rows and in however many files they are."""

import hashlib
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from lightrl.comm import Comm
from lightrl.strategy.layout.plain import Piece
from lightrl.strategy.saving.state_files import (
    HASH_FILE,
    NamedRows,
    StateWriter,
    digest_of_rows,
    hash_text,
    recompute,
    write_folder_hash,
    write_state_hash,
)

WEIGHTS = {
    "b": torch.arange(10.0).view(5, 2),
    "a.scale": torch.tensor(3.0, dtype=torch.bfloat16),
    "a.none": torch.zeros(0, 4),
}


def sha(content: bytes) -> int:
    return int.from_bytes(hashlib.sha256(content).digest(), "little")


def test_the_hash_is_the_documented_one() -> None:
    row_0 = sha(b"b float32 5x2\n" + bytes(8) + bytes.fromhex("00000000 0000803f"))  # 0.0 and 1.0, little end first
    assert digest_of_rows(NamedRows("b", WEIGHTS["b"][:1], (5, 2))) == row_0
    row_4 = sha(b"b float32 5x2\n" + b"\4" + bytes(7) + bytes.fromhex("00000041 00001041"))  # 8.0 and 9.0
    assert digest_of_rows(NamedRows("b", WEIGHTS["b"][4:], (5, 2), 4)) == row_4
    scalar = sha(b"a.scale bfloat16 scalar\n" + bytes(8) + bytes.fromhex("4040"))
    assert digest_of_rows(NamedRows("a.scale", WEIGHTS["a.scale"], ())) == scalar
    total = (row_0 + row_4) % 2**256
    text = hash_text([("b float32 5x2", row_4), ("a.none float32 0x4", 0), ("b float32 5x2", row_0)])
    lines = f"a.none float32 0x4 {0:064x}\nb float32 5x2 {total:064x}\n"
    assert text == f"{hashlib.sha256(lines.encode()).hexdigest()}\n{lines}"


def folder_hash(folder: Path, *files: dict[str, Tensor], in_memory: dict[str, Tensor] | None = None) -> str:
    folder.mkdir()
    for number, tensors in enumerate(files):
        save_file(tensors, folder / f"model-{number}.safetensors")
    write_folder_hash(folder, in_memory)
    return (folder / HASH_FILE).read_text()


def test_neither_the_files_nor_the_ranks_change_it(tmp_path: Path) -> None:
    first, *others = ({name: tensor} for name, tensor in WEIGHTS.items())
    expected = folder_hash(tmp_path / "one", WEIGHTS)
    assert folder_hash(tmp_path / "three", *reversed(others), first) == expected
    assert recompute(tmp_path / "three") == expected
    for world, cuts in ((1, (0, 5)), (3, (0, 2, 4, 5))):
        folder = tmp_path / f"ranks-{world}"
        folder.mkdir()
        for rank in range(world):
            comm = Comm()
            comm.rank, comm.world = rank, world
            rows = (cuts[rank], cuts[rank + 1])
            pieces = [Piece("b", WEIGHTS["b"][slice(*rows)], rows, 5)]
            pieces += [Piece(name, WEIGHTS[name]) for name in ("a.scale", "a.none")]
            StateWriter(folder, comm).add_tensors("model", pieces)
        write_state_hash(folder)
        assert (folder / HASH_FILE).read_text() == recompute(folder) == expected


def test_values_names_types_and_shapes_change_it(tmp_path: Path) -> None:
    value = WEIGHTS["b"].clone()
    value[3, 1] = torch.nextafter(value[3, 1], torch.tensor(9.0))
    swapped = WEIGHTS["b"][[1, 0, 2, 3, 4]]
    changed = [{"b": value}, {"b": swapped}, {"b": WEIGHTS["b"].view(2, 5)}, {"c": WEIGHTS["b"]}]
    changed += [{"b": WEIGHTS["b"].view(torch.int32)}, {"b": WEIGHTS["b"]}]
    texts = [folder_hash(tmp_path / str(number), weights).splitlines()[0] for number, weights in enumerate(changed)]
    assert len(set(texts)) == len(changed)


def test_tensors_in_memory_are_not_read(tmp_path: Path) -> None:
    """Those in memory are other values here, to show which were taken; another shape is not the same tensor."""
    here = {"b": WEIGHTS["b"] + 1, "a.scale": torch.zeros(3)}
    text = folder_hash(tmp_path / "memory", WEIGHTS, in_memory=here)
    assert text == folder_hash(tmp_path / "file", {**WEIGHTS, "b": WEIGHTS["b"] + 1})


def test_who_may_read_the_hash_may_read_the_weights(tmp_path: Path) -> None:
    folder_hash(tmp_path / "model", WEIGHTS, {"c": WEIGHTS["b"]})
    assert len({path.stat().st_mode for path in (tmp_path / "model").iterdir()}) == 1
