"""Phases of a driver: episodes that stop half way go on under new weights, or are dropped, and the engine is idle."""

import asyncio
import sys
from collections.abc import Awaitable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from lightrl.builtin.model import builtin_tokenizer, tiny_model
from lightrl.engines.base import EngineGroup, SamplingParams
from lightrl.engines.colocated import ColocatedEngine
from lightrl.engines.native.engine import NativeEngine
from lightrl.rollout.client import EngineClient, EpisodeLimits
from lightrl.rollout.episode import Episode
from lightrl.rollout.event_loop import episodes_loop
from lightrl.rollout.journal import Journal, for_all_siblings, remembered
from lightrl.rollout.phases import PhasedDriver
from lightrl.rollout.siblings import Siblings

_MADE: list[PhasedDriver] = []


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    """Closes the event loops of a test's drivers."""
    yield
    while _MADE:
        _MADE.pop().close()


def driver() -> PhasedDriver:
    torch.manual_seed(0)
    engine = ColocatedEngine(NativeEngine(tiny_model()[0], eos_token_ids=[], device=torch.device("cpu")))
    engine.version = 0
    _MADE.append(PhasedDriver(engine, EngineGroup()))
    return _MADE[-1]


def bump(made: PhasedDriver) -> None:
    """New weights that equal the old ones."""
    made.engine.version = made.engine.engine._version = 1  # type: ignore[attr-defined]


