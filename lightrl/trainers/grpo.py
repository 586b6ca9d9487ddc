"""GRPO (arXiv:2402.03300): prompts are rolled out, scored, given group advantages, learned from, and synced."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from lightrl.config import AlgorithmConfig, GRPOConfig
from lightrl.records import Experience, PackedBatch, Prompt, TokenScores
from lightrl.rewards import AnyReward
from lightrl.strategy import StrategyBase
from lightrl.trainers.base import StepReport
from lightrl.trainers.objective import PolicyObjective
from lightrl.trainers.policy_trainer import PolicyTrainer


class GRPOTrainer(PolicyTrainer):
    """One `step()` is one pass of the loop; everything around it is in PolicyTrainer and below."""

    kind = "grpo"
    config: GRPOConfig
    objective: PolicyObjective

    def __init__(
        self, config: GRPOConfig, *, strategy: StrategyBase | None = None, reward: AnyReward | None = None
    ) -> None:
        self.objective = PolicyObjective(config.algorithm)
        super().__init__(config, strategy=strategy, reward=reward)

    @property
    def algorithm(self) -> AlgorithmConfig:
        return self.config.algorithm

    def step(self, prompts: Sequence[tuple[int, Prompt]]) -> StepReport:
        """prompts: (position in the step's global batch, prompt), this rank's share."""
        samples = self.roll_out(prompts)
        with self.watch.measure("time/reward"):
            rewards = self.collector.score(samples, self.statistics)
            baselines = None
            if self.objective.needs_greedy_baseline:
                baselines = self.collector.greedy_rewards(prompts, group_size=self.config.group_size)
            experience = self.objective.advantages(samples, rewards, self.strategy.comm, baselines)
            self._describe(samples, experience)
        with self.watch.measure("time/learn"), self.strategy.comm.phase("learn"):
            self.learn(experience)
        self.sync_engine()
        return StepReport(metrics=self.take_metrics(), experience=experience)

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
                batches = self._micro_batches(part, old_logprobs=old_logprobs, ref_logprobs=ref_logprobs)
                # Before the first update the policy is still the one that the engine sampled from.
                loss_fn = self._loss(measure_mismatch=is_first and not self._recomputes_old)
                result = self.strategy.train_batch(batches, loss_fn, self.objective.weight, model=self.policy)
                self._describe_update(result.loss, result.grad_norm, result.lr, result.skipped)
                is_first = False

    # ---- Loss --------------------------------------------------------------------------------------------------

    def _loss(self, *, measure_mismatch: bool) -> Callable[[TokenScores, PackedBatch], Tensor]:
        def loss_fn(scores: TokenScores, batch: PackedBatch) -> Tensor:
            if measure_mismatch:
                self._measure_mismatch(scores, batch)
            return self.objective.loss(scores, batch, self.statistics)

        return loss_fn
