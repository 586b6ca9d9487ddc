"""Samples with a workflow instead of single turns; scores and evaluates as the plain collector does."""

from __future__ import annotations

import asyncio
import logging
import math
import time
import traceback
from collections.abc import Collection, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

from lightrl.comm import enter_episode
from lightrl.config import RolloutConfig
from lightrl.engines.base import SamplingParams
from lightrl.imports import place_of
from lightrl.metrics import Statistics
from lightrl.models.multimodal import MediaProcessor
from lightrl.records import Prompt, Sample, Status
from lightrl.rewards import NO_REWARD
from lightrl.rewards.async_scoring import without_exit
from lightrl.rewards.episode_reward import episode_reward
from lightrl.rewards.reward_set import RewardSet
from lightrl.rollout.client import EngineClient, EpisodeLimits
from lightrl.rollout.collector import Collector, Prompts, Scorer, sampling_of
from lightrl.rollout.driver import EpisodeDriver
from lightrl.rollout.episode import Episode, episode_of_several
from lightrl.rollout.episode_tensors import episode_of_tensors
from lightrl.rollout.observations import require_images
from lightrl.rollout.siblings import Siblings
from lightrl.rollout.workflow import Workflow
from lightrl.strategy import StrategyBase

logger = logging.getLogger(__name__)

_MANY_REJECTED = 8  # episodes from the start, after which a rank without any other says who rejects them
_CLOSING_S = 10.0  # how long an episode may go on after its time limit, to clean up


class EpisodeJob(NamedTuple):
    """The job of running one episode; the first rank of the engine's group does it."""

    position: int
    prompt: Prompt
    sample_index: int
    seed: int
    sampling: SamplingParams
    num_siblings: int  # episodes of the prompt that have not ended, this one included


class EpisodeFailure(NamedTuple):
    """The result of an episode that raised an error or ran out of time."""

    details: str  # the traceback


def collector_of_episodes(
    workflow: Workflow, strategy: StrategyBase, rewards: RewardSet, config: RolloutConfig
) -> EpisodeCollector:
    """Returns the collector of a run; its episodes are limited to the engine's context and to a micro-batch."""
    limits = episode_limits(config, strategy)
    return EpisodeCollector(
        strategy,
        rewards,
        workflow,
        seed=config.seed,
        limits=limits,
        timeout_s=config.rollout.episode_timeout_s,
        max_groups=config.rollout.max_groups,
        **sampling_of(config),
    )


def episode_limits(config: RolloutConfig, strategy: StrategyBase) -> EpisodeLimits:
    """Returns the limits of the episodes of a run on its engine."""
    return EpisodeLimits(
        max_new_tokens=config.max_new_tokens,
        max_turns=config.rollout.max_turns,
        max_tokens=longest_episode(config, strategy.serving.require_engine().engine.max_model_len),
    )


def longest_episode(config: RolloutConfig, context: int) -> int:
    """Returns how many tokens an episode, including its prompt, may have if the context holds `context` tokens."""
    in_micro_batch = context if config.micro_batch_size else config.max_tokens_per_microbatch
    return min(context, in_micro_batch, config.rollout.max_context_tokens or context)


class EpisodeScorer(Scorer):
    """Scores episodes. A sample that asked for the run's rewards in its episode keeps the reward that it has."""

    _has_warned = False

    def score(
        self, samples: Sequence[Sample], statistics: Statistics | None = None, *, prefix: str = ""
    ) -> list[float]:
        """Returns the weighted sum of the rewards of each completed sample, and NO_REWARD for the others."""
        open_ones = [sample for sample in samples if not _is_over(sample)]
        self._warn_of_unused([sample.reward for sample in open_ones])
        scores = iter(super().score(open_ones, statistics, prefix=prefix))
        if statistics is not None:
            describe_episodes(samples, statistics, prefix)
        return [_own_reward(sample) if _is_over(sample) else next(scores) for sample in samples]

    def _warn_of_unused(self, own: Sequence[float | None]) -> None:
        """Warns once if the workflow gave rewards that the run ignores, for example because --reward was forgotten."""
        rewards = self._rewards.rewards
        is_used = any(item.reward is episode_reward for item in rewards)
        if self._has_warned or is_used or all(reward is None for reward in own):
            return
        self._has_warned = True
        logger.warning(
            "The workflow gives its episodes rewards, which --reward %s does not use. Give --reward episode to learn "
            "from them.",
            " ".join(item.label for item in rewards),
        )


