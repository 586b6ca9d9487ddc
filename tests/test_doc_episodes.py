"""The page's requests of programs outside the run, made by curl to a run that waits for them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from test_doc_blocks import ROOT, SHELL, blocks, shell_lines

from lightrl.testing import free_port, run_program

PAGE = ROOT / "docs" / "rollouts.md"
TIMEOUT_S = 120


def requests(port: int) -> list[str]:
    lines = [line for text in blocks(PAGE, *SHELL) for line in shell_lines(text) if line.startswith("curl ")]
    assert all(":8100/" in line for line in lines)
    return [line.replace(":8100/", f":{port}/") for line in lines]


def answer_to(command: str) -> dict[str, Any]:
    """Returns an empty dictionary where nothing listens, before the run or behind it."""
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=TIMEOUT_S)
    answer: dict[str, Any] = json.loads(done.stdout) if done.stdout else {}
    return answer


def say_something(episode: dict[str, Any]) -> None:
    body = json.dumps({"model": episode["model"], "messages": episode["messages"]}).encode()
    headers = {"Authorization": f"Bearer {episode['api_key']}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{episode['base_url']}/chat/completions", body, headers)
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        assert json.load(answer)["choices"]


def play_until_it_ends(run: Future[str], take: str, give: str) -> int:
    played, deadline = 0, time.monotonic() + TIMEOUT_S
    while not run.done() and time.monotonic() < deadline:
        episode = answer_to(take)
        if "id" in episode:
            say_something(episode)
            assert "error" not in answer_to(give.replace("/ID ", f"/{episode['id']} "))
            played += 1
        else:
            time.sleep(0.1)
    return played


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_a_program_takes_episodes_and_gives_rewards(tmp_path: Path) -> None:
    take, give = requests(port := free_port())
    options = ["--rollout.workflow", "serve", "--rollout.workflow_args", f"port={port}", "wait_s=1"]
    options += ["--reward", "episode", "--num_prompts", "2", "--group_size", "2", "--max_steps", "2"]
    options += ["--eval.every", "0", "--output_dir", str(tmp_path / "run")]
    command = [sys.executable, str(ROOT / "scripts" / "train_grpo.py"), *options]
    with ThreadPoolExecutor(1) as thread:
        run = thread.submit(run_program, command, timeout_s=TIMEOUT_S, cwd=ROOT)
        assert play_until_it_ends(run, take, give) == 8
    assert "Traceback" not in run.result()
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["reward/mean"] for row in rows] == [1.0, 1.0]
