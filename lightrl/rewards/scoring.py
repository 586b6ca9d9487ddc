"""Runs one reward over samples, whatever its kind. What fails becomes an error in the sample's place, never a 0."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from lightrl.records import Sample
from lightrl.rewards.failures import FailureBudget, Outcome, RewardError, failed, score_outcome, wrong_count
from lightrl.rewards.kinds import AnyReward, kind_of, reward_name
from lightrl.rewards.time_limit import TimeLimitError, time_limit
from lightrl.rewards.worker_pool import WorkerPool


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringLimits:
    """What a reward may take."""

    timeout_s: float = 0.0  # for each sample; 0 sets no limit
    concurrency: int = 32  # calls of an async reward that wait at the same time
    num_workers: int = 1  # processes of an isolated reward


class RewardRunner:
    """A reward that is ready to be run. Its signature is checked here, before anything expensive."""

    def __init__(self, reward: AnyReward, limits: ScoringLimits | None = None, *, name: str = "") -> None:
        self.reward: Any = reward
        self.name = name or reward_name(reward)
        self.kind = kind_of(reward)
        self._limits = limits or ScoringLimits()
        self._concurrency = min(self._limits.concurrency, self.kind.max_concurrency or self._limits.concurrency)
        self._loop: asyncio.AbstractEventLoop | None = (
            None  # one for all calls: a session that the user keeps hangs on it
        )
        self._pool: WorkerPool | None = None
        if self.kind.isolation is not None:
            self._pool = WorkerPool(
                reward, self.kind.isolation, num_workers=self._limits.num_workers, timeout_s=self._limits.timeout_s
            )

    def run(self, samples: Sequence[Sample], budget: FailureBudget) -> list[Outcome]:
        """An outcome for each sample. Raises RewardError as soon as the budget is exceeded."""
        units = self._units(samples)
        if self._pool is not None:
            outcomes = self._checked_all(units, self._pool.run(samples), budget)
        elif self.kind.is_async:
            outcomes = self._run_async(units, budget)
        else:
            outcomes = [self._recorded(self._call(unit, budget), budget) for unit in units]
        return [outcome for unit in outcomes for outcome in unit]

    def close(self) -> None:
        if self._loop is not None:
            self._loop.close()
        if self._pool is not None:
            self._pool.close()
        self._loop = self._pool = None

    def _units(self, samples: Sequence[Sample]) -> list[list[Sample]]:
        """The samples of each call."""
        if self.kind.scope == "batch":
            return [list(samples)] if samples else []
        if self.kind.scope == "group":
            return [list(group) for _, group in groupby(samples, key=lambda sample: sample.position)]
        return [[sample] for sample in samples]

    def _recorded(self, outcomes: list[Outcome], budget: FailureBudget) -> list[Outcome]:
        budget.record(outcomes)
        return outcomes

    # ---- Plain -------------------------------------------------------------------------------------------------

    def _call(self, unit: list[Sample], budget: FailureBudget) -> list[Outcome]:
        try:
            with time_limit(self._limits.timeout_s * len(unit)):
                returned = self.reward(unit[0] if self.kind.scope == "sample" else unit)
                values = [returned] if self.kind.scope == "sample" else list(returned)
        except Exception as error:
            if self._goes_on_singly(unit, budget):
                return [outcome for sample in unit for outcome in self._call([sample], budget)]
            return [failed(self.name, unit, error)] * len(unit)
        return self._checked(unit, values)

    def _goes_on_singly(self, unit: list[Sample], budget: FailureBudget) -> bool:
        """Where failures are allowed, a bad sample costs only itself, however the ranks have split the batch."""
        return self.kind.scope == "batch" and len(unit) > 1 and budget.max_failures > 0

    def _checked(self, unit: list[Sample], values: list[Any]) -> list[Outcome]:
        if len(values) != len(unit):
            return [wrong_count(self.name, unit, len(values))] * len(unit)
        return [score_outcome(self.name, sample, value) for sample, value in zip(unit, values, strict=True)]

    # ---- Isolated ----------------------------------------------------------------------------------------------

    def _checked_all(self, units: list[list[Sample]], values: list[Any], budget: FailureBudget) -> list[list[Outcome]]:
        outcomes: list[list[Outcome]] = []
        for unit, value in zip(units, values, strict=True):
            is_error = isinstance(value, Exception)
            found = failed(self.name, unit, value) if is_error else score_outcome(self.name, unit[0], value)
            outcomes.append(self._recorded([found], budget))
        return outcomes

    # ---- Async -------------------------------------------------------------------------------------------------

    def _run_async(self, units: list[list[Sample]], budget: FailureBudget) -> list[list[Outcome]]:
        if not units:
            return []
        self._loop = self._loop or asyncio.new_event_loop()
        rounds = 1 + math.ceil(len(units) / self._concurrency)
        try:
            # The limits of the single calls cannot end one that blocks the loop itself.
            with time_limit(self._limits.timeout_s * rounds * max(map(len, units))):
                return self._loop.run_until_complete(self._gather(units, budget))
        except TimeLimitError as error:
            raise RewardError(
                f"The reward {self.name!r} is async and blocks: it waits for something without await."
            ) from error

    async def _gather(self, units: list[list[Sample]], budget: FailureBudget) -> list[list[Outcome]]:
        gate = asyncio.Semaphore(self._concurrency)

        async def run_one(unit: list[Sample]) -> list[Outcome]:
            async with gate:
                outcomes = await self._call_async(unit, budget)
            return self._recorded(outcomes, budget)

        tasks = [asyncio.ensure_future(run_one(unit)) for unit in units]
        try:
            return await asyncio.gather(*tasks)
        finally:  # where one exceeded the budget the others are not waited for
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _call_async(self, unit: list[Sample], budget: FailureBudget) -> list[Outcome]:
        timeout_s = self._limits.timeout_s * len(unit)
        call = self.reward(unit[0] if self.kind.scope == "sample" else unit)
        try:
            returned = await asyncio.wait_for(call, timeout_s or None)
            values = [returned] if self.kind.scope == "sample" else list(returned)
        except Exception as error:
            if self._goes_on_singly(unit, budget):
                return [outcome for sample in unit for outcome in await self._call_async([sample], budget)]
            if isinstance(error, asyncio.TimeoutError):
                error = TimeLimitError(f"no result after {timeout_s:g} s")
            return [failed(self.name, unit, error)] * len(unit)
        return self._checked(unit, values)


def score(reward: AnyReward, samples: Sequence[Sample]) -> list[float]:
    """The reward of each sample. Raises RewardError naming the reward, the prompt and the response it failed on."""
    runner = RewardRunner(reward)
    try:
        outcomes = runner.run(samples, FailureBudget())
    finally:
        runner.close()
    return [_require_number(outcome) for outcome in outcomes]


def _require_number(outcome: Outcome) -> float:
    if isinstance(outcome, RewardError):
        raise outcome
    return outcome
