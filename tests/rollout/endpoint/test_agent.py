"""Agents as workflows: what they are given, what their calls become, and agents that cannot be run."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from endpoint_scripts import TOKENIZER, ScriptedDriver, client_of, task_of

from lightrl.config import WorkflowConfig
from lightrl.rollout.endpoint.agent import AgentWorkflow, EndpointWorkflow
from lightrl.rollout.episode import Episode
from lightrl.rollout.workflow import load_workflow
from lightrl.testing import run_spmd

ROOT = Path(__file__).parents[3]


def episodes(agent: str, *arguments: str) -> list[Episode]:
    workflow: Any = load_workflow(
        WorkflowConfig(workflow="agent", workflow_args=(f"agent=endpoint_agents:{agent}", *arguments))
    )
    driver = ScriptedDriver(TOKENIZER)

    async def run() -> list[Episode]:
        found: list[Episode] = await workflow.arun_episode(client_of(driver, TOKENIZER), task_of(TOKENIZER))
        return found

    try:
        return asyncio.run(run())
    finally:
        workflow.endpoint.stop()


def test_an_agent_gives_the_reward_and_numbers_to_count() -> None:
    [episode] = episodes("two_turns", "wanted=x")
    assert (episode.reward, episode.numbers) == (0.0, {"calls": 2.0, "branches": 0.0, "asked": 2.0})
    assert len(episode.turns) == 2


def test_an_agent_may_return_numbers_of_numpy() -> None:
    [episode] = episodes("numpy_numbers")
    assert (episode.reward, episode.numbers["seen"]) == (0.5, 3.0)
    assert type(episode.reward) is type(episode.numbers["seen"]) is float


def test_a_plain_function_runs_in_a_thread_and_leaves_the_reward_to_the_run() -> None:
    [episode] = episodes("blocking")
    assert episode.reward is None
    assert episode.prompt_ids == task_of(TOKENIZER).token_ids


def test_an_async_agent_may_use_a_client_that_blocks() -> None:
    [episode] = episodes("blocking_async")
    assert len(episode.turns) == 1


def test_a_class_is_built_once_and_its_forks_are_samples() -> None:
    main, *others = episodes("Talker", "times=3")
    assert (main.reward, main.numbers["branches"]) == (1.0, 2.0)
    assert [len(episode.turns) for episode in (main, *others)] == [2, 2, 2]
    assert {episode.prompt_ids for episode in others} == {main.prompt_ids}


def test_an_agent_that_asks_nothing_fails() -> None:
    with pytest.raises(ValueError, match="has ended without a call to the policy. It must call base_url with the"):
        episodes("silent")
    with pytest.raises(ValueError, match="The agent returned reward '.*' of type str: return a number, None, or a"):
        episodes("wordy")
    with pytest.raises(ValueError, match="The agent returned note 'hi' of type str"):
        episodes("noted")
    with pytest.raises(ValueError, match="returned a mapping of score, steps without 'reward'. Add the reward, or"):
        episodes("unrewarded")
    [episode] = episodes("left_open")
    assert (episode.reward, episode.numbers["steps"]) == (None, 2.0)


@pytest.mark.parametrize("agent", ["leaves", "leaves_in_a_task"])
def test_an_agent_that_exits_ends_its_episode_and_not_the_endpoint(agent: str) -> None:
    workflow: Any = load_workflow(WorkflowConfig(workflow="agent", workflow_args=(f"agent=endpoint_agents:{agent}",)))

    async def run() -> None:
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"called exit\(3\)"):
                await workflow.arun_episode(client_of(ScriptedDriver(TOKENIZER), TOKENIZER), task_of(TOKENIZER))

    asyncio.run(run())
    workflow.endpoint.stop()
    with pytest.raises(RuntimeError, match="StopIteration"):
        episodes("stops")


class Leaving(EndpointWorkflow):
    """Plays in the endpoint's own loop, as the environments of verifiers do."""

    async def play(self, data: Any, *, base_url: str, api_key: str, model: str) -> Any:
        async def leave() -> None:
            sys.exit(3)

        await asyncio.gather(leave())


def test_exit_in_a_task_of_the_endpoints_loop_ends_only_its_episode() -> None:
    workflow = Leaving()

    async def run() -> None:
        for _ in range(2):
            playing = workflow.arun_episode(client_of(ScriptedDriver(TOKENIZER), TOKENIZER), task_of(TOKENIZER))
            with pytest.raises(RuntimeError, match=r"called exit\(3\)"):
                await asyncio.wait_for(playing, 20)

    asyncio.run(run())
    workflow.endpoint.stop()


class KeyLeaking(EndpointWorkflow):
    """Keeps the key of its episode for later, and fails."""

    async def play(self, data: Any, *, base_url: str, api_key: str, model: str) -> Any:
        self.given = {"Authorization": f"Bearer {api_key}"}
        raise KeyError("a mistake in the agent")


