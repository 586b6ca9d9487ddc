"""Parts of a step that GRPO and PPO share: prompts, statistics of samples, updates of micro-batches, weight sync."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from lightrl.algorithms.losses import mismatch_statistics
from lightrl.comm import Comm
from lightrl.config import EvalConfig, RolloutConfig, template_arguments
from lightrl.data.balance import assign_to_ranks, imbalance
from lightrl.data.chat_arguments import uses_template, warn_of_date, warn_of_written_messages
from lightrl.data.media_fields import MediaFields
from lightrl.data.packing import (
    Key,
    Packable,
    TokenMasks,
    TokenValues,
    dummy_batch,
    pack,
    split_micro_batches,
    unpack,
)
from lightrl.data.prompts import build_fitting_prompts, build_prompts, require_field
from lightrl.data.sampler import PromptSampler, permutation, shard
from lightrl.metrics import Statistics
from lightrl.records import Experience, PackedBatch, Prompt, Sample, ScoredGroup
from lightrl.rewards.reward_set import RewardSet
from lightrl.rewards.scoring import has_reward
from lightrl.rollout.collector import Collector, Prompts, is_truncated, sampling_of
from lightrl.rollout.episode_collector import collector_of_episodes, longest_episode
from lightrl.strategy.base import TrainBatchResult
from lightrl.trainers.coefficients import Coefficients
from lightrl.trainers.fit import Shown, Trainer
from lightrl.trainers.objective import PolicyLoss
from lightrl.trainers.record_checks import check_fields
from lightrl.trainers.run import RunContext
from lightrl.trainers.run_folder import TrainerConfig
from lightrl.trainers.staleness import describe_staleness, older_samples
from lightrl.trainers.turn_end import warn_of_unstopped_turns

_MINIBATCH_STREAM = 3
_BUILD = {"error": build_prompts, "skip": build_fitting_prompts}  # by --data.too_long

Loss = Callable[[Any, PackedBatch], Tensor]  # (model output, micro-batch) -> loss

_Item = TypeVar("_Item", bound=Packable)


# ---- Prompts ---------------------------------------------------------------------------------------------------------


class PromptData:
    """The prompts of a run: draws those of each step and takes this rank's part."""

    def __init__(self, run: RunContext) -> None:
        """Tokenises the prompts; an unusable line raises an error on every rank."""
        config: RolloutConfig = run.config
        self._comm = run.strategy.comm
        with self._comm.phase("set-up", local=True):
            if run.workflow is not None or run.tokenizer.chat_template:
                _check_conversations(run)
            self.train, longest = _build_prompts(run, run.train_records, config.train_data, config.max_new_tokens)
            if not config.micro_batch_size and longest > config.max_tokens_per_microbatch:
                raise _micro_batch_too_small(config, longest)
            room = config.eval.max_new_tokens or config.max_new_tokens
            evaluation, _ = _build_prompts(run, run.eval_records, config.eval_data, room)
            if config.eval.source_field or config.reward_for:
                check_fields(run)
        self.evaluation = evaluation[: config.eval.max_prompts or None]
        self.sampler = PromptSampler(len(self.train), config.num_prompts, config.seed)

    def draw(self, count: int, first: int = 0) -> Prompts:
        """Draws the next `count` prompts as positions first, first + 1, ... of the step; returns this rank's part."""
        drawn = list(enumerate(self.sampler.draw(count), start=first))
        return [(position, self.train[index]) for position, index in shard(drawn, self._comm.rank, self._comm.world)]


def _check_conversations(run: RunContext) -> None:
    if run.workflow is not None:
        run.workflow.check(run.tokenizer)
    data, is_main = run.config.data, run.strategy.comm.is_main
    if run.tokenizer.chat_template and is_main and uses_template(data.chat_template, run.train_records):
        warn_of_date(run.tokenizer, template_arguments(data))
        warn_of_written_messages(run.train_records, data.prompt_field)
        warn_of_unstopped_turns(run.config, run.model_path, run.tokenizer)


