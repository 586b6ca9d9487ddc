"""Journals: what an episode has heard comes back in the same order, also through a checkpoint."""

import asyncio
import inspect
import io
import json

import numpy as np
import torch
from PIL import Image

from lightrl.engines.base import Completion, EnginePrompt
from lightrl.engines.native.cache import LayerStorage
from lightrl.engines.native.kept_rows import KeptRow
from lightrl.rollout.journal import CURRENT, Journal, for_all_siblings, remembered, waiting_for_siblings

CALLS: list[int] = []


async def tool(value: int) -> int:
    CALLS.append(value)
    await asyncio.sleep(0.01 / value)  # the later one ends first
    return 10 * value


async def episode(journal: Journal) -> list[int]:
    journal.rewind()
    CURRENT.set(journal)
    return [*await asyncio.gather(remembered(tool(1)), remembered(tool(2))), await remembered(tool(3))]


def completion(**changes: object) -> Completion:
    values = {
        "request_id": -1,
        "sample_index": 2,
        "prompt_token_ids": (1, 2),
        "output_token_ids": (3, 4, 5),
        "logprobs": (-0.1, -1 / 3, -0.5),
        "versions": (0, 0, 1),
        "finish_reason": "abort",
    }
    return Completion(**(values | changes))  # type: ignore[arg-type]


def test_tools_are_called_once() -> None:
    CALLS.clear()
    journal = Journal(4, 2, 1)
    assert asyncio.run(episode(journal)) == [10, 20, 30]
    assert asyncio.run(episode(journal)) == [10, 20, 30]
    del journal.results[2]  # as after a kill before the third
    assert asyncio.run(episode(journal)) == [10, 20, 30]
    assert CALLS == [1, 2, 3, 3]
    journal.forget()
    asyncio.run(episode(journal))
    assert CALLS == [1, 2, 3, 3, 1, 2, 3]


async def episode_after_work(journal: Journal, *, asks_first: bool) -> list[int]:
    journal.rewind()
    CURRENT.set(journal)
    if asks_first:
        await asyncio.ensure_future(for_all_siblings("work", lambda: remembered(tool(4))))
    return [await remembered(tool(1))]


def test_a_tool_that_is_called_for_all_siblings_does_not_count_in_the_episode_that_asked() -> None:
    CALLS.clear()
    journal = Journal(4, 2, 1)
    assert asyncio.run(episode_after_work(journal, asks_first=True)) == [10]
    assert journal.results == {"work/0": 40, 0: 10}
    again = Journal.from_state(json.loads(json.dumps(journal.state_dict())))  # as it comes from another process
    assert asyncio.run(episode_after_work(again, asks_first=False)) == [10]
    assert CALLS == [4, 1]


def test_a_remembered_tool_is_neither_run_nor_left_to_be_awaited() -> None:
    call = tool(3)

    async def heard() -> int:
        CURRENT.set(Journal(4, 2, 1, results={0: 30}))
        return await remembered(call)

    assert asyncio.run(heard()) == 30
    assert inspect.getcoroutinestate(call) == inspect.CORO_CLOSED


def test_an_episode_is_among_siblings_while_it_waits_for_one_of_them() -> None:
    journal = Journal(4, 2, 1)

    async def waited() -> list[bool]:
        CURRENT.set(journal)
        with waiting_for_siblings():
            with waiting_for_siblings():
                pass
            inside = journal.is_among_siblings
        return [inside, journal.is_among_siblings]

    assert asyncio.run(waited()) == [True, False]


def test_calls_for_all_siblings_are_counted_from_the_end() -> None:
    calls = {0: (0,), 1: (1, 1), "a/0": (2,), "a/1": (3,)}
    journal = Journal(4, 2, 1, {number: completion(versions=versions) for number, versions in calls.items()})
    journal.shared = ["a/0", "a/1"]
    assert journal.versions_of_calls() == [(0,), (1, 1), (3,), (2,)]


def test_without_a_journal_a_tool_is_simply_called() -> None:
    async def alone() -> int:
        return await remembered(tool(4))

    assert asyncio.run(alone()) == 40


def test_a_journal_goes_through_a_checkpoint() -> None:
    journal = Journal(4, 2, 1)
    journal.completions[0] = completion(finish_reason="stop", routing=np.full((5, 1, 2), 3, np.int16))
    journal.partials[1] = completion()
    journal.results[0] = ["text", False]
    journal.shown[1] = "digest"
    file = io.BytesIO()
    torch.save(journal.state_dict(), file)
    file.seek(0)
    read = Journal.from_state(torch.load(file, weights_only=True))
    assert read == journal
    assert read.key == (4, 2)
    routing = read.completions[0].routing
    assert routing is not None
    assert (routing == 3).all()
    assert read.next_call() == 0
    assert read.next_call() == 1


def test_what_the_engine_keeps_is_in_no_checkpoint_and_can_be_let_go_of() -> None:
    kept = KeptRow([LayerStorage(torch.zeros(1, 2, 4, 8), torch.zeros(1, 2, 4, 8)), None], 4)
    journal = Journal(1, 2, 0, partials={0: completion(kept=kept), 1: completion()})
    assert journal.num_kept_bytes == 2 * 64 * 4
    assert Journal.from_state(journal.state_dict()).num_kept_bytes == 0
    journal.let_go()
    assert journal.num_kept_bytes == 0
    assert kept.is_empty  # for whoever else has the completion


def test_a_call_that_shows_other_images_is_forgotten() -> None:
    red, blue, tall = Image.new("RGB", (4, 2), "red"), Image.new("RGB", (4, 2), "blue"), Image.new("RGB", (2, 4), "red")
    assert tall.tobytes() == red.tobytes()
    journal = Journal(4, 2, 1)
    for number, image in enumerate((red, blue, tall)):
        journal.forget_other(number, EnginePrompt(token_ids=(1, 9), images=(image,)))
        journal.completions[number] = completion(prompt_token_ids=(1, 9, 9))
    journal.completions[3] = completion(prompt_token_ids=(1, 9, 9))  # of a checkpoint without digests
    again = Journal.from_state(json.loads(json.dumps({**journal.state_dict(), "completions": {}})))
    again.completions = dict(journal.completions)
    for number in range(4):
        again.forget_other(number, EnginePrompt(token_ids=(1, 9), images=(red,)))
    assert sorted(again.completions) == [0, 3]
