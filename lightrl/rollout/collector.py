"""Turns prompts into scored samples: generates through the strategy, then applies rewards, also for an evaluation.

Failures of rewards are counted over all ranks, and stop all ranks or none.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from lightrl.comm import Comm
from lightrl.config import RolloutConfig
from lightrl.data.media import read_media
from lightrl.data.sampler import shard
from lightrl.engines.base import Completion, EnginePrompt, SamplingParams
from lightrl.engines.stop_strings import stop_tokens
from lightrl.metrics import Statistics
from lightrl.records import Prompt, Sample, ScoredGroup
from lightrl.rewards import AnyReward
from lightrl.rewards.applicability import fail_unjudged
from lightrl.rewards.reward_set import RewardSet, Scores, is_collective
from lightrl.rewards.scoring import FailureBudget, Outcome, RewardError, has_reward, with_traceback
from lightrl.rollout.metrics import describe_groups
from lightrl.seeding import mix_seed
from lightrl.strategy import StrategyBase

logger = logging.getLogger(__name__)

_MANY_NONE = 256  # samples in a row
_MAX_SHOWN = 3  # failures of a run that are printed with their traceback; the metrics count them all
_ROLLOUT_STREAM, _EVAL_STREAM = 1, 2  # separate the random draws of training and evaluation

_PLAIN = SamplingParams()

Prompts = Sequence[tuple[int, Prompt]]  # of this rank, each with its position in the step's global batch


class Scorer:
    """Applies the rewards of the run to this rank's samples. Every rank calls it, even without samples."""

    _num_none: Mapping[str, int] = {}  # how many of the last samples in a row a reward has returned None for

    def __init__(self, comm: Comm, rewards: RewardSet) -> None:
        self._comm = comm
        self._rewards = rewards
        self._num_shown = 0

    def score(
        self, samples: Sequence[Sample], statistics: Statistics | None = None, *, prefix: str = ""
    ) -> list[float]:
        """Returns the weighted sum of the rewards of each sample, or NO_REWARD if one failed.

        A sample to which no reward applies counts as failed. Too many failures stop every rank. The mean of each reward
        and the number of failures are added to statistics, under names that begin with prefix.
        """
        budget = FailureBudget(self._rewards.policy.max_failures)
        outcomes = {item.label: self._run(item.label, item.reward, samples, budget) for item in self._rewards.rewards}
        if budget.most_unusual:
            self._settle(budget, samples, outcomes)
        scores = self._rewards.combine(outcomes)
        if statistics is not None:
            _describe(scores, budget, statistics, prefix)
        return scores.rewards

    def _run(self, label: str, reward: object, samples: Sequence[Sample], budget: FailureBudget) -> list[Outcome]:
        if is_collective(reward):
            return self._run_together(label, reward, samples, budget)
        with self._counting(label, budget):
            return self._rewards.run(label, samples, budget)

    def _run_together(
        self, label: str, reward: object, samples: Sequence[Sample], budget: FailureBudget
    ) -> list[Outcome]:
        """Applies a reward that all ranks compute together."""
        with self._comm.phase(f"reward {label}"):
            outcomes: list[Outcome] = reward(samples)  # type: ignore[operator]
        with self._counting(label, budget):
            budget.record(outcomes)
        return outcomes

    @contextmanager
    def _counting(self, label: str, budget: FailureBudget) -> Iterator[None]:
        """Notes in every rank's budget, after the body, how many outcomes on any one rank are no numbers."""
        with self._comm.phase(f"reward {label}", local=True) as agreed:
            yield
            agreed.largest = len(budget.failures) + len(budget.no_verdicts) + budget.num_left_out
        budget.most_unusual = agreed.largest

    def _settle(self, budget: FailureBudget, samples: Sequence[Sample], outcomes: Mapping[str, list[Outcome]]) -> None:
        """Looks into outcomes that are no numbers, which some rank has."""
        self._warn_of_none(outcomes)
        budget.failures += fail_unjudged(samples, outcomes, self._rewards.conditions)
        self._report_failures(budget)

    def _warn_of_none(self, outcomes: Mapping[str, list[Outcome]]) -> None:
        """Warns once of a reward that has returned None for many samples in a row: it may lack a return."""
        for label, part in outcomes.items():
            if label in self._rewards.conditions:
                continue
            before = self._num_none.get(label, 0)
            now = before + len(part) if all(item is None for item in part) else 0
            self._num_none = {**self._num_none, label: now}
            if before < _MANY_NONE <= now and self._comm.is_main:
                logger.warning(
                    "The reward %r has returned None for %d samples in a row, so it has judged none of them. If it "
                    "should, does the function lack a return?",
                    *(label, now),
                )

    def _report_failures(self, budget: FailureBudget) -> None:
        """Prints the first failures of all ranks; raises on every rank if there are too many."""
        num_failures = self._comm.all_reduce(len(budget.failures), "sum")
        mine = [*_distinct(budget.failures), *_distinct(budget.no_verdicts)]
        shown = [(error.is_no_verdict, error.key, str(error), with_traceback(error)) for error in mine]
        everyones = sorted(item for part in self._comm.all_gather_object(shown) for item in part)
        if num_failures > budget.max_failures:
            raise budget.exceeded(RewardError(everyones[0][2]), num_failures)
        for *_, text in everyones[: _MAX_SHOWN - self._num_shown] if self._comm.is_main else []:
            logger.warning("%s", text)
            self._num_shown += 1


