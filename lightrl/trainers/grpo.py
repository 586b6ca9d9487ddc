"""GRPO (arXiv:2402.03300): sample groups of responses, score them, learn from rewards relative to the group's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from lightrl.algorithms.advantages import overlong_penalty
from lightrl.config import GRPOConfig
from lightrl.data.packing import TokenMasks, TokenValues
from lightrl.models.teacher import load_teacher
from lightrl.records import Experience, PackedBatch, Sample, ScoredGroup, TokenScores
from lightrl.rewards import OwnRewards
from lightrl.rewards.components import ComponentKeeper
from lightrl.rewards.reward_set import RewardSet, is_collective
from lightrl.rollout.branches import with_branches
from lightrl.rollout.collector import Prompts, grouped, is_truncated
from lightrl.rollout.dynamic_sampling import DynamicSampling
from lightrl.seeding import mix_seed
from lightrl.strategy import StrategyBase
from lightrl.trainers.fit import StepReport, Trainer
from lightrl.trainers.greedy_baseline import baselines_of
from lightrl.trainers.objective import PolicyObjective
from lightrl.trainers.policy_step import (
    Batch,
    PolicyUpdates,
    PromptData,
    by_sample,
    describe_batches,
    describe_rollout,
    evaluate,
    shown_of,
    start_engine,
    step_metrics,
    sync_engine,
)
from lightrl.trainers.proximal import with_other_policy
from lightrl.trainers.reference import prepare_reference
from lightrl.trainers.reward_components import make_needed
from lightrl.trainers.run import RunContext, fix_for_run, load_start_policy
from lightrl.trainers.token_selection import TokenSelector


class GRPOTrainer(Trainer):
    """Trains a policy on groups of its own samples. `step` is one pass; `__init__` builds what it uses, in order."""

    kind = "grpo"
    config: GRPOConfig
    components: ComponentKeeper | None = None  # for an estimator that needs each reward by itself

    def __init__(
        self, run: RunContext | GRPOConfig, *, strategy: StrategyBase | None = None, reward: OwnRewards | None = None
    ) -> None:
        config: GRPOConfig = run.config if isinstance(run, RunContext) else run
        # Cheap checks come first: a wrong name must not wait until a model is loaded.
        algorithm, teacher = config.algorithm, config.distillation if config.teacher_model else None
        self.objective = PolicyObjective(
            algorithm, group_size=config.group_size, distillation=teacher, has_selector=True, routing=config.routing
        )
        self.selector = TokenSelector(algorithm) if self.objective.needs_selection else None
        self.rewards = RewardSet.from_config(config, reward)
        if len(self.rewards.rewards) > 1 or any(is_collective(item.reward) for item in self.rewards.rewards):
            self.shown = shown_of(self.rewards)
        super().__init__(run, strategy=strategy)

        self.prompts = PromptData(self.run)
        self.updates = PolicyUpdates(self.run, self.statistics)
        self.batches = describe_batches(config, self.strategy.comm.world)
        self.saved |= {"sampler": self.prompts.sampler, "coefficients": self.objective.coefficients}
        self.dynamic_sampling = self._dynamic_sampling() if config.dynamic_sampling.enabled else None

        with self.strategy.comm.phase("loading the model", local=True):
            policy = load_start_policy(self.run)
        trained = self.strategy.prepare_trained(policy, schedule_length=config.schedule_length)
        self.model = self.policy = trained.model
        self.optimizer = trained.optimizer
        self.reference = prepare_reference(self, self.policy) if algorithm.kl_coef else None
        self.teacher = self._load_teacher() if config.teacher_model else None
        self.resume()
        self.collector = start_engine(self.run, self.policy, self.rewards)

    # ---- A step, in the order of the data ----------------------------------------------------------------------

    def step(self) -> StepReport:
        """Samples and scores groups, learns from them, syncs the engine, reports."""
        groups = self.draw()
        experience = self.learn_from(groups)
        sync_engine(self)
        return self.report(experience)

    def draw(self) -> list[ScoredGroup]:
        """Samples and scores the groups of a step; dynamic sampling goes on until enough of them give a signal."""
        if self.dynamic_sampling is not None:
            return self.dynamic_sampling.fill(self.step_index, self.roll_out)
        return self.roll_out(self.config.num_prompts)

    def roll_out(self, count: int, first: int = 0) -> list[ScoredGroup]:
        """Samples and scores groups for the step's next `count` prompts, whose positions begin at `first`."""
        return self.make_groups(self.prompts.draw(count, first))

    def make_groups(self, prompts: Prompts) -> list[ScoredGroup]:
        """Returns a scored group for each of this rank's prompts; a subclass may make them in another way."""
        if self.objective.traits.needs:
            return make_needed(self, prompts)
        return self.score(self.sample(prompts))

    def learn_from(self, groups: Sequence[ScoredGroup]) -> list[Experience]:
        """Learns once from scored groups, whatever their source. Every rank must call it, even with no group."""
        for observer in self.observers:
            observer.after_rollouts(groups)
        experience = self.compute_advantages(groups)
        with self.timed("learn", "learn"):
            batch = self.pack(experience)
            batch = self.compute_old_logprobs(batch)
            batch = self.compute_reference_logprobs(batch)
            self.train(batch)
        return experience

    def sample(self, prompts: Prompts) -> list[Sample]:
        """Samples a group for each of this rank's prompts."""
        size, temperature = self.config.group_size, self.config.temperature
        with self.watch.measure("time/rollout"):
            return self.collector.sample(prompts, step=self.step_index, group_size=size, temperature=temperature)

    def score(self, samples: list[Sample]) -> list[ScoredGroup]:
        """Rewards every sample; the samples of one prompt form a group."""
        with self.watch.measure("time/reward"):
            rewards = self.collector.score(samples, self.statistics)
        describe_rollout(samples, rewards, self.statistics)
        return grouped(samples, rewards, self.config.group_size, self.step_index)

    def compute_advantages(self, groups: Sequence[ScoredGroup]) -> list[Experience]:
        """Gives each sample its advantage over its group, which is still whole on this rank."""
        experience = self.updates.experience(groups, self.step_index)
        if self.config.overlong.buffer or self.config.overlong.mask_truncated:
            experience = self._without_overlong(experience)
        baselines = baselines_of(groups) if "greedy_baseline" in self.objective.traits.needs else None
        experience = self.objective.advantages(experience, self.strategy.comm, baselines)
        return experience if self.run.workflow is None else with_branches(experience)

    def pack(self, experience: list[Experience]) -> Batch:
        """Distributes the samples over updates, and over ranks by their numbers of tokens."""
        return self.updates.deal(experience, self.step_index)

    def compute_old_logprobs(self, batch: Batch) -> Batch:
        """Adds the old logprobs of the ratio, unless the only update's own forward will compute them."""
        if self._needs_scores:
            batch = self._scored(batch)
        if self.updates.stale or self.objective.ratio_to != "recompute":
            batch = with_other_policy(batch, self.config.algorithm, self.step_index, self.updates.stale)
        return batch

    def compute_reference_logprobs(self, batch: Batch) -> Batch:
        """Adds the logprobs of the frozen models in the loss: the reference and the teacher."""
        for name, model in (("ref_logprobs", self.reference), ("teacher_logprobs", self.teacher)):
            if model is not None:
                batch = batch.with_columns(**{name: self.updates.logprobs(model, batch.samples)})
        return batch

    def train(self, batch: Batch) -> None:
        """Takes one optimizer step per update and epoch."""
        updates = self.updates.packed(batch, needs_old_logprobs=self._needs_scores)
        is_sampler = not self._needs_scores  # otherwise its scores were compared with the engine's before
        self.updates.train(self.policy, updates, self.loss, self.objective.weight, is_sampler=is_sampler)

    def loss(self, scores: TokenScores, batch: PackedBatch) -> Tensor:
        """Returns the mean loss of a micro-batch."""
        return self.objective.loss(scores, batch, self.statistics)

    def report(self, experience: Sequence[Experience] = ()) -> StepReport:
        """Reduces the statistics of the step over all ranks."""
        metrics = step_metrics(self.objective, self.statistics, self.strategy.comm, self.config.samples_per_step)
        return StepReport(metrics=metrics, experience=experience)

    # ---- Around the steps --------------------------------------------------------------------------------------

    def evaluate(self) -> dict[str, float]:
        """Evaluates the policy on the held-out prompts, with --eval.n samples of each."""
        return evaluate(self.collector, self.prompts, self.config.eval)

    def close(self) -> None:
        """Ends the rewards' processes and the engine, and leaves the process group."""
        self.rewards.close()
        super().close()

    # ---- Options: each runs only if asked for ------------------------------------------------------------------

    @property
    def _needs_scores(self) -> bool:
        """Whether the policy scores all samples before the first update, alike on every rank."""
        return self.config.scores_first(has_older=bool(self.updates.stale), selects=self.selector is not None)

    def _load_teacher(self) -> nn.Module:
        with self.strategy.comm.phase("loading the teacher model", local=True):
            teacher = load_teacher(
                self.config.teacher_model,
                self.run.tokenizer,
                vocab_size=self.run.vocab_size,
                materialize=self.strategy.materializes_weights,
                trust_remote_code=self.config.trust_remote_code,
            )
            fix_for_run(self.run, teacher)
        return self.strategy.prepare_frozen(teacher)

    def _dynamic_sampling(self) -> DynamicSampling:
        """Makes what rolls out prompts until enough groups give a signal; checkpoints hold its state."""
        sampling = DynamicSampling(
            self.config.dynamic_sampling,
            prompts=self.prompts.train,
            num_prompts=self.config.num_prompts,
            comm=self.strategy.comm,
            statistics=self.statistics,
        )
        sampling.hear(self.rewards)
        self.saved["dynamic_sampling"] = sampling
        return sampling

    def _without_overlong(self, experience: list[Experience]) -> list[Experience]:
        """Lowers the rewards of overlong responses and excludes responses that were cut off, as the options ask."""
        if self.config.overlong.buffer:
            penalties = self._overlong_penalty(experience)
            experience = [replace(item, shaping=amount) for item, amount in zip(experience, penalties, strict=True)]
        if self.config.overlong.mask_truncated:
            experience = [_without_truncated(item) for item in experience]
        return experience

    def _overlong_penalty(self, experience: Sequence[Experience]) -> list[float]:
        """Returns the amount that is added to each reward for the length of its response."""
        config = self.config.overlong
        lengths = torch.tensor([len(item.sample.response_ids) for item in experience], dtype=torch.float64)
        shaping: list[float] = overlong_penalty(
            lengths, max_length=self.config.max_new_tokens, buffer=config.buffer, scale=config.penalty
        ).tolist()
        self.statistics.values("reward/overlong_penalty", shaping)
        return shaping

    def _scored(self, batch: Batch) -> Batch:
        """Adds the logprobs before the update, and the selector's choice of tokens in each mini-batch."""
        scored = list(self.updates.scores(self.policy, batch.samples))
        for packed, scores in scored:
            self.updates.measure_mismatch(scores.logprobs, packed)
        logprobs = by_sample((packed, scores.logprobs) for packed, scores in scored)
        if self.selector is not None:
            entropy = by_sample((packed, scores.entropy) for packed, scores in scored)
            batch = self._selected(self.selector, batch, logprobs, entropy)
        return batch.with_columns(old_logprobs=logprobs)

    def _selected(self, selector: TokenSelector, batch: Batch, logprobs: TokenValues, entropy: TokenValues) -> Batch:
        seed = mix_seed(self.config.seed, self.step_index)
        chosen: dict[str, TokenMasks] = {}
        for part in batch.minibatches:
            masks = selector.choose(
                part, logprobs, entropy, seed=seed, comm=self.strategy.comm, statistics=self.statistics
            )
            chosen |= {name: {**chosen.get(name, {}), **mask} for name, mask in masks.items()}
        return batch.with_columns(**chosen)


def _without_truncated(item: Experience) -> Experience:
    """Excludes a response that was cut off, and such branches of an episode."""
    branches = tuple(branch for branch in item.sample.branches if not is_truncated(branch))
    return replace(item, is_trained=not is_truncated(item.sample), sample=replace(item.sample, branches=branches))
