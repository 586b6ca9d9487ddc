"""A trainer of your own: python examples/custom_trainer.py --max_steps 20

It imitates the best response of each group (RAFT, arXiv:2304.06767). Its options are those of train_grpo.py, except
those of the algorithm.
"""

from __future__ import annotations

from lightrl import Experience
from lightrl.algorithms.losses import mean_loss, token_mean
from lightrl.config import RolloutConfig, parse_config
from lightrl.records import PackedBatch, TokenScores
from lightrl.rewards.reward_set import RewardSet
from lightrl.trainers.fit import StepReport, Trainer, run_trainer
from lightrl.trainers.policy_step import (
    PolicyUpdates,
    PromptData,
    describe_batches,
    describe_rollout,
    evaluate,
    start_engine,
    sync_engine,
)
from lightrl.trainers.run import RunContext, load_start_policy


class BestOfGroupTrainer(Trainer):
    kind = "best_of_group"  # names the run's folder
    config: RolloutConfig

    def __init__(self, run: RunContext | RolloutConfig) -> None:
        super().__init__(run)  # opens the run: strategy, folder, data, tokenizer
        rewards = RewardSet.from_config(self.config)
        self.prompts = PromptData(self.run)
        self.saved["sampler"] = self.prompts.sampler  # a checkpoint holds its state
        self.updates = PolicyUpdates(self.run, self.statistics)
        self.batches = describe_batches(self.config, self.strategy.comm.world)  # printed at the start
        policy = load_start_policy(self.run)
        self.model = self.strategy.prepare_trained(policy, schedule_length=self.config.schedule_length).model
        self.resume()
        self.collector = start_engine(self.run, self.model, rewards)

    def step(self) -> StepReport:
        size, temperature = self.config.group_size, self.config.temperature
        prompts = self.prompts.draw(self.config.num_prompts)
        samples = self.collector.sample(prompts, step=self.step_index, group_size=size, temperature=temperature)
        rewards = self.collector.score(samples, self.statistics)
        describe_rollout(samples, rewards, self.statistics)
        groups = [range(start, start + size) for start in range(0, len(samples), size)]
        right = [[index for index in group if rewards[index] > 0] for group in groups]  # not if it is NaN, no verdict
        best = [max(group, key=rewards.__getitem__) for group in right if group]
        chosen = [Experience(sample=samples[i], reward=rewards[i], advantage=1.0) for i in best]
        packs = self.updates.micro_batches(chosen)
        self.updates.train(self.model, [packs], self.loss, self.weight, is_sampler=True)  # measures mismatch/*
        sync_engine(self)
        return StepReport(metrics=self.statistics.reduce(self.strategy.comm), experience=chosen)

    def loss(self, scores: TokenScores, batch: PackedBatch):
        return mean_loss(-scores.logprobs, token_mean(batch.loss_mask, batch.sequence_index, len(batch.keys)))

    def weight(self, batch: PackedBatch):
        return batch.loss_mask.sum()

    def evaluate(self) -> dict[str, float]:
        return evaluate(self.collector, self.prompts, self.config.eval)


if __name__ == "__main__":
    run_trainer(BestOfGroupTrainer, parse_config(RolloutConfig))
