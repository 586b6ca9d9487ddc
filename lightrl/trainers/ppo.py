"""PPO (arXiv:1707.06347): samples get an advantage per token from a critic's values, then policy and critic learn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightrl.algorithms.kl import kl_estimate
from lightrl.config import AlgorithmConfig, PPOConfig
from lightrl.data.packing import Key, TokenValues, unpack
from lightrl.models.critic import ActorCritic, Critic, load_critic, load_value_head, save_value_head
from lightrl.models.lora import add_adapters, options_beside
from lightrl.models.policy import Policy, check_model_folder, load_tokenizer
from lightrl.records import Experience, PackedBatch, Prompt, ScoresAndValues, StateValues, TokenScores
from lightrl.rewards import AnyReward
from lightrl.rewards.failures import has_reward
from lightrl.strategy import StrategyBase
from lightrl.strategy.base import TrainBatchResult
from lightrl.trainers.base import StepReport
from lightrl.trainers.objective import PolicyLoss
from lightrl.trainers.policy_trainer import PolicyTrainer
from lightrl.trainers.token_advantages import TokenAdvantages
from lightrl.trainers.value_objective import ValueObjective

_HEAD_SEED = 5  # apart from the other draws of the run
Columns = Mapping[str, TokenValues | None]  # the values per token that pack() takes, by its names


class PPOTrainer(PolicyTrainer):
    """One `step()` is one pass of the loop; everything around it is in PolicyTrainer and below."""

    kind = "ppo"
    config: PPOConfig
    critic: Critic | None  # None: a head on the policy's own body
    critic_optimizer: Optimizer | None

    def __init__(
        self, config: PPOConfig, *, strategy: StrategyBase | None = None, reward: AnyReward | None = None
    ) -> None:
        self.objective = PolicyLoss(config.algorithm, kl_in_loss=config.algorithm.kl_in_reward == "none")
        self.value_objective = ValueObjective(config.critic, self.objective.token_weights)
        self.token_advantages = TokenAdvantages(config.algorithm)
        super().__init__(config, strategy=strategy, reward=reward)

    @property
    def algorithm(self) -> AlgorithmConfig:
        return self.config.algorithm

    def step(self, prompts: Sequence[tuple[int, Prompt]]) -> StepReport:
        """prompts: (position in the step's global batch, prompt), this rank's share."""
        samples = self.roll_out(prompts)
        with self.watch.measure("time/reward"):
            rewards = self.collector.score(samples, self.statistics)
            self.describe_rollout(samples, rewards)
        experience = [
            Experience(sample=sample, reward=reward, advantage=0.0)
            for sample, reward in zip(samples, rewards, strict=True)
            if has_reward(reward)
        ]
        with self.watch.measure("time/learn"), self.strategy.comm.phase("learn"):
            experience = self.learn(experience)
        self.sync_engine()
        return StepReport(metrics=self.take_metrics(), experience=experience)

    # ---- Learning ----------------------------------------------------------------------------------------------

    def learn(self, experience: list[Experience]) -> list[Experience]:
        """All optimizer steps of this step's samples; returns them by position, with the mean of their advantages."""
        minibatches = [self._balanced(part) for part in self._minibatches(experience)]
        everything = [item for part in minibatches for item in part]
        ref_logprobs = self._score_all(self.reference, everything) if self.reference is not None else None
        old_logprobs, values = self._before_the_update(everything)
        targets = self.token_advantages.targets(
            everything,
            values,
            self._kl_in_reward(old_logprobs, ref_logprobs),
            self.objective.coefficients.kl,
            self.strategy.comm,
            self.statistics,
        )
        columns: Columns = {
            "old_logprobs": old_logprobs,
            "ref_logprobs": ref_logprobs,
            "advantages": targets.advantages,
            "returns": targets.returns,
            "old_values": {item.key: values[item.key][:-1] for item in everything},
        }
        if self.critic is not None:
            self._train_critic(self.critic, minibatches, columns)
        if not self._is_frozen:
            self._train_policy(minibatches, columns)
        return _with_mean_advantages(everything, targets.advantages)

    @property
    def _is_frozen(self) -> bool:
        """Whether the policy stays as it is in this step."""
        return self.step_index < self.config.critic.policy_frozen_steps

    def _train_policy(self, minibatches: list[list[Experience]], columns: Columns) -> None:
        measures_mismatch = self.critic is not None and not self._recomputes_old
        with self._waiting(self.critic_optimizer):
            for part in minibatches * self.config.num_epochs:
                if not self._has_trained_tokens(part):
                    self.statistics.mean("skipped_updates", 1, 1)
                    continue
                # Before the first update the policy is still the one that the engine sampled from.
                loss_fn = self._policy_loss(measure_mismatch=measures_mismatch)
                batches = self._micro_batches(part, **columns)
                result = self.strategy.train_batch(batches, loss_fn, self.objective.weight, model=self.policy)
                self._describe_update(result.loss, result.grad_norm, result.lr, result.skipped)
                measures_mismatch = False

    def _train_critic(self, critic: Critic, minibatches: list[list[Experience]], columns: Columns) -> None:
        """By itself: what it learns towards was fixed before, so the order of the two is all one."""
        with self._waiting(self.optimizer):
            for part in minibatches * self.config.num_epochs:
                if not self._has_trained_tokens(part):
                    self.statistics.mean("critic/skipped_updates", 1, 1)
                    continue
                batches = self._micro_batches(part, **columns)
                result = self.strategy.train_batch(batches, self._value_loss, self.objective.weight, model=critic)
                self._describe_critic_update(result)

    @contextmanager
    def _waiting(self, optimizer: Optimizer | None) -> Iterator[None]:
        """Its states are in host memory meanwhile, if that is asked for."""
        if optimizer is None or not self.config.critic.offload_waiting_optimizer:
            yield
            return
        freed = self.strategy.maybe_offload_optimizer(optimizer)
        self.statistics.highest("memory/waiting_optimizer_gb", freed / 1e9)
        try:
            yield
        finally:
            self.strategy.maybe_load_optimizer(optimizer)

    def _policy_loss(self, *, measure_mismatch: bool) -> Callable[[TokenScores, PackedBatch], Tensor]:
        def loss_fn(scores: TokenScores, batch: PackedBatch) -> Tensor:
            if measure_mismatch:
                self._measure_mismatch(scores, batch)
            loss = self.objective.loss(scores, batch, self.statistics)
            return loss + self._value_loss(scores, batch) if isinstance(scores, ScoresAndValues) else loss

        return loss_fn

    def _value_loss(self, scores: StateValues | ScoresAndValues, batch: PackedBatch) -> Tensor:
        return self.value_objective.loss(scores, batch, self.statistics)

    # ---- Before the update ---------------------------------------------------------------------------------------

    @property
    def _recomputes_old(self) -> bool:
        """Also where the KL is wanted before there is a loss, and where a frozen policy has none to measure it by."""
        wanted = self.config.algorithm.kl_in_reward != "none" or self._is_frozen
        return super()._recomputes_old or (wanted and self.algorithm.old_logprobs == "recompute")

    def _before_the_update(self, experience: list[Experience]) -> tuple[TokenValues | None, dict[Key, list[float]]]:
        """(old logprobs if they are wanted, values), both per sample; a value more than tokens, behind the last."""
        if self.critic is not None:
            return self._old_logprobs(experience), self._values(self.critic, experience)
        logprobs: dict[Key, list[float]] = {}
        values: dict[Key, list[float]] = {}
        for batch, scores in self._forward(self.policy, experience):
            self._measure_mismatch(scores, batch)
            logprobs.update({key: part.tolist() for key, part in unpack(batch, scores.logprobs).items()})
            values.update(_values_by_sample(scores, batch))
        is_own = self.algorithm.old_logprobs == "recompute"
        return logprobs if is_own else self._old_logprobs(experience), values

    def _values(self, critic: Critic, experience: list[Experience]) -> dict[Key, list[float]]:
        found: dict[Key, list[float]] = {}
        for batch, scores in self._forward(critic, experience):
            found.update(_values_by_sample(scores, batch))
        return found

    def _forward(self, model: nn.Module, experience: list[Experience]) -> Iterator[tuple[PackedBatch, Any]]:
        batches = self._micro_batches(experience)
        return zip(batches, self.strategy.forward(batches, model=model), strict=True)

    def _kl_in_reward(self, old: TokenValues | None, ref: TokenValues | None) -> dict[Key, list[float]] | None:
        """Per sample, of each response token."""
        kind = self.config.algorithm.kl_in_reward
        if kind == "none":
            return None
        assert old is not None
        assert ref is not None
        return {
            key: kl_estimate(
                policy=torch.tensor(logprobs, dtype=torch.float64),
                reference=torch.tensor(ref[key], dtype=torch.float64),
                kind=kind,
            ).tolist()
            for key, logprobs in old.items()
            if key in ref
        }

    # ---- Models --------------------------------------------------------------------------------------------------

    def build_models(self) -> Policy:
        policy = super().build_models()
        self.critic, self.critic_optimizer = None, None
        if not self.config.critic.shared_backbone:
            with self.strategy.comm.phase("loading the critic", local=True):
                critic = self._load_critic()
            # Only now, as the reference: before the policy was sharded, rank 0 would have held both whole.
            _, (self.critic, self.critic_optimizer, _), *_ = self.strategy.prepare_models_and_optimizers(
                None, critic, None, None, self.strategy.args, self.config.schedule_length
            )
        return policy

    def _load_critic(self) -> Critic:
        config = self.config
        path = config.critic_model or self.model_path
        if config.critic_model:
            check_model_folder(path, "--critic_model")
            tokenizer = load_tokenizer(path, trust_remote_code=config.trust_remote_code)
            if tokenizer.get_vocab() != self.tokenizer.get_vocab():
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
        add_adapters(critic.body, options_beside(config.lora, self.policy), seed=config.seed + _HEAD_SEED)
        return critic

    def load_policy(self, *, is_reference: bool) -> Policy:
        policy = super().load_policy(is_reference=is_reference)
        if is_reference or not self.config.critic.shared_backbone:
            return policy
        head = load_value_head(
            self.model_path,
            policy.hf.config,
            materialize=self.strategy.materializes_weights,
            init_std=self.config.critic.head_init_std,
            seed=self.config.seed + _HEAD_SEED,
        )
        return ActorCritic(policy.hf, head)

    def companions(self) -> dict[str, nn.Module]:
        return {} if self.critic is None else {"critic": self.critic}

    def save_models(self, folder: Path) -> None:
        super().save_models(folder)
        if self.critic is not None and folder == self.folder.final:  # there is no average of it beside final_ema
            critic_folder = folder.with_name("final_critic")
            self.strategy.save_pretrained(self.critic, critic_folder)
            if self.strategy.comm.is_main:
                self.tokenizer.save_pretrained(critic_folder)
        elif isinstance(self.policy, ActorCritic):
            head = dict(self.strategy.full_parameters(self.policy.value_head))
            if self.strategy.comm.is_main:
                save_value_head(folder, head)

    # ---- State and what a step tells -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"moments": self.token_advantages.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.token_advantages.load_state_dict(state["moments"])

    def _measure_mismatch(self, scores: TokenScores, batch: PackedBatch) -> None:
        super()._measure_mismatch(scores, batch)
        if self._is_frozen:  # no loss will tell it
            entropy = torch.where(batch.loss_mask, scores.entropy.detach(), 0.0)
            self.statistics.mean("entropy", float(entropy.sum()), int(batch.loss_mask.sum()))

    def _describe_critic_update(self, result: TrainBatchResult) -> None:
        self.statistics.mean("critic/grad_norm", result.grad_norm, 1)
        self.statistics.highest("critic/lr", result.lr)
        self.statistics.mean("critic/skipped_updates", float(result.skipped), 1)


def _values_by_sample(scores: StateValues | ScoresAndValues, batch: PackedBatch) -> dict[Key, list[float]]:
    """One before each response token, and one behind the last."""
    parts = unpack(batch, scores.values.cpu())  # at once, not sample by sample
    finals = dict(zip(batch.keys, scores.final_values.tolist(), strict=True))
    return {key: [*part.tolist(), finals[key]] for key, part in parts.items()}


def _with_mean_advantages(experience: list[Experience], advantages: Mapping[Key, list[float]]) -> list[Experience]:
    """For the log, which takes the first samples by position."""
    found = [(item, advantages[item.key]) for item in experience]
    means = [replace(item, advantage=sum(part) / max(len(part), 1)) for item, part in found]
    return sorted(means, key=lambda item: item.key)