def _build_prompts(run: RunContext, records: Sequence[Any], source: str, room: int) -> tuple[Sequence[Prompt], int]:
    """Returns the prompts, and the tokens of the longest of them with `room` for its response."""
    if not records:
        return [], 0
    data = run.config.data
    if data.answer_field != "answer":  # not every reward needs it
        _require_answers(records, data.answer_field, source)
    if run.context <= room:
        raise _no_room_for_prompts(room, run.context)
    prompts = _BUILD[data.too_long](
        run.workflow.with_tools(records) if run.workflow and run.media else records,
        run.tokenizer,
        prompt_field=data.prompt_field,
        answer_field=data.answer_field,
        max_prompt_tokens=run.context - room,
        chat_template=data.chat_template,
        media=MediaFields(image_field=data.image_field, video_field=data.video_field, processor=run.media),
        vocab_size=run.vocab_size,
    )
    longest = max(prompt.num_tokens for prompt in prompts) + room
    run.longest_sequences.append(longest if run.workflow is None else longest_episode(run.config, run.context))
    return prompts, longest


def _require_answers(records: Sequence[Any], field: str, source: str) -> None:
    require_field(records, field, f"--data.answer_field, in {source or 'what its built-in task keeps back'}")


def _no_room_for_prompts(max_new_tokens: int, context: int) -> ValueError:
    return ValueError(
        f"--max_new_tokens (or --eval.max_new_tokens) {max_new_tokens} leaves no room for a prompt in the model's "
        f"context of {context} tokens."
    )


def _micro_batch_too_small(config: RolloutConfig, longest: int) -> ValueError:
    return ValueError(
        f"--max_tokens_per_microbatch {config.max_tokens_per_microbatch} cannot hold the longest prompt with "
        f"--max_new_tokens {config.max_new_tokens}: raise it to at least {longest}, or give --micro_batch_size."
    )


# ---- Updates ---------------------------------------------------------------------------------------------------------


