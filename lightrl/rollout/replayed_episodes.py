"""Plays the episodes of an asynchronous run again by its schedule: each call gets its tokens of each version."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from lightrl.engines.base import AnyPrompt, Completion, EngineGroup, SamplingParams, as_prompt
from lightrl.engines.colocated import ColocatedEngine
from lightrl.engines.stop_strings import cut_to
from lightrl.records import Sample, Status
from lightrl.rollout.driver import Wish
from lightrl.rollout.episode import Episode
from lightrl.rollout.episode_collector import EpisodeCollector, EpisodeFailure, EpisodeJob
from lightrl.rollout.journal import CURRENT, Journal
from lightrl.rollout.phases import PhasedDriver
from lightrl.rollout.recorded_schedule import RecordedGroup, RecordedSample
from lightrl.rollout.replayed_collector import ReplayedCollector

_PATIENCE_S = 300.0  # without a token or an end, after which an episode is assumed to wait in vain

_FAILED = EpisodeFailure("It had failed in the recorded run.")
_Name = tuple[int, int]  # ticket and sample
_Calls = tuple[tuple[tuple[int, int], ...], ...]


class ReplayDriver(PhasedDriver):
    """Gives each call of an episode as many tokens of each version as its record says."""

    def __init__(self, engine: ColocatedEngine) -> None:
        super().__init__(engine, EngineGroup())
        self._calls: dict[_Name, _Calls] = {}
        self._version = -1
        self._later: dict[int, list[asyncio.Future[None]]] = {}  # calls that continue under a later version
        self._num_due: dict[int, int] = {}  # by version: the number of parts of calls that are still to be made

    def play(self, journal: Journal, calls: _Calls, start: Any) -> None:
        """Begins an episode whose calls were recorded."""
        self._calls[journal.key] = calls
        for version in (version for call in calls for version, count in call if count):
            self._num_due[version] = self._num_due.get(version, 0) + 1
        self.begin(journal, start)

    def make(self, version: int) -> None:
        """Makes all tokens of a version; each episode runs until it needs a later version."""
        self._version = version
        for future in self._later.pop(version, ()):
            future.set_result(None)
        changed, before = time.monotonic(), None
        while self._num_due.get(version) and any(not task.done() for task in self._tasks.values()):
            self.step(1)
            self._require_no_failure()
            state = (self._num_due.get(version), self.engine.has_unfinished())
            if state != before or state[1]:
                changed, before = time.monotonic(), state
            if time.monotonic() - changed > _PATIENCE_S:
                raise _unlike("its episodes do not ask for what they asked for then")

    def finish(self, names: Sequence[_Name]) -> dict[_Name, Any]:
        """Returns the results of these episodes, all of whose tokens are made."""
        started = time.monotonic()
        while not all(self._tasks[name].done() for name in names):
            self.step(1)
            if time.monotonic() - started > _PATIENCE_S:
                raise _unlike("an episode goes on where it had ended")
        self._require_no_failure()
        return {name: self._tasks.pop(name).result() for name in names}

    def _require_no_failure(self) -> None:
        for name, task in self._tasks.items():
            if task.done() and isinstance(made := task.result(), EpisodeFailure):
                raise _unlike(f"sample {name} fails here, and did not. It says:\n{made.details}")

    async def generate(self, prompt: AnyPrompt, params: SamplingParams) -> Completion:
        """Samples the parts of a call one after another, each under its own weights."""
        journal = CURRENT.get()
        assert journal is not None, "begin() has set it"
        (journal, number), calls = self._place_of(journal), self._calls[journal.key]
        if isinstance(number, str):
            number = -len(journal.shared)
        if not -len(calls) <= number < len(calls) or not calls[number]:
            what = f"turn {number + 1}" if number >= 0 else "another call for all siblings"
            raise _unlike(f"sample {journal.key} asks for {what}, which it did not")
        made: Completion | None = None
        total = 0
        for version, count in calls[number]:
            if version > self._version:
                self._later.setdefault(version, []).append(future := self._loop.create_future())
                await future
            total += count
            asked = replace(params, max_new_tokens=max(1, total))
            made = await self._part(prompt, asked, made, journal.ticket)
            if not total:
                return cut_to(made, 0, "length")  # a turn without a token, of which the engine only gives the prompt
            self._num_due[version] -= 1
        assert made is not None, "a call has a run"
        return made

    async def _part(
        self, prompt: AnyPrompt, params: SamplingParams, made: Completion | None, ticket: int
    ) -> Completion:
        checked = as_prompt(prompt)
        self.engine.check_prompt("the prompt of a turn", checked, params)
        answer = self._loop.create_future()
        self._ask(Wish(checked, params, answer, made, ticket))
        completion: Completion = await answer
        return completion


class ReplayedEpisodes(ReplayedCollector):
    """Replaces the collector of a trainer whose samples are made by a workflow."""

    _collector: EpisodeCollector
    _driver: ReplayDriver | None = None
    _played: dict[_Name, Episode | EpisodeFailure | None]  # of the step, once its tokens are made

    def close(self) -> None:
        """Ends the unfinished episodes."""
        if self._driver is not None:
            self._driver.close()

    def _make(self, engine: ColocatedEngine, version: int) -> None:
        driver = self._driver = self._driver or ReplayDriver(engine)
        for batch in self._batches[version:]:
            for group in (group for _, group in batch if group.start_version == version):
                self._begin(driver, group)
        driver.make(version)
        self._played = driver.finish(
            [
                (group.ticket, sample.sample_index)
                for _, group in self._batches[version]
                for sample in group.samples
                if sample.status is not Status.FAILED
            ]
        )

    def _begin(self, driver: ReplayDriver, group: RecordedGroup) -> None:
        """Starts the code of a group's episodes, except for those that failed, for example by a time-out."""
        played = [sample for sample in group.samples if sample.status is not Status.FAILED]
        for sample in played:
            job = self._job(group, sample, group.ticket)._replace(num_siblings=len(played))
            journal = Journal(group.ticket, sample.sample_index, group.start_version)
            driver.play(journal, sample.calls, partial(self._collector.play, driver, job))

    def _job(self, group: RecordedGroup, sample: RecordedSample, position: int) -> EpisodeJob:
        prompt, seed = self._prompt(group), self._seed(group.ticket)
        return EpisodeJob(position, prompt, sample.sample_index, seed, self._sampling, 0)

    def _sample(self, position: int, group: RecordedGroup, sample: RecordedSample) -> Sample:
        name = (group.ticket, sample.sample_index)
        made = self._played.pop(name, None) if sample.status is not Status.FAILED else _FAILED
        found = self._collector.as_sample(self._job(group, sample, position), made)
        return replace(found, ticket=group.ticket, start_version=group.start_version)


def _unlike(what: str) -> ValueError:
    return ValueError(
        f"The run cannot be repeated: {what} in the recorded run. What an episode does between two turns must depend "
        "on what it heard alone."
    )