class EpisodeCollector(EpisodeScorer, Collector):
    """Samples and scores this rank's prompts with a workflow. Every rank calls each method, even without prompts."""

    def __init__(
        self,
        strategy: StrategyBase,
        rewards: RewardSet,
        workflow: Workflow,
        *,
        seed: int,
        limits: EpisodeLimits,
        timeout_s: float = 0.0,
        max_groups: int = 0,
        **sampling: SamplingParams,
    ) -> None:
        """max_groups: how many prompts' samples run at once over all ranks, at least one's for each engine; 0: all."""
        super().__init__(strategy, rewards, seed=seed, max_new_tokens=limits.max_new_tokens, **sampling)
        self._max_groups = max_groups
        self._workflow = workflow
        self._limits = limits
        self._timeout_s = timeout_s
        self._has_shown_failure = False
        self._num_rejected: int | None = 0  # from the start; None once there was any other episode, or a warning
        self._siblings: dict[int, Siblings] = {}  # of the prompts whose episodes are running, by position

    def _generate(self, prompts: Prompts, seeds: list[int], n: int, sampling: SamplingParams) -> list[Sample]:
        jobs = [
            EpisodeJob(position, prompt, index, seed, sampling, n)
            for (position, prompt), seed in zip(prompts, seeds, strict=True)
            for index in range(n)
        ]
        serving = self._strategy.serving
        under_way, self._siblings = self._siblings, {}  # an evaluation shares nothing with training
        with serving.session() as engine, self._comm.phase("episodes", local=True):
            driver, gate = EpisodeDriver(engine, serving.group), self._gate(n)

            async def play(job: EpisodeJob) -> Episode | EpisodeFailure | None:
                async with gate:  # in the order of the jobs, so that siblings who wait for each other all come in
                    return await self.play(driver, job)

            made = driver.run(jobs, play)
        self._siblings = under_way
        self._require_some(made)
        return [self.as_sample(job, item) for job, item in zip(jobs, made, strict=True)]

    def _gate(self, group_size: int) -> AbstractAsyncContextManager[object]:
        """Returns a semaphore that limits how many episodes of this rank's engine run at once, if a limit is set."""
        if not self._max_groups:
            return nullcontext()
        share = self._max_groups * self._strategy.serving.group.size // self._comm.world
        return asyncio.Semaphore(max(1, share) * group_size)

    @property
    def _media(self) -> MediaProcessor | None:
        """Processor for the images of observations; None if they may have none."""
        return self._strategy.media

    def workflow_of(self, job: EpisodeJob) -> Workflow:
        """Returns the workflow that makes the sample of a job, which is that of the run."""
        return self._workflow

    async def play(self, driver: EpisodeDriver, job: EpisodeJob) -> Episode | EpisodeFailure | None:
        """Runs an episode to its end; an exception in it becomes an EpisodeFailure."""
        running = self._siblings  # those of training or of an evaluation, during which training episodes may end
        siblings = running.setdefault(job.position, Siblings(job.num_siblings, self._rewards))
        client = EngineClient(
            driver,
            self._strategy.tokenizer,
            seed=job.seed,
            sample_index=job.sample_index,
            sampling=job.sampling,
            limits=replace(self._limits, max_new_tokens=job.sampling.max_new_tokens),
            prompt=job.prompt,
            position=job.position,
            siblings=siblings,
            media=self._media,
        )
        workflow, returned = self.workflow_of(job), False
        enter_episode()
        began = time.monotonic()
        try:
            made = await _in_time(without_exit(workflow.arun_episode(client, job.prompt)), self._timeout_s)
            returned = True
            return _as_episode(made, client, job.prompt)
        except (Exception, asyncio.CancelledError) as error:  # the latter of a task that the workflow awaited
            details = traceback.format_exc()
            is_timeout = isinstance(error, (TimeoutError, asyncio.TimeoutError))  # one class since Python 3.11
            if is_timeout and 0 < self._timeout_s <= time.monotonic() - began:
                details += f"No result after {self._timeout_s:g} s, the time limit (--rollout.episode_timeout_s).\n"
            if returned:
                details += f"{type(workflow).__name__}.arun_episode returned it{place_of(workflow.arun_episode)}.\n"
            return EpisodeFailure(details)
        finally:
            await siblings.leave()
            if not siblings.num_running:
                running.pop(job.position, None)

    def _require_some(self, made: Sequence[Episode | EpisodeFailure | None]) -> None:
        """Raises on every rank if all episodes of all ranks failed, most likely by a mistake in the workflow."""
        failures = [item for item in made if isinstance(item, EpisodeFailure)]
        first = failures[0] if failures and len(failures) == len(made) else None
        verdicts = self._comm.all_gather_object((len(made), first))
        details = [item.details for count, item in verdicts if item is not None and count]
        if details and len(details) == sum(count > 0 for count, _ in verdicts):
            raise RuntimeError(f"Every episode has failed. The first:\n{details[0]}")

    def as_sample(self, job: EpisodeJob, made: Episode | EpisodeFailure | None) -> Sample:
        """Returns the result of play() as a sample."""
        self._count_rejected(made is None)
        if isinstance(made, Episode):
            return made.sample(job.prompt, job.position, job.sample_index, self._strategy.tokenizer)
        if made is not None and not self._has_shown_failure:
            self._has_shown_failure = True
            logger.warning(
                "An episode of prompt %d has failed. Failed episodes are left out; episode/failed counts them.\n%s",
                *(job.prompt.index, made.details.rstrip()),
            )
        return Sample(
            prompt=job.prompt,
            position=job.position,
            sample_index=job.sample_index,
            response_ids=(),
            sampler_logprobs=(),
            versions=(),
            finish_reason="abort",
            text="",
            turns=(),
            status=Status.FILTERED if made is None else Status.FAILED,
        )

    def _count_rejected(self, is_rejected: bool) -> None:
        """Warns once if the first episodes of this rank were all rejected, which a missing `return` does too."""
        if self._num_rejected is None:
            return
        self._num_rejected = self._num_rejected + 1 if is_rejected else None
        if self._num_rejected == _MANY_REJECTED:
            self._num_rejected = None
            function = self._workflow.arun_episode
            logger.warning(
                "The first %d episodes of this rank were all rejected, because %s.arun_episode returned None each "
                "time%s. Unless it means to reject them, let it return its Episode.",
                *(_MANY_REJECTED, type(self._workflow).__name__, place_of(function)),
            )


