"""save_ckpt's tag, save_latest, max_num and max_mem together: what is kept, what a name loads, what a run resumes."""

import json
import os
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import nn

from lightrl.strategy.torch_native import SingleStrategy

NUM_SAVES = 4
TAGS = {"untagged": None, "one tag": "best", "a tag for each": "tag{}"}
LATEST = {"all": (True,) * 4, "none": (False,) * 4, "only the first": (True, False, False, False)}


def started() -> tuple[SingleStrategy, nn.Linear]:
    strategy, model = SingleStrategy(0, 0.0, 1, 1), nn.Linear(110_000, 1)  # 0.44 MB: two fit into max_mem=1, not three
    strategy.register(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return strategy, model


def complete(folder: Path) -> list[Path]:
    return sorted(path.parent for path in folder.rglob("COMPLETE"))


@pytest.mark.parametrize(
    ("tag", "latest", "max_num", "max_mem"), [*product(TAGS, LATEST, (1, 3), (0, 1))], ids=lambda value: str(value)
)
def test_what_is_kept_and_what_a_name_loads(tag: str, latest: str, max_num: int, max_mem: int, tmp_path: Path) -> None:
    strategy, model = started()
    for index, is_latest in enumerate(LATEST[latest]):
        name = TAGS[tag] and TAGS[tag].format(index)  # type: ignore[union-attr]
        limits = {"max_num": max_num, "max_mem": max_mem}
        strategy.save_ckpt(model, str(tmp_path), name, client_state={"n": index}, save_latest=is_latest, **limits)
    limit = 1 if tag == "one tag" else min(max_num, 2 if max_mem else NUM_SAVES)  # a tag names one checkpoint
    resumed = {"all": NUM_SAVES - 1, "none": None, "only the first": 0}[latest]  # and that one is never deleted
    kept = sorted({*range(NUM_SAVES)[-limit:], *([] if resumed is None else [resumed])})
    assert len(complete(tmp_path)) == len(kept)
    path, state = strategy.load_ckpt(model, str(tmp_path))
    assert (state or {}).get("n") == resumed
    assert (path is None) == (resumed is None)
    names = {"untagged": "step-{:06d}", "one tag": "best", "a tag for each": "tag{}"}[tag]
    for index in range(NUM_SAVES):
        if index in kept and not (tag == "one tag" and index == 0):  # by its name, a tag is its newest
            assert strategy.load_ckpt(model, str(tmp_path), names.format(index))[1] == {"n": index}
        elif tag != "one tag":
            with pytest.raises(FileNotFoundError, match="no complete checkpoint"):
                strategy.load_ckpt(model, str(tmp_path), names.format(index))


def test_tags_and_untagged_checkpoints_are_counted_apart(tmp_path: Path) -> None:
    strategy, model = started()
    strategy.save_ckpt(model, str(tmp_path), "best", save_latest=False, max_num=1)
    (tmp_path / "best" / "notes.txt").write_text("mine")
    for step in (1, 2):
        strategy.set_global_step(step)
        strategy.save_ckpt(model, str(tmp_path), max_num=1, client_state={"step": step})
    assert [path.name for path in complete(tmp_path)] == ["step-000000", "step-000002"]
    strategy.save_ckpt(model, str(tmp_path), "step-2", max_num=1)  # a tag, though it looks like a step's folder
    assert [path.parent.name for path in complete(tmp_path)] == [tmp_path.name, "step-2"]
    assert strategy.load_ckpt(model, str(tmp_path), "step-2")[0].parent.name == "step-2"
    assert [path.name for path in (tmp_path / "best").iterdir()] == ["notes.txt"]  # only its own files are deleted
    assert strategy.load_ckpt(model, str(tmp_path), "step-000002")[1] == {"step": 2}


def test_a_copy_of_the_folder_has_the_same_newest_and_oldest(tmp_path: Path) -> None:
    """A copy may give all files new times, in any order."""
    strategy, model = started()
    names = ("first", None, "second", None, "third")
    for index, name in enumerate(names):
        for path in tmp_path.rglob("COMPLETE"):
            os.utime(path, ns=(2**62 - index, 2**62 - index))  # newer than what is saved next
        strategy.save_ckpt(model, str(tmp_path), name, client_state={"n": index}, max_num=2)
        assert strategy.load_ckpt(model, str(tmp_path))[1] == {"n": index}
    assert {path.parent.name for path in complete(tmp_path)} == {tmp_path.name, "second", "third"}


def test_checkpoints_without_a_time_are_older_and_ordered_by_that_of_the_file(tmp_path: Path) -> None:
    """Markers had none at first."""
    strategy, model = started()
    for index, (name, seconds) in enumerate(((None, 1), ("a", 3), ("b", 2))):
        strategy.save_ckpt(model, str(tmp_path), name, client_state={"n": index})
        (path,) = (tmp_path / (name or "")).glob("step-*/COMPLETE")
        marker = json.loads(path.read_text())
        del marker["time_ns"]
        path.write_text(json.dumps(marker))
        os.utime(path, (2**32 + seconds, 2**32 + seconds))
    assert strategy.load_ckpt(model, str(tmp_path))[1] == {"n": 1}
    strategy.save_ckpt(model, str(tmp_path), "c", client_state={"n": 3}, max_num=2)
    assert strategy.load_ckpt(model, str(tmp_path))[1] == {"n": 3}
    assert {path.parent.name for path in complete(tmp_path)} == {tmp_path.name, "a", "c"}


def test_an_empty_tag_is_none(tmp_path: Path) -> None:
    strategy, model = started()
    assert strategy.load_ckpt(model, str(tmp_path), "") == (None, None)
    for step, is_latest in ((1, True), (2, False)):
        strategy.set_global_step(step)
        strategy.save_ckpt(model, str(tmp_path), "", client_state={"step": step}, save_latest=is_latest)
    assert strategy.load_ckpt(model, str(tmp_path), "")[1] == {"step": 1}


@pytest.mark.parametrize("tag", ["../elsewhere", "a/b", "/tmp/a", "..", ".hidden", "latest", "COMPLETE", "step-000002"])
def test_a_tag_that_is_no_name_beside_the_checkpoints_is_refused(tag: str, tmp_path: Path) -> None:
    strategy, model = started()
    with pytest.raises(ValueError, match="cannot name a folder beside the checkpoints. Give a name such as 'best'"):
        strategy.save_ckpt(model, str(tmp_path / "run"), tag)
    assert not [*tmp_path.iterdir()]
    with pytest.raises(ValueError, match="at least 1 checkpoint must be kept"):
        strategy.save_ckpt(model, str(tmp_path / "run"), "best", max_num=0)
