"""The driver on a scripted engine: what is submitted together, and what becomes of requests that nobody waits for."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from PIL import Image

from lightrl.engines.base import Completion, EngineGroup, EnginePrompt, SamplingParams
from lightrl.rollout.driver import EpisodeDriver, Wish, _merged
from lightrl.rollout.event_loop import run_episodes


class ScriptedEngine:
    """Finishes a request after as many steps as its prompt's first token says, with that token as the answer."""

    def __init__(self) -> None:
        self.version = 0
        self.submitted: list[tuple[tuple[int, ...], int, int]] = []  # (tokens, first sample, n)
        self.aborted: list[int] = []
        self.num_steps = 0
        self._running: dict[int, tuple[int, EnginePrompt, SamplingParams]] = {}

    def check_prompt(self, name: str, prompt: EnginePrompt, params: SamplingParams) -> None:
        if not prompt.token_ids:
            raise ValueError(f"{name} is empty")

    def submit(self, prompt: EnginePrompt, params: SamplingParams) -> int:
        self.submitted.append((prompt.token_ids, params.first_sample, params.n))
        request_id = len(self.submitted) - 1
        self._running[request_id] = (prompt.token_ids[0], prompt, params)
        return request_id

    def has_unfinished(self) -> bool:
        return bool(self._running)

    def step(self) -> list[Completion]:
        self.num_steps += 1
        done = []
        for request_id, (left, prompt, params) in list(self._running.items()):
            self._running[request_id] = (left - 1, prompt, params)
            if left == 1:
                del self._running[request_id]
                for index in range(params.first_sample, params.first_sample + params.n):
                    done.append(completion(request_id, index, prompt))
        return done

    def abort(self, request_ids: Any = None) -> list[Completion]:
        chosen = list(self._running) if request_ids is None else list(request_ids)
        self.aborted += chosen
        for request_id in chosen:
            self._running.pop(request_id)
        return []


def completion(request_id: int, index: int, prompt: EnginePrompt) -> Completion:
    return Completion(
        request_id=request_id,
        sample_index=index,
        prompt_token_ids=prompt.token_ids,
        output_token_ids=(100 * prompt.token_ids[0] + index,),
        logprobs=(0.0,),
        versions=(0,),
        finish_reason="stop",
    )


def driver() -> tuple[EpisodeDriver, ScriptedEngine]:
    engine = ScriptedEngine()
    return EpisodeDriver(engine, EngineGroup()), engine  # type: ignore[arg-type]


def sample(index: int, seed: int = 0) -> SamplingParams:
    return SamplingParams(first_sample=index, seed=seed)


def test_a_request_to_a_driver_whose_episodes_are_all_over_gets_no_answer() -> None:
    made, _ = driver()
    visits: list[asyncio.Task[Completion]] = []

    async def episode(job: int) -> int:
        if job:  # while another works on, as a visitor of the endpoint may
            visits.append(asyncio.ensure_future(made.generate((job,), sample(0))))
        return job

    assert made.run([0, 9], episode) == [0, 9]
    assert made.is_over
    assert visits[0].cancelled()

    async def late() -> str:
        try:
            await made.generate((1,), sample(0))
        except asyncio.CancelledError:
            return "no answer"
        return "an answer"

    assert run_episodes(late()) == "no answer"
    assert made.run([0], episode) == [0]


def test_siblings_share_a_request_and_others_do_not() -> None:
    made, engine = driver()

    async def episode(job: tuple[int, int, int]) -> int:
        token, index, seed = job
        return (await made.generate([token], sample(index, seed))).output_token_ids[0]

    jobs = [(2, 1, 0), (2, 0, 0), (3, 0, 0), (2, 3, 0), (2, 0, 7)]
    assert made.run(jobs, episode) == [201, 200, 300, 203, 200]
    # samples 0 and 1 of the same prompt and seed are one request; sample 3 leaves a gap; seed 7 is another draw
    assert sorted(engine.submitted) == [((2,), 0, 1), ((2,), 0, 2), ((2,), 3, 1), ((3,), 0, 1)]
    assert engine.num_steps == 3


def test_siblings_with_the_same_images_share_a_request() -> None:
    made, engine = driver()
    first, second = Image.new("RGB", (1, 1)), Image.new("RGB", (1, 1))

    async def episode(job: tuple[int, Image.Image]) -> None:
        index, image = job
        await made.generate(EnginePrompt(token_ids=(2,), images=(image,)), sample(index))

    made.run([(0, first), (1, first), (2, first), (0, second), (1, second)], episode)
    assert sorted(engine.submitted) == [((2,), 0, 2), ((2,), 0, 3)]


