"""An environment and workflows for the tests of episodes, whose outcome depends on what the policy says alone."""

import asyncio
import os
import random
import time

import torch

from lightrl import Episode, Workflow
from lightrl.rollout.tool_calls import Tool, ToolBox
from lightrl.rollout.tool_parsers import Parser
from lightrl.rollout.tools import ToolWorkflow
from lightrl.rollout.written_calls import Found, ToolCall


class Echo:
    """Answers with two characters made from the action, after a wait of random length; over after three turns."""

    def __init__(self, *, max_wait_s: float = 0.0) -> None:
        self._max_wait_s = max_wait_s
        self._num_turns = 0

    def reset(self, data):
        return ""

    async def step(self, action):
        await asyncio.sleep(self._max_wait_s * random.random())
        self._num_turns += 1
        reply = f"{sum(map(ord, action)) % 10}="
        return reply, sum(character in "13579" for character in action) / 24, self._num_turns == 3


class OneTurn(Workflow):
    """The plain run, as a workflow."""

    async def arun_episode(self, engine, data):
        episode = Episode(data.token_ids)
        episode.say(await engine.generate(episode.ids))
        return episode


class Slow(OneTurn):
    """The plain run, in which one prompt of seven takes a second."""

    async def arun_episode(self, engine, data):
        await asyncio.sleep(1.0 if data.index % 7 == 0 else 0.0)
        return await super().arun_episode(engine, data)


class Tensors(Workflow):
    """Two turns with one heard token between, given as tensors."""

    async def arun_episode(self, engine, data):
        first = await engine.generate(data.token_ids, max_new_tokens=2)
        second = await engine.generate([*data.token_ids, *first.token_ids, 5], max_new_tokens=2)
        prompt = len(data.token_ids)
        mask = [0] * prompt + [1] * len(first.token_ids) + [0] + [1] * len(second.token_ids)
        return {
            "input_ids": torch.tensor([[*data.token_ids, *first.token_ids, 5, *second.token_ids]]),
            "loss_mask": torch.tensor([mask]),
            "logprobs": torch.tensor([[0.0] * prompt + [*first.logprobs, 0.0, *second.logprobs]]),
            "versions": torch.tensor([[0] * prompt + [*first.versions, 0, *second.versions]]),
            "rewards": torch.tensor([0.5]),
        }


class Moody(Workflow):
    """Rejects sample 1, fails in sample 2, never ends in sample 3, and makes the others."""

    async def arun_episode(self, engine, data):
        if engine.sample_index == 1:
            return None
        if engine.sample_index == 2:
            raise RuntimeError("the tool is on fire")
        if engine.sample_index == 3:
            await asyncio.sleep(60)
        episode = Episode(data.token_ids)
        episode.say(await engine.generate(episode.ids))
        episode.count("calls", 2)
        episode.reward = 1.0
        return episode


class Picky(Workflow):
    """Rejects every sample in the episodes of its first `num_steps` steps."""

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps

    async def arun_episode(self, engine, data):
        if engine.version < self.num_steps:
            return None
        episode = Episode(data.token_ids)
        episode.say(await engine.generate(episode.ids))
        return episode


class Broken(Workflow):
    """Fails always."""

    async def arun_episode(self, engine, data):
        raise RuntimeError("the tool is on fire")


class Leaving(Workflow):
    """Calls exit(), as code of a tool may."""

    async def arun_episode(self, engine, data):
        raise SystemExit(0)


class Cancelling(Workflow):
    """Awaits a task that was cancelled, as a client of a tool does whose connection ends."""

    async def arun_episode(self, engine, data):
        task = asyncio.ensure_future(asyncio.sleep(60))
        task.cancel()
        await task


class CancellingItself(Workflow):
    """Cancels the task of its episode."""

    async def arun_episode(self, engine, data):
        asyncio.current_task().cancel()
        await asyncio.sleep(60)


class Judged(Workflow):
    """Asks for its reward, but for sample 1, which leaves early."""

    async def arun_episode(self, engine, data):
        if engine.sample_index == 1:
            return None
        episode = Episode(data.token_ids)
        episode.say(await engine.generate(episode.ids))
        episode.reward = await engine.reward(episode)
        return episode


class Troubled(Workflow):
    """Calls a tool that raises, hangs for an hour, or returns a megabyte; on rank 1 alone."""

    def __init__(self):
        tool = Tool(name="trouble", schema={}, function=trouble)
        self.box = ToolBox([tool], timeout_s=0.5, max_result_chars=100)

    async def arun_episode(self, engine, data):
        episode = Episode(data.token_ids)
        episode.say(await engine.generate(episode.ids))
        answer = await self.box.answer(ToolCall("trouble", {"kind": engine.sample_index}))
        assert len(answer.text) <= 100
        episode.count("tool_errors", answer.is_error)
        episode.reward = 0.0
        return episode


def trouble(kind):
    if os.environ.get("RANK") != "1":
        return "fine"
    if kind == 0:
        raise RuntimeError("the tool is on fire")
    if kind == 1:
        time.sleep(3600)
    return "x" * 1_000_000


class Calculating(ToolWorkflow):
    """Takes every turn for a call of the calculator, whatever the policy writes."""

    def __init__(self):
        super().__init__(tools="calculator")
        call = ToolCall("calculator", {"expression": "6*7"})
        self._parser = Parser(lambda text: [Found(0, len(text), [call])])