def test_the_key_of_an_episode_that_has_ended_is_refused() -> None:
    workflow = KeyLeaking()

    async def run() -> tuple[int, str]:
        with pytest.raises(KeyError):
            await workflow.arun_episode(client_of(ScriptedDriver(TOKENIZER), TOKENIZER), task_of(TOKENIZER))
        body = {"model": "policy", "messages": [{"role": "user", "content": "ab c?"}]}
        async with (
            aiohttp.ClientSession(headers=workflow.given) as http,
            http.post(f"{workflow.endpoint.base_url}/chat/completions", json=body) as answer,
        ):
            return answer.status, (await answer.json())["error"]["message"]

    status, message = asyncio.run(run())
    workflow.endpoint.stop()
    assert (status, "key" in message) == (401, True)


def test_an_agent_that_hangs_does_not_keep_the_process_from_ending() -> None:
    program = """
import asyncio, endpoint_scripts as scripts
from lightrl.config import WorkflowConfig
from lightrl.rollout.workflow import load_workflow

async def run():
    tokenizer = scripts.ambiguous_tokenizer()
    client = scripts.client_of(scripts.ScriptedDriver(tokenizer), tokenizer)
    workflow = load_workflow(WorkflowConfig(workflow="agent", workflow_args=("agent=endpoint_agents:hangs",)))
    await asyncio.wait([asyncio.ensure_future(workflow.arun_episode(client, scripts.task_of(tokenizer)))], timeout=0.2)

asyncio.run(run())
"""
    folders = os.pathsep.join([str(ROOT), str(ROOT / "tests/programs")])
    subprocess.run([sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": folders}, check=True, timeout=300)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("agent=endpoint_agents:nobody",), "has no 'nobody'"),
        (("agent=endpoint_agents:nothing",), "is a int; it must be a function or a class"),
        (("agent=endpoint_agents:deaf",), "must take base_url and api_key"),
        (("agent=endpoint_agents:yielding",), "yields, so that nothing of it runs. It must return the reward or None"),
        (("agent=endpoint_agents:Yielding",), "yields, so that nothing of it runs"),
        (("agent=endpoint_agents:silent", "tempo=3"), "cannot be called: got an unexpected keyword argument 'tempo'"),
        (("agent=endpoint_agents:Talker",), "cannot be built: missing a required argument: 'times'"),
        (("agent=endpoint_agents:silent", "host=0.0.0.0"), "can be reached from other machines"),
        (("agent=endpoint_agents:limited", "limit=two"), "limit is 'two', and it must be int"),
        (("agent=endpoint_agents:Limited", "limit=two"), "limit is 'two', and it must be int"),
        (("agent=endpoint_agents:silent", "port=two"), "port is 'two', and it must be int"),
        ((), "missing a required argument: 'agent'"),
    ],
)
def test_an_agent_that_cannot_be_run_is_refused_at_once(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_workflow(WorkflowConfig(workflow="agent", workflow_args=arguments))


@pytest.mark.parametrize("agent", ["limited", "Limited"])
def test_an_agent_takes_arguments_of_its_own_that_fit(agent: str) -> None:
    for given in ("limit=2", "limit=null"):
        options = WorkflowConfig(workflow="agent", workflow_args=(f"agent=endpoint_agents:{agent}", given))
        assert isinstance(load_workflow(options), AgentWorkflow)


def test_an_option_that_the_endpoint_lacks_is_refused() -> None:
    with pytest.raises(ValueError, match="the endpoint cannot be built: got an unexpected keyword argument 'speed'"):
        load_workflow(WorkflowConfig(workflow="serve", workflow_args=("speed=2",)))


@pytest.mark.slow
def test_openais_client_trains_on_two_ranks(tmp_path: Path) -> None:
    options = {
        "train_data": ROOT / "examples" / "guessing_numbers.jsonl",
        "reward": "episode",
        "max_steps": 8,
        "num_prompts": 4,
        "group_size": 12,
        "max_new_tokens": 1,
        "lr": 3e-3,
        "rollout.workflow": "agent",
        "rollout.max_turns": 2,
        "output_dir": tmp_path,
    }
    given = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    given += ["--rollout.workflow_args", "agent=endpoint_agents:two_turns"]
    run_spmd(ROOT / "scripts" / "train_grpo.py", *given, world_size=2, cwd=ROOT / "tests" / "programs")
    steps = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert steps[0]["reward/mean"] < 0.4
    assert steps[-1]["reward/mean"] > steps[0]["reward/mean"] + 0.2
    assert all(step["episode/asked"] == 96 and step["episode/turns"] == 2 for step in steps)
    assert all(
        step["mismatch/max_abs_logprob_diff"] < 1e-3 for step in steps if "mismatch/max_abs_logprob_diff" in step
    )
