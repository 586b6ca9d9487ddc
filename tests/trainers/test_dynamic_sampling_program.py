"""Dynamic sampling as a whole program: alike on any number of ranks, resumed with its spare groups, never stuck."""

import json
import math
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from script_runs import run_script

SCRIPT = Path(__file__).parents[2] / "scripts" / "train_grpo.py"
run = partial(run_script, SCRIPT)
Rows = list[dict[str, Any]]

REWARD = '''
def starts_odd(sample):
    """Often the same for all samples of a prompt."""
    return float(sample.text[:1] in "13579" and sample.prompt.index != 1)

def never(sample):
    return 0.0
'''
SAME = ("loss", "grad_norm", "ratio/mean", "clip_fraction")
EQUAL = ("reward/mean", "reward/equal_groups", "tokens/response", "skipped_updates")


@pytest.fixture
def flags(toy_flags: list[str], tmp_path: Path) -> list[str]:
    (tmp_path / "sparse.py").write_text(REWARD)
    return [
        *toy_flags,
        *("--reward", f"{tmp_path / 'sparse.py'}:starts_odd", "--dynamic_sampling.enabled", "True", "--lr", "1e-4"),
        *("--dynamic_sampling.oversample", "2.5", "--num_minibatches", "2", "--max_steps", "4"),
    ]


def dynamic(row: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in row.items() if name.startswith("dynamic_sampling/")}


def check_same(ours: Rows, theirs: Rows, *, exact: bool = False) -> None:
    assert [row["step"] for row in ours] == [row["step"] for row in theirs]
    for mine, yours in zip(ours, theirs, strict=True):
        assert dynamic(mine) == dynamic(yours)
        assert {name: mine[name] for name in EQUAL} == {name: yours[name] for name in EQUAL}
        for name in SAME:
            assert math.isclose(mine[name], yours[name], rel_tol=0 if exact else 1e-5, abs_tol=0 if exact else 1e-7), (
                name, mine[name], yours[name]
            )  # fmt: skip


@pytest.mark.slow
def test_a_run_is_the_same_on_two_ranks_and_after_a_resume(
    flags: list[str], metrics_of: Callable[[Path], Rows], tmp_path: Path
) -> None:
    run(0, flags, tmp_path / "one")
    ours = metrics_of(tmp_path / "one")
    assert sum(row["dynamic_sampling/dropped_hard"] for row in ours) > 0
    assert ours[1]["dynamic_sampling/spare"] > 0  # the checkpoint of step 2 has something to keep
    assert ours[2]["dynamic_sampling/carried"] > 0
    two = ["--strategy", "fsdp", "--micro_batch_size", "3", "--checkpoint.every", "2"]
    run(2, [*flags, *two], tmp_path / "two")
    check_same(ours, metrics_of(tmp_path / "two"))
    before = metrics_of(tmp_path / "two")
    for world, spread in ((2, two), (0, ["--strategy", "single"])):
        shutil.rmtree(tmp_path / "two" / "checkpoints" / "step-000004")
        assert "continuing after step 2" in run(world, [*flags, *spread], tmp_path / "two")
        check_same(before, metrics_of(tmp_path / "two"), exact=world == 2)
    samples = [json.loads(line) for line in (tmp_path / "two" / "samples.jsonl").read_text().splitlines()]
    assert 1 in {row["version"] for row in samples if row["step"] == 3}  # a carried group comes first


def test_a_batch_without_signal_skips_the_update(
    flags: list[str], metrics_of: Callable[[Path], Rows], tmp_path: Path
) -> None:
    flags = [*flags, "--reward", f"{tmp_path / 'sparse.py'}:never", "--max_steps", "2"]
    output = run(0, [*flags, "--optim.weight_decay", "0.1", "--dynamic_sampling.max_rounds", "2"], tmp_path / "run")
    assert "only 0 of 4 have unequal rewards" in output
    for row in metrics_of(tmp_path / "run"):
        assert row["skipped_updates"] == 1
        assert row["dynamic_sampling/fill"] == 0
        assert row["dynamic_sampling/rounds"] == 2
        assert row["dynamic_sampling/dropped_hard"] == 20  # two rounds of 2.5 x 4
        assert "loss" not in row
