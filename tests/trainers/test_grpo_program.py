"""The whole program: a run does not depend on how it is spread, and what is wrong is told."""

import json
import math
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from script_runs import run_script
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightrl.testing import free_port
from lightrl.trainers import hash_run

SCRIPT = Path(__file__).parents[2] / "scripts" / "train_grpo.py"
run = partial(run_script, SCRIPT)
Rows = list[dict[str, Any]]
ReadMetrics = Callable[[Path], Rows]

# Every way of spreading one run; the first is what the others are compared with.
SPREADS: dict[str, tuple[int, list[str]]] = {
    "one process": (0, []),
    "one process, 3 samples at a time": (0, ["--micro_batch_size", "3"]),
    "one process, 40 tokens at a time": (0, ["--max_tokens_per_microbatch", "40", "--native.max_num_seqs", "5"]),
    "one process, no trainer while the engine is awake": (0, ["--offload_while_generating", "True"]),
    "fsdp on 1 rank": (1, ["--strategy", "fsdp"]),
    "fsdp on 2 ranks": (2, ["--strategy", "fsdp", "--micro_batch_size", "1", "--offload_while_generating", "True"]),
    "fsdp on 4 ranks": (4, ["--strategy", "fsdp", "--fsdp.replicate_size", "2"]),
    "tensor parallelism on 2 ranks": (2, ["--strategy", "fsdp", "--tp_size", "2"]),
    "sequence parallelism on 2 ranks": (2, ["--strategy", "fsdp", "--sp_size", "2", "--micro_batch_size", "2"]),
    "fsdp on 8 ranks": (8, ["--strategy", "fsdp"]),  # more ranks than prompts: some have none
}
VARIANTS = {
    "one update": ["--temperature", "0.7"],
    "four updates with a reference": [
        *("--num_minibatches", "2", "--num_epochs", "2", "--algorithm.kl_coef", "0.1", "--optim.schedule", "cosine"),
        *("--optim.warmup_steps", "2"),
    ],
    "old logprobs of the engine": ["--algorithm.old_logprobs", "engine", "--num_minibatches", "2"],
    "greedy baselines": ["--algorithm.advantage", "remax", "--group_size", "1", "--num_prompts", "5"],
}
COMPARED = ("loss", "grad_norm", "entropy", "kl", "lr", "clip_fraction", "ratio/mean")
EQUAL = ("reward/mean", "tokens/prompt", "tokens/response", "tokens/truncated", "reward/equal_groups")