_OF_EVALUATION = ("top_p", "top_k", "min_new_tokens", "presence_penalty", "frequency_penalty", "repetition_penalty")


def sampling_of(config: RolloutConfig) -> dict[str, SamplingParams]:
    """Returns the sampling settings of a run as arguments of Collector."""
    sampling = SamplingParams(stop=config.stop, top_p=config.top_p, top_k=config.top_k)
    changes = {name: getattr(config.eval, name) for name in _OF_EVALUATION}  # settings that training must not change
    longest = config.eval.max_new_tokens or config.max_new_tokens
    return {"sampling": sampling, "evaluation": replace(sampling, max_new_tokens=longest, **changes)}


class Collector(Scorer):
    """Samples and scores this rank's prompts. Every rank calls each method, even without prompts."""

    make_statistics: type[Statistics] = Statistics  # of an evaluation
    describe_groups = staticmethod(describe_groups)  # adds its metrics of several samples a prompt

    def __init__(
        self,
        strategy: StrategyBase,
        reward: AnyReward | RewardSet,
        *,
        seed: int,
        max_new_tokens: int,
        sampling: SamplingParams = _PLAIN,
        evaluation: SamplingParams | None = None,
    ) -> None:
        """Refuses sampling settings that a trainer cannot reproduce.

        Args:
            sampling: further settings of each request, such as stop strings.
            evaluation: all settings of the requests of evaluate(), where any is allowed; None: as in training.
        """
        super().__init__(strategy.comm, RewardSet.of(reward))
        self._strategy = strategy
        self._seed = seed
        if sampling != _PLAIN:
            sampling, evaluation = _prepared(sampling, evaluation, strategy)
        self._sampling = replace(sampling, max_new_tokens=max_new_tokens)
        self._evaluation = evaluation or self._sampling

    @property
    def sampling(self) -> SamplingParams:
        """The settings of training's requests."""
        return self._sampling

    def sample(self, prompts: Prompts, *, step: int, group_size: int, temperature: float) -> list[Sample]:
        """Draws group_size samples of each prompt; the samples of a prompt are adjacent."""
        seeds = [seed_of_prompt(self._seed, step, position) for position, _ in prompts]
        sampling = replace(self._sampling, temperature=temperature)
        return self._generate(prompts, seeds, group_size, sampling)

    def sample_greedily(self, prompts: Prompts) -> list[Sample]:
        """Generates the greedy response to each prompt."""
        return self._generate(prompts, [0] * len(prompts), 1, replace(self._sampling, temperature=0.0))

    def _generate(self, prompts: Prompts, seeds: list[int], n: int, sampling: SamplingParams) -> list[Sample]:
        with self._comm.phase("preparing the prompts", local=self._strategy.media is not None):  # from files
            requests = [engine_prompt(prompt) for _, prompt in prompts]
        completions = self._strategy.generate(requests, [replace(sampling, n=n, seed=seed) for seed in seeds])
        owners = [owner for owner in prompts for _ in range(n)]
        return [self.sample_of(*owner, item) for owner, item in zip(owners, completions, strict=True)]

    def sample_of(self, position: int, prompt: Prompt, completion: Completion) -> Sample:
        """Returns the engine's completion of a prompt as a sample."""
        tokenizer, token_ids = self._strategy.tokenizer, completion.output_token_ids
        assert tokenizer is not None, "set strategy.tokenizer: rewards read text"
        return Sample(
            prompt=prompt,
            position=position,
            sample_index=completion.sample_index,
            response_ids=token_ids,
            sampler_logprobs=completion.logprobs,
            versions=completion.versions,
            finish_reason=completion.finish_reason,
            text=tokenizer.decode(list(token_ids), skip_special_tokens=True),
            prompt_ids=completion.prompt_token_ids,
            routing=completion.routing,
            allowed=completion.allowed,
        )

    def evaluate(
        self,
        prompts: Sequence[Prompt],
        *,
        temperature: float,
        n: int = 1,
        ks: Sequence[int] = (),
        source_field: str = "",
        keep: Callable[[Sequence[Sample], Sequence[float]], None] = lambda samples, rewards: None,
    ) -> dict[str, float]:
        """Samples each prompt n times and returns metrics over all ranks; every evaluation makes the same draws.

        eval/reward is the mean reward, eval/accuracy the share of samples with a reward of 1 or more. Both are left out
        if no sample has a reward; without prompts there are no metrics. ks and source_field are those of
        metrics.evaluate(). keep is called with this rank's samples and their rewards.
        """
        if not prompts:
            return {}
        comm, statistics = self._comm, self.make_statistics()
        mine = shard(list(enumerate(prompts)), comm.rank, comm.world)
        seeds = [mix_seed(_EVAL_STREAM, self._seed, position) for position, _ in mine]
        samples = self._generate(mine, seeds, n, replace(self._evaluation, temperature=temperature))
        scored = self.score(samples, statistics, prefix="eval/")
        keep(samples, scored)
        rewards = [reward for reward in scored if has_reward(reward)]
        if n > 1 or ks or source_field:
            groups = grouped(samples, scored, n, step=0)
            self.describe_groups(groups, statistics, ks=ks, source_field=source_field, prefix="eval/")
        elif rewards:
            statistics.values("eval/reward", rewards)
            statistics.mean("eval/accuracy", sum(reward >= 1 for reward in rewards), len(rewards))
        num_lengths = sum(bool(sample.turns) for sample in samples)  # a failed episode, without a turn, has none
        statistics.mean("eval/response_tokens", sum(sample.num_own for sample in samples), num_lengths)
        statistics.mean("eval/truncated", sum(map(is_truncated, samples)), num_lengths)
        return statistics.reduce(comm)


