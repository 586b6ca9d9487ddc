"""An environment and workflows for the tests of episodes, whose outcome depends on what the policy says alone."""

import asyncio
import random

import torch

from lightrl import Episode, Workflow


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


class Broken(Workflow):
    """Fails always."""

    async def arun_episode(self, engine, data):
        raise RuntimeError("the tool is on fire")