def test_samples_that_are_continued_share_no_request() -> None:
    async def wishes() -> list[Wish]:
        loop, prompt = asyncio.get_running_loop(), EnginePrompt(token_ids=(2,))
        begun = [completion(0, index, prompt) for index in range(2)]
        return [Wish(prompt, sample(item.sample_index), loop.create_future(), item) for item in begun]

    made = asyncio.run(wishes())
    assert [(params.n, begun) for (_, params, begun), _ in _merged(made)] == [(1, item.partial) for item in made]


def test_requests_of_consecutive_passes_share_a_step() -> None:
    made, engine = driver()

    async def episode(job: int) -> None:
        for _ in range(2 * job):
            await asyncio.sleep(0)
        await made.generate([1], sample(0, seed=job))

    made.run(range(5), episode)
    assert engine.num_steps == 1


def test_a_request_that_is_taken_back_at_once_does_not_reach_the_engine() -> None:
    made, engine = driver()

    async def episode(job: int) -> None:
        waiting = asyncio.ensure_future(made.generate([job], sample(0)))
        await asyncio.sleep(0)
        waiting.cancel()
        await made.generate([1], sample(0))

    made.run([50], episode)
    assert engine.submitted == [((1,), 0, 1)]


def test_the_engine_goes_on_while_a_tool_runs() -> None:
    made, engine = driver()

    async def episode(job: str) -> str:
        if job == "tool":
            await asyncio.sleep(0.05)
            await made.generate([1], sample(0))
            return "tool"
        for _ in range(3):
            await made.generate([2], sample(0))
        return f"{engine.num_steps} steps"

    assert made.run(["turns", "tool"], episode) == ["6 steps", "tool"]


def test_a_long_wait_for_something_outside_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("lightrl.rollout.driver._LONG_S", 0.1)
    made, _ = driver()

    async def episode(wait_s: float) -> None:
        await made.generate([1], sample(0))
        await asyncio.sleep(wait_s)

    made.run([0.0, 0.05], episode)
    assert caplog.messages == []
    made.run([0.0, 0.5, 0.5], episode)
    [message] = caplog.messages
    assert "2 episodes wait for something outside" in message
    assert "--rollout.episode_timeout_s" in message


def test_a_request_that_ran_out_of_time_is_taken_back() -> None:
    made, engine = driver()

    async def episode(job: int) -> str:
        async def slow_tool() -> None:
            while engine.num_steps < 3:
                await asyncio.sleep(0)

        if job == 0:  # gives up after three steps of a request that takes 50
            waiting = asyncio.ensure_future(made.generate([50], sample(0)))
            await slow_tool()
            waiting.cancel()
            return "gave up"
        return str((await made.generate([8], sample(0))).output_token_ids[0])

    assert made.run([0, 1], episode) == ["gave up", "800"]
    assert engine.aborted == [1]  # the request that was submitted second
    assert engine.num_steps == 8


def test_a_bad_prompt_raises_in_its_episode_alone() -> None:
    made, _ = driver()

    async def episode(job: list[int]) -> str:
        try:
            return str((await made.generate(job, sample(0))).output_token_ids[0])
        except ValueError as error:
            return str(error)

    assert made.run([[], [1]], episode) == ["the prompt of a turn is empty", "100"]


def test_an_error_leaves_nothing_in_the_engine() -> None:
    made, engine = driver()

    async def episode(job: int) -> None:
        if job == 0:
            await made.generate([1], sample(0))
            raise KeyError("a mistake in the caller")
        await made.generate([50], sample(1))

    with pytest.raises(KeyError, match="a mistake in the caller"):
        made.run([0, 1], episode)
    assert not engine.has_unfinished()


class Sending(EngineGroup):
    """A group that keeps what its first rank sends."""

    def broadcast(self, item: Any) -> Any:
        SENT.append(item)
        return item


SENT: list[Any] = []


def test_episodes_that_leave_settings_of_torch_changed_are_told_to_the_whole_group() -> None:
    """Before the last tick: after it, the other ranks would wait for results."""

    async def careless(job: int) -> None:
        torch.set_grad_enabled(False)

    SENT.clear()
    told = r"Code of the episodes \(.*\) has changed settings of torch .*is_grad_enabled\(\) from True to False"
    try:
        with pytest.raises(RuntimeError, match=told):
            EpisodeDriver(ScriptedEngine(), Sending()).run([0], careless)  # type: ignore[arg-type]
    finally:
        torch.set_grad_enabled(True)
    assert "has changed settings of torch" in SENT[-1].failure


def test_a_rank_without_episodes_returns_none() -> None:
    made, engine = driver()

    async def episode(job: int) -> int:
        return job

    assert made.run([], episode) == []
    assert engine.num_steps == 0


def test_episodes_run_inside_a_loop_as_in_a_notebook() -> None:
    mine, _ = driver()

    async def episode(job: int) -> int:
        return (await mine.generate([job], sample(0))).output_token_ids[0]

    async def cell() -> list[int]:
        return mine.run([2, 3], episode)

    assert asyncio.run(cell()) == mine.run([2, 3], episode) == [200, 300]