@pytest.fixture(scope="module")
def reference(toy_flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a variant's run in one process, made once."""
    folders: dict[str, Path] = {}

    def get(variant: str) -> Path:
        if variant not in folders:
            folders[variant] = tmp_path_factory.mktemp("reference") / "run"
            run(0, [*toy_flags, *VARIANTS[variant]], folders[variant])
        return folders[variant]

    return get


def samples_of(folder: Path) -> Rows:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def check_same_run(first: Path, other: Path, read: ReadMetrics) -> None:
    ours, theirs = read(first), read(other)
    assert [row["step"] for row in theirs] == [row["step"] for row in ours] == [1, 2, 3]
    for mine, yours in zip(ours, theirs, strict=True):
        assert {name: yours.get(name) for name in EQUAL} == {name: mine.get(name) for name in EQUAL}
        for name in COMPARED:
            # Relative; a policy-gradient loss is a difference that may be near 0, so it is measured against 1e-3.
            assert math.isclose(yours[name], mine[name], rel_tol=1e-5, abs_tol=1e-8), (name, yours[name], mine[name])
        assert yours["mismatch/max_abs"] < 1e-5
    text = [[row[key] for key in ("step", "position", "sample", "prompt", "response")] for row in samples_of(first)]
    assert text == [
        [row[key] for key in ("step", "position", "sample", "prompt", "response")] for row in samples_of(other)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("spread", list(SPREADS)[1:])
def test_the_run_does_not_depend_on_how_it_is_spread(
    spread: str, toy_flags: list[str], reference: Callable[[str], Path], metrics_of: ReadMetrics, tmp_path: Path
) -> None:
    world, flags = SPREADS[spread]
    run(world, [*toy_flags, *VARIANTS["one update"], *flags], tmp_path / "run")
    check_same_run(reference("one update"), tmp_path / "run", metrics_of)
    if "--offload_while_generating" in flags:
        assert metrics_of(tmp_path / "run")[-1]["memory/offloaded_gb"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("variant", list(VARIANTS)[1:])
def test_every_kind_of_update_is_the_same_on_two_ranks(
    variant: str, toy_flags: list[str], reference: Callable[[str], Path], metrics_of: ReadMetrics, tmp_path: Path
) -> None:
    flags = ["--strategy", "fsdp", "--micro_batch_size", "3"]
    run(2, [*toy_flags, *VARIANTS[variant], *flags], tmp_path / "run")
    check_same_run(reference(variant), tmp_path / "run", metrics_of)


def test_the_variants_are_different_runs(reference: Callable[[str], Path], metrics_of: ReadMetrics) -> None:
    """Else the comparisons above would compare nothing."""
    first, second, third, fourth = (metrics_of(reference(variant))[-1] for variant in VARIANTS)
    assert first["kl"] == third["kl"] == 0 < second["kl"]
    assert len({first["loss"], second["loss"], third["loss"], fourth["loss"]}) == 4
    assert first["ratio/mean"] == 1  # one update from the policy's own logprobs
    assert second["ratio/max"] > 1


def test_a_run_folder_holds_all_that_is_promised(reference: Callable[[str], Path], metrics_of: ReadMetrics) -> None:
    folder = reference("one update")
    row = metrics_of(folder)[-1]
    names = (
        "step reward/mean loss grad_norm lr entropy kl clip_fraction mismatch/max_abs mismatch/mean_abs mismatch/k3 "
        "tokens/prompt tokens/response tokens/per_second time/rollout time/reward time/learn time/sync time/step "
        "memory/host_gb"
    )
    assert set(names.split()) <= set(row)
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert (config["num_prompts"], config["temperature"]) == (4, 0.7)
    sample = samples_of(folder)[-1]
    assert {"prompt", "response", "reward", "advantage", "version"} <= set(sample)
    assert sample["version"] == 2  # the third step is sampled from weights that have had two
    board = EventAccumulator(str(folder / "tensorboard")).Reload()
    rewards = {event.step: event.value for event in board.Scalars("reward/mean")}
    assert rewards == pytest.approx({row["step"]: row["reward/mean"] for row in metrics_of(folder) if row["step"]})
    model = AutoModelForCausalLM.from_pretrained(folder / "final")
    tokenizer = AutoTokenizer.from_pretrained(folder / "final")
    assert model.generate(**tokenizer("1+2=", return_tensors="pt"), max_new_tokens=2).shape[0] == 1


# ---- resume ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_killed_run_goes_on_with_the_same_numbers(
    toy_flags: list[str], metrics_of: ReadMetrics, tmp_path: Path
) -> None:
    flags = [*toy_flags, "--max_steps", "6", "--checkpoint.every", "2", "--strategy", "fsdp"]
    flags += ["--optim.warmup_steps", "9", "--num_minibatches", "2", "--optim.schedule_unit", "rl_step"]
    flags += ["--checkpoint.asynchronous", "True", "--ema_decay", "0.5"]
    flags += ["--algorithm.kl_coef", "0.1", "--reference.sync_every", "1", "--reference.mixup", "0.5"]
    run(2, flags, tmp_path / "whole")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    command += ["--master_addr", "127.0.0.1", "--master_port", str(free_port()), str(SCRIPT), *flags]
    command += ["--max_steps", "100000", "--output_dir", str(tmp_path / "killed")]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    deadline = time.monotonic() + 120
    while not (tmp_path / "killed/checkpoints/step-000002/COMPLETE").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    subprocess.run(["pkill", "-9", "-f", str(tmp_path / "killed")], check=True)  # the agent and both ranks at once
    process.wait()
    for path in (tmp_path / "killed" / "checkpoints").glob("step-*"):  # a fast machine may have got further
        if int(path.name.removeprefix("step-")) > 2:
            shutil.rmtree(path)
    with (tmp_path / "killed" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')  # the line that a kill cuts short
    output = run(2, flags, tmp_path / "killed")
    assert "continuing after step 2" in output
    wanted, found = metrics_of(tmp_path / "whole"), metrics_of(tmp_path / "killed")
    assert [row["step"] for row in found] == [1, 2, 3, 4, 5, 6]
    for mine, yours in zip(wanted[2:], found[2:], strict=True):
        for name in (*COMPARED[:2], "kl", *EQUAL[:3]):
            assert mine[name] == yours[name], name
    assert hash_run.main([str(tmp_path / "killed")]) == 0  # of two ranks that hold rows
    for name in ("final", "final_ema"):
        hashes = {(tmp_path / run_name / name / "weights.sha256").read_text() for run_name in ("whole", "killed")}
        assert len(hashes) == 1
        whole, resumed = (weights_of(tmp_path / run_name / name) for run_name in ("whole", "killed"))
        assert all(torch.equal(whole[key], value) for key, value in resumed.items()), name
    final, average = (weights_of(tmp_path / "whole" / name) for name in ("final", "final_ema"))
    assert any(not torch.equal(average[key], value) for key, value in final.items())
    # Another world size reads the same checkpoint.
    shutil.rmtree(tmp_path / "killed" / "checkpoints" / "step-000006")
    output = run(0, [*flags, "--strategy", "single"], tmp_path / "killed")
    assert "continuing after step 4" in output
    for mine, yours in zip(wanted[4:], metrics_of(tmp_path / "killed")[4:], strict=True):
        assert math.isclose(mine["loss"], yours["loss"], rel_tol=1e-4)
    finished = run(0, [*flags, "--strategy", "single"], tmp_path / "killed")
    assert re.search(r"continuing after step 6 from .*: --max_steps 6 leaves no step to do", finished)


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(folder).state_dict())


# ---- errors ------------------------------------------------------------------------------------------------------


def fail(flags: list[str], folder: Path, *, code: int, world: int = 0) -> str:
    """Runs, expects the exit code, and returns the message without line breaks."""
    output = run(world, flags, folder, expect_failure=True, timeout_s=120)
    assert world or "Traceback" not in output or code == 1, output
    return re.sub(r"\s+", " ", output)


def exit_code(flags: list[str]) -> int:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *flags], capture_output=True, check=False, timeout=120
    ).returncode


