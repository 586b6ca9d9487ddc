"""scripts/quickstart.sh, scripts/test.sh and .ci/run: what they start, and whose exit code is theirs."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Prints the environment that matters and the arguments, and makes the run's folder as the trainer would.
PYTHON = r"""#!/usr/bin/env bash
echo "OMP_NUM_THREADS=${OMP_NUM_THREADS:-unset}" "$@"
while (($#)); do [[ $1 == --output_dir ]] && mkdir -p "$2"; shift; done
exit "${PYTHON_EXIT:-0}"
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """The scripts with an environment that is set up already, on a machine whose GPUs a variable counts."""
    clone = tmp_path / "clone"
    for name in ("scripts/quickstart.sh", "scripts/test.sh", ".ci/run"):
        write_command(clone / name, (ROOT / name).read_text())
    write_command(clone / "scripts" / "setup_env.sh", 'echo "set up $*"\n')
    write_command(clone / "scripts" / "test_sglang.sh", "echo testing sglang\nexit ${SGLANG_EXIT:-0}\n")
    write_command(clone / "scripts" / "check.sh", "exit ${CHECK_EXIT:-0}\n")
    write_command(clone / ".venv" / "bin" / "python", PYTHON)
    gpus = 'for ((i = 0; i < ${NUM_GPUS:-0}; i++)); do echo "GPU $i: some"; done\n'
    write_command(tmp_path / "bin" / "nvidia-smi", f"#!/usr/bin/env bash\n{gpus}")
    return clone


def write_command(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def run_script(clone: Path, script: str, *args: str, **variables: str) -> tuple[int, str]:
    path = f"{clone.parent / 'bin'}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", str(clone / script), *args],
        env={"PATH": path, **variables},
        cwd=clone.parent,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout


def started(said: str) -> str:
    (line,) = (line for line in said.splitlines() if line.startswith("OMP_NUM_THREADS="))
    return line


def test_quickstart_trains_on_two_ranks_in_a_new_run_folder(clone: Path) -> None:
    code, said = run_script(clone, "scripts/quickstart.sh", "--max_steps", "3")
    assert code == 0
    (folder,) = (clone / "runs").iterdir()
    assert folder.name.startswith("quickstart-20")
    assert started(said) == (
        "OMP_NUM_THREADS=1 -m torch.distributed.run --standalone --nproc_per_node 2 scripts/train_grpo.py "
        f"--strategy fsdp --output_dir runs/{folder.name} --max_steps 3"
    )
    assert f"the trained model are in {folder}" in said


@pytest.mark.parametrize("args", [("--output_dir", "mine"), ("--output-dir=mine",), ("--output_dir=mine",)])
def test_quickstart_leaves_a_folder_that_is_given_alone(clone: Path, args: tuple[str, ...]) -> None:
    code, said = run_script(clone, "scripts/quickstart.sh", *args)
    assert code == 0
    assert started(said).endswith(f"--strategy fsdp {' '.join(args)}")
    assert "run folder: mine" in said
    assert not (clone / "runs").exists()


@pytest.mark.parametrize(("num_gpus", "num_ranks"), [("1", "1"), ("8", "2")])
def test_quickstart_starts_no_more_ranks_than_gpus(clone: Path, num_gpus: str, num_ranks: str) -> None:
    _, said = run_script(clone, "scripts/quickstart.sh", NUM_GPUS=num_gpus)
    assert f"OMP_NUM_THREADS=unset -m torch.distributed.run --standalone --nproc_per_node {num_ranks} " in said


@pytest.mark.parametrize(
    ("visible", "threads", "num_ranks"), [("5", "unset", "1"), ("0,5", "unset", "2"), ("", "1", "2")]
)
def test_quickstart_counts_the_gpus_that_the_run_sees(clone: Path, visible: str, threads: str, num_ranks: str) -> None:
    _, said = run_script(clone, "scripts/quickstart.sh", NUM_GPUS="8", CUDA_VISIBLE_DEVICES=visible)
    assert started(said).startswith(
        f"OMP_NUM_THREADS={threads} -m torch.distributed.run --standalone --nproc_per_node {num_ranks} "
    )


def test_quickstart_fails_as_the_run_does(clone: Path) -> None:
    code, said = run_script(clone, "scripts/quickstart.sh", PYTHON_EXIT="7")
    assert code == 7
    assert "the run failed with exit code 7" in said
    assert "done" not in said


@pytest.mark.parametrize(
    ("script", "flags", "chosen"),
    [
        ("scripts/test.sh", (), "not gpu and not sglang and not engine and not long"),
        ("scripts/test.sh", ("--all",), "not gpu and not sglang"),
        (".ci/run", (), "not gpu and not sglang"),
    ],
)
def test_the_exit_code_is_that_of_pytest(clone: Path, script: str, flags: tuple[str, ...], chosen: str) -> None:
    code, said = run_script(clone, script, *flags, "-k", "a or b", PYTHON_EXIT="5", CI="true")
    assert code == 5
    assert "set up dev" in said
    options = "-n 2 --dist loadscope --no-loadscope-reorder -k a or b"
    assert started(said) == f"OMP_NUM_THREADS=1 -m pytest -m {chosen} {options}"
    assert "testing sglang" not in said  # what failed already is told at once


def test_sglang_is_left_to_ci(clone: Path) -> None:
    code, said = run_script(clone, "scripts/test.sh", SGLANG_EXIT="6")
    assert code == 0
    assert "testing sglang" not in said


@pytest.mark.parametrize("code", [0, 6])
def test_ci_goes_on_with_sglang(clone: Path, code: int) -> None:
    assert run_script(clone, ".ci/run", SGLANG_EXIT=str(code)) == (
        code,
        "set up dev\nOMP_NUM_THREADS=1 -m pytest -m not gpu and not sglang -n 2 --dist loadscope "
        "--no-loadscope-reorder\ntesting sglang\n",
    )


def test_a_check_that_fails_is_told_before_any_test_runs(clone: Path) -> None:
    code, said = run_script(clone, "scripts/test.sh", CHECK_EXIT="3")
    assert code == 3
    assert "pytest" not in said
