"""Writes each token of the logged samples with its values in the training (--log.tokens).

A run without the option uses none of this.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from lightrl.data.packing import Key, unpack
from lightrl.records import Experience, PackedBatch, Sample, StateValues, TokenScores
from lightrl.trainers.observer import Observer

Values = dict[str, list[float | None]]  # values of a sample's tokens, by name; None: not finite
Rewards = dict[tuple[Key, str], dict[str, float]]  # by sample and text, since evaluations use the same sample keys

_DIGITS = 4  # kept of a value in samples.jsonl


def token_log(trainer: Any) -> Observer:
    """Returns the observer that adds tokens and rewards to samples.jsonl; every rank must call it."""
    if not hasattr(trainer, "loss"):
        raise ValueError(
            f"--log.tokens needs a trainer that has loss(scores, batch), as those of GRPO and PPO: "
            f"{type(trainer).__name__} has none."
        )
    first = trainer.config.log.samples_per_step
    return TokenLog(first, trainer) if first else Observer()


class TokenLog(Observer):
    """Collects the values of the tokens of a step's first samples."""

    def __init__(self, first: int, trainer: Any) -> None:
        self._first = first  # logged samples of a step, which come from at most as many prompts
        self._comm, self._decode = trainer.strategy.comm, trainer.run.tokenizer.decode
        self._values: dict[Key, Values] = {}  # this rank's, in the current step
        self._rewards: Rewards = {}
        self._all_values: dict[Key, Values] = {}  # all ranks', in the step that has ended
        self._all_rewards: Rewards = {}
        if len(trainer.rewards.rewards) > 1:
            trainer.rewards.hear(self.note_rewards)

    def after_forward(self, scores: TokenScores | StateValues, batch: PackedBatch) -> None:
        """Keeps the values of a micro-batch: the ratio of a sample's last update, and other values of its first."""
        if isinstance(scores, StateValues):
            return
        before = scores.logprobs if batch.old_logprobs is None else batch.old_logprobs
        tensors = {
            "advantage": batch.advantages,
            "mask": batch.loss_mask.float(),
            "logprob": scores.logprobs,
            "ratio": (scores.logprobs - before).exp(),
            "engine_ratio": (scores.logprobs - batch.sampler_logprobs).exp(),
            "entropy": scores.entropy,
        }
        for name, tensor in tensors.items():
            for key, part in unpack(batch, tensor.detach()).items():
                known = self._values.setdefault(key, {}) if key[0] < self._first else {}
                if name == "ratio" or name not in known:
                    known[name] = [_short(value) for value in part.tolist()]

    def note_rewards(self, label: str, samples: Sequence[Sample], outcomes: Sequence[Any]) -> None:
        """Keeps a named reward of each sample."""
        for sample, outcome in zip(samples, outcomes, strict=True):
            if sample.position < self._first and isinstance(outcome, float):
                self._rewards.setdefault((sample.key, sample.text), {})[label] = outcome

    def after_step(self, step: int) -> None:
        """Gathers the values of all ranks, since a sample may be trained on another rank than the one that made it."""
        parts = self._comm.all_gather_object((self._values, self._rewards))
        self._values, self._rewards = {}, {}
        self._all_values = {key: values for part, _ in parts for key, values in part.items()}
        self._all_rewards = {key: values for _, part in parts for key, values in part.items()}

    def sample_columns(self, item: Experience) -> dict[str, Any]:
        """Returns the tokens and rewards of a sample; an untrained sample has only the engine's values."""
        sample = item.sample
        tokens: dict[str, Any] = {
            "text": [self._decode([token]) for token in sample.response_ids],
            "version": list(sample.versions),
            "mask": [float(is_own) for is_own in sample.is_own],
            **self._all_values.get(item.key, {}),
        }
        rewards = self._all_rewards.get((item.key, sample.text))
        return {"tokens": tokens, **({"rewards": rewards} if rewards else {})}


def _short(value: float) -> float | None:
    return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None