def test_bad_inputs_are_told_before_a_model_is_loaded(toy: Path, toy_flags: list[str], tmp_path: Path) -> None:
    bad_line = tmp_path / "bad.jsonl"
    bad_line.write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": \n')
    long_prompt = tmp_path / "long.jsonl"
    long_prompt.write_text(json.dumps({"prompt": "1" * 600, "answer": "2"}) + "\n")
    no_model = [*toy_flags, "--model", str(tmp_path / "no_model")]
    (tmp_path / "broken.py").write_text("def reward(sample)\n")
    cases = [
        ([*no_model, "--train_data", "nowhere.jsonl"], "nowhere.jsonl"),
        ([*no_model, "--train_data", str(bad_line)], f"{bad_line}:2"),
        ([*no_model, "--strategy", "fspd"], "Unknown strategy 'fspd'. Did you mean fsdp?"),
        ([*no_model, "--engine", "vlm"], "Unknown engine 'vlm'"),
        ([*no_model, "--strategy", "fsdp", "--sp_size", "2"], "--sp_size 2 x --tp_size 1 = 2 does not divide 1 ranks"),
        ([*no_model, "--reward", "exact_mtch"], "exact_match"),
        ([*no_model, "--resume", "nowhere"], "--resume nowhere: there is no such folder"),
        (no_model, f"--model {tmp_path / 'no_model'}: there is no such folder"),
        ([*no_model, "--reward", f"{tmp_path / 'broken.py'}:reward"], "broken.py"),
        ([*no_model, "--engine", "nowhere.mine:Engine"], "there is no module 'nowhere'"),
        ([*toy_flags, "--train_data", str(long_prompt)], f"{long_prompt}:1"),
        ([*toy_flags, "--max_new_tokens", "100000"], "leaves no room for a prompt in the model's context"),
        ([*toy_flags, "--max_tokens_per_microbatch", "9"], "raise it to at least 14"),
    ]
    for flags, text in cases:
        assert text in fail(flags, tmp_path / "run", code=2), flags
    assert not (tmp_path / "run").exists()
    assert exit_code([*cases[0][0], "--output_dir", str(tmp_path / "run")]) == 2


def test_a_folder_of_another_run_is_left_alone(
    reference: Callable[[str], Path], toy_flags: list[str], tmp_path: Path
) -> None:
    folder = reference("one update")
    before = (folder / "metrics.jsonl").read_text()
    message = fail([*toy_flags, "--lr", "5e-3", *VARIANTS["one update"]], folder, code=2)
    assert "belongs to another run: lr was 0.001, now 0.005" in message
    message = fail([*toy_flags, *VARIANTS["one update"], "--resume", "never"], folder, code=2)
    assert "already holds a run and --resume is never" in message
    message = fail([*toy_flags, "--lr", "5e-3", *VARIANTS["one update"], "--strategy", "fsdp"], folder, code=2, world=2)
    assert "belongs to another run" in message  # rank 0 looks, both ranks leave with it
    assert "failed in phase" not in message
    (tmp_path / "mine.txt").write_text("x")
    assert "is no run of lightrl" in fail(toy_flags, tmp_path, code=2)
    assert (folder / "metrics.jsonl").read_text() == before


def test_a_reward_that_fails_on_one_rank_stops_every_rank_with_its_traceback(
    toy: Path, toy_flags: list[str], tmp_path: Path
) -> None:
    (tmp_path / "bad.py").write_text(
        "import math\n"
        "def raises(sample):\n"
        "    if sample.position == 1:\n"
        "        raise KeyError('no such grade')\n"
        "    return 0.0\n"
        "def not_a_number(sample):\n"
        "    return math.nan\n"
    )
    flags = [*toy_flags, "--reward", f"{tmp_path / 'bad.py'}:raises", "--strategy", "fsdp"]
    message = fail(flags, tmp_path / "run", code=1, world=2)
    assert "rank 1 failed in phase 'reward " in message  # said by rank 0
    assert "KeyError: 'no such grade'" in message
    flags = [*toy_flags, "--reward", f"{tmp_path / 'bad.py'}:not_a_number"]
    assert "nan" in fail(flags, tmp_path / "run2", code=1)
    assert exit_code([*flags, "--output_dir", str(tmp_path / "run3")]) == 1
