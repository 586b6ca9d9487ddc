"""An environment of verifiers runs unmodified, and trains."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from endpoint_scripts import TOKENIZER, ScriptedDriver, client_of, task_of

from lightrl.config import WorkflowConfig
from lightrl.rollout.workflow import load_workflow
from lightrl.testing import run_spmd

ROOT = Path(__file__).parents[3]
LOCAL = "config={agent: {runtime: {type: subprocess}}}"


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightrl.rollout.endpoint.verifiers_environment.is_installed", lambda name: False)
    with pytest.raises(ImportError, match=r"pip install 'lightrl\[verifiers\]'"):
        load_workflow(WorkflowConfig(workflow="verifiers", workflow_args=("taskset=some",)))
    with pytest.raises(ValueError, match="takes taskset, config, model, host, .* and not speed"):
        load_workflow(WorkflowConfig(workflow="verifiers", workflow_args=("taskset=some", "speed=1")))


def test_an_episode_has_the_tokens_of_the_engine_and_the_reward_of_the_environment() -> None:
    pytest.importorskip("verifiers")
    workflow: Any = load_workflow(
        WorkflowConfig(workflow="verifiers", workflow_args=("taskset=guessing_taskset", LOCAL))
    )
    driver = ScriptedDriver(TOKENIZER)

    async def run() -> None:
        task = task_of(TOKENIZER)
        made = [workflow.arun_episode(client_of(driver, TOKENIZER, sample_index=i), task) for i in range(3)]
        for [episode] in await asyncio.gather(*made):
            assert len(episode.turns) == 2
            assert episode.reward == 0.0
        with pytest.raises(ValueError, match="has 7 tasks, and the data set asks for task 9"):
            await workflow.arun_episode(client_of(driver, TOKENIZER), replace(task, fields={"task": 9}))

    asyncio.run(run())
    workflow.endpoint.stop()


@pytest.mark.slow
def test_an_environment_trains_on_two_ranks(tmp_path: Path) -> None:
    pytest.importorskip("verifiers")
    given = ["--train_data", str(ROOT / "examples" / "guessing_numbers.jsonl"), "--reward", "episode"]
    given += ["--max_steps", "6", "--num_prompts", "2", "--group_size", "12", "--max_new_tokens", "1", "--lr", "3e-3"]
    given += ["--rollout.workflow", "verifiers", "--rollout.workflow_args", "taskset=guessing_taskset", LOCAL]
    given += ["--output_dir", str(tmp_path)]
    run_spmd(ROOT / "scripts" / "train_grpo.py", *given, world_size=2, cwd=ROOT / "tests" / "programs")
    steps = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert steps[-1]["reward/mean"] > steps[0]["reward/mean"] + 0.2
    assert all(step["mismatch/max_abs"] < 3e-5 for step in steps)
    assert all(step["episode/failed"] == 0 for step in steps)
