"""GRPO (arXiv:2402.03300): prompts are rolled out, scored, given group advantages, learned from, and synced."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightrl.algorithms.advantages import overlong_penalty
from lightrl.config import AlgorithmConfig, GRPOConfig
from lightrl.data.packing import Key, TokenMasks, TokenValues
from lightrl.data.sampler import shard
from lightrl.models.policy import Policy, load_teacher
from lightrl.records import Experience, PackedBatch, Prompt, Sample, ScoredGroup, TokenScores
from lightrl.rewards import AnyReward
from lightrl.rollout.dynamic_sampling import DynamicSampling
from lightrl.seeding import mix_seed
from lightrl.strategy import StrategyBase
from lightrl.trainers.base import StepReport
from lightrl.trainers.objective import PolicyObjective
from lightrl.trainers.policy_trainer import PolicyTrainer, by_sample, is_truncated
from lightrl.trainers.token_selection import TokenSelector


class GRPOTrainer(PolicyTrainer):
    """One `step()` is one pass of the loop; everything around it is in PolicyTrainer and below."""

    kind = "grpo"
    config: GRPOConfig
    objective: PolicyObjective

    def __init__(
        self, config: GRPOConfig, *, strategy: StrategyBase | None = None, reward: AnyReward | None = None
    ) -> None:
        teaching = config.distillation if config.teacher_model else None
        self.objective = PolicyObjective(
            config.algorithm, group_size=config.group_size, distillation=teaching, selects_tokens=True
        )
        self.selector = TokenSelector(config.algorithm)
        self.teacher: Policy | None = None
        self.dynamic_sampling: DynamicSampling | None = None
        super().__init__(config, strategy=strategy, reward=reward)

    @property
    def algorithm(self) -> AlgorithmConfig:
        return self.config.algorithm

    def take_step(self) -> StepReport:
        if self.dynamic_sampling is None:
            return super().take_step()
        return self.learn_from(self.dynamic_sampling.fill(self.step_index, self._draw_groups))

    def step(self, prompts: Sequence[tuple[int, Prompt]]) -> StepReport:
        """prompts: (position in the step's global batch, prompt), this rank's share."""
        return self.learn_from(self.collect(prompts))

    def collect(self, prompts: Sequence[tuple[int, Prompt]]) -> list[ScoredGroup]:
        """Rolls out and scores this rank's prompts."""
        size = self.config.group_size
        samples = self.roll_out(prompts)
        with self.watch.measure("time/reward"):
            rewards = self.collector.score(samples, self.statistics)
            baselines: Sequence[float | None] = [None] * len(prompts)
            if self.objective.needs_greedy_baseline:
                baselines = self.collector.greedy_rewards(prompts, group_size=1, statistics=self.statistics)
        self.describe_rollout(samples, rewards)
        return [
            ScoredGroup(
                samples=tuple(samples[start : start + size]),
                rewards=tuple(rewards[start : start + size]),
                step=self.step_index,
                baseline=baseline,
            )
            for start, baseline in zip(range(0, len(samples), size), baselines, strict=True)
        ]

    def learn_from(self, groups: Sequence[ScoredGroup]) -> StepReport:
        """The rest of a step: advantages, the updates, the engine's new weights."""
        experience = self.experience_of(groups)
        with self.watch.measure("time/learn"), self.strategy.comm.phase("learn"):
            self.learn(experience)
        self.sync_engine()
        return StepReport(metrics=self.take_metrics(), experience=experience)

    # ---- Data and models ---------------------------------------------------------------------------------------

    def read_data(self, train: list[Any], evaluation: list[Any]) -> None:
        super().read_data(train, evaluation)
        config = self.config
        if config.dynamic_sampling.enabled:
            self.dynamic_sampling = DynamicSampling(
                config.dynamic_sampling,
                num_prompts=config.num_prompts,
                comm=self.strategy.comm,
                statistics=self.statistics,
            )

    def _draw_groups(self, first: int, count: int) -> list[ScoredGroup]:
        """The next prompts of the data as positions first to first + count - 1 of the step."""
        drawn = [(first + place, self.prompts[index]) for place, index in enumerate(self.sampler.draw(count))]
        return self.collect(shard(drawn, self.strategy.comm.rank, self.strategy.comm.world))

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        if self.dynamic_sampling is not None:
            state["dynamic_sampling"] = self.dynamic_sampling.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        if self.dynamic_sampling is not None:
            self.dynamic_sampling.load_state_dict(state["dynamic_sampling"], self.prompts)

    def build_models(self) -> Policy:
        policy = super().build_models()
        if self.config.teacher_model:
            with self.strategy.comm.phase("loading the teacher model", local=True):
                teacher = load_teacher(
                    self.config.teacher_model,
                    self.tokenizer,
                    materialize=self.strategy.materializes_weights,
                    trust_remote_code=self.config.trust_remote_code,
                )
            self.teacher = self.strategy.prepare(teacher, is_rlhf=True)
        return policy

    # ---- Learning ----------------------------------------------------------------------------------------------

    def experience_of(self, groups: Sequence[ScoredGroup]) -> list[Experience]:
        """The samples with their advantages; every rank calls it, with no group too."""
        samples = [sample for group in groups for sample in group.samples]
        rewards = [reward for group in groups for reward in group.rewards]
        baselines = [float(group.baseline or 0.0) for group in groups for _ in group.samples]
        return self.objective.advantages(
            samples,
            rewards,
            self.strategy.comm,
            baselines if self.objective.needs_greedy_baseline else None,
            shaping=self._shaping(samples),
            is_trained=[not (self.config.overlong.mask_truncated and is_truncated(sample)) for sample in samples],
        )

    def _shaping(self, samples: Sequence[Sample]) -> list[float] | None:
        """What is added to the rewards for their lengths."""
        config = self.config.overlong
        if not config.buffer:
            return None
        lengths = torch.tensor([len(sample.response_ids) for sample in samples], dtype=torch.float64)
        shaping: list[float] = overlong_penalty(
            lengths, max_length=self.config.max_new_tokens, buffer=config.buffer, scale=config.penalty
        ).tolist()
        self.statistics.mean("reward/overlong_penalty", sum(shaping), len(shaping))
        return shaping

    def learn(self, experience: list[Experience]) -> None:
        """All optimizer steps of this step's samples."""
        minibatches = [self._balanced(part) for part in self._minibatches(experience)]
        everything = [item for part in minibatches for item in part]
        self._stale = self._stale_everywhere(everything)
        is_scored = self._needs_scores()
        per_token, choices = self._before_updates(minibatches, is_scored=is_scored)
        is_first = True
        for _ in range(self.config.num_epochs):
            for part, choice in zip(minibatches, choices, strict=True):
                if not self._has_trained_tokens(part):
                    self.statistics.mean("skipped_updates", 1, 1)
                    continue
                batches = self._micro_batches(part, **per_token, **choice)
                # Before the first update the policy is still the one that the engine sampled from.
                loss_fn = self._loss(measure_mismatch=is_first and not is_scored)
                result = self.strategy.train_batch(batches, loss_fn, self.objective.weight, model=self.policy)
                self._describe_update(result.loss, result.grad_norm, result.lr, result.skipped)
                is_first = False

    def _is_stale(self, sample: Sample) -> bool:
        """Whether older weights than the engine's present ones sampled it, whose version is the step's number."""
        return any(version < self.step_index for version in sample.versions[:1])

    def _stale_everywhere(self, mine: Sequence[Experience]) -> frozenset[Key]:
        """Of all ranks: those that split a model or its tokens run the loss on each other's samples."""
        found = {item.key for item in mine if self._is_stale(item.sample)}
        return frozenset().union(*self.strategy.comm.all_gather_object(found))

    def _needs_scores(self) -> bool:
        """Whether the policy scores all samples first, alike on every rank. A single update needs no such forward,
        since its own logprobs are those before it, unless a sample has another policy to be compared with."""
        if self.selector.is_needed:
            return True
        return self._recomputes_old or (self.algorithm.old_logprobs == "recompute" and bool(self._stale))

    def _before_updates(
        self, minibatches: list[list[Experience]], *, is_scored: bool
    ) -> tuple[dict[str, TokenValues], list[dict[str, TokenMasks]]]:
        """What pack() is told of all samples, and of each mini-batch the tokens that are chosen."""
        everything = [item for part in minibatches for item in part]
        sampler: TokenValues = {item.key: item.sample.sampler_logprobs for item in everything}
        frozen = {"ref_logprobs": self.reference, "teacher_logprobs": self.teacher}
        known = {name: self._score_all(model, everything) for name, model in frozen.items() if model is not None}
        per_token: dict[str, TokenValues] = dict(known)
        choices: list[dict[str, TokenMasks]] = [{} for _ in minibatches]
        if is_scored:
            logprobs, choices = self._score_and_choose(minibatches)
            # What an older policy sampled is compared with that one, as the engine reported it.
            per_token["old_logprobs"] = {key: sampler[key] if key in self._stale else logprobs[key] for key in logprobs}
        if self.algorithm.old_logprobs == "engine":
            per_token["old_logprobs"] = sampler
        return per_token, choices

    def _score_and_choose(
        self, minibatches: list[list[Experience]]
    ) -> tuple[dict[tuple[int, int], list[float]], list[dict[str, TokenMasks]]]:
        """The policy's logprobs, and what the selector makes of its scores."""
        scored = self._scored_batches(self.policy, [item for part in minibatches for item in part])
        for batch, scores in scored:
            self._measure_mismatch(scores, batch)
        logprobs = by_sample((batch, scores.logprobs) for batch, scores in scored)
        if not self.selector.is_needed:
            return logprobs, [{} for _ in minibatches]
        entropy = by_sample((batch, scores.entropy) for batch, scores in scored)
        choices = [
            self.selector.choose(
                *(part, logprobs, entropy),
                seed=mix_seed(self.config.seed, self.step_index),
                comm=self.strategy.comm,
                statistics=self.statistics,
            )
            for part in minibatches
        ]
        return logprobs, choices

    # ---- Loss --------------------------------------------------------------------------------------------------

    def _loss(self, *, measure_mismatch: bool) -> Callable[[TokenScores, PackedBatch], Tensor]:
        def loss_fn(scores: TokenScores, batch: PackedBatch) -> Tensor:
            if measure_mismatch:
                self._measure_mismatch(scores, batch)
            return self.objective.loss(scores, batch, self.statistics)

        return loss_fn
