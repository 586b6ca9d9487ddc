import errno
import json
import math
import os
import re
import resource
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from made_samples import made_sample

from lightrl.checkpoint import CheckpointDirectory
from lightrl.config import DeepSpeedConfig, GRPOConfig
from lightrl.records import Experience, Prompt
from lightrl.trainers.earlier_run import find_checkpoint, last_step, refusal
from lightrl.trainers.run_folder import RunFolder, new_run_path


def used(tmp_path: Path, **changes: object) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.open(GRPOConfig(**changes), 0)  # type: ignore[arg-type]
    return folder


def test_a_new_or_empty_folder_is_fine(tmp_path: Path) -> None:
    RunFolder(tmp_path / "new").check(GRPOConfig())
    RunFolder(tmp_path).check(GRPOConfig())


def test_a_folder_that_never_got_to_a_step_is_taken_over(tmp_path: Path) -> None:
    used(tmp_path).check(GRPOConfig(lr=0.1))


def test_new_folders_are_never_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    paths = [new_run_path("grpo") for _ in range(3)]  # in the same second, more often than not
    assert len(set(paths)) == 3
    assert re.fullmatch(r"grpo-\d{8}-\d{6}", paths[0].name)
    assert all(path.is_dir() for path in paths)


def test_a_damaged_config_is_told(tmp_path: Path) -> None:
    folder = used(tmp_path)
    folder.append_metrics(1, {})
    (folder.root / "config.yaml").write_text("")
    with pytest.raises(ValueError, match="config.yaml is damaged"):
        folder.check(GRPOConfig())


