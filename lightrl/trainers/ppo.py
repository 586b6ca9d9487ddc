"""PPO (arXiv:1707.06347): tokens get advantages from a critic's values, then policy and critic learn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightrl.algorithms.kl import kl_estimate
from lightrl.config import PPOConfig
from lightrl.data.packing import Key, TokenMasks, TokenValues, unpack
from lightrl.models.critic import ActorCritic, Critic, load_critic, load_value_head, save_value_head
from lightrl.models.lora import add_adapters, options_for_companion
from lightrl.models.option_names import naming
from lightrl.models.policy import Policy, check_model_folder, load_tokenizer
from lightrl.models.routing_replay import attach_replay
from lightrl.records import Experience, PackedBatch, Sample, ScoredGroup, ScoresAndValues, StateValues, TokenScores
from lightrl.rewards import OwnRewards
from lightrl.rewards.reward_set import RewardSet, is_collective
from lightrl.rewards.scoring import has_reward
from lightrl.rollout.branches import with_branches
from lightrl.rollout.collector import Prompts, grouped
from lightrl.strategy import StrategyBase
from lightrl.trainers.fit import StepReport, Trainer
from lightrl.trainers.objective import PolicyLoss
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
from lightrl.trainers.run import RunContext, fix_for_run, load_start_policy
from lightrl.trainers.token_advantages import TokenAdvantages
from lightrl.trainers.value_objective import ValueObjective

_HEAD_SEED = 5  # separates the draws of a new value head from the run's other draws


class PPOTrainer(Trainer):
    """Trains a policy and a critic on the policy's samples. `step` is one pass; `__init__` builds what it uses."""

    kind = "ppo"
    config: PPOConfig

    def __init__(
        self, run: RunContext | PPOConfig, *, strategy: StrategyBase | None = None, reward: OwnRewards | None = None
    ) -> None:
        config: PPOConfig = run.config if isinstance(run, RunContext) else run
        # Cheap checks come first: a wrong name must not wait until a model is loaded.
        self.objective = PolicyLoss(
            config.algorithm, kl_in_loss=config.algorithm.kl_in_reward == "none", routing=config.routing
        )
        self.value_objective = ValueObjective(config.critic, self.objective.token_weights)
        self.token_advantages = TokenAdvantages(config.algorithm)
        self.rewards = RewardSet.from_config(config, reward)
        if len(self.rewards.rewards) > 1 or any(is_collective(item.reward) for item in self.rewards.rewards):
            self.shown = shown_of(self.rewards)
        super().__init__(run, strategy=strategy)

        self.prompts = PromptData(self.run)
        self.updates = PolicyUpdates(self.run, self.statistics)
        self.batches = describe_batches(config, self.strategy.comm.world)
        self.saved |= {
            "sampler": self.prompts.sampler,
            "coefficients": self.objective.coefficients,
            "moments": self.token_advantages,
        }

        is_shared = config.critic.shared_backbone
        with self.strategy.comm.phase("loading the model", local=True):
            policy = self._load_actor_critic() if is_shared else load_start_policy(self.run)
        trained = self.strategy.prepare_trained(
            policy,
            schedule_length=config.policy_schedule_length,
            head_lr=config.critic_lr if is_shared else None,
            frozen_head_steps=config.critic_warmup_steps if is_shared else 0,
        )
        self.model = self.policy = trained.model
        self.optimizer = trained.optimizer
        self.reference = prepare_reference(self, self.policy) if self.needs_reference else None
        self.critic: Critic | None = None  # None: a value head on the policy's own body
        self.critic_optimizer: Optimizer | None = None
        if not is_shared:
            self._add_critic()
        self.resume()
        self.collector = start_engine(self.run, self.policy, self.rewards)

    # ---- A step, in the order of the data ----------------------------------------------------------------------

    def step(self) -> StepReport:
        """Samples and scores groups, learns from them, syncs the engine, reports."""
        groups = self.make_groups(self.prompts.draw(self.config.num_prompts))
        experience = self.learn_from(groups)
        sync_engine(self)
        return self.report(experience)

    def make_groups(self, prompts: Prompts) -> list[ScoredGroup]:
        """Returns a scored group for each of this rank's prompts; a subclass may make them in another way."""
        return self.score(self.sample(prompts))

    def learn_from(self, groups: Sequence[ScoredGroup]) -> list[Experience]:
        """Learns once from scored groups, whatever their source. Every rank must call it, even with no group."""
        for observer in self.observers:
            observer.after_rollouts(groups)
        with self.timed("learn", "learn"):
            batch = self.pack(groups)
            batch = self.compute_old_logprobs(batch)
            batch = self.compute_reference_logprobs(batch)
            batch = self.compute_values(batch)
            batch = self.compute_advantages(batch)
            self.train(batch)
        return _with_mean_advantages(batch)

    def sample(self, prompts: Prompts) -> list[Sample]:
        """Samples group_size responses to each of this rank's prompts."""
        config = self.config
        with self.watch.measure("time/rollout"):
            return self.collector.sample(
                prompts, step=self.step_index, group_size=config.group_size, temperature=config.temperature
            )

    def score(self, samples: list[Sample]) -> list[ScoredGroup]:
        """Rewards every sample; the samples of one prompt form a group."""
        with self.watch.measure("time/reward"):
            rewards = self.collector.score(samples, self.statistics)
        describe_rollout(samples, rewards, self.statistics)
        return grouped(samples, rewards, self.config.group_size, self.step_index)

    def pack(self, groups: Sequence[ScoredGroup]) -> Batch:
        """Distributes the samples with a reward over updates, and over ranks by their numbers of tokens."""
        experience = [item for item in self.updates.experience(groups, self.step_index) if has_reward(item.reward)]
        experience = experience if self.run.workflow is None else with_branches(experience)
        return self.updates.deal(experience, self.step_index)

    def compute_old_logprobs(self, batch: Batch) -> Batch:
        """Adds the old logprobs of the ratio, unless the only update's own forward will compute them.

        On a shared body, the same pass gives the critic's values.
        """
        if self.critic is None or self._needs_scores:
            batch = self._scored(batch)
        if self.updates.stale or self.objective.ratio_to != "recompute":
            batch = with_other_policy(batch, self.config.algorithm, self.step_index, self.updates.stale)
        return batch

    def compute_reference_logprobs(self, batch: Batch) -> Batch:
        """Adds the logprobs of the frozen model that the policy started from, if anything compares with it."""
        if self.reference is None:
            return batch
        return batch.with_columns(ref_logprobs=self.updates.logprobs(self.reference, batch.samples))

    def compute_values(self, batch: Batch) -> Batch:
        """Adds the values of a critic that is a model of its own."""
        if self.critic is None:
            return batch
        values: dict[Key, list[float]] = {}
        for packed, scores in self.updates.scores(self.critic, batch.samples):
            values |= _values_by_sample(scores, packed)
        return batch._replace(values=values)

    def compute_advantages(self, batch: Batch) -> Batch:
        """Adds an advantage and a return for each token; every rank must call it, even with no sample."""
        samples = batch.samples
        targets = self.token_advantages.targets(
            samples,
            batch.values,
            self._kl_in_reward(batch.columns),
            self.objective.coefficients.kl,
            self.strategy.comm,
            self.statistics,
        )
        return batch.with_columns(
            advantages=targets.advantages,
            returns=targets.returns,
            old_values={item.key: batch.values[item.key][:-1] for item in samples},
        )

    def train(self, batch: Batch) -> None:
        """Takes one optimizer step of each model per update and epoch.

        The order of the two models does not matter: both learn from targets that were computed beforehand.
        """
        updates = self.updates.packed(batch, needs_old_logprobs=self._needs_scores)
        if self.critic is not None:
            with self._waiting(self.optimizer):
                self.updates.train(self.critic, updates, self.value_loss, self.objective.weight, prefix="critic/")
        if not self._is_frozen:
            self._train_policy(updates)

    def _train_policy(self, updates: list[list[PackedBatch]]) -> None:
        # If not, its scores were compared with the engine's before.
        is_sampler = self.critic is not None and not self._needs_scores
        with self._waiting(self.critic_optimizer):
            self.updates.train(self.policy, updates, self.loss, self.objective.weight, is_sampler=is_sampler)

    def loss(self, scores: TokenScores, batch: PackedBatch) -> Tensor:
        """Returns the mean loss of a micro-batch: the policy's, and the critic's if the two share a body."""
        loss = self.objective.loss(scores, batch, self.statistics)
        return loss + self.value_loss(scores, batch) if isinstance(scores, ScoresAndValues) else loss

    def value_loss(self, scores: StateValues | ScoresAndValues, batch: PackedBatch) -> Tensor:
        """Returns the mean loss of the critic's values over a micro-batch."""
        return self.value_objective.loss(scores, batch, self.statistics)

    def report(self, experience: Sequence[Experience] = ()) -> StepReport:
        """Reduces the statistics of the step over all ranks."""
        metrics = step_metrics(self.objective, self.statistics, self.strategy.comm, self.config.samples_per_step)
        return StepReport(metrics=metrics, experience=experience)

    # ---- Around the steps --------------------------------------------------------------------------------------

    def evaluate(self) -> dict[str, float]:
        """Evaluates the policy on the held-out prompts, with --eval.n samples of each."""
        return evaluate(self.collector, self.prompts, self.config.eval)

    def save_models(self, folder: Path) -> None:
        """Writes the policy, and the critic next to it."""
        if isinstance(self.policy, ActorCritic):
            head = dict(self.strategy.full_parameters(self.policy.value_head))
            if self.strategy.comm.is_main:
                folder.mkdir(parents=True, exist_ok=True)
                save_value_head(folder, head)  # first, so that the folder's hash includes it
        super().save_models(folder)
        if self.critic is not None and folder == self.folder.final:  # final_ema holds no average of the critic
            critic_folder = folder.with_name("final_critic")
            if self.strategy.comm.is_main:
                self.run.tokenizer.save_pretrained(critic_folder)
            self.strategy.save_pretrained(self.critic, critic_folder)

    def close(self) -> None:
        """Ends the rewards' processes and the engine, and leaves the process group."""
        self.rewards.close()
        super().close()

    # ---- Models ------------------------------------------------------------------------------------------------

    def _load_actor_critic(self) -> Policy:
        """Loads the policy with a value head on its own body."""
        policy = load_start_policy(self.run)
        head = load_value_head(
            self.run.model_path,
            policy.hf.config,
            materialize=self.strategy.materializes_weights,
            init_std=self.config.critic.head_init_std,
            seed=self.config.seed + _HEAD_SEED,
        )
        shared = ActorCritic(policy.hf, head)
        if self.config.routing.is_on:
            attach_replay(shared, keeps_logits=self.config.routing.has_losses)
        return shared

    def _add_critic(self) -> None:
        """Loads a separate critic once the policy was prepared, so that rank 0 never holds both models whole."""
        option = "--critic_model" if self.config.critic_model else "--model"
        with self.strategy.comm.phase("loading the critic", local=True), naming(option):
            critic = self._load_critic()
        trained = self.strategy.prepare_trained(
            critic,
            lr=self.config.critic_lr,
            schedule_length=self.config.schedule_length,
            frozen_head_steps=self.config.critic_warmup_steps,
        )
        self.critic, self.critic_optimizer = trained.model, trained.optimizer
        self.companions["critic"] = trained.model

    def _load_critic(self) -> Critic:
        config = self.config
        path = config.critic_model or self.run.model_path
        if config.critic_model:
            check_model_folder(path, "--critic_model")
            tokenizer = load_tokenizer(path, trust_remote_code=config.trust_remote_code)
            if tokenizer.get_vocab() != self.run.tokenizer.get_vocab():
                raise ValueError(
                    f"--critic_model {path} has another tokenizer than --model {config.model}: the critic reads the "
                    "policy's tokens. Give a model of the same family."
                )
        critic = load_critic(
            path,
            materialize=self.strategy.materializes_weights,
            init_std=config.critic.head_init_std,
            seed=config.seed + _HEAD_SEED,
            trust_remote_code=config.trust_remote_code,
        )
        fix_for_run(self.run, critic)
        add_adapters(critic.body, options_for_companion(config.lora, self.policy), seed=config.seed + _HEAD_SEED)
        return critic

    @contextmanager
    def _waiting(self, optimizer: Optimizer | None) -> Iterator[None]:
        """Keeps the states of an idle optimizer in host memory, if the options ask for it."""
        if optimizer is None or not self.config.critic.offload_waiting_optimizer:
            yield
            return
        freed = self.strategy.maybe_offload_optimizer(optimizer)
        self.statistics.maximum("memory/waiting_optimizer_gb", freed / 1e9)
        try:
            yield
        finally:
            self.strategy.maybe_load_optimizer(optimizer)

    # ---- Scores before the update ------------------------------------------------------------------------------

    @property
    def needs_reference(self) -> bool:
        """Whether the loss or the reward compares the policy with the starting model."""
        return self.config.algorithm.kl_coef != 0

    @property
    def _is_frozen(self) -> bool:
        """Whether only the critic learns in this step."""
        return self.step_index < self.config.critic.policy_frozen_steps

    @property
    def _needs_scores(self) -> bool:
        """Whether the policy scores all samples before the first update, alike on every rank."""
        return self.config.scores_first(has_older=bool(self.updates.stale), is_frozen=self._is_frozen)

    def _scored(self, batch: Batch) -> Batch:
        """Adds the policy's logprobs before the update and, on a shared body, the values."""
        logprobs: dict[Key, list[float]] = {}
        values: dict[Key, list[float]] = {}
        for packed, scores in self.updates.scores(self.policy, batch.samples):
            self._measure(scores, packed)
            logprobs |= by_sample([(packed, scores.logprobs)])
            if self.critic is None:
                values |= _values_by_sample(scores, packed)
        return batch.with_columns(old_logprobs=logprobs)._replace(values=values)

    def _measure(self, scores: TokenScores, batch: PackedBatch) -> None:
        self.updates.measure_mismatch(scores.logprobs, batch)
        if self._is_frozen:  # otherwise no loss would measure the entropy
            entropy = torch.where(batch.loss_mask, scores.entropy.detach(), 0.0)
            self.statistics.mean("entropy", float(entropy.sum()), int(batch.loss_mask.sum()))

    def _kl_in_reward(self, columns: Mapping[str, TokenValues | TokenMasks]) -> dict[Key, list[float]] | None:
        """Returns the KL to the reference for each response token, by sample; None if the reward has no KL term."""
        kind = self.config.algorithm.kl_in_reward
        if kind == "none":
            return None
        return {
            key: kl_estimate(
                policy=torch.tensor(logprobs, dtype=torch.float64),
                reference=torch.tensor(columns["ref_logprobs"][key], dtype=torch.float64),
                kind=kind,
            ).tolist()
            for key, logprobs in columns["old_logprobs"].items()
            if key in columns["ref_logprobs"]
        }


def _values_by_sample(scores: StateValues | ScoresAndValues, batch: PackedBatch) -> dict[Key, list[float]]:
    """Returns the values before each response token and after the last one."""
    parts = unpack(batch, scores.values.cpu())  # one transfer, not one per sample
    finals = dict(zip(batch.keys, scores.final_values.tolist(), strict=True))
    return {key: [*part.tolist(), finals[key]] for key, part in parts.items()}


def _with_mean_advantages(batch: Batch) -> list[Experience]:
    """Returns the samples by position, each with the mean of its own tokens' advantages, for the log."""
    advantages = batch.columns["advantages"]  # 0 for tokens of an environment
    means = [replace(item, advantage=sum(advantages[item.key]) / max(item.sample.num_own, 1)) for item in batch.samples]
    return sorted(means, key=lambda item: item.key)
