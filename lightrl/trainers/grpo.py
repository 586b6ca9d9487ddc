"""GRPO (arXiv:2402.03300): prompts are rolled out, scored, given group advantages, learned from, and synced."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from lightrl.algorithms.mismatch import mismatch_statistics
from lightrl.config import GRPOConfig
from lightrl.data.balance import assign_to_ranks, imbalance
from lightrl.data.packing import TokenValues, dummy_batch, pack, split_micro_batches, unpack
from lightrl.data.sampler import permutation
from lightrl.models.policy import Policy
from lightrl.records import Experience, PackedBatch, Prompt, Sample, TokenScores
from lightrl.rewards import AnyReward
from lightrl.strategy import StrategyBase
from lightrl.trainers.base import StepReport
from lightrl.trainers.objective import PolicyObjective
from lightrl.trainers.rollout import RolloutTrainer

_MINIBATCH_STREAM = 3


class GRPOTrainer(RolloutTrainer):
    """One `step()` is one pass of the loop; everything around it is in Trainer and RolloutTrainer."""

    kind = "grpo"
    config: GRPOConfig

    def __init__(
        self, config: GRPOConfig, *, strategy: StrategyBase | None = None, reward: AnyReward | None = None
    ) -> None:
        self.objective = PolicyObjective(config.algorithm)
        super().__init__(config, strategy=strategy, reward=reward)

    @property
    def needs_reference(self) -> bool:
        return self.config.algorithm.kl_coef != 0

    def step(self, prompts: Sequence[tuple[int, Prompt]]) -> StepReport:
        """prompts: (position in the step's global batch, prompt), this rank's share."""
        with self.watch.measure("time/rollout"):
            samples = self.collector.sample(
                prompts, step=self.step_index, group_size=self.config.group_size, temperature=self.config.temperature
            )
        with self.watch.measure("time/reward"):
            rewards = self.collector.score(samples)
            baselines = None
            if self.objective.needs_greedy_baseline:
                baselines = self.collector.greedy_rewards(prompts, group_size=self.config.group_size)
            experience = self.objective.advantages(samples, rewards, self.strategy.comm, baselines)
            self._describe(samples, experience)
        with self.watch.measure("time/learn"), self.strategy.comm.phase("learn"):
            self.learn(experience)
        self.sync_engine()
        return StepReport(metrics=self.statistics.reduce(self.strategy.comm), experience=experience)

    # ---- Learning ----------------------------------------------------------------------------------------------

    def learn(self, experience: list[Experience]) -> None:
        """All optimizer steps of this step's samples."""
        minibatches = [self._balanced(part) for part in self._minibatches(experience)]
        everything = [item for part in minibatches for item in part]
        ref_logprobs = self._score_all(self.reference, everything) if self.reference is not None else None
        old_logprobs = self._old_logprobs(everything)
        is_first = True
        for _ in range(self.config.num_epochs):
            for part in minibatches:
                batches = self._micro_batches(part, old_logprobs, ref_logprobs)
                # Before the first update the policy is still the one that the engine sampled from.
                loss_fn = self._loss(measure_mismatch=is_first and not self._recomputes_old)
                result = self.strategy.train_batch(batches, loss_fn, self.objective.weight, model=self.policy)
                self._describe_update(result.loss, result.grad_norm, result.lr, result.skipped)
                is_first = False

    @property
    def _recomputes_old(self) -> bool:
        """A single update needs no second forward: its own logprobs are those before the update."""
        return self.config.algorithm.old_logprobs == "recompute" and self.config.optimizer_steps_per_step > 1

    def _old_logprobs(self, experience: list[Experience]) -> TokenValues | None:
        if self.config.algorithm.old_logprobs == "engine":
            return {(e.sample.position, e.sample.sample_index): e.sample.sampler_logprobs for e in experience}
        if not self._recomputes_old:
            return None
        return self._score_all(self.policy, experience, measure_mismatch=True)

    def _minibatches(self, experience: list[Experience]) -> list[list[Experience]]:
        """Whole groups, dealt by a seeded order of the step's positions: the same mini-batches at any world size."""
        size = self.config.num_prompts // self.config.num_minibatches
        order = permutation(self.config.num_prompts, self.config.seed + _MINIBATCH_STREAM, self.step_index)
        place = {position: rank for rank, position in enumerate(order)}
        parts: list[list[Experience]] = [[] for _ in range(self.config.num_minibatches)]
        for item in experience:
            parts[place[item.sample.position] // size].append(item)
        return parts

    def _balanced(self, mine: list[Experience]) -> list[Experience]:
        """Moves samples between ranks until all have about the same number of tokens."""
        comm = self.strategy.comm
        lengths_by_rank = comm.all_gather_object([item.num_tokens for item in mine])
        lengths = [length for part in lengths_by_rank for length in part]
        owners = [rank for rank, part in enumerate(lengths_by_rank) for _ in part]
        if comm.world == 1 or not lengths:
            return mine
        targets = assign_to_ranks(lengths, owners, comm.world)
        self.statistics.highest("balance/max_over_mean", imbalance(lengths, targets, comm.world))
        if targets == owners:
            return mine
        own_targets = [target for target, owner in zip(targets, owners, strict=True) if owner == comm.rank]
        outgoing: list[list[Experience]] = [[] for _ in range(comm.world)]
        for item, target in zip(mine, own_targets, strict=True):
            outgoing[target].append(item)
        return comm.exchange(outgoing)

    def _micro_batches(
        self, experience: list[Experience], old: TokenValues | None, ref: TokenValues | None
    ) -> list[PackedBatch]:
        """The same number on every rank; a rank with fewer samples than that gets dummies, which train nothing."""
        max_tokens = None if self.config.micro_batch_size else self.config.max_tokens_per_microbatch
        max_samples = self.config.micro_batch_size or None
        with self.strategy.comm.phase("micro-batches", local=True):
            parts = split_micro_batches(experience, max_tokens=max_tokens, max_samples=max_samples)
        count = self.strategy.comm.max_int(max(1, len(parts)))
        if len(parts) < count:
            parts = split_micro_batches(experience, max_tokens=max_tokens, max_samples=max_samples, min_num=count)
        temperature = self.config.temperature
        with self.strategy.comm.phase("packing", local=True):
            packs = [
                pack(part, temperature=temperature, old_logprobs=old, ref_logprobs=ref, encode=self.encoder)
                if part
                else dummy_batch(temperature=temperature)
                for part in parts
            ]
        return [batch.to(self.strategy.device) for batch in packs]

    def _score_all(
        self, model: Policy, experience: list[Experience], *, measure_mismatch: bool = False
    ) -> dict[tuple[int, int], list[float]]:
        """The model's logprobs of every response token, by sample."""
        batches = self._micro_batches(experience, None, None)
        found: dict[tuple[int, int], list[float]] = {}
        for batch, scores in zip(batches, self.strategy.forward(batches, model=model), strict=True):
            if measure_mismatch:
                self._measure_mismatch(scores, batch)
            found.update({key: part.tolist() for key, part in unpack(batch, scores.logprobs).items()})
        return found

    # ---- Loss --------------------------------------------------------------------------------------------------

    def _loss(self, *, measure_mismatch: bool) -> Callable[[TokenScores, PackedBatch], Tensor]:
        def loss_fn(scores: TokenScores, batch: PackedBatch) -> Tensor:
            if measure_mismatch:
                self._measure_mismatch(scores, batch)
            return self.objective.loss(scores, batch, self.statistics)

        return loss_fn

    # ---- What a step tells -------------------------------------------------------------------------------------

    def _measure_mismatch(self, scores: TokenScores, batch: PackedBatch) -> None:
        """Engine against trainer logprobs, before any clipping or update."""
        found = mismatch_statistics(scores.logprobs.detach(), batch.sampler_logprobs, batch.loss_mask)
        count = float(found["count"])
        self.statistics.highest("mismatch/max_abs", float(found["max_abs"]))
        self.statistics.mean("mismatch/mean_abs", float(found["sum_abs"]), count)
        self.statistics.mean("mismatch/k3", float(found["sum_k3"]), count)

    def _describe_update(self, loss: float, grad_norm: float, lr: float, skipped: bool) -> None:
        """These are the same on every rank already; a mean over ranks leaves them as they are."""
        self.statistics.mean("loss", loss, 1)
        self.statistics.mean("grad_norm", grad_norm, 1)
        self.statistics.highest("lr", lr)
        self.statistics.mean("skipped_updates", float(skipped), 1)

    def _describe(self, samples: Sequence[Sample], experience: Sequence[Experience]) -> None:
        """Reward and length statistics of this rank's samples."""
        statistics, count = self.statistics, len(samples)
        rewards = [item.reward for item in experience]
        statistics.mean("reward/mean", sum(rewards), count)
        groups = [rewards[i : i + self.config.group_size] for i in range(0, count, self.config.group_size)]
        statistics.mean("reward/equal_groups", sum(min(group) == max(group) for group in groups), len(groups))
        response_tokens = sum(len(sample.response_ids) for sample in samples)
        statistics.add("tokens/prompt", sum(len(sample.prompt_ids) for sample in samples))
        statistics.add("tokens/response", response_tokens)
        statistics.mean("tokens/response_mean", response_tokens, count)
        statistics.highest("tokens/response_max", max((len(sample.response_ids) for sample in samples), default=0))
        statistics.mean("tokens/truncated", sum(sample.finish_reason == "length" for sample in samples), count)
