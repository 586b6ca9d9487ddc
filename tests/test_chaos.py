"""A sample of `make chaos`: runs that are killed ten times end as the undisturbed run does."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightrl.builtin.model import tiny_model
from lightrl.testing import free_port, run_program

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = ROOT / "benchmarks" / "chaos_program.py"


@pytest.mark.slow
@pytest.mark.long
def test_ten_kills_lose_nothing(tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(ROOT / "benchmarks/chaos.py"),
        "--kills",
        "10",
        "--max_ranks",
        "2",
        "--kinds",
        "grpo",
    ]
    said = run_program(command, timeout_s=280, cwd=tmp_path)
    assert "survived 10 kills in" in said


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("num_agents", [1, 2])
def test_torchrun_restarts_a_killed_run_by_itself(num_agents: int, toy_run: list[str], tmp_path: Path) -> None:
    """One agent with two ranks, or two agents with one each: the last rank is killed after two steps."""
    (tmp_path / "pids").mkdir()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CHAOS": "backward 2 1", "CHAOS_PIDS": str(tmp_path / "pids")}
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(num_agents), "--max_restarts", "1"]
    command += ["--nproc_per_node", str(2 // num_agents), "--master_addr", "127.0.0.1"]
    command += ["--master_port", str(free_port())]
    with (tmp_path / "output").open("w") as output:
        agents = [
            subprocess.Popen(
                [*command, "--node_rank", str(rank), str(PROGRAM), *toy_run],
                stdout=output,
                stderr=output,
                env=environment,
            )
            for rank in range(num_agents)
        ]
        try:
            codes = [agent.wait(timeout=200) for agent in agents]
        finally:
            for agent in agents:
                agent.kill()
    said = (tmp_path / "output").read_text()
    assert codes == [0] * num_agents, said
    assert "killed: 1 at backward" in said
    assert "continuing after step 2 from" in said
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]


@pytest.fixture
def toy_run(tmp_path: Path) -> list[str]:
    model, tokenizer = tiny_model()
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    rows = [{"prompt": f"{left}+11=", "answer": str(left + 11)} for left in range(20, 28)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        *("grpo", "--model", str(tmp_path / "model"), "--train_data", str(tmp_path / "sums.jsonl")),
        *("--strategy", "ddp", "--num_prompts", "2", "--group_size", "2", "--max_new_tokens", "4", "--max_steps", "3"),
        *("--checkpoint.every", "1", "--eval.every", "0", "--log.tensorboard", "False"),
        *("--output_dir", str(tmp_path / "run")),
    ]
