"""scripts/launch_node.sh: what it makes of its variables, and two real agents on loopback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lightrl.builtin.model import tiny_model
from lightrl.testing import free_port, run_program, run_spmd

ROOT = Path(__file__).resolve().parents[1]
LAUNCH = ROOT / "scripts" / "launch_node.sh"
TRAIN = ROOT / "scripts" / "train_grpo.py"
VARIABLES = ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "NPROC_PER_NODE", "CUDA_VISIBLE_DEVICES")


def test_check_starts_the_doctor(fake_environment: Path) -> None:
    node = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "h", "MASTER_PORT": "1", "NPROC_PER_NODE": "8"}
    code, given, _ = launch("--check", "--output_dir", "x", environment=fake_environment, **node)
    assert code == 0
    assert given[-4:] == ["-m", "lightrl.doctor", "--output_dir", "x"]


@pytest.fixture
def fake_environment(tmp_path: Path) -> Path:
    """An activated environment whose torchrun prints its arguments, a line each."""
    return write_executable(tmp_path / "venv" / "bin" / "torchrun", 'printf "%s\\n" "$@"').parents[1]


def write_executable(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{body}\n")
    path.chmod(0o755)
    return path


def launch(*args: str, environment: Path, commands: Path | None = None, **variables: str) -> tuple[int, list[str], str]:
    """Exit code, what torchrun was given, and standard error; variables of the caller's own job do not reach it."""
    kept = {name: value for name, value in os.environ.items() if name not in VARIABLES and "SLURM" not in name}
    path = f"{commands}{os.pathsep}{kept['PATH']}" if commands else kept["PATH"]
    settings = {**kept, "PATH": path, "VIRTUAL_ENV": str(environment), "CUDA_VISIBLE_DEVICES": "", **variables}
    done = subprocess.run(
        ["bash", str(LAUNCH), *args], env=settings, capture_output=True, text=True, timeout=60, check=False
    )
    lines = done.stdout.splitlines()
    return done.returncode, [line for line in lines if not line.startswith("[launch]")], done.stderr


def test_variables_become_options_of_torchrun(fake_environment: Path) -> None:
    code, given, _ = launch(
        "my_script.py", "--note", "two words",
        environment=fake_environment, NNODES="4", NODE_RANK="3", MASTER_ADDR="10.0.0.1", MASTER_PORT="29501",
        NPROC_PER_NODE="8",
    )  # fmt: skip
    assert code == 0
    assert given == [
        "--nnodes", "4", "--node_rank", "3", "--master_addr", "10.0.0.1", "--master_port", "29501",
        "--nproc_per_node", "8", "my_script.py", "--note", "two words",
    ]  # fmt: skip