async def _in_time(episode: Coroutine[Any, Any, Any], timeout_s: float) -> Any:
    """Awaits an episode; unlike wait_for(), it does not wait for long for one that goes on although it is cancelled."""
    if not timeout_s:
        return await episode
    running = asyncio.ensure_future(episode)
    try:
        await asyncio.wait([running], timeout=timeout_s)
    finally:
        is_late = not running.done()
        running.cancel()
        await asyncio.wait([running], timeout=_CLOSING_S)  # until it has cleaned up
    if not running.done():
        raise TimeoutError("The episode goes on although it was cancelled: it catches CancelledError.")
    try:
        return running.result()  # also of an episode that ends well when it is cancelled
    except asyncio.CancelledError as error:
        if is_late:
            raise TimeoutError from error
        raise


def _as_episode(made: Any, client: EngineClient, prompt: Prompt) -> Episode | None:
    if made is None:
        return None
    several = made if isinstance(made, list | tuple) else [made]
    _require_kinds(made, several)
    episodes = [item if isinstance(item, Episode) else episode_of_tensors(item, client.turns) for item in several]
    if client.placeholder_ids:
        others = [item for item in episodes if _num_places(item.ids, client.placeholder_ids) != len(item.images)]
        if prompt.images or prompt.videos:
            _require_media(others, prompt)
        _require_images(others, prompt, client.placeholder_ids)
    for item in episodes:
        item.require_rewards()
        item.drop_pictures()
    episode = episode_of_several(episodes)
    if client.has_rewarded:
        if episode.reward is None:
            raise ValueError(
                "The workflow asked for a reward and set none: set episode.reward, which then is the sample's."
            )
        episode.is_scored = True
    return episode


