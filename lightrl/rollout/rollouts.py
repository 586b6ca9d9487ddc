"""Rollouts for programs without a trainer: AReaL's rollout_batch, submit, wait, prepare_batch, pause and resume.

Every rank makes the same calls with the same prompts, and gets the samples of its part of them.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from lightrl.data.prompts import build_prompts
from lightrl.engines.base import SamplingParams
from lightrl.metrics import Statistics
from lightrl.records import Prompt, Sample
from lightrl.rewards import AnyReward
from lightrl.rewards.episode_reward import episode_reward
from lightrl.rewards.reward_set import RewardSet
from lightrl.rollout.client import EpisodeLimits
from lightrl.rollout.episode_collector import EpisodeJob
from lightrl.rollout.phases import PhasedDriver
from lightrl.rollout.schedule import Schedule
from lightrl.rollout.scheduled_collector import Filter, Pace, ScheduledCollector, SingleTurn
from lightrl.rollout.scheduler import AsyncScheduler, Rules, admissible, forced_first
from lightrl.rollout.workflow import Workflow
from lightrl.strategy import StrategyBase

Datum = Prompt | Mapping[str, Any]  # a prompt, or the fields of a record of a data set


class WaitTimeoutError(TimeoutError):
    """wait() ran out of time; the prompts that it waited for continue in the next call."""


class Rollouts:
    """Samples prompts with workflows, either at once or while the model trains.

    The tensors have a row for each sample of this rank: input_ids, attention_mask, loss_mask, logprobs and versions are
    [S, L], rewards and group_ids are [S]. train_batch accepts them.
    """

    def __init__(
        self,
        strategy: StrategyBase,
        workflow: Workflow | None = None,
        *,
        batch_size: int,
        group_size: int = 1,
        max_new_tokens: int,
        temperature: float = 1.0,
        reward: AnyReward | RewardSet = episode_reward,
        max_staleness: int = 0,
        max_concurrent: int = 0,
        keep: Filter | None = None,
        max_turns: int = 8,
        timeout_s: float = 0.0,
        agree_every: int = 16,
        seed: int = 0,
        sampling: SamplingParams | None = None,
    ) -> None:
        """Begins without any prompts. The strategy must have an engine and a tokenizer.

        Args:
            workflow: Makes a sample if a call names no workflow; None: one response to the prompt.
            batch_size: Prompts that an update learns from, over all ranks.
            group_size: Samples of each prompt.
            max_new_tokens: Largest number of tokens in a turn.
            temperature: Sampling temperature of the turns.
            reward: Scores the samples; by default a sample keeps the reward that the workflow gave.
            max_staleness: Number of batches that may be under way in addition to the next one: an update learns from
                prompts that were started at most this many updates earlier.
            max_concurrent: Largest number of prompts that run at once, over all ranks; 0: no limit.
            keep: Decides whether a scored group may be learned from; a rejected group is replaced by another one.
            max_turns: Largest number of turns in an episode.
            timeout_s: Seconds after which an episode has failed; 0: no limit.
            agree_every: Number of engine steps after which the ranks tell each other which groups are finished.
            seed: Seed of all draws.
            sampling: Further sampling settings of each turn, such as stop strings.
        """
        self.statistics = Statistics()
        self._strategy = strategy
        self._sizes = {"group_size": group_size, "temperature": temperature}
        self._prompts: list[Prompt] = []  # by ticket
        self._digest = hashlib.sha256()  # of the prompts
        self._checked = 0  # number of prompts that all ranks have compared
        rules = Rules(batch_size=batch_size, max_staleness=max_staleness, max_groups=max_concurrent)
        self._scheduler = _SubmittedScheduler(rules, self._prompts)
        self._collector = _SubmittedCollector(
            strategy,
            RewardSet.of(reward),
            workflow or SingleTurn(),
            self._schedule(),
            Pace(agree_every=agree_every, keep=keep),
            self.statistics,
            seed=seed,
            limits=EpisodeLimits(max_new_tokens=max_new_tokens, max_turns=max_turns, max_tokens=self._context),
            timeout_s=timeout_s,
            sampling=sampling or SamplingParams(),
        )
        self._source: tuple[Any, Iterator[Datum]] | None = None  # the loader of prepare_batch(), and its iterator

    def _schedule(self) -> Schedule:
        size = self._strategy.serving.group.size
        return Schedule(self._scheduler, self._strategy.comm, self._prompts, lambda ticket: ticket, engine_size=size)

    @property
    def _context(self) -> int:
        return self._strategy.serving.require_engine().engine.max_model_len

    # ---- AReaL's calls -------------------------------------------------------------------------------------------

    def rollout_batch(self, data: Sequence[Datum], workflow: Workflow | None = None) -> dict[str, Tensor]:
        """Samples these prompts and waits for all; the result leaves out those that failed or were rejected."""
        if not len(data):
            raise ValueError("rollout_batch() was given no prompt: give 1 or more.")
        first = len(self._prompts)
        for datum in data:
            self.submit(datum, workflow)
        return self._wait(0, wanted=range(first, len(self._prompts)))

    def submit(self, data: Datum, workflow: Workflow | None = None) -> None:
        """Queues a prompt, which begins in the next call that waits, as soon as the bounds allow it."""
        prompt = data if isinstance(data, Prompt) else self._prompt_of(data)
        if prompt.images or prompt.videos:
            raise ValueError("The prompt has images or videos, which the tensors of Rollouts cannot hold.")
        if workflow is not None:
            self._collector.workflows[len(self._prompts)] = workflow
        self._digest.update(repr(prompt.token_ids).encode())
        self._prompts.append(prompt)

    def wait(self, count: int, timeout: float | None = None) -> dict[str, Tensor]:
        """Returns the samples of `count` finished prompts, those submitted first before the others.

        After `timeout` seconds, WaitTimeoutError is raised on every rank; no prompt is lost.
        """
        if count < 1:
            raise ValueError(f"wait({count}) waits for no prompt: give 1 or more.")
        return self._wait(count, timeout=timeout)

    def prepare_batch(self, loader: Iterable[Any], workflow: Workflow | None = None) -> dict[str, Tensor]:
        """Returns the samples of batch_size prompts, and keeps as many others under way as max_staleness allows.

        Prompts are read from the loader when they are needed, pass after pass; it may yield single prompts or lists.
        """
        if self._source is None or self._source[0] is not loader:
            self._source = (loader, _passes(loader))
        source = self._source[1]

        def submit_next(count: int) -> None:
            for datum in itertools.islice(source, count):
                self.submit(datum, workflow)

        self._scheduler.refill = submit_next
        try:
            return self._wait(self._scheduler.rules.batch_size)
        finally:
            self._scheduler.refill = None

    def pause(self) -> None:
        """Starts no further prompt until resume(); prompts that are running continue."""
        self._scheduler.is_paused = True

    def resume(self) -> None:
        """Starts prompts again."""
        self._scheduler.is_paused = False

    # ---- Around them ---------------------------------------------------------------------------------------------

    @property
    def num_pending(self) -> int:
        """Number of prompts, over all ranks, that were submitted but not yet returned, rejected or failed."""
        return len(self._prompts) - self._scheduler.next_ticket + len(self._scheduler.started)

    def metrics(self) -> dict[str, float]:
        """Returns metrics of rewards, turns and losses since the last call, over all ranks; every rank calls it."""
        return self.statistics.reduce(self._strategy.comm)

    def close(self) -> None:
        """Ends the episodes that are under way."""
        self._collector.close()

    def _wait(self, count: int, wanted: range | None = None, timeout: float | None = None) -> dict[str, Tensor]:
        sync = self._strategy.serving.last_sync
        if sync is None:
            raise RuntimeError("The engine has no weights. Give setup_inference_engine(...) the actor.")
        self._scheduler.count, self._scheduler.wanted = count, wanted
        self._collector.deadline = None if timeout is None else time.monotonic() + timeout
        self._require_equal_prompts()
        samples = self._collector.sample((), step=sync.version, **self._sizes)  # type: ignore[arg-type]
        rewards = self._collector.score(samples)
        self._collector.workflows = {
            ticket: workflow for ticket, workflow in self._collector.workflows.items() if self._is_pending(ticket)
        }
        return tensors_of(samples, rewards)

    def _is_pending(self, ticket: int) -> bool:
        return ticket >= self._scheduler.next_ticket or ticket in self._scheduler.started

    def _require_equal_prompts(self) -> None:
        digests = self._strategy.comm.all_gather_object((len(self._prompts), self._digest.hexdigest()))
        if len(set(digests)) > 1:
            counts = ", ".join(str(number) for number, _ in digests)
            raise ValueError(
                f"The ranks have submitted different prompts ({counts} on ranks 0, 1, ...). Submit the same prompts in "
                "the same order on every rank: each rank then runs its part of them. A sampler that deals prompts out "
                "to ranks must be left out."
            )

    def _prompt_of(self, data: Mapping[str, Any]) -> Prompt:
        room, tokenizer = self._context - 1, cast(Any, self._strategy.tokenizer)
        (prompt,) = build_prompts([(dict(data), "the prompt")], tokenizer, max_prompt_tokens=room)
        return prompt


def tensors_of(samples: Sequence[Sample], rewards: Sequence[float]) -> dict[str, Tensor]:
    """Returns completed samples as padded tensors, one row each; each branch of an episode is a row, too."""
    rows = [
        (part, sample.ticket, reward)
        for sample, reward in zip(samples, rewards, strict=True)
        if not math.isnan(reward)
        for part in (sample, *sample.branches)
    ]
    width = max((len(part.prompt_ids) + len(part.response_ids) for part, _, _ in rows), default=1)
    shape = (len(rows), width)
    made = {
        "input_ids": torch.zeros(shape, dtype=torch.int64),
        "attention_mask": torch.zeros(shape, dtype=torch.bool),
        "loss_mask": torch.zeros(shape, dtype=torch.int64),
        "logprobs": torch.zeros(shape),
        "versions": torch.full(shape, -1, dtype=torch.int64),
    }
    for row, (part, _, _) in enumerate(rows):
        first, end = len(part.prompt_ids), len(part.prompt_ids) + len(part.response_ids)
        made["input_ids"][row, :end] = torch.tensor((*part.prompt_ids, *part.response_ids))
        made["attention_mask"][row, :end] = True
        made["loss_mask"][row, first:end] = torch.tensor(part.is_own).long()
        made["logprobs"][row, first:end] = torch.tensor(part.sampler_logprobs)
        made["versions"][row, first:end] = torch.tensor(part.versions)
    made["rewards"] = torch.tensor([reward for _, _, reward in rows], dtype=torch.float32)
    made["group_ids"] = torch.tensor([ticket for _, ticket, _ in rows], dtype=torch.int64)
    return made


def _passes(loader: Iterable[Any]) -> Iterator[Datum]:
    """Yields the prompts of a loader endlessly, pass after pass."""
    while True:
        is_empty = True
        for item in loader:
            is_empty = False
            yield from [item] if isinstance(item, Prompt | Mapping) else item
        if is_empty:
            raise ValueError(
                "The loader of prepare_batch() gives no prompt (any more): give one that can be read pass after pass, "
                "such as a list or a DataLoader with collate_fn=list."
            )


class _SubmittedScheduler(AsyncScheduler):
    """Starts submitted prompts as far as the bounds allow, and returns those that the current call waits for."""

    def __init__(self, rules: Rules, prompts: Sequence[Prompt]) -> None:
        super().__init__(rules)
        self.is_paused = False
        self.count = 0  # number of groups that the call waits for
        self.wanted: range | None = None  # the tickets that it waits for; None: any
        self.refill: Callable[[int], None] | None = None  # submits the given number of further prompts
        self._prompts = prompts

    def _num_wanted(self, version: int) -> int:
        if self.is_paused or self._is_exhausted:
            return 0
        if self.wanted is not None:
            return self.wanted.stop - self.next_ticket
        rules, running = self.rules, len(self.running)
        before = version * rules.batch_size + len(self.started)  # as if each update had learned from a whole batch
        allowed = max(0, admissible(rules, version=version, started=before, running=running))
        queued = len(self._prompts) - self.next_ticket
        if self.refill is not None and queued < allowed:
            self.refill(allowed - queued)
        return min(allowed, len(self._prompts) - self.next_ticket)

    @property
    def _is_exhausted(self) -> bool:
        """Whether to start no more prompts of an endless loader; those that were submitted come to an end anyway."""
        return self.refill is not None and super()._is_exhausted

    def batch(self, step: int) -> tuple[int, ...] | None:
        """Returns the tickets that the call waits for, ascending; None until they are finished."""
        if self.wanted is not None:
            open_ones = [ticket for ticket in self.started if ticket in self.wanted]
            if self.next_ticket >= self.wanted.stop and self.finished.issuperset(open_ones):
                return tuple(open_ones)
        else:
            batch = super().batch(step)
            if batch is not None:
                return batch
        if not self.running:
            raise self._cannot_go_on()
        return None

    def _choose(self, step: int) -> tuple[int, ...] | None:
        finished, rules = sorted(self.finished)[: self.count], self.rules
        if len(finished) < self.count:
            return None
        if self.count != rules.batch_size:
            return tuple(finished)
        return forced_first(self.started, self.finished, step=step, rules=rules)

    def _cannot_go_on(self) -> RuntimeError:
        count = self.count if self.wanted is None else len(self.wanted)
        queued = len(self._prompts) - self.next_ticket
        reason = (
            "These are too old, because the weights have changed more often than once for each batch_size prompts: "
            "count such updates as one in set_global_step(), or raise max_staleness"
            if self.wanted is None and len(self.finished) >= count
            else "Rollouts are paused: call resume()"
            if self.is_paused
            else f"With batch_size {self.rules.batch_size} and max_staleness {self.rules.max_staleness} no more may "
            "run: wait for fewer, or raise them"
            if queued
            else "Submit more: those that fail or are rejected do not count"
        )
        return RuntimeError(
            f"The call waits for {count} prompts, of which {len(self.finished)} are finished; none is running and "
            f"{queued} are queued. {reason}."
        )


class _SubmittedCollector(ScheduledCollector):
    """Runs each prompt with the workflow that it was submitted with, until a deadline."""

    deadline: float | None = None
    _media = None  # the tensors of Rollouts cannot hold images

    def __init__(self, *parts: Any, **episodes: Any) -> None:
        super().__init__(*parts, **episodes)
        self.workflows: dict[int, Workflow] = {}  # by ticket, for prompts that do not use the default one

    def workflow_of(self, job: EpisodeJob) -> Workflow:
        """Returns the workflow that the prompt was submitted with."""
        return self.workflows.get(job.position, self._workflow)

    def _generate_some(self, driver: PhasedDriver, step: int, group_size: int, sampling: SamplingParams) -> None:
        if self.deadline is not None and self._comm.any(time.monotonic() > self.deadline):
            with self._comm.phase("episodes", local=True):
                self._pause(driver)
            raise WaitTimeoutError("wait() has run out of time. What is under way goes on in the next call.")
        super()._generate_some(driver, step, group_size, sampling)