@contextmanager
def small_disk(num_bytes: int) -> Iterator[None]:
    """Lets no file grow beyond this size."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_at_the_start_of_a_run_leaves_the_folder_usable(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(OSError, match="too large"), small_disk(64):
        folder.open(GRPOConfig(), 0)
    folder.check(GRPOConfig())
    folder.open(GRPOConfig(lr=0.1), 0)
    folder.append_metrics(1, {})
    with pytest.raises(OSError, match="too large"), small_disk(64):
        folder.open(GRPOConfig(lr=0.1), 1)
    folder.check(GRPOConfig(lr=0.1))


def test_what_does_not_change_the_numbers_may_change(tmp_path: Path) -> None:
    folder = used(tmp_path)
    folder.append_metrics(1, {})
    folder.check(GRPOConfig(max_steps=500, strategy="fsdp", micro_batch_size=2))
    folder.check(GRPOConfig(strategy="deepspeed", deepspeed=DeepSpeedConfig(zero_stage=3)))
    folder.check(GRPOConfig(strategy="fsdp", tp_size=2, sp_size=2, sync_bucket_mb=64))
    with pytest.raises(ValueError, match="belongs to another run: lr was 0.0001, now 0.1; seed was 0, now 3"):
        folder.check(GRPOConfig(lr=0.1, seed=3))


def test_an_option_that_is_newer_than_the_run_has_its_default(tmp_path: Path) -> None:
    folder = used(tmp_path)
    folder.append_metrics(1, {})
    saved = yaml.safe_load((folder.root / "config.yaml").read_text())
    del saved["ema_decay"], saved["optim"]["name"]
    (folder.root / "config.yaml").write_text(yaml.safe_dump(saved))
    folder.check(GRPOConfig())
    with pytest.raises(ValueError, match="belongs to another run: ema_decay was 0.0, now 0.9"):
        folder.check(GRPOConfig(ema_decay=0.9))


def test_a_resumed_run_does_not_hold_its_samples_in_memory(tmp_path: Path) -> None:
    folder = used(tmp_path)
    path = folder.root / "samples.jsonl"
    path.write_text("".join(json.dumps({"step": step, "response": "x" * 20_000}) + "\n" for step in range(1, 301)))
    tracemalloc.start()
    try:
        folder.check(GRPOConfig())
        folder.open(GRPOConfig(), 299)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert path.stat().st_size > 299 * 20_000
    assert peak < 2_000_000


APPEND = """
import locale, sys
from pathlib import Path
from lightrl.trainers.run_folder import RunFolder
assert locale.getpreferredencoding(False) != "UTF-8"
folder = RunFolder(Path(sys.argv[1]))
folder.append_metrics(1, {"eval/L\\u00f6sung": 0.5})
assert folder.metrics() == [{"step": 1, "eval/L\\u00f6sung": 0.5}]
"""


def test_logs_are_utf_8_in_any_locale(tmp_path: Path) -> None:
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run([sys.executable, "-c", APPEND, str(tmp_path)], env={**os.environ, **locale}, check=True, timeout=120)
    assert json.loads((tmp_path / "metrics.jsonl").read_bytes()) == {"step": 1, "eval/L\u00f6sung": 0.5}


def test_resuming_drops_what_came_after_the_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = used(tmp_path)
    for step in range(5):
        folder.append_metrics(step, {"loss": float(step)})
    with (folder.root / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')
    folder.open(GRPOConfig(), 3)
    assert [row["step"] for row in folder.metrics()] == [0, 1, 2, 3]
    assert caplog.messages == []
    for _ in range(2):
        folder.open(GRPOConfig(), 0)  # from the beginning: what was logged is kept aside
        assert folder.metrics() == []
        folder.append_metrics(1, {"loss": 9.0})
    had = f"The run begins at its first step: what {folder.root}/metrics.jsonl had of an earlier start is in"
    assert caplog.messages == [f"{had} metrics.old-1.jsonl.", f"{had} metrics.old-2.jsonl."]
    assert len((folder.root / "metrics.old-1.jsonl").read_text().splitlines()) == 4
    assert len((folder.root / "metrics.old-2.jsonl").read_text().splitlines()) == 1


def test_a_log_that_was_copied_before_the_checkpoint_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = used(tmp_path)
    for step in (1, 2):
        folder.append_metrics(step, {})
    folder.open(GRPOConfig(), 2)
    assert caplog.messages == []
    folder.open(GRPOConfig(), 4)
    assert [row["step"] for row in folder.metrics()] == [1, 2]
    assert caplog.messages == [f"{folder.root}/metrics.jsonl lacks the steps after 2, though the run goes on after 4."]


def test_a_missing_log_is_warned_of_unless_the_run_branches_off(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = used(tmp_path)
    folder.open(GRPOConfig(), 4)  # a branch: it has no checkpoint of its own yet
    assert caplog.messages == []
    folder.checkpoints.mkdir()
    folder.open(GRPOConfig(), 4)
    assert caplog.messages == [
        f"{folder.root}/metrics.jsonl is gone, and with it the steps up to 4, after which the run goes on."
    ]
    folder.open(GRPOConfig(), 0)
    assert len(caplog.messages) == 1


def test_rows_are_plain_json(tmp_path: Path) -> None:
    folder = used(tmp_path)
    folder.append_metrics(1, {"loss": math.nan, "tokens": 5e6, "lr": 1e-4})
    sample = made_sample(
        prompt=Prompt(index=0, text="1+1=", token_ids=(1,), answer=Decimal("2.50")),
        position=3,
        sample_index=1,
        response_ids=(4,),
        sampler_logprobs=(-0.5,),
        versions=(7,),
        text="2",
    )
    folder.append_samples(1, [Experience(sample=sample, reward=1.0, advantage=0.5)])
    assert folder.metrics() == [{"step": 1, "loss": None, "tokens": 5_000_000, "lr": 1e-4}]
    row = json.loads((folder.root / "samples.jsonl").read_text())
    assert (row["prompt"], row["response"], row["reward"], row["advantage"], row["version"]) == (
        "1+1=",
        "2",
        1.0,
        0.5,
        7,
    )
    assert row["answer"] == "2.50"  # a column of a Parquet file may have types that JSON does not know


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(OSError, match=rf"\[Errno {errno.ENOSPC}\] .*: '{tmp_path}/metrics.jsonl'"):
        RunFolder(tmp_path).append_metrics(1, {"loss": 1.0})


@pytest.mark.parametrize("name", [None, "owner.json"])
def test_a_full_disk_at_the_start_is_told_with_what_to_do(name: str | None, tmp_path: Path) -> None:
    """The write of owner.json names no file."""
    full = OSError(errno.ENOSPC, "No space left on device", *([str(tmp_path / name)] if name else []))
    told = "cannot be used: the disk takes no more (No space left on device). Make room there, or name another folder."
    assert refusal(tmp_path, full) == f"--output_dir {tmp_path} {told}"


def test_metrics_may_be_numbers_of_numpy_and_torch(tmp_path: Path) -> None:
    folder = used(tmp_path)
    folder.append_metrics(1, {"a": np.float32(0.5), "b": np.float32("nan"), "c": torch.tensor(2), "d": np.int64(3)})  # type: ignore[dict-item]
    assert folder.metrics() == [{"step": 1, "a": 0.5, "b": None, "c": 2.0, "d": 3.0}]


def checkpoint(root: Path, step: int) -> Path:
    directory = CheckpointDirectory(root, keep=5)
    (directory.begin(step) / "file").write_text("x")
    return directory.commit(step)


def test_what_resume_finds(tmp_path: Path) -> None:
    root = tmp_path / "run" / "checkpoints"
    assert find_checkpoint(GRPOConfig(), root) is None
    first, second = checkpoint(root, 1), checkpoint(root, 2)
    assert find_checkpoint(GRPOConfig(), root) == second
    assert find_checkpoint(GRPOConfig(resume="never"), root) is None
    for path in (tmp_path / "run", root):
        assert find_checkpoint(GRPOConfig(resume=str(path)), tmp_path) == second
    assert find_checkpoint(GRPOConfig(resume=str(first)), tmp_path) == first
    branch = tmp_path / "branch" / "checkpoints"
    assert find_checkpoint(GRPOConfig(resume=str(first)), branch) == first
    own = checkpoint(branch, 2)
    assert find_checkpoint(GRPOConfig(resume=str(first)), branch) == own  # its own command continues a branch
    assert find_checkpoint(GRPOConfig(resume=str(first)), root) == first  # and goes back within a run's folder
    with pytest.raises(FileNotFoundError, match="there is no such folder"):
        find_checkpoint(GRPOConfig(resume="nowhere"), root)
    for given in ("step-1", "1", str(root / "step-1")):
        with pytest.raises(FileNotFoundError, match=rf"a checkpoint's folder\. Did you mean {first}\?$"):
            find_checkpoint(GRPOConfig(resume=given), root)
    with pytest.raises(FileNotFoundError, match="a checkpoint's folder.$"):
        find_checkpoint(GRPOConfig(resume="step-3"), root)
    with pytest.raises(ValueError, match="is no checkpoint"):
        find_checkpoint(GRPOConfig(resume=str(tmp_path)), root)


def test_the_last_step_is_known_from_the_options_or_from_the_length_of_a_pass() -> None:
    rows = [{"step": 0, "eval/loss": 1.0}, {"step": 3, "epoch": 1.2}, {"step": 4, "eval/loss": 0.9}]
    epochs = {"max_steps": 0, "num_epochs": 2, "batch_size": 4}
    assert last_step({**epochs, "max_steps": 9}, rows) == 9
    assert last_step(epochs, rows) == 5  # 0.4 passes a step, so 2 passes are 5 steps
    assert last_step({**epochs, "num_epochs": 3}, rows) == 8  # 7.5, and the last batch is smaller
    assert last_step(epochs, rows[:1]) is None
    assert last_step({"max_steps": 0, "num_epochs": 2}, []) == 0  # passes over a step's samples, not over the data


def committed(checkpoints: Path, step: int) -> Path:
    """Makes a complete checkpoint."""
    directory = CheckpointDirectory(checkpoints, keep=9)
    (directory.begin(step) / "state.pt").write_text("state")
    return directory.commit(step)


def test_a_branch_goes_on_from_its_own_checkpoints_if_its_source_is_gone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, other = str(tmp_path / "source"), str(tmp_path / "other")
    branch = used(tmp_path, resume=source)
    with pytest.raises(FileNotFoundError, match="source: there is no such folder"):
        find_checkpoint(GRPOConfig(resume=source), branch.checkpoints)  # it has no checkpoint yet
    kept = committed(branch.checkpoints, 3)
    assert find_checkpoint(GRPOConfig(resume=source), branch.checkpoints) == kept
    assert f"--resume {source} is gone: the run, which began there, goes on from its own step-000003" in caplog.text
    with pytest.raises(FileNotFoundError, match="other: there is no such folder"):  # perhaps a slip of the pen
        find_checkpoint(GRPOConfig(resume=other), branch.checkpoints)
    earlier = str(branch.checkpoints / "step-000002")  # the user goes back, and not to the newest one
    branch.open(GRPOConfig(resume=earlier), 3)
    with pytest.raises(FileNotFoundError, match="step-000002: there is no such folder"):
        find_checkpoint(GRPOConfig(resume=earlier), branch.checkpoints)
