"""Agents for the tests of the endpoint: OpenAI's own clients, which know nothing of lightrl."""

import asyncio
import sys
import time

import numpy as np
import openai


def client_of(base_url, api_key):
    """A client to close after use; without certificates, which would take longer to read than a turn."""
    http_client = openai.DefaultAsyncHttpxClient(verify=False)
    return openai.AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client)


async def two_turns(data, base_url, api_key, model, wanted="9"):
    """The share of two turns that say what is wanted; the second is asked with the first in the messages."""
    messages = [{"role": "user", "content": "="}]
    score = 0.0
    async with client_of(base_url, api_key) as client:
        for _ in range(2):
            answer = await client.chat.completions.create(model=model, messages=messages, max_tokens=1)
            text = answer.choices[0].message.content
            score += text == str(wanted)
            messages += [answer.choices[0].message, {"role": "user", "content": "="}]
    return {"reward": score / 2, "asked": 2}


def blocking(data, base_url, api_key):
    """A plain function with the client that blocks; the run's reward scores it."""
    with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
        client.chat.completions.create(model="policy", messages=[dict(message) for message in data.messages])


async def blocking_async(data, base_url, api_key):
    """An async function all the same."""
    blocking(data, base_url, api_key)


def numpy_numbers(data, base_url, api_key):
    """Numbers of numpy, as its means are."""
    blocking(data, base_url, api_key)
    return {"reward": np.float32(0.5), "seen": np.int64(3)}


def noted(data, base_url, api_key):
    """A mapping with a text."""
    blocking(data, base_url, api_key)
    return {"reward": 1.0, "note": "hi"}


def unrewarded(data, base_url, api_key):
    """A mapping without a reward."""
    blocking(data, base_url, api_key)
    return {"score": 1.0, "steps": 2}


def left_open(data, base_url, api_key):
    """A mapping that leaves the reward to the run."""
    blocking(data, base_url, api_key)
    return {"reward": None, "steps": 2}


class Talker:
    """Forks: both answers to the first question are asked further."""

    def __init__(self, *, times):
        self.times = times

    async def __call__(self, data, base_url, api_key, model):
        asked = [{"role": "user", "content": "ab"}]
        async with client_of(base_url, api_key) as client:
            answer = await client.chat.completions.create(model=model, messages=asked, n=self.times)
            for choice in answer.choices:
                more = [*asked, choice.message, {"role": "user", "content": "c"}]
                await client.chat.completions.create(model=model, messages=more)
        return 1.0


async def silent(data, base_url, api_key):
    return 1.0


async def wordy(data, base_url, api_key):
    await two_turns(data, base_url, api_key, "policy")
    return "good"


async def leaves(data, base_url, api_key):
    sys.exit(3)


async def leaves_in_a_task(data, base_url, api_key):
    await asyncio.gather(leaves(data, base_url, api_key))


def stops(data, base_url, api_key):
    return next(iter([]))


def hangs(data, base_url, api_key):
    time.sleep(3600)


async def deaf(data):
    return 1.0


def yielding(data, base_url, api_key):
    yield 1.0


class Yielding:
    async def __call__(self, data, base_url, api_key):
        yield 1.0


async def limited(data, base_url, api_key, limit: int = 2, **others):
    return 1.0


class Limited:
    """Takes an argument whose type it declares."""

    def __init__(self, limit: int):
        self.limit = limit

    async def __call__(self, data, base_url, api_key):
        return 1.0


nothing = 3