async def two_turns(made: PhasedDriver, length: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    first = await made.generate([1, 5, 6], SamplingParams(max_new_tokens=length, seed=length, ignore_eos=True))
    ids = [1, 5, 6, *first.output_token_ids, 7]
    second = await made.generate(ids, SamplingParams(max_new_tokens=2, seed=length + 100, ignore_eos=True))
    return first.output_token_ids + second.output_token_ids, first.versions + second.versions


def begun(made: PhasedDriver, lengths: list[int]) -> list[Journal]:
    journals = [Journal(ticket, 0, 0) for ticket in range(len(lengths))]
    for journal, length in zip(journals, lengths, strict=True):
        made.begin(journal, lambda length=length: two_turns(made, length))
    return journals


def run_through(made: PhasedDriver) -> dict[tuple[int, int], tuple[tuple[int, ...], tuple[int, ...]]]:
    ended = {}
    while made.under_way:
        made.step(4, range(9))
        ended |= made.take_ended()
    return ended


def test_an_episode_that_is_ended_asks_for_nothing_more() -> None:
    whole, made = driver(), driver()
    begun(whole, [3, 9])
    expected = run_through(whole)
    begun(made, [30, 9])
    made.step(3, range(9))
    made.pause(keep=True)
    made.end([(0, 0), (5, 0)])  # the second one never began
    assert list(made.under_way) == list(made._begun) == [(1, 0)]  # a journal holds all tokens of its episode
    assert [wish.ticket for wish in made._wishes] == [1]
    assert run_through(made)[1, 0] == expected[1, 0]


def test_exit_in_a_task_of_an_episode_ends_only_the_episode() -> None:
    async def leaves(made: PhasedDriver) -> str:
        async def leave() -> None:
            await two_turns(made, 3)
            sys.exit(3)

        try:
            await asyncio.create_task(leave())
        except SystemExit as error:
            return f"exit {error.code}"
        return "nothing"

    made = driver()
    begun(made, [9])
    made.begin(Journal(1, 0, 0), lambda: leaves(made))
    ended = run_through(made)
    assert ended[1, 0] == "exit 3"
    assert len(ended[0, 0][0]) == 9 + 2


def test_stopped_episodes_go_on_at_the_same_token() -> None:
    whole, made = driver(), driver()
    begun(whole, [3, 9])
    expected = run_through(whole)
    journals = begun(made, [3, 9])
    made.step(6, range(9))
    assert list(made.take_ended()) == [(0, 0)]
    assert made.pause(keep=True) == []
    assert not made.engine.has_unfinished()
    assert len(journals[1].partials[0].output_token_ids) == 7  # the first step gives two
    bump(made)
    ended = run_through(made)
    assert ended[1, 0][0] == expected[1, 0][0]  # equal tokens, as the weights are equal
    assert ended[1, 0][1] == (0,) * 7 + (1,) * 4
    assert journals[1].partials == {}
    assert sorted(journals[1].completions) == [0, 1]
    assert not made._journals
    made.close()


def test_closing_ends_the_code_of_episodes() -> None:
    made, ended = driver(), []

    async def endless() -> None:
        try:
            await made.generate([1, 5, 6], SamplingParams(max_new_tokens=30, seed=0, ignore_eos=True))
        finally:
            ended.append("its resources are freed")

    made.begin(Journal(0, 0, 0), endless)
    made.step(2, [0])
    made.pause(keep=True)
    made.close()
    assert ended
    made.close()


def test_a_new_driver_goes_on_from_the_journals() -> None:
    whole, made = driver(), driver()
    begun(whole, [3, 9])
    expected = run_through(whole)
    journals = begun(made, [3, 9])
    made.step(6, range(9))
    made.take_ended()
    made.pause(keep=True)
    made.close()
    resumed = driver()
    for journal, length in zip(journals, [3, 9], strict=True):
        resumed.begin(journal, lambda length=length: two_turns(resumed, length))
    before = resumed.num_steps
    assert run_through(resumed) == expected
    assert resumed.num_steps - before <= 8  # five tokens were left, looked at every fourth step
    resumed.close()


def test_a_call_with_another_prompt_than_before_a_kill_is_generated_again() -> None:
    made, whole, resumed = driver(), driver(), driver()

    async def asks(at: PhasedDriver, *told: int) -> list[tuple[int, ...]]:
        params = SamplingParams(max_new_tokens=6, ignore_eos=True)
        return [(await at.generate([1, token], params)).output_token_ids for token in told]

    journal = Journal(0, 0, 0)
    made.begin(journal, partial(asks, made, 5, 6, 7))
    made.step(14, range(9))
    made.pause(keep=True)
    assert (list(journal.completions), list(journal.partials)) == ([0, 1], [2])
    whole.begin(Journal(0, 0, 0), partial(asks, whole, 5, 8, 9))
    expected = run_through(whole)
    resumed.begin(Journal.from_state(journal.state_dict()), partial(asks, resumed, 5, 8, 9))
    assert run_through(resumed) == expected
    for used in (made, whole, resumed):
        used.close()


def test_results_behind_a_call_with_another_prompt_are_asked_for_again() -> None:
    """They answer questions of the turn that was erased."""
    made, resumed = driver(), driver()
    params = SamplingParams(max_new_tokens=2, ignore_eos=True)

    async def double(value: int) -> int:
        return 2 * value

    async def asks(at: PhasedDriver, told: int) -> list[int]:
        before = await remembered(double(1))
        await at.generate([1, told], params)
        return [before, await remembered(double(told))]

    async def works(at: PhasedDriver, told: int) -> list[int]:
        return await for_all_siblings("work", lambda: asks(at, told))

    journals = [Journal(ticket, 0, 0) for ticket in range(2)]
    for code, journal in zip((asks, works), journals, strict=True):
        made.begin(journal, partial(code, made, 5))
    assert list(run_through(made).values()) == [[2, 10], [2, 10]]
    for code, journal in zip((asks, works), journals, strict=True):
        journal.results = {number: 3 if value == 2 else value for number, value in journal.results.items()}
        resumed.begin(Journal.from_state(journal.state_dict()), partial(code, resumed, 6))
    assert list(run_through(resumed).values()) == [[3, 12], [3, 12]]
    for used in (made, resumed):
        used.close()


def test_dropped_episodes_are_named() -> None:
    made = driver()
    begun(made, [3, 9])
    made.step(6, range(9))
    assert made.pause(keep=False) == [(1, 0)]
    assert not made.engine.has_unfinished()
    assert list(made.take_ended()) == [(0, 0)]
    assert not made.under_way
    made.close()


def test_a_visitor_is_answered_though_episodes_are_dropped() -> None:
    made = driver()
    begun(made, [30])

    async def visit() -> tuple[int, ...]:
        answer = await made.generate([1, 5], SamplingParams(max_new_tokens=6, ignore_eos=True))
        return answer.output_token_ids

    visitor = made._loop.create_task(visit())
    made.step(3)
    assert made.pause(keep=False) == [(0, 0)]
    made.step(6, allowed=[0])  # no ticket has the engine, and a visitor has none
    assert len(visitor.result()) == 6
    assert made._loop is episodes_loop()  # as in the run's evaluations, so that both may use the same clients
    made.close()
    assert made.is_over


LOOKED_UP: list[int] = []  # by a tool whose results differ, as those of a search do


async def look_up() -> int:
    LOOKED_UP.append(4 + len(LOOKED_UP))
    return LOOKED_UP[-1]


async def two_turns_and_shared_work(engine: EngineClient, length: int) -> tuple[list[int], tuple[int, ...]]:
    def work(shared: EngineClient) -> Awaitable[list[Any]]:
        return asyncio.gather(shared.generate([9, 9, 9], max_new_tokens=2), remembered(look_up()))

    episode = Episode([2, 3, 4])
    episode.say(await engine.generate(episode.ids, max_new_tokens=length))
    turn, found = await engine.once("work", work)
    episode.hear([found])
    episode.say(await engine.generate(episode.ids, max_new_tokens=3))
    episode.hear([6])
    episode.say(await engine.generate(episode.ids, max_new_tokens=20))
    return episode.response_ids, turn.token_ids


def siblings_begun(made: PhasedDriver, journals: list[Journal]) -> None:
    siblings, sampling = Siblings(len(journals)), SamplingParams(ignore_eos=True)
    limits = EpisodeLimits(max_new_tokens=20, max_turns=3, max_tokens=100)
    for journal, length in zip(journals, [6, 2], strict=True):  # the second one is the first to ask for the work
        index = journal.sample_index
        engine = EngineClient(
            made, builtin_tokenizer(), seed=7, sample_index=index, sampling=sampling, limits=limits, siblings=siblings
        )
        made.begin(journal, partial(two_turns_and_shared_work, engine, length))


def test_work_for_all_siblings_is_found_after_a_kill_whoever_asks_first() -> None:
    whole, made, resumed = driver(), driver(), driver()
    siblings_begun(whole, [Journal(0, index, 0) for index in range(2)])
    expected = run_through(whole)
    LOOKED_UP.clear()
    journals = [Journal(0, index, 0) for index in range(2)]
    siblings_begun(made, journals)
    made.step(14)
    made.pause(keep=True)
    assert [sorted(map(str, journal.completions)) for journal in journals] == [["0", "1"], ["0", "1", "work/0"]]
    again = [Journal.from_state(journal.state_dict()) for journal in journals]
    siblings_begun(resumed, again)
    assert run_through(resumed) == expected
    assert ["work/0" in journal.completions for journal in again] == [False, True]
    assert [journal.results for journal in again] == [{}, {"work/1": 4}]
    assert [len(journal.versions_of_calls()) for journal in again] == [3, 4]
    for used in (whole, made, resumed):
        used.close()


def test_only_allowed_tickets_have_the_engine() -> None:
    made = driver()
    begun(made, [3, 3])
    made.step(8, [1])
    assert list(made.take_ended()) == [(1, 0)]
    made.step(8, [0])
    assert list(made.take_ended()) == [(0, 0)]
    made.close()


def test_a_tool_is_waited_for_while_nothing_generates() -> None:
    made = driver()

    async def slow() -> str:
        await asyncio.sleep(0.05)
        return "done"

    made.begin(Journal(0, 0, 0), slow)
    ended = {}
    while made.under_way:
        made.step(1, [0])
        ended |= made.take_ended()
    assert ended == {(0, 0): "done"}
    made.close()
