"""Runs many episodes at once against one engine: an asyncio loop that steps the engine when every episode waits.

Between two engine steps every episode proceeds as far as it can, so their requests share the next step. No episode
calls a collective: the first rank of an engine's group runs the episodes of all its ranks and tells the others what to
submit. The draws of an episode depend on its seed alone, never on the other episodes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

from lightrl.engines.base import AnyPrompt, Completion, EngineGroup, EnginePrompt, SamplingParams, as_prompt
from lightrl.engines.colocated import ColocatedEngine
from lightrl.rollout.event_loop import run_episodes
from lightrl.torch_settings import settings_kept

logger = logging.getLogger(__name__)

Job = TypeVar("Job")
Result = TypeVar("Result")

_SETTLING_PASSES = 3  # idle passes of the loop, without a request of any episode, before the engine is stepped
_POLL_S = 0.02  # longest wait for a tool while the engine has nothing to do
_LONG_S = 600.0  # such a wait is warned of


Request = tuple[Any, ...]  # arguments of ColocatedEngine.submit: prompt, parameters, and the completion to continue


class Wish(NamedTuple):
    """A sample that an episode waits for."""

    prompt: EnginePrompt
    params: SamplingParams  # of one sample
    answer: asyncio.Future[Completion]
    partial: Completion | None = None  # the beginning of the sample, to be continued
    ticket: int = -1  # of the episode, if the run has tickets


@dataclass(slots=True)
class _Tick:
    """Work that the ranks of a group do together: abort requests, submit others, and step the engine."""

    aborted: list[int]
    submitted: list[Request]
    failure: str | None = None  # if the first rank has failed: why; the others must not wait for it
    is_last: bool = False


class EpisodeDriver:
    """Drives an engine for the episodes of its group of ranks."""

    def __init__(self, engine: ColocatedEngine, group: EngineGroup) -> None:
        self.engine = engine
        self.num_steps = 0  # of the engine
        self.is_over = False  # whether it makes no further step: who still asks, such as a visitor, gets no answer
        self._group = group
        self._wishes: list[Wish] = []
        self._waiting: dict[tuple[int, int], Wish] = {}  # by request and sample
        self._has_cancelled = False  # whether an episode has stopped waiting for a sample that it requested
        self._num_idle = 0  # polls since the last step of the engine; no clock, as a model may train meanwhile
        self._asked: asyncio.Future[None] | None = None  # resolved by the next wish, while the engine has nothing to do

    def run(self, jobs: Sequence[Job], start: Callable[[Job], Coroutine[Any, Any, Result]]) -> list[Result]:
        """Runs this rank's jobs and returns the results of start(); every rank of the engine's group calls it.

        Args:
            jobs: The jobs of this rank. They must be picklable, because the first rank of the group runs all jobs.
            start: Begins the episode of a job. An exception in it ends the run, so it must catch errors of episodes.
        """
        self.is_over = False
        parts = self._group.gather(list(jobs))
        everything = [job for part in parts for job in part]
        results: list[Result] | None = None
        if self._group.rank == 0:
            results = run_episodes(self._lead([start(job) for job in everything]))
        else:
            self._follow()
        results = self._group.broadcast(results)
        assert results is not None
        first = sum(len(part) for part in parts[: self._group.rank])
        return results[first : first + len(parts[self._group.rank])]

    async def generate(self, prompt: AnyPrompt, params: SamplingParams) -> Completion:
        """Samples one completion for an episode that run() has started. A bad prompt raises an error in the episode."""
        checked = as_prompt(prompt)
        self.engine.check_prompt("the prompt of a turn", checked, params)
        wish = Wish(checked, params, asyncio.get_running_loop().create_future())
        self._ask(wish)
        return await wish.answer

    def _ask(self, wish: Wish) -> None:
        if self.is_over:
            wish.answer.cancel()
            return
        self._wishes.append(wish)
        wish.answer.add_done_callback(self._note_cancelled)
        if self._asked is not None and not self._asked.done():
            self._asked.set_result(None)

    def _note_cancelled(self, answer: asyncio.Future[Completion]) -> None:
        self._has_cancelled |= answer.cancelled()

    # ---- The first rank of the group ---------------------------------------------------------------------------

    async def _lead(self, episodes: Iterable[Awaitable[Result]]) -> list[Result]:
        tasks = [asyncio.ensure_future(episode) for episode in episodes]
        try:
            with settings_kept("Code of the episodes (a workflow, or its environment, tools, user or agent)"):
                while not all(task.done() for task in tasks):
                    await self._let_episodes_go_on()
                    if self._wishes or self._waiting:
                        self._tick()
                    elif unfinished := [task for task in tasks if not task.done()]:
                        await self._wait_for_a_wish(unfinished)
            results = [task.result() for task in tasks]
        except BaseException as error:
            for task in tasks:
                task.cancel()
            self._group.broadcast(_Tick([], [], failure=f"{type(error).__name__}: {error}", is_last=True))
            self._drop_leftovers()
            self.close()
            raise
        self._group.broadcast(_Tick(self._unwanted(), [], is_last=True))
        self._drop_leftovers()
        self.close()
        await self._let_episodes_go_on()  # so that those who get no answer are told
        return results

    def close(self) -> None:
        """Cancels all open requests, and from now on every new one at once."""
        self.is_over = True
        for wish in [*self._wishes, *self._waiting.values()]:
            wish.answer.cancel()
        self._wishes, self._waiting = [], {}

    async def _wait_for_a_wish(self, unfinished: Collection[asyncio.Future[Any]]) -> None:
        """Waits a moment until an episode requests something or ends, because the engine has nothing to do."""
        self._num_idle += 1
        if self._num_idle == round(_LONG_S / _POLL_S):
            logger.warning(
                "The engine has had nothing to do for %g s or more: %d episodes wait for something outside, such as a "
                "tool, an environment or an agent. --rollout.episode_timeout_s ends episodes that take too long.",
                *(_LONG_S, len(unfinished)),
            )
        self._asked = asyncio.get_running_loop().create_future()
        await asyncio.wait([*unfinished, self._asked], timeout=_POLL_S, return_when=asyncio.FIRST_COMPLETED)

    async def _let_episodes_go_on(self) -> None:
        quiet = 0
        while quiet < _SETTLING_PASSES:
            before = len(self._wishes)
            await asyncio.sleep(0)
            quiet = quiet + 1 if len(self._wishes) == before else 0

    def _tick(self) -> None:
        """Submits the episodes' requests, steps the engine once, and answers episodes whose samples are complete."""
        merged = _merged([wish for wish in self._take_wishes() if not wish.answer.done()])
        tick = self._group.broadcast(_Tick(self._unwanted(), [request for request, _ in merged]))
        first_id, completions = self._do(tick)
        for request_id, ((_, params, *_), wishes) in enumerate(merged, start=first_id):
            for offset, wish in enumerate(wishes):
                self._waiting[request_id, params.first_sample + offset] = wish
        for completion in completions:
            self._answer(completion)

    def _take_wishes(self) -> list[Wish]:
        """Returns the requests that this tick submits."""
        wishes, self._wishes = self._wishes, []
        return wishes

    def _answer(self, completion: Completion) -> None:
        answer = self._waiting.pop((completion.request_id, completion.sample_index)).answer
        if not answer.done():  # it is done if a time-out cancelled it
            answer.set_result(completion)

    def _unwanted(self) -> list[int]:
        """Removes and returns the requests that no episode waits for any longer."""
        if not self._has_cancelled:
            return []
        self._has_cancelled = False
        wanted = {key[0] for key, wish in self._waiting.items() if not wish.answer.done()}
        unwanted = sorted({key[0] for key in self._waiting} - wanted)
        self._waiting = {key: wish for key, wish in self._waiting.items() if key[0] in wanted}
        return unwanted

    # ---- All ranks of the group --------------------------------------------------------------------------------

    def _follow(self) -> None:
        while not self._follow_once():
            pass
        self._drop_leftovers()

    def _follow_once(self) -> bool:
        """Carries out one tick of the first rank; returns whether it was the last."""
        tick: _Tick = self._group.broadcast(_Tick([], []))
        if tick.failure is not None:
            self._drop_leftovers()
            raise RuntimeError(f"The first rank of the engine's group has failed: {tick.failure}")
        if not tick.is_last:
            self._do(tick)
        return tick.is_last

    def _drop_leftovers(self) -> None:
        """Aborts the requests that cancelled episodes have left in the engine."""
        if self.engine.has_unfinished():
            self.engine.abort()

    def _do(self, tick: _Tick) -> tuple[int, list[Completion]]:
        """Carries out a tick; returns the id of the first submitted request and the completions that are finished."""
        if tick.aborted:
            self.engine.abort(tick.aborted)
        ids = [self.engine.submit(*request) for request in tick.submitted]
        if not self.engine.has_unfinished():
            return 0, []
        self.num_steps += 1
        self._num_idle = 0
        return (ids[0] if ids else 0), self.engine.step()


def _merged(wishes: Sequence[Wish]) -> list[tuple[Request, list[Wish]]]:
    """Merges samples that differ only in their index into one request, so that their prompt is computed once."""
    merged: list[tuple[Request, list[Wish]]] = []
    last: dict[Any, int] = {}  # index in merged of the newest request for the same prompt and settings
    for wish in sorted(wishes, key=lambda wish: wish.params.first_sample):
        settings = replace(wish.params, first_sample=0)
        media = (_identities(wish.prompt.images), _identities(wish.prompt.videos))  # siblings have the same objects
        key = id(wish) if wish.partial is not None else (wish.prompt.token_ids, media, settings)
        if key in last:
            (prompt, params), siblings = merged[last[key]]
            if params.first_sample + params.n == wish.params.first_sample:
                merged[last[key]] = ((prompt, replace(params, n=params.n + 1)), [*siblings, wish])
                continue
        last[key] = len(merged)
        behind = () if wish.partial is None else (wish.partial,)
        merged.append(((wish.prompt, wish.params, *behind), [wish]))
    return merged


def _identities(objects: Sequence[Any]) -> tuple[int, ...]:
    return tuple(map(id, objects))
