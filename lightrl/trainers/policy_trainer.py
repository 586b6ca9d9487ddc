"""What GRPO and PPO share: one step's samples as mini-batches, spread over the ranks, packed, scored, and described."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from lightrl.algorithms.mismatch import mismatch_statistics
from lightrl.config import AlgorithmConfig
from lightrl.data.balance import assign_to_ranks, imbalance
from lightrl.data.packing import TokenValues, dummy_batch, pack, split_micro_batches, unpack
from lightrl.data.sampler import permutation
from lightrl.records import Experience, PackedBatch, Prompt, Sample, TokenScores
from lightrl.trainers.objective import PolicyLoss
from lightrl.trainers.rollout import RolloutTrainer

_MINIBATCH_STREAM = 3


class PolicyTrainer(RolloutTrainer):
    """A child writes the step and the learning; these are their parts."""

    objective: PolicyLoss

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
    ) -> dict[tuple[int, int], list[float]]:
        """The model's logprobs of every response token, by sample."""
        batches = self._micro_batches(experience)
        found: dict[tuple[int, int], list[float]] = {}
        for batch, scores in zip(batches, self.strategy.forward(batches, model=model), strict=True):
            if measure_mismatch:
                self._measure_mismatch(scores, batch)
            found.update({key: part.tolist() for key, part in unpack(batch, scores.logprobs).items()})
        return found

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