def is_truncated(sample: Sample) -> bool:
    """Returns whether the response was cut off at max_new_tokens, or the episode by a full context."""
    return sample.finish_reason in ("length", "context")


def seed_of_prompt(seed: int, step: int, position: int) -> int:
    """Returns the seed of a prompt's samples in training, which depends neither on the rank nor on the time."""
    return mix_seed(_ROLLOUT_STREAM, seed, step, position)


def grouped(samples: Sequence[Sample], rewards: Sequence[float], size: int, step: int) -> list[ScoredGroup]:
    """Groups samples by prompt; those of a prompt must be adjacent."""
    parts = [slice(start, start + size) for start in range(0, len(samples), size)]
    return [ScoredGroup(samples=tuple(samples[part]), rewards=tuple(rewards[part]), step=step) for part in parts]


def engine_prompt(prompt: Prompt) -> EnginePrompt:
    """Returns the engine's input for a prompt, its images read from their files."""
    return _with_media(prompt) if prompt.images or prompt.videos else EnginePrompt(token_ids=prompt.token_ids)


def _with_media(prompt: Prompt) -> EnginePrompt:
    images, videos = read_media(prompt)
    return EnginePrompt(token_ids=prompt.token_ids, images=tuple(images), videos=tuple(videos))


def _prepared(
    sampling: SamplingParams, evaluation: SamplingParams | None, strategy: StrategyBase
) -> tuple[SamplingParams, SamplingParams | None]:
    """Returns settings with which a stop string that is one token ends a sample at once.

    Raises ValueError for settings of training that a trainer cannot reproduce.
    """
    engine = strategy.serving.engine
    sampling.require_trainable(reports_allowed=engine is not None and engine.engine.reports_allowed)
    if strategy.tokenizer is None:
        return sampling, evaluation
    size = math.inf if engine is None else engine.engine.vocab_size
    prepared = partial(_ending, tokenizer=strategy.tokenizer, vocab_size=size)
    return prepared(sampling), evaluation and prepared(evaluation)


def _ending(sampling: SamplingParams, *, tokenizer: Any, vocab_size: float) -> SamplingParams:
    if not sampling.stop or sampling.min_new_tokens:  # with a minimum such a token may come and not count
        return sampling
    ends = stop_tokens(sampling.stop, tokenizer, vocab_size)
    return replace(sampling, stop_token_ids=(*sampling.stop_token_ids, *ends))


def _distinct(errors: Sequence[RewardError]) -> list[RewardError]:
    """Returns the first few errors; an error shared by many samples is listed once."""
    return list(dict.fromkeys(errors))[:_MAX_SHOWN]


def _describe(scores: Scores, budget: FailureBudget, statistics: Statistics, prefix: str) -> None:
    for label, values in scores.components.items():
        if values:
            statistics.values(f"{prefix}reward/{label}", values)
    statistics.add(f"{prefix}reward/failures", len(budget.failures))
    statistics.add(f"{prefix}reward/no_verdict", len(budget.no_verdicts))