def describe_batches(config: RolloutConfig, world_size: int) -> str:
    """Returns the batch arithmetic as one line, for the start of a run."""
    per_update = config.samples_per_update
    per_rank = -(-per_update // world_size)
    if config.micro_batch_size:
        micro = f"{-(-per_rank // config.micro_batch_size)} micro-batches of <= {config.micro_batch_size} samples"
    else:
        micro = f"micro-batches of <= {config.max_tokens_per_microbatch} tokens"
    return (
        f"{config.num_prompts} prompts x {config.group_size} samples = {config.samples_per_step} samples a step; "
        f"{config.num_epochs} epoch(s) x {config.num_minibatches} mini-batch(es) = "
        f"{config.optimizer_steps_per_step} optimizer step(s) of {per_update} samples; "
        f"on each of {world_size} rank(s) about {per_rank} samples in {micro}; {config.max_steps} step(s)"
    )


class Batch(NamedTuple):
    """This rank's samples of each update of an epoch, and the values per token that are known so far."""

    minibatches: list[list[Experience]]
    columns: dict[str, TokenValues | TokenMasks]  # values per token, by argument name of packing.pack()
    values: dict[Key, list[float]]  # a critic's, by sample: one before each response token and one after the last

    @property
    def samples(self) -> list[Experience]:
        """The samples of all updates."""
        return [item for part in self.minibatches for item in part]

    @property
    def sampler_logprobs(self) -> TokenValues:
        """The logprobs that the engine reported, by sample."""
        return {item.key: item.sample.sampler_logprobs for item in self.samples}

    def with_columns(self, **columns: TokenValues | TokenMasks) -> Batch:
        """Returns the batch with more values per token."""
        return self._replace(columns=self.columns | columns)


class PolicyUpdates:
    """Cuts the samples of a step into updates, and scores them by a model."""

    def __init__(self, run: RunContext, statistics: Statistics) -> None:
        self._config: RolloutConfig = run.config
        self._strategy = run.strategy
        self._encoder = run.encoder
        self._statistics = statistics
        self._observers = run.observers
        self.stale: Set[Key] = frozenset()  # the step's samples that older weights made

    def experience(self, groups: Sequence[ScoredGroup], step: int) -> list[Experience]:
        """Returns the samples of groups with their rewards, as experiences that still lack advantages."""
        pairs = [pair for group in groups for pair in zip(group.samples, group.rewards, strict=True)]
        return [Experience(sample=sample, reward=reward, advantage=0.0) for sample, reward in pairs]

    def deal(self, experience: list[Experience], step: int) -> Batch:
        """Returns this rank's samples of each update of an epoch; all ranks get about the same number of tokens.

        A group stays in one update. Groups are dealt out in a seeded order of the step's positions, so mini-batches are
        the same at any world size.
        """
        parts = self._dealt_out(experience, step) if self._config.num_minibatches > 1 else [experience]
        parts = parts if self._strategy.comm.world == 1 else [self._balanced(part) for part in parts]
        batch = Batch(parts, {}, {})
        if self._config.samples_can_be_older:
            self.stale = older_samples(batch.samples, step, self._strategy.comm)
            describe_staleness(batch.samples, step, self._statistics)
        return batch

    def _dealt_out(self, experience: list[Experience], step: int) -> list[list[Experience]]:
        num_parts = self._config.num_minibatches
        num_groups = self._strategy.comm.max_int(1 + max((item.sample.position for item in experience), default=-1))
        order = permutation(num_groups, self._config.seed + _MINIBATCH_STREAM, step)
        index_of = {position: index for index, position in enumerate(order)}
        parts: list[list[Experience]] = [[] for _ in range(num_parts)]
        for item in experience:
            parts[index_of[item.sample.position] * num_parts // num_groups].append(item)
        return parts

    def _balanced(self, mine: list[Experience]) -> list[Experience]:
        """Moves samples between ranks until all have about the same number of tokens."""
        comm = self._strategy.comm
        lengths_by_rank = comm.all_gather_object([item.num_tokens for item in mine])
        lengths = [length for part in lengths_by_rank for length in part]
        owners = [rank for rank, part in enumerate(lengths_by_rank) for _ in part]
        if not lengths:
            return mine
        targets = assign_to_ranks(lengths, owners, comm.world)
        self._statistics.maximum("balance/max_over_mean", imbalance(lengths, targets, comm.world))
        if targets == owners:
            return mine
        own_targets = [target for target, owner in zip(targets, owners, strict=True) if owner == comm.rank]
        outgoing: list[list[Experience]] = [[] for _ in range(comm.world)]
        for item, target in zip(mine, own_targets, strict=True):
            outgoing[target].append(item)
        return comm.exchange(outgoing)

    def micro_batches(self, experience: list[Experience], **per_token: Any) -> list[PackedBatch]:
        """Packs samples into micro-batches, the same number on every rank; dummies fill up.

        per_token: values by argument name of pack().
        """
        temperature, encode = self._config.temperature, self._encoder
        parts = even_parts(experience, self._config, self._strategy.comm)
        with self._strategy.comm.phase("packing", local=True):
            packs = [pack(part, temperature=temperature, encode=encode, **per_token) for part in parts if part]
        return packs + [dummy_batch(temperature=temperature) for _ in range(len(parts) - len(packs))]

    def packed(self, batch: Batch, *, needs_old_logprobs: bool) -> list[list[PackedBatch]]:
        """Returns the micro-batches of each update of every epoch."""
        if needs_old_logprobs and "old_logprobs" not in batch.columns:
            raise _without_old_logprobs()  # otherwise each update's ratio would be 1
        updates = [self.micro_batches(part, **batch.columns) for part in batch.minibatches]
        return updates * self._config.num_epochs

    def train(
        self,
        model: nn.Module,
        updates: list[list[PackedBatch]],
        loss: Loss,
        weight: Callable[[PackedBatch], float | Tensor],
        *,
        is_sampler: bool = False,
        prefix: str = "",
    ) -> None:
        """Takes one optimizer step per update.

        Args:
            updates: The micro-batches of each update of every epoch; an update with nothing to train changes nothing.
            loss: The mean loss of a micro-batch, from the model's output.
            weight: The number of terms of which the loss is a mean.
            is_sampler: Whether the model is still the one that sampled, so that its first update measures the mismatch.
            prefix: Put in front of the names of the metrics.
        """
        for update in updates:
            batches = [batch.to(self._strategy.device) for batch in update]
            observed = partial(self._observed_loss, loss, is_sampler)
            result = self._strategy.train_batch(batches, observed, weight, model=model)
            is_sampler = is_sampler and result.skipped
            describe_update(result, self._statistics, prefix)

    def _observed_loss(self, loss: Loss, is_sampler: bool, scores: Any, batch: PackedBatch) -> Tensor:
        """Shows the scores to the observers, then returns their loss."""
        if is_sampler:
            self.measure_mismatch(scores.logprobs, batch)
        for observer in self._observers:
            observer.after_forward(scores, batch)
        return loss(scores, batch)

    def scores(self, model: nn.Module, experience: list[Experience]) -> Iterator[tuple[PackedBatch, Any]]:
        """Runs the model on all samples without gradients; yields pairs of a micro-batch and the model's output."""
        batches = [batch.to(self._strategy.device) for batch in self.micro_batches(experience)]
        return zip(batches, self._strategy.forward(batches, model=model), strict=True)

    def logprobs(self, model: nn.Module, experience: list[Experience]) -> dict[Key, list[float]]:
        """Returns the model's logprob of every response token, by sample."""
        return by_sample((batch, scores.logprobs) for batch, scores in self.scores(model, experience))

    def measure_mismatch(self, logprobs: Tensor, batch: PackedBatch) -> None:
        """Compares the engine's logprobs with the trainer's for the same weights, before any clipping or update."""
        mask = self._is_fresh(batch) if self.stale else batch.loss_mask
        result = mismatch_statistics(logprobs.detach(), batch.sampler_logprobs, mask)
        if count := float(result["count"]):  # without a token, a 0 would mean that the two agree
            self._statistics.maximum("mismatch/max_abs", float(result["max_abs"]))
            self._statistics.mean("mismatch/mean_abs", float(result["sum_abs"]), count)
            self._statistics.mean("mismatch/k3", float(result["sum_k3"]), count)

    def _is_fresh(self, batch: PackedBatch) -> Tensor:
        """Returns the mask of the trained tokens in samples that older weights have no part in."""
        is_fresh = torch.tensor([key not in self.stale for key in batch.keys], device=batch.loss_mask.device)
        return batch.loss_mask & is_fresh[batch.sequence_index]


def _without_old_logprobs() -> ValueError:
    return ValueError(
        "train() was given a batch without the logprobs before the update, and several updates compare with them. Call "
        "compute_old_logprobs() first, or learn_from(), which makes all calls in order."
    )


def even_parts(items: Sequence[_Item], config: TrainerConfig, comm: Comm) -> list[list[_Item]]:
    """Cuts items into micro-batches within the limits, the same number on every rank; the last may be empty."""
    size = config.micro_batch_size
    limits: Any = {"max_tokens": None if size else config.max_tokens_per_microbatch, "max_samples": size or None}
    with comm.phase("micro-batches", local=True) as agreed:
        parts = split_micro_batches(items, **limits)
        agreed.largest = len(parts)
    return parts if len(parts) == agreed.largest else split_micro_batches(items, min_num=agreed.largest, **limits)


def by_sample(values: Iterable[tuple[PackedBatch, Tensor]]) -> dict[Key, list[float]]:
    """Cuts each pack's values, [N] one per response token, into a list per sample."""
    return {key: part.tolist() for batch, tensor in values for key, part in unpack(batch, tensor.cpu()).items()}


# ---- Engine ----------------------------------------------------------------------------------------------------------


def start_engine(run: RunContext, policy: nn.Module, rewards: RewardSet) -> Collector:
    """Builds the engine with the policy's weights and puts it to sleep; returns the collector that uses it."""
    config, strategy = run.config, run.strategy
    if config.rollout.from_:  # a record provides samples and rewards
        return Collector(strategy, rewards, seed=config.seed, max_new_tokens=config.max_new_tokens)
    with strategy.comm.phase("set-up"):
        rewards.prepare(strategy)
        strategy.serving.start(config.engine_path, model=policy, tokenizer=strategy.tokenizer, options=config)
        strategy.sleep_engine()
    if run.workflow is not None:
        return collector_of_episodes(run.workflow, strategy, rewards, config)
    return Collector(strategy, rewards, seed=config.seed, max_new_tokens=config.max_new_tokens, **sampling_of(config))


def shown_of(rewards: RewardSet) -> Shown:
    """Returns the metrics that a run prints, including the mean of each reward if there are several."""
    names = [f"reward/{item.label}" for item in rewards.rewards] if len(rewards.rewards) > 1 else []
    step = ("reward/mean", *names, "episode/failed_share", "tokens/per_second", "entropy")
    evaluated = ("eval/accuracy", "eval/reward", *(f"eval/{name}" for name in names))
    if rewards.collective_label:  # a reward model, on whose scale 1 does not mean that a response is right
        return Shown(step=step, evaluation=evaluated[1:], table=("eval/reward", "reward/mean", "entropy"))
    return Shown(step=step, evaluation=evaluated)


def evaluate(collector: Collector, prompts: PromptData, config: EvalConfig) -> dict[str, float]:
    """Samples the held-out prompts as the options say, without any effect on the training."""
    return collector.evaluate(
        prompts.evaluation, temperature=config.temperature, n=config.n, ks=config.k, source_field=config.source_field
    )


def sync_engine(trainer: Trainer) -> None:
    """Sends the trained model's weights to the engine, stamped with the number of finished steps."""
    strategy, statistics = trainer.strategy, trainer.statistics
    with trainer.timed("sync", "weight sync"):
        strategy.set_global_step(trainer.step_index + 1)
        report = strategy.sync_weights(trainer.model)
    statistics.maximum("sync/gb", report.num_bytes / 1e9)
    statistics.maximum("sync/gb_per_s", report.gb_per_s)
    statistics.maximum("sync/version", report.version)
    statistics.maximum("memory/engine_freed_gb", strategy.serving.require_engine().freed_bytes / 1e9)
    if report.canary is not None:
        statistics.maximum("sync/canary_max_abs", report.canary)
    if trainer.config.offload_while_generating:
        statistics.maximum("memory/offloaded_gb", strategy.residency.offloaded_bytes / 1e9)


# ---- Statistics ------------------------------------------------------------------------------------------------------


def describe_rollout(samples: Sequence[Sample], rewards: Sequence[float], statistics: Statistics) -> None:
    """Adds the reward and length statistics of this rank's samples; a failed episode, without a turn, has no length."""
    if scored := [pair for pair in zip(samples, rewards, strict=True) if has_reward(pair[1])]:  # otherwise no mean
        statistics.values("reward/mean", [reward for _, reward in scored])
    groups = [[reward for _, reward in group] for _, group in groupby(scored, key=lambda pair: pair[0].position)]
    if groups and len({sample.position for sample in samples}) < len(samples):  # otherwise nothing could be compared
        statistics.mean("reward/equal_groups", sum(min(group) == max(group) for group in groups), len(groups))
    conversations = [part for sample in samples for part in (sample, *sample.branches)]
    statistics.add("tokens/prompt", sum(len(part.prompt_ids) for part in conversations))
    statistics.add("tokens/response", sum(len(part.response_ids) for part in conversations))
    if any(sample.own for sample in samples):
        statistics.add("tokens/environment", sum(len(sample.response_ids) - sample.num_own for sample in samples))
    if num_lengths := sum(bool(sample.turns) for sample in samples):
        statistics.mean("tokens/response_mean", sum(sample.num_own for sample in samples), num_lengths)
        statistics.maximum("tokens/response_max", max(sample.num_own for sample in samples))
        statistics.mean("tokens/truncated", sum(map(is_truncated, samples)), num_lengths)


def describe_update(result: TrainBatchResult, statistics: Statistics, prefix: str = "") -> None:
    """Adds the statistics of an update; for a skipped one, only that it was skipped.

    The numbers are already the same on every rank, so a mean over ranks does not change them.
    """
    statistics.mean(f"{prefix}skipped_updates", float(result.skipped), 1)
    if result.skipped:
        return
    if not prefix:  # a critic's loss is reported by its objective
        statistics.mean("loss", result.loss, 1)
    statistics.mean(f"{prefix}grad_norm", result.grad_norm, 1)
    statistics.maximum(f"{prefix}lr", result.lr)


def step_metrics(objective: PolicyLoss, statistics: Statistics, comm: Comm, num_samples: int) -> dict[str, float]:
    """Reduces the statistics of the step over all ranks, and adapts coefficients that follow a target."""
    coefficients = objective.coefficients
    statistics.maximum("kl_coef", coefficients.kl)
    statistics.maximum("entropy_coef", coefficients.entropy)
    metrics = statistics.reduce(comm)
    if "kl" in metrics and isinstance(coefficients, Coefficients):  # "kl": the policy was updated
        coefficients.follow(kl=metrics["kl"], entropy=metrics["entropy"], num_samples=num_samples)
    return metrics