@pytest.mark.parametrize(("given", "expected"), [({}, "330"), ({"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "900"}, "900")])
def test_the_ranks_have_time_to_save_after_sigterm(tmp_path: Path, given: dict[str, str], expected: str) -> None:
    program = write_executable(tmp_path / "venv" / "bin" / "torchrun", 'echo "$TORCH_ELASTIC_SHUTDOWN_TIMEOUT"')
    one_node = {"NNODES": "1", "NODE_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    _, printed, _ = launch(environment=program.parents[1], **one_node, **given)
    assert printed == [expected]


@pytest.mark.parametrize("args", [("--strategy", "fsdp"), ()])
def test_options_alone_are_for_train_grpo_and_one_rank_without_a_gpu(
    fake_environment: Path, args: tuple[str, ...]
) -> None:
    one_node: dict[str, Any] = {"NNODES": "1", "NODE_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    code, given, _ = launch(*args, environment=fake_environment, **one_node)
    assert code == 0
    assert given[8:] == ["--nproc_per_node", "1", str(TRAIN), *args]


def test_a_rank_for_each_gpu(fake_environment: Path, tmp_path: Path) -> None:
    commands = write_executable(tmp_path / "bin" / "nvidia-smi", "printf 'GPU 0: A\\nGPU 1: A\\nGPU 2: A\\n'").parent
    one_node: dict[str, Any] = {"NNODES": "1", "NODE_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    for visible, expected in (("", "1"), ("0,2", "2")):
        _, given, _ = launch(environment=fake_environment, commands=commands, **one_node, CUDA_VISIBLE_DEVICES=visible)
        assert given[8:10] == ["--nproc_per_node", expected]


def test_slurm_gives_everything(fake_environment: Path, tmp_path: Path) -> None:
    fake = 'test "$*" = "show hostnames node[07-09]" && printf "node07\\nnode08\\nnode09\\n"'
    commands = write_executable(tmp_path / "bin" / "scontrol", fake).parent
    slurm: dict[str, Any] = {
        "SLURM_NNODES": "3", "SLURM_NODEID": "2", "SLURM_JOB_NODELIST": "node[07-09]", "SLURM_JOB_ID": "1234567",
    }  # fmt: skip
    code, given, _ = launch("--seed", "1", environment=fake_environment, commands=commands, **slurm)
    assert code == 0
    # 20000 + 1234567 mod 10000 = 24567
    assert given == [
        "--nnodes", "3", "--node_rank", "2", "--master_addr", "node07", "--master_port", "24567",
        "--nproc_per_node", "1", str(TRAIN), "--seed", "1",
    ]  # fmt: skip


def test_steps_on_parts_of_a_job_are_runs_of_their_own(fake_environment: Path, tmp_path: Path) -> None:
    commands = write_executable(tmp_path / "bin" / "scontrol", 'printf "%s\n" "$3"').parent
    job = {"SLURM_NNODES": "1", "SLURM_NODEID": "0", "SLURM_JOB_NODELIST": "node07", "SLURM_JOB_ID": "1234567"}
    for step, port in (("0", "24567"), ("2", "26585")):  # 24567 + 2 * 1009
        of_step = {"SLURM_STEP_NODELIST": "node08", "SLURM_STEP_ID": step}
        _, given, _ = launch(environment=fake_environment, commands=commands, **job, **of_step)
        assert given[4:8] == ["--master_addr", "node08", "--master_port", port]


def test_what_is_set_by_hand_wins_over_slurm(fake_environment: Path) -> None:
    code, given, _ = launch(
        environment=fake_environment, NNODES="2", NODE_RANK="1", MASTER_ADDR="10.0.0.9", MASTER_PORT="1234",
        SLURM_NNODES="3", SLURM_NODEID="2", SLURM_JOB_NODELIST="node[07-09]", SLURM_JOB_ID="5",
    )  # fmt: skip
    assert code == 0
    assert given[:8] == [
        "--nnodes", "2", "--node_rank", "1", "--master_addr", "10.0.0.9", "--master_port", "1234",
    ]  # fmt: skip


def test_slurm_without_scontrol_is_an_error(fake_environment: Path, tmp_path: Path) -> None:
    commands = write_executable(tmp_path / "bin" / "scontrol", "exit 1").parent
    code, _, error = launch(
        environment=fake_environment, commands=commands, SLURM_NNODES="2", SLURM_NODEID="0", SLURM_JOB_NODELIST="a[1-"
    )
    assert code == 2
    assert "scontrol cannot read 'a[1-'" in error


def test_all_missing_variables_are_named(fake_environment: Path) -> None:
    code, given, error = launch("--strategy", "fsdp", environment=fake_environment, NNODES="2", MASTER_ADDR="10.0.0.1")
    assert code == 2
    assert given == []
    assert "not set: NODE_RANK MASTER_PORT." in error
    assert "NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 MASTER_PORT=29500 bash scripts/launch_node.sh" in error


def test_a_number_may_begin_with_0(fake_environment: Path) -> None:
    node: dict[str, Any] = {"NNODES": "10", "NODE_RANK": "08", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    code, given, error = launch(environment=fake_environment, **node)
    assert (code, error) == (0, "")
    assert given[2:4] == ["--node_rank", "08"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"NODE_RANK": "2"}, "NODE_RANK is 2: with NNODES 2 it must be 0 to 1."),
        ({"MASTER_PORT": "0"}, "MASTER_PORT is 0: it must be a port from 1 to 65535, the same on all nodes."),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT is 65536: it must be a port from 1 to 65535"),
        ({"NNODES": "two"}, "NNODES is 'two': it must be a whole number."),
        ({"NPROC_PER_NODE": "-1"}, "NPROC_PER_NODE is '-1': it must be a whole number."),
    ],
)
def test_impossible_variables_are_errors(fake_environment: Path, wrong: dict[str, str], message: str) -> None:
    right: dict[str, Any] = {"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    code, given, error = launch(environment=fake_environment, **{**right, **wrong})
    assert (code, given) == (2, [])
    assert message in error


# ---- Two agents


def tiny_run(folder: Path, output_dir: Path) -> list[str]:
    return [
        "--strategy", "fsdp", "--model", str(folder / "model"), "--train_data", str(folder / "sums.jsonl"),
        "--reward", str(ROOT / "examples" / "digit_reward.py:digit_reward"), "--max_steps", "2", "--num_prompts", "4",
        "--group_size", "4", "--max_new_tokens", "4", "--checkpoint.every", "0", "--log.tensorboard", "False",
        "--distributed.device", "cpu", "--distributed.timeout_s", "60", "--output_dir", str(output_dir),
    ]  # fmt: skip


def write_model_and_data(folder: Path) -> None:
    model, tokenizer = tiny_model()
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    rows = [{"prompt": f"{left}+11=", "answer": str(left + 11)} for left in range(20, 28)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def computed_numbers(output_dir: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what a clock or the machine says."""
    rows = [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]
    measured = ("time/", "memory/", "tokens/per_second", "sync/gb_per_s")
    return [{name: value for name, value in row.items() if not name.startswith(measured)} for row in rows]


@pytest.mark.slow
@pytest.mark.long
def test_two_agents_on_loopback_train_as_one_torchrun_does(tmp_path: Path) -> None:
    write_model_and_data(tmp_path)
    run_spmd(TRAIN, *tiny_run(tmp_path, tmp_path / "one"), world_size=2, timeout_s=120, cwd=ROOT, torchrun=True)
    port = str(free_port())
    environment = Path(sys.executable).parents[1]

    def start(node_rank: int) -> str:
        node = {"NNODES": "2", "NODE_RANK": str(node_rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        return run_program(
            ["bash", str(LAUNCH), *tiny_run(tmp_path, tmp_path / "two")],
            timeout_s=120,
            env={**node, "NPROC_PER_NODE": "1", "VIRTUAL_ENV": str(environment)},
            cwd=ROOT,
        )

    with ThreadPoolExecutor(2) as threads:
        outputs = list(threads.map(start, range(2)))
    assert "[launch] node 1 of 2 at 127.0.0.1:" in outputs[1]
    numbers = computed_numbers(tmp_path / "two")
    assert [row["step"] for row in numbers] == [1, 2]
    assert numbers == computed_numbers(tmp_path / "one")
