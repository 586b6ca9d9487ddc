"""Programs outside the run take episodes over HTTP."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import date
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from endpoint_scripts import TOKENIZER, ScriptedDriver, client_of, task_of

from lightrl.config import WorkflowConfig
from lightrl.rollout.workflow import load_workflow


async def post(http: aiohttp.ClientSession, path: str, body: Any, key: str = "") -> tuple[int, Any]:
    async with http.post(path, json=body, headers={"Authorization": f"Bearer {key}"} if key else {}) as answer:
        return answer.status, await answer.json()


def test_an_episode_is_taken_played_and_rewarded() -> None:
    workflow: Any = load_workflow(WorkflowConfig(workflow="serve", workflow_args=("wait_s=0.1",)))

    async def run() -> None:
        driver = ScriptedDriver(TOKENIZER)
        workflow.endpoint.start()
        async with aiohttp.ClientSession(workflow.endpoint.origin) as http:
            status, answer = await post(http, "/v1/episodes", {})
            assert (status, answer["error"]["code"]) == (503, "no_episode")
            made = [
                asyncio.ensure_future(workflow.arun_episode(client_of(driver, TOKENIZER), task_of(TOKENIZER)))
                for _ in range(3)
            ]
            taken = [(await post(http, "/v1/episodes", {}))[1] for _ in made]
            assert len({item["api_key"] for item in taken}) == 3
            assert taken[0]["messages"] == [{"role": "user", "content": "ab c?"}]
            for item in taken[:2]:
                body = {"model": item["model"], "messages": item["messages"]}
                status, _ = await post(http, "/v1/chat/completions", body, item["api_key"])
                assert status == 200
            path = f"/v1/episodes/{taken[0]['id']}"
            for reward in ("high", True):
                assert (await post(http, path, {"reward": reward}))[0] == 400
            assert (await post(http, path, {"reward": 0.5}))[0] == 200
            assert (await post(http, path, {"reward": 0.5}))[0] == 404
            over = asyncio.get_running_loop().create_future()
            over.set_result(0.0)
            workflow._taken["over"] = SimpleNamespace(outcome=over)  # ended, and not yet forgotten
            assert (await post(http, "/v1/episodes/over", {"reward": 0.5}))[0] == 404
            del workflow._taken["over"]
            assert (await post(http, f"/v1/episodes/{taken[1]['id']}", {"reward": None}))[0] == 200
            assert (await post(http, f"/v1/episodes/{taken[2]['id']}", {"failed": "no money"}))[0] == 200
            found = await asyncio.gather(*made, return_exceptions=True)
        assert not workflow._taken  # which would grow with each episode
        rewards = [item[0].reward for item in found if isinstance(item, list)]
        assert sorted(rewards, key=str) == [0.5, None]
        [failure] = [item for item in found if isinstance(item, Exception)]
        assert "The program outside failed: no money" in str(failure)

    asyncio.run(run())
    workflow.endpoint.stop()


def test_fields_that_json_does_not_know_are_sent_as_text() -> None:
    workflow: Any = load_workflow(WorkflowConfig(workflow="serve"))
    task = replace(task_of(TOKENIZER), fields={"made": date(2026, 1, 2), "level": 3})

    async def run() -> None:
        workflow.endpoint.start()
        episode = asyncio.ensure_future(workflow.arun_episode(client_of(ScriptedDriver(TOKENIZER), TOKENIZER), task))
        async with aiohttp.ClientSession(workflow.endpoint.origin) as http:
            status, taken = await post(http, "/v1/episodes", {})
        episode.cancel()
        assert (status, taken["fields"]) == (200, {"made": "2026-01-02", "level": 3})

    asyncio.run(run())
    workflow.endpoint.stop()


def test_an_episode_that_ran_out_of_time_is_not_given_away() -> None:
    workflow: Any = load_workflow(WorkflowConfig(workflow="serve", workflow_args=("wait_s=0",)))

    async def run() -> None:
        episode = workflow.arun_episode(client_of(ScriptedDriver(TOKENIZER), TOKENIZER), task_of(TOKENIZER))
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(episode, 0.1)
        async with aiohttp.ClientSession(workflow.endpoint.origin) as http:
            assert (await post(http, "/v1/episodes", {}))[0] == 503

    asyncio.run(run())
    workflow.endpoint.stop()
