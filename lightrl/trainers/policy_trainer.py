"""What GRPO and PPO share: one step's samples as mini-batches, spread over the ranks, packed, scored, and described."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from lightrl.algorithms.kl import mismatch_statistics
from lightrl.config import AlgorithmConfig
from lightrl.data.balance import assign_to_ranks, imbalance
from lightrl.data.packing import Key, TokenValues, dummy_batch, pack, split_micro_batches, unpack
from lightrl.data.sampler import permutation
from lightrl.records import Experience, PackedBatch, Prompt, Sample, TokenScores
from lightrl.rewards.failures import has_reward
from lightrl.trainers.objective import PolicyLoss
from lightrl.trainers.rollout import RolloutTrainer

_MINIBATCH_STREAM = 3


class PolicyTrainer(RolloutTrainer):
    """A child writes the step and the learning; these are their parts."""

    objective: PolicyLoss
    _stale: Set[Key] = frozenset()  # samples of this step that older weights made

    @property
    def algorithm(self) -> AlgorithmConfig:
        """The child's section of this kind."""
        raise NotImplementedError

    @property
    def needs_reference(self) -> bool:
        return self.algorithm.kl_coef != 0

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"coefficients": self.objective.coefficients.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.objective.coefficients.load_state_dict(state["coefficients"])

    def take_metrics(self) -> dict[str, float]:
        """The step's, over all ranks; coefficients that follow a target move by them."""
        coefficients = self.objective.coefficients
        self.statistics.highest("kl_coef", coefficients.kl)
        self.statistics.highest("entropy_coef", coefficients.entropy)
        metrics = self.statistics.reduce(self.strategy.comm)
        if "kl" in metrics:  # there was an update of the policy
            samples = self.config.samples_per_step
            coefficients.follow(kl=metrics["kl"], entropy=metrics["entropy"], num_samples=samples)
        return metrics

    def roll_out(self, prompts: Sequence[tuple[int, Prompt]]) -> list[Sample]:
        """The samples of this rank's prompts, a group's adjacent."""
        with self.watch.measure("time/rollout"):
            return self.collector.sample(
                prompts, step=self.step_index, group_size=self.config.group_size, temperature=self.config.temperature
            )

    # ---- Before the update ---------------------------------------------------------------------------------------

    @property
    def _recomputes_old(self) -> bool:
        """A single update needs no second forward: its own logprobs are those before the update."""
        return self.algorithm.old_logprobs == "recompute" and self.config.optimizer_steps_per_step > 1

    def _old_logprobs(self, experience: list[Experience]) -> TokenValues | None:
        if self.algorithm.old_logprobs == "engine":
            return {(e.sample.position, e.sample.sample_index): e.sample.sampler_logprobs for e in experience}
        if not self._recomputes_old:
            return None
        return self._score_all(self.policy, experience, measure_mismatch=True)

    def _minibatches(self, experience: list[Experience]) -> list[list[Experience]]:
        """Whole groups, dealt by a seeded order of the step's positions: the same mini-batches at any world size."""
        num_parts = self.config.num_minibatches
        num_groups = self.strategy.comm.max_int(1 + max((item.sample.position for item in experience), default=-1))
        order = permutation(num_groups, self.config.seed + _MINIBATCH_STREAM, self.step_index)
        place = {position: rank for rank, position in enumerate(order)}
        parts: list[list[Experience]] = [[] for _ in range(num_parts)]
        for item in experience:
            parts[place[item.sample.position] * num_parts // num_groups].append(item)
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

    def _micro_batches(self, experience: list[Experience], **per_token: Any) -> list[PackedBatch]:
        """The same number on every rank; a rank with fewer samples than that gets dummies, which train nothing.

        per_token: the values that pack() takes, by its names.
        """
        per_token = {"old_logprobs": None, "ref_logprobs": None} | per_token
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
                pack(part, temperature=temperature, encode=self.encoder, **per_token)
                if part
                else dummy_batch(temperature=temperature)
                for part in parts
            ]
        return [batch.to(self.strategy.device) for batch in packs]

    def _score_all(
        self, model: nn.Module, experience: list[Experience], *, measure_mismatch: bool = False
    ) -> dict[Key, list[float]]:
        """The model's logprobs of every response token, by sample."""
        scored = self._scored_batches(model, experience)
        if measure_mismatch:
            for batch, scores in scored:
                self._measure_mismatch(scores, batch)
        return by_sample((batch, scores.logprobs) for batch, scores in scored)

    def _scored_batches(self, model: nn.Module, experience: list[Experience]) -> list[tuple[PackedBatch, TokenScores]]:
        batches = self._micro_batches(experience)
        return list(zip(batches, self.strategy.forward(batches, model=model), strict=True))

    def _has_trained_tokens(self, minibatch: Sequence[Experience]) -> bool:
        """Over all ranks. Without any there must be no update: even a gradient of 0 would move the weights, by Adam's
        momentum and the decay."""
        return self.strategy.comm.any(any(item.is_trained and item.sample.response_ids for item in minibatch))

    # ---- What a step tells -------------------------------------------------------------------------------------

    def _measure_mismatch(self, scores: TokenScores, batch: PackedBatch) -> None:
        """Engine against trainer logprobs of the same weights, before any clipping or update."""
        is_fresh = torch.tensor([key not in self._stale for key in batch.keys], device=batch.loss_mask.device)
        mask = batch.loss_mask & is_fresh[batch.sequence_index]
        found = mismatch_statistics(scores.logprobs.detach(), batch.sampler_logprobs, mask)
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

    def describe_rollout(self, samples: Sequence[Sample], rewards: Sequence[float]) -> None:
        """Reward and length statistics of this rank's samples."""
        statistics, count = self.statistics, len(samples)
        scored = [pair for pair in zip(samples, rewards, strict=True) if has_reward(pair[1])]
        if scored:  # where no sample on any rank has a reward, there is no mean to tell, and 0 would be one
            statistics.mean("reward/mean", sum(reward for _, reward in scored), len(scored))
        groups = [[reward for _, reward in group] for _, group in groupby(scored, key=lambda pair: pair[0].position)]
        statistics.mean("reward/equal_groups", sum(min(group) == max(group) for group in groups), len(groups))
        response_tokens = sum(len(sample.response_ids) for sample in samples)
        statistics.add("tokens/prompt", sum(len(sample.prompt_ids) for sample in samples))
        statistics.add("tokens/response", response_tokens)
        statistics.mean("tokens/response_mean", response_tokens, count)
        statistics.highest("tokens/response_max", max((len(sample.response_ids) for sample in samples), default=0))
        statistics.mean("tokens/truncated", sum(is_truncated(sample) for sample in samples), count)


def by_sample(values: Iterable[tuple[PackedBatch, Tensor]]) -> dict[Key, list[float]]:
    """Of each pack one value per response token, [N], as lists by sample."""
    return {key: part.tolist() for batch, tensor in values for key, part in unpack(batch, tensor).items()}


def is_truncated(sample: Sample) -> bool:
    return sample.finish_reason == "length"
