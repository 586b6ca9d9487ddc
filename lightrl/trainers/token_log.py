"""Writes each token of the logged samples with what the training made of it (--log.tokens).

Nothing of it is entered by a run without the option.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from lightrl.data.packing import Key, unpack
from lightrl.records import Experience, PackedBatch, Sample, StateValues, TokenScores
from lightrl.rewards.scoring import RewardError
from lightrl.trainers.observer import Observer

Values = dict[str, list[float | None]]  # of the tokens of a sample, by name; None is not finite
Rewards = dict[tuple[Key, str], dict[str, float]]  # by sample and text: evaluations have such keys too

_DIGITS = 4  # of a value in samples.jsonl that matter


def token_log(trainer: Any) -> Observer:
    """Returns what adds tokens and rewards to the lines of samples.jsonl; every rank calls it."""
    if not hasattr(trainer, "loss"):
        raise ValueError(
            f"--log.tokens needs a trainer that has loss(scores, batch), as those of GRPO and PPO: "
            f"{type(trainer).__name__} has none."
        )
    first = trainer.config.log.samples_per_step
    return TokenLog(first, trainer) if first else Observer()


class TokenLog(Observer):
    """What is known of the tokens of the first samples of a step."""

    def __init__(self, first: int, trainer: Any) -> None:
        self._first = first  # samples of a step; each of these is of one of as many prompts
        self._comm, self._decode = trainer.strategy.comm, trainer.run.tokenizer.decode
        self._values: dict[Key, Values] = {}  # of this rank in the step
        self._rewards: Rewards = {}
        self._all_values: dict[Key, Values] = {}  # of all ranks in the step that has ended
        self._all_rewards: Rewards = {}
        if len(trainer.rewards.rewards) > 1:
            trainer.rewards.hear(self.note_rewards)

    def after_forward(self, scores: TokenScores | StateValues, batch: PackedBatch) -> None:
        """Keeps the values of a micro-batch. Of several updates on a sample, the first and the last one count."""
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
        """Keeps a reward of each sample."""
        for sample, outcome in zip(samples, outcomes, strict=True):
            if sample.position < self._first and not isinstance(outcome, RewardError):
                self._rewards.setdefault((sample.key, sample.text), {})[label] = float(outcome)

    def after_step(self, step: int) -> None:
        """Takes what all ranks know: the rank that trained a sample need not be the one that made it."""
        parts = self._comm.all_gather_object((self._values, self._rewards))
        self._values, self._rewards = {}, {}
        self._all_values = {key: values for part, _ in parts for key, values in part.items()}
        self._all_rewards = {key: values for _, part in parts for key, values in part.items()}

    def sample_columns(self, item: Experience) -> dict[str, Any]:
        """Returns the tokens and rewards of a sample. One that was not trained has no more than the engine knew."""
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