def _require_kinds(made: Any, several: Sequence[Any]) -> None:
    """Raises ValueError if a workflow returned anything but episodes and dicts, such as (episode, reward)."""
    if all(isinstance(item, Episode) or hasattr(item, "keys") for item in several):
        return
    types = ", ".join(type(item).__name__ for item in several)
    given = f"a {type(made).__name__} of {types}" if several is made else repr(made)
    raise ValueError(
        f"arun_episode returned {given}. It must return an Episode, a list of them, a dict of tensors or None. The "
        "reward of an Episode is its own: set episode.reward."
    )


def _require_media(episodes: Sequence[Episode], prompt: Prompt) -> None:
    """Raises ValueError for an episode whose tokens the trainer could not combine with the prompt's images."""
    begin = len(prompt.token_ids)
    if any(item.prompt_ids[:begin] != prompt.token_ids or not item.has_seen_media for item in episodes):
        raise ValueError(
            "The prompt has images or videos: begin each of its episodes by Episode(data.token_ids), and add the turns "
            "of engine.generate(episode.ids) by say(). Prompts that a chat template renders again, as with tools, and "
            "tensors do not keep them."
        )


def _require_images(episodes: Sequence[Episode], prompt: Prompt, placeholder_ids: Collection[int]) -> None:
    """Raises ValueError for an episode that has places of images without the images."""
    num_in_prompt = _num_places(prompt.token_ids, placeholder_ids)
    for episode in episodes:
        require_images(_num_places(episode.ids, placeholder_ids) - num_in_prompt, len(episode.images))


def _num_places(ids: Sequence[int], placeholder_ids: Collection[int]) -> int:
    return sum(token in placeholder_ids for token in ids)


def _is_over(sample: Sample) -> bool:
    """Returns whether the sample needs no further reward."""
    return sample.is_scored or sample.status is not Status.COMPLETED


def _own_reward(sample: Sample) -> float:
    return NO_REWARD if sample.reward is None or sample.status is not Status.COMPLETED else sample.reward


def describe_episodes(samples: Sequence[Sample], statistics: Statistics, prefix: str = "") -> None:
    """Adds the statistics of episodes, among them how many failed."""
    completed = [sample for sample in samples if sample.status is Status.COMPLETED]
    for status in (Status.FAILED, Status.FILTERED):
        count = sum(sample.status is status for sample in samples)
        statistics.add(f"{prefix}episode/{status.value}", count)
    failed = sum(sample.status is Status.FAILED for sample in samples)
    statistics.mean(f"{prefix}episode/failed_share", failed, len(samples))
    statistics.mean(f"{prefix}episode/turns", sum(len(sample.turns) for sample in completed), len(completed))
    for name in sorted({name for sample in completed for name in sample.numbers}):
        total = math.fsum(sample.numbers.get(name, 0.0) for sample in completed)
        statistics.add(f"{prefix}episode/{name}", total)
