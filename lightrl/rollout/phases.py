"""Episodes that outlive a step: they wait while the model trains, and continue under the new weights."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine
from typing import Any

from lightrl.engines.base import AnyPrompt, Completion, EngineGroup, SamplingParams, as_prompt
from lightrl.engines.colocated import ColocatedEngine
from lightrl.rewards.async_scoring import run_until_done
from lightrl.rollout.driver import EpisodeDriver, Wish, _Tick
from lightrl.rollout.event_loop import episodes_loop
from lightrl.rollout.journal import CURRENT, Journal, Number, next_shared


class PhasedDriver(EpisodeDriver):
    """Drives episodes in phases of a given number of engine steps. Between two phases the engine has no request.

    The first rank of the engine's group runs the episodes; on the other ranks `step` follows it.
    """

    def __init__(self, engine: ColocatedEngine, group: EngineGroup) -> None:
        super().__init__(engine, group)
        self._loop = episodes_loop()
        self._tasks: dict[tuple[int, int], asyncio.Task[Any]] = {}
        self._begun: dict[tuple[int, int], Journal] = {}  # of the tasks, which all see it
        self._journals: dict[asyncio.Future[Completion], tuple[Journal, Number]] = {}  # and the number of the call
        self._allowed: Collection[int] | None = None  # tickets that the engine works on; None: all

    def begin(self, journal: Journal, start: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        """Starts the code of an episode, which runs as far as its journal has answers."""
        journal.rewind()
        journal.begun = self._begun

        async def run() -> Any:
            CURRENT.set(journal)
            return await start()

        self._begun[journal.key] = journal
        self._tasks[journal.key] = self._loop.create_task(run())

    @property
    def under_way(self) -> Collection[tuple[int, int]]:
        """The episodes that have begun and whose results were not taken yet."""
        return self._tasks.keys()

    def take_ended(self) -> dict[tuple[int, int], Any]:
        """Returns the results of the episodes that have ended, each only once."""
        ended = {key: task for key, task in self._tasks.items() if task.done()}
        for key in ended:
            del self._tasks[key], self._begun[key]
        return {key: task.result() for key, task in ended.items()}

    async def generate(self, prompt: AnyPrompt, params: SamplingParams) -> Completion:
        """Samples one completion, or returns the one in the episode's journal."""
        journal = CURRENT.get()
        if journal is None:  # a visitor of the endpoint, who belongs to no episode
            return await super().generate(prompt, params)
        journal, number = self._place_of(journal)
        checked = as_prompt(prompt)
        journal.forget_other(number, checked)
        if number in journal.completions:
            return journal.completions[number]
        self.engine.check_prompt("the prompt of a turn", checked, params)
        answer = self._loop.create_future()
        self._journals[answer] = (journal, number)
        self._ask(Wish(checked, params, answer, journal.partials.get(number), journal.ticket))
        try:
            completion: Completion = await answer
        finally:
            del self._journals[answer]
        journal.partials.pop(number, None)  # but not when the driver is closed: a checkpoint may still need it
        journal.completions[number] = completion
        return completion

    def _place_of(self, journal: Journal) -> tuple[Journal, Number]:
        """Returns the journal that holds the next call, and its number there; any sibling's may hold one for all."""
        number = next_shared()
        if number is None:
            return journal, journal.next_call()
        journal = journal.holder(number)
        journal.shared.append(number)
        return journal, number

    # ---- Phases ------------------------------------------------------------------------------------------------

    def step(self, count: int, allowed: Collection[int] | None = None) -> None:
        """Steps the engine `count` times; every rank of its group calls it.

        Args:
            allowed: Tickets that the engine works on; None: all.
        """
        self._allowed = allowed
        if self._group.rank:
            for _ in range(count):
                self._follow_once()
            return
        try:
            run_until_done(self._loop, self._lead_steps(count))
        except BaseException as error:
            self._group.broadcast(_Tick([], [], failure=f"{type(error).__name__}: {error}", is_last=True))
            raise

    async def _lead_steps(self, count: int) -> None:
        for _ in range(count):
            await self._let_episodes_go_on()
            if not (self._waiting or self._has_wishes) and (left := [t for t in self._tasks.values() if not t.done()]):
                await self._wait_for_a_wish(left)
            self._tick()
        await self._let_episodes_go_on()

    @property
    def _has_wishes(self) -> bool:
        return any(self._may_run(wish) for wish in self._wishes)

    def _may_run(self, wish: Wish) -> bool:
        return self._allowed is None or wish.ticket < 0 or wish.ticket in self._allowed

    def _take_wishes(self) -> list[Wish]:
        taken = [wish for wish in self._wishes if self._may_run(wish)]
        self._wishes = [wish for wish in self._wishes if not self._may_run(wish)]
        return taken

    def pause(self, *, keep: bool) -> list[tuple[int, int]]:
        """Takes every request out of the engine; every rank of its group calls it.

        With keep, the tokens so far are kept and continued in the next phase. Otherwise the episodes are dropped, and
        the first rank of the group gets their names.
        """
        stopped = self.engine.abort()
        if self._group.rank:
            return []
        for completion in stopped:
            wish = self._waiting.get((completion.request_id, completion.sample_index))
            if wish is None or completion.finish_reason != "abort":
                if wish is not None:
                    self._answer(completion)
                continue
            del self._waiting[completion.request_id, completion.sample_index]
            if not wish.answer.done():
                self._put_back(wish, completion)
        assert not self._waiting, "the engine gave every sample back"
        return [] if keep else self._drop()

    def _put_back(self, wish: Wish, completion: Completion) -> None:
        partial = completion if completion.output_token_ids else None
        if partial is not None and wish.answer in self._journals:
            journal, number = self._journals[wish.answer]
            journal.partials[number] = partial
        self._wishes.append(wish._replace(partial=partial))

    def _drop(self) -> list[tuple[int, int]]:
        dropped = [key for key, task in self._tasks.items() if not task.done()]
        self.end(dropped)
        return dropped

    def end(self, keys: Collection[tuple[int, int]]) -> None:
        """Ends the code of episodes and forgets their requests; call it between two phases."""
        tasks = [self._tasks.pop(key) for key in keys if key in self._tasks]
        for key in keys:
            self._begun.pop(key, None)
        for task in tasks:
            task.cancel()
        if tasks:
            run_until_done(self._loop, asyncio.wait(tasks))
        tickets = {ticket for ticket, _ in keys}
        self._wishes = [wish for wish in self._wishes if wish.ticket not in tickets]

    def close(self) -> None:
        """Ends the episodes."""
        super().close()
        self._drop()
